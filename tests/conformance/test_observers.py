"""What the client reports of its locks, and to whom: each outcome and each end once, and nothing while nobody asks.

Not here: what becomes of the reports in metrics and traces (integrations/test_otel.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading

import pytest

import interlock
from harness.modes import outcome, queued, real, until
from interlock import AcquireTimeout, ConfigError, LeaseLost
from interlock._client.book import Book
from interlock._people import observer as observing
from interlock._people.grant_log import GRANT_LOG
from interlock._people.observer import Loss, Observer, Outcome
from interlock._protocol.server import Disconnected
from interlock._session.open_sessions import waiting

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")


class Recorder(Observer):
    """Keeps each event as a text, with the name of its lock."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.slacks: list[float] = []

    def begins(self, attempt):
        self.events.append(f"{attempt.resource.name} begins")

    def acquired(self, grant, waited):
        assert 0 <= waited < 60
        self.events.append(f"{grant.resource.name} acquired")

    def not_acquired(self, attempt, outcome, waited, error):
        assert 0 <= waited < 60
        self.events.append(f"{attempt.resource.name} {outcome.value}")

    def released(self, grant, held):
        assert 0 <= held < 60
        self.events.append(f"{grant.resource.name} released")

    def lost(self, grant, loss, why, held):
        self.events.append(f"{grant.resource.name} lost: {loss.value}{'' if held is None else ', held'}")

    def renewed(self, grant, slack):
        self.slacks.append(slack)

    def renewal_failed(self, grant):
        self.events.append(f"{grant.resource.name} in jeopardy")

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def recorder():
    recorder = Recorder()
    observing.observe(recorder)
    try:
        yield recorder
    finally:
        observing.stop_observing(recorder)


ONE = ["a begins", "a acquired", "a released"]


async def test_each_kind_reports_its_attempt_and_its_lease_once(mode, clean, recorder):
    locks = mode.interlock()
    for lockable in (
        locks.lock("a"), locks.lock("a", fair=True), locks.lock("a", confirm=False), locks.semaphore("s", 2),
        locks.rwlock("rw").read(), locks.rwlock("rw").write(), locks.election("e"),
    ):  # fmt: skip
        async with lockable as lease:
            name = lease.name
        assert recorder.take() == [f"{name} begins", f"{name} acquired", f"{name} released"]
        lease = await lockable.acquire()
        assert await lease.release()
        await lease.release()
        assert recorder.take() == [f"{name} begins", f"{name} acquired", f"{name} released"]


async def test_to_enter_an_rlock_again_is_no_acquisition(mode, clean, recorder):
    locks = mode.interlock()
    if mode.name == "threads":  # its caller is the thread, so one thread has to do it all

        def work():
            lock = real(locks).rlock("a")
            with lock, lock:
                pass

        await asyncio.to_thread(work)
    else:
        lock = locks.rlock("a")
        async with lock, lock:
            pass
    assert recorder.take() == ONE


async def test_several_locks_report_each_of_them(mode, clean, recorder):
    locks = mode.interlock()
    both, other = locks.multi(locks.lock("a"), locks.lock("b")), mode.interlock()
    async with both:
        assert recorder.take() == ["a begins", "a acquired", "b begins", "b acquired"]
        assert await other.multi(other.lock("b")).try_acquire() is None
        assert recorder.take() == ["b begins", "b busy"]
    assert sorted(recorder.take()) == ["a released", "b released"]
    blocked = await other.lock("b").acquire()
    assert recorder.take() == ["b begins", "b acquired"]
    assert isinstance(await outcome(both.acquire(0.2)), AcquireTimeout)
    await until(lambda: len(recorder.events) == 5)
    assert sorted(recorder.take()) == ["a acquired", "a begins", "a released", "b begins", "b timeout"]
    await blocked.release()


async def test_work_of_once_and_of_an_election_is_reported(mode, clean, recorder):
    locks = mode.interlock()

    def run(lease):
        return 1

    async def run_in_task(lease):
        return 1

    work = run if mode.name == "threads" else run_in_task
    once = locks.once("a", at_most=30, at_least=30)
    await once.run(work)
    assert recorder.take() == ONE
    await once.run(work)
    assert recorder.take() == ["a begins", "a busy"]
    await locks.election("e").run(work)
    assert recorder.take() == ["e begins", "e acquired", "e released"]


