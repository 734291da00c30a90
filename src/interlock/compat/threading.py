"""The locks of `threading` for many processes: the same methods and errors, and a name in front.

Theory. A lock of `threading` is an object in memory; here it is a name in a server. An object of this module is a
handle: it holds the leases that its own calls acquired. So any thread may release what another thread acquired through
the same object (not of an RLock), and no other object or process may. Two objects of one name exclude each other, in
one process as in two. A lease can be lost, unlike a lock of `threading`: then its release, or the end of its `with`,
raises LeaseLost.

Rules. (a) One release reports each lost lease: that of the thread that acquired it, or else the next one by a thread
that holds nothing through this object. So a late release never gives back what a later holder acquired.
(b) No object connects before its first use; an object without `locks=` takes the default Interlock anew in each call.
(c) Nothing here has a mutex, which a fork could copy while another thread holds it: a list's own methods suffice.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from interlock._api.section import Section, WithExit, section_of_this_with
from interlock._client.grant import Grant
from interlock._protocol.names import checked_name, duration, positive_int
from interlock.errors import AcquireTimeout, BrokenBarrier, ConfigError, LockError, Unavailable
from interlock.primitives.barrier import MAX_PARTIES
from interlock.primitives.permits import MAX_PERMITS
from interlock.threads import Interlock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from interlock import threads
    from interlock.threads import Lease

__all__ = ["Barrier", "BoundedSemaphore", "Lock", "RLock", "Semaphore", "default_locks", "set_default_locks"]

MIN_LAST_ARRIVAL: Final = 1.0  # seconds for the arrival after an action: the other parties are there already
T = TypeVar("T")


# The Interlock of objects that were made without `locks=`


class _Default(NamedTuple):
    locks: Interlock
    was_set: bool
    """By set_default_locks(): another process knows nothing of it."""


_default: dict[str, _Default] = {}  # one entry at most: `setdefault` is one step for all threads


def default_locks() -> Interlock:
    """The Interlock of all objects that were made without `locks=`: of $INTERLOCK_URL, made at the first call.

    A child after a fork uses it on connections of its own. The process releases all leases when it exits.
    Raises ConfigError if $INTERLOCK_URL is not set, and set_default_locks() was not called.
    """
    if (default := _default.get("")) is None:
        try:
            made = Interlock()
        except ConfigError as error:
            raise ConfigError(f"{error}. Or call interlock.compat.threading.set_default_locks(locks)") from None
        default = _default.setdefault("", _Default(made, was_set=False))
        if default.locks is not made:  # another thread was faster
            made.close()
    return default.locks


def set_default_locks(locks: Interlock) -> None:
    """Let all objects that were made without `locks=` use this Interlock, from their next call on.

    Call it before the first use of such an object. Raises ConfigError if another Interlock is the default and is open:
    on two servers, two locks of one name would not exclude each other.
    """
    default = _default.setdefault("", _Default(_checked(locks), was_set=True))
    if default.locks is locks:
        return
    if not default.locks._closed:
        raise ConfigError(
            f"{default.locks!r} is the default already, and objects may have used it: their locks would not exclude "
            "those of another server. Call set_default_locks() at the start; or close the former first, with "
            "default_locks().close()"
        )
    _default[""] = _Default(locks, was_set=True)


def _checked(locks: object) -> Interlock:
    if not isinstance(locks, Interlock):
        raise ConfigError(f"locks must be an Interlock for threads, made by interlock.Interlock(url), not {locks!r}")
    return locks


# What the classes share


class _Handle(ABC, Generic[T]):
    """What one object of this module knows: a name, an Interlock, and the synchronizer that these make."""

    def __init__(self, name: str, locks: Interlock | None, example: str) -> None:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users of threading give none
            kind = type(self).__name__
            raise ConfigError(f"{kind}({name!r}): a name comes first, the same in all processes, as in {kind}{example}")
        self._name = checked_name(name)
        self._check_arguments()
        self._given = None if locks is None else _checked(locks)
        self._made: tuple[Interlock, T] | None = None
        if locks is not None:
            self._synchronizer()  # raises ConfigError now, not at the first use

    @property
    def name(self) -> str:
        """The name that all processes share."""
        return self._name

    def _check_arguments(self) -> None:
        """Check what else the constructor got. Raises ConfigError."""

    @abstractmethod
    def _make(self, locks: Interlock) -> T:
        """Make the synchronizer. Raises ConfigError."""

    @abstractmethod
    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of the constructor, for a copy in another process."""

    def _synchronizer(self) -> T:
        locks = self._given or default_locks()
        if self._made is None or self._made[0] is not locks:
            self._made = locks, self._make(locks)
        return self._made[1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Make an object of the same name in the other process. It holds nothing."""
        default = _default.get("")
        if self._given is not None or (default is not None and default.was_set):
            why = "was made with locks=" if self._given is not None else "uses the default of set_default_locks()"
            raise TypeError(
                f"{self!r} can't be pickled, since it {why}, which belongs to this process: send its name, and make it "
                "in the other process. Without both it can be pickled: then each process uses its $INTERLOCK_URL"
            )
        return type(self), self._arguments()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} at {id(self):#x} {self._name!r}>"


class _Exit(Section):
    """The `__exit__` of one `with`. It gives the lease back even if an interrupt ends the `with`: see Section."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        """Release what the `with` acquired, or what its body acquired in its place."""
        error = args[-2]
        holder: _Holder[Any] = args[0] if len(args) > 3 else self.lockable  # first, if loaded from the class
        holder._leave(self, error)

    def __del__(self) -> None:
        if getattr(self, "lease", None) is not None and not self.by_hand:  # an interrupt may have ended __init__()
            self.lockable._forget(self.lease)
            super().__del__()


class _Holder(_Handle[T]):
    """What acquires leases, and keeps them for the call that releases."""

    def _acquire(self, seconds: float | None) -> Lease | None:
        """Acquire within so many seconds (None: without end; 0: without waiting), or return None."""
        lockable: Any = self._synchronizer()
        if seconds == 0:
            return lockable.try_acquire()  # type: ignore[no-any-return]
        try:
            return lockable.acquire(timeout=seconds)  # type: ignore[no-any-return]
        except AcquireTimeout:
            if seconds is None:
                raise
            return None
        except Unavailable:
            if seconds is None or seconds >= lockable._interlock.try_for:
                raise
        return lockable.try_acquire()  # type: ignore[no-any-return]  # the time was too short for any server

    def _acquired(self, seconds: float | None) -> bool:
        lease = self._acquire(seconds)
        if lease is None:
            return False
        self._keep(lease)
        return True

    def release(self) -> None:
        """Release what this object acquired. See the class for who may, and for the errors."""
        self._take().__exit__(None, None, None)

    def __enter__(self) -> bool:
        section = section_of_this_with(self, _Exit)
        section.lease = lease = self._acquire(None)
        assert lease is not None
        if not section.by_hand:
            section.lease._mark_in_with(section)
        self._keep(lease)
        return True

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
        ) -> None: ...

    else:
        __exit__ = WithExit(_Exit)

    def _leave(self, section: _Exit, error: BaseException | None) -> None:
        """Leave a `with`: release, but let the error of its body pass."""
        try:
            lease = self._take()
        except (RuntimeError, ValueError):
            section.lease = None
            if error is None:
                raise
            return  # as after a Condition.wait() that was interrupted, and so could not acquire the lock again
        section.lease = None  # not before: an interrupt would have left the lease among those that are kept
        lease.__exit__(None if error is None else type(error), error, None)

    @abstractmethod
    def _keep(self, lease: Lease) -> None:
        """Keep a lease that the calling thread has acquired."""

    @abstractmethod
    def _take(self) -> Lease:
        """Take the lease that a release of the calling thread is for, away from other threads."""

    @abstractmethod
    def _forget(self, lease: Lease) -> None:
        """Drop a lease that the calling thread has kept, and that is released otherwise."""


class _OfThread(threading.local):
    """What is different in each thread."""

    def __init__(self) -> None:
        self.itself: object = object()  # in place of the number of the thread, which a later thread may get
        self.leases: list[Lease] = []


_thread: Final = _OfThread()


class _Kept(NamedTuple):
    thread: object
    lease: Lease


class _AnyThreads(_Holder[T]):
    """What any thread may release."""

    def __init__(self, name: str, locks: Interlock | None, example: str) -> None:
        self._kept: list[_Kept] = []
        super().__init__(name, locks, example)

    def _keep(self, lease: Lease) -> None:
        self._kept.append(_Kept(_thread.itself, lease))

    def _forget(self, lease: Lease) -> None:
        for each in list(self._kept):
            if each.lease is lease:
                self._remove(each)

    def _take(self) -> Lease:
        while kept := list(self._kept):
            taken = _to_release(kept, _thread.itself)
            if self._remove(taken):
                return taken.lease
        raise self._refusal()

    def _remove(self, kept: _Kept) -> bool:
        """Remove it from the list, unless another thread was faster; return whether it was this thread."""
        try:
            self._kept.remove(kept)
        except ValueError:
            return False
        return True

    @abstractmethod
    def _refusal(self) -> Exception:
        """Make the error for a release of what this object does not hold."""


def _to_release(kept: list[_Kept], thread: object) -> _Kept:
    """What a release by this thread is for: see rule (a)."""
    if own := [each for each in kept if each.thread is thread]:
        return own[-1]  # as nested sections end; what this thread has lost before, and never released, stays behind
    return min(kept, key=_order_of_release)  # of equals the oldest


def _order_of_release(kept: _Kept) -> int:
    """Lost leases first, then held ones, and last those of the parent of this process."""
    why = kept.lease._grant.reason_ended(kept.lease._core.runtime.now())
    return {None: 1, Grant.FORKED: 2}.get(why, 0)


def _bounded(timeout: float) -> float:
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError(f"the timeout {timeout:g} is more than threading.TIMEOUT_MAX, {threading.TIMEOUT_MAX:g} s")
    return timeout


def _lock_seconds(blocking: bool, timeout: float) -> float | None:
    """The arguments of Lock.acquire() as seconds: None waits without end."""
    if not blocking:
        if timeout != -1:
            raise ValueError(_NO_TIMEOUT)
        return 0
    if timeout == -1:
        return None
    if not timeout >= 0:  # or not a number
        raise ValueError(f"a timeout must be -1, to wait without end, or at least 0 seconds, not {timeout!r}")
    return _bounded(timeout)


_NO_TIMEOUT: Final = "a call that does not wait (blocking=False) takes no timeout"


# The classes


class Lock(_AnyThreads["threads.Lock"]):
    """threading.Lock for all processes that use this name: not reentrant, renewed while it is held.

    Any thread may release what another thread acquired through this object. No thread may release what another object
    or process holds.
    `locks` is the Interlock; by default default_locks(). It is the same lock as `locks.lock(name)`. If its holder dies,
    it is free after the ttl: 30 s, or the `max_ttl` of the Interlock.

    release() and the end of a `with` raise LeaseLost if the lease did not last until then, and RuntimeError if this
    object does not hold the lock. A call that needs the server may raise Unavailable; the silence of the server at a
    release is only logged. A `with` inside a `with` of the same lock raises Deadlock, where that of threading waits
    without end. Raises ConfigError.
    """

    def __init__(self, name: str, *, locks: Interlock | None = None) -> None:
        super().__init__(name, locks, '("stock:42")')

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, and return whether that was possible within `timeout` seconds; -1 waits without end.

        Raises ValueError and OverflowError as threading.Lock does, and Unavailable if the server does not answer.
        """
        return self._acquired(_lock_seconds(blocking, timeout))

    def locked(self) -> bool:
        """Ask the server whether anybody holds the lock: any process, or this object."""
        return self._synchronizer().inspect().held

    def _make(self, locks: Interlock) -> threads.Lock:
        return locks.lock(self._name)

    def _arguments(self) -> tuple[Any, ...]:
        return (self._name,)

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"lock {self._name!r}: this object does not hold it, so it can't release it. Only the object that acquired "
            "it can, in any thread of its process; Interlock.lock(name).revoke(reason) takes it from any holder"
        )

    def __repr__(self) -> str:
        return _repr_of_lock(self, repr(self._name), held=bool(self._kept))


