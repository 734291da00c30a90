# scripts/generate writes threads.py of this file: the same text with `def` and `run(...)` (ADR 37).
"""The API for asyncio: the same names as for threads. One connection per event loop carries all its tasks.

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
from ._api.options import DEFAULT_TTL, UNSET
from ._api.permits import RWLockCore, RWSideCore, SemaphoreCore
from ._api.scopes import LeaseEvent, LeaseForAsyncio, StopScope
from ._protocol.acks import Assurance
from ._protocol.timing import MAX_TTL, TRY_FOR
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
    from ._api.options import Unset

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
        """Make the lease last at least `ttl` seconds from now, renewed or not. Raises LeaseLost or Unavailable."""
        await self._extend(ttl)

    async def execute(
        self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None
    ) -> Reply:
        """Run one Redis command in the server if, and only if, the lease is still ours there: one atomic step.

        `keys` are those arguments that are keys (the server is asked if they are not given); in a cluster they must
        share the lock's slot. Returns the reply, strings as bytes. Never sent twice: raises Unavailable, saying whether
        the command may have run; LeaseLost if it was not run; ConfigError if it would write a key of the lock itself.
        """
        return await self._execute(command, *args, keys=keys)


class MultiLease(MultiLeaseForAsyncio):
    """Several leases as one: `lease.fence["a"]` is the fence of one, `lease["a"]` its lease."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Lease:
        """Return the lease on one of them: for its `execute`, or its token."""
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
        """Make all of them last at least `ttl` seconds from now. Raises LeaseLost or Unavailable."""
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
        """Make the lease last at least `ttl` seconds from now, renewed or not. Raises LeaseLost or Unavailable."""
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
        of the lock. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; nor does a call
        that is cancelled or interrupted. In threads, a wait inside of a `with` whose lease somebody revokes meanwhile
        ends with that LeaseLost.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if that is possible now. Returns its lease, or None if somebody else holds it.

        One try, of `try_for` seconds at most. Raises Unavailable if the server does not answer in that time, or
        ConfigError.
        """
        return await self._try_acquire()

    async def inspect(self) -> LockState:
        """Ask the server who holds this and who waits for it. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take this away from whoever holds it: each holder learns the `reason`. Returns whether there was a holder.

        The next waiter gets it when a holder has released it, or the holder's lease has run out. With `force` the next
        waiter gets it at once, though the holder may still be writing: that is unsafe unless fences are checked.
        Raises Unavailable or ConfigError.
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
        of the rlock. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; nor does a call
        that is cancelled or interrupted. Raises LeaseLost if its caller holds it, and has lost it. In threads, a wait
        inside of a `with` whose lease somebody revokes meanwhile ends with that LeaseLost.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if that is possible now. Returns its lease, or None if somebody else holds it.

        One try, of `try_for` seconds at most. Raises Unavailable if the server does not answer in that time, LeaseLost
        if its caller holds it, and has lost it, or ConfigError.
        """
        return await self._try_acquire()

    async def inspect(self) -> LockState:
        """Ask the server who holds this and who waits for it. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take this away from whoever holds it, who learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while this is held."""
        return self._decorate(function)


class Semaphore(SemaphoreCore[Lease], Lockable[SemaphoreState, Lease]):
    """Up to a limit of permits; see Interlock.semaphore."""

    __slots__ = ()
    _lease_of = Lease

    async def acquire(self, *number: Never, timeout: float | Unset | None = UNSET, permits: int = 1) -> Lease:
        """Wait until so many permits are acquired. Returns one lease, which holds all of them.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the semaphore. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; TypeError
        for a bare `number`, which could be the permits or the timeout.
        """
        refuse_bare(number, self._primitive, "acquire")
        return await self._acquire(timeout, permits=permits)

    async def try_acquire(self, *number: Never, permits: int = 1) -> Lease | None:
        """Acquire so many permits if they are free now. Returns their lease, or None.

        Raises Unavailable if the server does not answer within `try_for` seconds, ConfigError, or TypeError for a bare
        `number`.
        """
        refuse_bare(number, self._primitive, "try_acquire")
        return await self._try_acquire(permits=permits)

    async def available(self) -> int:
        """Return how many permits are free now: old when you read it. Raises Unavailable or ConfigError."""
        return await self._available()

    async def set_limit(self, limit: int) -> None:
        """Change the limit for everybody, in the server. Holders keep what they have.

        Requests that wait for more permits than that fail, and so do clients that use another limit from then on.
        Raises Unavailable or ConfigError.
        """
        await self._set_limit(limit)

    async def inspect(self) -> SemaphoreState:
        """Ask the server who holds permits and who waits for them. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take all permits away from their holders, who learn the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while it holds one permit."""
        return self._decorate(function)


class ReadLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a reader holds; see RWLock.read."""

    __slots__ = ()
    _lease_type = Lease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until this may be read. Returns the reader's lease.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the rwlock. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if it may be read now. Returns the reader's lease, or None.

        Raises Unavailable if the server does not answer within `try_for` seconds, or ConfigError.
        """
        return await self._try_acquire()

    async def inspect(self) -> SemaphoreState:
        """Ask the server who reads or writes, and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take this away from all that read or write, who learn the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs as a reader."""
        return self._decorate(function)


class WriteLock(RWSideCore[Lease], Lockable[SemaphoreState, Lease]):
    """What a writer holds; see RWLock.write."""

    __slots__ = ()
    _lease_type = Lease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until this may be written. Returns the writer's lease.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the rwlock. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> Lease | None:
        """Acquire this if it may be written now. Returns the writer's lease, or None.

        Raises Unavailable if the server does not answer within `try_for` seconds, or ConfigError.
        """
        return await self._try_acquire()

    async def inspect(self) -> SemaphoreState:
        """Ask the server who reads or writes, and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take this away from all that read or write, who learn the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs as the writer."""
        return self._decorate(function)


class RWLock(RWLockCore):
    """Many readers or one writer; see Interlock.rwlock."""

    __slots__ = ()

    @advising
    def read(self) -> ReadLock:
        """Return what a reader holds, together with other readers. A writer may read as well, and go on reading."""
        return ReadLock(self._interlock, self._primitive, self._options)

    @advising
    def write(self) -> WriteLock:
        """Return what a writer holds, alone. A reader is refused: it would wait for itself."""
        return WriteLock(self._interlock, self._to_write(), self._options)

    async def inspect(self) -> SemaphoreState:
        """Ask the server who reads or writes, and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take this away from all that read or write, who learn the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)


