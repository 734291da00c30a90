"""A process of a client: the real session, over a wire that the search holds, and threads that use one lock.

Theory. `Process.take` gives one input to the process, which then does all that follows from it. The inputs are: an
action of a thread, or its cancellation; a reply; the news that a connection broke; a push; and the moment in which the
process runs, so that its timers fire. A process that the search gives no input stands still, as after SIGSTOP. Nothing
else reaches the process: it gets the time from its input, and counts where others draw random numbers.

Rules that a process must keep by itself (the search judges all processes together):
(a) A lease that the client renews is in the book of renewals, from its grant to its end: also one that has passed on.
(b) A lease passes to the next caller only while it is certainly alive, and none of its requests is unanswered.
(c) No worker fails.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex

from interlock import Lease
from interlock._client.grant import AcquireOptions
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER
from interlock._quarantine.server_history import ServerHistory
from interlock._servers.single import SingleServer
from interlock._session.open_sessions import open_sessions
from interlock._session.session import Session
from interlock.errors import LockError

from .fingerprint import fingerprint
from .memory import RESOURCE
from .tasks import Cancelled, Future, Runtime, Task, Tasks
from .wire import Host, Pool

if TYPE_CHECKING:
    from interlock._client.grant import Grant
    from interlock._quarantine.stamp import IdentityStamp

    from .wire import Request

START: Final = 0.0  # by the clock of each process: the world begins
HORIZON: Final = 12  # the tick beyond which `Belief.until` does not look
ACQUIRES, LEAVES, RELEASES, EXTENDS, EXECUTES = "acquires", "leaves", "releases", "extends", "executes"
IDLE, ASKS, HOLDS, BUSY = "idle", "asks", "holds", "is busy"


class Shape(NamedTuple):
    """What the processes of a search are like. Times are in seconds; a tick is a second."""

    threads: int = 1
    ttl: float = 2.999
    """Of a lease; also the max_ttl. A key ends when its time is past: this one ends exactly three ticks later."""
    timeout: float | None = 0
    """Of an acquire: 0 does not wait, None waits for ever."""
    renews: bool = True
    joins: bool = False
    """Whether the threads of a process form a cohort."""
    listens: bool = False
    """Whether a process subscribes to its pushes."""
    silence: float = 0.9
    """After which a call gives up: at the next tick."""
    retry_for: float = 2.0


class Input(NamedTuple):
    """One input of a process."""

    kind: str
    """`acts`, `cancels`, `reply`, `breaks`, `push` or `runs`."""
    now: int
    host: Host
    handle: str = ""
    data: Any = None


class Belief(NamedTuple):
    """A section of a thread that relies on its lease."""

    thread: str
    token: bytes
    fence: int
    until: int
    """The last tick at which the lease says that it is alive."""
    deadline_ms: float


class View(NamedTuple):
    """What the search sees of a process."""

    awaited: tuple[tuple[str, int], ...] = ()
    """The handle of each request whose reply a coroutine awaits, and the server's process that has it."""
    next_timer: float = FOREVER
    threads: tuple[tuple[str, str], ...] = ()
    """The name and the state of each thread."""
    beliefs: tuple[Belief, ...] = ()
    subscribed_at: int = -1
    """The server's process at which it is subscribed; -1: at none."""
    has_rest: bool = False
    """Whether it holds, waits for, or takes back anything."""
    broken: str = ""
    """The rule that it broke."""


class _Address:
    """The part of an Address that the server reads."""

    kind = "tcp"
    display_url = "server"
    previous_identity = "-"
    can_fail_over = False
    sentinels = None
    timeout = 5.0

    def __init__(self, retry_for: float) -> None:
        self.retry_for = retry_for


class _OneServer(SingleServer):
    """See SingleServer."""

    async def _lossless(self, evidence: str, stamp: IdentityStamp) -> float | None:  # noqa: ARG002 (see SingleServer)
        """What `least_lossless_ttl` answers: a restart proves nothing; nor does a replica whose old primary is away."""
        return None if stamp.facts is not None and stamp.facts.promoted else math.inf


