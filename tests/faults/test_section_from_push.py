"""A section that starts from the push of a handover, before its confirmation has a reply (ADR 21).

The push is late, the process stands still before the section, the confirmation or its reply is lost, the server forgets
the lease, somebody revokes it, Ctrl-C arrives, the client is closed. Asyncio asks first, so all of this is of threads.
The rest is the simulator's: profiles "late pushes" and "silent holders".
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import interlock
from harness.modes import wait_until
from harness.processes import PROGRAMS, state_of
from interlock import ConfigError, LeaseLost

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", modes="threads")


class World:
    """Clients of one server, each as another process would be; and one thread in which a call may wait."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.made: list[interlock.Interlock] = []
        self.threads = ThreadPoolExecutor(2)

    def interlock(self, url: str | None = None, **options) -> interlock.Interlock:
        """A client to which pushes arrive: one that has just subscribed asks first."""
        locks = interlock.Interlock(url or self.url, try_for=5.0, **options)
        self.made.append(locks)
        server = locks._session.server
        with locks.lock("other"):
            server.ensure_subscribed("other")
        wait_until(lambda: server.subscription_of("other")[0] == "1")
        return locks

    def waiter(self, holder, locks, **options):
        """Wait for the lock that `holder` holds: the call that waits."""
        waiting = self.threads.submit(locks.lock("a", **options).acquire, timeout=50)
        wait_until(lambda: queued(holder, 1))
        return waiting

    def close(self) -> None:
        for locks in self.made:
            locks.close()
        self.threads.shutdown()


@pytest.fixture
def world(server, clean):
    made = World(server.url)
    yield made
    made.close()


def queued(locks, number: int) -> bool:
    return locks.lock("a").inspect().waiting == number


def confirmations(locks) -> list:
    """The confirmations that this client sends from now on, with the time of each."""
    server, sent = locks._session.server, []
    send = server.send_unawaited

    def noted(message, now, unawaited):
        if message[2][0] == "confirm":
            sent.append(unawaited)
        return send(message, now, unawaited)

    server.send_unawaited = noted
    return sent


def unsent(locks) -> None:
    """No confirmation of this client leaves it, nor does a renewal."""
    session = locks._session
    send = session.server.send_unawaited

    def silent(message, now, unawaited):
        if message[2][0] != "confirm":
            return send(message, now, unawaited)
        unawaited.before_sending()
        return True

    async def tick() -> None: ...

    session.server.send_unawaited, session.renewal.tick = silent, tick


def unconfirmed(lease) -> bool:
    return lease._grant.unconfirmed


@rule(4)
def test_a_section_starts_from_the_push_and_is_confirmed_meanwhile(world, clean):
    holder, locks = world.interlock(), world.interlock()
    sent = confirmations(locks)
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks)
    mine.release()
    lease = waiting.result()
    assert len(sent) == 1
    wait_until(lambda: not unconfirmed(lease))
    assert lease.remaining() > 20
    assert clean.pttl("lock:a") > 20_000
    state = locks.lock("a").inspect()
    assert (state.holder, state.fence, state.waiters) == (lease.token, lease.fence, ())
    assert lease.fence > mine.fence
    assert lease.release()
    assert not clean.exists("lock:a")


@rule(4)
def test_a_short_section_is_over_before_anybody_reads_the_reply_to_its_confirmation(world, clean):
    holder, locks = world.interlock(), world.interlock()
    sent, fences = confirmations(locks), []

    def sections(locks) -> None:
        for _ in range(50):
            with locks.lock("a", timeout=30) as lease:
                fences.append(lease.fence)

    for each in [world.threads.submit(sections, each) for each in (holder, locks)]:
        each.result()
    assert len(fences) == 100
    assert fences == sorted(set(fences))
    assert sent
    wait_until(lambda: not locks._session.leaving.owed)
    assert not clean.exists("lock:a")
    assert not locks._session.undo.jobs


@rule(1, 4)
def test_a_push_that_arrives_after_the_handover_starts_nothing(world, clean):
    """Heartbeats go on, and say nothing: only the stamp shows how old the push is."""
    holder, locks, third = world.interlock(), world.interlock(), world.interlock()
    session, sent, pushes = locks._session, confirmations(locks), []
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks, ttl=0.8)
    session.waiters._on_heartbeat_reply = lambda *_: None
    pushed, session.pushed = session.pushed, pushes.append
    assert mine.release()
    wait_until(lambda: pushes and not clean.exists("lock:a"))  # the handover has lapsed
    theirs = third.lock("a").acquire(timeout=30)
    assert third._session is not session
    pushed(pushes[0])
    wait_until(lambda: queued(third, 1))  # it has asked
    assert not waiting.done()
    assert not sent
    session.pushed = pushed
    assert theirs.release()
    assert waiting.result().release()


