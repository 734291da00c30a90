"""The API for asyncio: the same names as for threads. One connection per event loop carries all its tasks."""

from __future__ import annotations

import asyncio
import functools
import inspect as _inspect
import threading
import weakref
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from ._acks import Assurance
from ._base import (
    TTL,
    UNSET,
    AcquireOptions,
    BaseBarrier,
    BaseElection,
    BaseInterlock,
    BaseLatch,
    BaseLock,
    BaseMulti,
    BaseOnce,
    BasePermits,
    BaseRLock,
    BaseRWSide,
    Unset,
    timeout_of,
)
from ._core import TRY_FOR
from ._lease import BaseLease, BaseMultiLease, BaseReentrantLease, LeaseState, Reply
from ._names import checked_name, token_part
from ._scopes import Entered, StopScope, UntilAnyEnd
from ._section import BaseSection, Exit, loaded
from ._session import Session
from ._template import Template, busy_skips
from .connect import quorum
from .errors import AcquireTimeout, ConfigError, LeaseLost
from .ports.asyncio import AsyncioPort
from .ports.cluster import ClusterPort
from .ports.opening import opened
from .ports.quorum import QuorumPort
from .ports.threads import ThreadPort
from .primitives import barrier, latch, permits
from .primitives.barrier import BarrierState
from .primitives.election import Leader, Watch, election, leader
from .primitives.latch import LatchState
from .primitives.lock import LockState, lock, owned_by
from .primitives.once import Limits, OnceState, Ran, Skipped, once
from .primitives.permits import Holder, SemaphoreState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from types import TracebackType

    import redis.asyncio

    from ._core import Attempt, Grant, Port

