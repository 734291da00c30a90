"""CPython's own tests of locks, and adapters that give interlock's objects the API of `threading`."""

from __future__ import annotations

import importlib
import sys
import threading

import interlock
from harness.servers import DEBIAN

SHORTEST = 0.5  # seconds that any timeout has: on a busy machine even a free lock takes a while
LONGEST = 30.0  # seconds for which these tests wait for ever


def lock_tests():
    """Python's `test.lock_tests`, or None. Debian has them in a package of their own, which scripts/test unpacks."""
    library = DEBIAN / "usr/lib/python{}.{}".format(*sys.version_info)
    sys.path.append(str(library))  # behind Python's own: what that has is taken from there
    try:
        package = importlib.import_module("test")
        package.__path__.append(str(library / "test"))
        return importlib.import_module("test.lock_tests")
    except ImportError:
        return None
    finally:
        sys.path.remove(str(library))


class Leases:
    """Where an adapter keeps its leases."""

    def __init__(self) -> None:
        self.all: list[interlock.Lease] = []


class OwnLeases(threading.local, Leases):
    """Where an adapter keeps its leases, apart for each thread."""


class Lock:
    """threading.Lock over a lock: any thread may release it."""

    kept = Leases

    def __init__(self, lockable) -> None:
        self._lock = lockable
        self._leases = self.kept()

    def acquire(self, blocking=True, timeout=-1) -> bool:
        if not blocking and timeout != -1:
            raise ValueError("a timeout for a call that does not wait")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError("a timeout that is too long")
        if not blocking:
            lease = self._lock.try_acquire()
        elif timeout == -1:
            lease = self._lock.acquire(LONGEST)
        else:
            lease = self._within(SHORTEST if 0 < timeout < SHORTEST else timeout)
        if lease is not None:
            self._leases.all.append(lease)
        return lease is not None

    def _within(self, timeout):
        try:
            return self._lock.acquire(timeout)
        except interlock.AcquireTimeout:
            return None

    def release(self) -> None:
        if not self._leases.all:
            raise RuntimeError("it is not held")
        assert self._leases.all.pop().release(), "it was not ours any more"

    def locked(self) -> bool:
        return self._lock.inspect().held

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *raised) -> None:
        self._lock.__exit__(*raised)

    def __repr__(self) -> str:
        return f"<{'locked' if self.locked() else 'unlocked'} {__name__}.{type(self).__name__} object at {id(self):#x}>"


class RLock(Lock):
    """threading.RLock over an rlock, with the private methods that Condition calls."""

    kept = OwnLeases

    def _is_owned(self) -> bool:
        return self._recursion_count() > 0

    def _recursion_count(self) -> int:
        return len(self._leases.all)

    def _release_save(self) -> int:
        count = self._recursion_count()
        for _ in range(count or 1):
            self.release()
        return count


class Semaphore(Lock):
    """threading.Semaphore over a semaphore: a release without an acquire raises the limit."""

    def __init__(self, locks, name: str, value: int) -> None:
        super().__init__(locks.semaphore(name, value))
        self._limit = value

    def release(self, n=1) -> None:
        for _ in range(n):
            if self._leases.all:
                super().release()
            else:
                self._beyond()

    def _beyond(self) -> None:
        self._limit += 1
        self._lock.set_limit(self._limit)

    def _value(self) -> str:
        return f"{self._lock.available()}"

    def __repr__(self) -> str:
        return f"<{__name__}.{type(self).__name__} at {id(self):#x}: value={self._value()}>"


class BoundedSemaphore(Semaphore):
    """threading.BoundedSemaphore, which interlock's semaphore is: without a lease there is nothing to release."""

    def _beyond(self) -> None:
        raise ValueError("it was released too often")

    def _value(self) -> str:
        return f"{self._lock.available()}/{self._limit}"


class Barrier:
    """threading.Barrier over a barrier; its action is a second phase, for which all wait."""

    def __init__(self, barrier, parties: int, action, timeout: float | None) -> None:
        self._barrier = barrier
        self.parties = parties
        self._action = action
        self._timeout = timeout

    def wait(self, timeout=None) -> int:
        index = self._wait(timeout)
        if self._action is not None:
            if index == 0:
                self._action()
            self._wait(timeout)
        return index

    def _wait(self, timeout) -> int:
        timeout = self._timeout if timeout is None else timeout
        try:
            return self._barrier.wait(LONGEST if timeout is None else max(timeout, SHORTEST))
        except (interlock.BrokenBarrier, interlock.AcquireTimeout) as error:
            raise threading.BrokenBarrierError from error

    def reset(self) -> None:
        self._barrier.reset()

    def abort(self) -> None:
        self._barrier.revoke("aborted")

    @property
    def n_waiting(self) -> int:
        return self._barrier.inspect().arrived

    @property
    def broken(self) -> bool:
        return self._barrier.inspect().broken

    def __repr__(self) -> str:
        state = "broken" if self.broken else f"waiters={self.n_waiting}/{self.parties}"
        return f"<{__name__}.{type(self).__name__} at {id(self):#x}: {state}>"
