"""The barrier: rounds, lost replies and messages, timeouts, dead parties, resets."""

from __future__ import annotations

import asyncio
import signal

import pytest

from harness.modes import outcome, until, waiting
from harness.processes import processes
from interlock import BrokenBarrier, ConfigError

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination")


async def broken(barrier) -> bool:
    return (await barrier.inspect()).broken is not None


def arrive(mode, parties: int = 3, timeout: float = 30):
    return asyncio.ensure_future(outcome(mode.interlock().barrier("a", parties).wait(timeout)))


@rule(1, 3)
async def test_all_parties_pass_together_round_after_round(mode):
    barrier = mode.interlock().barrier("a", 3)
    for _ in range(3):
        tasks = []
        for number in range(2):
            tasks.append(arrive(mode))
            await until(lambda number=number: waiting(barrier, number + 1))
        assert not any(task.done() for task in tasks)
        last = await arrive(mode)
        assert [await task for task in tasks] == [0, 1]
        assert last == 2
        assert (await barrier.inspect()).arrived == 0


@rule(1)
async def test_the_same_parties_pass_in_many_rounds(mode):
    locks = [mode.interlock() for _ in range(3)]
    rounds = [0, 0, 0]

    async def party(number: int) -> None:
        barrier = locks[number].barrier("a", 3)
        for _ in range(10):
            rounds[number] += 1
            assert 0 <= await barrier.wait(timeout=50) < 3
            assert max(rounds) - min(rounds) <= 1

    await asyncio.gather(*map(party, range(3)))
    assert rounds == [10, 10, 10]


@rule(1)
async def test_a_barrier_of_one_party_never_waits(mode):
    barrier = mode.interlock().barrier("a", 1)
    assert [await barrier.wait(timeout=0) for _ in range(3)] == [0, 0, 0]


@rule(8)
async def test_an_arrival_whose_reply_is_lost_counts_once(mode, clean, proxy):
    barrier = mode.interlock(f"{proxy.url}?socket_timeout=0.3").barrier("a", 3)
    looking = mode.interlock()
    await barrier.inspect()  # it is connected
    proxy.drop_replies = True
    first = asyncio.ensure_future(barrier.wait(timeout=30))
    await until(lambda: waiting(looking.barrier("a", 3), 1))
    proxy.cut()
    proxy.drop_replies = False
    second = arrive(mode)
    await until(lambda: waiting(looking.barrier("a", 3), 2))
    third = arrive(mode)
    assert [await first, await second, await third] == [0, 1, 2]


@rule(8)
async def test_a_lost_reply_to_the_last_arrival_is_no_arrival_in_the_next_round(mode, clean, proxy):
    barrier = mode.interlock(f"{proxy.url}?socket_timeout=0.3").barrier("a", 2)
    looking = mode.interlock().barrier("a", 2)
    first = arrive(mode, 2)
    await until(lambda: waiting(looking, 1))
    await barrier.inspect()  # it is connected
    proxy.drop_replies = True
    last = asyncio.ensure_future(barrier.wait(timeout=30))
    assert await first == 0
    proxy.cut()
    proxy.drop_replies = False
    assert await last == 1
    assert (await looking.inspect()).arrived == 0


@rule(3)
async def test_a_lost_message_costs_a_poll(mode):
    locks = mode.interlock()
    first = asyncio.ensure_future(locks.barrier("a", 2).wait(timeout=30))
    looking = mode.interlock().barrier("a", 2)
    await until(lambda: waiting(looking, 1))
    mode.session(locks).waiters.on_granted = lambda *_: None  # it hears nothing
    assert await looking.wait(timeout=10) == 1
    assert await asyncio.wait_for(first, 10) == 0


@rule(3)
async def test_a_party_whose_timeout_ends_after_all_arrived_has_passed(mode):
    """The other parties passed with it, and nobody gets two answers in one generation."""
    locks, looking = mode.interlock(), mode.interlock().barrier("a", 2)
    first = asyncio.ensure_future(outcome(locks.barrier("a", 2).wait(timeout=1.5)))
    await until(lambda: waiting(looking, 1))
    waiters = mode.session(locks).waiters
    waiters.on_granted = waiters.wake_all = waiters._on_heartbeat_reply = lambda *_: None  # it hears nothing
    assert await looking.wait(timeout=10) == 1
    assert await first == 0


@rule(3)
async def test_a_party_that_times_out_breaks_the_barrier_for_all(mode):
    barrier = mode.interlock().barrier("a", 3)
    other = arrive(mode)
    await until(lambda: waiting(barrier, 1))
    mine = await outcome(barrier.wait(timeout=0.2))
    assert isinstance(mine, BrokenBarrier)
    assert "0.2 s" in str(mine)
    theirs = await asyncio.wait_for(other, 10)
    assert isinstance(theirs, BrokenBarrier)
    assert isinstance(await arrive(mode), BrokenBarrier)  # until it is reset
    assert await broken(barrier)
    await barrier.reset()
    assert not await broken(barrier)
    tasks = [arrive(mode) for _ in range(3)]
    assert sorted([await task for task in tasks]) == [0, 1, 2]


@rule(3)
async def test_a_party_that_does_not_wait_breaks_the_barrier(mode):
    barrier = mode.interlock().barrier("a", 2)
    assert isinstance(await outcome(barrier.wait(timeout=0)), BrokenBarrier)
    assert await broken(barrier)


