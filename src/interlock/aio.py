# scripts/generate writes threads.py from this file: the same text with `def` and `run(...)` (ADR 37).
"""The API for asyncio: the same names as for threads. The tasks of a loop share one connection to each server.

Each public method stands here with its signature and its docstring, and awaits the method of a core in `interlock._api`
that does the work: `acquire` awaits `_acquire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Never, ParamSpec, TypedDict, TypeVar, Unpack, overload

from ._api.asyncio import InterlockForAsyncio, Lockable, MultiLeaseForAsyncio
from ._api.barrier import BarrierCore
from ._api.election import ElectionCore, LeadershipCore
from ._api.interlock import MAX_CONNECTIONS, MONTH
from ._api.latch import LatchCore
from ._api.lease import LeaseCore, LeaseState
from ._api.lock import LockCore, RLockCore
from ._api.misuse_errors import advising, making, refuse_bare
from ._api.multi import MultiLockCore
from ._api.once import OnceCore
from ._api.options import UNSET
from ._api.permits import RWLockCore, RWSideCore, SemaphoreCore
from ._api.scopes import LeaseEvent, LeaseForAsyncio, StopScope
from ._protocol.acks import Assurance
from ._protocol.retry_for import BY_TIMEOUT
from ._protocol.timing import DEFAULT_TTL, MAX_TTL, TRY_FOR
from .errors import AcquireTimeout, BrokenBarrier, ConfigError, Deadlock, LeaseLost, LockError, NotHeld, Unavailable
from .primitives.barrier import BarrierState
from .primitives.election import Leader
from .primitives.latch import LatchState
from .primitives.lock import LockState
from .primitives.once import OnceState, Ran, Skipped
from .primitives.permits import Holder, SemaphoreState
from .primitives.registry import Listed, Party

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
    from typing import Self

    from ._api.lease import Reply
    from ._protocol.unset import Unset

__all__ = [
    "AcquireTimeout", "Assurance", "Barrier", "BarrierState", "BrokenBarrier", "ConfigError", "Deadlock", "Election",
    "Holder", "Interlock", "Latch", "LatchState", "Leader", "Leadership", "Lease", "LeaseLost", "LeaseState",
    "Listed", "Lock", "LockError", "LockState", "MultiLease", "MultiLock", "NotHeld", "Once", "OnceState", "Options",
    "Party", "RLock", "RWLock", "Ran", "ReadLock", "Semaphore", "SemaphoreState", "Skipped", "Unavailable", "WriteLock",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Options(TypedDict, total=False):
    """How something is acquired and held; Interlock.lock says what each means, and what it is by default."""

    ttl: float
    timeout: float | None
    renew: bool
    max_hold: float | None
    fair: bool
    confirm: bool | None
    max_waiters: int | None
    on_lost: Callable[[Lease], object] | None
    acks: int | Literal["majority", "all"] | None
    fsync: bool


class Lease(LeaseCore, LeaseForAsyncio):
    """One grant of a lock: hold it in a `with` (asyncio: `async with`), or release it yourself.

    Any thread may release it; in asyncio, any task of its loop.
    """

    __slots__ = ()

    @property
    def lost(self) -> LeaseEvent:
        """An event that is set when the lease is lost. It is true once it is set: `if lease.lost:`."""
        event: LeaseEvent = self._event_of_loss()
        return event

    @property
    def ended(self) -> LeaseEvent:
        """An event that is set when the lease ends in any way: it is lost, it is released, its Interlock is closed."""
        event: LeaseEvent = self._event_of_end()
        return event

    def remaining(self) -> float:
        """Seconds for which the lease is certainly ours, without another renewal; 0.0 once it has ended."""
        return self._remaining()

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease is certainly still ours. No I/O: cheap enough before every write."""
        self._ensure()

    async def release(self) -> bool:
        """Give the lock back. Returns whether it was still ours. Safe to repeat.

        Of an rlock, each call takes back one acquire, and the last one gives the lock back. Raises Unavailable if no
        server answers whether it was ours; the release goes on in the background then.
        """
        return await self._release()

    async def extend(self, ttl: float) -> None:
        """Make the lease last at least `ttl` seconds from now, renewed or not, but not beyond its `max_hold`.

        Raises LeaseLost, Unavailable or ConfigError.
        """
        await self._extend(ttl)

    async def execute(
        self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None
    ) -> Reply:
        """Run one Redis command in the server if, and only if, the lease is still ours there: one atomic step.

        `keys` are those arguments that are keys; without `keys` interlock asks the server first. In a cluster they must
        share the lock's slot. Returns the reply, strings as bytes. Sends the command once. Raises Unavailable, which
        says whether the command may have run; LeaseLost if it has not run; LockError if the server refuses it;
        ConfigError if it would write a key of the lock itself, or on a quorum.
        """
        return await self._execute(command, *args, keys=keys)