async def test_a_latch_and_a_barrier_have_no_holder_and_report_none(mode, clean, recorder):
    locks = mode.interlock()
    latch = locks.latch("l", 1)
    await latch.count_down()
    await latch.wait(5)
    assert recorder.take() == []


# Outcomes


async def test_each_outcome_without_a_lease(mode, clean, recorder):
    locks, other = mode.interlock(), mode.interlock()
    held = await locks.lock("a").acquire()
    recorder.take()
    assert await other.lock("a").try_acquire() is None
    assert isinstance(await outcome(other.lock("a", max_waiters=1).acquire(0.1)), AcquireTimeout)
    assert recorder.take() == ["a begins", "a busy", "a begins", "a timeout"]
    clean.set("lock:c", "foreign")
    assert isinstance(await outcome(other.lock("c").acquire(1)), ConfigError)
    clean.delete("lock:c")
    assert recorder.take() == ["c begins", "c error"]
    await held.release()


@pytest.mark.asyncio_only
async def test_a_cancelled_caller(mode, clean, recorder):
    locks, other = mode.interlock(), mode.interlock()
    held = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(other.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    recorder.take()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert recorder.take() == ["a cancelled"]
    await held.release()


async def test_a_server_that_does_not_answer(mode, clean, recorder):
    locks = mode.interlock(try_for=0.2)

    async def call(*_: object) -> None:
        raise Disconnected("as a test says", sent=True)

    mode.session(locks).server.call = call
    try:
        await outcome(locks.lock("a").try_acquire())
    finally:
        del mode.session(locks).server.call
    assert recorder.take() == ["a begins", "a unavailable"]


def test_an_interrupt_is_no_error():
    assert observing.outcome_of(KeyboardInterrupt()) is Outcome.CANCELLED
    assert observing.outcome_of(ValueError()) is Outcome.ERROR


# Ends


async def test_a_lease_that_passes_on_is_a_release_and_an_acquisition(mode, clean, recorder):
    locks = mode.interlock()
    first = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(locks.lock("a").acquire())
    await until(lambda: mode.session(locks).core.cohorts.by_key["lock:a"].waiting)
    recorder.take()
    await first.release()
    second = await waiting
    assert second.token == first.token
    assert sorted(recorder.take()) == ["a acquired", "a released"]
    await second.release()
    assert recorder.take() == ["a released"]


async def test_a_handover_to_another_process(mode, clean, recorder):
    locks, other = mode.interlock(), mode.interlock()
    first = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(other.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    recorder.take()
    await first.release()
    second = await waiting
    assert sorted(recorder.take()) == ["a acquired", "a released"]
    await second.release()
    assert recorder.take() == ["a released"]


async def test_each_loss_has_a_reason_of_a_closed_set(mode, clean, recorder):
    locks = mode.interlock()
    lost: list[str] = []

    async def loses(lease, loss):
        await until(lambda: any("lost" in event for event in recorder.events))
        assert recorder.take() == [f"a lost: {loss}, held"]
        lost.append(loss)
        clean.delete("lock:a")

    async def acquired(**options):
        lease = await locks.lock("a", **options).acquire()
        assert recorder.events[:2] == ["a begins", "a acquired"]
        del recorder.events[:2]  # on a slow machine it may be lost already
        return lease

    lease = await acquired(ttl=0.3, renew=False)
    await loses(lease, "expired")
    lease = await acquired(ttl=3, max_hold=0.3)
    await loses(lease, "max_hold")
    lease = await acquired()
    await mode.interlock().lock("a").revoke("its max_hold is over")
    await loses(lease, "revoked")
    lease = await acquired(ttl=3)
    clean.delete("lock:a")
    await loses(lease, "gone")
    lease = await acquired()
    clean.delete("lock:a")
    assert await lease.release() is False
    await loses(lease, "gone")
    with pytest.warns(ResourceWarning):
        lease = await acquired()
        mode.kept.clear()
        del lease
        gc.collect()
        await until(lambda: recorder.events)
    await loses(None, "dropped")
    assert {*lost} == {each.value for each in Loss}


async def test_a_with_whose_lease_was_gone_has_lost_it_with_and_without_confirmation(mode, clean, recorder):
    locks = mode.interlock()
    with pytest.raises(LeaseLost):
        async with locks.lock("a"):
            clean.delete("lock:a")
    assert recorder.take() == ["a begins", "a acquired", "a lost: gone, held"]
    async with locks.lock("a", confirm=False):
        clean.delete("lock:a")
    await until(lambda: len(recorder.events) == 4)
    assert recorder.take() == [*ONE, "a lost: gone"]


async def test_the_hold_of_a_lease_that_was_lost_before_its_report_ends(mode, clean, recorder, monkeypatch):
    """The process was stopped behind the grant, say, and the worker of ends was the first to go on."""

    locks = mode.interlock()

    def loses(book, hold, add=Book.add):
        add(book, hold)
        mode.session(locks).ends.lose(hold.grant, "its ttl passed")

    monkeypatch.setattr(Book, "add", loses)
    await mode.keep(locks.lock("a").acquire())
    await until(lambda: "a lost: expired" in recorder.events)
    recorder.events.remove("a lost: expired")  # a worker says so, sooner or later than the caller says the rest
    assert recorder.take() == ONE


async def test_a_close_ends_what_is_held(mode, clean, recorder):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await locks.close()
    assert recorder.take() == ONE
    assert await lease.release() is False
    assert recorder.take() == []


async def test_a_renewal_reports_the_time_that_was_left(mode, clean, recorder):
    lease = await mode.interlock().lock("a", ttl=3).acquire()
    await until(lambda: len(recorder.slacks) >= 2)
    assert all(0 < slack < 3 for slack in recorder.slacks)
    await lease.release()


@rule(6)
@pytest.mark.parametrize("silent", [False, True], ids=["failed", "late"])
async def test_a_lease_in_jeopardy_is_reported_and_logged_once(mode, clean, recorder, caplog, silent):
    locks = mode.interlock()
    lease = await locks.lock("a", ttl=4.5).acquire()
    recorder.take()
    session = mode.session(locks)
    is_over = False

    async def call_many(messages, until):
        while silent and not is_over:
            await session.runtime.sleep_until(session.runtime.now() + 0.01)
        return [Disconnected("as a test says", sent=True)] * len(messages)

    session.server.call_many = call_many
    try:
        await until(lambda: recorder.events)
        await until(lambda: lease.remaining() < 2)
    finally:
        is_over = True
        del session.server.call_many
    assert recorder.take() == ["a in jeopardy"]
    await until(lambda: lease.remaining() > 3)
    (record,) = [each for each in caplog.records if "jeopardy" in each.message]
    assert (record.levelno, record.lock, record.fence) == (logging.WARNING, "a", lease.fence)
    assert ("its renewal is late" if silent else "a renewal failed") in record.message
    await lease.release()


async def test_a_lease_that_only_a_finalizer_gives_back_is_released(mode, clean, recorder):
    lease = await mode.interlock().lock("a").acquire()
    real(lease)._grant.in_with = True  # as that of a `with` which nobody can leave any more
    del lease
    gc.collect()
    await until(lambda: not clean.exists("lock:a") and len(recorder.events) == 3)
    assert recorder.take() == ONE


async def test_a_renewal_that_has_just_become_due_is_not_late(mode, clean, recorder):
    """After a pause of the process, or a handover with an old stamp: the worker has first to send it."""
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    session = mode.session(locks)
    ends, book = session.ends, session.book
    (grant,) = book.held()
    grant.hold.last_answered_sent -= 16  # half of the ttl is over
    wake, ends.wake_renewer_at = ends.wake_renewer_at, lambda _: None
    try:
        book.put_aside(grant.hold)
        now = session.runtime.now()
        assert now + 4 < ends.report_ends() < now + 6
        assert recorder.take() == ["a begins", "a acquired"]
        ends._late_at[grant.hold] = now
        ends.report_ends()
    finally:
        ends.wake_renewer_at = wake
    await until(lambda: recorder.events)
    assert recorder.take() == ["a in jeopardy"]
    await lease.release()


# The switch


async def test_an_interlock_reports_whether_it_was_made_before_the_switch_or_after(mode, clean):
    before, recorder = mode.interlock(), Recorder()
    held = await before.lock("held").acquire()
    assert mode.session(before).core.points.people is None
    observing.observe(recorder)
    try:
        after = mode.interlock()
        for locks in (before, after):
            async with locks.lock("a"):
                pass
            assert mode.session(locks).core.points.people is not None
        assert recorder.take() == ONE * 2
        await held.release()  # acquired before anybody observed
        assert recorder.take() == []
    finally:
        observing.stop_observing(recorder)
    async with before.lock("a"), after.lock("b"):
        pass
    assert recorder.take() == []
    for locks in (before, after):
        session = mode.session(locks)
        assert session.core.points.people is session.ends.points.people is None


async def test_an_observer_that_raises_breaks_no_lock(mode, clean, recorder, caplog):
    class Broken(Observer):
        def begins(self, attempt):
            raise ZeroDivisionError

        acquired = not_acquired = released = lost = renewed = renewal_failed = begins

    broken = Broken()
    observing.observe(broken)
    try:
        locks = mode.interlock()
        for _ in range(2):
            async with locks.lock("a"):
                assert await mode.interlock().lock("a").try_acquire() is None
    finally:
        observing.stop_observing(broken)
    assert recorder.take() == ["a begins", "a acquired", "a begins", "a busy", "a released"] * 2
    assert len([record for record in caplog.records if "observer" in record.message]) == 1


async def test_an_interrupt_of_an_observer_leaves_no_lease(mode, clean):
    class Interrupt(BaseException):
        pass

    class Interrupted(Observer):
        def acquired(self, grant, waited):
            raise Interrupt

    locks, interrupted = mode.interlock(), Interrupted()
    observing.observe(interrupted)
    try:
        for lockable in (locks.lock("a"), locks.multi(locks.lock("b"), locks.lock("c"))):
            with pytest.raises(Interrupt):
                await lockable.acquire()
    finally:
        observing.stop_observing(interrupted)
    await until(lambda: not clean.exists("lock:a", "lock:b", "lock:c"))


async def test_the_number_of_callers_that_wait(mode, clean):
    locks, other = mode.interlock(), mode.interlock()
    held = await locks.lock("a").acquire()
    assert not waiting()
    tasks = [asyncio.ensure_future(other.lock("a").acquire(30)) for _ in range(3)]
    tasks += [asyncio.ensure_future(locks.lock("a").acquire(30))]
    await until(lambda: sum(waiting().values()) == 4)
    assert {(each.kind, each.name) for each in waiting()} == {("lock", "a")}
    await held.release()
    for task in asyncio.as_completed(tasks):
        await (await task).release()
    assert not waiting()


@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_a_child_ends_nothing_of_its_parent_and_reports_its_own(server, clean, recorder):
    with interlock.Interlock(server.url) as locks:
        lease = locks.lock("a").acquire()
        assert recorder.take() == ["a begins", "a acquired"]
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                with contextlib.suppress(LeaseLost), lease:
                    pass
                lease.release()
                first = recorder.take()
                with locks.lock("b"):
                    pass
                status = 0 if (first, recorder.take()) == ([], ["b begins", "b acquired", "b released"]) else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lease.release()
        assert recorder.take() == ["a released"]


# The log


async def test_grants_and_releases_are_logged_while_the_level_is_debug(mode, clean, caplog):
    locks = mode.interlock()  # of a module, say: made before the program sets the level, connected later
    log = logging.getLogger("interlock")
    caplog.set_level(logging.DEBUG, "interlock")
    async with locks.lock("a") as lease:
        assert await mode.interlock().lock("a").try_acquire() is None
    records = [record for record in caplog.records if record.levelno == logging.DEBUG and record.lock == "a"]
    assert [record.message.partition(" in ")[0].partition(" after ")[0] for record in records] == [
        "lock 'a': acquired", "lock 'a': not acquired", "lock 'a': released",
    ]  # fmt: skip
    assert [record.fence for record in records] == [lease.fence, None, lease.fence]
    assert records[0].token == lease.token
    log.setLevel(logging.INFO)
    async with locks.lock("a"):  # a worker looks at the level while a lease is held
        await until(lambda: mode.session(locks).core.points.people is None, within=5)
    assert GRANT_LOG not in observing.observers


def test_reports_of_two_threads_end_a_hold_once(server, clean, recorder):
    with interlock.Interlock(server.url) as locks:
        for _ in range(50):
            lease = locks.lock("a").acquire()
            threads = [threading.Thread(target=lease.release) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert recorder.take() == ONE
