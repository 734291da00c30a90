"""CPython's own tests of the locks of `threading` pass on those of interlock.compat.threading."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import unittest

import cpython
import pytest

from harness.matrix import required
from harness.modes import Residue
from interlock import Interlock
from interlock.compat.threading import Barrier, BoundedSemaphore, Lock, RLock, Semaphore

lock_tests = cpython.lock_tests()


def python_s(name: str) -> type[unittest.TestCase]:
    """CPython's test case of this name. Where Python came without its tests: a stand-in, which own_client skips."""
    return getattr(lock_tests, name) if lock_tests else unittest.TestCase


# Tests of Python that do not apply, and why. test_compat_threading.py says what holds instead.
SKIPPED = {
    "test_at_fork_reinit": "a fork frees no lock on the server: its parent has it (test_processes.py, test_rlock.py)",
    "TestSemaphore.test_release_unacquired": "permits are leases: a release of more than are held is refused",
    "TestSemaphore.test_repr": "it ends with such a release",
    "TestBarrier.test_repr": "a repr asks no server how many parties wait",
}
if sys.version_info < (3, 13):
    SKIPPED["test_thread_leak"] = "threading keeps a stand-in for a thread that it did not begin and that asks its name"
# Python's locks may vanish while they are held, and in these tests they do; Dropping holds that ours tell it.
pytestmark = [
    pytest.mark.runs_on("valkey-9.1", modes="threads"),
    pytest.mark.filterwarnings("ignore:.* dropped without release:ResourceWarning"),
]


class OnAServer:
    """Each test has a client of its own, which releases everything at its end."""

    @pytest.fixture(autouse=True)
    def own_client(self, server, clean):
        if lock_tests is None:
            required("Python's own tests of its locks: Debian has them in libpython3.*-testsuite")
        name = self._testMethodName
        if reason := SKIPPED.get(name) or SKIPPED.get(f"{type(self).__name__}.{name}"):
            pytest.skip(reason)
        numbers = itertools.count()
        self.name = lambda: f"a{next(numbers)}"
        with Interlock(server.url) as self.locks:
            with self.locks.lock("a"):  # the client's threads run before the test counts threads: its listener,
                self.locks._session.server.ensure_subscribed("a")
            for worker in self.locks._session.workers:
                worker.wake_at(0)
            yield
        held = [key for key in clean.keys("lock:*") if clean.type(key) != b"hash"]  # a barrier's numbers stay a while
        assert not held
        end = time.monotonic() + 10
        while Residue.threads():  # closing waits for a second; on a busy machine a thread may take longer to end
            assert time.monotonic() < end, Residue.threads()
            time.sleep(0.01)


class Dropping(OnAServer):
    """A lock of `threading` may be dropped while it is held; a lease that is dropped warns."""

    def test_acquire_destroy(self):
        with self.assertWarnsRegex(ResourceWarning, "dropped without release"):
            super().test_acquire_destroy()


class TestLock(Dropping, python_s("LockTests")):
    def locktype(self):
        return Lock(self.name(), locks=self.locks)


class TestRLock(Dropping, python_s("RLockTests")):
    def locktype(self):
        return RLock(self.name(), locks=self.locks)


class TestCondition(OnAServer, python_s("ConditionTests")):
    """Python's Condition over our RLock."""

    def condtype(self, lock=None):
        return threading.Condition(lock or RLock(self.name(), locks=self.locks))


class TestSemaphore(Dropping, python_s("SemaphoreTests")):
    def semtype(self, value=1):
        return Semaphore(self.name(), value, locks=self.locks)


class ShownHere(BoundedSemaphore):
    """Python's test of the repr knows modules without a dot in their names only, as that of this class."""


ShownHere.__qualname__ = "BoundedSemaphore"


class TestBoundedSemaphore(Dropping, python_s("BoundedSemaphoreTests")):
    def semtype(self, value=1):
        return ShownHere(self.name(), value, locks=self.locks)


class TestBarrier(OnAServer, python_s("BarrierTests")):
    defaultTimeout = 4.0

    def barriertype(self, parties, action=None, timeout=None):
        return Barrier(self.name(), parties, action, timeout, locks=self.locks)
