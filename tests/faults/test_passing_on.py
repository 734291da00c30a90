"""A lease that passes from section to section: what its next caller, the server and observers have of it when a step
fails, is interrupted, or meets a loss."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading

import pytest

import interlock
from faults.test_cohort_races import Stop, World, acquired_and_revoked_while_the_next_asks
from faults.test_interrupts import Interruption, quiet  # noqa: F401 (a fixture)
from harness.clock import machine_time
from harness.modes import wait_until
from interlock import Deadlock, LeaseLost
from interlock._people.observer import Observer, observe, stop_observing

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


@pytest.fixture
def world(server, clean):
    with contextlib.closing(World(server.url)) as made:
        made.subscribe()
        yield made


class Seen(Observer):
    """Notes what it sees of leases."""

    def __init__(self):
        self.events = []

    def acquired(self, grant, waited):
        self.events.append(("acquired", grant.fence))

    def released(self, grant, held):
        self.events.append(("released", grant.fence))


@pytest.fixture
def seen():
    observer = Seen()
    observe(observer)
    yield observer
    stop_observing(observer)


def refuse_once(world, monkeypatch):
    reserve, once = world.core.turns._reserve_fences, [True]

    async def refused(*args):
        if once:
            once.clear()
            return False
        return await reserve(*args)

    monkeypatch.setattr(world.core.turns, "_reserve_fences", refused)


@rule(2, 8)
def test_a_lease_after_a_section_that_did_not_begin_is_not_released_for_observers(world, monkeypatch, seen):
    """The server refuses to reserve fences: the caller gives the lease back, and asks for one itself."""
    lease = world.locks.lock("a").acquire()
    refuse_once(world, monkeypatch)
    call = world.comes()
    lease.release()
    following = call.result(10)
    before = [("acquired", lease.fence), ("released", lease.fence), ("acquired", following.fence)]
    assert seen.events == before
    following.release()
    assert seen.events == [*before, ("released", following.fence)]


@rule(2, 8)
def test_a_lease_after_a_loss_before_the_section_is_not_released_for_observers(world, monkeypatch, seen):
    lease = acquired_and_revoked_while_the_next_asks(world, monkeypatch)
    call = world.comes(ttl=20)
    lease.release()
    following = call.result(10)
    wait_until(lambda: ("acquired", following.fence) in seen.events)
    assert ("released", following.fence) not in seen.events
    following.release()
    wait_until(lambda: seen.events.count(("released", following.fence)) == 1)


@rule(2, 8)
def test_an_interrupt_after_a_section_that_did_not_begin_leaves_nothing_held(world, monkeypatch, clean):
    """At any step: the lease that had passed is given back at once, not at its next renewal, or never."""
    at, done = 0, False
    while not done:
        at += 1
        name, armed = f"a{at}", [False]
        lease = world.locks.lock(name, ttl=20).acquire()
        interruption = Interruption(at, mine=lambda *_, armed=armed: armed[0])

        async def refused(*_, armed=armed):
            armed[0] = True
            return False

        def leave(name=name, lease=lease):
            wait_until(lambda: len(world.core.cohorts.by_key[f"lock:{name}"].waiting) == 1)
            lease.release()

        monkeypatch.setattr(world.core.turns, "_reserve_fences", refused)
        thread = threading.Thread(target=leave)
        thread.start()
        with interruption, world.locks.lock(name, ttl=20):
            pass
        armed[0] = False
        thread.join()
        monkeypatch.undo()
        done = interruption.done
        gc.collect()
        wait_until(lambda name=name: not clean.exists(f"lock:{name}"), 5)
    assert at > 20


@rule(2, 8)
def test_a_caller_alone_that_is_interrupted_leaves_no_cohort(world):
    at, done = 0, False
    while not done:
        at += 1
        with Interruption(at) as interruption, world.locks.lock(f"b{at}"):
            pass
        done = interruption.done
        gc.collect()
    wait_until(lambda: not world.core.book.held() and not world.core.cohorts.by_key)


@rule(2, 8)
def test_a_lease_that_is_revoked_before_its_reply_leaves_no_cohort(world):
    attempt = world.core.attempt

    def early(*args, **options):
        made = attempt(*args, **options)
        world.core.book.early_revocations[made.token] = "disk full"
        return made

    world.core.attempt = early
    with pytest.raises(LeaseLost):
        world.locks.lock("a").acquire()
    world.core.attempt = attempt
    wait_until(lambda: not world.core.cohorts.by_key)


@rule(2, 8)
def test_an_interrupt_of_extend_on_a_lost_lease_leaves_no_cohort(world, clean):
    at, done = 0, False
    while not done:
        at += 1
        name = f"b{at}"
        with contextlib.suppress(LeaseLost), world.locks.lock(name) as lease:
            clean.delete(f"lock:{name}")
            with Interruption(at) as interruption, contextlib.suppress(LeaseLost):
                lease.extend(30)
        done = interruption.done
    assert at > 10
    wait_until(lambda: not world.core.cohorts.by_key and not world.core.book.count())


@rule(2, 8)
def test_an_error_of_a_caller_to_whom_a_lease_passed_beside_an_arrival_gives_the_lease_back(world, monkeypatch, clean):
    """Another thread arrives between `attempt.abandoned = True` and `Cohorts.leave`."""
    lease = world.locks.lock("a", ttl=30).acquire()
    stop, leave = Stop(), world.core.cohorts.leave

    async def fails(*_):
        raise interlock.errors.Unavailable("a test")

    monkeypatch.setattr(world.core.turns, "_reserve_fences", fails)

    def slowly(attempt):
        stop()
        return leave(attempt)

    monkeypatch.setattr(world.core.cohorts, "leave", slowly)
    call = world.comes(ttl=30)
    lease.release()
    assert stop.reached.wait(10)
    monkeypatch.undo()
    after = world.threads.submit(world.locks.lock("a", ttl=30).acquire)  # promotes itself
    wait_until(lambda: after.done() or any(cohort.driver for cohort in list(world.core.cohorts.by_key.values())))
    stop.goes_on.set()
    assert call.exception(10)
    following = after.result(5)
    following.release()


@rule(6)
def test_a_handler_that_waits_for_what_its_own_thread_has_just_got_is_told(world):
    """The lease has passed to the caller that the handler interrupts, which has not woken yet."""
    got = []
    lease = world.locks.lock("a", ttl=30).acquire()

    def handler(*_):
        lease.release()  # passes to the call below
        started = machine_time()
        try:
            got.append(world.locks.lock("a", fair=True).acquire(timeout=8))
        except BaseException as error:
            got.append(error)
        got.append(machine_time() - started)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        mine = world.locks.lock("a", ttl=30).acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
    mine.release()
    assert isinstance(got[0], Deadlock), got
    assert got[1] < 0.5, got


@rule(2, 8)
def test_extend_after_a_release_does_not_keep_the_next_section_from_passing_on(world):
    lease = world.locks.lock("a").acquire()
    call = world.comes()
    lease.release()
    second = call.result(10)
    with pytest.raises(LeaseLost):
        lease.extend(5)
    call = world.comes()
    second.release()
    third = call.result(10)
    assert third.token == second.token
    third.release()


@rule(2, 8)
def test_a_lease_revoked_before_its_section_begins_is_told_once_and_freed(world, monkeypatch, clean):
    """KeyboardInterrupt of the caller after the loss, with a Lease already made: who undoes the claim?"""
    lease = world.locks.lock("a", ttl=20).acquire()
    begin = world.core.turns.begin_section

    def lost_then_interrupted(grant):
        _made = begin(grant)
        world.core.ends.lose(grant, "it was revoked: a test")
        raise KeyboardInterrupt

    monkeypatch.setattr(world.core.turns, "begin_section", lost_then_interrupted)
    call = world.comes(ttl=20)
    lease.release()
    assert isinstance(call.exception(10), KeyboardInterrupt)
    call = None
    gc.collect()
    wait_until(lambda: not clean.exists("lock:a"), 3)


@rule(2, 8)
def test_close_with_a_lease_that_has_passed_and_whose_section_has_not_begun(world, monkeypatch, clean):
    lease, stop = world.locks.lock("a", ttl=20).acquire(), Stop()
    reserve = world.core.turns._reserve_fences

    async def slowly(*args):
        stop()
        return await reserve(*args)

    monkeypatch.setattr(world.core.turns, "_reserve_fences", slowly)
    call = world.comes(ttl=20)
    lease.release()
    assert stop.reached.wait(10)
    world.locks.close()
    assert not clean.exists("lock:a")
    stop.goes_on.set()
    assert isinstance(call.exception(10), interlock.ConfigError)
    assert not clean.exists("lock:a")
