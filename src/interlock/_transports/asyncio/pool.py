"""The connections of one loop to one server: one for all tasks, and exclusive ones for calls that block theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._connect.address import NO_PRIMARY
from interlock._connect.refusals import connection_error
from interlock._protocol.log import log
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER, now
from interlock._quarantine.primacy import NOT_NAMED, TRUSTED_FOR
from interlock._transports.asyncio.connection import AsyncioConnection
from interlock._transports.asyncio.runtime import cancel, end_wait
from interlock._transports.connections import inode_of
from interlock._transports.handshake import complete_handshake, handshake_commands, is_same_primary
from interlock._transports.idle import set_socket_options
from interlock._transports.pushes import next_pause, spread
from interlock._transports.resp import REPLICATION

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from interlock._connect.address import Address
    from interlock._protocol.server import PushHandler
    from interlock._quarantine.primacy import Primacy
    from interlock._quarantine.server_history import ServerHistory
    from interlock._transports.asyncio.runtime import AsyncioRuntime
    from interlock._transports.connections import PendingReplies

OTHER_LOOP: Final = "the connection belongs to a different loop"
T = TypeVar("T")


class AsyncioPool:
    """See ConnectionPool."""

    def __init__(self, address: Address, history: ServerHistory, primacy: Primacy, runtime: AsyncioRuntime) -> None:
        self.address = address
        self.history = history
        self.primacy = primacy
        self.runtime = runtime
        self.loop = runtime.loop
        self._can_fail_over = address.can_fail_over
        self._takes_idle = address.votes  # see rule (c) of `idle`
        self.push_handler: PushHandler
        self._connection: AsyncioConnection | None = None
        self._connecting: asyncio.Task[AsyncioConnection] | None = None
        self._spares: list[AsyncioConnection] = []  # exclusive connections that no caller uses
        self._wanted: dict[str, None] = {}  # channels
        self.subscribed: set[str] = set()  # the channels in effect, on the connection of all tasks
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def ready(self) -> bool:
        """See ConnectionPool."""
        return self._connection is not None and self._connection.broken is None

    def take(self) -> AsyncioConnection | None:
        """See ConnectionPool."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(OTHER_LOOP)
        connection = self._connection
        if connection is None or connection.broken is not None or self._can_fail_over:
            return None
        if connection.is_idle() and not self._takes_idle:
            return None
        return connection

    async def checkout(self, until: float) -> AsyncioConnection:
        """See ConnectionPool. All callers get the same connection."""
        asked_at = now()
        while True:
            connection = self._connection
            if connection is None or connection.broken is not None:
                if self._connecting is None or self._connecting.done():
                    self._connecting = self._task(self._connect(), "interlock-connect")
                connection = await self._in_time(self._connecting, until)
            if await self._is_usable(connection, asked_at, until):
                return connection

    async def checkout_exclusive(self, until: float) -> AsyncioConnection:
        """See ConnectionPool. A connection that opens too late for its caller serves a later caller."""
        asked_at = now()
        while True:
            if not self._spares:
                await self._in_time(self._task(self._open_spare(), "interlock-connect"), until)
            with contextlib.suppress(IndexError):  # another task took the connection
                connection = self._spares.pop()
                try:
                    if await self._is_usable(connection, asked_at, until):
                        return connection
                except BaseException:
                    self._spares.append(connection)
                    raise

    def checkin(self, connection: AsyncioConnection) -> None:
        """Take back an exclusive connection."""
        if self._closed:
            connection.fail(Disconnected("closed", sent=False))
        else:
            self._spares.append(connection)

    async def _is_usable(self, connection: AsyncioConnection, asked_at: float, until: float) -> bool:
        """Whether the server answers over this connection, and is still the same primary."""
        if connection.broken is None and connection.is_idle() and not await connection.is_alive(until):
            self.drop_idle()
            return False
        return await self._is_trusted(connection, asked_at, until)

    def drop_idle(self) -> None:
        """See ConnectionPool."""
        for connection in (*self._spares, self._connection):
            if connection is not None and connection.broken is None and connection.is_idle():
                connection.fail_silent()

    async def _is_trusted(self, connection: AsyncioConnection, asked_at: float, until: float) -> bool:
        """Whether the connection still leads to the same primary with the same data.

        Recent replies prove that; without recent replies, the client asks other servers, once for all callers.
        `asked_at`: when the caller made its request.
        """
        while connection.broken is None and self._can_fail_over and not connection.is_trusted(asked_at - TRUSTED_FOR):
            if connection.primacy_check is None or connection.primacy_check.done():
                connection.primacy_check = self._task(self._ask_others(connection), "interlock-primacy")
            await self._in_time(connection.primacy_check, until)
        return connection.broken is None

    async def _ask_others(self, connection: AsyncioConnection) -> None:
        asked_at = now()
        is_same = await self.runtime.run_blocking(partial(self.primacy.is_confirmed, connection.named, FOREVER))
        if is_same and connection.broken is None:
            is_same = is_same_primary(await connection.exchange(REPLICATION), connection.stamp)
        if is_same:
            connection.trust(asked_at)
        else:
            connection.fail(Disconnected("another server was the primary in between", sent=False))

    @staticmethod
    async def _in_time(task: asyncio.Task[T], until: float) -> T:
        left = max(0.001, until - now()) if until != FOREVER else None
        done, _ = await asyncio.wait([task], timeout=left)
        if not done:
            raise Disconnected("no connection within the time of this call", sent=False, timed_out=True)
        if task.cancelled():
            raise Disconnected("it was closed while connecting", sent=False)
        return task.result()

    async def wait_any(self, pending: Sequence[PendingReplies], number: int, until: float) -> list[int]:
        """See ConnectionPool."""
        waiting = [each for each in pending if not each.is_complete]
        missing, left = number - len(pending) + len(waiting), until - now()
        if missing > 0 and waiting and left > 0:
            enough = self.loop.create_future()

            def completed() -> None:
                nonlocal missing
                missing -= 1
                if missing == 0:
                    end_wait(enough)

            timer = self.loop.call_later(left, end_wait, enough)
            for each in waiting:
                each.on_complete = completed
            try:
                await enough
            finally:
                timer.cancel()
                for each in waiting:
                    each.on_complete = None
        return [i for i, each in enumerate(pending) if each.is_complete]

    # Opening

    async def _connect(self) -> AsyncioConnection:
        connection = await self._open()
        connection.wanted, self.subscribed = self._wanted, connection.subscribed
        self._connection = connection
        for channel in list(self._wanted):
            connection.subscribe(channel)
        return connection

    async def _open_spare(self) -> None:
        connection = await self._open()
        connection.exclusive = True
        self._spares.append(connection)

    async def _open(self) -> AsyncioConnection:
        if self._closed:  # `close` has run, so nothing would close a new connection
            raise Disconnected("it is closed", sent=False)
        asked_at = now()
        if self.address.clustered and not await self.runtime.run_blocking(
            partial(self.primacy.is_confirmed, NO_PRIMARY, FOREVER)
        ):
            raise Disconnected(NOT_NAMED, sent=False)
        connection = await self._dial()
        try:
            commands, sent_at = handshake_commands(self.address), now()
            replies = await connection.receive(connection.send(commands), FOREVER)
            connection.stamp = complete_handshake(
                replies, self.address, self.history, connection.named.epoch, self.runtime.mutex, sent_at
            )
            connection.trust(asked_at)
        except BaseException:
            connection.fail(Disconnected("refused", sent=False))
            raise
        return connection

    async def _dial(self) -> AsyncioConnection:
        """A connection before its handshake, opened by redis-py."""
        make: Any = self.address.async_connection
        redis_connection: Any = None
        try:
            if self.address.kind == "embedded" or self.address.sentinels:  # finding the server may block
                redis_connection = await asyncio.to_thread(make, FOREVER)
            else:
                redis_connection = make(FOREVER)
            redis_connection.redis_connect_func = _set_up_or_abort
            await redis_connection.connect()
        except BaseException as error:  # of any kind: a credential provider's, a cancellation, an interrupt
            if redis_connection is not None:
                await redis_connection.disconnect(nowait=True)
            if isinstance(error, Exception):
                failed = connection_error(error, self.address)
                raise failed from failed.__cause__
            raise
        connection = AsyncioConnection(self)
        connection.named = redis_connection.named
        writer: Any = redis_connection._writer
        redis_connection._writer = redis_connection._reader = None  # from here on redis-py does nothing more
        connection.redis_writer, connection.transport = writer, writer.transport
        _silent_number()
        connection.inode = inode_of(writer.transport.get_extra_info("socket").fileno())
        set_socket_options(writer.transport.get_extra_info("socket"), self.address.parameters)
        writer.transport.set_protocol(connection)
        return connection

    # The subscription

    def subscribe(self, channel: str) -> None:
        """See ConnectionPool. The first call starts the listener task."""
        if channel not in self._wanted:
            self._wanted[channel] = None
            if self._connection is not None and self._connection.broken is None:
                self._connection.subscribe(channel)
        if self._listener is None or self._listener.done():  # the user may have cancelled all tasks
            self._listener = self._task(self._stay_subscribed(), "interlock-listener")

    async def _stay_subscribed(self) -> None:
        """Open a lost connection again at once, so that the client misses pushes for a short time only."""
        pause, warned = 0.0, ""
        while self._wanted and not self._closed:
            started = now()
            try:
                connection = await self.checkout(FOREVER)
                await asyncio.shield(connection.ended)
                pause = next_pause(pause, now() - started)
            except Disconnected:
                pause = next_pause(pause, 0.0)
            except Exception as error:  # noqa: BLE001 (the next call raises the error)
                pause = 1.0
                if str(error) != warned:
                    warned = str(error)
                    log.warning("interlock: waiters are woken by polling only, since %s", error)
            await asyncio.sleep(spread(pause))

    def unsubscribe_all(self) -> None:
        """See ConnectionPool."""
        self._wanted.clear()
        if self._connection is not None:
            self._connection.fail(Disconnected("it is no primary any more", sent=True))

    # The end

    def _task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a background task, which `close` cancels."""
        task = self.runtime.task(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """See ConnectionPool. Cancels the background tasks, too."""
        self._closed = True
        await cancel(self._tasks)
        open_ = [*self._spares, *([self._connection] if self._connection is not None else [])]
        for connection in open_:
            connection.fail(Disconnected("closed", sent=False))
        if open_:
            await asyncio.sleep(0)  # the connection ends in the next turn
            await asyncio.sleep(0)  # its transport closes the socket in the turn after that

    def reset_after_fork(self) -> None:
        """See ConnectionPool. Keeps the parent's connections and tasks, and closes no transport.

        Parent and child share what the loop polls (epoll). A child that closed a transport would take its socket out of
        the parent's poll, and one that goes on in that loop would read the parent's replies. So in the child a socket
        on which nothing arrives gets the number of each.
        """
        for connection in [*self._spares, *([self._connection] if self._connection is not None else [])]:
            _cut_off(connection)
        _parents.append((self._connection, self._spares, self._tasks, self.loop))


_parents: list[object] = []  # kept: collecting them would close them


@lru_cache(maxsize=1)
def _silent_number() -> int:
    """The number of a socket over which nothing travels, whose other end stays open, too.

    Each connection makes sure that there is one: a child may be out of file numbers.
    """
    silent, other_end = socket.socketpair()
    silent.setblocking(False)
    other_end.detach()
    return silent.detach()


def _cut_off(connection: AsyncioConnection) -> None:
    """Let this process's copy of a parent's socket be another one, unless the program has closed the copy before."""
    number = connection.transport.get_extra_info("socket").fileno()
    if number < 0 or inode_of(number) != connection.inode:
        return
    os.dup2(_silent_number(), number, inheritable=False)


async def _set_up_or_abort(redis_connection: Any) -> None:
    """Run redis-py's setup of an open connection; abort if it fails: a TLS goodbye would wait for a silent peer.

    asyncio keeps the error of a reset connection in a future of its own, which nobody awaits here. Whether asyncio logs
    that as "Future exception was never retrieved" depends on the order in which the garbage collector meets objects.
    """
    writer = redis_connection._writer
    try:
        await redis_connection.on_connect()
    except BaseException:
        writer.transport.abort()
        writer._protocol._get_close_waiter(writer).add_done_callback(_mark_as_read)
        raise


def _mark_as_read(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()
