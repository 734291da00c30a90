"""The latch: counts, waiters, lost replies and messages, its ttl, revocation."""

from __future__ import annotations

import asyncio
import signal

import pytest

from harness.modes import outcome, until, waiting
from harness.processes import processes
from interlock import AcquireTimeout, BrokenBarrier, ConfigError

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination")


@rule(1, 3)
async def test_waiters_go_on_when_the_count_reaches_zero(mode):
    latch = mode.interlock().latch("a", 3)
    tasks = [asyncio.ensure_future(mode.interlock().latch("a", 3).wait(timeout=30)) for _ in range(5)]
    await until(lambda: waiting(latch, 5))
    assert await latch.count() == 3
    assert await latch.count_down() == 2
    assert await mode.interlock().latch("a", 3).count_down() == 1
    assert not any(task.done() for task in tasks)
    assert await latch.count_down() == 0
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    await latch.wait(timeout=0)  # who comes late returns at once
    assert (await latch.inspect()).open


@rule(1)
async def test_the_count_is_set_once_and_never_goes_below_zero(mode):
    latch, other = mode.interlock().latch("a", 2), mode.interlock().latch("a", 2)
    assert await mode.interlock().latch("a", 7).count() == 7  # nobody came yet
    assert await latch.count_down() == 1
    assert await other.count() == 1
    assert await other.count_down(5) == 0
    assert await other.count_down() == 0
    state = await latch.inspect()
    assert (state.count, state.left, state.waiting) == (2, 0, 0)


@rule(1)
async def test_another_count_is_refused_until_the_latch_is_forgotten(mode, clean):
    latch, other = mode.interlock().latch("a", 2), mode.interlock().latch("a", 7)
    waiter = asyncio.ensure_future(latch.wait(timeout=30))
    await until(lambda: waiting(latch, 1))
    for count in 2, 0:  # while it counts, and when it is open
        for call in other.count_down, other.count, other.wait:
            refused = await outcome(call())
            assert isinstance(refused, ConfigError)
            assert "latch 'a' is in use with count=2. Give the same count; or use another name" in str(refused)
            assert refused.name == "a"
        assert await latch.count() == count
        assert (await other.inspect()).left == count
        await latch.count_down(2)
    await waiter
    clean.pexpire("lock:a", 20_000)
    assert isinstance(await outcome(other.wait()), ConfigError)
    assert clean.pttl("lock:a") <= 20_000, "refused calls keep the latch alive"
    clean.delete("lock:a", "{lock:a}{record}")  # as its ttl does
    assert await other.count_down() == 6


async def test_a_broken_latch_says_what_can_be_done_about_it(mode):
    latch, other = mode.interlock().latch("a", 2), mode.interlock().latch("a", 7)
    await latch.count_down()
    await latch.revoke("the job is cancelled")
    for broken in latch, other:
        for call in broken.wait, broken.count_down:
            error = await outcome(call())
            assert isinstance(error, BrokenBarrier)
            assert "the job is cancelled" in str(error)
            assert "Use another name" in str(error)
            assert "reset" not in str(error)


@rule(8)
async def test_a_count_down_whose_reply_is_lost_counts_once(mode, clean, proxy):
    latch = mode.interlock(f"{proxy.url}?socket_timeout=0.3").latch("a", 5)
    assert await latch.count_down() == 4
    proxy.drop_replies = True
    counting = asyncio.ensure_future(latch.count_down())
    await until(lambda: clean.hget("lock:a", "left") == b"3")
    proxy.cut()
    proxy.drop_replies = False
    assert await counting == 3
    assert await latch.count() == 3


@rule(8)
async def test_a_waiter_that_times_out_leaves_the_queue(mode, clean):
    locks = mode.interlock()
    await locks.ping()  # connecting is not what the timeout is for: over TLS it may take that long
    latch = locks.latch("a", 2)
    refused = await outcome(latch.wait(timeout=0.2))
    assert isinstance(refused, AcquireTimeout)
    assert "latch 'a'" in str(refused)
    assert "2" in str(refused)
    assert isinstance(await outcome(latch.wait(timeout=0)), AcquireTimeout)
    await until(lambda: waiting(latch, 0))
    if mode.name == "asyncio":
        task = asyncio.ensure_future(latch.wait())
        await until(lambda: waiting(latch, 1))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: waiting(latch, 0))


@rule(3)
async def test_a_lost_message_costs_a_poll(mode):
    locks = mode.interlock()
    latch = locks.latch("a", 1)
    waits = asyncio.ensure_future(latch.wait(timeout=30))
    await until(lambda: waiting(latch, 1))
    mode.session(locks).waiters.on_granted = lambda *_: None  # it hears nothing
    await mode.interlock().latch("a", 1).count_down()
    await asyncio.wait_for(waits, 10)


@rule(4)
async def test_a_killed_waiter_disturbs_no_other(mode):
    latch = mode.interlock().latch("a", 2)
    async with processes(mode, 2) as (dying, counting):
        await dying.say("latched", "a", 2, 60)
        await until(lambda: waiting(latch, 1))
        waits = asyncio.ensure_future(latch.wait(timeout=30))
        await until(lambda: waiting(latch, 2))
        dying.signal(signal.SIGKILL)
        await counting.end(signal.SIGKILL)
        await latch.count_down(2)
        await asyncio.wait_for(waits, 10)


