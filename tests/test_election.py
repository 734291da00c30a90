"""The election, in both modes, on a real server."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from actors import actors
from interlock import AcquireTimeout, ConfigError, LeaseLost
from interlock._lease import LeaseState
from kit import hears, outcome, until, waiting

rule = pytest.mark.rule
pytestmark = [pytest.mark.grounds("kinds"), pytest.mark.quorum]


class Watcher:
    """What observe() told, in either mode."""

    def __init__(self, kit, locks) -> None:
        self.told: list = []
        self.task = asyncio.ensure_future(
            kit.in_thread(self.blocking, locks) if kit.mode == "threads" else self.run(locks)
        )

    def blocking(self, locks) -> None:
        for leader in locks._real.election("a").observe():
            self.told.append(leader)

    async def run(self, locks) -> None:
        async for leader in locks.election("a").observe():
            self.told.append(leader)

    @property
    def last(self):
        return self.told[-1] if self.told else "nothing yet"


@rule(1, 7)
async def test_one_leads_and_the_next_one_has_a_later_term(kit):
    mine, theirs = kit.interlock().election("a"), kit.interlock(label="shop").election("a")
    assert await mine.leader() is None
    lease = await mine.campaign()
    leader = await theirs.leader()
    assert (leader.token, leader.term) == (lease.token, lease.term)
    assert lease.term == lease.fence
    assert leader.remaining > 20
    assert isinstance(await outcome(theirs.campaign(timeout=0.1)), AcquireTimeout)
    task = asyncio.ensure_future(theirs.campaign(timeout=30))
    await until(lambda: waiting(mine, 1))
    assert not await theirs.resign()
    assert await mine.resign()
    following = await task
    assert following.term > lease.term
    assert (await mine.leader()).token.startswith("shop@")
    assert not await mine.resign()
    assert await following.resign()
    assert await mine.leader() is None


@rule(3)
async def test_a_killed_leader_is_replaced_within_ttl_and_a_second(kit):
    mine = kit.interlock().election("a", ttl=1.5)
    async with actors(kit, 1) as (dying,):
        first = await dying.do("lead", "a", {"ttl": 1.5}, 5)
        task = asyncio.ensure_future(mine.campaign(timeout=30))
        await until(lambda: waiting(mine, 1))
        dying.signal(signal.SIGKILL)
        lease = await task
        assert lease.term > first["term"]
        await lease.resign()


@rule(4)
async def test_a_killed_candidate_is_passed_over(kit):
    mine = kit.interlock().election("a")
    lease = await mine.campaign()
    async with actors(kit, 1) as (dying,):
        await dying.say("lead", "a", {}, 60)
        await until(lambda: waiting(mine, 1))
        task = asyncio.ensure_future(kit.interlock().election("a").campaign(timeout=30))
        await until(lambda: waiting(mine, 2))
        await dying.end(signal.SIGKILL)
        await lease.resign()
        following = await task
        await following.resign()


@rule(3)
async def test_observers_are_told_each_change(kit):
    watching, mine = kit.interlock(), kit.interlock().election("a")
    watcher = Watcher(kit, watching)
    await until(lambda: watcher.told)
    assert watcher.told == [None]
    for _ in range(3):
        lease = await mine.campaign()
        await until(lambda lease=lease: getattr(watcher.last, "term", None) == lease.term)
        assert watcher.last.token == lease.token
        await lease.resign()
        await until(lambda: watcher.last is None)
    assert len(watcher.told) == 7
    await watching.close()
    await asyncio.wait_for(watcher.task, 10)


@rule(3)
@pytest.mark.one_server
async def test_observers_are_pushed_the_news(kit):
    """Not only by looking again: that would take most of a second each time."""
    watching, mine = kit.interlock(), kit.interlock().election("a")
    watcher = Watcher(kit, watching)
    await until(lambda: watcher.told)
    await until(lambda: hears(kit.session(watching)))
    started = time.monotonic()
    for _ in range(10):
        lease = await mine.campaign()
        await until(lambda lease=lease: getattr(watcher.last, "term", None) == lease.term)
        await lease.resign()
        await until(lambda: watcher.last is None)
    assert time.monotonic() - started < 10  # twenty looks would take more
    await watching.close()
    await watcher.task


@rule(3)
async def test_observers_hear_of_a_leader_that_died(kit):
    watching = kit.interlock()
    watcher = Watcher(kit, watching)
    async with actors(kit, 1) as (dying,):
        first = await dying.do("lead", "a", {"ttl": 1}, 5)
        await until(lambda: getattr(watcher.last, "term", None) == first["term"])
        dying.signal(signal.SIGKILL)
        await until(lambda: watcher.last is None)
    await watching.close()
    await watcher.task


async def test_observers_of_a_foreigner_who_holds_it_for_ever_do_not_spin(kit, clean):
    clean.set("lock:a", "somebody")
    watching = kit.interlock()
    looks = []
    core = kit.session(watching).core
    query = core.query
    core.query = lambda *args: looks.append(args) or query(*args)
    watcher = Watcher(kit, watching)
    await until(lambda: watcher.told)
    assert watcher.last.token == "somebody"
    await asyncio.sleep(0.5)
    assert len(looks) < 5
    clean.delete("lock:a")
    await until(lambda: watcher.last is None)
    await watching.close()
    await watcher.task


@rule(3)
async def test_more_observers_than_one_step_tells(kit):
    watching = kit.interlock()
    watchers = [Watcher(kit, watching) for _ in range(80)]
    await until(lambda: all(watcher.told for watcher in watchers))
    lease = await kit.interlock().election("a").campaign()
    await until(lambda: all(getattr(watcher.last, "term", None) == lease.term for watcher in watchers), 20)
    await watching.close()
    await asyncio.gather(*(watcher.task for watcher in watchers))
    await lease.resign()


@rule(6)
async def test_run_campaigns_again_when_it_was_lost(kit):
    locks, others = kit.interlock(), kit.interlock().election("a")
    terms: list[int] = []
    released = []

    if kit.mode == "threads":

        def work(lease):
            terms.append(lease.term)
            if len(terms) == 1:
                lease.lost.wait(20)
                lease.ensure()
            return "done"

        task = asyncio.ensure_future(locks.election("a", ttl=2).run(work))
    else:

        async def work(lease):
            terms.append(lease.term)
            if len(terms) == 1:
                try:
                    await asyncio.sleep(20)
                finally:
                    released.append(lease.state)
            return "done"

        task = asyncio.ensure_future(locks.election("a", ttl=2).run(work))
    await until(lambda: terms)
    assert await others.revoke("for the test")
    assert await asyncio.wait_for(task, 20) == "done"
    assert len(terms) == 2
    assert terms[1] > terms[0]
    assert all(state is LeaseState.LOST for state in released)
    assert await others.leader() is None


@rule(6)
async def test_run_campaigns_again_when_it_was_revoked_in_the_moment_it_was_handed_over(kit, clean):
    locks, others = kit.interlock(), kit.interlock().election("a")
    first = await others.campaign()

    def work(lease):
        return lease.term

    async def awork(lease):
        return lease.term

    task = asyncio.ensure_future(locks.election("a").run(work if kit.mode == "threads" else awork))
    await until(lambda: waiting(others, 1))
    waiters = kit.session(locks).waiters
    # it has asked again since it is subscribed, and will not do so once more by itself
    await until(lambda: [each.split()[2] for each in clean.hvals("{lock:a}{waiters}")] == [b"1"])
    hear, heard = waiters.granted, []
    waiters.granted, waiters._heard = heard.append, lambda *_: None  # it does not confirm yet
    await first.resign()
    await until(lambda: heard)
    assert await others.revoke("for the test")
    waiters.granted = hear
    hear(heard[0])
    assert await asyncio.wait_for(task, 20) > first.term


async def test_run_raises_what_the_work_raises_and_resigns(kit):
    election = kit.interlock().election("a")

    def fails(_lease):
        raise LeaseLost("another lock's")

    async def afails(_lease):
        raise LeaseLost("another lock's")

    with pytest.raises(LeaseLost, match="another lock's"):
        await election.run(fails if kit.mode == "threads" else afails)
    assert await election.leader() is None


async def test_inspect_and_revoke(kit):
    election = kit.interlock().election("a", ttl=2)
    lease = await election.campaign()
    state = await election.inspect()
    assert (state.holder, state.fence) == (lease.token, lease.term)
    assert await election.revoke("a new one is due")
    await until(lambda: lease.state is LeaseState.LOST)
    assert not await lease.resign()


@rule(9)
async def test_no_key_without_a_ttl_and_no_other_kind(kit, clean):
    locks = kit.interlock()
    watcher = Watcher(kit, locks)
    lease = await locks.election("a").campaign()
    await until(lambda: watcher.last)
    for key in clean.keys("*"):
        assert clean.pttl(key) > 0
    assert isinstance(await outcome(locks.lock("a").acquire(timeout=0)), ConfigError)
    assert isinstance(await outcome(locks.once("a", at_most=5).run(print)), ConfigError)
    await lease.resign()
    held = await locks.lock("b").acquire()
    assert isinstance(await outcome(locks.election("b").campaign(timeout=0)), ConfigError)
    assert isinstance(await outcome(locks.election("b").leader()), ConfigError)
    clean.set("{lock:c}{record}", "2 of the future", px=60_000)
    assert isinstance(await outcome(locks.election("c").leader()), ConfigError)
    await held.release()
    with pytest.raises(ConfigError):
        locks.election("")
    await locks.close()
    await watcher.task
