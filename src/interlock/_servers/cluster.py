"""A cluster: a server for each node, and a map from each of the 16,384 slots to the node that serves it.

Theory. All keys of a lock are in one slot, so each message belongs to one node at a time: that of the map (`slot_map`).
A node that does not serve the slot of a message names the node that does: MOVED, or ASK while the slot is migrating.
After a move the client first learns the history of the slot (`_quarantine.slot_moves`). This module serves threads and
asyncio: the runtime supplies clock, events and background work.

Rules.
(a) A message never waits for a node that does not serve its slot: `call_many` sends the messages of all nodes before it
    reads any reply, and it sends to a node that is not connected, or failed lately, after all other nodes.
(b) Pushes: from version 7.0 on, the channel of a lock is in the lock's slot (SPUBLISH), so a push costs one shard only.
    Before 7.0, the channel is the session's channel on the node that serves the lock: only that node knows whether
    the client is subscribed there.
(c) Quarantine: an identity belongs to a node, but a slot may move. The slot moved without loss if the old node is still
    the primary that it was, and the client knew the new node before the move. Then the new node trusts records that the
    old node wrote. In any other case, the leases that the old node granted may be lost.
    The client notes each move after a noted one, too, since the last move must lead to the node that serves the slot.
    Leases that were granted by a node that the client never met may be lost.
(d) The client trusts a node by the rules of `_quarantine.primacy`: another node must name the node as a primary. A map
    counts as the statement of the node that sent the map, and of no other node.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from interlock._protocol.server import AckedReply, Disconnected, Message, PushHandler, Reply, Route, ServerError
from interlock._protocol.timing import DRIFT, RETRY_FOR
from interlock._quarantine.slot_moves import SlotMove, history_after
from interlock._servers.single import connected_clients
from interlock._servers.slot_map import Node, SlotMap
from interlock._servers.slots import slot_of, tag_of
from interlock.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from interlock._connect.address import Address
    from interlock._connect.clusters import Cluster
    from interlock._protocol.acks import Acks
    from interlock._protocol.resource import Argument, Script
    from interlock._protocol.runtime import Runtime
    from interlock._quarantine.server_histories import Histories
    from interlock._quarantine.server_history import ServerHistory
    from interlock._servers.single import SentBatch, SingleServer

MAX_REDIRECTIONS: Final = 5  # redirections of one message


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
        self.histories = histories
        self.runtime = runtime
        self.slots = SlotMap(cluster.seeds, make, runtime, histories)
        self._moves = histories.moves
        self._channels: dict[int, str] = {}

    @property
    def retry_for(self) -> float:
        """See Server. A client that has once read a map allows the cluster the time of a failover."""
        return self.cluster.retry_for if self.has_answered else RETRY_FOR

    @property
    def has_answered(self) -> bool:
        """See Server: whether the client has ever read a map."""
        return bool(self.histories.served)

    @property
    def push_handler(self) -> PushHandler:
        """The handler to which the nodes pass each push."""
        assert self.slots.push_handler is not None
        return self.slots.push_handler

    @push_handler.setter
    def push_handler(self, handler: PushHandler) -> None:
        self.slots.push_handler = handler

    # Calls

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Reply:
        """See Server."""
        slot = slot_of(keys[0])
        node = self.slots.serving[slot]
        if node is None or node.failed_at or slot in self._moves:
            node = await self._node_of(slot, until)
            args = self._with_right_channel(args, slot)
        try:
            reply = await node.server.call(script, keys, args, until, slot)
            node.failed_at = 0.0
            return reply  # noqa: TRY300 (the shortest way is for the usual case)
        except Disconnected as error:
            node.note_disconnect(error, self.runtime.now())
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
                node.note_disconnect(error, self.runtime.now())
                raise
            except ServerError as error:
                text = str(error)
            else:
                node.failed_at = 0.0
                return reply
            if text.startswith("ASK "):
                break
            if not text.startswith("MOVED "):
                node.note_error(text, self.runtime.now())
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
                await self.slots.load(until)
            groups, also_single = self._grouped(of_failed_nodes, slots)
            single += also_single + await self._sent(groups, messages, slots, replies, until)
        for i in single:
            try:
                replies[i] = await self.call(*messages[i], until)
            except Exception as error:  # noqa: BLE001 (one of many: see Server)
                replies[i] = error
        return replies

    def _grouped(self, which: Iterable[int], slots: Sequence[int]) -> tuple[dict[Node, list[int]], list[int]]:
        """The indexes of the messages by node, and of those messages whose node or slot history is still unknown."""
        groups: dict[Node, list[int]] = {}
        single: list[int] = []
        for i in which:
            node = self.slots.serving[slots[i]]
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
                    node.note_disconnect(reply, self.runtime.now())
                elif isinstance(reply, ServerError):
                    if str(reply).startswith(("MOVED", "ASK")):
                        redirected.append(i)
                    else:
                        node.note_error(str(reply), self.runtime.now())
                else:
                    node.failed_at = 0.0
        return redirected

    def send(self, message: Message) -> None:
        """See Server. Sends nothing: the reply could be a redirection, which only a caller that waits can follow."""

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
        node = self.slots.serving[slot]
        return node.server.old_primary_may_still_grant(key, slot) if node else ""

    def route(self, key: str) -> Route:
        """See Server."""
        slot = slot_of(key)
        node = self.slots.serving[slot]
        return Route(node and node.address.display_url, slot)

    async def _follow(self, text: str, message: Message, slot: int, node: Node, until: float) -> Reply:
        """Follow a redirection and return the reply of its node. Raises ServerError if `text` is no redirection."""
        for _ in range(MAX_REDIRECTIONS):
            asking = text.startswith("ASK ")
            if not asking and not text.startswith("MOVED "):
                node.note_error(text, self.runtime.now())
                break
            node = await (self._on_ask if asking else self._on_moved)(text, slot, node, until)
            try:
                if asking:
                    return await node.server.call_asking(message, until, slot)
                return await node.server.call(*message, until, slot)
            except Disconnected as error:
                node.note_disconnect(error, self.runtime.now())
                raise
            except ServerError as error:
                text = str(error)
        else:
            text = f"TRYAGAIN each node redirects to another one [{text}]"
        raise ServerError(text)

    async def _on_moved(self, text: str, slot: int, node: Node, until: float) -> Node:
        """The node that serves this slot now, by a MOVED redirection. Learns the slot's history first."""
        target = await self.slots.note_moved(text, slot, node, until)
        if slot in self._moves:
            await self._process_moves(slot, until)
        return target

    async def _on_ask(self, text: str, slot: int, node: Node, until: float) -> Node:
        """The node to which this slot is migrating, by an ASK redirection. Learns the slot's history there first."""
        target = self.slots.redirected_to(text, node)
        if self.slots.importing.get(slot) is not target:
            move = SlotMove(node.history, target.history, self.runtime.now())
            await self._learn_slot_history(slot, target, [move], until)
            self.slots.importing[slot] = target
        return target

    async def _node_of(self, slot: int, until: float) -> Node:
        """The node that serves this slot. Raises Disconnected if no node answers, ServerError if none serves it."""
        node = await self.slots.node_of(slot, until)
        if slot in self._moves:
            await self._process_moves(slot, until)
        return node

    async def _process_moves(self, slot: int, until: float) -> None:
        """Before the first message about a slot that has moved, learn the slot history."""
        while moves := self._moves.get(slot):
            number = len(moves)
            await self._learn_slot_history(slot, self.slots.node(moves[-1].target.address), list(moves), until)
            with self.runtime.mutex:
                if len(moves) == number and self._moves.get(slot) is moves:  # else another caller was faster
                    self._moves.pop(slot, None)

    async def _learn_slot_history(self, slot: int, node: Node, moves: list[SlotMove], until: float) -> None:
        """Learn the history that a slot has at this node after these moves."""
        try:
            stamp = await node.server.current_identity(until)
        except Disconnected as error:
            node.note_disconnect(error, self.runtime.now())
            raise
        slot_history = await history_after(moves, slot, self.runtime, until)
        if slot_history is not None and stamp.facts is not None and stamp.quarantine_seconds is not None:
            stamp.set_slot_history(slot, slot_history)

    # Pushes

    def _channel(self, slot: int) -> str:
        if not self.slots.is_sharded:
            return self.push_handler.channel
        channel = self._channels.get(slot)
        if channel is None:
            channel = self._channels[slot] = self._sharded_channel(slot)
        return channel

    def _sharded_channel(self, slot: int) -> str:
        return f"{self.push_handler.channel}{{{tag_of(slot)}}}"

    def _with_right_channel(self, args: Sequence[Argument], slot: int) -> Sequence[Argument]:
        """These arguments, with the session's channel in place of the sharded one if this cluster has none.

        A caller may have encoded the arguments before the client had read the first map.
        """
        if self.slots.is_sharded:
            return args
        sharded, channel = self._sharded_channel(slot), self.push_handler.channel
        return tuple(channel if each == sharded else each for each in args)

    def subscription_of(self, key: str | bytes) -> tuple[str, str]:
        """See Server."""
        slot = slot_of(key)
        channel, node = self._channel(slot), self.slots.serving[slot]
        return "1" if node is not None and channel in node.server.pool.subscribed else "0", channel

    def ensure_subscribed(self, key: str) -> None:
        """See Server."""
        slot = slot_of(key)
        node = self.slots.serving[slot]
        if node is not None and not self.slots.is_closed:
            node.server.pool.subscribe(self._channel(slot))

    # Closing

    async def connected_clients(self, until: float) -> int | None:
        """See Server."""
        return await connected_clients((node.server for node in self.slots.primaries), until)

    async def close(self) -> None:
        """See Server."""
        await self.slots.close()

    def reset_after_fork(self) -> None:
        """See Server."""
        self.slots.reset_after_fork()
        self._channels = {}
