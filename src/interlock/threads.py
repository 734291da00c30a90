"""The API for threads. `interlock.aio` has the same names for asyncio.

Each class is a face of its core in `interlock._api`, where the signature, the docstring and the body of each method
stand once.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, Unpack, overload

from ._api.barrier import BarrierCore
from ._api.election import ElectionCore, LeadershipCore
from ._api.face import awaitable, making
from ._api.interlock import InterlockCore
from ._api.latch import LatchCore
from ._api.lease import LeaseCore, LeaseState
from ._api.lock import LockCore, RLockCore
from ._api.multi import MultiLockCore
from ._api.multilease import MultiLeaseCore
from ._api.once import OnceCore
from ._api.options import OptionsOf
from ._api.permits import RW_ADVICE, RWLockCore, RWSideCore, SemaphoreCore
from ._api.threads import InterlockForThreads, LeaseForThreads, Lockable, blocking, iterating
from ._protocol.acks import Assurance
from .errors import AcquireTimeout, BrokenBarrier, ConfigError, Deadlock, LeaseLost, LockError, Unavailable
from .primitives.barrier import BarrierState
from .primitives.election import Leader
from .primitives.latch import LatchState
from .primitives.lock import LockState
from .primitives.once import OnceState, Ran, Skipped
from .primitives.permits import Holder, SemaphoreState
from .primitives.registry import Listed, Party

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AcquireTimeout", "Assurance", "Barrier", "BarrierState", "BrokenBarrier", "ConfigError", "Deadlock", "Election",
    "Holder", "Interlock", "Latch", "LatchState", "Leader", "Leadership", "Lease", "LeaseLost", "LeaseState",
    "Listed", "Lock", "LockError", "LockState", "MultiLease", "MultiLock", "Once", "OnceState", "Options", "Party",
    "RLock", "RWLock", "Ran", "ReadLock", "Semaphore", "SemaphoreState", "Skipped", "Unavailable", "WriteLock",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Options(OptionsOf["Lease"], total=False):
    """How something is acquired and held; Interlock.lock says what each means, and what it is by default."""


class Lease(LeaseCore[threading.Event], LeaseForThreads):
    __slots__ = ()
    release = blocking(LeaseCore[threading.Event]._release)
    extend = blocking(LeaseCore[threading.Event]._extend)
    execute = blocking(LeaseCore[threading.Event]._execute)


class MultiLease(MultiLeaseCore[threading.Event, Lease], LeaseForThreads):
    __slots__ = ()
    release = blocking(MultiLeaseCore[threading.Event, Lease]._release)
    extend = blocking(MultiLeaseCore[threading.Event, Lease]._extend)


class Leadership(LeadershipCore[threading.Event], Lease):
    __slots__ = ()
    resign = blocking(LeadershipCore[threading.Event]._resign)


class Lock(LockCore[Lease], Lockable[LockState, Lease]):
    __slots__ = ()
    _lease_of: Callable[..., Lease] = Lease
    acquire = blocking(LockCore[Lease]._acquire)
    try_acquire = blocking(LockCore[Lease]._try_acquire)


class RLock(RLockCore[Lease], Lock):
    __slots__ = ()


class Semaphore(SemaphoreCore[Lease], Lockable[SemaphoreState, Lease]):
    __slots__ = ()
    _lease_of = Lease
    acquire = blocking(SemaphoreCore[Lease]._acquire)
    try_acquire = blocking(SemaphoreCore[Lease]._try_acquire)
    available = blocking(SemaphoreCore[Lease]._available)
    set_limit = blocking(SemaphoreCore[Lease]._set_limit)


class ReadLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a reader holds; see RWLock.read."""

    __slots__ = ()
    _lease_type = Lease
    acquire = blocking(RWSideCore[Lease]._acquire)
    try_acquire = blocking(RWSideCore[Lease]._try_acquire)


class WriteLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a writer holds; see RWLock.write."""

    __slots__ = ()
    _lease_type = Lease
    acquire = blocking(RWSideCore[Lease]._acquire)
    try_acquire = blocking(RWSideCore[Lease]._try_acquire)


class RWLock(RWLockCore):
    __slots__ = ()
    read = making(ReadLock, RWLockCore._read, RW_ADVICE)
    write = making(WriteLock, RWLockCore._write, RW_ADVICE)
    inspect = blocking(RWLockCore._inspect)
    revoke = blocking(RWLockCore._revoke)


class MultiLock(MultiLockCore[MultiLease], Lockable[dict[str, LockState | SemaphoreState], MultiLease]):
    __slots__ = ()
    _lease_type = MultiLease
    acquire = blocking(MultiLockCore[MultiLease]._acquire)
    try_acquire = blocking(MultiLockCore[MultiLease]._try_acquire)


class Latch(LatchCore):
    __slots__ = ()
    count_down = blocking(LatchCore._count_down)
    count = blocking(LatchCore._count)
    wait = blocking(LatchCore._wait)
    inspect = blocking(LatchCore._inspect)
    revoke = blocking(LatchCore._revoke)


class Barrier(BarrierCore):
    __slots__ = ()
    wait = blocking(BarrierCore._wait)
    reset = blocking(BarrierCore._reset)
    inspect = blocking(BarrierCore._inspect)
    revoke = blocking(BarrierCore._revoke)


class Election(ElectionCore[Leadership, threading.Event], Lockable[LockState, Leadership]):
    __slots__ = ()
    _lease_type = Leadership
    _stop_scope = nullcontext
    acquire = blocking(ElectionCore[Leadership, threading.Event]._acquire)
    try_acquire = blocking(ElectionCore[Leadership, threading.Event]._try_acquire)
    campaign = blocking(ElectionCore[Leadership, threading.Event]._campaign)
    resign = blocking(ElectionCore[Leadership, threading.Event]._resign)
    leader = blocking(ElectionCore[Leadership, threading.Event]._leader)
    observe = iterating(ElectionCore[Leadership, threading.Event]._observe)
    if TYPE_CHECKING:

        def run(self, work: Callable[[Leadership], R], *, stop: threading.Event | None = None) -> R | None: ...

    else:
        run = blocking(ElectionCore._run)


class Once(OnceCore[Lease]):
    __slots__ = ()
    _lease_of = Lease
    inspect = blocking(OnceCore[Lease]._inspect)
    forget = blocking(OnceCore[Lease]._forget)
    revoke = blocking(OnceCore[Lease]._revoke)
    if TYPE_CHECKING:

        def run(self, work: Callable[[Lease], R]) -> Ran[R] | Skipped: ...
        def __call__(self, function: Callable[P, R]) -> Callable[P, Ran[R] | Skipped]: ...

    else:
        run = blocking(OnceCore._run)


_Member = Lock | ReadLock | WriteLock | Semaphore  # of a multi
_Core = InterlockCore[Lease, MultiLease, _Member]


class Interlock(InterlockForThreads[Lease, MultiLease, _Member]):
    _rlock_type = RLock
    lock = making(Lock, _Core._lock)
    rlock = making(RLock, _Core._rlock)
    rwlock = making(RWLock, _Core._rwlock)
    semaphore = making(Semaphore, _Core._semaphore)
    multi = making(MultiLock, _Core._multi)
    latch = making(Latch, _Core._latch)
    barrier = making(Barrier, _Core._barrier)
    election = making(Election, _Core._election)
    once = making(Once, _Core._once)
    ls = blocking(_Core._ls)
    ping = blocking(_Core._ping)
    close = blocking(_Core._close)
    if TYPE_CHECKING:

        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Literal["wait", "raise"] = "wait", **options: Unpack[Options]
        ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Literal["skip"], **options: Unpack[Options]
        ) -> Callable[[Callable[P, R]], Callable[P, R | Skipped]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Callable[[Skipped], T], **options: Unpack[Options]
        ) -> Callable[[Callable[P, R]], Callable[P, R | T]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: T, **options: Unpack[Options]
        ) -> Callable[[Callable[P, R]], Callable[P, R | T]]: ...
        def synchronized(
            self, name: str | Callable[..., str], *, busy: object = "wait", **options: Unpack[Options]
        ) -> object: ...

    else:
        synchronized = awaitable(_Core._synchronized)