class RLock(_Holder["threads.RLock"]):
    """threading.RLock for all processes that use this name: the thread that holds it may acquire it again.

    As Lock, and it is the same lock as a Lock of this name; but only the thread that acquired it may release it, once
    for each acquire. A thread that holds it through one object enters it through another one of the same Interlock,
    too. An acquire raises LeaseLost if its thread has lost the lock, and has not released it yet.

    A threading.Condition takes it, among the threads of one process: notify() wakes no other process.
    """

    def __init__(self, name: str, *, locks: Interlock | None = None) -> None:
        self._own = _OfThread()
        self._newest: weakref.ref[Lease] | None = None
        super().__init__(name, locks, '("stock:42")')

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock (again), and return whether that was possible within `timeout` seconds; -1 has no end.

        Raises ValueError and OverflowError as threading.RLock does; LeaseLost; Unavailable.
        """
        return self._acquired(_lock_seconds(blocking, timeout))

    def locked(self) -> bool:
        """Ask the server whether anybody holds the lock: any process, or any thread of this one."""
        return self._synchronizer().inspect().held

    def _keep(self, lease: Lease) -> None:
        self._own.leases.append(lease)
        self._newest = weakref.ref(lease)

    def _take(self) -> Lease:
        if not self._own.leases:
            raise RuntimeError(
                f"rlock {self._name!r}: this thread has not acquired it through this object, so it can't release it"
            )
        return self._own.leases.pop()

    def _forget(self, lease: Lease) -> None:
        with contextlib.suppress(ValueError):
            self._own.leases.remove(lease)

    # What threading.Condition calls

    def _recursion_count(self) -> int:
        return len(self._own.leases)

    def _is_owned(self) -> bool:
        return self._recursion_count() > 0

    def _release_save(self) -> int:
        count = self._recursion_count()
        for _ in range(count or 1):
            self.release()
        return count

    def _acquire_restore(self, state: int) -> None:
        for _ in range(state):
            self.acquire()

    def _make(self, locks: Interlock) -> threads.RLock:
        return locks.rlock(self._name)

    def _arguments(self) -> tuple[Any, ...]:
        return (self._name,)

    def __repr__(self) -> str:
        count = self._recursion_count()
        if not count and self._newest is not None and (lease := self._newest()) is not None and not lease._ended:
            count = lease._depth  # another thread holds it
        return _repr_of_lock(self, f"{self._name!r} count={count}", held=count > 0)


def _repr_of_lock(lock: Lock | RLock, details: str, *, held: bool) -> str:
    """As threading's, but of what this object holds: a repr asks no server."""
    kind = type(lock)
    state = "locked" if held else "unlocked"
    return f"<{state} {kind.__module__}.{kind.__qualname__} object {details} at {id(lock):#x}>"