class MultiLock(MultiLockCore[MultiLease], Lockable[dict[str, LockState | SemaphoreState], MultiLease]):
    """Several lockables, all or none; see Interlock.multi."""

    __slots__ = ()
    _lease_type = MultiLease

    async def acquire(self, timeout: float | Unset | None = UNSET) -> MultiLease:
        """Wait until all of these are acquired. Returns the lease over all.

        `timeout` is in seconds and bounds the whole call: None waits for ever, 0 does not wait; by default it is that
        of the multi. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; nor does a call
        that is cancelled or interrupted.
        """
        return await self._acquire(timeout)

    async def try_acquire(self) -> MultiLease | None:
        """Acquire all of these if that is possible now. Returns the lease over all, or None.

        Raises Unavailable if the server does not answer within `try_for` seconds, or ConfigError.
        """
        return await self._try_acquire()

    async def inspect(self) -> dict[str, LockState | SemaphoreState]:
        """Ask the server who holds these and who waits for them. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take each of these away from whoever holds it, who learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while all of these are held."""
        return self._decorate(function)


class Latch(LatchCore):
    """A count that goes down to zero, once; see Interlock.latch."""

    __slots__ = ()

    async def count_down(self, n: int = 1) -> int:
        """Count down by `n`, not below zero. Returns how many are left.

        Raises Unavailable if no answer came, and then the server may have counted; BrokenBarrier if the latch was
        revoked; ConfigError.
        """
        return await self._count_down(n)

    async def count(self) -> int:
        """Return how many are left now. Raises Unavailable or ConfigError."""
        return await self._count()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left; return at once if that is so already.

        `timeout` is in seconds: None waits for ever, 0 does not wait. Raises AcquireTimeout; BrokenBarrier if the
        latch was revoked, or is gone from the server; Unavailable or ConfigError.
        """
        await self._wait(timeout)

    async def inspect(self) -> LatchState:
        """Ask the server how many are left and who waits. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str) -> bool:
        """Break this for all that wait, now and later: each of them gets BrokenBarrier, with `reason`.

        Returns whether there was one to break: no latch that is open, and none that is broken already. Raises
        Unavailable or ConfigError.
        """
        return await self._revoke(reason)


