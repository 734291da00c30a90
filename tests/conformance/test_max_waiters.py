"""max_waiters: who would have to wait behind so many others is refused at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import outcome, until, waiting
from interlock import AcquireTimeout, ConfigError

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
KINDS = {
    "lock": lambda locks, **options: locks.lock("a", **options),
    "rlock": lambda locks, **options: locks.rlock("a", **options),
    "read": lambda locks, **options: locks.rwlock("a", **options).read(),
    "write": lambda locks, **options: locks.rwlock("a", **options).write(),
    "semaphore": lambda locks, **options: locks.semaphore("a", 1, **options),
    "election": lambda locks, **options: locks.election("a", **options),
}


def come(lockable):
    """One that waits, and then gives it back at once."""

    async def come():
        await (await lockable.acquire(timeout=30)).release()

    return asyncio.ensure_future(come())


def holder_for(locks, kind):
    """What keeps others of this kind out."""
    return KINDS["write" if kind == "read" else kind](locks)


@pytest.mark.parametrize("kind", KINDS)
async def test_one_more_than_may_wait_is_refused_at_once_and_leaves_nothing(mode, clean, kind):
    held = await holder_for(mode.interlock(), kind).acquire()
    clients = [mode.interlock() for _ in range(4)]
    calls = [come(KINDS[kind](each, max_waiters=2)) for each in clients[:2]]
    lockable = KINDS[kind](clients[2], max_waiters=2)
    await until(lambda: waiting(lockable, 2))
    before = clean.zrange("{lock:a}{queue}", 0, -1)
    started = machine_time()
    error = await outcome(lockable.acquire(timeout=30))
    assert machine_time() - started < 10
    assert isinstance(error, AcquireTimeout)
    assert (error.waiting, error.waited, error.quarantined, error.name) == (2, 0, False, "a")
    assert "'a'" in str(error)
    assert "2 callers wait for it already, as many as max_waiters allows. Try again later" in str(error)
    assert clean.zrange("{lock:a}{queue}", 0, -1) == before
    assert clean.zcard("{lock:a}{gone}") == 0
    without_bound = come(KINDS[kind](clients[3]))
    await until(lambda: waiting(lockable, 3))
    await held.release()
    await asyncio.gather(*calls, without_bound)
    await (await lockable.acquire(timeout=30)).release()


async def test_there_is_room_again_when_a_waiter_has_left(mode):
    held = await mode.interlock().lock("a").acquire()
    locks = mode.interlock()
    first = asyncio.ensure_future(outcome(locks.lock("a", max_waiters=1).acquire(0.5)))
    await until(lambda: waiting(locks.lock("a"), 1))
    assert isinstance(await outcome(locks.lock("a", max_waiters=1).acquire(5)), AcquireTimeout)
    assert (await first).waiting is None
    second = come(locks.lock("a", max_waiters=1))
    await until(lambda: waiting(locks.lock("a"), 1))
    await held.release()
    await second


async def test_who_waits_keeps_the_right_to_wait_when_the_server_has_lost_the_queue(mode, clean):
    """Not counted again: what a restart of the server costs is the place, never the wait."""
    held = await mode.interlock().lock("a").acquire()
    locks = mode.interlock()
    calls = [come(mode.interlock().lock("a", max_waiters=2)) for _ in range(2)]
    await until(lambda: waiting(locks.lock("a"), 2))
    pipeline = clean.pipeline()
    pipeline.delete("{lock:a}{queue}", "{lock:a}{waiters}")
    for number in range(3):  # others have come first
        pipeline.zadd("{lock:a}{queue}", {f"other/{number}": number + 1})
        pipeline.hset("{lock:a}{waiters}", f"other/{number}", f"{10**13} 3000 0 -")
    pipeline.pexpire("{lock:a}{queue}", 10_000)
    pipeline.pexpire("{lock:a}{waiters}", 10_000)
    pipeline.execute()
    await until(lambda: waiting(locks.lock("a"), 5))
    clean.zrem("{lock:a}{queue}", *(f"other/{number}" for number in range(3)))
    await held.release()
    await asyncio.gather(*calls)


async def test_the_dead_do_not_keep_a_caller_out(mode, clean):
    held = await mode.interlock().lock("a").acquire()
    lock = mode.interlock().lock("a", max_waiters=2)
    clean.zadd("{lock:a}{queue}", {"dead/1": 1, "dead/2": 2})
    clean.hset("{lock:a}{waiters}", mapping={"dead/1": "1 3000 0 -"})  # of the other one the server has lost the entry
    call = come(lock)
    await until(lambda: waiting(lock, 1))
    await held.release()
    await call


async def test_a_multi_keeps_the_bound_of_each_of_its_locks(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    held = await others.lock("b").acquire()
    call = come(mode.interlock().lock("b"))
    await until(lambda: waiting(locks.lock("b"), 1))
    error = await outcome(locks.multi(locks.lock("a"), locks.lock("b", max_waiters=1)).acquire(30))
    assert isinstance(error, AcquireTimeout)
    assert (error.waiting, error.waited, error.name) == (1, 0, "a, b")
    assert "was not acquired: lock 'b' is not free, and 1 callers wait" in str(error)
    await until(lambda: not clean.exists("lock:a"))
    await held.release()
    await call


async def test_synchronized_raises_what_the_bound_refuses(mode):
    locks = mode.interlock()
    held = await mode.interlock().lock("a").acquire()
    call = come(locks.lock("a"))
    await until(lambda: waiting(locks.lock("a"), 1))
    if mode.name == "threads":
        decorated = locks.synchronized("a", max_waiters=1)(lambda: None)
        error = await outcome(mode.in_thread(decorated))
    else:

        async def nothing():
            pass

        error = await outcome(locks.synchronized("a", max_waiters=1)(nothing)())
    assert isinstance(error, AcquireTimeout)
    assert error.waiting == 1
    await held.release()
    await call


@pytest.mark.runs_on("its own servers", starts="the servers of a quorum", quorum=True)
async def test_a_majority_of_a_quorum_refuses(mode):
    locks = mode.interlock()
    held = await mode.interlock().lock("a").acquire()
    call = come(mode.interlock().lock("a", max_waiters=1))
    await until(lambda: waiting(locks.lock("a"), 1))
    error = await outcome(locks.lock("a", max_waiters=1).acquire(30))
    assert isinstance(error, AcquireTimeout)
    assert error.waiting == 1
    await held.release()
    await call
    assert (await locks.lock("a").inspect()).waiting == 0


@pytest.mark.parametrize("make", [interlock.Interlock, interlock.aio.Interlock], ids=["threads", "asyncio"])
def test_a_bound_is_a_whole_number(make):
    locks = make("redis://localhost:1")
    for wrong in (0, -1, 1.5, "2", True, 2_000_000):
        with pytest.raises(ConfigError, match="max_waiters must be a whole number from 1 to 1000000, not"):
            locks.lock("a", max_waiters=wrong)
    with pytest.raises(ConfigError, match="no call waits for a busy name: leave out max_waiters"):
        locks.synchronized("a", busy="skip", max_waiters=3)