class Semaphore(_AnyThreads["threads.Semaphore"]):
    """threading.Semaphore for all processes that use this name: `value` permits for all of them together.

    The server keeps the value: a process that gives another one gets ConfigError. Permits are leased, so a process that
    dies gives its permits back, after the ttl at the latest. Who may release, `locks`, and the errors: as for Lock.

    Two things of threading can't be kept, since a permit is a lease, and not a mere count: a `value` of 0, and a
    release() of more permits than this object holds, which would raise the value for all processes. Both raise
    ValueError (the first as ConfigError, which is one).
    """

    def __init__(self, name: str, value: int = 1, *, locks: Interlock | None = None) -> None:
        self._value = value
        super().__init__(name, locks, '("weather-api", 5)')

    def _check_arguments(self) -> None:
        try:
            positive_int(self._value, "value", f"semaphore {self._name!r}", MAX_PERMITS)
        except ConfigError as error:
            if self._value != 0:
                raise
            raise ConfigError(
                f"{error}. A semaphore of threading that starts at 0 is a signal; a permit here is a lease, and nobody "
                "would have one to release. For a signal use Interlock.latch(name, count)"
            ) from None

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire a permit, and return whether that was possible within `timeout` seconds; None waits without end.

        Raises ValueError and OverflowError as threading.Semaphore does, ConfigError if the server has another value,
        and Unavailable if it does not answer.
        """
        if not blocking:
            if timeout is not None:
                raise ValueError(_NO_TIMEOUT)
            return self._acquired(0)
        return self._acquired(None if timeout is None else _bounded(max(0, timeout)))

    def release(self, n: int = 1) -> None:
        """Release n permits that this object has acquired, in any thread.

        Raises ValueError if this object holds fewer, and then releases none; LeaseLost if one of them was lost.
        """
        if n < 1:
            raise ValueError(f"semaphore {self._name!r}: n must be at least 1, not {n!r}")
        if n > len(self._kept):
            raise self._refusal()
        with contextlib.ExitStack() as releases:  # a lost permit does not keep the others
            for _ in range(n):
                releases.push(self._take())

    def _make(self, locks: Interlock) -> threads.Semaphore:
        return locks.semaphore(self._name, self._value)

    def _arguments(self) -> tuple[Any, ...]:
        return self._name, self._value

    def _refusal(self) -> ValueError:
        return ValueError(
            f"semaphore {self._name!r} was released too often: this object holds {len(self._kept)} of its permits. "
            "A release makes no new permit: all processes share the limit, which only "
            "Interlock.semaphore(name, limit).set_limit(new) changes"
        )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}: value={self._counted()}>"

    def _counted(self) -> str:
        """How many of the permits this object does not hold: a repr asks no server."""
        return f"{self._value - len(self._kept)}"


class BoundedSemaphore(Semaphore):
    """threading.BoundedSemaphore for all processes that use this name. Every Semaphore here is bounded."""

    def _counted(self) -> str:
        return f"{super()._counted()}/{self._value}"


class Barrier(_Handle["tuple[threads.Barrier, threads.Barrier]"]):
    """threading.Barrier for all processes that use this name: `parties` threads, of any process, wait for each other.

    `action` runs in one of the parties, when all have arrived and before any goes on; give it to all parties or to
    none. With an action let no more than `parties` threads use the barrier. If it raises, or its process is killed, the
    barrier is broken. `timeout` is that of wait(). `locks`: as for Lock.

    BrokenBarrier, which the methods raise, is a threading.BrokenBarrierError. A party that dies while it waits breaks
    the barrier within seconds; one that dies before it arrives never arrives, so give a timeout. Raises ConfigError.
    """

    def __init__(
        self,
        name: str,
        parties: int,
        action: Callable[[], object] | None = None,
        timeout: float | None = None,
        *,
        locks: Interlock | None = None,
    ) -> None:
        self._parties = parties
        self._action = action
        self._timeout = timeout
        super().__init__(name, locks, '("start", 3)')

    def _check_arguments(self) -> None:
        about = f"barrier {self._name!r}"
        positive_int(self._parties, "parties", about, MAX_PARTIES - 1)  # an action makes one party more
        if self._action is not None and not callable(self._action):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigError(f"{about}: action must be callable without arguments, not {self._action!r}")
        if self._timeout is not None:
            duration(self._timeout, f"{about}: timeout")

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all parties have arrived (and the action has run). Returns a number from 0 to parties - 1.

        Each party gets a number of its own. Raises BrokenBarrier: also if `timeout` seconds (by default those of the
        barrier) are over, which breaks the barrier for all. Raises Unavailable if the server does not answer.
        """
        timeout = self._timeout if timeout is None else timeout
        until = None if timeout is None else time.monotonic() + timeout
        barrier, with_action = self._synchronizer()
        index = barrier.wait(_left(until))
        if self._action is None:
            return index
        if index == 0:
            self._act(self._action, with_action, until)
        else:
            with_action.wait(_left(until))
        return index

    def _act(self, action: Callable[[], object], with_action: threads.Barrier, until: float | None) -> None:
        """Run the action while the other parties wait, with one more party: a thread of this process.

        The heartbeats of that one end if this process dies, which breaks the barrier. The caller arrives last, after
        the action.
        """

        def stand_in() -> None:
            with contextlib.suppress(LockError):
                with_action.wait()

        thread = threading.Thread(target=stand_in, name=f"interlock-action-{self._name}", daemon=True)
        try:
            thread.start()
            action()
            left = _left(until)
            with_action.wait(None if left is None else max(left, MIN_LAST_ARRIVAL))
        except BaseException:
            with contextlib.suppress(LockError):  # without a server, the missing heartbeats break it
                self.abort()
            raise
        thread.join()

    def reset(self) -> None:
        """Begin anew: each party that waits gets BrokenBarrier, and parties that arrive from now on wait again."""
        self._synchronizer()[0].reset()

    def abort(self) -> None:
        """Break the barrier: each party that waits, or arrives before a reset(), gets BrokenBarrier."""
        barrier, with_action = self._synchronizer()
        while not barrier.revoke("abort() was called") and not self.broken:
            # The server knows no such barrier yet. An arrival that does not wait makes one, and breaks it at once. As
            # one of `parties + 1` it never completes the arrivals of others.
            with contextlib.suppress(BrokenBarrier, ConfigError):
                with_action.wait(0)

    @property
    def parties(self) -> int:
        """How many parties the barrier needs to open."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """Ask the server how many parties wait."""
        return self._synchronizer()[0].inspect().arrived

    @property
    def broken(self) -> bool:
        """Ask the server whether the barrier is broken."""
        return self._synchronizer()[0].inspect().broken is not None

    def _make(self, locks: Interlock) -> tuple[threads.Barrier, threads.Barrier]:
        """The barrier; and the same one for the second meeting, of which the stand-in is a party, too."""
        return locks.barrier(self._name, self._parties), locks.barrier(self._name, self._parties + 1)

    def _arguments(self) -> tuple[Any, ...]:
        return self._name, self._parties, self._action, self._timeout


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