@rule(1, 4)
def test_a_process_that_stands_still_between_push_and_section_asks_first(world, clean):
    holder, third = world.interlock(), world.interlock()
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "lock_client.py"), world.url, "threads"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.readline()
        for name in ("other", "a"):  # the second begins to wait with a subscription
            mine = holder.lock(name).acquire()
            print(json.dumps(["acquire", name, {"ttl": 0.8}, 50]), file=process.stdin, flush=True)
            wait_until(lambda name=name: holder.lock(name).inspect().waiting)
            if name == "other":
                assert mine.release()
                process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid) == "T")
        assert mine.release()
        wait_until(lambda: not clean.exists("lock:a"))
        theirs = third.lock("a").acquire(timeout=30)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: queued(third, 1))
        theirs.ensure()
        assert theirs.release()
        assert json.loads(process.stdout.readline())["result"]["fence"] > theirs.fence
        process.stdin.close()


# The confirmation is lost


@rule(6, 8)
@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_connection_that_breaks_with_the_confirmation_owed(world, clean, proxy, lost):
    holder, locks = world.interlock(), world.interlock(f"{proxy.url}?socket_timeout=30")
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks)
    sent = confirmations(locks)
    proxy.marked = b"\r\nconfirm\r\n"
    setattr(proxy, f"cut_{lost}", 5)
    assert mine.release()
    lease = waiting.result()
    assert sent
    wait_until(lambda: not unconfirmed(lease))  # by a renewal
    assert getattr(proxy, f"cut_{lost}") is None
    assert lease.remaining() > 20
    assert lease.release()
    assert not clean.exists("lock:a")


@rule(6)
def test_a_lease_without_a_confirmation_is_lost_at_the_end_of_its_handover(world, clean):
    holder, locks, told = world.interlock(), world.interlock(), []
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks, ttl=1.0, on_lost=told.append)
    unsent(locks)
    assert mine.release()
    lease = waiting.result()
    assert unconfirmed(lease)
    assert lease.remaining() <= 1.0
    lease.ensure()
    wait_until(lambda: told)
    assert clean.exists("lock:a") == 0 or clean.pttl("lock:a") < 200
    with pytest.raises(LeaseLost, match="its ttl passed"):
        lease.ensure()
    with pytest.raises(LeaseLost):
        lease.__exit__(None, None, None)


@rule(6)
def test_the_reply_that_the_server_has_no_such_lease_is_a_loss(world, clean):
    holder, locks, told = world.interlock(), world.interlock(), []
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks, on_lost=told.append)
    sent = confirmations(locks)
    server = locks._session.server
    send = server.send_unawaited

    def too_late(message, now, unawaited):
        if message[2][0] == "confirm":
            clean.delete("lock:a")
        return send(message, now, unawaited)

    server.send_unawaited = too_late
    assert mine.release()
    lease = waiting.result()
    wait_until(lambda: told)
    assert sent
    with pytest.raises(LeaseLost, match="no such lease"):
        lease.ensure()


@rule(6, 10)
def test_a_server_that_restarts_without_the_handover(server_pool, cell_kind="valkey-9.1"):
    with server_pool.spare(cell_kind) as node:
        world = World(node.url)
        holder, locks, told = world.interlock(), world.interlock(), []
        mine = holder.lock("a").acquire()
        waiting = world.waiter(holder, locks, on_lost=told.append)
        server = locks._session.server
        send = server.send_unawaited

        def to_a_dead_server(message, now, unawaited):
            if message[2][0] == "confirm":
                node.kill()
            return send(message, now, unawaited)

        server.send_unawaited = to_a_dead_server
        assert mine.release()
        lease = waiting.result()
        server.send_unawaited = send
        node.restart()
        wait_until(lambda: told)
        with pytest.raises(LeaseLost):
            lease.__exit__(None, None, None)
        world.close()


# Somebody ends it in that moment


@rule(6)
@pytest.mark.parametrize("force", [False, True])
def test_a_revocation_before_the_confirmation_has_a_reply(world, clean, force):
    holder, locks, told = world.interlock(), world.interlock(), []
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks, on_lost=told.append)
    unsent(locks)
    assert mine.release()
    lease = waiting.result()
    assert unconfirmed(lease)
    assert holder.lock("a").revoke("enough", force=force)
    wait_until(lambda: told)
    with pytest.raises(LeaseLost, match="enough"):
        lease.__exit__(None, None, None)
    wait_until(lambda: not clean.exists("lock:a"))  # nobody stands in the queue


@rule(6, 8)
def test_a_revocation_that_is_pushed_before_the_section_starts(world, clean):
    holder, locks = world.interlock(), world.interlock()
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks)
    session = locks._session
    start = session.core.handovers.start

    def revoked_first(attempt):
        session.pushed(f"revoked {attempt.token} !enough".encode())
        return start(attempt)

    session.core.handovers.start = revoked_first
    assert mine.release()
    with pytest.raises(LeaseLost, match="enough"):
        waiting.result()
    wait_until(lambda: not clean.exists("lock:a"))


