"""The election: campaigns, observers, and how run() ends."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from harness.clock import machine_time
from harness.modes import is_subscribed, outcome, until, waiting
from harness.processes import processes
from interlock import AcquireTimeout, ConfigError, LeaseLost, LeaseState, Unavailable

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination", quorum=True)


class Watcher:
    """Collects what observe() yields, in either mode."""

    def __init__(self, mode, locks) -> None:
        self.told: list = []
        self.task = asyncio.ensure_future(
            mode.in_thread(self.blocking, locks) if mode.name == "threads" else self.run(locks)
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
async def test_one_candidate_leads_and_the_next_leader_has_a_later_term(mode):
    mine, theirs = mode.interlock().election("a"), mode.interlock(label="shop").election("a")
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
async def test_a_killed_leader_is_replaced_within_ttl_and_a_second(mode):
    mine = mode.interlock().election("a", ttl=1.5)
    async with processes(mode, 1) as (dying,):
        first = await dying.do("lead", "a", {"ttl": 1.5}, 5)
        task = asyncio.ensure_future(mine.campaign(timeout=30))
        await until(lambda: waiting(mine, 1))
        dying.signal(signal.SIGKILL)
        lease = await task
        assert lease.term > first["term"]
        await lease.resign()


@rule(4)
async def test_a_killed_candidate_is_skipped(mode):
    mine = mode.interlock().election("a")
    lease = await mine.campaign()
    async with processes(mode, 1) as (dying,):
        await dying.say("lead", "a", {}, 60)
        await until(lambda: waiting(mine, 1))
        task = asyncio.ensure_future(mode.interlock().election("a").campaign(timeout=30))
        await until(lambda: waiting(mine, 2))
        await dying.end(signal.SIGKILL)
        await lease.resign()
        following = await task
        await following.resign()


@rule(3)
async def test_observers_see_each_change_of_the_leader(mode):
    watching, mine = mode.interlock(), mode.interlock().election("a")
    watcher = Watcher(mode, watching)
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
@pytest.mark.not_on_a_quorum
async def test_observers_get_each_change_by_push(mode):
    """Without pushes each change would take an observer most of a second."""
    watching, mine = mode.interlock(), mode.interlock().election("a")
    watcher = Watcher(mode, watching)
    await until(lambda: watcher.told)
    await until(lambda: is_subscribed(mode.session(watching)))
    started = machine_time()
    for _ in range(10):
        lease = await mine.campaign()
        await until(lambda lease=lease: getattr(watcher.last, "term", None) == lease.term)
        await lease.resign()
        await until(lambda: watcher.last is None)
    assert machine_time() - started < 10  # twenty looks would take more
    await watching.close()
    await watcher.task


@rule(3)
async def test_observers_learn_that_a_leader_died(mode):
    watching = mode.interlock()
    watcher = Watcher(mode, watching)
    async with processes(mode, 1) as (dying,):
        first = await dying.do("lead", "a", {"ttl": 1}, 5)
        await until(lambda: getattr(watcher.last, "term", None) == first["term"])
        dying.signal(signal.SIGKILL)
        await until(lambda: watcher.last is None)
    await watching.close()
    await watcher.task


async def test_observers_of_a_foreign_key_without_a_ttl_do_not_spin(mode, clean):
    clean.set("lock:a", "somebody")
    watching = mode.interlock()
    looks = []
    core = mode.session(watching).core
    query = core.requests.query
    core.requests.query = lambda *args: looks.append(args) or query(*args)
    watcher = Watcher(mode, watching)
    await until(lambda: watcher.told)
    assert watcher.last.token == "somebody"
    await asyncio.sleep(0.5)
    assert len(looks) < 5
    clean.delete("lock:a")
    await until(lambda: watcher.last is None)
    await watching.close()
    await watcher.task


@rule(3)
async def test_more_observers_get_a_change_than_one_script_call_wakes(mode):
    watching = mode.interlock()
    watchers = [Watcher(mode, watching) for _ in range(80)]
    await until(lambda: all(watcher.told for watcher in watchers))
    lease = await mode.interlock().election("a").campaign()
    await until(lambda: all(getattr(watcher.last, "term", None) == lease.term for watcher in watchers), 20)
    await watching.close()
    await asyncio.gather(*(watcher.task for watcher in watchers))
    await lease.resign()


@rule(6)
async def test_run_campaigns_again_after_it_lost_its_lease(mode):
    locks, others = mode.interlock(), mode.interlock().election("a")
    terms: list[int] = []
    released = []

    if mode.name == "threads":

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
async def test_run_campaigns_again_after_a_revocation_during_the_handover(mode, clean):
    locks, others = mode.interlock(), mode.interlock().election("a")
    first = await others.campaign()

    def work(lease):
        return lease.term

    async def awork(lease):
        return lease.term

    task = asyncio.ensure_future(locks.election("a").run(work if mode.name == "threads" else awork))
    await until(lambda: waiting(others, 1))
    waiters = mode.session(locks).waiters
    # it has asked again since it is subscribed, and will not do so once more by itself
    await until(lambda: [each.split()[2] for each in clean.hvals("{lock:a}{waiters}")] == [b"1"])
    hear, heard = waiters.on_granted, []
    waiters.on_granted, waiters._on_heartbeat_reply = (
        lambda *push: heard.append(push),
        lambda *_: None,
    )  # it does not confirm yet
    await first.resign()
    await until(lambda: heard)
    assert await others.revoke("for the test")
    waiters.on_granted = hear
    hear(*heard[0])
    assert await asyncio.wait_for(task, 20) > first.term


async def test_run_raises_the_error_of_the_work_and_resigns(mode):
    election = mode.interlock().election("a")

    def fails(_lease):
        raise LeaseLost("another lock's")

    async def afails(_lease):
        raise LeaseLost("another lock's")

    with pytest.raises(LeaseLost, match="another lock's"):
        await election.run(fails if mode.name == "threads" else afails)
    assert await election.leader() is None


# How run() ends


class Leading:
    """An election.run() of either mode, whose work lasts until its lease ends or `stop` is set."""

    def __init__(self, mode, locks, **options) -> None:
        self.mode = mode
        self.leases: list = []
        self.cleaned: list = []  # the lease's state when the work ended
        self.stop = threading.Event() if mode.name == "threads" else asyncio.Event()
        self.election = locks.election("a", **options)
        work = self.work if mode.name == "threads" else self.awork
        self.task = asyncio.ensure_future(self.election.run(work, stop=self.stop))

    def work(self, lease):
        self.leases.append(lease)
        while not self.stop.wait(0.01):
            if lease.ended.is_set():
                break
        self.cleaned.append(lease.state)
        lease.ensure()
        return "worked"

    async def awork(self, lease):
        self.leases.append(lease)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            self.cleaned.append(lease.state)

    async def result(self):
        return await asyncio.wait_for(self.task, 20)


@rule(8)
async def test_a_stopped_run_leads_until_its_work_has_ended(mode, clean):
    leading = Leading(mode, mode.interlock())
    await until(lambda: leading.leases)
    leading.stop.set()
    assert await leading.result() == ("worked" if mode.name == "threads" else None)
    assert leading.cleaned == [LeaseState.HELD]
    assert await leading.election.leader() is None
    assert leading.leases[0].state is LeaseState.RELEASED


@rule(8)
async def test_a_run_that_is_stopped_while_it_campaigns_leaves_the_queue(mode):
    first = await mode.interlock().election("a").campaign()
    leading = Leading(mode, mode.interlock())
    await until(lambda: waiting(leading.election, 1))
    leading.stop.set()
    assert await leading.result() is None
    await until(lambda: waiting(leading.election, 0))
    assert not leading.leases
    assert await first.resign()


async def test_a_run_that_is_stopped_already_sends_nothing(mode):
    locks = mode.interlock()
    core = mode.session(locks).core
    core.server.call = None
    leading = Leading(mode, locks)
    leading.stop.set()
    assert await leading.result() is None
    del core.server.call


@rule(6)
async def test_run_ends_when_its_election_is_resigned_elsewhere(mode):
    leading = Leading(mode, mode.interlock())
    await until(lambda: leading.leases)
    assert await leading.election.resign()
    assert await leading.result() is None
    assert leading.cleaned == [LeaseState.RELEASED]
    assert len(leading.leases) == 1
    assert await leading.election.leader() is None


@rule(6)
@pytest.mark.parametrize("leads", [True, False])
async def test_run_ends_when_its_interlock_is_closed(mode, leads):
    others = mode.interlock().election("a")
    first = None if leads else await others.campaign()
    locks = mode.interlock()
    leading = Leading(mode, locks)
    await until(lambda: leading.leases if leads else waiting(others, 1))
    await locks.close()
    assert await leading.result() is None
    assert leading.cleaned == ([LeaseState.RELEASED] if leads else [])
    if first is not None:
        await first.resign()
    assert await others.leader() is None
    assert isinstance(await outcome(leading.election.run(print)), ConfigError)


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_run_campaigns_again_when_its_release_finds_the_lease_lost(mode, clean):
    """No sign of the loss came before the release: another leader may have worked at the same time."""
    election, terms = mode.interlock().election("a"), []

    def work(lease):
        terms.append(lease.term)
        if len(terms) == 1:
            assert clean.delete("lock:a") == 1
        return "done"

    async def awork(lease):
        return work(lease)

    assert await election.run(work if mode.name == "threads" else awork) == "done"
    assert len(terms) == 2


async def test_work_that_resigns_itself_goes_on_and_run_returns_its_value(mode):
    election = mode.interlock().election("a")

    def work(lease):
        assert lease.resign()
        return lease.ended.is_set()

    async def awork(lease):
        assert await lease.resign()
        await asyncio.sleep(0)
        return lease.ended.is_set()

    assert await election.run(work if mode.name == "threads" else awork) is True
    assert await election.leader() is None


@rule(6)
@pytest.mark.not_on_a_quorum
@pytest.mark.runs_on("valkey-9.1")
async def test_run_campaigns_through_an_outage(mode, proxy, caplog):
    locks = mode.interlock(proxy.url)
    leading = Leading(mode, locks, ttl=2.4)
    await until(lambda: leading.leases)
    core, tries = mode.session(locks).core, []
    core.server.retry_for = 0.1  # seconds after which a call says Unavailable
    acquire = core.acquire
    core.acquire = lambda *args, **options: tries.append(1) or acquire(*args, **options)
    proxy.refuse = True
    proxy.cut()
    await until(lambda: len(tries) == 3)
    assert sum("campaign goes on" in each.message for each in caplog.records) == 1  # it is said once
    proxy.refuse = False
    await until(lambda: len(leading.leases) == 2)
    assert leading.cleaned == [LeaseState.LOST]
    proxy.refuse = True
    proxy.cut()
    await until(lambda: len(leading.cleaned) == 2)
    leading.stop.set()  # it stops in an outage, too
    assert await leading.result() is None
    proxy.refuse = False
    assert leading.leases[0].term < leading.leases[1].term


async def test_run_raises_an_unavailable_of_the_work_itself(mode):
    def fails(_lease):
        raise Unavailable("another server's")

    async def afails(_lease):
        raise Unavailable("another server's")

    with pytest.raises(Unavailable, match="another server's"):
        await mode.interlock().election("a").run(fails if mode.name == "threads" else afails)


async def test_inspect_shows_the_leader_and_revoke_removes_it(mode):
    election = mode.interlock().election("a", ttl=2)
    lease = await election.campaign()
    state = await election.inspect()
    assert (state.holder, state.fence) == (lease.token, lease.term)
    assert await election.revoke("a new one is due")
    await until(lambda: lease.state is LeaseState.LOST)
    assert not await lease.resign()


@rule(9)
async def test_every_key_has_a_ttl_and_a_name_of_another_kind_is_refused(mode, clean):
    locks = mode.interlock()
    watcher = Watcher(mode, locks)
    lease = await locks.election("a").campaign()
    await until(lambda: watcher.last)
    for key in clean.keys("*"):
        assert clean.pttl(key) != -1
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