class MultiLease(MultiLeaseForAsyncio):
    """Several leases as one: `lease.fence["a"]` is the fence of one, `lease["a"]` its lease."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Lease:
        """Return the lease on one of them: for its `execute`, or its token. Raises KeyError for any other name."""
        lease: Lease = self._part(name)
        return lease

    @property
    def lost(self) -> LeaseEvent:
        """An event that is set, and then true, when any of the leases is lost."""
        event: LeaseEvent = self._event_of_loss()
        return event

    @property
    def ended(self) -> LeaseEvent:
        """An event that is set when any of the leases ends: it is lost, it is released, its Interlock is closed."""
        event: LeaseEvent = self._event_of_end()
        return event

    def remaining(self) -> float:
        """Seconds for which all of them are certainly ours; 0.0 once one has ended."""
        return self._remaining()

    def ensure(self) -> None:
        """Raise LeaseLost unless all are certainly still ours. No I/O: cheap enough before every write."""
        self._ensure()

    async def release(self) -> bool:
        """Give all of them back. Returns whether all were still ours. Safe to repeat.

        Raises Unavailable if no server answers whether they were; the release goes on in the background then.
        """
        return await self._release()

    async def extend(self, ttl: float) -> None:
        """Make all of them last at least `ttl` seconds from now; see Lease.extend."""
        await self._extend(ttl)


class Leadership(LeadershipCore, Lease):
    """The leader's lease."""

    __slots__ = ()

    def remaining(self) -> float:
        """Seconds for which this certainly leads, without another renewal; 0.0 once it has ended."""
        return self._remaining()

    def ensure(self) -> None:
        """Raise LeaseLost unless this certainly still leads. No I/O: cheap enough before every write."""
        self._ensure()

    async def release(self) -> bool:
        """Stop leading; see `resign()`."""
        return await self._release()

    async def extend(self, ttl: float) -> None:
        """Make the lease last at least `ttl` seconds from now, renewed or not, but not beyond its `max_hold`.

        Raises LeaseLost, Unavailable or ConfigError.
        """
        await self._extend(ttl)

    async def execute(
        self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None
    ) -> Reply:
        """Run one Redis command in the server if, and only if, this still leads there; see Lease.execute."""
        return await self._execute(command, *args, keys=keys)

    async def resign(self) -> bool:
        """Stop leading; the next leader is elected at once. Returns whether this one still led. Raises Unavailable."""
        return await self._resign()


class Lock(LockCore[Lease], Lockable[LockState, Lease]):
    """A lock by name; see Interlock.lock."""

    __slots__ = ()
    _lease_of: Callable[..., Lease] = Lease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until this is acquired. Returns its lease.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the lock. Raises AcquireTimeout, Unavailable, Deadlock or ConfigError, and then leaves nothing behind; nor
        does a call that is cancelled or interrupted. Raises LeaseLost if somebody revokes the new lease before the call
        returns; in threads also if somebody revokes the lease of a `with` inside of which the call waits.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if it is free now. Returns its lease, or None.

        One try, of `try_for` seconds at most (with `acks` or `fsync` 5 s, if that is more). Raises Unavailable if the
        server does not answer in that time, LeaseLost if somebody revokes the lease at once, or ConfigError.
        """
        return await self._try_acquire()

    async def inspect(self) -> LockState:
        """Ask the server who holds this and who waits for it. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the lease of its holder: the holder learns the `reason`. Returns whether there was one to revoke.

        The next waiter gets it when the holder has released it, or the holder's lease has run out. With `force` the
        next waiter gets it at once, though the holder may still be writing: that is unsafe unless the data checks
        fences. `force` also ends a quarantine, but not of a quorum. Raises Unavailable or ConfigError.
        """
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while this is held."""
        return self._decorate(function)


