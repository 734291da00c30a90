"""Callers of one process on one lock: their leases pass from one to the next, and other processes do not starve.

Not here: every order of the steps (model/test_cohort.py), an interrupt at each of them
(faults/test_cohort_interrupts.py), a silent server (faults/test_silence.py), all faults at once (the crowds of
model/test_simulator.py).
"""

from __future__ import annotations

import asyncio

import pytest

from harness.modes import outcome, queued, subscribe, until
from interlock import AcquireTimeout, ConfigError, LeaseLost
from interlock._client.cohort import RESERVED

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


def cohort_of(locks, name="a"):
    return locks._session.core.cohorts.by_key.get(f"lock:{name}")


def in_cohort(locks, name="a") -> int:
    cohort = cohort_of(locks, name)
    return len(cohort.waiting) if cohort is not None else 0


def fence_of(locks) -> int:
    """The fence of the section that the cohort is in."""
    return cohort_of(locks).section.fence


async def held(locks, **options):
    """A lease that may pass on: a client that subscribes asks about its leases, and none of these passes meanwhile."""
    await subscribe(locks._session, "a")
    lease = await locks.lock("a", **options).acquire()
    await until(lambda: not locks._session.core.book.resubscribed)
    return lease


async def held_with_one_waiting(locks, **options):
    """A lease, and an acquire that waits behind it in the same process."""
    lease = await held(locks, **options)
    waiting = asyncio.ensure_future(locks.lock("a", **options).acquire())
    await until(lambda: in_cohort(locks) == 1)
    return lease, waiting


@rule(2, 7)
async def test_a_lease_passes_on_with_a_fence_of_its_own(mode, clean):
    locks = mode.interlock()
    lease, waiting = await held_with_one_waiting(locks)
    assert await lease.release()
    following = await waiting
    assert lease.state == "released"
    assert following.state == "held"
    assert following.fence > lease.fence
    assert following.token == lease.token == clean.get("lock:a").decode()
    with pytest.raises(LeaseLost):
        lease.ensure()
    assert await lease.release() is False
    following.ensure()
    assert (await locks.lock("a").inspect()).fence >= following.fence
    assert await following.release()
    assert not clean.exists("lock:a")
    assert cohort_of(locks) is None


@rule(2, 7)
async def test_each_of_many_sections_of_one_lease_has_a_fence_of_its_own(mode):
    locks = mode.interlock()
    lease = await held(locks)
    waiting = {asyncio.ensure_future(locks.lock("a").acquire()) for _ in range(4)}
    await until(lambda: in_cohort(locks) == 4)
    sections = [lease]
    while waiting:
        assert await sections[-1].release()
        (done,), waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        sections.append(done.result())
    assert await sections[-1].release()
    fences = [section.fence for section in sections]
    assert fences == sorted({*fences})
    assert len({section.token for section in sections}) < len(sections)  # else none has passed on


async def passes_on(locks, first: dict, second: dict) -> bool:
    """Whether a lease with these options passes to a caller with those, who stands in the server's queue."""
    lease = await held(locks, **first)
    waiting = asyncio.ensure_future(locks.lock("a", **second).acquire())
    await until(lambda: queued(locks, 1))
    assert not in_cohort(locks)
    await lease.release()
    following = await waiting
    await following.release()
    return following.token == lease.token


@rule(2)
@pytest.mark.parametrize(
    "options",
    [{"fair": True}, {"renew": False}, {"max_hold": 20}, {"max_waiters": 5}, {"ttl": 0.9}],
    ids=lambda options: next(iter(options)),
)
async def test_a_lease_with_these_options_does_not_pass_on(mode, options):
    assert not await passes_on(mode.interlock(), options, options)


@rule(2)
async def test_a_caller_with_another_ttl_asks_by_itself(mode):
    assert not await passes_on(mode.interlock(), {"ttl": 10}, {"ttl": 20})


@rule(2)
@pytest.mark.parametrize(("left", "passes"), [(0.55, True), (0.45, False)])
async def test_a_lease_with_less_than_half_of_its_ttl_left_does_not_pass_on(mode, left, passes):
    """As in a process that was stopped: its next caller asks the server for a lease of its own."""
    lease, waiting = await held_with_one_waiting(mode.interlock(), ttl=30)
    hold = lease._grant.hold
    hold.deadline = lease._core.runtime.now() + left * hold.ttl
    assert await lease.release()
    following = await waiting
    assert (following.token == lease.token) is passes
    await following.release()


@rule(2)
async def test_a_crowd_lets_another_process_in_within_its_budget(mode):
    """By sections, not by time: what passes on after the server's word that others wait is reserved already."""
    crowd, other = mode.interlock(), mode.interlock()
    sections, over = 0, False

    async def work():
        nonlocal sections
        while not over:
            async with crowd.lock("a"):
                sections += 1

    working = [asyncio.ensure_future(work()) for _ in range(4)]
    await until(lambda: sections > 20)
    for _ in range(3):
        waiting = asyncio.ensure_future(other.lock("a").acquire(20))
        await until(lambda: other._session.waiters.queues or waiting.done())
        before = sections
        lease = await waiting
        assert sections - before <= 2 * RESERVED + 4  # those reserved before the word, those after, those between
        await lease.release()
    over = True
    await asyncio.gather(*working)


