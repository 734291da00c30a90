"""The events of a lease: a loss sets `lost`, any end sets `ended`."""

from __future__ import annotations

import asyncio
import gc

import pytest

from harness.modes import real, until
from interlock import LeaseState
from interlock._client.grant import Grant
from interlock._client.unread_releases import Left
from interlock._protocol.run_to_end import run
from interlock.errors import ConfigError

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes", quorum=True)


@rule(6)
async def test_every_end_sets_ended_and_only_a_loss_sets_lost(mode):
    locks = mode.interlock()
    given = await locks.lock("a").acquire()
    ended, lost = given.ended, given.lost
    assert not ended.is_set()
    assert await given.release()
    assert ended.is_set()
    assert not lost.is_set()

    revoked = await locks.lock("b", ttl=2).acquire()
    ended, lost = revoked.ended, revoked.lost
    assert await mode.interlock().lock("b").revoke("for the test")
    await until(lambda: ended.is_set() and lost.is_set())

    closed = await locks.lock("c").acquire()
    ended, lost = closed.ended, closed.lost
    await locks.close()
    assert ended.is_set()
    assert not lost.is_set()


@rule(6)
async def test_an_end_wakes_all_that_wait_for_ended(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    ended = lease.ended
    waiting = [
        asyncio.ensure_future(mode.in_thread(ended.wait, 30) if mode.name == "threads" else ended.wait())
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    await lease.release()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*waiting) == [True, True]


async def test_ended_and_lost_are_right_if_they_are_first_read_after_the_end(mode):
    locks = mode.interlock()
    given = await locks.lock("a").acquire()
    await given.release()
    assert given.ended.is_set()
    assert not given.lost.is_set()
    short = await locks.lock("b", ttl=0.3, renew=False).acquire()
    await until(lambda: short.state is LeaseState.LOST)  # by our clock: it may not have been told yet
    assert short.ended.is_set()
    assert short.lost.is_set()
    assert short.ended is short.ended


@rule(6)
async def test_an_event_is_true_once_it_is_set_and_stays_the_same_event(mode):
    """`if lease.lost:` was always true, and an event that is false must not be made anew at each access."""
    locks = mode.interlock()
    for acquiring in (locks.lock("a").acquire(), locks.multi(locks.lock("b"), locks.lock("c")).acquire()):
        lease = await mode.keep(acquiring)
        lost, ended = lease.lost, lease.ended
        assert lease.lost is lost
        assert lease.ended is ended
        assert not lost
        assert not ended
        assert await mode.interlock().lock(lease.name.split(", ")[0]).revoke("for the test", force=True)
        await until(lambda lost=lost, ended=ended: lost and ended)
        assert lost.is_set()
        assert ended.is_set()


async def test_an_rlock_ends_with_its_last_release(mode):
    if mode.name == "threads":
        lock = mode.interlock()._real.rlock("a")
        leases = [lock.acquire() for _ in range(2)]
        ended = leases[0].ended
        leases[0].release()
        assert not ended.is_set()
        leases[1].release()
    else:
        lock = mode.interlock().rlock("a")
        leases = [await lock.acquire() for _ in range(2)]
        ended = leases[0].ended
        await leases[0].release()
        assert not ended.is_set()
        await leases[1].release()
    assert ended.is_set()


@rule(6)
async def test_a_multi_lock_ends_with_the_first_of_its_leases(mode):
    locks = mode.interlock()
    lease = await locks.multi(locks.lock("a", ttl=2), locks.lock("b", ttl=2)).acquire()
    ended, lost = lease.ended, lease.lost
    assert not ended.is_set()
    await mode.interlock().lock("b").revoke("for the test")
    await until(lambda: ended.is_set() and lost.is_set())
    await lease.release()
    again = await locks.multi(locks.lock("c"), locks.lock("d")).acquire()
    ended = again.ended
    await again.release()
    assert ended.is_set()
    assert not again.lost.is_set()
    assert again.ended.is_set()


@pytest.mark.not_on_a_quorum
async def test_a_lease_that_a_multi_lock_gave_back_has_ended(mode):
    """The multi lock had that lease before it timed out on another of its locks."""
    locks, others = mode.interlock(), mode.interlock()
    held = await others.lock("b").acquire()
    made: list = []
    member = locks.lock("a")
    real = member._real if mode.name == "threads" else member
    hold = type(real)._lease_of

    class Kept(type(real)):
        __slots__ = ()

        def _lease_of(self, *args):
            made.append(hold(*args))
            return made[-1]

    real.__class__ = Kept
    trying = asyncio.ensure_future(locks.multi(member, locks.lock("b")).acquire(timeout=1.5))
    await until(lambda: made)
    ended = made[0].ended
    with pytest.raises(TimeoutError):
        await trying
    assert ended.is_set()
    await held.release()
    made.clear()
    gc.collect()


@rule(8)
async def test_two_undos_of_one_lease_both_report_that_they_are_done(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    session = mode.session(locks)
    attempt = lease._grant.attempt
    both = [session.core.giving_back.in_background(lease._grant), session.undo.add(attempt)]
    for done in both:
        waiting = done.wait(session.runtime.now() + 10)
        assert await (mode.in_thread(run, waiting) if mode.name == "threads" else waiting)
    assert not await lease.release()


@rule(8)
@pytest.mark.not_on_a_quorum
async def test_close_gives_back_a_lease_that_is_granted_while_it_begins(mode, clean):
    """In threads, close() may have said that it closes, and not have looked yet at what is held."""
    locks = mode.interlock()
    session = mode.session(locks)
    add = session.book.add

    def closing(grant):
        add(grant)
        session.core.requests.closed = True

    session.book.add = closing
    with pytest.raises(ConfigError, match="closed"):
        await locks.lock("a").acquire()
    del session.book.add
    assert clean.exists("lock:a")
    await locks.close()
    assert not clean.exists("lock:a")


@rule(8)
@pytest.mark.not_on_a_quorum
async def test_close_gives_back_a_lease_whose_release_has_just_begun(mode, clean):
    locks = mode.interlock()
    session = mode.session(locks)
    lease = await locks.lock("a").acquire()
    remove, released = session.book.remove, []

    def closing(grant):
        remove(grant)
        released[:] = session.stop_granting(announce=False)

    session.book.remove = closing
    assert await lease.release()
    del session.book.remove
    assert [attempt.token for attempt in released] == [lease.token]
    await release(mode, session, released)
    assert not clean.exists("lock:a")


@rule(8)
@pytest.mark.not_on_a_quorum
@pytest.mark.parametrize("when", ["before", "after"])
async def test_close_gives_back_a_lease_whose_finalizer_runs_while_it_looks_at_what_is_held(mode, clean, when):
    """The garbage collector may run at any line, in any thread."""
    locks = mode.interlock()
    session = mode.session(locks)
    leases = [real(await locks.lock(name).acquire()) for name in ("a", "b")]
    token, held = leases[0].token, session.book.held
    leases[0]._mark_in_with()  # an interrupt has destroyed the frame of its `with`

    def held_and_a_finalizer():
        found = held() if when == "after" else None
        del leases[0]
        gc.collect()
        return found or held()

    session.book.held = held_and_a_finalizer
    released = session.stop_granting(announce=False)
    assert token in [attempt.token for attempt in released]
    await release(mode, session, released)
    assert not clean.exists("lock:a")


@rule(8)
@pytest.mark.not_on_a_quorum
async def test_close_gives_back_a_lease_that_the_worker_takes_over_from_its_finalizer(mode, clean):
    locks = mode.interlock()
    session = mode.session(locks)
    lease = await locks.lock("a").acquire()
    token, add, released = lease.token, session.undo.add, []

    def closing(attempt):
        released[:] = session.stop_granting(announce=False)
        return add(attempt)

    session.undo.add = closing
    session.ends.orphaned(lease._grant, lease._grant.RELEASED)
    await (mode.in_thread(run, session.ends.tick()) if mode.name == "threads" else session.ends.tick())
    await until(lambda: released)
    assert token in [attempt.token for attempt in released]
    await release(mode, session, released)
    assert not clean.exists("lock:a")


@rule(8)
@pytest.mark.not_on_a_quorum
async def test_close_gives_back_a_lease_that_another_thread_just_gives_back_in_the_background(mode, clean):
    locks = mode.interlock()
    session = mode.session(locks)
    lease = await locks.lock("a").acquire()
    token, mark_released, released = lease.token, Grant.mark_released, []

    def closing(grant):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Grant, "mark_released", mark_released)
            mark_released(grant)
            released[:] = session.stop_granting(announce=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grant, "mark_released", closing)
        session.core.giving_back.in_background(lease._grant)
    assert token in [attempt.token for attempt in released]
    await release(mode, session, released)
    assert not clean.exists("lock:a")


@rule(8)
@pytest.mark.not_on_a_quorum
async def test_close_gives_back_a_lease_whose_release_the_worker_is_about_to_send_again(mode, clean):
    """The worker has found that the reply to a release with `confirm=False` is lost."""
    locks = mode.interlock()
    session = mode.session(locks)
    lease = await locks.lock("a").acquire()
    grant, token = lease._grant, lease.token
    session.undo.wake_at = lambda _: None  # so that the real workers leave it to this test
    session.owed[token] = grant.hold.claim  # as Holding does before it sends the release
    session.unread_releases.left.append(Left(grant, None, None, session.runtime.now() + 1000))
    session.book.remove(grant.hold)
    grant.end(grant.RELEASED)
    session.undo.add(grant.hold.claim)  # it sends the release again
    session.unread_releases.left.clear()
    released = session.stop_granting(announce=False)
    assert token in [attempt.token for attempt in released]
    await release(mode, session, released)
    assert not clean.exists("lock:a")


async def release(mode, session, attempts) -> None:
    """Release these as close() does."""
    releasing = session.release_all(attempts, session.server, session.runtime.now() + 5)
    await (mode.in_thread(run, releasing) if mode.name == "threads" else releasing)