class RLock(RLockCore[Lease], Lock):
    """A lock that its holder may acquire again; see Interlock.rlock.

    While a thread or task (or owner) holds it, `acquire()` returns the same lease once more, without I/O. Each acquire
    needs its own release; the last release gives the lock back.
    """

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until this is acquired, or enter it again. Returns its lease.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the rlock. Raises AcquireTimeout, Unavailable, Deadlock or ConfigError, and then leaves nothing behind; nor
        does a call that is cancelled or interrupted. Raises LeaseLost as Lock.acquire does, and if the caller is still
        inside of this with a lease that is lost.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if it is free now, or enter it again. Returns its lease, or None.

        Raises what Lock.try_acquire raises, and LeaseLost if the caller is still inside of this with a lease that is
        lost.
        """
        return await self._try_acquire()

    async def inspect(self) -> LockState:
        """Ask the server who holds this and who waits for it. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the lease of its holder: the holder learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while this is held."""
        return self._decorate(function)


class Semaphore(SemaphoreCore[Lease], Lockable[SemaphoreState, Lease]):
    """Up to a limit of permits; see Interlock.semaphore."""

    __slots__ = ()
    _lease_of = Lease

    async def acquire(self, *number: Never, timeout: float | Unset | None = UNSET, permits: int = 1) -> Lease:
        """Wait until so many `permits` are acquired. Returns one lease, which holds all of them.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the semaphore. Raises AcquireTimeout, Unavailable, Deadlock, LeaseLost or ConfigError as Lock.acquire does,
        and then leaves nothing behind; TypeError for a bare `number`, which could be the permits or the timeout.
        """
        refuse_bare(number, self._primitive, "acquire")
        return await self._acquire(timeout, permits=permits)

    async def try_acquire(self, *number: Never, permits: int = 1) -> Lease | None:
        """Acquire so many `permits` if they are free now. Returns their lease, or None.

        Raises what Lock.try_acquire raises, or TypeError for a bare `number`.
        """
        refuse_bare(number, self._primitive, "try_acquire")
        return await self._try_acquire(permits=permits)

    async def available(self) -> int:
        """Return how many permits are free now: old when you read it. Raises Unavailable or ConfigError."""
        return await self._available()

    async def set_limit(self, limit: int) -> None:
        """Change the limit for everybody, in the server. Holders keep what they have.

        Callers that wait for more permits than that get a ConfigError, and so do later callers with another limit.
        Raises Unavailable or ConfigError.
        """
        await self._set_limit(limit)

    async def inspect(self) -> SemaphoreState:
        """Ask the server who holds permits and who waits for them. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the leases of all holders: each of them learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while it holds one permit."""
        return self._decorate(function)


class ReadLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a reader holds; see RWLock.read."""

    __slots__ = ()
    _lease_type = Lease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until the caller may read. Returns the reader's lease.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the rwlock. Raises AcquireTimeout, Unavailable, Deadlock, LeaseLost or ConfigError as Lock.acquire does, and
        then leaves nothing behind.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if the caller may read now. Returns the reader's lease, or None.

        Raises what Lock.try_acquire raises.
        """
        return await self._try_acquire()

    async def inspect(self) -> SemaphoreState:
        """Ask the server who reads or writes, and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the leases of all readers and of the writer: each learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs as a reader."""
        return self._decorate(function)


class WriteLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a writer holds; see RWLock.write."""

    __slots__ = ()
    _lease_type = Lease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until the caller may write. Returns the writer's lease.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the rwlock. Raises AcquireTimeout, Unavailable, Deadlock, LeaseLost or ConfigError as Lock.acquire does, and
        then leaves nothing behind; ConfigError also for a thread or task that reads or writes already.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if the caller may write now. Returns the writer's lease, or None.

        Raises what Lock.try_acquire raises; ConfigError also for a thread or task that reads or writes already.
        """
        return await self._try_acquire()

    async def inspect(self) -> SemaphoreState:
        """Ask the server who reads or writes, and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the leases of all readers and of the writer: each learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs as the writer."""
        return self._decorate(function)


class RWLock(RWLockCore):
    """Many readers or one writer; see Interlock.rwlock."""

    __slots__ = ()

    @advising
    def read(self) -> ReadLock:
        """Return what a reader holds, beside other readers. The writer may acquire it too, and keep it afterwards."""
        return ReadLock(self._interlock, self._primitive, self._options)

    @advising
    def write(self) -> WriteLock:
        """Return what a writer holds, alone. A reader or writer can't acquire it: it would wait for itself."""
        return WriteLock(self._interlock, self._to_write(), self._options)

    async def inspect(self) -> SemaphoreState:
        """Ask the server who reads or writes, and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the leases of all readers and of the writer: each learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)


class MultiLock(MultiLockCore[MultiLease], Lockable[dict[str, LockState | SemaphoreState], MultiLease]):
    """Several lockables, all or none; see Interlock.multi."""

    __slots__ = ()
    _lease_type = MultiLease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> MultiLease:
        """Wait until all of these are acquired. Returns the lease over all.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the multi. Raises AcquireTimeout, Unavailable, Deadlock, LeaseLost or ConfigError as Lock.acquire does, and
        then leaves nothing behind; LeaseLost also if one of these is lost before all are acquired.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> MultiLease | None:
        """Acquire all of these if they are free now. Returns the lease over all, or None.

        Raises what Lock.try_acquire raises.
        """
        return await self._try_acquire()

    async def inspect(self) -> dict[str, LockState | SemaphoreState]:
        """Ask the server who holds these and who waits for them. For people: the answer is old when you read it.

        Returns the state of each by its name. Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the lease of the holder of each: the holder learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while all of these are held."""
        return self._decorate(function)


