"""A revocation reaches its holder within a second, with the reason, however young the lease and its client are."""

from __future__ import annotations

import asyncio
import time

import pytest

from harness.clock import machine_time
from harness.modes import SLACK, outcome, until, waiting
from interlock import LeaseLost, LeaseState
from interlock._client import permits
from interlock._client.book import SUBSCRIBE_AFTER

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes", quorum=True)
LOCKS = {
    "lock": lambda locks: locks.lock("a"),
    "fixed lock": lambda locks: locks.lock("b", renew=False),
    "lock with max_hold": lambda locks: locks.lock("c", max_hold=20),
    "rlock": lambda locks: locks.rlock("d"),
    "election": lambda locks: locks.election("e"),
}
PERMITS = {
    "semaphore": lambda locks: locks.semaphore("f", 3),
    "fixed semaphore": lambda locks: locks.semaphore("g", 3, renew=False),
    "reader": lambda locks: locks.rwlock("h").read(),
    "writer": lambda locks: locks.rwlock("i").write(),
}
SOON = 1 + SLACK  # without a push it takes a third of the ttl, 10 s


def kinds(mode):
    """The synchronizers that this cell has: a quorum lacks some."""
    return LOCKS if mode.is_quorum else LOCKS | PERMITS


async def told(lease, since):
    """Seconds until the holder learned of the loss, and the text of its LeaseLost."""
    await until(lambda: lease.state == "lost")
    took = machine_time() - since
    with pytest.raises(LeaseLost) as caught:
        lease.ensure()
    return took, str(caught.value)


async def acquired(lockable):
    """Acquire it, or campaign."""
    return await (lockable.campaign() if hasattr(lockable, "campaign") else lockable.acquire())


@rule(6)
@pytest.mark.parametrize("force", [False, True], ids=["kindly", "by force"])
async def test_a_revocation_reaches_the_first_lease_of_a_client(mode, force):
    others = mode.interlock()

    async def one(make):
        lease = await acquired(make(mode.interlock()))
        revoked = machine_time()
        assert await make(others).revoke("disk full", force=force)
        took, why = await told(lease, revoked)
        assert took < SOON, (make, took)
        assert "it was revoked: disk full" in why
        await lease.release()

    await asyncio.gather(*(one(make) for make in kinds(mode).values()))