__all__ = [
    "Assurance", "Barrier", "BarrierState", "Election", "Holder", "Interlock", "Latch", "LatchState", "Leader",
    "Leadership", "Lease", "LeaseState", "Lock", "LockState", "MultiLease", "MultiLock", "Once", "OnceState",
    "Options", "RLock", "RWLock", "Ran", "ReadLock", "Semaphore", "SemaphoreState", "Skipped", "WriteLock",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
L = TypeVar("L")
Running = Coroutine[object, object, R]  # what a decorated `async def` returns, as any other does
MONTH = 30 * 86_400.0


class Options(TypedDict, total=False):
    """How something is acquired and held; Interlock.lock says what each means, and what it is by default."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    on_lost: Callable[[Lease], object] | None
    acks: int | Literal["majority", "all"] | None
    fsync: bool


class Interlock(BaseInterlock):
    """Locks on one server, for asyncio.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `embedded://`), a client of
    redis.asyncio or valkey.asyncio whose parameters are taken over, or nothing: then $INTERLOCK_URL.

    `prefix` goes before every name; `max_ttl` (seconds) is the longest ttl that any lock may have, and so
    how long nothing is granted after a restart or failover that may have lost leases: `quarantine=False` turns that
    off. `try_for` (seconds) bounds a call that does not wait, `try_acquire()` or `timeout=0`: a server that does not
    answer within it is Unavailable. `label` tells people who we are.

    Raises ConfigError. May be made outside of any loop and used in several, one after another or in several threads;
    it connects at the first use in each. Close it in each loop, or use it in an `async with`: that gives back all that
    is held there.
    """

    @staticmethod
    def _current_owner() -> asyncio.Task[object] | None:
        return asyncio.current_task()

    def __init__(
        self,
        target: str | redis.asyncio.Redis | object | None = None,
        *,
        prefix: str = "lock:",
        max_ttl: float = 60.0,
        quarantine: bool = True,
        try_for: float = TRY_FOR,
        label: str | None = None,
    ) -> None:
        super().__init__(
            target,
            prefix=prefix,
            max_ttl=max_ttl,
            quarantine=quarantine,
            try_for=try_for,
            label=label,
            for_asyncio=True,
        )
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = weakref.WeakKeyDictionary()
        self._guard = threading.Lock()
        self._latest: tuple[asyncio.AbstractEventLoop | None, Session | None] = (None, None)

    @property
    def _session(self) -> Session:
        loop = asyncio.get_running_loop()
        latest, session = self._latest
        if latest is loop and session is not None and not session.core.closed:
            return session
        session = self._sessions.get(loop)
        if session is None or session.core.closed:
            self._check_not_closed()
            left = self._prune()
            port = opened(self._address, AsyncioPort, self._memories)
            session = port.sink = Session(port, self.label, _task, self.max_ttl, self._farewell, self.try_for)
            with self._guard:
                self._sessions[loop] = session
            for attempt in left:
                session.undo.add(attempt)
        self._latest = (loop, session)
        return session

    def _farewell(self) -> Port:
        """One that needs no loop."""
        port: Port = opened(self._address, ThreadPort, self._memories)
        return port

    def _prune(self) -> list[Attempt]:
        """Forget the loops that are over: what they left to be taken back. What is held there waits for the exit."""
        left: list[Attempt] = []
        with self._guard:  # loops of several threads
            for loop, session in list(self._sessions.items()):
                if loop.is_closed():
                    del self._sessions[loop]
                    left += session.abandon()
        return left

    @classmethod
    def quorum(
        cls,
        servers: Sequence[str | redis.asyncio.Redis | object],
        *,
        prefix: str = "lock:",
        max_ttl: float = 60.0,
        quarantine: bool = True,
        try_for: float = TRY_FOR,
        label: str | None = None,
    ) -> Self:
        """Locks on several servers that know nothing of each other: held is what a majority grants (Redlock).

        `servers` are URLs or clients of 3 or 5 single servers; the options are those of Interlock. It has lock, rlock,
        multi, election, once and synchronized; see docs/quorum.md. Raises ConfigError; at the first use also if a
        server is there twice.
        """
        members = quorum(servers, for_asyncio=True)
        return cls(members, prefix=prefix, max_ttl=max_ttl, quarantine=quarantine, try_for=try_for, label=label)

    def lock(
        self,
        name: str,
        *,
        ttl: float = TTL,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        on_lost: Callable[[Lease], object] | None = None,
        acks: int | Literal["majority", "all"] | None = None,
        fsync: bool = False,
    ) -> Lock:
        """Mutual exclusion under this name, on every machine. Not reentrant.

        Args:
            name: 1 to 512 bytes, without control characters.
            ttl: seconds after which a dead holder's lock is free: 30, or max_ttl if that is less. A living holder's is
                renewed every ttl/3.
            timeout: seconds to wait for it; None waits for ever, 0 not at all.
            renew: False makes a lease that ends after ttl, come what may.
            max_hold: seconds after which a holder is told that it has lost the lock, however alive it is.
            fair: strict order of arrival over all processes.
            on_lost: called (or awaited) with the lease when it is lost.
            acks: how many replicas must have the grant, so that it counts: a number, "majority" (of server and
                replicas), or "all"; of the most that there were. Else it is undone, and Unavailable raised.
            fsync: the grant must be on the disk of the server, and of so many replicas (Redis 7.2, Valkey).

        Raises ConfigError. Nothing is sent until it is acquired.

        """
        options = self._options(
            ttl=ttl, timeout=timeout, renew=renew, max_hold=max_hold, fair=fair, on_lost=on_lost, acks=acks, fsync=fsync
        )
        return Lock(self, lock(name, self.prefix), options)

    def rlock(self, name: str, *, owner: str | None = None, **options: Unpack[Options]) -> RLock:
        """Mutual exclusion that its holder may enter again: the task that has it, without I/O and with one fence.

        The same lock as `lock(name)`, and the same options. `owner` names a holder that is not a task: who comes
        with the same word, in another process or after a restart, takes the lease over, with a new fence; the one
        before has lost it. Two tasks of one process that come with it at the same moment may do that to each other.
        Raises ConfigError. Nothing is sent until it is acquired.
        """
        return RLock(self, lock(name, self.prefix, owned_by(owner)), self._options(**options))

    def rwlock(self, name: str, **options: Unpack[Options]) -> RWLock:
        """Many readers, `.read()`, or one writer, `.write()`: in order of arrival, so that neither starves.

        Options as for `lock()`; each reader has a lease of its own. Raises ConfigError.
        """
        self._require_supported("rwlock")
        return RWLock(self, checked_name(name), self._options(**options))

    def semaphore(self, name: str, limit: int, **options: Unpack[Options]) -> Semaphore:
        """Up to `limit` permits at a time, over all processes; in order of arrival. Options as for `lock()`.

        Permits are leased, so a crash gives them back. The limit is the server's: who comes with another one gets a
        ConfigError. Raises ConfigError. Nothing is sent until it is acquired.
        """
        return Semaphore(self, permits.semaphore(name, self.prefix, limit), self._options(**options))

    def multi(
        self,
        *lockables: Lock | ReadLock | WriteLock | Semaphore,
        timeout: float | None = None,
        on_lost: Callable[[MultiLease], object] | None = None,
    ) -> MultiLock:
        """All of these or none, without deadlock, in whatever order they are named here or elsewhere.

        Each is held as it says itself (its ttl, renew, max_hold); `timeout` (seconds) is for all together, and
        `on_lost` is called (or awaited) with the lease over all when any is lost. Raises ConfigError. Nothing is sent
        until it is acquired.
        """
        return MultiLock(self, MultiLock._checked(self, lockables), self._options(timeout=timeout, on_lost=on_lost))

    def latch(self, name: str, count: int, *, ttl: float = 3600.0) -> Latch:
        """A count that goes down to zero, once: who waits for that goes on, and so does who comes later.

        Whoever comes first sets the count. It is forgotten `ttl` seconds after anybody last came. Raises ConfigError.
        Nothing is sent until it is used.
        """
        self._check_not_closed()
        return Latch(self, latch.latch(name, self.prefix, count, ttl))

    def barrier(self, name: str, parties: int) -> Barrier:
        """So many parties wait for each other, and go on together; again and again. Raises ConfigError."""
        self._check_not_closed()
        return Barrier(self, barrier.barrier(name, self.prefix, parties))

    def election(self, name: str, **options: Unpack[Options]) -> Election:
        """One of many processes leads, until it dies, loses its lease, or resigns. Options as for `lock()`.

        A dead leader is replaced within ttl + 1 s. Raises ConfigError. Nothing is sent until it is used.
        """
        return Election(self, election(name, self.prefix), self._options(**options))

    def once(
        self, name: str, *, at_most: float, at_least: float = 0.0, key: str | None = None, keep: float = MONTH
    ) -> Once:
        """Work that runs on one machine only: the others skip it.

        Args:
            name: of the work.
            at_most: seconds that it may take. Then it is lost to whoever runs it, and another one may begin.
            at_least: seconds after its start before which no other run begins, however fast it was.
            key: runs once for each key, as a date or a version; one that failed is run again.
            keep: seconds for which it is remembered that the run for a key has succeeded.

        The run of a process that died is free again after 30 s (or `at_most`, if that is less). Raises ConfigError.

        """
        limits = Limits(at_most, at_least, keep, keyed=key is not None, max_ttl=self.max_ttl)
        return Once(self, once(name, self.prefix, key), self._options(ttl=limits.ttl), limits)

    @overload
    def synchronized(
        self, name: str, *, busy: Literal["wait", "raise"] = "wait", **options: Unpack[Options]
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Running[R]]]: ...
    @overload
    def synchronized(
        self, name: str, *, busy: Literal["skip"], **options: Unpack[Options]
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Running[R | Skipped]]]: ...
    def synchronized(
        self, name: str, *, busy: str = "wait", **options: Unpack[Options]
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Running[R | Skipped]]]:
        """Decorate an `async def`: each call runs under the rlock whose name is made of the call's arguments.

        `name` is a format, as in "report:{user_id}" or "shop:{self.id}"; options as for `lock()`. When it is busy:
        "wait" (up to `timeout`), "raise" AcquireTimeout at once, or "skip": the call returns Skipped, which is false.
        Raises ConfigError; a call that lacks an argument which the name needs raises it, too.
        """
        skips, timeout = busy_skips(busy, name, options.get("timeout"))
        checked = self._options(**options)

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Running[R | Skipped]]:
            template = Template(name, function, for_asyncio=True)

            @functools.wraps(function)
            async def synchronized(*args: P.args, **kwargs: P.kwargs) -> R | Skipped:
                asked = RLock(self, lock(template.name(args, kwargs), self.prefix), checked)
                async with Section(asked) as section:
                    try:
                        lease = section.lease = await asked.acquire(timeout)
                    except AcquireTimeout as error:
                        if skips:
                            return Skipped(asked.name, error.holder, None, None)
                        raise
                    await lease.__aenter__()
                    return await function(*args, **kwargs)

            return synchronized

        return decorate

    async def close(self) -> None:
        """Release all that is held in this loop, end its waiting, close its connection. Bounded in time."""
        self._closed = True
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            assert isinstance(session.port, AsyncioPort | ClusterPort | QuorumPort)
            try:
                await session.close()
            finally:
                await session.port.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _task() -> str:
    task = asyncio.current_task()
    return token_part(task.get_name()) if task else "-"


class Lease(Entered, BaseLease):
    """One grant of a lock: hold it in an `async with`, or release it yourself; any task of its loop may."""

    __slots__ = ("_bodies",)

    def __init__(self, session: Session, on_lost: Callable[[Lease], object] | None, grant: Grant) -> None:
        super(Entered, self).__init__(session, on_lost, grant)
        self._bodies = []

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease is lost."""
        event: asyncio.Event = self._lost_of(asyncio.Event)
        return event

    @property
    def ended(self) -> asyncio.Event:
        """Set when the lease ends, in whatever way: it is lost, it is released, or its Interlock is closed."""
        event: asyncio.Event = self._end_of(asyncio.Event)
        return event

    async def release(self) -> bool:
        """Give it back: whether it was still ours. Safe to repeat. Raises Unavailable if nobody can tell."""
        return await self._session.core.release(self._grant)

    async def extend(self, ttl: float) -> None:
        """Make it last at least `ttl` seconds from now, renewed or not. Raises LeaseLost or Unavailable."""
        await self._session.extend(self._grant, ttl)

    async def execute(
        self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None
    ) -> Reply:
        """Run one Redis command in the server if, and only if, the lease is still ours there: one atomic step.

        `keys` are those arguments that are keys (asked of the server if not given); in a cluster they must share
        the lock's slot. Returns the reply, strings as bytes. Never sent twice: raises Unavailable, saying whether
        it may have run; LeaseLost if it was not run.
        """
        return await self._session.execute(self._grant, command, args, keys)  # type: ignore[no-any-return]

    async def _leave(self, error: BaseException | None) -> None:
        await self._session.core.leave(self._grant, error)


