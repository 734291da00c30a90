"""The map of a cluster: its nodes, and which of them serves each of the 16,384 slots.

Theory. The map is a hint. A node that does not serve the slot of a message names the node that does; if a node does not
answer, the client asks another node for the whole map. Each change of the map is noted as a move of slots, which
`_quarantine.slot_moves` judges before the next message about such a slot.

Rules.
(a) The client trusts a node by the rules of `_quarantine.primacy`: another node must name the node as a primary. A map
    counts as the statement of the node that sent the map, and of no other node.
(b) After each map the client reads the identities of the primaries that it does not know, and then the map again: a
    move counts as one without loss only if the client knew the new node when it asked for the map (see `SlotMove`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from interlock._client.error_texts import CLUSTER_RIGHTS
from interlock._connect.refusals import connection_error
from interlock._protocol.info import parse_info
from interlock._protocol.server import Disconnected, ServerError, is_transient, may_have_written
from interlock._quarantine.lossless import ask_server
from interlock._quarantine.primacy import TRUSTED_FOR
from interlock._quarantine.slot_moves import SlotMove
from interlock._servers.slots import SLOTS
from interlock.errors import ConfigError, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from interlock._connect.address import Address
    from interlock._protocol.runtime import AutoResetEvent, Runtime
    from interlock._protocol.server import PushHandler
    from interlock._quarantine.server_histories import Histories
    from interlock._quarantine.server_history import ServerHistory
    from interlock._servers.single import SingleServer

MAP_INTERVAL: Final = 0.25  # seconds between two maps
# Seconds from reading the identities to reading the map; each round waits longer by as many. The time until the client
# may read a map again is extra.
MEETING_PAUSE: Final = 0.1
MEETING_ROUNDS: Final = 40  # how often the client reads the identities at most, while a primary does not answer
NODE_TIMEOUT: Final = 1.0  # seconds that one node may take to send the map, or its identity
MAP_COMMANDS: Final = (("HELLO",), ("CLUSTER", "SLOTS"), ("CLUSTER", "INFO"))
SHARDED_SINCE: Final = 7  # the first version with sharded channels


class Node:
    """A node, as one client knows it."""

    __slots__ = ("address", "failed_at", "has_answered", "history", "named_at", "server")

    def __init__(self, address: Address, history: ServerHistory, server: SingleServer) -> None:
        self.address = address
        self.history = history
        self.server = server
        self.failed_at = 0.0  # when the node failed last; 0 once the node has answered since
        self.has_answered = False  # whether the node has answered since it became a primary or was last disconnected
        self.named_at = 0.0  # when the client last asked another node that named this one as a primary

    def note_disconnect(self, error: Disconnected, now: float) -> None:
        """Note that no reply arrived. An idle connection that the node has closed says nothing about the node."""
        if not error.stale:
            self.failed_at, self.has_answered = now, False

    def note_error(self, text: str, now: float) -> None:
        """Note an error reply: one that ends by itself is a failure of the node, unless only a slot migrates."""
        if is_transient(text) and not text.startswith("TRYAGAIN") and not may_have_written(text):
            self.failed_at = now


class SlotMap:
    """The nodes of a cluster as one client knows them, by slot."""

    def __init__(
        self,
        seeds: Sequence[Address],
        make: Callable[[Address, ServerHistory], SingleServer],
        runtime: Runtime,
        histories: Histories,
    ) -> None:
        self.serving: list[Node | None] = [None] * SLOTS  # by slot: the node that serves the slot, as the map says
        self.is_sharded = True  # whether the channel of a push is in the lock's slot
        self.push_handler: PushHandler | None = None  # of each node
        self.is_closed = False
        self._seeds = seeds
        self._make = make
        self._runtime = runtime
        self._histories = histories
        self._nodes: dict[str, Node] = {}
        self._replicas: list[Address] = []
        self._is_loaded = False
        self._start()

    def _start(self) -> None:
        self.importing: dict[int, Node] = {}  # the slots that are migrating, each with its target node
        self._next_map_at = 0.0  # the earliest time at which the client reads a map again
        self._loading: list[AutoResetEvent] | None = None  # the events of the callers that wait for the map
        self._learning = False

    @property
    def primaries(self) -> set[Node]:
        """The nodes that serve slots."""
        return {node for node in {*self.serving} if node is not None}

    async def node_of(self, slot: int, until: float) -> Node:
        """The node that serves this slot. Raises Disconnected if no node answers, ServerError if none serves it."""
        node = self.serving[slot]
        # Another event loop may have noted a move since this one read the map.
        if node is None or node.failed_at or self._histories.served[slot] is not node.history:
            await self.load(until)
            node = self.serving[slot]
            if node is None:
                raise ServerError(f"CLUSTERDOWN no node serves slot {slot}")
        return node

    def redirected_to(self, text: str, by: Node) -> Node:
        """The node that a redirection names: MOVED 3999 127.0.0.1:6381."""
        host, _, port = text.split(" ")[2].rpartition(":")
        node = self.node(_address(by.address, host, int(port)))
        node.named_at = self._runtime.now()
        return node

    def node(self, address: Address) -> Node:
        """The node at this address. Raises Disconnected once the client is closed."""
        with self._runtime.mutex:
            node = self._nodes.get(address.display_url)
            if node is None:
                if self.is_closed:  # nothing would close the connections of a new node
                    raise Disconnected("it is closed", sent=False)
                history = self._histories.of(address)
                node = self._nodes[address.display_url] = Node(address, history, self._make(address, history))
                node.server.primacy.other_nodes = partial(self._is_named, node)
                if self.push_handler is not None:
                    node.server.push_handler = self.push_handler
        return node

    async def note_moved(self, text: str, slot: int, by: Node, until: float) -> Node:
        """The node to which a MOVED redirection leads, which serves this slot from now on."""
        target = self.redirected_to(text, by)
        if self._runtime.now() >= self._next_map_at:
            await self.load(until, target)
        with self._runtime.mutex:
            old = self._histories.served[slot]
            if old is not None and old is not target.history:
                self._note_move(slot, SlotMove(old, target.history, self._runtime.now()))
            self._histories.served[slot], self.serving[slot] = target.history, target
        return target

    def _note_move(self, slot: int, move: SlotMove) -> None:
        self.importing.pop(slot, None)
        # A move from a node that the client never met is no evidence. But the last move in the list must lead to the
        # node that serves the slot now: the client asks that node, and a former one may be a replica for ever.
        counts = move.source_stamp.identity or slot in self._histories.moves
        if counts and self._histories.quarantine_seconds is not None:
            self._histories.moves.setdefault(slot, []).append(move)

    # The map

    async def load(self, until: float, ask_first: Node | None = None) -> None:
        """Load a new map, unless the current map is newer than `MAP_INTERVAL`.

        One caller reads the map, and the callers that arrive meanwhile wait for the result.
        """
        with self._runtime.mutex:
            if self._is_loaded and self._loading is None and self._runtime.now() < self._next_map_at:
                return
            loaded = None
            if self._loading is None:
                self._loading = []
            else:
                self._loading.append(loaded := self._runtime.event())
        if loaded is not None:
            await loaded.wait(until)
            if not self._is_loaded:
                raise Disconnected("no map of the cluster yet", sent=False)
            return
        try:
            identities = {node: node.history.latest.identity for node in list(self._nodes.values())}
            seed, slots, asked_at = await self._read(until, ask_first)
            self._apply(seed, slots, identities, asked_at)
        except Disconnected:
            if not self._is_loaded:
                raise
        finally:
            with self._runtime.mutex:
                self._next_map_at = self._runtime.now() + MAP_INTERVAL
                waiting, self._loading = self._loading or (), None
            for event in waiting:
                event.set()

    async def _read(self, until: float, ask_first: Node | None) -> tuple[Address, list[Any], float]:
        """The address of the node that sent the map, the map, and when the client asked for the map.

        The map of the first node whose cluster state is ok counts. If no state is ok, the first map counts, with the
        time 0.
        """
        nodes = sorted(self.primaries, key=lambda node: node.failed_at)
        nodes = [ask_first, *nodes] if ask_first else nodes
        addresses = {each.display_url: each for each in (*(node.address for node in nodes), *self._seeds)}
        addresses |= {history.address.display_url: history.address for history in {*self._histories.served} if history}
        second: tuple[Address, list[Any], float] | None = None
        errors: list[Exception] = []
        for address in addresses.values():
            asked_at = self._runtime.now()
            within = min(NODE_TIMEOUT, until - asked_at)
            if within <= 0:
                break
            try:
                hello, slots, info = await self._runtime.run_blocking(
                    partial(ask_server, address, within, *MAP_COMMANDS)
                )
                if isinstance(hello, ResponseError):
                    raise hello
            except Exception as error:  # noqa: BLE001 (raised below, if no other node answers)
                errors.append(connection_error(error, address))
                if node := self._nodes.get(address.display_url):  # the next reader of the map asks other nodes first
                    node.failed_at = self._runtime.now()
                continue
            if error_replies := [str(reply) for reply in (slots, info) if isinstance(reply, ResponseError)]:
                errors.append(_map_error(error_replies[0], address))
                continue
            self.is_sharded = _version(hello) >= SHARDED_SINCE
            if _is_state_ok(info):
                return address, slots, asked_at
            second = second or (address, slots, 0.0)  # the map of such a node confirms no primary
        if second is not None:
            return second
        user_errors = [error for error in errors if isinstance(error, LockError)]
        no_answer = Disconnected("no time", sent=False, timed_out=True)
        raise (*user_errors, *errors, no_answer)[0]

    def _apply(self, seed: Address, slots: list[Any], identities: Mapping[Node, str], asked_at: float) -> None:
        """Use this map from now on.

        `asked_at`: when the client asked for the map. `identities`: the identities of the nodes that the client knew
        before that: see `SlotMove`.
        """
        new_map: list[Node | None] = [None] * SLOTS
        replicas: list[Address] = []
        for first, last, primary, *others in slots:
            primary_node = self.node(address_in_map(seed, primary))
            new_map[first : last + 1] = [primary_node] * (last - first + 1)
            replicas += [address_in_map(seed, each) for each in others]
            if primary_node.address.display_url != seed.display_url:
                primary_node.named_at = max(primary_node.named_at, asked_at)
        self._replicas = replicas
        moves: dict[tuple[ServerHistory, ServerHistory], SlotMove] = {}
        with self._runtime.mutex:
            served = self._histories.served or [None] * SLOTS
            for slot, old in enumerate(served):
                node = new_map[slot]
                if node is None:
                    new_map[slot] = self.serving[slot]  # the old node will redirect each message, or refuse it
                    continue
                new = served[slot] = node.history
                if old is not None and old is not new:
                    move = moves.get((old, new)) or moves.setdefault(
                        (old, new), SlotMove(old, new, self._runtime.now())
                    )
                    self._note_move(slot, move)
            self._histories.served, self.serving, self._is_loaded = served, new_map, True
            primaries = {*new_map}
            for node in list(self._nodes.values()):
                node.history.identity_at_map = identities.get(node, "")
                if node not in primaries:
                    node.server.pool.unsubscribe_all()
                    node.has_answered = False  # a node that serves slots again has another identity
        must_learn = (
            self.push_handler is not None
            and self._histories.quarantine_seconds is not None
            and not (self._learning or self.is_closed)
        )
        if must_learn and self._unidentified():
            self._learning = True
            try:
                self._runtime.spawn(self._learn_identities, "interlock-identities", self._identities_learned)
            except BaseException:
                self._learning = False
                raise

    def _is_named(self, node: Node, within: float) -> bool:
        """Whether another node names this node as a primary. Blocks, for about `within` seconds.

        Raises Disconnected if no other node with cluster state ok answers. A node that is not in the map counts as
        named: the client only uses such a node because another node redirected a message there.
        """
        started_at = self._runtime.now()
        primaries = self.primaries
        if started_at - node.named_at <= TRUSTED_FOR or node not in primaries:
            return True
        others = {
            each.address.display_url: each for each in sorted(primaries - {node}, key=lambda each: each.failed_at)
        }
        addresses = {each.display_url: each for each in (*(each.address for each in others.values()), *self._replicas)}
        addresses.pop(node.address.display_url, None)
        for left, address in zip(range(len(addresses), 0, -1), addresses.values(), strict=True):
            asked_at = self._runtime.now()
            share = min(NODE_TIMEOUT, max(0.001, started_at + within - asked_at) / left)
            try:
                _, slots, info = ask_server(address, share, *MAP_COMMANDS)
            except Exception:  # noqa: BLE001 (the next node may answer)
                if address.display_url in others:
                    others[address.display_url].failed_at = asked_at
                continue
            if not isinstance(slots, ResponseError) and _is_state_ok(info):
                named = {address_in_map(address, primary).display_url for _, _, primary, *_ in slots}
                for each in primaries - {others.get(address.display_url)}:
                    if each.address.display_url in named:
                        each.named_at = asked_at
                return node.address.display_url in named
        if not others:
            return True  # there is no other primary that could have voted for a replacement
        raise Disconnected("no other node whose cluster state is ok names the primary", sent=False)

    # The identities of its nodes

    def _unidentified(self) -> list[Node]:
        """The primaries whose identity may have changed since the client read the map.

        Last come those that have failed: they may answer again, and then nobody would read a map.
        """
        return [
            each
            for each in sorted(self.primaries, key=lambda node: node.failed_at)
            if not each.has_answered or each.history.identity_at_map != each.history.latest.identity
        ]

    async def _learn_identities(self) -> None:
        """Read the identities of all primaries, and the map after that: see `SlotMove`."""
        for number in range(MEETING_ROUNDS):
            for node in self._unidentified():
                if not node.has_answered:
                    with contextlib.suppress(Disconnected, LockError):
                        await node.server.current_identity(self._runtime.now() + NODE_TIMEOUT)
                        node.has_answered = True
            await self._runtime.sleep_until(
                max(self._runtime.now(), self._next_map_at) + min(NODE_TIMEOUT, MEETING_PAUSE * (1 + number))
            )
            unidentified = self._unidentified()
            if self.is_closed or not unidentified:
                return
            if any(node.has_answered for node in unidentified):
                with contextlib.suppress(Disconnected, LockError):
                    await self.load(self._runtime.now() + NODE_TIMEOUT)

    def _identities_learned(self) -> None:
        self._learning = False

    # Closing

    async def close(self) -> None:
        """Close the connections to all nodes."""
        with self._runtime.mutex:
            self.is_closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            await node.server.close()

    def reset_after_fork(self) -> None:
        """In a child after a fork: drop the connections to all nodes, which belong to the parent."""
        for node in self._nodes.values():
            node.server.reset_after_fork()
        self._start()


def _version(hello: Any) -> int:
    """The major version of a server, by its reply to HELLO. Valkey began with 7.2."""
    fields: dict[bytes, bytes] = dict(zip(hello[::2], hello[1::2], strict=False))
    return int(fields.get(b"version", b"0").split(b".")[0])


def _map_error(text: str, address: Address) -> Exception:
    """The error for a node that refused to send the map."""
    if "unknown command" in text:
        return ConfigError(
            f"{address.display_url} is no node of a cluster: it has no command CLUSTER. Is it a sentinel? Name "
            "sentinels in a URL redis+sentinel://h1:26379,h2:26379/0?service=mymaster"
        )
    if "cluster support disabled" in text:
        return ConfigError(
            f"{address.display_url} is no node of a cluster. Use a URL redis://, or a client of one server"
        )
    if is_transient(text):
        return Disconnected(text, sent=False)
    return ConfigError(
        f"{address.display_url} does not report its slots [{text}]. Give this user the rights {CLUSTER_RIGHTS}, on "
        "every node"
    )


def _address(by: Address, host: str, port: int) -> Address:
    """The address of a node, by the host and port that the node `by` reports."""
    return replace(by.at(host if host not in ("", "?") else by.parameters["host"], port), clustered=True)


def address_in_map(by: Address, entry: Sequence[Any]) -> Address:
    """The address of a node, by its entry in a map."""
    host, port, *_ = entry
    return _address(by, (host or b"").decode(), port)


def _is_state_ok(info: Any) -> bool:
    """Whether a node reports the cluster state ok, by its CLUSTER INFO."""
    return "ok" in parse_info(info).get("cluster_state", "ok")
