"""The connections of a simulated process to one server, over the virtual network: see `ConnectionPool`.

All commands share one connection, as with asyncio. If the connection breaks, a client that has subscribed connects
again by itself, so that it misses pushes for a short time only.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.timing import FOREVER
from interlock._quarantine.primacy import TRUSTED_FOR
from interlock._transports.asyncio.connection import SILENCE_LIMIT
from interlock._transports.connections import PendingReplies
from interlock._transports.resp import PING, ReplyError, reader
from interlock.errors import Unavailable

from .chance import MESSAGE, TRAFFIC
from .coroutines import Future, Process, Timer
from .network import Journey, Network
from .server_group import ServerGroup
from .sim_runtime import SimRuntime, current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._connect.address import Address
    from interlock._protocol.resource import Argument
    from interlock._protocol.server import PushHandler
    from interlock._quarantine.identity import Facts
    from interlock._quarantine.server_history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp
    from interlock._transports.connections import Command

    from .server_group import Host


IO_TIMEOUT: Final = 5.0  # seconds without an answer, as in interlock._connect


class SimPending(PendingReplies):
    """Replies on their way: a future for all of them."""

    __slots__ = ("future", "sent_at")

    def __init__(self, number: int, sent_at: float, began: float) -> None:
        super().__init__(number)
        self.future = Future(began)
        self.sent_at = sent_at  # by the clock of the process

    @property
    def is_complete(self) -> bool:
        """See PendingReplies."""
        return self.future.done


class SimConnection:
    """See Connection. It leads to one process of a server, and never to the process that replaces it."""

    def __init__(self, pool: SimPool, host: Host, stamp: IdentityStamp, asked_at: float) -> None:
        self.pool = pool
        self.process = pool.process
        self.host = host
        self.stamp = stamp
        self.broken = False  # whether the connection is broken, and the client knows that
        self.unanswered: set[Future] = set()
        self.silent_since = pool.process.world.now  # when the last reply arrived, or the wait for one began
        self.last_answered_sent = asked_at  # when the last request with a reply was sent, see `_quarantine.primacy`

    async def exchange(self, command: Command, until: float) -> object:
        """See Connection."""
        (reply,) = await self.receive(self.send([command], until), until)
        return reply

    def send(
        self,
        commands: Sequence[Command],
        until: float,  # noqa: ARG002 (see Connection)
    ) -> SimPending:
        """See Connection. A command is a script call or PING."""
        if self.broken:
            raise Disconnected("it closed the connection", sent=False)
        process, network = self.process, self.pool.network
        pending = SimPending(len(commands), self.pool.runtime.now(), process.world.now)
        if not self.unanswered:
            self.silent_since = process.world.now
        self.unanswered.add(pending.future)
        if commands[0] == PING:
            journey = Journey(current(process.world), MESSAGE)
            network.deliver(self, journey, lambda: None, lambda: pending.future.resolve([b"PONG"]))
            return pending
        calls = [_script_call(command) for command in commands]
        for name, _, keys, args in calls:
            if name != "EVAL" or args[0] != "execute":  # else it repeats an execute after NOSCRIPT
                self.pool.on_send(keys, args[:-1])
        by_text = calls[0][0] == "EVAL"
        network.send(
            self,
            Journey(process.world.current or process, MESSAGE),
            [(script, [*map(_encoded, keys)], [*map(_encoded, args)]) for _, script, keys, args in calls],
            pending.future,
            by_text=by_text,
            once=any(args[0] == "execute" for *_, args in calls),
        )
        return pending

    async def receive(self, pending: PendingReplies, until: float) -> list[object]:
        """See Connection."""
        assert isinstance(pending, SimPending)
        process, future, now = self.process, pending.future, self.pool.runtime.now()
        silence = Disconnected("no answer in time", sent=True, timed_out=True)
        process.world.at(process.when(_limit(until, now)), Timer(future, silence), process)
        try:
            replies: list[Any] = await future
        except Disconnected as error:
            if error is silence and process.world.now - self.silent_since >= SILENCE_LIMIT:
                self.pool.drop(self, "no answer in time")
            raise
        finally:
            self.unanswered.discard(future)
        return self._received(replies, pending)

    def _received(self, replies: list[Any], pending: SimPending) -> list[object]:
        self.pool.answered_at = self.silent_since = self.process.world.now
        self.answered(pending.sent_at)
        self.stamp.answered_at = self.pool.runtime.now()
        self.pool.network.record.counts["script unknown"] += sum(
            isinstance(reply, ServerError) and str(reply).startswith("NOSCRIPT") for reply in replies
        )
        return [ReplyError(str(reply)) if isinstance(reply, ServerError) else reply for reply in replies]

    def expect(self, pending: SimPending) -> None:
        """Let this reply arrive although no task waits for it."""
        pending.future.watchers.append(lambda: self._arrived(pending))

    def _arrived(self, pending: SimPending) -> None:
        value = pending.future.value
        self.unanswered.discard(pending.future)
        self.pool.network.record.counts["reply that nobody waited for"] += 1
        if isinstance(value, Exception):
            pending.error = value
        else:
            pending.replies += self._received(value, pending)

    def answered(self, sent: float) -> None:
        """Note that the reply to a request sent at this time has arrived."""
        if sent - self.last_answered_sent <= TRUSTED_FOR:  # else there may have been a pause in between
            self.last_answered_sent = max(self.last_answered_sent, sent)

    def checkin(self) -> None:
        """See Connection."""

    def flush(self) -> None:
        """See Connection. What was sent is on its way."""

    async def read_unread(self, pending: PendingReplies, until: float) -> None:
        """See Connection. The reply arrives by itself."""
        with contextlib.suppress(Disconnected):
            await self.receive(pending, until)

    def discard(self, error: BaseException) -> None:
        """See Connection."""

    def drop_all(self, why: str) -> None:
        """See Connection."""
        self.pool.drop(self, why)


class SimPool:
    """See ConnectionPool."""

    def __init__(
        self, process: Process, network: Network, history: ServerHistory, runtime: SimRuntime, isolation_grace: float
    ) -> None:
        self.process = process
        self.network = network
        self.history = history
        self.runtime = runtime
        self.isolation_grace = isolation_grace  # seconds for which an isolated primary may go on granting
        self.trusted_for = TRUSTED_FOR if network.group.promotes else FOREVER
        self.push_handler: PushHandler
        self.on_send: Callable[[Sequence[str], Sequence[Argument]], None] = lambda _keys, _args: None
        self.on_push: Callable[[bytes], None] = lambda _payload: None
        self.on_subscribed: Callable[[], None] = lambda: None
        self.connection: SimConnection | None = None
        self.subscribed: set[str] = set()
        self.known_hosts: dict[Host, float] = {}  # the hosts to which the process was ever connected, and since when
        self.answered_at = -FOREVER  # when the last reply arrived
        self.pushes_lost_until = 0.0  # until when pushes may be lost, since the subscription is broken
        self._waiting: list[Callable[[SimConnection | Disconnected], None]] = []  # to call when a connection is open
        self._opening = 0  # the number of the connection that is opening; 0: none
        self._opened = 0  # how many connections there were
        self._channel: str | None = None
        self._pause = 0.0  # seconds before the listener connects again

    @property
    def ready(self) -> bool:
        """See ConnectionPool."""
        return self.connection is not None

    def take(self) -> None:
        """See ConnectionPool. Returns no connection, so that each call passes the point `before_send`."""

    async def checkout(self, until: float) -> SimConnection:
        """See ConnectionPool. Passes the point `before_send` first."""
        network, task = self.network, current(self.process.world)
        task.sends = True
        if task.traps:
            await task.before_send()
        weather = network.weather
        if weather.refused or weather.replica:
            journey = Journey(task, TRAFFIC)
            for fault, likelihood in (
                ("connection refused", weather.refused),
                ("connected to a replica", weather.replica),
            ):
                if network.strikes(journey, fault, likelihood):
                    await self.runtime.sleep_until(min(until, self.runtime.now() + network.trip(journey)))
                    if fault == "connection refused":
                        raise Disconnected("connection refused", sent=False)
                    raise Unavailable(f"{ServerGroup.display_url} is a read-only replica. Connect to its primary")
        limit, asked_at = _limit(until, self.runtime.now()), self.runtime.now()
        while (connection := await self._any_connection(limit)).last_answered_sent < asked_at - self.trusted_for:
            await self._confirm(connection, limit)
        return connection

    checkout_exclusive = checkout

    async def wait_any(self, pending: Sequence[PendingReplies], number: int, until: float) -> list[int]:
        """See ConnectionPool."""
        futures = [each.future for each in pending if isinstance(each, SimPending)]
        waiting = [future for future in futures if not future.done]
        missing = number - (len(pending) - len(waiting))
        if missing > 0 and waiting and until > self.runtime.now():
            enough = Future()

            def completed() -> None:
                nonlocal missing
                missing -= 1
                if missing == 0:
                    enough.resolve(None)

            self.process.world.at(self.process.when(until), Timer(enough, None), self.process)
            for each in waiting:
                each.watchers.append(completed)
            try:
                await enough
            finally:
                for each in waiting:
                    each.watchers.remove(completed)
        return [i for i, each in enumerate(pending) if each.is_complete]

    async def _confirm(self, connection: SimConnection, limit: float) -> None:
        """Ask other servers whether the connection still leads to the primary; drop the connection if it does not."""
        asked_at, future = self.runtime.now(), Future()
        journey = Journey(current(self.process.world), TRAFFIC)
        self.network.ask_for_primary(self.process, journey, future.resolve)
        late = Disconnected("nobody says who the primary is", sent=False, timed_out=True)
        self.process.world.at(self.process.when(limit), Timer(future, late), self.process)
        if await future is connection.host:
            connection.last_answered_sent = max(connection.last_answered_sent, asked_at)
        else:
            self.network.record.counts["connection to an old primary dropped"] += 1
            self.drop(connection, "it is not the primary any more")

    # Opening

    async def _any_connection(self, limit: float) -> SimConnection:
        if self.connection is not None:
            return self.connection
        future = Future()
        self.open(future.resolve)
        late = Disconnected("no connection in time", sent=False, timed_out=True)
        self.process.world.at(self.process.when(limit), Timer(future, late), self.process)
        connection: SimConnection = await future
        return connection

    def open(self, then: Callable[[SimConnection | Disconnected], None]) -> None:
        """Open a connection, unless one is opening; call `then` with the connection or the error."""
        self._waiting.append(then)
        if self._opening:
            return
        self._opened += 1
        number = self._opening = self._opened
        asked_at = self.runtime.now()
        world, journey = self.process.world, Journey(self.process, TRAFFIC)

        def opened(result: SimConnection | Disconnected) -> None:
            if self._opening == number:
                self._opening = 0
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    each(result)

        def connected(host: Host | None, facts: Facts | None) -> None:
            if self._opening != number:
                return
            if host is None or facts is None:
                opened(Disconnected("connection refused", sent=False))
                return
            facts = facts._replace(sent_at=asked_at)
            stamp = self.history.identify(facts, ADDRESS, self.isolation_grace)
            self.history.log_warnings()
            connection = self.connection = SimConnection(self, host, stamp, asked_at)
            host.links.add(connection)
            self.known_hosts.setdefault(host, world.now)
            if self._channel is not None:
                self._subscribe(connection, self._channel)
            opened(connection)

        self.network.connect(self.process, journey, connected)
        silent = Disconnected("no answer in time", sent=False, timed_out=True)
        world.at(world.now + IO_TIMEOUT, lambda: opened(silent), self.process)

    def drop(self, connection: SimConnection, why: str) -> None:
        """Drop a connection, and fail each wait for a reply on it: now the client learns that it is broken."""
        if connection.broken:
            return
        connection.broken = True
        connection.host.links.discard(connection)
        if self._channel is not None:
            connection.host.unsubscribe(self._channel.encode(), self)
        for future in list(connection.unanswered):
            future.resolve(Disconnected(why, sent=True))
        if self.connection is connection:
            self.connection = None
            self.subscribed.clear()
            if self._channel is not None:
                self._stay_subscribed()

    def _stay_subscribed(self) -> None:

        def connected(result: SimConnection | Disconnected) -> None:
            if isinstance(result, Disconnected):
                self._pause = min(1.0, self._pause * 2 or 0.02)
                self.process.world.at(self.process.world.now + self._pause, self._stay_subscribed, self.process)
            else:
                self._pause = 0.0

        if self.connection is None and self.process.alive:
            self.open(connected)

    # The subscription

    def subscribe(self, channel: str) -> None:
        """See ConnectionPool. There is one channel for each client."""
        if self._channel is None:
            self._channel = channel
            if self.connection is not None:
                self._subscribe(self.connection, channel)
            else:
                self._stay_subscribed()

    @property
    def listens(self) -> bool:
        """Whether the client has subscribed to its channel, or tries to."""
        return self._channel is not None

    def resubscribe(self) -> None:
        """Connect and subscribe again, in a process restored from a snapshot: its connection is dead."""
        self._channel = self.push_handler.channel
        self._stay_subscribed()

    def receive_push(self, payload: bytes) -> None:
        """Handle a push that has arrived."""
        self.on_push(payload)
        self.push_handler.dispatch_push(payload)

    def break_subscription(self, noticed_after: float) -> None:
        """A fault: break the connection that receives the pushes; the client notices this many seconds later."""
        connection = self.connection
        if (
            connection is not None
            and self._channel is not None
            and connection.host.unsubscribe(self._channel.encode(), self)
        ):
            self.network.record.counts["subscription broken"] += 1
            self.pushes_lost_until = self.process.world.now + noticed_after
            self.process.world.at(
                self.process.world.now + noticed_after,
                lambda: self.drop(connection, "it closed the connection"),
                self.process,
            )

    def end_subscription(self) -> None:
        """End the subscription: the process has crashed, and the server has noticed."""
        if self.connection is not None and self._channel is not None:
            self.connection.host.unsubscribe(self._channel.encode(), self)

    def _subscribe(self, connection: SimConnection, channel: str) -> None:
        world, journey = self.process.world, Journey(self.process, TRAFFIC)
        acknowledged: list[bool] = []

        def arrived() -> None:
            if not connection.broken:
                connection.host.subscribe(channel.encode(), self)

        def answered() -> None:
            if self.connection is connection:
                self.subscribed.add(channel)
                acknowledged.append(True)
                self.push_handler.subscribed()
                self.on_subscribed()

        def time_is_over() -> None:
            if not acknowledged:
                self.drop(connection, "no answer in time")

        self.network.deliver(connection, journey, arrived, answered)
        world.at(world.now + IO_TIMEOUT, time_is_over, self.process)

    def drop_idle(self) -> None:
        """See ConnectionPool. Nobody forgets a connection here."""

    def unsubscribe_all(self) -> None:
        """See ConnectionPool. Only a cluster calls this."""

    # The end

    async def close(self) -> None:
        """See ConnectionPool. Connections end with their process."""

    def reset_after_fork(self) -> None:
        """See ConnectionPool. Nothing forks here."""


def _limit(until: float, now: float) -> float:
    """The time at which a client stops waiting for the network."""
    return max(min(until, now + IO_TIMEOUT), now + 0.001)


def _script_call(command: Command) -> tuple[str, str, list[str], list[str]]:
    """EVAL or EVALSHA, the script's text or digest, the KEYS, and the ARGV with the stamp."""
    parser = reader()
    parser.feed(command)
    name, script, number, *rest = (word.decode(errors="surrogateescape") for word in parser.gets())
    return name, script, rest[: int(number)], rest[int(number) :]


def _encoded(value: str) -> bytes:
    """An argument as it travels."""
    return value.encode(errors="surrogateescape")


class _Address:
    """The part of an Address that the servers read."""

    kind = "tcp"
    display_url = ServerGroup.display_url
    previous_identity = "-"
    retry_for = 0.0
    can_fail_over = True
    sentinels = None
    timeout = IO_TIMEOUT


def as_address(address: Any) -> Address:
    """This object, typed as an Address."""
    found: Address = address
    return found


ADDRESS: Final = as_address(_Address)