class ReentrantLease(BaseReentrantLease, Lease):
    """The lease of an rlock: it is given back as often as it was acquired, the last time to the server."""

    __slots__ = ()

    async def release(self) -> bool:
        """Leave it once; the last time, give it back: whether it was still ours."""
        return self.state in {LeaseState.HELD, LeaseState.JEOPARDY} if self._inner() else await super().release()

    async def _leave(self, error: BaseException | None) -> None:
        if self._inner():
            self._left_once(error)
        else:
            await super()._leave(error)


class MultiLease(Entered, BaseMultiLease[Lease]):
    """Several leases as one: `lease.fence["a"]` is the fence of one, `lease["a"]` its lease."""

    __slots__ = ("_bodies",)

    def __init__(
        self,
        session: Session,
        on_lost: Callable[[MultiLease], object] | None,
        name: str,
        leases: dict[str, Lease],
    ) -> None:
        self._bodies = []  # before a loss can be told
        super(Entered, self).__init__(session, on_lost, name, leases)

    @property
    def lost(self) -> asyncio.Event:
        """Set when any of them is lost."""
        event: asyncio.Event = self._lost_of(asyncio.Event)
        return event

    @property
    def ended(self) -> asyncio.Event:
        """Set when any of them ends, in whatever way: it is lost, it is released, or the Interlock is closed."""
        event: asyncio.Event = self._end_of(asyncio.Event)
        return event

    async def release(self) -> bool:
        """Give all back: whether all were still ours. Safe to repeat. Raises Unavailable if nobody can tell."""
        depths = [(lease, lease._depth) for lease in self._leases.values()]
        try:
            ours = await asyncio.gather(*(lease.release() for lease in self._leases.values()), return_exceptions=True)
        except asyncio.CancelledError:
            for lease, depth in depths:
                if not lease._ended and lease._depth == depth:  # cancelled before it began
                    lease._abandon()
            raise
        for each in ours:
            if isinstance(each, BaseException):
                raise each
        return all(ours)

    async def extend(self, ttl: float) -> None:
        """Make all last at least `ttl` seconds from now. Raises LeaseLost or Unavailable."""
        for lease in self._leases.values():
            await lease.extend(ttl)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.release)
            self.ensure()  # no body runs under leases one of which has ended
            stack.pop_all()
        self._begin()
        return self

    async def _leave(self, error: BaseException | None) -> None:
        now = error
        try:
            for lease in reversed(self._leases.values()):
                try:
                    await lease._leave(now)
                except BaseException as raised:  # noqa: BLE001 (it is raised when the others were left, too)
                    if now is not None and raised.__context__ is None:
                        raised.__context__ = now
                    now = raised
            if now is not None and now is not error:
                raise now
        finally:
            now = error = None  # their tracebacks refer to this frame