@rule(6)
@pytest.mark.not_on_a_quorum
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_a_young_lease_that_was_taken_says_why_though_others_have_held_it_since(mode, kind):
    make = (LOCKS | {"semaphore": lambda locks: locks.semaphore("s", 1)})[kind]
    locks, others, third = mode.interlock(), mode.interlock(), mode.interlock()
    lease = await make(locks).acquire()

    async def short(number):
        name = {"timeout": 30, "fair": True} if kind == "lock" else {"timeout": 30}
        waiter = others.lock("a", **name) if kind == "lock" else others.semaphore("s", 1, **name)
        await (await waiter.acquire()).release()
        return number

    waits = [asyncio.ensure_future(short(number)) for number in range(3)]
    await until(lambda: waiting(make(third), 3))
    revoked = machine_time()
    assert await make(third).revoke("disk full", force=True)
    assert await asyncio.gather(*waits) == [0, 1, 2]
    took, why = await told(lease, revoked)
    assert took < SOON
    assert "it was revoked: disk full" in why
    assert (await make(third).inspect()).waiting == 0


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_a_revocation_whose_push_was_lost_reaches_the_holder_after_the_reconnect(mode, clean):
    """The subscription's connection breaks in that moment; then the client asks about the lease at once."""
    locks, others = mode.interlock(), mode.interlock()
    leases = [await mode.keep(acquired(make(locks))) for make in (LOCKS["lock"], LOCKS["fixed lock"])]
    session = mode.session(locks)
    await until(
        lambda: all(
            session.book.pushed_since(lease._grant.hold) < lease._grant.hold.last_answered_sent for lease in leases
        )
    )
    lost = []
    session.dispatch_push = lost.append
    for name in "ab":
        assert await others.lock(name).revoke("disk full")
    await until(lambda: len(lost) == 2)
    del session.dispatch_push
    revoked = machine_time()
    for client in clean.client_list(_type="pubsub"):
        clean.client_kill_filter(_id=client["id"])
    for lease in leases:
        took, why = await told(lease, revoked)
        assert took < SOON
        assert "it was revoked: disk full" in why


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_a_lease_is_asked_about_again_if_its_channel_was_subscribed_during_the_question(mode):
    """The server answered before the subscription: nobody got the push of a revocation between the two."""
    locks = mode.interlock()
    session = mode.session(locks)
    calls, held_up = session.server.call_many, []

    async def answered_late(messages, until):
        replies = await calls(messages, until)
        if not held_up:
            held_up.append(messages)
            while session.book.resubscribed or session.server.subscription_of("lock:fixed")[0] != "1":
                if mode.name == "asyncio":
                    await asyncio.sleep(0.01)
                else:
                    time.sleep(0.01)
        return replies

    session.server.call_many = answered_late
    fixed = await mode.keep(locks.lock("fixed", renew=False).acquire())
    await until(lambda: held_up or session.book.set_aside)
    # The other lease is in a bucket, so the renewal looks at new subscriptions.
    await mode.keep(locks.lock("other").acquire())
    await until(lambda: session.book.pushed_since(fixed._grant.hold) < fixed._grant.hold.last_answered_sent)
    del session.server.call_many


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_a_revocation_that_is_pushed_before_the_client_reads_the_grant_counts(mode, clean):
    """The process was busy, or stopped, between the server's answer and the read of it."""
    locks = mode.interlock()
    session = mode.session(locks)
    hold = session.core.lease_from_grant

    def late(attempt, *args, **kwargs):
        session.dispatch_push(f"revoked {attempt.token} disk full".encode())
        return hold(attempt, *args, **kwargs)

    session.core.lease_from_grant = late
    for make in (lambda: locks.lock("a").acquire(), lambda: locks.multi(locks.lock("a"), locks.lock("b")).acquire()):
        error = await outcome(make())
        assert isinstance(error, LeaseLost)
        assert "it was revoked: disk full" in str(error)
        await until(lambda: not clean.exists("lock:a", "lock:b"))  # it was taken back
    del session.core.lease_from_grant


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_a_short_section_sends_neither_a_question_nor_a_subscription(mode, clean):
    locks, asked = mode.interlock(), []
    session = mode.session(locks)
    calls = session.server.call_many

    async def watching(messages, until):
        asked.extend(args[0] for _, _, args in messages)
        return await calls(messages, until)

    session.server.call_many = watching
    began = session.runtime.now()
    lease = await locks.lock("a").acquire()
    await until(lambda: session.runtime.now() > began + SUBSCRIBE_AFTER / 2)
    await lease.release()
    if session.runtime.now() > began + SUBSCRIBE_AFTER:
        pytest.skip("this machine was too busy for a short section")
    assert not asked
    assert not clean.pubsub_channels()
    del session.server.call_many


@rule(6)
@pytest.mark.not_on_a_quorum
async def test_a_question_about_a_lease_with_renew_false_does_not_lengthen_it(mode, clean):
    lease = await mode.interlock().lock("a", ttl=6, renew=False).acquire()
    grant = lease._grant
    overdue, deadline = grant.hold.jeopardy_after, grant.hold.deadline
    await until(lambda: grant.hold.jeopardy_after > overdue)  # it was asked about
    assert grant.hold.deadline == deadline
    assert lease.state == "held"
    assert clean.pttl("lock:a") < 5700
    await lease.release()


@pytest.mark.not_on_a_quorum
@pytest.mark.parametrize("force", [False, True])
async def test_more_holders_than_one_reply_names_are_all_revoked(mode, clean, monkeypatch, force):
    monkeypatch.setattr(permits, "HOLDERS_BATCH", 2)
    locks = mode.interlock()
    semaphore = locks.semaphore("a", 10)
    leases = [await semaphore.acquire() for _ in range(5)]
    end = clean.zscore("lock:a", leases[0].token)
    clean.zadd(
        "lock:a", {lease.token: end + i // 2 for i, lease in enumerate(leases)}
    )  # a whole batch in a millisecond
    assert await semaphore.revoke("all of them", force=force)
    await until(lambda: all(lease.state is LeaseState.LOST for lease in leases))
    assert not any([await lease.release() for lease in leases])
