"""The semaphore: its limit, permits in order of arrival, crashes, changes of the limit."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from harness.clock import machine_time
from harness.modes import outcome, until, waiting
from harness.processes import processes
from interlock import AcquireTimeout, ConfigError, LeaseLost
from interlock._protocol.run_to_end import run

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination")


def nothing_of(clean, name: str = "a") -> bool:
    return not clean.exists(f"lock:{name}", *(f"{{lock:{name}}}{{{part}}}" for part in ("queue", "waiters", "shares")))


async def _free(limited, number: int) -> bool:
    return await limited.available() == number


async def test_a_bare_number_could_be_permits_or_seconds_and_is_refused(mode, clean):
    limited = mode.interlock().semaphore("a", 3)
    for method, given in ((limited.acquire, (3,)), (limited.acquire, (True, 5)), (limited.try_acquire, (3,))):
        with pytest.raises(TypeError) as refused:
            await method(*given)
        said = str(refused.value)
        assert said.startswith("semaphore 'a': ")
        assert f"acquire({', '.join(map(str, given))}) does not say what the number is" in said
        assert "(permits=3)" in said
        assert "acquire(timeout=3)" in said
    assert await limited.available() == 3
    await (await limited.acquire(timeout=3, permits=3)).release()


@rule(1)
async def test_as_many_permits_as_the_limit_are_held_and_no_more(mode, clean):
    limited = mode.interlock().semaphore("a", 3)
    leases = [await limited.acquire() for _ in range(3)]
    assert await mode.interlock().semaphore("a", 3).try_acquire() is None
    assert isinstance(await outcome(limited.acquire(timeout=0.05)), AcquireTimeout)
    assert await limited.available() == 0
    assert len({lease.fence for lease in leases}) == 3
    assert await leases.pop().release()
    assert await limited.available() == 1
    leases.append(await limited.try_acquire())
    for lease in leases:
        assert await lease.release()
    assert nothing_of(clean)


@rule(1)
async def test_permits_are_handed_over_in_the_order_of_arrival(mode):
    """No small request overtakes a large one at the head, though the small one would fit; the large one is served."""
    limited = mode.interlock().semaphore("a", 3)
    first, second = await limited.acquire(), await limited.acquire(permits=2)
    order, tasks = [], []

    async def wait(permits: int) -> None:
        lease = await mode.interlock().semaphore("a", 3).acquire(timeout=30, permits=permits)
        order.append(permits)
        await until(lambda: len(order) == 3 or permits == 3)
        await lease.release()

    for number, permits in enumerate((3, 1, 2)):
        tasks.append(asyncio.ensure_future(wait(permits)))
        await until(lambda number=number: waiting(limited, number + 1))
    assert [permits for _, permits in (await limited.inspect()).waiters] == [3, 1, 2]
    await first.release()
    assert await mode.interlock().semaphore("a", 3).try_acquire() is None  # one is free, and not for newcomers
    await second.release()
    await asyncio.gather(*tasks)
    assert order[0] == 3
    assert await limited.available() == 3


@rule(8)
async def test_a_release_sent_twice_gives_back_once(mode):
    limited = mode.interlock().semaphore("a", 2)
    one, other = await limited.acquire(), await limited.acquire()
    assert await one.release()
    assert not await one.release()
    core = mode.session(limited._interlock).core
    message = (one._grant.attempt, ("release", one.token, 0), time.monotonic() + 1000)
    ask = core.requests.ask_until_answered(*message)
    await (ask if mode.name == "asyncio" else mode.in_thread(lambda: run(ask)))
    assert await limited.available() == 1
    assert await other.release()
    assert await limited.available() == 2


@rule(8)
async def test_an_acquire_sent_twice_is_the_same_grant(mode, clean):
    lease = await mode.interlock().semaphore("a", 2).acquire()
    primitive = lease._grant.resource
    args = ("acquire", lease.token, 30000, 3000, 0, "nowhere", "inf", *primitive.acquire_args, "")
    assert clean.eval(primitive.script.source, len(primitive.keys), *primitive.keys, *args) == [1, lease.fence]
    assert (await mode.interlock().semaphore("a", 2).inspect()).used == 1
    await lease.release()


@rule(3, 6)
async def test_a_lease_that_is_not_renewed_gives_its_permits_back(mode):
    told = []
    locks = mode.interlock()
    dead = await locks.semaphore("a", 2, ttl=1, renew=False, on_lost=told.append).acquire(permits=2)
    alive = mode.interlock().semaphore("a", 2, ttl=1)
    started = machine_time()
    lease = await alive.acquire(timeout=10)
    assert machine_time() - started < 2.5
    await until(dead.lost.is_set)
    await until(lambda: told)
    assert not await dead.release()
    renewed = lease._grant.hold.deadline
    await until(lambda: lease._grant.hold.deadline > renewed)
    lease.ensure()
    assert (await alive.inspect()).used == 1
    assert await lease.release()


@rule(3, 4)
async def test_the_permits_and_places_of_killed_processes_are_free_again(mode, clean):
    limited = mode.interlock().semaphore("a", 2)
    async with processes(mode, 2) as (holder, waiter):
        await holder.do("permit", "a", 2, {"ttl": 1.5}, 5)
        mine = await limited.acquire()
        await waiter.say("permit", "a", 2, {}, 60)
        await until(lambda: waiting(limited, 1))
        after = asyncio.ensure_future(mode.interlock().semaphore("a", 2).acquire(timeout=30))
        await until(lambda: waiting(limited, 2))
        await waiter.end(signal.SIGKILL)
        await holder.end(signal.SIGKILL)
        lease = await after
        assert await lease.release()
        assert await mine.release()
        await until(lambda: _free(limited, 2))  # the dead waiter may have been handed one, for seconds


async def test_another_limit_is_refused_and_changes_nothing(mode):
    locks = mode.interlock()
    lease = await locks.semaphore("a", 2).acquire()
    error = await outcome(locks.semaphore("a", 3).acquire())
    assert isinstance(error, ConfigError)
    assert "limit=2" in str(error)
    assert "set_limit" in str(error)
    state = await locks.semaphore("a", 2).inspect()
    assert (state.limit, state.used, state.waiting) == (2, 1, 0)
    assert await lease.release()


async def test_the_limit_can_be_changed_while_permits_are_held(mode):
    limited = mode.interlock().semaphore("a", 1)
    lease = await limited.acquire()
    raised = mode.interlock().semaphore("a", 1)
    next_one = asyncio.ensure_future(mode.interlock().semaphore("a", 1).acquire(timeout=30))
    await until(lambda: waiting(limited, 1))
    await raised.set_limit(3)
    second = await next_one  # let in at once, by who changed it
    third = await raised.acquire(timeout=5)
    await raised.set_limit(1)
    assert await raised.available() == 0
    assert await raised.try_acquire() is None
    for each in (lease, second):
        assert await each.release()
    assert await raised.try_acquire() is None
    assert await third.release()
    assert await raised.available() == 1


async def test_lowering_the_limit_fails_requests_that_no_longer_fit(mode):
    limited = mode.interlock().semaphore("a", 3)
    lease = await limited.acquire()
    large = asyncio.ensure_future(outcome(mode.interlock().semaphore("a", 3).acquire(timeout=30, permits=3)))
    await until(lambda: waiting(limited, 1))
    await limited.set_limit(2)
    error = await asyncio.wait_for(large, 10)
    assert isinstance(error, ConfigError)
    assert "limit=2" in str(error)
    second = await limited.try_acquire()
    assert await second.release()
    assert await lease.release()


@pytest.mark.parametrize("limit", [0, -1, 1.5, "3", True, None, 1_000_001])
async def test_a_bad_limit_is_refused(mode, clean, limit):
    with pytest.raises(ConfigError, match="semaphore 'a': its limit must be a whole number from 1 to"):
        mode.interlock().semaphore("a", limit)
    assert not clean.keys()


async def test_a_bad_number_of_permits_is_refused(mode, clean):
    limited = mode.interlock().semaphore("a", 2)
    for permits in (0, -1, 3, 1.5, "1", True, None):
        error = await outcome(limited.acquire(permits=permits))
        assert isinstance(error, ConfigError), permits
        assert "permits must be a whole number from 1 to 2" in str(error)
    assert not clean.keys()


async def test_a_name_of_another_kind_is_refused(mode, clean):
    locks = mode.interlock()
    lease = await locks.semaphore("a", 2).acquire()
    for other in (locks.lock("a"), locks.rwlock("a").read(), locks.rlock("a")):
        error = await outcome(other.acquire(timeout=1))
        assert isinstance(error, ConfigError)
        assert "'a'" in str(error)
    assert await lease.release()
    held = await locks.lock("b").acquire()
    assert isinstance(await outcome(locks.semaphore("b", 2).acquire(timeout=1)), ConfigError)
    assert await held.release()


async def test_inspect_shows_the_holders_and_revoke_ends_one(mode):
    told = []
    limited = mode.interlock().semaphore("a", 3, on_lost=told.append)
    lease = await limited.acquire(permits=2)
    state = await limited.inspect()
    assert (state.limit, state.used, state.holding, state.fence) == (3, 2, 1, lease.fence)
    (holder,) = state.holders
    assert (holder.token, holder.permits, holder.fence, holder.revoked) == (lease.token, 2, lease.fence, None)
    assert 29 < holder.remaining <= 30
    assert await mode.interlock().semaphore("a", 3).revoke("disk full")
    assert "disk full" in (await limited.inspect()).holders[0].revoked
    assert await limited.available() == 1  # until it lets go
    with pytest.raises(LeaseLost):
        await lease.extend(5)
    assert not await lease.release()
    await until(lambda: _free(limited, 3))
    lease = await limited.acquire(permits=3)
    assert await limited.revoke("stuck", force=True)
    assert await limited.available() == 3
    assert not await lease.release()
    assert not await limited.revoke("nobody has it")


async def test_execute_runs_a_command_only_while_the_permit_is_alive(mode, clean):
    lease = await mode.interlock().semaphore("a", 1).acquire()
    assert await lease.execute("SET", "users:{lock:a}1", "x", keys=["users:{lock:a}1"]) == b"OK"
    clean.delete("lock:a")
    with pytest.raises(LeaseLost):
        await lease.execute("SET", "users:{lock:a}1", "late", keys=["users:{lock:a}1"])
    assert clean.get("users:{lock:a}1") == b"x"
    clean.delete("users:{lock:a}1")


@rule(1)
async def test_a_crowd_never_holds_more_than_the_limit(mode):
    inside = most = done = 0

    async def work(locks) -> None:
        nonlocal inside, most, done
        for number in range(10):
            permits = 1 + number % 2
            async with await locks.semaphore("a", 3).acquire(timeout=30, permits=permits):
                inside += permits
                most = max(most, inside)
                await asyncio.sleep(0.001)
                inside -= permits
                done += 1

    await asyncio.gather(*(work(mode.interlock()) for _ in range(8)))
    assert done == 80
    assert 2 <= most <= 3
