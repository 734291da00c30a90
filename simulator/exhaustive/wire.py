"""The connections of one process: each message becomes a request, and the search decides when that arrives, or never.

Theory. Each coroutine waits for one reply at a time, so its name also names the request (`handle`). A connection is
open at once, with the handshake of the server that is there at that moment; it ends with that server's process. The
process notices that when its call fails; the next call opens another connection, as a pool does whose idle connection
was closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._protocol.server import Disconnected
from interlock._quarantine.identity import NO_REPLID, parse_facts
from interlock._transports.connections import PendingReplies
from interlock._transports.resp import ReplyError, reader
from simulator.server import CLOCK_START

from .tasks import Future, Tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._connect.address import Address
    from interlock._protocol.server import PushHandler
    from interlock._quarantine.identity import Facts
    from interlock._quarantine.server_history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp
    from interlock._transports.connections import Command

    from .memory import Call

SHORTEST: Final = 0.001  # seconds that a call takes at least: a reply may arrive within them
AGE: Final = 100_000  # seconds for which the first server has run when a search begins


class Host(NamedTuple):
    """One process of the server."""

    number: int = 0
    began: int = -AGE
    """The tick at which it started."""
    loaded: int = 0
    """With how many keys it started."""
    since: int = -AGE
    """The tick at which it became the server of the address: later than its start if it was a replica before."""

    @property
    def is_promoted(self) -> bool:
        """Whether it was a replica before."""
        return self.began < self.since

    @property
    def identity(self) -> bytes:
        """Its identity, as records have it."""
        return self.facts(self.began).identity.encode()

    def facts(self, now: int) -> Facts:
        """Return the facts of its handshake, as the client reads them."""
        server = f"run_id:{f'process{self.number}':0<40}\r\nuptime_in_seconds:{now - self.began}\r\n"
        replication = f"connected_slaves:0\r\nmaster_replid:{f'history{self.number}':0<40}\r\n"
        past = f"rdb_last_load_keys_loaded:{self.loaded}\r\nrdb_last_load_keys_expired:0\r\n"
        followed = f"{f'history{self.number - 1}':0<40}" if self.is_promoted else NO_REPLID
        time = [b"%d" % (CLOCK_START // 1_000_000 + now), b"0"]
        facts = parse_facts(
            server.encode(), f"{replication}master_replid2:{followed}\r\n".encode(), time, past.encode()
        )
        assert facts is not None
        return facts


class Request(NamedTuple):
    """A message that a process has sent."""

    handle: str
    host: int
    """The number of the server's process."""
    calls: tuple[Call, ...]


class Waiting(NamedTuple):
    """A coroutine that waits for the reply to its request."""

    future: Future
    host: int


class Pending(PendingReplies):
    """Replies on their way: a future for all of them."""

    __slots__ = ("future",)

    def __init__(self, number: int, future: Future) -> None:
        super().__init__(number)
        self.future = future

    @property
    def is_complete(self) -> bool:
        """See PendingReplies."""
        return self.future.done


class Connection:
    """See Connection."""

    def __init__(self, pool: Pool, host: Host, stamp: IdentityStamp) -> None:
        self.pool, self.host, self.stamp = pool, host, stamp

    async def exchange(self, command: Command, until: float) -> object:
        """See Connection."""
        (reply,) = await self.receive(self.send([command], until), until)
        return reply

    def send(
        self,
        commands: Sequence[Command],
        until: float,  # noqa: ARG002 (see Connection)
    ) -> Pending:
        """See Connection. Each command is a script call."""
        return Pending(len(commands), self.pool.send(self.host.number, tuple(map(_script_call, commands))))

    async def receive(self, pending: PendingReplies, until: float) -> list[object]:
        """See Connection."""
        assert isinstance(pending, Pending)
        pool, future = self.pool, pending.future
        silence = Disconnected("no answer in time", sent=True, timed_out=True)
        now = pool.tasks.now
        pool.tasks.at(max(min(until, now + pool.silence), now + SHORTEST), future, silence)
        try:
            replies: tuple[Any, ...] = await future
        finally:
            pool.forget(future)
        return [ReplyError(reply) if isinstance(reply, str) else reply for reply in replies]

    def checkin(self) -> None:
        """See Connection."""

    def flush(self) -> None:
        """See Connection. What was sent is on its way."""

    async def read_unread(self, pending: PendingReplies, until: float) -> None:
        """See Connection. Every release waits for its reply here."""

    def discard(self, error: BaseException) -> None:
        """See Connection. Its replies reach nobody: see `Pool.forget`."""

    def drop_all(self, why: str) -> None:  # noqa: ARG002 (see Connection)
        """See Connection."""
        self.pool.connection = None