@rule(8)
@pytest.mark.parametrize("moment", ["before the sending", "after the sending"])
def test_ctrl_c_while_a_section_starts_from_the_push(world, clean, moment):
    """The lock is free again at once, and nothing renews it."""
    holder, locks = world.interlock(), world.interlock()
    mine = holder.lock("a").acquire()
    session = locks._session
    server = session.server
    caught = []

    def waits(locks) -> None:
        try:
            locks.lock("a").acquire(timeout=50)
        except KeyboardInterrupt as error:
            caught.append(error)

    waiting = world.threads.submit(waits, locks)
    wait_until(lambda: queued(holder, 1))
    send = server.send_unawaited

    def interrupted(message, now, unawaited):
        if moment == "before the sending":
            unawaited.before_sending()
        else:
            send(message, now, unawaited)
        raise KeyboardInterrupt

    server.send_unawaited = interrupted
    assert mine.release()
    waiting.result()
    assert caught
    wait_until(lambda: not clean.exists("lock:a") and not session.undo.jobs)
    assert not session.renewal.held()
    server.send_unawaited = send
    assert locks.lock("a").acquire(timeout=5).release()


@rule(8)
def test_a_close_before_the_confirmation_has_a_reply_gives_the_lock_back(world, clean):
    holder, locks = world.interlock(), world.interlock()
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks)
    unsent(locks)
    assert mine.release()
    lease = waiting.result()
    locks.close()
    assert not clean.exists("lock:a")
    with pytest.raises((LeaseLost, ConfigError)):
        lease.ensure()


# When it asks first


@pytest.mark.parametrize(
    "options", [{"renew": False}, {"max_hold": 20.0}, {"acks": 0}, {}], ids=["renew", "max_hold", "acks", "subscribed"]
)
def test_whoever_may_not_start_from_the_push_asks_first(world, clean, options):
    holder, locks = world.interlock(), world.interlock()
    sent = confirmations(locks)
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks, **({} if options == {"acks": 0} else options))
    session = locks._session
    if not options:  # the subscription has just begun anew
        for attempt in session.waiters.registered.values():
            attempt.asks_first = True
    elif options == {"acks": 0}:
        session.server.old_primary_may_still_grant = lambda _key: ""
        for attempt in session.waiters.registered.values():
            attempt.resource = attempt.resource._replace(kind="election")
    assert mine.release()
    lease = waiting.result()
    assert not unconfirmed(lease)
    assert not sent
    assert lease.release()


def test_a_push_of_an_earlier_version_has_no_stamp(world, clean):
    holder, locks = world.interlock(), world.interlock()
    session, sent = locks._session, confirmations(locks)
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks)
    pushed = session.pushed
    session.pushed = lambda payload: pushed(b" ".join(payload.split()[:2]))
    assert mine.release()
    lease = waiting.result()
    assert not unconfirmed(lease)
    assert not sent
    assert lease.release()


def test_a_section_without_a_confirmation_leaves_without_waiting(world, clean):
    holder, locks = world.interlock(), world.interlock(confirm=False)
    mine = holder.lock("a").acquire()

    def section(locks) -> int:
        with locks.lock("a", timeout=30):
            pass
        return len(locks._session.leaving.owed)

    waiting = world.threads.submit(section, locks)
    wait_until(lambda: queued(holder, 1))
    assert mine.release()
    assert waiting.result() >= 1
    wait_until(lambda: not locks._session.leaving.owed and not clean.exists("lock:a"))


@rule(2, 4)
def test_a_section_that_follows_an_unconfirmed_one_of_its_cohort_asks_the_server_first(world, clean):
    holder, locks = world.interlock(), world.interlock()
    mine = holder.lock("a").acquire()
    waiting = world.waiter(holder, locks)
    following = world.threads.submit(locks.lock("a").acquire, timeout=50)
    cohort = locks._session.core.cohorts.by_key["lock:a"]
    wait_until(lambda: cohort.waiting)
    unsent(locks)
    assert mine.release()
    first = waiting.result()
    assert unconfirmed(first)
    assert first.release()
    second = following.result()
    assert second.token == first.token  # it has passed
    assert second.fence > first.fence
    assert not unconfirmed(second)
    assert clean.pttl("lock:a") > 20_000
    assert second.release()
    assert not clean.exists("lock:a")


@rule(2, 4)
def test_who_drives_a_cohort_in_place_of_another_keeps_what_its_stamp_means(world, clean):
    """The stamp 0 in the server is that of the first caller's request; the second one never sent any."""
    holder, locks = world.interlock(), world.interlock()
    mine = holder.lock("a").acquire()
    first = world.threads.submit(locks.lock("a").acquire, timeout=1.0)
    wait_until(lambda: queued(holder, 1))
    second = world.threads.submit(locks.lock("a").acquire, timeout=50)
    core = locks._session.core
    cohort = core.cohorts.by_key["lock:a"]
    wait_until(lambda: cohort.waiting)
    wait_until(lambda: cohort.driver.first_sent)
    sent_at = cohort.driver.first_sent
    with pytest.raises(interlock.AcquireTimeout):
        first.result()
    wait_until(lambda: not cohort.waiting)
    assert cohort.driver.first_sent == sent_at
    assert mine.release()
    lease = second.result()
    assert lease.release()
