"""The connections to one server, for any number of threads: each call uses one alone.

At most `max_connections` of them are open. A thread that finds none idle, and may open no more, waits until another
thread gives one back. The background threads of interlock open connections beyond that bound: a lease must be renewed
although a thousand threads want connections. So does the subscription. If the server (`maxclients`) or this process
(its open files) allows no more, a background thread gets the next connection that any thread gives back. The pool hands
that connection over: else the thread that gave it back would take it again within microseconds, long before another
thread wakes up.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections import deque
from typing import TYPE_CHECKING

from interlock._connect.address import NO_PRIMARY
from interlock._protocol.server import Disconnected
from interlock._protocol.snapshot import snapshot
from interlock._protocol.timing import FOREVER, now
from interlock._quarantine.primacy import NOT_NAMED, TRUSTED_FOR
from interlock._transports.blocking.connection import BlockingConnection
from interlock._transports.blocking.runtime import AutoResetEvent
from interlock._transports.blocking.subscription import Subscription
from interlock._transports.handshake import is_same_primary
from interlock._transports.idle import IDLE_AFTER, MIN_FIRST_ANSWER, answer_by
from interlock._transports.resp import PING, REPLICATION
from interlock.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._connect.address import Address
    from interlock._protocol.server import PushHandler
    from interlock._quarantine.primacy import Primacy
    from interlock._quarantine.server_history import ServerHistory
    from interlock._transports.blocking.runtime import ThreadRuntime
    from interlock._transports.connections import PendingReplies


class Turn(AutoResetEvent):
    """The wait of a background thread for the next connection that a thread gives back."""

    __slots__ = ("connection",)

    def __init__(self) -> None:
        super().__init__()
        self.connection: BlockingConnection | None = None


class BlockingPool:
    """See ConnectionPool."""

    def __init__(
        self,
        address: Address,
        history: ServerHistory,
        primacy: Primacy,
        runtime: ThreadRuntime,
        max_connections: float = math.inf,
    ) -> None:
        self.address = address
        self.history = history
        self.primacy = primacy
        self.runtime = runtime
        self.max_connections = max_connections
        self.push_handler: PushHandler
        self.closed = False
        self._can_fail_over = address.can_fail_over
        self._takes_idle = address.votes  # see rule (c) of `idle`
        self._start()

    def _start(self) -> None:
        self.open_connections: set[BlockingConnection] = set()  # in use, idle, or of the subscription
        self.idle: deque[BlockingConnection] = deque()  # the newest at the end
        self.waiting: deque[AutoResetEvent] = deque()  # of the threads that wait for an idle connection
        self.turns: deque[Turn] = deque()  # of the background threads that could open no connection
        self._open_number = 0  # how many connections are open, in use or idle, without that of the subscription
        self._identity = ""  # of the server at the newest connection
        self._subscription = Subscription(self)
        self.subscribed = self._subscription.subscribed

    @property
    def ready(self) -> bool:
        """See ConnectionPool."""
        return bool(self.idle)

    def take(self) -> BlockingConnection | None:
        """See ConnectionPool."""
        if self._can_fail_over:
            return None
        try:
            connection = self.idle.pop()
        except IndexError:
            return None
        asked_at = now()
        if asked_at - connection.last_answered_sent > IDLE_AFTER and not self._takes_idle:
            self.idle.append(connection)  # `checkout` asks whether it lives
            self.wake_one()
            return None
        connection.last_answered_sent = asked_at
        return connection

    async def checkout(self, until: float) -> BlockingConnection:
        """See ConnectionPool."""
        connection: BlockingConnection | None
        try:
            connection = self.idle.pop()
        except IndexError:
            connection = None
        if connection is None:  # not in the handler of the IndexError, which would then stand in a user's traceback
            connection = await self._open_or_wait(until)
        asked_at = now()
        idle_for = asked_at - connection.last_answered_sent
        if idle_for > IDLE_AFTER and not await self._is_alive(connection, until):
            if until < asked_at + MIN_FIRST_ANSWER:  # too short a silence to say anything of the others
                raise Disconnected("no answer to a PING in the time of this call", sent=False, timed_out=True)
            self.drop_idle()
            return await self.checkout(until)  # which asks again about a connection that another thread gave back
        if self._can_fail_over and idle_for > TRUSTED_FOR and not await self._is_still_primary(connection, until):
            self.drop_all()
            return await self.checkout(until)
        connection.last_answered_sent = asked_at
        return connection

    checkout_exclusive = checkout

    @staticmethod
    async def _is_alive(connection: BlockingConnection, until: float) -> bool:
        """Whether the server answers a PING over a connection that was idle. Closes the connection if not."""
        try:
            await connection.exchange(PING, min(until, answer_by(until)))
        except Disconnected:
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        return True

    async def _is_still_primary(self, connection: BlockingConnection, until: float) -> bool:
        """Whether the connection still leads to the same primary with the same data.

        Other servers confirm the address of the primary; the server itself confirms its role and replication id. If the
        server is another one or does not answer, this method closes the connection.
        """
        try:
            is_same = self.primacy.is_confirmed(connection.named, until)
        except (Disconnected, LockError):  # no other server answered: the connection is as good as before
            connection.checkin()
            raise
        except BaseException:
            connection.close()
            raise
        try:
            is_same = is_same and is_same_primary(await connection.exchange(REPLICATION, until), connection.stamp)
        except Disconnected:
            is_same = False
        except BaseException:
            connection.close()
            raise
        if not is_same:
            connection.close()
        return is_same

    async def _open_or_wait(self, until: float) -> BlockingConnection:
        """A new connection, or an idle one as soon as there is one. Raises Disconnected or LockError."""
        give_up_at = min(until, now() + self.address.timeout)
        while not self._may_open():
            await self._wait_for_idle(give_up_at)
            with contextlib.suppress(IndexError):  # else another thread was faster, or a connection was closed
                return self.idle.pop()
        try:
            connection = self.open(until)
        except BaseException as error:
            self.note_closed()
            refused = isinstance(error, Disconnected | LockError) and self.runtime.is_background()
            if refused and (given := await self._next_given(now() + (give_up_at - now()) / 2)) is not None:
                return given
            raise
        connection.is_counted = True
        return connection

    async def _next_given(self, until: float) -> BlockingConnection | None:
        """The next connection that a thread gives back; None if no thread gives one back by the time `until`."""
        if not self._open_number:
            return None
        turn = Turn()
        self.turns.append(turn)
        self.wake_one()  # one may have become idle since this thread looked
        await turn.wait(until)
        with self.runtime.mutex, contextlib.suppress(ValueError):
            self.turns.remove(turn)  # from here on nobody hands it a connection
        return turn.connection

    async def _wait_for_idle(self, until: float) -> None:
        """Wait until a connection is idle, or may be opened. Raises Disconnected."""
        woken = AutoResetEvent()
        self.waiting.append(woken)
        try:
            has_room = self.idle or self._open_number < self.max_connections  # since this thread looked
            if not has_room and not await woken.wait(until):
                raise Disconnected(
                    f"all {self.max_connections} connections are in use (max_connections)", sent=False, timed_out=True
                )
        except BaseException:
            self.wake_one()  # in place of this thread, which may have been woken just now
            raise
        finally:
            with contextlib.suppress(ValueError):
                self.waiting.remove(woken)

    def _may_open(self) -> bool:
        """Whether this thread may open a connection now; if so, that connection counts as open already."""
        with self.runtime.mutex:
            if self._open_number >= self.max_connections and not self.runtime.is_background():
                return False
            self._open_number += 1
            return True

    def note_closed(self) -> None:
        """Note that a connection which counts is closed, so that another may be opened."""
        with self.runtime.mutex:
            self._open_number -= 1
        self.wake_one()

    def wake_one(self) -> None:
        """Wake a thread that waits for a connection, if an idle one is there or a new one may be opened."""
        if self.turns:
            with self.runtime.mutex, contextlib.suppress(IndexError):  # another thread was faster
                if self.turns:
                    self.turns[0].connection = self.idle.pop()
                    self.turns.popleft().set()
                    return
        if self.waiting and (self.idle or self._open_number < self.max_connections):
            with contextlib.suppress(IndexError):
                self.waiting.popleft().set()

    def open(self, until: float) -> BlockingConnection:
        """A new connection, however many are open. Raises Disconnected or LockError."""
        asked_at = now()
        if self.address.clustered and not self.primacy.is_confirmed(NO_PRIMARY, until):
            raise Disconnected(NOT_NAMED, sent=False)
        connection = BlockingConnection(self, until)
        connection.last_answered_sent = asked_at
        if connection.stamp.identity != self._identity:
            if self._identity:
                self.drop_all()  # the older connections lead to another server, or to none
            self._identity = connection.stamp.identity
        return connection

    def close_idle(self) -> None:
        """Close the connections that no thread uses."""
        with contextlib.suppress(IndexError):
            while True:
                self.idle.pop().close()

    def drop_idle(self) -> None:
        """See ConnectionPool."""
        last_sent = now() - IDLE_AFTER
        for connection in snapshot(self.idle):
            if connection.last_answered_sent < last_sent:
                with contextlib.suppress(ValueError):  # another thread has taken the connection
                    self.idle.remove(connection)
                    connection.close()

    def drop_all(self) -> None:
        """Drop all connections: new ones may lead to another server."""
        self.close_idle()
        self._subscription.shut_down()

    async def wait_any(self, pending: Sequence[PendingReplies], number: int, until: float) -> list[int]:
        """See ConnectionPool. A batch counts as complete as soon as the first byte for it is there."""
        ready = [i for i, each in enumerate(pending) if each.is_complete]
        waiting: dict[int, list[int]] = {}
        for i, each in enumerate(pending):
            if not each.is_complete:
                waiting.setdefault(each.fileno, []).append(i)
        poll = select.poll()
        for fileno in waiting:
            poll.register(fileno, select.POLLIN)
        while waiting and len(ready) < number:
            events = poll.poll(None if until == FOREVER else math.ceil(max(0.0, until - now()) * 1000))
            if not events:
                break
            for fileno, _ in events:
                poll.unregister(fileno)
                ready += waiting.pop(fileno)
        return ready

    # The subscription

    def subscribe(self, channel: str) -> None:
        """See ConnectionPool. The first call starts the listener thread."""
        self._subscription.subscribe(channel)

    def unsubscribe_all(self) -> None:
        """See ConnectionPool."""
        self._subscription.wanted.clear()
        self.drop_all()

    # The end

    async def close(self) -> None:
        """See ConnectionPool. The listener thread then ends."""
        self.closed = True
        self._subscription.end()
        self.close_idle()

    def reset_after_fork(self) -> None:
        """See ConnectionPool. Closes this process's copies of the sockets; the connections belong to the parent."""
        for connection in snapshot(self.open_connections):
            connection.close_copy()
        self._start()