class Barrier(BarrierCore):
    """Several parties that wait for each other; see Interlock.barrier."""

    __slots__ = ()

    async def wait(self, timeout: float | None = None) -> int:
        """Wait until all parties have arrived. Returns which arrival this was, from 0 to parties - 1.

        `timeout` is in seconds: None waits for ever. A party whose time is over breaks the barrier for all that wait,
        and so does a party that dies, is cancelled or is interrupted. Raises BrokenBarrier, until `reset()`;
        Unavailable or ConfigError.
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

        Returns whether there was one to break, and not broken already. Raises Unavailable or ConfigError.
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
        """Lead if nobody else does now. Returns the leader's lease, or None.

        Raises Unavailable if the server does not answer within `try_for` seconds, or ConfigError.
        """
        return await self._try_acquire()

    async def campaign(self, timeout: float | Unset | None = UNSET) -> Leadership:
        """Wait until this process leads. Returns the leader's lease, with its term.

        `timeout` is in seconds: None waits for ever, 0 does not wait; by default it is that of the election. Raises
        AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return await self._campaign(timeout)

    async def resign(self) -> bool:
        """Stop leading, if this object won the election. Returns whether it still led. Raises Unavailable."""
        return await self._resign()

    async def leader(self) -> Leader | None:
        """Return who leads now, or None if nobody does: old when you read it. Raises Unavailable or ConfigError."""
        return await self._leader()

    async def observe(self) -> AsyncIterator[Leader | None]:
        """Yield who leads now, and then each change when it happens: None while nobody leads. Ends with the Interlock.

        Of changes that follow each other quickly, only the last one may be seen. Raises Unavailable or ConfigError.
        """
        with self._observe() as watch:
            while not watch.core.requests.closed:
                yield await watch.change()

    async def run(self, work: Callable[[Leadership], Awaitable[R]], *, stop: asyncio.Event | None = None) -> R | None:
        """Lead, and call `work(lease)` as the leader; then resign, and return what `work` returned.

        If the lease is lost meanwhile, this campaigns again, and so through every outage of the server. It returns None
        once `stop` is set, this object or its lease resigns, or the Interlock is closed. In asyncio `work` is awaited,
        and cancelled by each of these and by a loss; a `work` that `stop` cancels leads until it has ended. In threads
        nothing interrupts `work`, which leads until it returns: it must look at `stop`, and at `lease.ended` or
        `lease.ensure()`; its result counts if the lease was not lost. Raises what `work` raises, and ConfigError.
        """
        return await self._run(work, stop=stop)

    async def inspect(self) -> LockState:
        """Ask the server who leads and who waits to. For people: the answer is old when you read it.

        Raises Unavailable or ConfigError.
        """
        return await self._inspect()

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take the lead away from whoever leads, who learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
        """Decorate a function (asyncio: an `async def`): each call of it runs while it leads."""
        return self._decorate(function)