class _Random(bytes):
    """Stands in place of random bytes: the name of the coroutine that drew them, and a count."""

    def hex(self, sep: str | bytes = "", bytes_per_sep: SupportsIndex = 1) -> str:  # noqa: ARG002 (see bytes)
        """Return the words themselves."""
        return self.decode()


class Process:
    """One process."""

    running: Process | None = None  # the one that takes an input now

    def __init__(self, name: str, shape: Shape) -> None:
        Process.running = self
        self.name, self.shape = name, shape
        self.tasks = Tasks()
        self.tasks.now = START
        self.counts: dict[str, int] = {}
        address: Any = _Address(shape.retry_for)
        history, runtime = ServerHistory(shape.ttl), Runtime(self.tasks)
        self.pool = Pool(self.tasks, history, address, shape.silence)
        self.pool.listens = shape.listens
        server = _OneServer(address, history, runtime, self._make_pool)
        self.session = server.push_handler = Session(
            server, None, self._caller, shape.ttl, lambda: server, registry=False
        )
        open_sessions.discard(self.session)  # the real process ends nothing of this one
        core = self.session.core
        core.process_id, self.session.channel = name, name
        core.say_more = None  # for people
        self._watch_passes()
        self.session.waiters.on_tick = self.session.ends.on_tick = None
        self.options = AcquireOptions(shape.ttl, renew=shape.renews, joins=shape.joins)
        self.leases: dict[str, Any] = {}  # by thread: the lease of its section
        self.states: dict[str, str] = {}
        self.idle: dict[str, Future] = {}  # by thread: gets its next action
        self.broken = ""
        for i in range(shape.threads):
            thread = f"{name}{i + 1}"
            self.tasks.spawn(self._thread(thread), thread)
        self.pool.connect()  # each client has met the first server
        self.tasks.run()

    def _make_pool(self, *_: object) -> Pool:
        return self.pool

    def random_bytes(self) -> bytes:
        """Return what the current coroutine gets for random bytes."""
        name = self.tasks.current.name if self.tasks.current is not None else ""
        self.counts[name] = self.counts.get(name, 0) + 1
        return _Random(f"{name}.{self.counts[name]}".encode())

    def _caller(self, _: object) -> tuple[str, None]:
        assert self.tasks.current is not None
        return self.tasks.current.name, None

    # Threads

    async def _thread(self, name: str) -> None:
        while True:
            self.states[name] = HOLDS if name in self.leases else IDLE
            future = self.idle[name] = Future()
            action: str = await future
            del self.idle[name]
            self.states[name] = ASKS if action == ACQUIRES else BUSY
            with contextlib.suppress(LockError, Cancelled):
                await self._act(name, action)

    async def _act(self, name: str, action: str) -> None:
        core = self.session.core
        if action == ACQUIRES:
            make_lease: Any = Lease
            self.leases[name] = await core.acquire(core.attempt(RESOURCE, self.options, self.shape.timeout, make_lease))
            return
        grant: Grant = self.leases[name]._grant
        if action == EXTENDS:
            await core.holding.extend(grant, self.shape.ttl)
        elif action == EXECUTES:
            await core.holding.execute(grant, "SET", ["data", f"{name}:{grant.fence}", "PX", "60000"], ["data"])
        else:
            lease = self.leases.pop(name)
            holding = core.holding
            await (holding.exit_section(grant, None) if action == LEAVES else holding.release(grant))
            del lease

    # Inputs

    def take(self, given: Input) -> tuple[list[Request], frozenset[str]]:
        """Take an input. Returns the new requests, and the handles of earlier ones that still await replies."""
        Process.running = self
        pool, tasks = self.pool, self.tasks
        tasks.now, pool.host = START + given.now, given.host
        before = {handle: waiting.future for handle, waiting in pool.waiting.items()}
        pool.sent = []
        match given.kind:
            case "acts":
                self.idle[given.handle].resolve(given.data)
            case "reply":
                pool.waiting[given.handle].future.resolve(tuple(given.data.value))
            case "breaks":
                self._break(given)
            case "cancels":
                tasks.cancel(given.handle)
            case "push":
                self.session.dispatch_push(given.data.value)
            case _:
                assert given.kind == "runs"
        tasks.run()
        self._check()
        kept = frozenset(handle for handle, waiting in pool.waiting.items() if before.get(handle) is waiting.future)
        return pool.sent, kept

    def _break(self, given: Input) -> None:
        future, host = self.pool.waiting[given.handle]
        is_dead = host != given.host.number
        future.resolve(Disconnected("it closed the connection", sent=True, stale=is_dead))

    # Rules

    def _watch_passes(self) -> None:
        """Judge each lease that passes on, at the moment in which it does."""
        cohorts, find = self.session.core.cohorts, self.session.book.find
        pass_on = cohorts.pass_on

        def judged(grant: Grant, now: float) -> bool:
            unanswered, has_passed = grant.hold.unanswered, pass_on(grant, now)
            if not has_passed:
                return False
            following = cohorts.by_key[RESOURCE.keys[0]].section
            if grant.hold.deadline <= now:
                self.broken = "a lease passed on after its deadline"
            elif unanswered:
                self.broken = "a lease passed on while a request about it was unanswered"
            elif find(grant.token) is not following:
                self.broken = "a lease that passed on is not in the book of renewals"
            return True

        cohorts.pass_on = judged  # type: ignore[method-assign]

    def _check(self) -> None:
        tasks, book = self.tasks, self.session.book
        if tasks.failed:
            self.broken = tasks.failed
        for thread, lease in self.leases.items():
            grant = lease._grant
            alive = grant.reason_ended(tasks.now) is None
            if alive and grant.hold.renews and book.find(grant.token) is not grant:
                self.broken = f"{thread} relies on a lease that is not in the book of renewals"

    # What it looks like

    def view(self) -> View:
        """Return what the search sees."""
        session, pool = self.session, self.pool
        connection = pool.connection
        return View(
            tuple(sorted((handle, waiting.host) for handle, waiting in pool.waiting.items())),
            self.tasks.next_timer,
            tuple(sorted(self.states.items())),
            tuple(belief for thread, lease in sorted(self.leases.items()) if (belief := self._belief(thread, lease))),
            connection.host.number if connection is not None and pool.subscribed else -1,
            bool(
                session.book.held() or session.waiters.registered or session.owed
                or session.core.cohorts.by_key or session.ends.orphans
            ),
            self.broken,
        )  # fmt: skip

    def _belief(self, thread: str, lease: Any) -> Belief | None:
        grant: Grant = lease._grant
        until = round(self.tasks.now)
        if grant.reason_ended(until) is not None:
            return None
        while until < HORIZON and grant.reason_ended(until + 1) is None:
            until += 1
        return Belief(thread, grant.token.encode(), grant.fence, until, (grant.hold.deadline - START) * 1000)

    def fingerprint(self) -> bytes:
        """Return a hash of all that the process knows."""
        session = self.session
        return fingerprint(
            NAMES, session.server, session.core, session.renewer, session.waiters, session.undo,
            [[worker.asleep_until, worker.started, worker.wakeup] for worker in session.workers],
            self.pool.history, self.pool.waiting, self.pool.subscribed, self.pool.channel,
            self.pool.connection is not None and self.pool.connection.host,
            self.states, self.idle, self.leases, self.counts, self.broken,
            sorted(self.tasks.timers, key=lambda timer: timer[0]),
            [[task.name, task.work] for task in sorted(self.tasks.all, key=lambda task: task.name)],
        )  # fmt: skip

    def close(self) -> None:
        """Drop the process, so that nothing of it lives on."""
        Process.running = self
        for lease in self.leases.values():
            lease._grant.end_reason = "the search is over"
        for grant in self.session.book.held():
            grant.end_reason = "the search is over"
        self.tasks.close()
        for part in (self.session.core, self.session, self.pool, self):
            vars(part).clear()  # so that its cycles end here, and not in the garbage collector


def _name(value: Any) -> str:
    return value.name if isinstance(value, Task) else type(value).__name__


# What stands in place of objects: see `fingerprint`
NAMES: Final = dict.fromkeys((Process, Runtime, Tasks, Task, Session, _Address), _name)