class Section(BaseSection):
    """What leaves one `async with`."""

    __slots__ = ()

    async def __call__(self, *args: Any) -> None:
        """Leave it: `args` are those of `__aexit__`, after the lockable if `__aexit__` was loaded from the class."""
        lockable = args[0] if len(args) > 3 else self.lockable
        section = self if self.lease is not None else lockable._entered_by_hand(asyncio.current_task())
        before = None
        try:
            before = section.lease._holds()
            await section.lease.__aexit__(*args[-3:])
        except BaseException:
            section.give_up(before)  # what a cancellation or an interrupt has left
            raise
        finally:
            lockable._left(section)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lease is not None:
            await self(kind, error, trace)


class Lockable(BaseLock, Generic[S, L]):
    """Something that can be held: an `async with` holds it, a decorated function runs under it."""

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET) -> L:
        """Wait for it.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; nor does a
        cancellation.
        """
        return await self._take(timeout)  # type: ignore[no-any-return]

    async def try_acquire(self) -> L | None:
        """Hold it if that is possible now, else None: one try, of `try_for` seconds at most.

        Raises Unavailable if the server does not answer in that time, or ConfigError.
        """
        try:
            return await self.acquire(0)
        except AcquireTimeout:
            return None

    def __aenter__(self) -> Running[L]:
        return self._entering(loaded(self, Section))

    async def _entering(self, section: Section) -> L:
        try:
            if (task := asyncio.current_task()) is not None:
                section.who = weakref.ref(task)
            lease = await self._enter(section)
            await lease.__aenter__()
        except BaseException:
            section.give_up()
            raise
        return lease  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:
        __aexit__ = Exit(Section)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Running[R]]:
        """Decorate an `async def`: each call of it is under this."""
        if not _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is not `async def`: use interlock (for threads) for it")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self:
                return await function(*args, **kwargs)

        return locked

    async def inspect(self) -> S:
        """Who holds it and who waits, now. For people: it is old when you read it."""
        state: S = await self._state()
        return state

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever holds it, who is told `reason`: whether there was one.

        The next one gets it when the holder has let go, or its lease has run out. With `force` at once, though
        the holder may still be writing: that is unsafe unless fences are checked.
        """
        return await self._revoke(reason, force=force)


class Lock(Lockable[LockState, Lease]):
    """A lock by name; see Interlock.lock."""

    __slots__ = ()
    _kind = Lease


class RLock(BaseRLock, Lock):
    """A lock that its holder may take again; see Interlock.rlock."""

    __slots__ = ()
    _kind = ReentrantLease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for it; if this task (or owner) has it, it is had once more, without I/O: the same lease.

        Each acquire wants its release; the last one gives it back. `timeout` is in seconds and bounds all of the
        call: None waits for ever, 0 does not wait; its own by default. Raises AcquireTimeout, Unavailable or
        ConfigError, and then leaves nothing behind; LeaseLost if this task has it, and lost it.
        """
        return await super().acquire(timeout)