@rule(9)
async def test_the_waiters_of_a_latch_whose_keys_vanished_learn_that_it_is_gone(mode, clean):
    """The next request of a waiter never makes a new latch of that name, on which it would hang."""
    latch = mode.interlock().latch("a", 1)
    waits = asyncio.ensure_future(outcome(latch.wait(timeout=30)))
    await until(lambda: waiting(latch, 1))
    clean.flushall()
    told = await asyncio.wait_for(waits, 10)
    assert isinstance(told, BrokenBarrier)
    assert "gone" in str(told)
    waits = asyncio.ensure_future(outcome(latch.wait(timeout=30)))
    await until(lambda: waiting(latch, 1))
    clean.flushall()
    another = mode.interlock().latch("a", 5)
    await another.count_down()
    assert isinstance(await asyncio.wait_for(waits, 10), BrokenBarrier)
    assert await another.count() == 4


@rule(9)
async def test_a_latch_vanishes_after_its_ttl_which_each_count_and_waiter_refreshes(mode, clean):
    latch = mode.interlock().latch("a", 2, ttl=10)
    await latch.count_down()
    for key in clean.keys("*"):
        assert 0 < clean.pttl(key) <= 60_000
    clean.pexpire("lock:a", 2000)
    waits = asyncio.ensure_future(latch.wait(timeout=30))
    await until(lambda: waiting(latch, 1))
    assert clean.pttl("lock:a") > 8000
    clean.pexpire("lock:a", 2000)
    await until(lambda: clean.pttl("lock:a") > 8000)  # its heartbeat
    await latch.count_down()
    await waits


async def test_a_revoked_latch_ends_for_all_its_waiters(mode):
    latch = mode.interlock().latch("a", 2)
    assert not await latch.revoke("nobody is there")
    waits = asyncio.ensure_future(outcome(mode.interlock().latch("a", 2).wait(timeout=30)))
    await until(lambda: waiting(latch, 1))
    assert await latch.revoke("the deployment was stopped")
    told = await asyncio.wait_for(waits, 10)
    assert isinstance(told, BrokenBarrier)
    assert "the deployment was stopped" in str(told)
    assert isinstance(await outcome(latch.count_down()), BrokenBarrier)
    assert not await latch.revoke("again")
    assert (await latch.inspect()).revoked


async def test_more_waiters_go_on_than_one_script_call_wakes(mode):
    latch = mode.interlock().latch("a", 1)
    tasks = [asyncio.ensure_future(latch.wait(timeout=50)) for _ in range(100)]
    await until(lambda: waiting(latch, 100))
    await latch.count_down()
    await asyncio.wait_for(asyncio.gather(*tasks), 20)


@rule(3)
async def test_the_waiters_of_a_latch_learn_that_the_server_restarted_empty(mode, node):
    latch = mode.interlock(node.url).latch("a", 1)
    waits = asyncio.ensure_future(outcome(latch.wait(timeout=50)))
    # Not `waiting`: if the reply with the generation is lost, the caller waits at the latch of the new server, as if it
    # came after the restart.
    await until(lambda: latch._session.waiters.queues)
    node.kill()
    node.restart()
    assert isinstance(await asyncio.wait_for(waits, 30), BrokenBarrier)


async def test_bad_counts_and_timeouts_are_refused(mode, clean):
    locks = mode.interlock()
    for count in (0, -1, 1.5, "2", True, None, 10**10):
        with pytest.raises(ConfigError, match="count"):
            locks.latch("a", count)
    for ttl in (0, -1, "x", 9):
        with pytest.raises(ConfigError, match="ttl"):
            locks.latch("a", 1, ttl=ttl)
    latch = locks.latch("a", 1)
    for by in (0, -1, 1.5, "2"):
        assert isinstance(await outcome(latch.count_down(by)), ConfigError)
    for timeout in (-1, "x"):
        assert isinstance(await outcome(latch.wait(timeout)), ConfigError)
    assert not clean.keys("*")


async def test_a_name_of_another_kind_is_refused(mode, clean):
    locks = mode.interlock()
    await locks.latch("a", 1).count_down()
    before = clean.dump("lock:a")
    for other in (
        locks.lock("a"),
        locks.rlock("a"),
        locks.election("a"),
        locks.semaphore("a", 1),
        locks.rwlock("a").read(),
    ):
        assert isinstance(await outcome(other.acquire(timeout=0)), ConfigError), other
        assert isinstance(await outcome(other.inspect()), ConfigError), other
    assert isinstance(await outcome(locks.barrier("a", 2).wait(timeout=0.1)), ConfigError)
    assert clean.dump("lock:a") == before
    held = await locks.lock("b").acquire()
    for call in (lambda latch: latch.count_down(), lambda latch: latch.wait(timeout=0), lambda latch: latch.inspect()):
        assert isinstance(await outcome(call(locks.latch("b", 1))), ConfigError)
    await held.release()
