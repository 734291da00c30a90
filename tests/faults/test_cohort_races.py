"""Two threads at one lease or in one cohort, one of which stands still between two lines of interlock.

Each test stops a thread where another one once could do harm. Not here: interrupts (test_cohort_interrupts.py).
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock
from harness.modes import wait_until
from interlock import AcquireTimeout, ConfigError, Deadlock, LeaseLost
from interlock._client import cohorts
from interlock._client import holding as holding_module
from interlock._client.grant import Grant

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


class World:
    """Two clients, and threads for their calls."""

    def __init__(self, url):
        self.locks, self.others = interlock.Interlock(url, max_ttl=50), interlock.Interlock(url)
        self.core = self.locks._session.core
        self.threads = ThreadPoolExecutor(8)

    def subscribe(self):
        """Subscribe before a lease is acquired: else the client asks about it soon, and it does not pass meanwhile."""
        server, book = self.locks._session.server, self.core.book
        self.locks.lock("warm").acquire().release()
        server.ensure_subscribed("lock:a")
        wait_until(lambda: server.subscription_of("lock:a")[0] == "1" and not book.resubscribed)

    def close(self):
        self.locks.close()
        self.others.close()
        self.threads.shutdown()

    def waiting(self) -> int:
        return sum(len(cohort.waiting) for cohort in list(self.core.cohorts.by_key.values()))

    def comes(self, **options):
        """A caller of the same process that waits behind those that are there."""
        before = self.waiting()
        call = self.threads.submit(self.locks.lock("a", **options).acquire)
        wait_until(lambda: self.waiting() == before + 1)
        return call


@pytest.fixture
def world(server, clean):
    with contextlib.closing(World(server.url)) as made:
        yield made


class Stop:
    """Where a thread stands still, until the test lets it go on."""

    def __init__(self):
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.goes_on.wait(30)


@rule(8)
@pytest.mark.parametrize("hands_on", ["before the close", "while the close releases"])
def test_close_leaves_the_queue_also_for_a_caller_that_has_just_handed_its_place_on(world, monkeypatch, hands_on):
    held, stop, session = world.others.lock("a").acquire(), Stop(), world.locks._session
    begin, release_all, at_server = world.core.turns._begin_to_drive, session.release_all, world.others.lock("a")

    def slowly(*args):
        stop()
        begin(*args)

    async def later(*args):
        assert driver.exception(30)  # its time is over, or the client is closed: it has given up
        await release_all(*args)

    monkeypatch.setattr(world.core.turns, "_begin_to_drive", slowly)
    driver = world.threads.submit(world.locks.lock("a", timeout=2).acquire)
    wait_until(lambda: at_server.inspect().waiters)
    behind = world.comes()
    if hands_on == "before the close":
        assert isinstance(driver.exception(30), AcquireTimeout)
        assert stop.reached.wait(10)
    else:
        monkeypatch.setattr(session, "release_all", later)
    world.locks.close()
    assert at_server.inspect().waiters == ()
    stop.goes_on.set()
    assert isinstance(behind.exception(30), ConfigError)
    held.release()


@rule(1, 2)
@pytest.mark.parametrize("confirm", [True, False])
def test_two_threads_that_release_one_lease_do_not_release_the_next_section(world, monkeypatch, confirm):
    lease, stop = world.locks.lock("a", confirm=confirm).acquire(), Stop()
    pass_on = world.core.cohorts.pass_on

    def slowly(grant, now):
        passed = pass_on(grant, now)
        if threading.current_thread() is slow:
            stop()  # nobody waited: it will send the release
        return passed

    monkeypatch.setattr(world.core.cohorts, "pass_on", slowly)
    slow = threading.Thread(target=lease.__exit__, args=(None, None, None))
    slow.start()
    assert stop.reached.wait(10)
    call = world.comes(confirm=confirm)
    assert lease.release()
    following = call.result(10)
    stop.goes_on.set()
    slow.join(10)
    assert world.others.lock("a").try_acquire() is None, "two holders"
    following.ensure()
    assert following.release()


@rule(2)
def test_a_command_of_a_section_that_has_passed_on_does_not_run_in_the_next_one(world, monkeypatch, clean):
    lease, stop = world.locks.lock("a").acquire(), Stop()
    encode = holding_module.ExecuteCall

    def slowly(*args):
        stop()
        return encode(*args)

    monkeypatch.setattr(holding_module, "ExecuteCall", slowly)
    command = world.threads.submit(lease.execute, "SET", "data", "late", keys=["data"])
    assert stop.reached.wait(10)
    call = world.comes()
    lease.release()
    following = call.result(10)
    stop.goes_on.set()
    assert isinstance(command.exception(10), LeaseLost)
    assert not clean.exists("data")
    assert following.release()


@rule(2, 6)
def test_a_lease_whose_renewal_is_under_way_does_not_pass_on_and_is_never_forgotten(world, monkeypatch, clean):
    """Both the section that ended and the one that follows it stay in the book until their own end."""
    # A lease passes on while half of its ttl is left, and its renewal begins after a third: a late worker has 1.5 s.
    lease, book, server = world.locks.lock("a", ttl=9).acquire(), world.core.book, world.locks._session.server
    call, call_many, stop = world.comes(ttl=9), server.call_many, Stop()

    async def slowly(messages, until):
        if any(args[0] == "renew" for _, _, args in messages):
            stop()
        return await call_many(messages, until)

    monkeypatch.setattr(server, "call_many", slowly)
    assert stop.reached.wait(10), "no renewal"
    assert lease.release()
    following = call.result(10)
    stop.goes_on.set()
    assert following.token != lease.token, "the lease has passed on beside its renewal"
    assert book.held() == [following._grant]
    stop.reached.clear()
    assert stop.reached.wait(10), "nobody renews the lease of the section"
    assert following._grant.end_reason is None
    clean.delete("lock:a")
    assert following.lost.wait(10), "nobody reports its loss"


@rule(1, 2)
def test_a_lease_that_extend_found_lost_does_not_pass_on(world, monkeypatch, clean):
    lease, stop = world.locks.lock("a").acquire(), Stop()
    call = world.comes()
    lose = world.core.ends.lose

    def slowly(grant, why):
        if threading.current_thread() is extending:
            stop()  # it knows that the lease is lost
        lose(grant, why)

    def extend():
        with contextlib.suppress(LeaseLost):
            lease.extend(30)

    monkeypatch.setattr(world.core.ends, "lose", slowly)
    clean.delete("lock:a")
    extending = threading.Thread(target=extend)
    extending.start()
    assert stop.reached.wait(10)
    assert not lease.release()
    following = call.result(10)
    stop.goes_on.set()
    extending.join(10)
    assert following.token != lease.token, "the lease has passed on"
    assert following.release()


def acquired_and_revoked_while_the_next_asks(world, monkeypatch):
    """A lease that somebody revokes, once, while the caller to which it has passed asks for fences."""
    world.subscribe()
    lease = world.locks.lock("a", ttl=20).acquire()
    reserve, once = world.core.turns._reserve_fences, [True]

    async def slowly(grant):
        if once:
            once.clear()
            assert world.others.lock("a").revoke("disk full")
            wait_until(lambda: grant.end_reason)
        return await reserve(grant)

    monkeypatch.setattr(world.core.turns, "_reserve_fences", slowly)
    return lease


@rule(6, 11)
def test_a_revocation_while_the_next_caller_asks_keeps_nobody_out(world, monkeypatch):
    lease = acquired_and_revoked_while_the_next_asks(world, monkeypatch)
    calls = [world.comes(ttl=20) for _ in range(3)]
    lease.release()
    while calls:  # in any order
        wait_until(lambda: any(call.done() for call in calls))
        done = next(call for call in calls if call.done())
        calls.remove(done)
        assert done.result().release()


@rule(8)
def test_a_caller_that_waits_for_itself_behind_another_caller_gets_a_deadlock(world):
    def section():
        with world.locks.lock("a", fair=True):
            world.threads.submit(driver)
            wait_until(lambda: "lock:a" in world.core.cohorts.by_key)
            world.locks.lock("a").acquire()

    def driver():
        world.locks.lock("a").acquire().release()

    assert isinstance(world.threads.submit(section).exception(20), Deadlock)


@rule(4)
def test_what_one_section_extended_does_not_pass_on(world, clean):
    lease = world.locks.lock("a", ttl=5).acquire()
    call = world.comes(ttl=5)
    lease.extend(50)
    lease.release()
    following = call.result(10)
    assert following.token != lease.token
    assert clean.pttl("lock:a") <= 5000
    assert following.release()


@rule(2, 8)
def test_an_interrupt_before_the_lease_has_passed_leaves_the_former_section_its_lease(world, monkeypatch):
    lease, book = world.locks.lock("a").acquire(), world.core.book
    call = world.comes()

    def interrupted(*_):
        monkeypatch.setattr(cohorts, "Grant", Grant)
        raise KeyboardInterrupt

    monkeypatch.setattr(cohorts, "Grant", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    following = call.result(10)
    assert following.token != lease.token
    assert book.held() == [following._grant]
    assert following.release()


@rule(2, 8)
def test_an_interrupt_after_the_lease_has_passed_leaves_the_later_section_its_lease(world, monkeypatch):
    lease, book = world.locks.lock("a").acquire(), world.core.book
    call = world.comes()
    mark = Grant.mark_released

    def interrupted(grant):
        monkeypatch.setattr(Grant, "mark_released", mark)
        raise KeyboardInterrupt

    monkeypatch.setattr(Grant, "mark_released", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert lease.state == "released"
    world.core.cohorts.look()  # the wake-up was lost with the interrupt
    following = call.result(10)
    assert following.token == lease.token
    assert following.fence > lease.fence
    assert book.held() == [following._grant]
    assert following.release()