class Semaphore(BasePermits, Lockable[SemaphoreState, Lease]):
    """Up to a limit of permits; see Interlock.semaphore."""

    __slots__ = ()
    _kind = Lease

    async def acquire(self, timeout: float | Unset | None = UNSET, *, permits: int = 1) -> Lease:
        """Wait for so many permits, which one lease holds.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return await self._take(timeout, _wanted(self._primitive, permits))  # type: ignore[no-any-return]

    async def try_acquire(self, *, permits: int = 1) -> Lease | None:
        """So many permits if they are free now, else None. Raises Unavailable or ConfigError."""
        try:
            return await self.acquire(0, permits=permits)
        except AcquireTimeout:
            return None

    async def available(self) -> int:
        """How many permits are free now. It is old when you read it."""
        return await permits.available(self._session.core, self._primitive)

    async def set_limit(self, limit: int) -> None:
        """Change the limit for everybody, in the server. Holders keep what they have.

        Requests that wait for more than that fail; clients that come with another limit are told so.
        """
        self._primitive = await permits.set_limit(self._session.core, self._primitive, limit)


class RWLock:
    """Many readers or one writer; see Interlock.rwlock."""

    __slots__ = ("_interlock", "_name", "_options")

    def __init__(self, interlock: Interlock, name: str, options: AcquireOptions) -> None:
        self._interlock, self._name, self._options = interlock, name, options

    @property
    def name(self) -> str:
        """The name, without the prefix."""
        return self._name

    def read(self) -> ReadLock:
        """To be held together with other readers. Whoever writes may read as well, and go on reading."""
        return ReadLock(self._interlock, permits.reading(self._name, self._interlock.prefix), self._options)

    def write(self) -> WriteLock:
        """To be held alone. Who reads can't begin to write: that would wait for itself, and is refused."""
        return WriteLock(self._interlock, permits.writing(self._name, self._interlock.prefix), self._options)

    async def inspect(self) -> SemaphoreState:
        """Who reads or writes and who waits, now. For people: it is old when you read it."""
        return await self.read().inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever reads or writes; see Lock.revoke."""
        return await self.read().revoke(reason, force)


class ReadLock(BaseRWSide, Lockable[SemaphoreState, Lease]):
    """The part of a reader; see RWLock.read."""

    __slots__ = ()
    _kind = Lease


class WriteLock(BaseRWSide, Lockable[SemaphoreState, Lease]):
    """The part of a writer; see RWLock.write."""

    __slots__ = ()
    _kind = Lease


class MultiLock(BaseMulti, Lockable[dict[str, LockState | SemaphoreState], MultiLease]):
    """Several things, all or none; see Interlock.multi."""

    __slots__ = ()
    _kind = MultiLease


class Latch(BaseLatch):
    """A count that goes down to zero, once; see Interlock.latch."""

    __slots__ = ()

    async def count_down(self, n: int = 1) -> int:
        """Count down by `n`, not below zero: how many are left.

        Raises Unavailable (it may have been counted then), BrokenBarrier if it was revoked, or ConfigError.
        """
        return await latch.count_down(self._session.core, self._primitive, n)

    async def count(self) -> int:
        """How many are left now."""
        return await self._count()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left; at once if that is so.

        `timeout` is in seconds: None waits for ever, 0 does not wait. Raises AcquireTimeout; BrokenBarrier if the
        latch was revoked, or is gone from the server; Unavailable or ConfigError.
        """
        await latch.wait(self._session.core, self._primitive, timeout_of(timeout))

    async def inspect(self) -> LatchState:
        """How many are left and who waits, now. For people: it is old when you read it."""
        return await self._state()

    async def revoke(self, reason: str) -> bool:
        """End it for all who wait, who are told `reason`: whether there was one that was not open."""
        return await self._revoke(reason)


