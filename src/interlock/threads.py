"""The API for threads. `interlock.aio` has the same names for asyncio."""

from __future__ import annotations

import functools
import inspect as _inspect
import sys
import threading
import weakref
from contextlib import ExitStack
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
from ._core import TRY_FOR, run
from ._lease import BaseLease, BaseMultiLease, BaseReentrantLease, LeaseState, Reply
from ._names import checked_name, token_part
from ._section import BaseSection, Exit, loaded, pooled
from ._session import Session
from ._template import Template, busy_skips
from .connect import quorum
from .errors import AcquireTimeout, ConfigError, LeaseLost
from .ports.opening import opened
from .ports.threads import ThreadPort
from .primitives import barrier, latch, permits
from .primitives.barrier import BarrierState
from .primitives.election import Leader, Watch, election, leader
from .primitives.latch import LatchState
from .primitives.lock import LockState, lock, owned_by
from .primitives.once import Limits, OnceState, Ran, Skipped, once
from .primitives.permits import Holder, SemaphoreState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import redis


__all__ = [
    "Assurance", "Barrier", "BarrierState", "Election", "Holder", "Interlock", "Latch", "LatchState", "Leader",
    "Leadership", "Lease", "LeaseState", "Lock", "LockState", "MultiLease", "MultiLock", "Once", "OnceState",
    "Options", "RLock", "RWLock", "Ran", "ReadLock", "Semaphore", "SemaphoreState", "Skipped", "WriteLock",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
L = TypeVar("L")
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
    """Locks on one server, for threads.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `embedded://`), a client of
    redis-py or valkey-py whose parameters are taken over, or nothing: then $INTERLOCK_URL.

    `prefix` goes before every name; `max_ttl` (seconds) is the longest ttl that any lock may have, and so
    how long nothing is granted after a restart or failover that may have lost leases: `quarantine=False` turns that
    off. `try_for` (seconds) bounds a call that does not wait, `try_acquire()` or `timeout=0`: a server that does not
    answer within it is Unavailable. `label` tells people who we are.

    Raises ConfigError. Connects at the first use. Close it, or use it in a `with`: that gives back all that is held.
    Safe to share between threads; a child made by fork holds nothing and connects anew.
    """

    @staticmethod
    def _current_owner() -> threading.Thread:
        return threading.current_thread()

    def __init__(
        self,
        target: str | redis.Redis | object | None = None,
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
            for_asyncio=False,
        )
        port = self._port = opened(self._address, ThreadPort, self._memories)
        self._session = port.sink = Session(port, label, _thread, self.max_ttl, lambda: port, self.try_for)

    @classmethod
    def quorum(
        cls,
        servers: Sequence[str | redis.Redis | object],
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
        members = quorum(servers, for_asyncio=False)
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
            on_lost: called with the lease, in a thread of its own, when it is lost.
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
        """Mutual exclusion that its holder may enter again: the thread that has it, without I/O and with one fence.

        The same lock as `lock(name)`, and the same options. `owner` names a holder that is not a thread: who comes
        with the same word, in another process or after a restart, takes the lease over, with a new fence; the one
        before has lost it. Two threads of one process that come with it at the same moment may do that to each other.
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
        `on_lost` is called with the lease over all when any is lost. Raises ConfigError. Nothing is sent until it is
        acquired.
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
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
    @overload
    def synchronized(
        self, name: str, *, busy: Literal["skip"], **options: Unpack[Options]
    ) -> Callable[[Callable[P, R]], Callable[P, R | Skipped]]: ...
    def synchronized(
        self, name: str, *, busy: str = "wait", **options: Unpack[Options]
    ) -> Callable[[Callable[P, R]], Callable[P, R | Skipped]]:
        """Decorate a function or method: each call runs under the rlock whose name is made of the call's arguments.

        `name` is a format, as in "report:{user_id}" or "shop:{self.id}"; options as for `lock()`. When it is busy:
        "wait" (up to `timeout`), "raise" AcquireTimeout at once, or "skip": the call returns Skipped, which is false.
        Raises ConfigError; a call that lacks an argument which the name needs raises it, too.
        """
        skips, timeout = busy_skips(busy, name, options.get("timeout"))
        checked = self._options(**options)

        def decorate(function: Callable[P, R]) -> Callable[P, R | Skipped]:
            template = Template(name, function, for_asyncio=False)

            @functools.wraps(function)
            def synchronized(*args: P.args, **kwargs: P.kwargs) -> R | Skipped:
                asked = RLock(self, lock(template.name(args, kwargs), self.prefix), checked)
                with Section(asked) as section:
                    try:
                        lease = section.lease = asked.acquire(timeout)
                    except AcquireTimeout as error:
                        if skips:
                            return Skipped(asked.name, error.holder, None, None)
                        raise
                    lease.__enter__()
                    return function(*args, **kwargs)

            return synchronized

        return decorate

    def close(self) -> None:
        """Release all that is held, end all waiting, close the connections. Takes about a second at the most."""
        if not self._closed:
            self._closed = True
            try:
                run(self._session.close())
            finally:
                self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _thread() -> str:
    thread = threading.current_thread()
    try:
        return thread._interlock_word  # type: ignore[attr-defined,no-any-return]  # made once a thread
    except AttributeError:
        made = thread._interlock_word = token_part(thread.name)  # type: ignore[attr-defined]
        return made


class Lease(BaseLease):
    """One grant of a lock: hold it in a `with`, or release it yourself; any thread may."""

    __slots__ = ()

    @property
    def lost(self) -> threading.Event:
        """Set when the lease is lost."""
        event: threading.Event = self._lost_of(threading.Event)
        return event

    @property
    def ended(self) -> threading.Event:
        """Set when the lease ends, in whatever way: it is lost, it is released, or its Interlock is closed."""
        event: threading.Event = self._end_of(threading.Event)
        return event

    def release(self) -> bool:
        """Give it back: whether it was still ours. Safe to repeat. Raises Unavailable if nobody can tell."""
        return run(self._session.core.release(self._grant))

    def extend(self, ttl: float) -> None:
        """Make it last at least `ttl` seconds from now, renewed or not. Raises LeaseLost or Unavailable."""
        run(self._session.extend(self._grant, ttl))

    def execute(self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None) -> Reply:
        """Run one Redis command in the server if, and only if, the lease is still ours there: one atomic step.

        `keys` are those arguments that are keys (asked of the server if not given); in a cluster they must share
        the lock's slot. Returns the reply, strings as bytes. Never sent twice: raises Unavailable, saying whether
        it may have run; LeaseLost if it was not run.
        """
        return run(self._session.execute(self._grant, command, args, keys))  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        self.ensure()  # no body runs under a lease that has ended
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._session.core.leave(self._grant, error))


class ReentrantLease(BaseReentrantLease, Lease):
    """The lease of an rlock: it is given back as often as it was acquired, the last time to the server."""

    __slots__ = ()

    def release(self) -> bool:
        """Leave it once; the last time, give it back: whether it was still ours."""
        return self.state in {LeaseState.HELD, LeaseState.JEOPARDY} if self._inner() else super().release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inner():
            self._left_once(error)
        else:
            super().__exit__(kind, error, trace)


class MultiLease(BaseMultiLease[Lease]):
    """Several leases as one: `lease.fence["a"]` is the fence of one, `lease["a"]` its lease."""

    __slots__ = ()

    @property
    def lost(self) -> threading.Event:
        """Set when any of them is lost."""
        event: threading.Event = self._lost_of(threading.Event)
        return event

    @property
    def ended(self) -> threading.Event:
        """Set when any of them ends, in whatever way: it is lost, it is released, or the Interlock is closed."""
        event: threading.Event = self._end_of(threading.Event)
        return event

    def release(self) -> bool:
        """Give all back: whether all were still ours. Safe to repeat. Raises Unavailable if nobody can tell."""
        ours: list[bool] = []
        with ExitStack() as stack:  # each is released, whatever the others say
            for lease in self._leases.values():
                stack.callback(self._release_one, lease, ours)
        return all(ours)

    @staticmethod
    def _release_one(lease: Lease, ours: list[bool]) -> None:
        ours.append(lease.release())

    def extend(self, ttl: float) -> None:
        """Make all last at least `ttl` seconds from now. Raises LeaseLost or Unavailable."""
        for lease in self._leases.values():
            lease.extend(ttl)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.release)
            self.ensure()  # no body runs under leases one of which has ended
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = ExitStack()
        for lease in self._leases.values():
            stack.push(lease)
        stack.__exit__(kind, error, trace)


class Section(BaseSection):
    """What leaves one `with`."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        """Leave it: `args` are those of `__exit__`, after the lockable if `__exit__` was loaded from the class."""
        lockable = args[0] if len(args) > 3 else self.lockable
        section = self if self.lease is not None else lockable._entered_by_hand(threading.current_thread())
        before = None
        try:
            before = section.lease._holds()
            section.lease.__exit__(*args[-3:])
        except BaseException:
            section.give_up(before)  # what an interrupt has left
            raise
        finally:
            lockable._left(section)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lease is not None:
            self(kind, error, trace)


class Lockable(BaseLock, Generic[S, L]):
    """Something that can be held: a `with` holds it, a decorated function runs under it."""

    __slots__ = ()

    def acquire(self, timeout: float | Unset | None = UNSET) -> L:
        """Wait for it.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return run(self._take(timeout))  # type: ignore[no-any-return]

    def try_acquire(self) -> L | None:
        """Hold it if that is possible now, else None: one try, of `try_for` seconds at most.

        Raises Unavailable if the server does not answer in that time, or ConfigError.
        """
        try:
            return self.acquire(0)
        except AcquireTimeout:
            return None

    def __enter__(self) -> L:
        section = loaded(self, Section)
        frame = sys._getframe(1)
        if not (section.by_hand or frame.f_code.co_flags & _inspect.CO_GENERATOR) or not pooled(frame.f_back):
            section.who = weakref.ref(threading.current_thread())
        try:
            return run(self._enter(section))  # type: ignore[no-any-return]
        except BaseException:
            section.give_up()
            raise

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:
        __exit__ = Exit(Section)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call of it is under this."""
        if _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function.__qualname__} is `async def`: use interlock.aio for it")

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return locked

    def inspect(self) -> S:
        """Who holds it and who waits, now. For people: it is old when you read it."""
        state: S = run(self._state())
        return state

    def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever holds it, who is told `reason`: whether there was one.

        The next one gets it when the holder has let go, or its lease has run out. With `force` at once, though
        the holder may still be writing: that is unsafe unless fences are checked.
        """
        return run(self._revoke(reason, force=force))


class Lock(Lockable[LockState, Lease]):
    """A lock by name; see Interlock.lock."""

    __slots__ = ()
    _kind = Lease


class RLock(BaseRLock, Lock):
    """A lock that its holder may take again; see Interlock.rlock."""

    __slots__ = ()
    _kind = ReentrantLease

    def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for it; if this thread (or owner) has it, it is had once more, without I/O: the same lease.

        Each acquire wants its release; the last one gives it back. `timeout` is in seconds and bounds all of the
        call: None waits for ever, 0 does not wait; its own by default. Raises AcquireTimeout, Unavailable or
        ConfigError, and then leaves nothing behind; LeaseLost if this thread has it, and lost it.
        """
        return super().acquire(timeout)


class Semaphore(BasePermits, Lockable[SemaphoreState, Lease]):
    """Up to a limit of permits; see Interlock.semaphore."""

    __slots__ = ()
    _kind = Lease

    def acquire(self, timeout: float | Unset | None = UNSET, *, permits: int = 1) -> Lease:
        """Wait for so many permits, which one lease holds.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return run(self._take(timeout, _wanted(self._primitive, permits)))  # type: ignore[no-any-return]

    def try_acquire(self, *, permits: int = 1) -> Lease | None:
        """So many permits if they are free now, else None. Raises Unavailable or ConfigError."""
        try:
            return self.acquire(0, permits=permits)
        except AcquireTimeout:
            return None

    def available(self) -> int:
        """How many permits are free now. It is old when you read it."""
        return run(permits.available(self._session.core, self._primitive))

    def set_limit(self, limit: int) -> None:
        """Change the limit for everybody, in the server. Holders keep what they have.

        Requests that wait for more than that fail; clients that come with another limit are told so.
        """
        self._primitive = run(permits.set_limit(self._session.core, self._primitive, limit))


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

    def inspect(self) -> SemaphoreState:
        """Who reads or writes and who waits, now. For people: it is old when you read it."""
        return self.read().inspect()

    def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever reads or writes; see Lock.revoke."""
        return self.read().revoke(reason, force)


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

    def count_down(self, n: int = 1) -> int:
        """Count down by `n`, not below zero: how many are left.

        Raises Unavailable (it may have been counted then), BrokenBarrier if it was revoked, or ConfigError.
        """
        return run(latch.count_down(self._session.core, self._primitive, n))

    def count(self) -> int:
        """How many are left now."""
        return run(self._count())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left; at once if that is so.

        `timeout` is in seconds: None waits for ever, 0 does not wait. Raises AcquireTimeout; BrokenBarrier if the
        latch was revoked, or is gone from the server; Unavailable or ConfigError.
        """
        run(latch.wait(self._session.core, self._primitive, timeout_of(timeout)))

    def inspect(self) -> LatchState:
        """How many are left and who waits, now. For people: it is old when you read it."""
        return run(self._state())

    def revoke(self, reason: str) -> bool:
        """End it for all who wait, who are told `reason`: whether there was one that was not open."""
        return run(self._revoke(reason))


class Barrier(BaseBarrier):
    """So many parties wait for each other; see Interlock.barrier."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the others: which arrival this was, from 0 to parties - 1.

        `timeout` is in seconds: None waits for ever. One whose time is over breaks the barrier for all who wait, as
        does one that dies or is interrupted. Raises BrokenBarrier, until reset(); Unavailable or ConfigError.
        """
        return run(barrier.wait(self._session.core, self._primitive, timeout_of(timeout)))

    def reset(self) -> None:
        """Begin anew. Who waits is told BrokenBarrier; who comes from now on waits for the others again."""
        run(barrier.reset(self._session.core, self._primitive))

    def inspect(self) -> BarrierState:
        """Who has arrived, and whether it is broken, now. For people: it is old when you read it."""
        return run(self._state())

    def revoke(self, reason: str) -> bool:
        """Break it for all who wait, who are told `reason`, until reset(): whether it was not broken already."""
        return run(self._revoke(reason))


class Leadership(Lease):
    """The leader's lease."""

    __slots__ = ()

    @property
    def term(self) -> int:
        """Which reign it is: a number that only grows; the fence."""
        return self.fence

    def resign(self) -> bool:
        """Lead no more: whether this one still did. The next one is elected at once."""
        return self.release()


class Election(BaseElection, Lockable[LockState, Leadership]):
    """One of many leads; see Interlock.election. `acquire` and `campaign` are the same, and `with` leads."""

    __slots__ = ()
    _kind = Leadership

    def campaign(self, timeout: float | Unset | None = UNSET) -> Leadership:
        """Wait until this process leads: the leader's lease, with its term.

        `timeout` is in seconds: None waits for ever, 0 does not wait; its own by default. Raises AcquireTimeout,
        Unavailable or ConfigError, and then leaves nothing behind.
        """
        return self.acquire(timeout)

    def resign(self) -> bool:
        """Lead no more, if this process was elected by this object: whether it still led."""
        lease = self._elected()
        return lease is not None and lease.release()

    def leader(self) -> Leader | None:
        """Who leads now; None if nobody does. It is old when you read it."""
        return run(leader(self._session.core, self._primitive))

    def observe(self) -> Iterator[Leader | None]:
        """Who leads now, and then each change, as it comes: None while nobody leads. Ends when this is closed.

        Changes that follow each other quickly may be told as one. Raises Unavailable or ConfigError.
        """
        watch = Watch(self._session.core, self._primitive)
        try:
            while not watch.core.closed:
                yield run(watch.change())
        except ConfigError:
            if not watch.core.closed:
                raise
        finally:
            watch.close()

    def run(self, work: Callable[[Leadership], R], *, stop: threading.Event | None = None) -> R | None:
        """Lead and do `work(lease)`: what it returns; then resign. If the lease was lost meanwhile: campaign again.

        While the server is away, the campaign goes on. It ends, and None is returned, when `stop` is set, when this
        object or the lease resigns, or when the Interlock is closed. `work` is not interrupted, and leads until it
        returns (unless the lease has ended): it has to look at `stop`, and at lease.ended or lease.ensure(). What it
        returns counts, if the lease was not lost. Raises what `work` raises, and ConfigError.
        """
        self._interlock._check_not_closed()
        stopped = stop.is_set if stop is not None else None
        lease: Leadership | None = None
        while True:
            try:
                with Section(self) as section:
                    lease = run(self._elect(section, stopped))
                    if lease is None:
                        return None
                    lease.__enter__()
                    return work(lease)
            except LeaseLost as error:
                if not self._campaigns_again(lease, error):
                    return None


class Once(BaseOnce):
    """Work that runs on one machine only; see Interlock.once."""

    __slots__ = ()
    _kind = Lease

    def run(self, work: Callable[[Lease], R]) -> Ran[R] | Skipped:
        """Do `work(lease)`, unless another one does it or has done it: Ran, with its value, or Skipped.

        Raises what `work` raises; LeaseLost if it took more than at_most, or the lease ended otherwise before it did
        (it was lost, or the Interlock was closed); Unavailable.
        """
        with Section(self) as section:
            lease: Lease | Skipped = run(self._begin(section))
            if isinstance(lease, Skipped):
                return lease
            lease.__enter__()
            return self._done(lease, work(lease))

    def __call__(self, function: Callable[P, R]) -> Callable[P, Ran[R] | Skipped]:
        """Decorate a function: each call of it runs it once, or is skipped; see run()."""
        if _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function.__qualname__} is `async def`: use interlock.aio for it")

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> Ran[R] | Skipped:
            return self.run(lambda _: function(*args, **kwargs))

        return once

    def inspect(self) -> OnceState:
        """Who runs it and who has run it, now. For people: it is old when you read it."""
        return run(self._state())

    def forget(self) -> bool:
        """Let it run again, though it has been run: whether anything kept it from that."""
        return run(self._forget())

    def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever runs it; see Lock.revoke."""
        return run(self._revoke(reason, force=force))


_wanted = permits.wanted  # `permits` is also what the argument of acquire() is called