class Latch(LatchCore):
    """A count that goes down to zero, once; see Interlock.latch."""

    __slots__ = ()

    async def count_down(self, n: int = 1) -> int:
        """Count down by `n`, not below zero. Returns how many are left.

        Raises Unavailable if no server answers, and then the server may have counted; BrokenBarrier if somebody has
        revoked the latch; ConfigError.
        """
        return await self._count_down(n)

    async def count(self) -> int:
        """Return how many are left now. Raises Unavailable or ConfigError."""
        return await self._count()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left; return at once if that is so already.

        `timeout` is in seconds: None waits for ever, 0 does not wait. Raises AcquireTimeout; BrokenBarrier if somebody
        has revoked the latch, or it is gone from the server; Unavailable or ConfigError; in threads LeaseLost as
        Lock.acquire does.
        """
        await self._wait(timeout)

    async def inspect(self) -> LatchState:
        """Ask the server how many are left and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str) -> bool:
        """Break this for all that wait, now and later: each of them gets BrokenBarrier, with `reason`.

        Returns False if it is open or broken already, or if the server has no such latch yet. Raises Unavailable or
        ConfigError.
        """
        return await self._revoke(reason)


class Barrier(BarrierCore):
    """Several parties that wait for each other; see Interlock.barrier."""

    __slots__ = ()

    async def wait(self, timeout: float | None = None) -> int:
        """Wait until all parties have arrived. Returns which arrival this was, from 0 to parties - 1.

        `timeout` is in seconds: None waits for ever, 0 does not wait. A party whose time is over breaks the barrier for
        all that wait, itself included, and so does a party that dies, is cancelled or is interrupted. Raises
        BrokenBarrier as long as the barrier is broken, until `reset()`; Unavailable or ConfigError; in threads
        LeaseLost as Lock.acquire does.
        """
        return await self._wait(timeout)

    async def reset(self) -> None:
        """Begin anew: each party that waits gets BrokenBarrier, and parties that arrive from now on wait again.

        Raises Unavailable or ConfigError.
        """
        await self._reset()

    async def inspect(self) -> BarrierState:
        """Ask the server how many have arrived and who they are. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str) -> bool:
        """Break this for all that wait: each of them gets BrokenBarrier, with `reason`. It works again after `reset()`.

        Returns False if it is broken already, or if the server has no such barrier. Raises Unavailable or ConfigError.
        """
        return await self._revoke(reason)


class Election(ElectionCore[Leadership], Lockable[LockState, Leadership]):
    """One of many leads; see Interlock.election. `acquire` and `campaign` are the same, and a `with` leads."""

    __slots__ = ()
    _lease_type = Leadership
    _stop_scope = StopScope

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Leadership:
        """Wait until this process leads; see `campaign()`."""
        return await self._acquire(timeout)

    async def try_acquire(self) -> Leadership | None:
        """Lead if nobody leads now. Returns the leader's lease, or None.

        Raises what Lock.try_acquire raises.
        """
        return await self._try_acquire()

    async def campaign(self, timeout: float | Unset | None = UNSET) -> Leadership:
        """Wait until this process leads. Returns the leader's lease, with its term.

        `timeout` is in seconds: None waits for ever, 0 does not wait; by default it is that of the election. Raises
        AcquireTimeout, Unavailable, Deadlock, LeaseLost or ConfigError as Lock.acquire does, and then leaves nothing
        behind.
        """
        return await self._campaign(timeout)

    async def resign(self) -> bool:
        """Stop leading, if this object has won the election. Returns whether it still led. Raises Unavailable."""
        return await self._resign()

    async def leader(self) -> Leader | None:
        """Return who leads now, or None if nobody does: old when you read it. Raises Unavailable or ConfigError."""
        return await self._leader()

    async def observe(self) -> AsyncIterator[Leader | None]:
        """Yield who leads now, and then each change when it happens: None while nobody leads. Ends with the Interlock.

        Of changes that follow each other quickly, it may yield the last one only. Raises Unavailable or ConfigError.
        """
        with self._observe() as watch:
            while not watch.core.requests.closed:
                yield await watch.change()

    async def run(self, work: Callable[[Leadership], Awaitable[R]], *, stop: asyncio.Event | None = None) -> R | None:
        """Lead, and call `work(lease)` as the leader; then resign, and return what `work` returned.

        If the lease is lost meanwhile, this campaigns again, and goes on through every outage of the server. It returns
        None once `stop` is set, the leader resigns, or the Interlock is closed. In asyncio each of these, and a loss,
        cancels `work`; after `stop` this leads until `work` has ended. In threads nothing interrupts `work`, and this
        leads until `work` returns: let `work` look at `stop`, and at `lease.ended` or `lease.ensure()`. What `work`
        then returns is the result, unless the lease was lost. Raises what `work` raises, and ConfigError; in threads
        LeaseLost as Lock.acquire does.
        """
        return await self._run(work, stop=stop)

    async def inspect(self) -> LockState:
        """Ask the server who leads and who waits to. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the lease of the leader: the leader learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while it leads."""
        return self._decorate(function)


class Once(OnceCore[Lease]):
    """Work that runs on one machine only; see Interlock.once."""

    __slots__ = ()
    _lease_of = Lease

    async def run(self, work: Callable[[Lease], Awaitable[R]]) -> Ran[R] | Skipped:
        """Call `work(lease)` (asyncio: await it), unless another run goes on or keeps this one from starting.

        Returns Ran, with the value that `work` returned, or Skipped. Raises what `work` raises; LeaseLost if the lease
        ended before `work` did: after `at_most`, by any other loss, or when the Interlock was closed; Unavailable or
        ConfigError.
        """
        return await self._run(work)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, Ran[R] | Skipped]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs it once, or is skipped; see `run()`."""
        return self._decorate(function)

    async def forget(self) -> bool:
        """Let the work run again, though it has run. Returns whether anything kept it from that.

        Raises Unavailable or ConfigError.
        """
        return await self._forget()

    async def inspect(self) -> OnceState:
        """Ask the server who runs this, and what has run. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the lease of the run that goes on: its process learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)


class Interlock(InterlockForAsyncio):
    """Locks on one server.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `redis+sentinel://`,
    `redis+cluster://`, `embedded://`); a client of redis-py or valkey-py (asyncio: of redis.asyncio or valkey.asyncio),
    whose parameters interlock takes over; a cache of Django on Redis (`caches["locks"]`); or nothing: then
    $INTERLOCK_URL.

    `prefix` stands before every name. `max_ttl` (seconds; the same in all processes) is the longest ttl of a lock, and
    the length of a quarantine: after a restart or failover that may have lost leases, the server grants nothing for so
    long, and with Sentinel or a cluster some seconds longer. With `quarantine=False` this Interlock begins none.
    `try_for` (seconds) bounds a call that does not wait, `try_acquire()` or `timeout=0`: it raises Unavailable if the
    server does not answer in that time. `retry_for` (seconds) bounds for how long any other call goes on while the
    server is away, before it raises Unavailable:

    =========  =======================  ============================  ============================
    retry_for  a call with a timeout    a call without one            a server that never answered
    =========  =======================  ============================  ============================
    not given  its timeout              5 s; Sentinel, cluster: 60 s  the same, or the timeout
    a number   so long, or its timeout  so long                       so long, or the timeout
    None       its timeout              for ever                      as if it were not given
    =========  =======================  ============================  ============================

    A URL may say it, too: `?retry_for=10`, `?retry_for=none`; the argument wins.

    `confirm=False` makes that the default of `lock(confirm=...)`. `label` names this process, for people.
    `max_connections` bounds the connections that threads open to one server; a thread that finds none idle waits within
    its timeout. With `registry=False` this process does not say what it holds and waits for, so that `ls()` may miss
    it. Raises ConfigError.

    An Interlock connects at its first use. Close it, or use it in a `with` (asyncio: `async with`): that gives back all
    that it holds. Threads may share it; a child made by fork holds nothing and connects anew. In asyncio a program may
    make it outside of any loop, and use it in several loops, one after another or in several threads: it has a
    connection for each, and each loop closes its own.
    """

    _rlock_type = RLock

    @advising
    def __init__(
        self,
        target: str | object | None = None,
        *,
        prefix: str = "lock:",
        max_ttl: float = MAX_TTL,
        quarantine: bool = True,
        confirm: bool = True,
        try_for: float = TRY_FOR,
        retry_for: float | Unset | None = BY_TIMEOUT,
        label: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        registry: bool = True,
    ) -> None:
        super().__init__(
            target,
            prefix=prefix,
            max_ttl=max_ttl,
            quarantine=quarantine,
            confirm=confirm,
            try_for=try_for,
            retry_for=retry_for,
            label=label,
            max_connections=max_connections,
            registry=registry,
        )

    @classmethod
    @advising
    def quorum(
        cls,
        servers: Sequence[str | object],
        *,
        prefix: str = "lock:",
        max_ttl: float = MAX_TTL,
        quarantine: bool = True,
        try_for: float = TRY_FOR,
        retry_for: float | Unset | None = BY_TIMEOUT,
        label: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        registry: bool = True,
    ) -> Self:
        """Make an Interlock on several servers that share nothing: a lock needs the grants of a majority (Redlock).

        `servers` are URLs or clients of 3 or 5 single servers; the options are those of Interlock, without `confirm`.
        It has lock, rlock, multi, election, once and synchronized, but no rwlock, semaphore, latch or barrier: servers
        that do not know each other can't agree on a count. A new quorum grants nothing for its first `max_ttl` seconds,
        unless `interlock quorum new` has said that it is new. Raises ConfigError; at the first use also if two of
        `servers` are one server.
        """
        return cls(
            cls._members_of(servers),
            prefix=prefix,
            max_ttl=max_ttl,
            quarantine=quarantine,
            try_for=try_for,
            retry_for=retry_for,
            label=label,
            max_connections=max_connections,
            registry=registry,
        )

    @making
    def lock(
        self,
        name: str,
        *,
        ttl: float = DEFAULT_TTL,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        confirm: bool | None = None,
        max_waiters: int | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        acks: int | Literal["majority", "all"] | None = None,
        fsync: bool = False,
    ) -> Lock:
        """Exclude all others that lock this name, on every machine. Not reentrant.

        Args:
            name: 1 to 512 bytes of UTF-8, without control characters, with braces for one hash tag only.
            ttl: seconds after which the lock of a dead holder is free: 30, or max_ttl if that is less. interlock renews
                the lease of a living holder every ttl/3.
            timeout: seconds to wait for it; None waits for ever, 0 does not wait.
            renew: False makes a lease that ends after ttl, unless its holder extends it.
            max_hold: seconds after which a holder loses the lock, even if it is alive.
            fair: True keeps strict order of arrival over all processes. False is many times faster: callers of one
                process go one after another, for 10 ms and 64 sections at most while other processes wait.
            confirm: False leaves a `with` without waiting for the server's reply to the release, which saves a round
                trip. With True a `with` raises LeaseLost also if only the server knew that the lease had ended, and so
                can roll back a transaction around it. None: as the Interlock says. With Sentinel or a cluster a `with`
                waits in any case.
            max_waiters: a caller that would have to wait while so many wait already gets AcquireTimeout at once. None:
                any number may wait.
            on_lost: interlock calls it with the lease that is lost: in a thread of its own; in asyncio in the loop, and
                awaits it if it is an `async def`.
            acks: how many replicas must have the grant: a number, "majority" (of server and replicas) or "all", of the
                most replicas that this process has seen. If too few have it within 1 s or ttl/3, interlock undoes the
                grant and raises Unavailable.
            fsync: True: the grant must be on the disks of the server and of so many replicas within 3 s or ttl/3 (Redis
                7.2, Valkey).

        Raises ConfigError. Nothing is sent until it is acquired.

        """
        options = self._checked(
            ttl=ttl,
            timeout=timeout,
            renew=renew,
            max_hold=max_hold,
            fair=fair,
            confirm=confirm,
            max_waiters=max_waiters,
            on_lost=on_lost,
            acks=acks,
            fsync=fsync,
        )
        return Lock(self, *self._lock(name, options))

    @making
    def rlock(self, name: str, *, owner: str | None = None, **options: Unpack[Options]) -> RLock:
        """Exclude all others, but let the holder enter again: the same thread or task, without I/O and with one fence.

        The same lock as `lock(name)`, and the same options. `owner` names a holder that is not a thread or task: a
        caller with the same `owner`, in another process or after a restart, takes the lease over, with a new fence, and
        the holder before it has lost the lease. Two threads or tasks of one process that acquire with one `owner` at
        the same moment may take it from each other. Raises ConfigError. Nothing is sent until it is acquired.
        """
        return RLock(self, *self._rlock(name, owner, **options))

    @making
    def rwlock(self, name: str, **options: Unpack[Options]) -> RWLock:
        """Allow many readers, `.read()`, or one writer, `.write()`: in order of arrival, so that neither starves.

        Options as for `lock()`; each reader has a lease of its own. Raises ConfigError.
        """
        return RWLock(self, *self._rwlock(name, **options))

    @making
    def semaphore(self, name: str, limit: int, **options: Unpack[Options]) -> Semaphore:
        """Allow up to `limit` permits at a time, over all processes; in order of arrival. Options as for `lock()`.

        Permits are leased, so a crash gives them back. The server keeps the limit: a client that asks with another one
        gets a ConfigError. Raises ConfigError. Nothing is sent until it is acquired.
        """
        return Semaphore(self, *self._semaphore(name, limit, **options))

    @making
    def multi(
        self,
        *lockables: Lock | ReadLock | WriteLock | Semaphore,
        timeout: float | None = None,
        on_lost: Callable[[MultiLease], object] | None = None,
    ) -> MultiLock:
        """Acquire all of these or none, without deadlock, in whatever order they are named here or elsewhere.

        Each keeps its own options (ttl, renew, max_hold); `timeout` (seconds) is for all together. interlock calls
        `on_lost` (asyncio: or awaits it) with the lease over all when any of them is lost. Raises ConfigError. Nothing
        is sent until it is acquired.
        """
        return MultiLock(self, *self._multi(lockables, timeout, on_lost))

    @making
    def latch(self, name: str, count: int, *, ttl: float = 3600.0) -> Latch:
        """Count down to zero, once: callers that wait for that go on, and callers that arrive later do not wait.

        The first caller sets the count. The server forgets it `ttl` seconds after it was last used. Raises ConfigError.
        Nothing is sent until it is used.
        """
        return Latch(self, self._latch(name, count, ttl))

    @making
    def barrier(self, name: str, parties: int) -> Barrier:
        """Make so many `parties` wait for each other, and go on together; again and again. Raises ConfigError."""
        return Barrier(self, self._barrier(name, parties))

    @making
    def election(self, name: str, **options: Unpack[Options]) -> Election:
        """Let one of many processes lead, until it dies, loses its lease, or resigns. Options as for `lock()`.

        A dead leader is replaced within ttl + 1 s. Raises ConfigError. Nothing is sent until it is used.
        """
        return Election(self, *self._election(name, **options))

    @making
    def once(
        self,
        name: str | Callable[..., str],
        *,
        at_most: float,
        at_least: float = 0.0,
        key: str | Callable[..., str] | None = None,
        keep: float = MONTH,
    ) -> Once:
        """Run work on one machine only: the others skip it.

        Args:
            name: of the work.
            at_most: seconds that a run may take. After that it has lost its lease, and another run may begin.
            at_least: seconds after its start before which no other run begins, however fast it was.
            key: the work runs once for each key, such as a date or a version; after a failure the next call runs it.
            keep: seconds for which the server remembers that the run for a key has succeeded (30 days).

        In a decorator `name` and `key` may be formats of the call's arguments, as in "report:{region}". Each may be a
        function, which takes arguments of the call by their names: `key=lambda: str(date.today())`.
        If its process dies, another run may begin after 30 s (`at_most` or max_ttl, if less). Raises ConfigError.

        """
        return Once(self, *self._once(name, at_most=at_most, at_least=at_least, key=key, keep=keep))

    @overload
    def synchronized(
        self, name: str | Callable[..., str], *, busy: Literal["wait", "raise"] = "wait", **options: Unpack[Options]
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R]]]: ...
    @overload
    def synchronized(
        self, name: str | Callable[..., str], *, busy: Literal["skip"], **options: Unpack[Options]
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R | Skipped]]]: ...
    @overload  # for asyncio only
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
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[object, object, R | object]]]:
        """Decorate a function or method: each call runs under the rlock that the call's arguments name.

        `name` is a format, as in "report:{user_id}" or "shop:{self.id}", or a function that takes arguments of the call
        by their names and returns the name; options as for `lock()`. If somebody else has that rlock, a call does what
        `busy` says: "wait" (up to `timeout`), "raise" AcquireTimeout at once, or "skip": it returns Skipped, which is
        false. If `busy` is a function (asyncio: or an `async def`), the call returns what that makes of the Skipped;
        any other value of `busy` is what the call returns. In asyncio this decorates an `async def`. Raises
        ConfigError, and so does a call whose arguments make no name.
        """
        return self._synchronized(name, busy, **options)

    @advising
    def assert_held(self, name: str) -> Lease:
        """Return the lease of this name that the calling thread or task is inside of. No I/O.

        For a function that must run under a lock of this Interlock: inside of a `with` (asyncio: `async with`) of that
        lock, or of a function that the lock decorates. Raises NotHeld if the caller is inside of neither, LeaseLost if
        its lease is lost, or ConfigError. A semaphore or a side of an rwlock counts, too.
        """
        lease: Lease = self._assert_held(name)
        return lease

    async def ls(self, pattern: str = "*") -> list[Listed]:
        """Return what all processes on this server hold and wait for, by name: who, since when, where in their code.

        `pattern` is as in a shell: "stock:*". The server says who holds a name, and who stands in its queue. The
        processes say the rest, and which names there are: some seconds late, of their 50 oldest leases and 50 oldest
        waiters. With registry=False they say nothing. For people, not for decisions. Raises Unavailable or ConfigError.
        """
        return await self._ls(pattern)

    async def ping(self) -> float:
        """Ask the server as a lock does, and return the seconds until its reply: is it there, and how fast?

        Raises Unavailable, or ConfigError if the server refuses what a lock needs. A cluster: asks one node.
        """
        return await self._ping()

    async def close(self) -> None:
        """Release all that is held, end all waiting, close the connections. Takes about a second at the most.

        In asyncio it does so for the running loop. Safe to repeat.
        """
        await self._close()