class Barrier(BaseBarrier):
    """So many parties wait for each other; see Interlock.barrier."""

    __slots__ = ()

    async def wait(self, timeout: float | None = None) -> int:
        """Wait for the others: which arrival this was, from 0 to parties - 1.

        `timeout` is in seconds: None waits for ever. One whose time is over breaks the barrier for all who wait, as
        does one that dies or is cancelled. Raises BrokenBarrier, until reset(); Unavailable or ConfigError.
        """
        return await barrier.wait(self._session.core, self._primitive, timeout_of(timeout))

    async def reset(self) -> None:
        """Begin anew. Who waits is told BrokenBarrier; who comes from now on waits for the others again."""
        await barrier.reset(self._session.core, self._primitive)

    async def inspect(self) -> BarrierState:
        """Who has arrived, and whether it is broken, now. For people: it is old when you read it."""
        return await self._state()

    async def revoke(self, reason: str) -> bool:
        """Break it for all who wait, who are told `reason`, until reset(): whether it was not broken already."""
        return await self._revoke(reason)


class Leadership(Lease):
    """The leader's lease."""

    __slots__ = ()

    @property
    def term(self) -> int:
        """Which reign it is: a number that only grows; the fence."""
        return self.fence

    async def resign(self) -> bool:
        """Lead no more: whether this one still did. The next one is elected at once."""
        return await self.release()


