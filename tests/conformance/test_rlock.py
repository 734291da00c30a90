"""The reentrant lock. A test of the current thread or task runs all its calls in one thread, or one task."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

import interlock
import interlock.aio
from harness.modes import is_subscribed, outcome, queued, until, waiting
from harness.processes import processes
from interlock import ConfigError, LeaseLost, LeaseState

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes", quorum=True)


@pytest.fixture
def locks(server, clean):
    with interlock.Interlock(server.url) as made:
        yield made


def calls(clean) -> int:
    return sum(each["calls"] for name, each in clean.info("commandstats").items() if "eval" in name)


@rule(1, 11)
def test_the_same_thread_enters_again_without_io_and_with_one_fence(locks, clean):
    lock = locks.rlock("a")
    with lock as outer:
        before = calls(clean)
        with lock as inner, locks.rlock("a") as third:  # another description of the same lock
            assert inner.fence == third.fence == outer.fence
            assert inner.token == outer.token
        assert calls(clean) == before
        assert clean.exists("lock:a")
        assert locks.lock("a").try_acquire() is None
    assert not clean.exists("lock:a")


def test_only_the_last_release_releases_the_rlock(locks, clean):
    lock = locks.rlock("a")
    leases = [lock.acquire() for _ in range(3)]
    assert leases[0].release()
    assert leases[1].release()
    assert leases[0].state is LeaseState.HELD
    assert clean.exists("lock:a")
    assert leases[2].release()
    assert not clean.exists("lock:a")
    assert not leases[2].release()
    with lock:
        assert clean.exists("lock:a")


@rule(11)
def test_another_thread_waits_for_the_rlock(locks):
    lock, order = locks.rlock("a"), []
    with lock:

        def other():
            with lock:
                order.append("other")

        thread = threading.Thread(target=other)
        thread.start()
        deadline = time.monotonic() + 10
        while not locks._session.core.cohorts.by_key["lock:a"].waiting:
            assert time.monotonic() < deadline
        with lock:
            order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


@rule(6)
def test_a_thread_that_lost_its_lease_does_not_enter_again(locks, clean):
    lock = locks.rlock("a", ttl=0.3, renew=False)
    with pytest.raises(LeaseLost), lock as lease:
        assert lease.lost.wait(30)
        with pytest.raises(LeaseLost):
            lock.acquire()
    with lock:
        pass


def test_an_exception_leaves_every_level(locks, clean):
    lock = locks.rlock("a")
    with pytest.raises(KeyError), lock, lock:
        raise KeyError
    assert not clean.exists("lock:a")


def test_a_decorated_function_may_call_itself(locks, clean):
    @locks.rlock("a")
    def factorial(n: int) -> int:
        assert clean.exists("lock:a")
        return n * factorial(n - 1) if n > 1 else 1

    assert factorial(5) == 120
    assert not clean.exists("lock:a")


@rule(1, 11)
async def test_the_same_task_enters_again_and_another_task_waits(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a")
        async with lock as outer:
            before = calls(clean)
            async with lock as inner:
                assert inner.fence == outer.fence
            assert calls(clean) == before
            other = asyncio.ensure_future(lock.acquire(timeout=20))
            await until(lambda: queued(locks, 1))
            assert clean.exists("lock:a")
        lease = await other
        assert lease.fence > outer.fence
        assert await lease.release()


@rule(6)
async def test_a_loss_cancels_the_outer_body(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a", ttl=0.9)
        with pytest.raises(LeaseLost):
            async with lock, lock:
                clean.delete("lock:a")
                await asyncio.sleep(30)
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)


# An owner that is not a thread


@rule(7)
async def test_the_same_owner_takes_over_with_a_new_fence(mode, clean):
    """After a restart, say: the old process may still rely on its lease, but its writes have an older fence."""
    old = await mode.interlock().rlock("a", owner="shop 7").acquire()
    new = await mode.interlock().rlock("a", owner="shop 7", ttl=20).acquire(timeout=5)
    assert new.fence > old.fence
    assert clean.get("lock:a").decode() == new.token
    assert clean.pttl("lock:a") > 20_000  # never shortened
    assert not await old.release()
    assert isinstance(await outcome(old.extend(5)), LeaseLost)
    new.ensure()
    assert await new.release()


@rule(1)
async def test_another_owner_gets_the_rlock_only_after_a_lease_that_was_taken_over_has_run_out(mode):
    """Two leases of one owner are one holder: after a release of one, the other may still be at work."""
    old = await mode.interlock().rlock("a", owner="shop 7", ttl=2, renew=False).acquire()
    new = await mode.interlock().rlock("a", owner="shop 7", ttl=2).acquire(timeout=5)
    waits = asyncio.ensure_future(mode.interlock().lock("a").acquire(timeout=30))
    await until(lambda: queued(mode.interlock(), 1))
    assert await new.release()
    assert not await new.release()
    assert await mode.interlock().lock("a").try_acquire() is None
    lease = await waits
    assert old.remaining() == 0
    assert lease.fence > new.fence
    assert await lease.release()


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_a_subscribed_lease_that_was_taken_over_is_lost_at_once(mode):
    locks = mode.interlock()
    old = await locks.rlock("a", owner="shop 7").acquire()
    await until(lambda: is_subscribed(mode.session(locks)))  # it listens once it has held for a second
    new = await mode.interlock().rlock("a", owner="shop 7").acquire(timeout=5)
    await until(old.lost.is_set)
    assert await new.release()


@rule(6, 7)
async def test_of_two_leases_of_an_owner_in_one_client_the_newer_one_counts(mode):
    """Two callers that ask at the same moment: the second takes over from the first, which learns that at once."""
    locks = mode.interlock()
    for name in map("a{}".format, range(1000)):  # another one each time: an ousted lease keeps its name until its ttl
        lock = locks.rlock(name, owner="shop 7")
        first, second = await asyncio.gather(outcome(lock.acquire()), outcome(lock.acquire()))
        lost = [each for each in (first, second) if isinstance(each, LeaseLost)]
        if not lost and first.token != second.token:
            break
        for each in lost:  # its reply came after the other caller had its lease
            assert "its owner has acquired the lock" in str(each)
        for each in (first, second):
            assert each in lost or await each.release()
    old, new = sorted((first, second), key=lambda lease: lease.fence)
    inner = await lock.acquire()
    assert (inner.token, inner.fence) == (new.token, new.fence)
    assert old.state == "lost"
    assert old.lost.is_set()
    with pytest.raises(LeaseLost, match="its owner has acquired the lock again"):
        old.ensure()
    assert await inner.release() and await new.release()
    assert not await old.release()


@rule(6)
async def test_every_section_of_an_owner_raises_the_loss(mode):
    """They share one lease: each of them lost it, not only the last one to leave."""
    locks = mode.interlock()
    lock = locks.rlock("a", owner="shop 7", ttl=2)
    inside, ended = [], []

    def section():
        with lock._real as lease:
            inside.append(lease)
            lease.lost.wait(20)

    async def asection():
        async with lock as lease:
            inside.append(lease)
            await asyncio.sleep(20)

    async def one():
        ended.append(await outcome(mode.in_thread(section) if mode.name == "threads" else asection()))

    tasks = [asyncio.ensure_future(one())]
    await until(lambda: inside)  # whoever comes with this word from now on has its lease
    tasks += [asyncio.ensure_future(one()) for _ in range(2)]
    await until(lambda: len(inside) == 3)
    assert await mode.interlock().lock("a").revoke("for the test")
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert all(isinstance(each, LeaseLost) for each in ended), ended


async def test_another_owner_waits_for_the_rlock(mode):
    lease = await mode.interlock().rlock("a", owner="shop 7").acquire()
    others = mode.interlock()
    for other in (
        others.rlock("a", owner="shop 77"),
        others.rlock("a", owner="shop"),
        others.rlock("a"),
        others.lock("a"),
    ):
        assert await other.try_acquire() is None
    assert await lease.release()


async def test_the_same_owner_in_one_client_enters_again(mode, clean):
    locks = mode.interlock()
    first = await locks.rlock("a", owner="job").acquire()
    second = await locks.rlock("a", owner="job").acquire()
    assert second.token == first.token
    assert await first.release()
    assert clean.exists("lock:a")
    assert await second.release()
    assert not clean.exists("lock:a")


@pytest.mark.parametrize("owner", ["", 7, b"x", True])
def test_a_bad_owner_is_refused(owner):
    with pytest.raises(ConfigError, match="owner"):
        interlock.Interlock("redis://localhost:1").rlock("a", owner=owner)


def test_a_child_after_fork_is_not_the_owner(locks, clean):
    import os

    lock = locks.rlock("a")
    with lock as lease:
        child = os.fork()
        if not child:
            busy = lock.try_acquire() is None
            os._exit(0 if busy else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        lease.ensure()


def test_many_names_leave_nothing_in_memory(locks):
    import gc

    for number in range(50):
        with locks.rlock(f"a{number}"), locks.rwlock(f"b{number}").read():
            pass
        locks.rlock("c", owner=f"job {number}").acquire().release()
    gc.collect()
    assert not any(locks._held_by_caller._by.values())
    assert not locks._held_by_caller._by_name


@rule(3)
async def test_a_killed_holder_of_two_levels_is_followed_within_its_ttl_and_a_second(mode):
    lock = mode.interlock().rlock("a")
    async with processes(mode, 2) as (holder, waiter):
        old = await holder.do("twice", "a", {"ttl": 1.5}, 5)
        await waiter.say("twice", "a", {}, 60)
        await until(lambda: waiting(lock, 1))
        mine = asyncio.ensure_future(lock.acquire(timeout=30))
        await until(lambda: waiting(lock, 2))
        await waiter.end(signal.SIGKILL)
        holder.signal(signal.SIGKILL)
        lease = await mine
        assert lease.fence > old["fence"]
        assert await lease.release()
