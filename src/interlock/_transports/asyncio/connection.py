"""One connection of an asyncio loop: a buffer of commands to send, and a row of the futures that expect replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from interlock._connect.address import NO_PRIMARY
from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER, now
from interlock._quarantine.primacy import TRUSTED_FOR
from interlock._transports.connections import NO_STAMP, PendingReplies
from interlock._transports.idle import IDLE_AFTER, PING_AFTER, PING_ANSWER_WITHIN, answer_by
from interlock._transports.pushes import check_subscribe_reply, subscribe_commands, take_push
from interlock._transports.resp import PING, WAITING, Push, reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._connect.address import Address
    from interlock._protocol.server import PushHandler
    from interlock._transports.connections import Command

# Calls of `_send` in the buffer: with so many, the connection writes before the turn ends, and the server starts early.
WRITE_BATCH: Final = 16
# Seconds without a byte from the server, after which a call that times out ends the connection.
SILENCE_LIMIT: Final = 0.9


class Owner(Protocol):
    """What a connection needs of its pool."""

    address: Address
    loop: asyncio.AbstractEventLoop
    push_handler: PushHandler

    def checkin(self, connection: AsyncioConnection) -> None: ...
    async def wait_any(self, pending: Sequence[PendingReplies], number: int, until: float) -> list[int]: ...


class AsyncioConnection(asyncio.Protocol):
    """See Connection. Any number of tasks use it at once, unless it is `exclusive`."""

    def __init__(self, pool: Owner) -> None:
        self.pool = pool
        self.loop = pool.loop
        self.timeout = pool.address.timeout
        self.exclusive = False  # whether each checkout is for one caller alone
        self.stamp = NO_STAMP
        self.named = NO_PRIMARY
        self.last_answered_sent = 0.0  # when the last request known to have a reply was sent (see `is_trusted`)
        self.wanted: dict[str, None] = {}  # the pool's channels
        self.subscribed: set[str] = set()  # the channels in effect
        self.primacy_check: asyncio.Task[None] | None = None  # asks other servers which one is the primary
        self.broken: Disconnected | None = None
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.transport: asyncio.Transport
        self.inode = 0  # of its socket
        self.redis_writer: object  # of redis-py; kept, because its collection would close the transport
        self._sent_count = 0  # requests sent so far
        self._mark = 0  # `_sent_count` at the time `_marked`: each request after these was sent later
        self._marked = 0.0
        self._reader = reader()
        self._expecting: deque[asyncio.Future[Any] | PendingReplies] = deque()
        self._outgoing: list[bytes] = []
        self._silent_since = now()
        self._ping: asyncio.Future[Any] | None = None  # the newest PING, answered or not
        self._timer = self.loop.call_later(self.timeout, self._watch)

    # Commands and replies

    async def exchange(self, command: Command, until: float = FOREVER) -> object:
        """See Connection."""
        reply = self.loop.create_future()
        self._send(command, reply)
        if until == FOREVER or (left := until - now()) >= self.timeout:  # `_watch` ends the connection before that
            return await reply
        timer = self.loop.call_later(max(0.0, left), self.time_out, reply)
        try:
            return await reply
        finally:
            timer.cancel()

    def send(
        self,
        commands: Sequence[Command],
        until: float = FOREVER,  # noqa: ARG002 (see Connection)
    ) -> PendingReplies:
        """See Connection."""
        pending = PendingReplies(len(commands))
        self._send(b"".join(commands), pending, len(commands))
        return pending

    async def receive(self, pending: PendingReplies, until: float) -> list[object]:
        """See Connection."""
        if not pending.is_complete and not await self.pool.wait_any([pending], 1, until):
            self.time_out(pending)
        if pending.error is not None:
            raise pending.error
        return pending.replies

    def _send(self, packed: bytes, reply: asyncio.Future[Any] | PendingReplies, number: int = 1) -> None:
        """Send packed commands, to which the server sends `number` replies. Raises Disconnected."""
        if self.broken is not None:
            raise Disconnected(str(self.broken), sent=False)
        if not self._expecting:
            sent = now()
            idle_for, self._silent_since = sent - self._silent_since, sent  # the wait for a reply begins now
            if idle_for > IDLE_AFTER:  # a subscription, or a vote: nothing else is sent before the answer
                self._send_ping()
        try:
            if number == 1:
                self._expecting.append(reply)
            else:
                self._expecting.extend([reply] * number)
            self._sent_count += number
            if not self._outgoing:
                self.loop.call_soon(self.flush)
            self._outgoing.append(packed)
            if len(self._outgoing) == WRITE_BATCH:
                self.flush()
        except BaseException as error:
            self._fail_interrupted(error)
            raise

    def flush(self) -> None:
        """See Connection: write at once, and not when this turn of the loop ends."""
        try:
            if self._outgoing and self.broken is None:
                self.transport.write(b"".join(self._outgoing))
            self._outgoing.clear()
        except BaseException as error:
            self._fail_interrupted(error)
            raise

    def data_received(self, data: bytes) -> None:
        """Give each reply to the first future of the row, and each push to the push handler."""
        if not KNOWN[0]:
            notice()  # the child of a fork goes on in a loop of its parent: this was a reply to the parent
            return
        if self.broken is not None:  # after an interrupt the futures of the row may not match the replies
            return
        try:
            self._silent_since = self.stamp.answered_at = now()
            reader, row = self._reader, self._expecting
            reader.feed(data)
            while (reply := reader.gets()) is not WAITING:
                if type(reply) is Push:
                    if take_push(reply, self.pool.push_handler, self.wanted, self.subscribed):
                        row[0].set_result(None)  # the server answers SUBSCRIBE by a push
                        row.popleft()
                else:
                    if not row[0].done():
                        row[0].set_result(reply)
                    row.popleft()  # only now: `fail` reaches only the futures in the row
        except BaseException as error:
            self._fail_interrupted(error)
            raise

    def subscribe(self, channel: str) -> None:
        """Subscribe to a channel."""

        def answered(reply: asyncio.Future[Any]) -> None:
            if not reply.exception():
                try:
                    check_subscribe_reply(reply.result(), channel, self.wanted)
                except Disconnected as error:
                    self.fail(error)

        for command in subscribe_commands(channel):
            reply = self.loop.create_future()
            reply.add_done_callback(answered)
            self._send(command, reply)

    # Idle connections: see `_transports.idle`

    def is_idle(self) -> bool:
        """Whether the server must answer a PING before the next request: one is sent already, or nothing for long."""
        if self._expecting:
            return self._ping is not None and not self._ping.done()
        return now() - self._silent_since > IDLE_AFTER

    async def is_alive(self, until: float) -> bool:
        """Whether the server answers a PING over this idle connection. Ends the connection if not.

        Raises Disconnected if the call has too little time to tell.
        """
        ping, by = self._send_ping(), answer_by(until)
        await asyncio.wait([ping], timeout=max(0.001, min(by, until) - now()))
        if not ping.done():
            if until < by:  # too little time to tell: other tasks use the connection, too
                raise Disconnected("no answer to a PING in time", sent=False, timed_out=True)
            self.fail_silent()
        return self.broken is None

    def _send_ping(self) -> asyncio.Future[Any]:
        """Send PING, unless one is unanswered. Returns the future of its answer."""
        if self._ping is None or self._ping.done():
            self._ping = self.loop.create_future()
            self._send(PING, self._ping)
        return self._ping

    def fail_silent(self) -> None:
        """End the connection, which was idle, and may be dead."""
        self.fail(Disconnected("no answer to a PING", sent=True, stale=True, timed_out=True))

    # Trust: see `_quarantine.primacy`

    def is_trusted(self, since: float) -> bool:
        """Whether the server has answered a request sent at `since` or later. Call this before the next request."""
        answered = self._sent_count - len(self._expecting)
        if self._sent_count == self._mark:
            self._marked = now()
        elif answered > self._mark:
            if (
                self._marked - self.last_answered_sent <= TRUSTED_FOR
            ):  # else there may have been a pause between the two
                self.last_answered_sent = self._marked
            self._mark, self._marked = self._sent_count, now()
        return self.last_answered_sent >= since

    def trust(self, asked_at: float) -> None:
        """Note that other servers, which the client asked at this time, named this server as the primary."""
        self.last_answered_sent, self._mark, self._marked = asked_at, self._sent_count, asked_at

    # The end

    def checkin(self) -> None:
        """See Connection."""
        if self.exclusive:
            self.pool.checkin(self)

    async def read_unread(self, pending: PendingReplies, until: float) -> None:
        """See Connection. The reply arrives by itself."""
        with contextlib.suppress(Disconnected):
            await self.receive(pending, until)

    def discard(self, error: BaseException) -> None:  # noqa: ARG002 (see Connection)
        """See Connection. On a connection of many tasks, the reply stays in the row, and is dropped when it arrives."""
        if self.exclusive:  # the server may still be busy with this command, and would delay the next one
            self.fail(Disconnected("given up", sent=True))

    def drop_all(self, why: str) -> None:
        """See Connection."""
        self.fail(Disconnected(why, sent=True))

    def time_out(self, reply: asyncio.Future[Any] | PendingReplies) -> None:
        """Fail this future, whose time is over; end the connection, too, after a silence of `SILENCE_LIMIT`."""
        if not reply.done():
            why = Disconnected("no answer in time", sent=True, timed_out=True)
            reply.set_exception(why)
            if now() - self._silent_since >= SILENCE_LIMIT:
                self.fail(why)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail each future that expects a reply."""
        self.fail(Disconnected(str(exc or "it closed the connection"), sent=True))

    def _fail_interrupted(self, error: BaseException) -> None:
        """End the connection after a signal handler raised in here: a later reply might reach the wrong future."""
        self.fail(Disconnected(f"it was interrupted: {error!r}", sent=True))

    def fail(self, why: Disconnected) -> None:
        """End the connection: in the next turn of the loop, close its socket, and fail each future in the row.

        A callback of the loop does that, and not the caller, for the reason given in `AutoResetEvent`.
        """
        if self.broken is None:
            self.broken = why
            try:
                self.subscribed.clear()
                self.loop.call_soon(self._end, why)
            except BaseException:  # a signal handler raised: the callback is scheduled, or not
                self.loop.call_soon(self._end, why)
                raise

    def _end(self, why: Disconnected) -> None:
        self._timer.cancel()
        self.subscribed.clear()
        self.transport.abort()
        for reply in self._expecting:
            if not reply.done():
                reply.set_exception(why)
                reply.exception()  # marks the error as read, for no task may await this future any more
        self._expecting.clear()
        if not self.ended.done():
            self.ended.set_result(None)

    def _watch(self) -> None:
        """Send PING after `PING_AFTER` of silence; end the connection if its answer, or another one, is missing."""
        if self.broken is not None:
            return
        silence = now() - self._silent_since
        if not self._expecting:
            if silence >= PING_AFTER:
                self._send_ping()
        elif silence >= self.timeout:
            self.fail(Disconnected(f"no answer within {self.timeout:.3g} s", sent=True, timed_out=True))
            return
        elif silence >= PING_ANSWER_WITHIN and self.is_idle():
            self.fail_silent()
            return
        self._timer = self.loop.call_later(self.timeout / 4, self._watch)