@rule(2, 8)
async def test_the_next_caller_goes_on_with_the_place_of_a_driver_that_gives_up(mode):
    holder, locks = mode.interlock(), mode.interlock()
    lease = await holder.lock("a").acquire()
    driver = asyncio.ensure_future(outcome(locks.lock("a").acquire(1.0)))
    await until(lambda: queued(holder, 1))
    (place,) = (await holder.lock("a").inspect()).waiters
    waiting = asyncio.ensure_future(locks.lock("a").acquire())
    await until(lambda: in_cohort(locks) == 1)
    assert isinstance(await driver, AcquireTimeout)
    await until(lambda: cohort_of(locks).driver.token == place and not cohort_of(locks).waiting)
    assert (await holder.lock("a").inspect()).waiters == (place,)
    await lease.release()
    following = await waiting
    assert following.token == place
    await following.release()


@rule(2, 8)
async def test_the_last_caller_that_gives_up_leaves_the_servers_queue(mode):
    holder, locks = mode.interlock(), mode.interlock()
    lease = await holder.lock("a").acquire()
    await locks.ping()  # connecting is not what the timeouts are for
    calls = [asyncio.ensure_future(outcome(locks.lock("a").acquire(0.3 + i / 10))) for i in range(3)]
    await until(lambda: in_cohort(locks) == 2)
    assert [type(await call) for call in calls] == [AcquireTimeout] * 3
    await until(lambda: queued(holder, 0))
    assert cohort_of(locks) is None
    await lease.release()


@rule(2, 4)
async def test_a_caller_whose_time_is_over_in_the_cohort_learns_who_holds_the_lock(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    error = await outcome(locks.lock("a").acquire(0.05))
    assert isinstance(error, AcquireTimeout)
    assert error.holder == lease.token
    assert "was not acquired within 0.05 s: it is held by" in str(error)
    other = mode.interlock()
    waiting = asyncio.ensure_future(outcome(other.lock("a").acquire(1)))
    await until(lambda: queued(locks, 1))
    error = await outcome(other.lock("a").acquire(0.2))
    assert isinstance(error, AcquireTimeout)
    assert error.holder == lease.token  # which the caller that drives has learned
    await waiting
    await lease.release()


@rule(2, 6)
async def test_a_revocation_ends_the_section_and_the_next_caller_asks_the_server(mode):
    locks = mode.interlock()
    lease, waiting = await held_with_one_waiting(locks)
    assert await mode.interlock().lock("a").revoke("disk full")
    await until(lambda: lease.state == "lost")
    await outcome(lease.release())  # which hands over at once
    following = await waiting
    assert following.token != lease.token
    assert following.fence > lease.fence
    await following.release()


@rule(2, 6)
async def test_what_only_the_server_has_lost_does_not_pass_on(mode, clean):
    locks = mode.interlock()
    lease, waiting = await held_with_one_waiting(locks)
    clean.delete("lock:a")
    assert await lease.release()  # it passes: the next caller asks the server first
    following = await waiting
    assert following.token != lease.token
    assert clean.get("lock:a").decode() == following.token
    await following.release()


@rule(2)
async def test_a_command_without_a_reply_keeps_the_lease_from_passing_on(mode):
    locks = mode.interlock()
    lease, waiting = await held_with_one_waiting(locks)
    lease._grant.hold.unanswered += 1  # as execute() leaves it if the connection breaks
    await lease.release()
    following = await waiting
    assert following.token != lease.token
    await following.release()


@rule(2, 11)
async def test_close_ends_the_wait_of_every_caller(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    calls = [asyncio.ensure_future(outcome(locks.lock("a").acquire())) for _ in range(3)]
    await until(lambda: in_cohort(locks) == 3)
    await locks.close()
    assert [type(error) for error in await asyncio.gather(*calls)] == [ConfigError] * 3
    assert lease.state == "released"
    assert "is closed" in str(calls[0].result())


@rule(2)
async def test_a_lease_passes_between_lock_rlock_and_synchronized(mode):
    locks = mode.interlock()
    lease = await held(locks)
    waiting = asyncio.ensure_future(locks.rlock("a").acquire())
    await until(lambda: in_cohort(locks) == 1)
    await lease.release()
    inner = await waiting
    assert inner.token == lease.token
    await inner.release()
    outer, called = await held(locks), []
    if mode.name == "threads":
        call = asyncio.ensure_future(mode.in_thread(locks.synchronized("a")(lambda: called.append(fence_of(locks)))))
    else:

        async def note():
            called.append(fence_of(locks))

        call = asyncio.ensure_future(locks.synchronized("a")(note)())
    await until(lambda: in_cohort(locks) == 1)
    await outer.release()
    await call
    assert called[0] > outer.fence
