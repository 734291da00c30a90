"""The API for asyncio: the same names as for threads. One connection per event loop carries all its tasks.

Each class is a face of its core in `interlock._api`, where the signature, the docstring and the body of each method
stand once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, Unpack, overload

from ._api.asyncio import InterlockForAsyncio, Lockable
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
from ._api.scopes import LeaseForAsyncio, StopScope
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
    from collections.abc import Awaitable, Callable, Coroutine

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


class Lease(LeaseCore[asyncio.Event], LeaseForAsyncio):
    __slots__ = ()
    release = awaitable(LeaseCore[asyncio.Event]._release)
    extend = awaitable(LeaseCore[asyncio.Event]._extend)
    execute = awaitable(LeaseCore[asyncio.Event]._execute)


class MultiLease(MultiLeaseCore[asyncio.Event, Lease], LeaseForAsyncio):
    __slots__ = ()
    release = awaitable(MultiLeaseCore[asyncio.Event, Lease]._release)
    extend = awaitable(MultiLeaseCore[asyncio.Event, Lease]._extend)

    async def _release_each(self, leases: list[Lease]) -> list[bool | BaseException]:
        depths = [lease._depth for lease in leases]
        try:
            return await asyncio.gather(*(lease._release() for lease in leases), return_exceptions=True)
        except asyncio.CancelledError:
            for lease, depth in zip(leases, depths, strict=True):
                if not lease._ended and lease._depth == depth:  # cancelled before it began
                    lease._abandon()
            raise


class Leadership(LeadershipCore[asyncio.Event], Lease):
    __slots__ = ()
    resign = awaitable(LeadershipCore[asyncio.Event]._resign)


class Lock(LockCore[Lease], Lockable[LockState, Lease]):
    __slots__ = ()
    _lease_of: Callable[..., Lease] = Lease
    acquire = awaitable(LockCore[Lease]._acquire)
    try_acquire = awaitable(LockCore[Lease]._try_acquire)


class RLock(RLockCore[Lease], Lock):
    __slots__ = ()


class Semaphore(SemaphoreCore[Lease], Lockable[SemaphoreState, Lease]):
    __slots__ = ()
    _lease_of = Lease
    acquire = awaitable(SemaphoreCore[Lease]._acquire)
    try_acquire = awaitable(SemaphoreCore[Lease]._try_acquire)
    available = awaitable(SemaphoreCore[Lease]._available)
    set_limit = awaitable(SemaphoreCore[Lease]._set_limit)


class ReadLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a reader holds; see RWLock.read."""

    __slots__ = ()
    _lease_type = Lease
    acquire = awaitable(RWSideCore[Lease]._acquire)
    try_acquire = awaitable(RWSideCore[Lease]._try_acquire)


class WriteLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a writer holds; see RWLock.write."""

    __slots__ = ()
    _lease_type = Lease
    acquire = awaitable(RWSideCore[Lease]._acquire)
    try_acquire = awaitable(RWSideCore[Lease]._try_acquire)


class RWLock(RWLockCore):
    __slots__ = ()
    read = making(ReadLock, RWLockCore._read, RW_ADVICE)
    write = making(WriteLock, RWLockCore._write, RW_ADVICE)
    inspect = awaitable(RWLockCore._inspect)
    revoke = awaitable(RWLockCore._revoke)


class MultiLock(MultiLockCore[MultiLease], Lockable[dict[str, LockState | SemaphoreState], MultiLease]):
    __slots__ = ()
    _lease_type = MultiLease
    acquire = awaitable(MultiLockCore[MultiLease]._acquire)
    try_acquire = awaitable(MultiLockCore[MultiLease]._try_acquire)


class Latch(LatchCore):
    __slots__ = ()
    count_down = awaitable(LatchCore._count_down)
    count = awaitable(LatchCore._count)
    wait = awaitable(LatchCore._wait)
    inspect = awaitable(LatchCore._inspect)
    revoke = awaitable(LatchCore._revoke)


class Barrier(BarrierCore):
    __slots__ = ()
    wait = awaitable(BarrierCore._wait)
    reset = awaitable(BarrierCore._reset)
    inspect = awaitable(BarrierCore._inspect)
    revoke = awaitable(BarrierCore._revoke)


class Election(ElectionCore[Leadership, asyncio.Event], Lockable[LockState, Leadership]):
    __slots__ = ()
    _lease_type = Leadership
    _stop_scope = StopScope
    acquire = awaitable(ElectionCore[Leadership, asyncio.Event]._acquire)
    try_acquire = awaitable(ElectionCore[Leadership, asyncio.Event]._try_acquire)
    campaign = awaitable(ElectionCore[Leadership, asyncio.Event]._campaign)
    resign = awaitable(ElectionCore[Leadership, asyncio.Event]._resign)
    leader = awaitable(ElectionCore[Leadership, asyncio.Event]._leader)
    observe = awaitable(ElectionCore[Leadership, asyncio.Event]._observe)
    run = awaitable(ElectionCore[Leadership, asyncio.Event]._run)


class Once(OnceCore[Lease]):
    __slots__ = ()
    _lease_of = Lease
    inspect = awaitable(OnceCore[Lease]._inspect)
    forget = awaitable(OnceCore[Lease]._forget)
    revoke = awaitable(OnceCore[Lease]._revoke)
    run = awaitable(OnceCore[Lease]._run)
    if TYPE_CHECKING:

        def __call__(
            self, function: Callable[P, Awaitable[R]]
        ) -> Callable[P, Coroutine[object, object, Ran[R] | Skipped]]: ...


_Member = Lock | ReadLock | WriteLock | Semaphore  # of a multi
_Core = InterlockCore[Lease, MultiLease, _Member]


class Interlock(InterlockForAsyncio[Lease, MultiLease, _Member]):
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
    ls = awaitable(_Core._ls)
    ping = awaitable(_Core._ping)
    close = awaitable(_Core._close)
    if TYPE_CHECKING:

        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Literal["wait", "raise"] = "wait", **options: Unpack[Options]
        ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R]]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Literal["skip"], **options: Unpack[Options]
        ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R | Skipped]]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Callable[[Skipped], Awaitable[T]], **options: Unpack[Options]
        ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R | T]]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: Callable[[Skipped], T], **options: Unpack[Options]
        ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R | T]]]: ...
        @overload
        def synchronized(
            self, name: str | Callable[..., str], *, busy: T, **options: Unpack[Options]
        ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R | T]]]: ...
        def synchronized(
            self, name: str | Callable[..., str], *, busy: object = "wait", **options: Unpack[Options]
        ) -> object: ...

    else:
        synchronized = awaitable(_Core._synchronized)
