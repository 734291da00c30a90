"""One server: script calls over the connections of a pool.

Theory. A client sends a script by its SHA1. A server that does not know the script (after a restart, a failover or an
eviction) replies NOSCRIPT and has run nothing: then the client sends the text. A call adds to its arguments the
identity stamp of the connection, by which the script compares the server with the one that wrote a record.

Rules.
(a) The client sends a message once. Only after NOSCRIPT it sends the message again, on the same connection.
(b) This module never sends a message of `send` again, for whose reply nobody waits: its sender gets NOSCRIPT as an
    error.
(c) `send_batch` and `read_batch` are two halves: a cluster or a quorum sends to all its servers before it waits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock._protocol.info import parse_info
from interlock._protocol.server import ONLY_ROUTE, AckedReply, Disconnected, Route, ServerError
from interlock._protocol.timing import DRIFT, FOREVER
from interlock._quarantine.lossless import least_lossless_ttl
from interlock._quarantine.primacy import Primacy
from interlock._quarantine.proofs import Proofs
from interlock._transports.connections import PendingReplies
from interlock._transports.resp import (
    ASKING,
    CLIENTS,
    PING,
    REPLICATION,
    ReplyError,
    eval_text,
    evalsha,
    is_logged_out,
    is_noscript,
    is_readonly,
    pack,
    stamped,
)
from interlock.primitives.messages import lengthens_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from interlock._connect.address import Address
    from interlock._protocol.acks import Acks
    from interlock._protocol.resource import Argument, Script
    from interlock._protocol.runtime import Runtime
    from interlock._protocol.server import Message, PushHandler, Reply
    from interlock._quarantine.server_history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp
    from interlock._transports.connections import Command, Connection, ConnectionPool


class SentBatch(NamedTuple):
    """Messages that were sent together. Their replies arrive on `connection`; without one, `pending` has the error."""

    messages: Sequence[Message]
    stamps: Sequence[str]
    until: float
    connection: Connection | None
    pending: PendingReplies

    @property
    def run_id(self) -> str:
        """The process that got the messages; "" if it did not say which it is."""
        facts = None if self.connection is None else self.connection.stamp.facts
        return facts.run_id if facts is not None else ""


class PendingCall(NamedTuple):
    """See SentCall. The reply, or the error in its place, will be in `pending`."""

    connection: Connection
    pending: PendingReplies

    @property
    def reply(self) -> Reply | Exception | None:
        """See SentCall."""
        pending = self.pending
        if pending.error is not None or not pending.replies:
            return pending.error
        # `_error_of` may drop all connections, so it is called once, and its result stands in place of the reply.
        if type(pending.replies[0]) is ReplyError:
            pending.replies[0] = _error_of(self.connection, pending.replies[0])
        reply: Any = pending.replies[0]
        return reply  # type: ignore[no-any-return]  # each script replies with a list

    async def read(self, until: float) -> None:
        """See SentCall."""
        if not self.pending.is_complete:
            await self.connection.read_unread(self.pending, until)


class SingleServer:
    """See Server. A `slot` is for a node of a cluster, whose identity stamp depends on the slot."""

    is_quorum = False
    majority = 1
    drift = DRIFT

    def __init__(
        self,
        address: Address,
        history: ServerHistory,
        runtime: Runtime,
        make_pool: Callable[[Address, ServerHistory, Primacy], ConnectionPool],
    ) -> None:
        self.address = address
        self.display_url = address.display_url
        self.retry_for = address.retry_for
        self.can_fail_over = address.can_fail_over
        self.history = history
        self.runtime = runtime
        self.primacy = Primacy(address)
        self.pool = make_pool(address, history, self.primacy)
        self._start()

    def _start(self) -> None:
        self._proofs = Proofs(self.runtime, self.history, self._lossless)
        # Whether to send the next batch with the texts of its scripts: the server may not know one of them.
        self.send_script_text = False

    @property
    def has_answered(self) -> bool:
        """See Server."""
        return self.history.has_answered

    @property
    def push_handler(self) -> PushHandler:
        """The handler that the pool calls for each push."""
        return self.pool.push_handler

    @push_handler.setter
    def push_handler(self, handler: PushHandler) -> None:
        self.pool.push_handler = handler

    # Calls

    async def call(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        slot: int | None = None,
    ) -> Reply:
        """See Server."""
        connection = self.pool.take() or await self.pool.checkout(until)
        try:
            stamp = connection.stamp.text if slot is None else connection.stamp.text_for(slot)
            reply = await connection.exchange(evalsha(script, keys, args, stamp), until)
            if type(reply) is ReplyError:
                reply = await _resend_after_noscript(connection, reply, (script, keys, args), stamp, until)
        except BaseException as error:
            connection.discard(error)
            raise
        connection.checkin()
        if type(reply) is ReplyError:
            raise _error_of(connection, reply)
        return reply  # type: ignore[return-value]  # each script replies with a list

    async def call_with_acks(
        self, message: Message, until: float, acks: Acks, ack_timeout: float, slot: int | None = None
    ) -> AckedReply:
        """See Server. On a connection of several callers, the wait for replicas would delay the other callers."""
        connection = await self.pool.checkout_exclusive(until)
        try:
            stamp = connection.stamp.text if slot is None else connection.stamp.text_for(slot)
            reply: Any = await connection.exchange(evalsha(*message, stamp), until)
            reply = await _resend_after_noscript(connection, reply, message, stamp, until)
            known = 0
            acknowledged: Any = 0
            if type(reply) is not ReplyError and lengthens_lease(message[2], reply):
                known = self.history.count_replicas(await connection.exchange(REPLICATION, until))
                acknowledged = await connection.exchange(pack(acks.command(known, ack_timeout)), until)
        except BaseException as error:
            connection.discard(error)
            raise
        connection.checkin()
        return AckedReply(_raise_if_error(connection, reply), known, _raise_if_error(connection, acknowledged))

    async def call_asking(self, message: Message, until: float, slot: int) -> Reply:
        """Repeat a call here after an ASK redirection: the cluster is moving the slot to this node."""
        connection = await self.pool.checkout(until)
        reply: object = None
        try:
            for encode in (evalsha, eval_text):
                commands = [ASKING, encode(*message, connection.stamp.text_for(slot))]
                asking, reply = await connection.receive(connection.send(commands, until), until)
                if type(asking) is ReplyError:  # without ASKING, the reply to the script call is a redirection
                    reply = asking
                if not is_noscript(reply):
                    break
        except BaseException as error:
            connection.discard(error)
            raise
        connection.checkin()
        return _raise_if_error(connection, reply)  # type: ignore[no-any-return]  # each script replies with a list

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Reply | Exception]:
        """See Server."""
        return await self.read_batch(await self.send_batch(messages, until))

    async def send_batch(
        self, messages: Sequence[Message], until: float, slots: Sequence[int] = (), packed: Sequence[bytes] = ()
    ) -> SentBatch:
        """Send the messages without waiting for replies: the first half of `call_many`.

        `packed`: the messages as commands that lack the stamp, if the caller sends them to several servers.
        """
        try:
            connection = self.pool.take() or await self.pool.checkout(until)
        except Exception as error:  # noqa: BLE001 (it stands in place of the replies)
            return _failed(messages, until, error)
        stamp = connection.stamp
        stamps = [stamp.text_for(slot) for slot in slots] if slots else [stamp.text] * len(messages)
        if packed and not self.send_script_text:
            commands = [stamped(command, stamp.text) for command in packed]
        else:
            encode, self.send_script_text = eval_text if self.send_script_text else evalsha, False
            commands = [encode(*message, stamp) for message, stamp in zip(messages, stamps, strict=True)]
        try:
            return SentBatch(messages, stamps, until, connection, connection.send(commands, until))
        except Disconnected as error:
            connection.discard(error)
            return _failed(messages, until, error)
        except BaseException as error:
            connection.discard(error)
            raise

    async def read_batch(self, sent: SentBatch, *, late: bool = False) -> list[Reply | Exception]:
        """Read the replies: the second half of `call_many`.

        `late`: the caller needs no result any more, so a message that got NOSCRIPT is not sent again.
        """
        connection, until, messages = sent.connection, sent.until, sent.messages
        if connection is None:
            assert sent.pending.error is not None
            return [sent.pending.error] * len(messages)
        try:
            replies: list[Any] = await connection.receive(sent.pending, until)
            for i, message in enumerate(messages):
                if late:
                    if is_noscript(replies[i]):
                        self.send_script_text = True
                        if message[2][0] in ("release", "voter"):  # which may run at any time; nobody waits for it
                            connection.send([eval_text(*message, sent.stamps[i])], until)
                elif type(replies[i]) is ReplyError:
                    replies[i] = await _resend_after_noscript(connection, replies[i], message, sent.stamps[i], until)
        except Disconnected as error:
            connection.discard(error)
            return [error] * len(messages)
        except BaseException as error:
            connection.discard(error)
            raise
        connection.checkin()
        return [_error_of(connection, reply) if type(reply) is ReplyError else reply for reply in replies]

    def send(self, message: Message) -> PendingCall | None:
        """See Server."""
        connection = self.pool.take()
        return None if connection is None else send_over(connection, message)

    async def wait_any(self, sent: Sequence[SentBatch], number: int, until: float) -> list[int]:
        """Wait until `number` batches, of any servers, have replies or an error. Returns the indexes of these."""
        return await self.pool.wait_any([each.pending for each in sent], number, until)

    @staticmethod
    def discard_batch(sent: SentBatch) -> None:
        """Give up a batch whose replies no caller will read."""
        if sent.connection is not None:
            sent.connection.discard(Disconnected("given up", sent=True))

    @property
    def ready(self) -> bool:
        """Whether a connection is open, so that a call need not connect first."""
        return self.pool.ready

    async def ping(self, until: float) -> None:
        """Check that the server answers; connect first if necessary. Raises Disconnected or LockError."""
        await self._exchange(PING, until)

    async def connect_anew(self, until: float) -> None:
        """Drop all connections, and open a new one. Raises Disconnected or LockError."""
        connection = await self.pool.checkout(until)
        connection.checkin()
        connection.drop_all("its address may lead to another server by now")
        await self.ping(until)

    async def connected_clients(self, until: float) -> int | None:
        """See Server."""
        number = parse_info(await self._exchange(CLIENTS, until)).get("connected_clients", "")
        return int(number) if number.isdecimal() else None

    async def _exchange(self, command: Command, until: float) -> object:
        connection = await self.pool.checkout(until)
        try:
            reply = await connection.exchange(command, until)
        except BaseException as error:
            connection.discard(error)
            raise
        connection.checkin()
        return reply

    # Quarantine

    async def current_identity(self, until: float) -> IdentityStamp:
        """Return the identity stamp of the server that answers now. Raises Disconnected."""
        connection = await self.pool.checkout(until)
        connection.checkin()
        return connection.stamp

    async def prove_lossless(
        self,
        keys: Sequence[str | bytes],  # noqa: ARG002 (see Server)
        lost_identity: str,
        until: float,
        slot: int = -1,
    ) -> bool:
        """See Server."""
        return await self._proofs.prove_lossless(lost_identity, until, slot)

    def old_primary_may_still_grant(self, key: str, slot: int = -1) -> str:  # noqa: ARG002 (see Server)
        """See Server."""
        return self._proofs.old_primary(slot)

    async def _lossless(self, evidence: str, stamp: IdentityStamp) -> float | None:
        return await self.runtime.run_blocking(partial(least_lossless_ttl, self.address, evidence, stamp))

    # Pushes

    def route(self, key: str) -> Route:  # noqa: ARG002 (see Server)
        """See Server."""
        return ONLY_ROUTE

    def subscription_of(self, key: str | bytes) -> tuple[str, str]:  # noqa: ARG002 (see Server)
        """See Server."""
        channel = self.pool.push_handler.channel
        return "1" if channel in self.pool.subscribed else "0", channel

    def ensure_subscribed(self, key: str) -> None:  # noqa: ARG002 (see Server)
        """See Server."""
        self.pool.subscribe(self.pool.push_handler.channel)

    # The end

    def reset_after_fork(self) -> None:
        """See Server."""
        self.pool.reset_after_fork()
        self._start()

    async def close(self) -> None:
        """See Server."""
        await self.pool.close()


async def connected_clients(servers: Iterable[SingleServer], until: float) -> int | None:
    """How many clients are connected to all of these. None if one does not say. Raises Disconnected or LockError."""
    numbers = [await each.connected_clients(until) for each in servers]
    return None if None in numbers else sum(number or 0 for number in numbers)


async def _resend_after_noscript(
    connection: Connection, reply: object, message: Message, stamp: str, until: float
) -> object:
    """The reply; if the server did not know the script, the reply to the same message with the script's text."""
    return await connection.exchange(eval_text(*message, stamp), until) if is_noscript(reply) else reply


def send_over(connection: Connection, message: Message) -> PendingCall:
    """Send one message at once, and give the connection back without waiting for the reply."""
    try:
        pending = connection.send([evalsha(*message, connection.stamp.text)], FOREVER)
        connection.flush()
    except Disconnected as error:
        connection.discard(error)
        pending = PendingReplies(1)
        pending.error = error
    except BaseException as error:
        connection.discard(error)
        raise
    else:
        connection.checkin()
    return PendingCall(connection, pending)


def _failed(messages: Sequence[Message], until: float, error: Exception) -> SentBatch:
    """A batch that was not sent."""
    pending = PendingReplies(len(messages))
    pending.error = error
    return SentBatch(messages, (), until, None, pending)


def _raise_if_error(connection: Connection, reply: Any) -> Any:
    """The reply. Raises ServerError if the server replied with an error."""
    if type(reply) is ReplyError:
        raise _error_of(connection, reply)
    return reply


def _error_of(connection: Connection, reply: object) -> ServerError:
    """The error of this reply. If the server is a replica by now, or has ended the login, drops all its connections."""
    if is_readonly(reply):
        connection.drop_all("it is a replica by now")
    elif is_logged_out(reply):
        connection.drop_all("its login has ended")
    return ServerError(str(reply))