class Pool:
    """See ConnectionPool."""

    def __init__(self, tasks: Tasks, history: ServerHistory, address: Address, silence: float) -> None:
        self.tasks = tasks
        self.history = history
        self.address = address
        self.silence = silence  # seconds after which a call gives up
        self.push_handler: PushHandler
        self.host = Host()  # the server that is there now
        self.connection: Connection | None = None
        self.channel = ""  # to which the process wants to be subscribed
        self.subscribed = set[str]()
        self.waiting: dict[str, Waiting] = {}  # by handle
        self.sent: list[Request] = []  # since the last input

    def send(self, host: int, calls: tuple[Call, ...]) -> Future:
        """Send script calls. Returns the future that gets the replies."""
        assert self.tasks.current is not None
        handle, future = self.tasks.current.name, Future()
        self.waiting[handle] = Waiting(future, host)
        self.sent.append(Request(handle, host, calls))
        return future

    def forget(self, future: Future) -> None:
        """Note that nobody waits for this reply any more."""
        for handle, waiting in self.waiting.items():
            if waiting.future is future:
                del self.waiting[handle]
                return

    def connect(self) -> Connection:
        """Return the connection to the server that is there now: a new one if it is another process."""
        if self.connection is None or self.connection.host != self.host:
            stamp = self.history.identify(self.host.facts(round(self.tasks.now)), self.address)
            self.history.log_warnings()
            self.connection = Connection(self, self.host, stamp)
            self.subscribed.clear()
            if self.channel:
                self._subscribe()
        return self.connection

    # See ConnectionPool

    @property
    def ready(self) -> bool:
        """See ConnectionPool."""
        return self.connection is not None

    def take(self) -> Connection:
        """See ConnectionPool."""
        return self.connect()

    async def checkout(self, until: float) -> Connection:  # noqa: ARG002 (see ConnectionPool)
        """See ConnectionPool."""
        return self.connect()

    checkout_exclusive = checkout

    async def wait_any(self, pending: Sequence[PendingReplies], number: int, until: float) -> list[int]:
        """See ConnectionPool. Only a quorum calls this."""
        raise NotImplementedError

    def subscribe(self, channel: str) -> None:
        """See ConnectionPool."""
        if not self.channel and self.listens:
            self.channel = channel
            if self.connection is not None:
                self._subscribe()

    listens = False

    def _subscribe(self) -> None:
        """The subscription is in effect a moment later: when the coroutine that runs now waits."""

        async def subscribed() -> None:
            self.subscribed.add(self.channel)
            self.push_handler.subscribed()

        self.tasks.spawn(subscribed(), "subscriber")

    def drop_idle(self) -> None:
        """See ConnectionPool. Nobody forgets a connection here."""

    def unsubscribe_all(self) -> None:
        """See ConnectionPool. Only a cluster calls this."""

    def reset_after_fork(self) -> None:
        """See ConnectionPool. Nothing forks here."""

    async def close(self) -> None:
        """See ConnectionPool. Connections end with their process."""


def _script_call(command: Command) -> Call:
    """Return KEYS and ARGV, with the stamp, of an EVALSHA."""
    parser = reader()
    parser.feed(command)
    words: list[bytes] = parser.gets()
    number = int(words[2])
    return tuple(words[3 : 3 + number]), tuple(words[3 + number :])
