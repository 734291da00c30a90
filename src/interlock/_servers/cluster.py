"""A cluster: a server for each node, and a map from each of the 16,384 slots to the node that serves it.

Theory. All keys of a lock are in one slot, so each message belongs to one node at a time. The map is a hint. A node
that does not serve the slot of a message names the node that does (MOVED, or ASK while the slot is migrating). If a
node does not answer, the client asks another node for the whole map. This module serves threads and asyncio: the
runtime supplies clock, events and background work.

Rules.
(a) A message never waits for a node that does not serve its slot: `call_many` sends the messages of all nodes before it
    reads any reply, and it sends to a node that is not connected, or failed lately, after all other nodes.
(b) Pushes: from version 7.0 on, the channel of a lock is in the lock's slot (SPUBLISH), so a push costs one shard only.
    Before 7.0, the channel is the session's channel on the node that serves the lock: only that node knows whether
    the client is subscribed there.
(c) Quarantine: an identity belongs to a node, but a slot may move. The slot moved without loss if the old node is still
    the primary that it was, and the client knew the new node before the move. Then the new node trusts records that the
    old node wrote. In any other case, the leases that the old node granted may be lost.
    Each move behind a noted one is noted, too: the last one leads to the node that serves the slot. What a node that
    the client never met has granted may be lost.
(d) The client trusts a node by the rules of `_quarantine.primacy`: another node must name the node as a primary. A map
    counts as the statement of the node that sent the map, and of no other node.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from interlock._client.error_texts import CLUSTER_RIGHTS
from interlock._connect.refusals import connection_error
from interlock._protocol.info import parse_info
from interlock._protocol.timing import DRIFT, RETRY_FOR
from interlock._protocol.types import (
    AckedReply,
    Argument,
    AutoResetEvent,
    Disconnected,
    Message,
    PushHandler,
    Reply,
    Route,
    Runtime,
    Script,
    ServerError,
    is_transient,
    may_have_written,
)
from interlock._quarantine.identity import identity_of
from interlock._quarantine.lossless import ask_server, least_ttl, read_server
from interlock._quarantine.primacy import TRUSTED_FOR
from interlock._quarantine.slot_history import SlotHistory, lossless_entry, lossless_through
from interlock._quarantine.slot_move import SlotMove
from interlock._quarantine.stamp import RETURNED
from interlock._servers.single import connected_clients
from interlock._servers.slots import SLOTS, slot_of, tag_of
from interlock.errors import ConfigError, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from interlock._connect.address import Address
    from interlock._connect.clusters import Cluster
    from interlock._protocol.acks import Acks
    from interlock._quarantine.histories import Histories
    from interlock._quarantine.history import ServerHistory
    from interlock._servers.single import SentBatch, SingleServer

MAX_REDIRECTIONS: Final = 5  # redirections of one message
MAP_INTERVAL: Final = 0.25  # seconds between two maps
# Seconds from reading the identities to reading the map. The time until the client may read a map again is extra.
MEETING_PAUSE: Final = 0.1
MEETING_ROUNDS: Final = 40  # so often at most the client reads the identities, while a primary does not answer
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
        self.has_answered = False  # whether the node has answered since it last became a primary
        self.named_at = 0.0  # when the client last asked another node that named this one as a primary


class ClusterServer:
    """All nodes of a cluster, as one server."""

    is_quorum = False
    can_fail_over = True
    majority = 1
    drift = DRIFT

    def __init__(
        self,
        cluster: Cluster,
        make: Callable[[Address, ServerHistory], SingleServer],
        runtime: Runtime,
        histories: Histories,
    ) -> None:
        self.cluster = cluster
        self.display_url = cluster.display_url
        self.make = make
        self.histories = histories
        self.runtime = runtime
        self._push_handler: PushHandler | None = None
        self._nodes: dict[str, Node] = {}
        self._map: list[Node | None] = [None] * SLOTS
        self._replicas: list[Address] = []
        self._moves = histories.moves
        self._loaded = False
        self._sharded = True
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._next_map_at = 0.0  # the earliest time at which the client reads a map again
        self._loading: list[AutoResetEvent] | None = None  # the events of the callers that wait for the map
        self._learning = False
        self._channels: dict[int, str] = {}
        self._importing: dict[int, Node] = {}  # the slots that are migrating, each with its target node

    @property
    def retry_for(self) -> float:
        """See Server. A client that has once read a map allows the cluster the time of a failover."""
        return self.cluster.seeds[0].retry_for if self.histories.served else RETRY_FOR

    @property
    def push_handler(self) -> PushHandler:
        """The handler to which the nodes pass each push."""
        assert self._push_handler is not None
        return self._push_handler

    @push_handler.setter
    def push_handler(self, handler: PushHandler) -> None:
        self._push_handler = handler

    # Calls

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Reply:
        """See Server."""
        slot = slot_of(keys[0])
        node = self._map[slot]
        if node is None or node.failed_at or slot in self._moves:
            node = await self._node_of(slot, until)
            args = self._with_right_channel(args, slot)
        try:
            reply = await node.server.call(script, keys, args, until, slot)
            node.failed_at = 0.0
            return reply  # noqa: TRY300 (the shortest way is for the usual case)
        except Disconnected as error:
            self._note_disconnect(node, error)
            raise
        except ServerError as error:
            return await self._follow(str(error), (script, keys, args), slot, node, until)

    async def call_with_acks(self, message: Message, until: float, acks: Acks, ack_timeout: float) -> AckedReply:
        """See Server. While the slot is migrating, the call fails with TRYAGAIN."""
        slot, text = slot_of(message[1][0]), ""
        for _ in range(MAX_REDIRECTIONS):
            node = await self._node_of(slot, until)
            message = *message[:2], self._with_right_channel(message[2], slot)
            try:
                reply = await node.server.call_with_acks(message, until, acks, ack_timeout, slot)
            except Disconnected as error:
                self._note_disconnect(node, error)
                raise
            except ServerError as error:
                text = str(error)
            else:
                node.failed_at = 0.0
                return reply
            if text.startswith("ASK "):
                break
            if not text.startswith("MOVED "):
                if is_transient(text):
                    self._note_failure(node, text)
                raise ServerError(text)
            await self._on_moved(text, slot, node, until)
        raise ServerError(f"TRYAGAIN [{text}]")

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Reply | Exception]:
        """See Server."""
        replies: list[Reply | Exception] = [()] * len(messages)
        slots = [slot_of(keys[0]) for _, keys, _ in messages]
        groups, single = self._grouped(range(len(messages)), slots)
        of_failed_nodes = [i for node in [*groups] if node.failed_at for i in groups.pop(node)]
        single += await self._sent(groups, messages, slots, replies, until)
        if of_failed_nodes:  # last of all: another node may serve these slots by now
            with contextlib.suppress(Disconnected, LockError):
                await self._load_map(until)
            groups, also_single = self._grouped(of_failed_nodes, slots)
            single += also_single + await self._sent(groups, messages, slots, replies, until)
        for i in single:
            try:
                replies[i] = await self.call(*messages[i], until)
            except Exception as error:  # noqa: BLE001 (one of many: see Server)
                replies[i] = error
        return replies

    def _grouped(self, which: Iterable[int], slots: Sequence[int]) -> tuple[dict[Node, list[int]], list[int]]:
        """The indexes of the messages by node, and of those messages whose node or slot history is not known yet."""
        groups: dict[Node, list[int]] = {}
        single: list[int] = []
        for i in which:
            node = self._map[slots[i]]
            if node is None or slots[i] in self._moves:
                single.append(i)
            else:
                groups.setdefault(node, []).append(i)
        return groups, single

    async def _sent(
        self,
        groups: dict[Node, list[int]],
        messages: Sequence[Message],
        slots: Sequence[int],
        replies: list[Reply | Exception],
        until: float,
    ) -> list[int]:
        """Send to each node its own messages, and store the replies. Returns the indexes of redirected messages."""
        sent: list[tuple[Node, list[int], SentBatch]] = []
        redirected: list[int] = []
        order = sorted(groups, key=lambda node: (not node.server.ready, node.failed_at))
        for left, node in zip(range(len(order), 0, -1), order, strict=True):
            limit = until if node.server.ready else self.runtime.now() + (until - self.runtime.now()) / left
            indexes = groups[node]
            batch = await node.server.send_batch([messages[i] for i in indexes], limit, [slots[i] for i in indexes])
            sent.append((node, indexes, batch))
        for node, indexes, batch in sent:
            for i, reply in zip(indexes, await node.server.read_batch(batch), strict=True):
                replies[i] = reply
                if isinstance(reply, Disconnected):
                    self._note_disconnect(node, reply)
                elif isinstance(reply, ServerError):
                    if str(reply).startswith(("MOVED", "ASK")):
                        redirected.append(i)
                    elif is_transient(str(reply)):
                        self._note_failure(node, str(reply))
                else:
                    node.failed_at = 0.0
        return redirected

    def send(self, message: Message) -> None:
        """See Server. The reply could be a redirection, which only a caller that waits can follow."""

    async def prove_lossless(self, keys: Sequence[str | bytes], lost_identity: str, until: float) -> bool:
        """See Server."""
        with contextlib.suppress(Disconnected, ServerError, LockError):  # then there is no proof
            slot = slot_of(keys[0])
            node = await self._node_of(slot, until)
            return await node.server.prove_lossless(keys, lost_identity, until, slot)
        return False

    def old_primary_may_still_grant(self, key: str) -> str:
        """See Server."""
        slot = slot_of(key)
        node = self._map[slot]
        return node.server.old_primary_may_still_grant(key, slot) if node else ""

    def route(self, key: str) -> Route:
        """See Server."""
        slot = slot_of(key)
        node = self._map[slot]
        return Route(node and node.address.display_url, slot)

    async def _follow(self, text: str, message: Message, slot: int, node: Node, until: float) -> Reply:
        """Follow a redirection and return the reply of its node. Raises ServerError if `text` is no redirection."""
        for _ in range(MAX_REDIRECTIONS):
            asking = text.startswith("ASK ")
            if not asking and not text.startswith("MOVED "):
                if is_transient(text):
                    self._note_failure(node, text)
                break
            node = await (self._on_ask if asking else self._on_moved)(text, slot, node, until)
            try:
                if asking:
                    return await node.server.call_asking(message, until, slot)
                return await node.server.call(*message, until, slot)
            except Disconnected as error:
                self._note_disconnect(node, error)
                raise
            except ServerError as error:
                text = str(error)
        else:
            text = f"TRYAGAIN each node redirects to another one [{text}]"
        raise ServerError(text)

    async def _on_moved(self, text: str, slot: int, node: Node, until: float) -> Node:
        """The node that serves this slot now, by a MOVED redirection."""
        target = self._redirected_to(text, node)
        if self.runtime.now() >= self._next_map_at:
            await self._load_map(until, target)
        with self.runtime.mutex:
            old = self.histories.served[slot]
            if old is not None and old is not target.history:
                self._moved(slot, SlotMove(old, target.history, self.runtime.now()))
            self.histories.served[slot], self._map[slot] = target.history, target
        if slot in self._moves:
            await self._process_moves(slot, until)
        return target

    async def _on_ask(self, text: str, slot: int, node: Node, until: float) -> Node:
        """The node to which this slot is migrating, by an ASK redirection."""
        target = self._redirected_to(text, node)
        if self._importing.get(slot) is not target:
            await self._learn_slot_history(
                slot, target, [SlotMove(node.history, target.history, self.runtime.now())], until
            )
            self._importing[slot] = target
        return target

    def _redirected_to(self, text: str, by: Node) -> Node:
        """The node that a redirection names: MOVED 3999 127.0.0.1:6381."""
        host, _, port = text.split(" ")[2].rpartition(":")
        node = self._node(_address(by.address, host, int(port)))
        node.named_at = self.runtime.now()
        return node

    def _node(self, address: Address) -> Node:
        with self.runtime.mutex:
            node = self._nodes.get(address.display_url)
            if node is None:
                if self._closed:  # nothing would close the connections of a new node
                    raise Disconnected("it is closed", sent=False)
                history = self.histories.of(address)
                node = self._nodes[address.display_url] = Node(address, history, self.make(address, history))
                node.server.primacy.other_nodes = partial(self._is_named, node)
                if self._push_handler is not None:
                    node.server.push_handler = self._push_handler
        return node

    def _note_disconnect(self, node: Node, error: Disconnected) -> None:
        if not error.stale:
            node.failed_at, node.has_answered = self.runtime.now(), False

    def _note_failure(self, node: Node, text: str) -> None:
        # While the slot migrates, the node itself has not failed.
        if not text.startswith("TRYAGAIN") and not may_have_written(text):
            node.failed_at = self.runtime.now()

    # The map

    async def _node_of(self, slot: int, until: float) -> Node:
        """The node that serves this slot. Raises Disconnected if no node answers, ServerError if none serves it."""
        node = self._map[slot]
        # Another event loop may have noted a move since this one read the map.
        if node is None or node.failed_at or self.histories.served[slot] is not node.history:
            await self._load_map(until)
            node = self._map[slot]
            if node is None:
                raise ServerError(f"CLUSTERDOWN no node serves slot {slot}")
        if slot in self._moves:
            await self._process_moves(slot, until)
        return node

    async def _load_map(self, until: float, ask_first: Node | None = None) -> None:
        """Load a new map, unless the current map is newer than `MAP_INTERVAL`.

        One caller reads the map, and the callers that arrive meanwhile wait for the result.
        """
        with self.runtime.mutex:
            if self._loaded and self._loading is None and self.runtime.now() < self._next_map_at:
                return
            loaded = None
            if self._loading is None:
                self._loading = []
            else:
                self._loading.append(loaded := self.runtime.event())
        if loaded is not None:
            await loaded.wait(until)
            if not self._loaded:
                raise Disconnected("no map of the cluster yet", sent=False)
            return
        try:
            identities = {node: node.history.latest.identity for node in list(self._nodes.values())}
            seed, slots, asked_at = await self._read_map(until, ask_first)
            self._apply_map(seed, slots, identities, asked_at)
        except Disconnected:
            if not self._loaded:
                raise
        finally:
            with self.runtime.mutex:
                self._next_map_at = self.runtime.now() + MAP_INTERVAL
                waiting, self._loading = self._loading or (), None
            for event in waiting:
                event.set()

    async def _read_map(self, until: float, ask_first: Node | None) -> tuple[Address, list[Any], float]:
        """The address of the node that sent the map, the map, and when the client asked for the map.

        The map of the first node whose cluster state is ok counts. If there is none, any map counts, with the time 0.
        """
        nodes = sorted((node for node in {*self._map} if node), key=lambda node: node.failed_at)
        nodes = [ask_first, *nodes] if ask_first else nodes
        addresses = {each.display_url: each for each in (*(node.address for node in nodes), *self.cluster.seeds)}
        addresses |= {history.address.display_url: history.address for history in {*self.histories.served} if history}
        second: tuple[Address, list[Any], float] | None = None
        errors: list[Exception] = []
        for address in addresses.values():
            asked_at = self.runtime.now()
            within = min(NODE_TIMEOUT, until - asked_at)
            if within <= 0:
                break
            try:
                hello, slots, info = await self.runtime.run_blocking(
                    partial(ask_server, address, within, *MAP_COMMANDS)
                )
                if isinstance(hello, ResponseError):
                    raise hello
            except Exception as error:  # noqa: BLE001 (raised below, if no other node answers)
                errors.append(connection_error(error, address))
                if node := self._nodes.get(address.display_url):  # the next reader of the map asks other nodes first
                    node.failed_at = self.runtime.now()
                continue
            if error_replies := [str(reply) for reply in (slots, info) if isinstance(reply, ResponseError)]:
                errors.append(_map_error(error_replies[0], address))
                continue
            self._sharded = _version(hello) >= SHARDED_SINCE
            if _is_state_ok(info):
                return address, slots, asked_at
            second = second or (address, slots, 0.0)  # the map of such a node confirms no primary
        if second is not None:
            return second
        user_errors = [error for error in errors if isinstance(error, LockError)]
        no_answer = Disconnected("no time", sent=False, timed_out=True)
        raise (*user_errors, *errors, no_answer)[0]

    def _apply_map(self, seed: Address, slots: list[Any], identities: Mapping[Node, str], asked_at: float) -> None:
        """Use this map from now on.

        `identities`: those that the nodes had before `asked_at`, when the client asked for the map: see `SlotMove`.
        """
        new_map: list[Node | None] = [None] * SLOTS
        replicas: list[Address] = []
        for first, last, primary, *others in slots:
            primary_node = self._node(_address_in_map(seed, primary))
            new_map[first : last + 1] = [primary_node] * (last - first + 1)
            replicas += [_address_in_map(seed, each) for each in others]
            if primary_node.address.display_url != seed.display_url:
                primary_node.named_at = max(primary_node.named_at, asked_at)
        self._replicas = replicas
        moves: dict[tuple[ServerHistory, ServerHistory], SlotMove] = {}
        with self.runtime.mutex:
            served = self.histories.served or [None] * SLOTS
            for slot, old in enumerate(served):
                node = new_map[slot]
                if node is None:
                    new_map[slot] = self._map[slot]  # the old node will redirect each message, or refuse it
                    continue
                new = served[slot] = node.history
                if old is not None and old is not new:
                    move = moves.get((old, new)) or moves.setdefault((old, new), SlotMove(old, new, self.runtime.now()))
                    self._moved(slot, move)
            self.histories.served, self._map, self._loaded = served, new_map, True
            primaries = {*new_map}
            for node in list(self._nodes.values()):
                node.history.identity_at_map = identities.get(node, "")
                if node not in primaries:
                    node.server.pool.unsubscribe_all()
                    node.has_answered = False  # a node that serves slots again has another identity
        must_learn = (
            self._push_handler is not None
            and self.histories.quarantine_seconds is not None
            and not (self._learning or self._closed)
        )
        if must_learn and self._unidentified():
            self._learning = True
            try:
                self.runtime.spawn(self._learn_identities, "interlock-identities", self._identities_learned)
            except BaseException:
                self._learning = False
                raise

    def _is_named(self, node: Node, within: float) -> bool:
        """Whether another node names this node as a primary. Blocks, for about `within` seconds.

        Raises Disconnected if no other node with cluster state ok answers. A node that is not in the map counts as
        named: the client only uses such a node because another node redirected a message there.
        """
        started_at = self.runtime.now()
        primaries = {each for each in self._map if each is not None}
        if started_at - node.named_at <= TRUSTED_FOR or node not in primaries:
            return True
        others = {
            each.address.display_url: each for each in sorted(primaries - {node}, key=lambda each: each.failed_at)
        }
        addresses = {each.display_url: each for each in (*(each.address for each in others.values()), *self._replicas)}
        addresses.pop(node.address.display_url, None)
        for left, address in zip(range(len(addresses), 0, -1), addresses.values(), strict=True):
            asked_at = self.runtime.now()
            share = min(NODE_TIMEOUT, max(0.001, started_at + within - asked_at) / left)
            try:
                _, slots, info = ask_server(address, share, *MAP_COMMANDS)
            except Exception:  # noqa: BLE001 (the next node may answer)
                if address.display_url in others:
                    others[address.display_url].failed_at = asked_at
                continue
            if not isinstance(slots, ResponseError) and _is_state_ok(info):
                named = {_address_in_map(address, primary).display_url for _, _, primary, *_ in slots}
                for each in primaries - {others.get(address.display_url)}:
                    if each.address.display_url in named:
                        each.named_at = asked_at
                return node.address.display_url in named
        if not others:
            return True  # there is no other primary that could have voted for a replacement
        raise Disconnected("no other node whose cluster state is ok names the primary", sent=False)

    # Quarantine

    def _unidentified(self) -> list[Node]:
        """The primaries that answer, and whose identity may have changed since the client read the map."""
        primaries = [node for node in {*self._map} if node is not None and not node.failed_at]
        return [
            each
            for each in primaries
            if not each.has_answered or each.history.identity_at_map != each.history.latest.identity
        ]

    async def _learn_identities(self) -> None:
        """Read the identities of all primaries, and the map after that: see `SlotMove`."""
        for number in range(MEETING_ROUNDS):
            for node in self._unidentified():
                if not node.has_answered:
                    with contextlib.suppress(Disconnected, LockError):
                        await node.server.current_identity(self.runtime.now() + NODE_TIMEOUT)
                        node.has_answered = True
            await self.runtime.sleep_until(
                max(self.runtime.now(), self._next_map_at) + min(NODE_TIMEOUT, MEETING_PAUSE * (1 + number))
            )
            unidentified = self._unidentified()
            if self._closed or not unidentified:
                return
            if any(node.has_answered for node in unidentified):
                with contextlib.suppress(Disconnected, LockError):
                    await self._load_map(self.runtime.now() + NODE_TIMEOUT)

    def _identities_learned(self) -> None:
        self._learning = False

    def _moved(self, slot: int, move: SlotMove) -> None:
        self._importing.pop(slot, None)
        # A move from a node that the client never met is no evidence. But the last move in the list must lead to the
        # node that serves the slot now: the client asks that node, and a former one may be a replica for ever.
        counts = move.source_stamp.identity or slot in self._moves
        if counts and self.histories.quarantine_seconds is not None:
            self._moves.setdefault(slot, []).append(move)

    async def _process_moves(self, slot: int, until: float) -> None:
        """Before the first message about a slot that has moved, learn the slot history."""
        while moves := self._moves.get(slot):
            number = len(moves)
            await self._learn_slot_history(slot, self._node(moves[-1].target.address), list(moves), until)
            with self.runtime.mutex:
                if len(moves) == number and self._moves.get(slot) is moves:  # else another caller was faster
                    self._moves.pop(slot, None)

    async def _learn_slot_history(self, slot: int, node: Node, moves: list[SlotMove], until: float) -> None:
        try:
            stamp = await node.server.current_identity(until)
        except Disconnected as error:
            self._note_disconnect(node, error)
            raise
        slot_history: SlotHistory | None = None
        known = ""
        for move in moves:
            known = move.source_stamp.identity or known
            slot_history = await self._history_after(move, known, slot, slot_history, until)
        if slot_history is not None and stamp.facts is not None and stamp.quarantine_seconds is not None:
            stamp.set_slot_history(slot, slot_history)

    async def _history_after(
        self, move: SlotMove, old_identity: str, slot: int, slot_history: SlotHistory | None, until: float
    ) -> SlotHistory | None:
        """The slot history after this move, and before it `slot_history`; None if nothing is known of any server.

        `old_identity` is that of the source; if the client never met the source, that of the last server before it.
        """
        target = move.target.latest
        if not old_identity:
            return None
        if not move.source_stamp.identity:
            # No proof about the server before shows what the source granted. And that server may be the target again.
            old_identity, move.least_ttl = f"{RETURNED}{old_identity}", math.inf
        if (least := move.least_ttl) is None:
            within = min(NODE_TIMEOUT, max(0.05, until - self.runtime.now()))
            least = move.least_ttl = await self.runtime.run_blocking(
                partial(_least_kept_ttl, move, within, old_identity)
            )
        before = slot_history or move.source_stamp.slot_history(slot)
        if least < math.inf and move.target_identity and move.target_identity == target.identity:
            lossless_from = (lossless_entry(old_identity, least), *lossless_through(before.lossless_from, least))
            since = move.noticed_at if least else before.since  # shorter leases may have been lost by this move
            returned = RETURNED if before.previous == target.identity else ""  # what was lost was granted in between
            return SlotHistory(f"{returned}{before.previous}", since, lossless_from, before.earlier)
        before = before._replace(earlier=None)
        # A node that never was a replica: the slot has been there no longer than the process has been running.
        if least == 0 and target.facts is not None and not target.facts.promoted:
            return SlotHistory(old_identity, target.latest_start, (), before)
        # The client may notice a move long before it first sends a message about the slot. What the target lost
        # meanwhile may be younger than the move.
        since = move.noticed_at if target.facts is None else max(move.noticed_at, target.latest_start)
        return SlotHistory(old_identity, since, (), before)

    # Pushes

    def _channel(self, slot: int) -> str:
        if not self._sharded:
            return self.push_handler.channel
        channel = self._channels.get(slot)
        if channel is None:
            channel = self._channels[slot] = self._sharded_channel(slot)
        return channel

    def _sharded_channel(self, slot: int) -> str:
        return f"{self.push_handler.channel}{{{tag_of(slot)}}}"

    def _with_right_channel(self, args: Sequence[Argument], slot: int) -> Sequence[Argument]:
        """These arguments, of which the first ones were encoded before a map has said that no channel is sharded."""
        if self._sharded:
            return args
        sharded, channel = self._sharded_channel(slot), self.push_handler.channel
        return tuple(channel if each == sharded else each for each in args)

    def subscription_of(self, key: str | bytes) -> tuple[str, str]:
        """See Server."""
        slot = slot_of(key)
        channel, node = self._channel(slot), self._map[slot]
        return "1" if node is not None and channel in node.server.pool.subscribed else "0", channel

    def ensure_subscribed(self, key: str) -> None:
        """See Server."""
        slot = slot_of(key)
        node = self._map[slot]
        if node is not None and not self._closed:
            node.server.pool.subscribe(self._channel(slot))

    # Closing

    async def connected_clients(self, until: float) -> int | None:
        """See Server."""
        return await connected_clients((node.server for node in {*self._map} if node is not None), until)

    async def close(self) -> None:
        """See Server."""
        with self.runtime.mutex:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            await node.server.close()

    def reset_after_fork(self) -> None:
        """In a child after fork: the open connections belong to the parent."""
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


def _address_in_map(by: Address, entry: Sequence[Any]) -> Address:
    """The address of a node, by its entry in a map."""
    host, port, *_ = entry
    return _address(by, (host or b"").decode(), port)


def _is_state_ok(info: Any) -> bool:
    """Whether a node reports the cluster state ok, by its CLUSTER INFO."""
    return "ok" in parse_info(info).get("cluster_state", "ok")


def _least_kept_ttl(move: SlotMove, within: float, identity: str) -> float:
    """The ttl for `SlotMove.least_ttl`. Blocks, for about `within` seconds a server.

    A key that moved keeps the time at which its lease ends, by the clock of the old node. So the clocks must agree.
    """
    source, target = read_server(move.source.address, within), read_server(move.target.address, within)
    if source is None or target is None or source.info.get("role") != "master" or identity_of(source.info) != identity:
        return math.inf
    return least_ttl(target, source, move.target.address.display_url, move.source_stamp.quarantine_seconds)