class Once(OnceCore[Lease]):
    """Work that runs on one machine only; see Interlock.once."""

    __slots__ = ()
    _lease_of = Lease

    async def run(self, work: Callable[[Lease], Awaitable[R]]) -> Ran[R] | Skipped:
        """Call `work(lease)` (asyncio: await it), unless another process does that work or has done it.

        Returns Ran, with the value that `work` returned, or Skipped. Raises what `work` raises; LeaseLost if `work`
        took longer than at_most, or if its lease ended before it did: it was lost, or the Interlock was closed;
        Unavailable.
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
        """Take the work away from whoever runs it, who learns the `reason`; see Lock.revoke."""
        return await self._revoke(reason, force)


class Interlock(InterlockForAsyncio):
    """Locks on one server.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `embedded://`), a client of
    redis-py or valkey-py (asyncio: of redis.asyncio or valkey.asyncio) whose parameters are taken over, a cache of
    Django on Redis (`caches["locks"]`), or nothing: then $INTERLOCK_URL.

    `prefix` stands before every name. `max_ttl` (seconds) is the longest ttl that a lock may have, and so how long
    nothing is granted after a restart or failover that may have lost leases (30; the same in all processes);
    `quarantine=False` turns that off.
    `try_for` (seconds) bounds a call that does not wait, `try_acquire()` or `timeout=0`: a server that does not answer
    within it is Unavailable. `confirm=False` makes that the default of `lock(confirm=...)`. `label` tells people who we
    are. `max_connections` bounds the connections that threads open to one server; a thread that finds none idle waits
    within its timeout. `registry=False`: the server gets no entry of what this process holds and waits for, which is
    what ls() reads. Raises ConfigError.

    An Interlock connects at its first use. Close it, or use it in a `with` (asyncio: `async with`): that gives back all
    that is held. It is safe to share between threads; a child made by fork holds nothing and connects anew. In asyncio
    it may be made outside of any loop and used in several, one after another or in several threads: it has a connection
    for each, and each loop closes its own.
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
        label: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        registry: bool = True,
    ) -> Self:
        """Make an Interlock on several servers that share nothing: held is what a majority grants (Redlock).

        `servers` are URLs or clients of 3 or 5 single servers; the options are those of Interlock. It has lock, rlock,
        multi, election, once and synchronized, but no rwlock, semaphore, latch or barrier: servers that do not know
        each other can't agree on a count. Raises ConfigError; at the first use also if a server is there twice.
        """
        return cls(
            cls._members_of(servers),
            prefix=prefix,
            max_ttl=max_ttl,
            quarantine=quarantine,
            try_for=try_for,
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
            name: 1 to 512 bytes, without control characters.
            ttl: seconds after which the lock of a dead holder is free: 30, or max_ttl if that is less. The lease of a
                living holder is renewed every ttl/3.
            timeout: seconds to wait for it; None waits for ever, 0 does not wait.
            renew: False makes a lease that ends after ttl in any case.
            max_hold: seconds after which a holder loses the lock, even if it is alive.
            fair: True keeps strict order of arrival over all processes. False lets callers of this process go one after
                another, for 10 ms and 64 sections at most while others wait: many times faster.
            confirm: False leaves a `with` without waiting for the server's reply to the release, which saves a round
                trip. With True a `with` raises LeaseLost also if only the server knew that the lease had ended, and so
                can roll back a transaction around it. None: as the Interlock says. Sentinel and a cluster wait anyway.
            max_waiters: a caller that would have to wait while so many wait already gets AcquireTimeout at once. None:
                any number may wait.
            on_lost: called with the lease when it is lost: in a thread of its own; in asyncio in the loop, and awaited
                if it is an `async def`.
            acks: how many replicas must have the grant, so that it counts: a number, "majority" (of server and
                replicas), or "all"; of the most that there were. Else it is undone, and Unavailable raised.
            fsync: the grant must be on the disk of the server, and of so many replicas (Redis 7.2, Valkey).

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
        the holder before has lost it. Two threads or tasks of one process that use it at the same moment may do that to
        each other. Raises ConfigError. Nothing is sent until it is acquired.
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

        Each is held with its own options (ttl, renew, max_hold); `timeout` (seconds) is for all together, and `on_lost`
        is called (asyncio: or awaited) with the lease over all when any is lost. Raises ConfigError. Nothing is sent
        until it is acquired.
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
        """Make so many parties wait for each other, and go on together; again and again. Raises ConfigError."""
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
            at_most: seconds that the work may take. Then its runner has lost it, and another run may begin.
            at_least: seconds after its start before which no other run begins, however fast it was.
            key: the work runs once for each key, as a date or a version; a run that failed is repeated.
            keep: seconds for which the server remembers that the run for a key has succeeded.

        In a decorator `name` and `key` may be formats of the call's arguments, as in "report:{region}". Each may be a
        function, which takes arguments of the call by their names: `key=lambda: str(date.today())`.
        The run of a process that died is free again after 30 s (or `at_most`, if that is less). Raises ConfigError.

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
        """Decorate a function or method: each call runs under the rlock whose name is made of the call's arguments.

        `name` is a format, as in "report:{user_id}" or "shop:{self.id}", or a function that takes arguments of the call
        by their names and returns the name; options as for `lock()`. When it is busy: "wait" (up to `timeout`), "raise"
        AcquireTimeout at once, or "skip": the call returns Skipped, which is false. Any other `busy` is what the call
        returns then; a function is called with the Skipped (asyncio: may be an `async def`) and returns it.
        In asyncio for an `async def`. Raises ConfigError, and so does a call without an argument that the name needs.
        """
        return self._synchronized(name, busy, **options)

    @advising
    def assert_held(self, name: str) -> Lease:
        """Return the lease of this name that the calling thread or task is inside of. No I/O.

        For a function that must run under a lock: inside of a `with` (asyncio: `async with`) of it, or of a function
        that it decorates, made with this Interlock. Raises NotHeld if the caller is in none, LeaseLost if its lease is
        lost, or ConfigError. A semaphore or a side of an rwlock counts, too.
        """
        lease: Lease = self._assert_held(name)
        return lease

    async def ls(self, pattern: str = "*") -> list[Listed]:
        """What all processes on this server hold and wait for, by name: who, since when, and where in their code.

        `pattern` is as in a shell: "stock:*". Each process says so itself, some seconds late, of its 50 oldest leases
        and waiters: for people, not for decisions. One with registry=False says nothing. Raises Unavailable, or
        ConfigError.
        """
        return await self._ls(pattern)

    async def ping(self) -> float:
        """Ask the server as a lock does, and return the seconds until its reply: is it there, and how fast?

        Raises Unavailable, or ConfigError if the server refuses what a lock needs. A cluster: asks one node.
        """
        return await self._ping()

    async def close(self) -> None:
        """Release all that is held, end all waiting, close the connections. Takes about a second at the most.

        In asyncio: of the running loop. Safe to repeat.
        """
        await self._close()