class Election(BaseElection, Lockable[LockState, Leadership]):
    """One of many leads; see Interlock.election. `acquire` and `campaign` are the same, and `async with` leads."""

    __slots__ = ()
    _kind = Leadership

    async def campaign(self, timeout: float | Unset | None = UNSET) -> Leadership:
        """Wait until this process leads: the leader's lease, with its term.

        `timeout` is in seconds: None waits for ever, 0 does not wait; its own by default. Raises AcquireTimeout,
        Unavailable or ConfigError, and then leaves nothing behind.
        """
        return await self.acquire(timeout)

    async def resign(self) -> bool:
        """Lead no more, if this process was elected by this object: whether it still led."""
        lease = self._elected()
        return lease is not None and await lease.release()

    async def leader(self) -> Leader | None:
        """Who leads now; None if nobody does. It is old when you read it."""
        return await leader(self._session.core, self._primitive)

    async def observe(self) -> AsyncIterator[Leader | None]:
        """Who leads now, and then each change, as it comes: None while nobody leads. Ends when this is closed.

        Changes that follow each other quickly may be told as one. Raises Unavailable or ConfigError.
        """
        watch = Watch(self._session.core, self._primitive)
        try:
            while not watch.core.closed:
                yield await watch.change()
        except ConfigError:
            if not watch.core.closed:
                raise
        finally:
            watch.close()

    async def run(self, work: Callable[[Leadership], Awaitable[R]], *, stop: asyncio.Event | None = None) -> R | None:
        """Lead and await `work(lease)`: what it returns; then resign. If the lease was lost meanwhile: campaign again.

        While the server is away, the campaign goes on. It ends, and None is returned, when `stop` is set, when
        another task lets this object or the lease resign, or when the Interlock is closed. `work` is cancelled then,
        and when the lease is lost; when `stop` is set, it leads until it has ended. Raises what `work` raises, and
        ConfigError.
        """
        self._interlock._check_not_closed()
        if stop is not None and stop.is_set():
            return None
        async with StopScope(stop):
            lease: Leadership | None = None
            while True:
                try:
                    async with Section(self) as section:
                        lease = await self._elect(section)
                        if lease is None:
                            return None
                        await UntilAnyEnd(lease).__aenter__()
                        return await work(lease)
                except LeaseLost as error:
                    if not self._campaigns_again(lease, error):
                        return None
        return None


class Once(BaseOnce):
    """Work that runs on one machine only; see Interlock.once."""

    __slots__ = ()
    _kind = Lease

    async def run(self, work: Callable[[Lease], Awaitable[R]]) -> Ran[R] | Skipped:
        """Await `work(lease)`, unless another one does it or has done it: Ran, with its value, or Skipped.

        Raises what `work` raises; LeaseLost if it took more than at_most, or the lease ended otherwise before it did
        (it was lost, or the Interlock was closed); Unavailable.
        """
        async with Section(self) as section:
            lease: Lease | Skipped = await self._begin(section)
            if isinstance(lease, Skipped):
                return lease
            await UntilAnyEnd(lease).__aenter__()
            return self._done(lease, await work(lease))

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Running[Ran[R] | Skipped]]:
        """Decorate an `async def`: each call of it runs it once, or is skipped; see run()."""
        if not _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is not `async def`: use interlock (for threads) for it")

        @functools.wraps(function)
        async def once(*args: P.args, **kwargs: P.kwargs) -> Ran[R] | Skipped:
            return await self.run(lambda _: function(*args, **kwargs))

        return once

    async def inspect(self) -> OnceState:
        """Who runs it and who has run it, now. For people: it is old when you read it."""
        return await self._state()

    async def forget(self) -> bool:
        """Let it run again, though it has been run: whether anything kept it from that."""
        return await self._forget()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever runs it; see Lock.revoke."""
        return await self._revoke(reason, force=force)


_wanted = permits.wanted  # `permits` is also what the argument of acquire() is called