@rule(3, 4)
async def test_a_killed_party_breaks_the_barrier_for_all(mode):
    barrier = mode.interlock().barrier("a", 3)
    async with processes(mode, 1) as (dying,):
        await dying.say("arrive", "a", 3, 60)
        await until(lambda: waiting(barrier, 1))
        other = arrive(mode)
        await until(lambda: waiting(barrier, 2))
        dying.signal(signal.SIGKILL)
        told = await asyncio.wait_for(other, 10)
        assert isinstance(told, BrokenBarrier)
        assert str(dying.process.pid) in str(told)


@rule(3, 4)
async def test_a_stopped_party_breaks_the_barrier_and_learns_of_it_when_it_runs_again(mode):
    barrier = mode.interlock().barrier("a", 3)
    async with processes(mode, 1) as (stopped,):
        await stopped.say("arrive", "a", 3, 60)
        await until(lambda: waiting(barrier, 1))
        other = arrive(mode)
        await until(lambda: waiting(barrier, 2))
        await stopped.stopped()
        assert isinstance(await asyncio.wait_for(other, 10), BrokenBarrier)
        stopped.signal(signal.SIGCONT)
        assert (await stopped.answer())["error"] == "BrokenBarrier"


@rule(8)
@pytest.mark.asyncio_only
async def test_a_cancelled_party_breaks_the_barrier(mode):
    barrier = mode.interlock().barrier("a", 2)
    task = asyncio.ensure_future(barrier.wait())
    await until(lambda: waiting(barrier, 1))
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: broken(barrier))


@rule(8)
async def test_a_reset_breaks_the_parties_that_wait_and_not_those_that_passed(mode):
    barrier = mode.interlock().barrier("a", 2)
    waits = arrive(mode, 2)
    await until(lambda: waiting(barrier, 1))
    before = (await barrier.inspect()).generation
    await barrier.reset()
    told = await asyncio.wait_for(waits, 10)
    assert isinstance(told, BrokenBarrier)
    assert "reset" in str(told)
    assert (await barrier.inspect()).generation > before
    first = arrive(mode, 2)
    await until(lambda: waiting(barrier, 1))
    assert await arrive(mode, 2) == 1
    await barrier.reset()
    assert await first == 0


@rule(8)
async def test_a_late_copy_of_a_reset_resets_nothing(mode, clean):
    barrier = mode.interlock().barrier("a", 2)
    first = arrive(mode, 2)
    await until(lambda: waiting(barrier, 1))
    primitive = barrier._primitive
    message = (len(primitive.keys), *primitive.keys, "reset", "reset/1", "")
    assert clean.eval(primitive.script.source, *message) == [1]
    assert isinstance(await first, BrokenBarrier)
    second = arrive(mode, 2)
    await until(lambda: waiting(barrier, 1))
    assert clean.eval(primitive.script.source, *message) == [0]
    assert await arrive(mode, 2) == 1
    assert await second == 0


async def test_a_revoked_barrier_is_broken_with_the_reason(mode):
    barrier = mode.interlock().barrier("a", 2)
    waits = arrive(mode, 2)
    await until(lambda: waiting(barrier, 1))
    assert await barrier.revoke("we stop here")
    told = await asyncio.wait_for(waits, 10)
    assert isinstance(told, BrokenBarrier)
    assert "we stop here" in str(told)
    assert not await barrier.revoke("again")


@rule(9)
async def test_the_parties_of_a_barrier_whose_keys_vanished_learn_that_it_is_broken(mode, clean):
    barrier = mode.interlock().barrier("a", 2)
    waits = arrive(mode, 2)
    await until(lambda: waiting(barrier, 1))
    for key in clean.keys("*"):
        assert clean.pttl(key) != -1
    clean.flushall()
    assert isinstance(await asyncio.wait_for(waits, 10), BrokenBarrier)


async def test_more_parties_pass_than_one_script_call_wakes(mode):
    locks = mode.interlock()
    barrier = locks.barrier("a", 100)
    tasks = [asyncio.ensure_future(barrier.wait(timeout=50)) for _ in range(99)]
    await until(lambda: waiting(barrier, 99))
    indices = [await barrier.wait(timeout=30), *await asyncio.wait_for(asyncio.gather(*tasks), 20)]
    assert sorted(indices) == list(range(100))


async def test_bad_parties_and_timeouts_are_refused_before_anything_is_sent(mode, clean):
    locks = mode.interlock()
    for parties in (0, -1, 1.5, "2", True, None, 10**7):
        with pytest.raises(ConfigError, match="parties"):
            locks.barrier("a", parties)
    assert isinstance(await outcome(locks.barrier("a", 2).wait(-1)), ConfigError)
    assert not clean.keys("*")
    first = arrive(mode, 2)
    await until(lambda: waiting(locks.barrier("a", 2), 1))
    refused = await outcome(mode.interlock().barrier("a", 3).wait(timeout=5))
    assert isinstance(refused, ConfigError)
    assert "parties=2" in str(refused)
    assert await locks.barrier("a", 2).wait(timeout=5) == 1
    assert await first == 0
    assert await locks.barrier("a", 1).wait(timeout=5) == 0  # while nobody waits the number may change
