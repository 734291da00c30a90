"""The faults of `interlock.testing`: what a holder sees, and what the server and others see, in both modes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
import time

import pytest
import redis

import interlock
import interlock.aio
from harness.modes import real, subscribe, until
from harness.servers import free_ports
from interlock import AcquireTimeout, LeaseLost, LeaseState
from interlock._quarantine.server_histories import _histories
from interlock.errors import ConfigError, Unavailable
from interlock.testing import BreakableServer, lose_lease, pause_renewal, restart_server, server_down, server_paused
from interlock.testing import server as server_module
from interlock.testing.faults import Pause

pytestmark = pytest.mark.runs_on(
    "valkey-9.1", full="each server in both modes", starts="servers of its own", modes="threads, asyncio"
)
rule = pytest.mark.rule

LOSSES = {
    "expired": "its ttl passed without a renewal",
    "revoked": "it was revoked: a test called lose_lease",
    "forgotten": "the server has no such lease any more",
}
KINDS = {
    "lock": lambda locks: locks.lock("lock"),
    "rlock": lambda locks: locks.rlock("rlock"),
    "semaphore": lambda locks: locks.semaphore("permits", 1),
    "read": lambda locks: locks.rwlock("rw").read(),
    "write": lambda locks: locks.rwlock("rw").write(),
    "multi": lambda locks: locks.multi(locks.lock("a"), locks.lock("b")),
    "election": lambda locks: locks.election("election"),
}


async def held(mode, locked):
    """A lease that lasts as long as the test."""
    return await mode.keep(locked.acquire(timeout=5))


@pytest.mark.parametrize("how", LOSSES)
async def test_a_loss_has_been_reported_when_the_call_returns(mode, how):
    locks, others = mode.interlock(), mode.interlock()
    for kind, make in KINDS.items():
        began = time.monotonic()
        with pytest.raises(LeaseLost, match=LOSSES[how]):
            async with make(locks) as lease:
                lost, ended = lease.lost, lease.ended
                lose_lease(real(lease), how)
                assert lost.is_set(), kind
                assert ended.is_set(), kind
                assert lease.state is LeaseState.LOST, kind
                with pytest.raises(LeaseLost, match=LOSSES[how]):
                    lease.ensure()
                if mode.name == "asyncio":
                    await asyncio.sleep(0)
                    pytest.fail(f"{kind}: the task was not cancelled")
        async with make(others):
            assert time.monotonic() < began + 10, f"{kind}: no ttl, which is 30 s, has to pass"


@pytest.mark.parametrize("how", LOSSES)
async def test_who_may_be_next_depends_on_the_loss(mode, how):
    locks, others = mode.interlock(), mode.interlock()
    lease = await held(mode, locks.lock("a"))
    lose_lease(real(lease), how)
    if how == "revoked":
        with pytest.raises(AcquireTimeout):
            await others.lock("a").acquire(timeout=0)
        await lease.release()
    following = await held(mode, others.lock("a"))
    assert following.fence > lease.fence


async def test_a_waiter_gets_what_has_expired(mode):
    lease = await held(mode, mode.interlock().lock("a"))
    waiting = asyncio.ensure_future(held(mode, mode.interlock().lock("a")))
    observer = mode.interlock().lock("a")
    await until(lambda: waits(observer))
    lose_lease(real(lease))
    await waiting


async def waits(lock):
    return (await lock.inspect()).waiting


async def test_on_lost_has_run_in_threads_and_runs_at_the_next_await_in_asyncio(mode):
    called = []

    def on_lost(lease):
        if mode.name == "threads":
            time.sleep(0.05)  # the call waits for its end
        called.append(lease)

    lease = await held(mode, mode.interlock().lock("a", on_lost=on_lost))
    lose_lease(real(lease))
    if mode.name == "asyncio":
        await asyncio.sleep(0)
    assert called == [real(lease)]


async def test_a_lease_is_found_by_the_name_of_its_lock(mode):
    locks = mode.interlock()
    with pytest.raises(ConfigError, match="holds no lease on 'a'"):
        lose_lease("a")
    lease = await held(mode, locks.lock("a"))
    other = await held(mode, locks.lock("b"))
    lose_lease("a")
    assert lease.state is LeaseState.LOST
    other.ensure()
    with pytest.raises(ConfigError, match="holds no lease on 'a'"):
        lose_lease("a")
    permits = [await held(mode, locks.semaphore("c", 2)) for _ in range(2)]
    with pytest.raises(ConfigError, match="holds 2 leases on 'c'"):
        lose_lease("c")
    assert {permit.state for permit in permits} == {LeaseState.HELD}


async def test_a_mistake_in_the_call_says_what_is_right(mode):
    locks = mode.interlock()
    lease = await held(mode, locks.lock("a"))
    with pytest.raises(ConfigError, match="how must be one of 'expired', 'revoked', 'forgotten', not 'gone'"):
        lose_lease(real(lease), "gone")
    with pytest.raises(ConfigError, match="takes a lease or the name of its lock"):
        lose_lease(real(locks.lock("a")))
    with pytest.raises(ConfigError, match="remaining must be"), pause_renewal(real(lease), remaining=-1):
        pass
    lease.ensure()
    await lease.release()
    for fault in lose_lease, lambda lease: pause_renewal(lease).__enter__():
        with pytest.raises(ConfigError, match="has ended: it was released"):
            fault(real(lease))
    fixed = await held(mode, locks.lock("b", renew=False))
    with pytest.raises(ConfigError, match=r"never renewed \(renew=False\)"), pause_renewal(real(fixed)):
        pass
    lose_lease(real(fixed))
    assert fixed.state is LeaseState.LOST
    lose_lease(real(fixed))  # it is lost already


FOREIGN = (
    "import sys; from interlock.embedded import *; s = Server(); s.start(); print(s.url, flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def foreign_server():
    """The URL of a server that another process owns, as that of production is."""
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(20)


async def test_a_lease_on_a_server_that_is_not_private_is_refused_and_left_alone(mode):
    with foreign_server() as url:
        locks = mode.interlock(url)
        lease = await held(mode, locks.lock("a"))
        for target in (real(lease), "a"):
            for fault in lose_lease, lambda target: pause_renewal(target).__enter__():
                with pytest.raises(ConfigError, match="no private server of this process"):
                    fault(target)
        lease.ensure()
        await lease.extend(30)
        assert lease.state is LeaseState.HELD
        await locks.close()


@pytest.mark.parametrize("way", ["client", "database", "tcp", "another tcp"])
def test_a_private_server_is_known_by_any_address_of_it(way):
    port, _ = free_ports()
    with BreakableServer(config={"port": str(port)}) as server:
        targets = {
            "client": lambda: redis.from_url(server.url),
            "database": lambda: f"{server.url}?db=3",
            "tcp": lambda: f"redis://localhost:{port}/1",
            "another tcp": lambda: f"redis://127.0.0.1:{port}/0",
        }
        with interlock.Interlock(targets[way]()) as locks:
            lease = locks.lock("a").acquire()
            with pause_renewal(lease, remaining=20):
                assert locks.lock("a").inspect().remaining < 21, "the fault reached the lock's database"
            lose_lease(lease, "revoked")
            assert lease.state is LeaseState.LOST


def in_loop(work):
    """Run this coroutine in the event loop of another thread. Returns a future."""
    done = concurrent.futures.Future()

    def run():
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run).start()
    return done


def test_a_lease_of_an_event_loop_in_another_thread_is_lost_there(server):
    inside, called = threading.Event(), []

    def on_lost(lease):
        time.sleep(0.05)
        called.append(lease)

    async def work():
        async with interlock.aio.Interlock(server.url) as locks, locks.lock("a", on_lost=on_lost):
            inside.set()
            await asyncio.sleep(60)

    done = in_loop(work())
    assert inside.wait(20)
    lose_lease("a")
    assert len(called) == 1, "it was called before lose_lease() returned"
    with pytest.raises(LeaseLost):
        done.result(20)


def test_a_loop_that_runs_nothing_is_an_error_in_words(server, monkeypatch):
    from interlock.testing import faults

    monkeypatch.setattr(faults, "TIMEOUT", 0.2)
    inside, go_on = threading.Event(), threading.Event()

    async def work():
        async with interlock.aio.Interlock(server.url) as locks, locks.lock("a"):
            inside.set()
            go_on.wait(20)

    done = in_loop(work())
    assert inside.wait(20)
    with pytest.raises(Unavailable, match="the event loop that holds the lease has run nothing for 0.2 s"):
        lose_lease("a")
    go_on.set()
    with contextlib.suppress(LeaseLost):  # the loop may have run it in the end
        done.result(20)


def renew_now(core, hold):
    core.book.put_aside(hold)
    core.ends.wake_renewer_at(core.runtime.now())


async def test_without_renewals_a_lease_is_in_jeopardy_until_they_go_on(mode):
    lock = mode.interlock().lock("a")
    async with lock as lease:
        core, grant = real(lease)._core, real(lease)._grant
        deadline, left = grant.hold.deadline, (await lock.inspect()).remaining
        with pause_renewal(real(lease)):
            assert lease.state is LeaseState.JEOPARDY
            lease.ensure()
            await asyncio.sleep(0.01)
            renew_now(core, grant.hold)
            await until(lambda: not core.book.set_aside)
            assert lease.state is LeaseState.JEOPARDY
            assert grant.hold.deadline == deadline
            assert (await lock.inspect()).remaining < left, "the server knows of no renewal, either"
        assert lease.state is LeaseState.HELD
        renewed = grant.hold.deadline
        assert renewed > deadline
        renew_now(core, grant.hold)
        await until(lambda: grant.hold.deadline > renewed)


async def test_without_renewals_a_lease_is_lost_at_its_deadline(mode):
    locks = mode.interlock()
    await subscribe(mode.session(locks), "b")
    lease = await held(mode, locks.lock("a", ttl=30))  # its client need not ask about it before the renewal, after 10 s
    lost = lease.lost
    with pause_renewal(real(lease), remaining=0.3):
        assert lease.state is LeaseState.JEOPARDY
        assert 0 < lease.remaining() <= 0.3
        await until(lost.is_set, within=5)
        with pytest.raises(LeaseLost, match="its ttl passed without a renewal"):
            lease.ensure()
        following = await held(mode, mode.interlock().lock("a"))
    assert lease.state is LeaseState.LOST, "it is not renewed any more"
    following.ensure()


async def test_the_time_that_remains_is_the_same_for_every_kind(mode):
    locks, others = mode.interlock(), mode.interlock()
    kinds = [KINDS[kind] for kind in ("semaphore", "read", "multi")]
    leases = [await held(mode, make(locks)) for make in kinds]
    with contextlib.ExitStack() as paused:
        for lease in leases:
            paused.enter_context(pause_renewal(real(lease), remaining=0.2))
        for lost in [lease.lost for lease in leases]:
            await until(lost.is_set, within=5)
        for make in kinds:
            await held(mode, make(others))


async def test_a_renewal_that_is_under_way_does_not_count(mode):
    """As its reply is lost: the lease stays in jeopardy."""
    locks = mode.interlock()
    lease = real(await locks.lock("a", ttl=3).acquire())
    core, hold, renewer = lease._core, lease._grant.hold, mode.session(locks).renewer
    replies = []
    on_state = renewer._on_state

    async def under_way(*args, send_renewals=renewer.send_renewals):
        answers = await send_renewals(*args)
        if not replies:
            replies.extend(answers.states)
            # Between the request and its reply
            with_pause.enter_context(pause_renewal(lease, remaining=2))
        return answers

    def judged(*args):
        on_state(*args)
        if len(replies) == 1:
            replies.append(lease.remaining())

    with contextlib.ExitStack() as with_pause:
        renewer.send_renewals, renewer._on_state = Pause(under_way), judged
        renew_now(core, hold)
        await until(lambda: len(replies) == 2)
        assert replies[1] < 2
        await until(lambda: not core.book.set_aside)
        assert lease.state is LeaseState.JEOPARDY
    assert lease.state is LeaseState.HELD


async def test_pauses_of_several_leases_are_independent(mode):
    locks = mode.interlock()
    one, two = [await held(mode, locks.lock(name)) for name in "ab"]
    with pause_renewal(real(one)):
        with pause_renewal("b"):
            assert {one.state, two.state} == {LeaseState.JEOPARDY}
        assert [one.state, two.state] == [LeaseState.JEOPARDY, LeaseState.HELD]
    assert {one.state, two.state} == {LeaseState.HELD}


async def test_a_lease_that_was_lost_while_it_was_paused_stays_lost(mode):
    lease = await held(mode, mode.interlock().lock("a"))
    with pause_renewal(real(lease)):
        await mode.interlock().lock("a").revoke("for the test", force=True)
    assert lease.state is LeaseState.LOST


@pytest.fixture
def own():
    """A server that no other test uses."""
    with BreakableServer() as server:
        yield server


async def test_an_outage_and_a_restart(mode, own):
    locks = mode.interlock(own.url, max_ttl=1)
    lease = await held(mode, locks.lock("a"))
    with server_paused(own):
        with pytest.raises(Unavailable):
            await locks.lock("b").acquire(timeout=0.1)
        lease.ensure()
    restart_server(own, keep_data=True)
    await lease.extend(1)
    restart_server(own)
    await until(lambda: lease.state is LeaseState.LOST, within=10)
    with pytest.raises(AcquireTimeout) as error:
        await locks.lock("a").acquire(timeout=0)
    assert error.value.quarantined
    with server_down(own):
        assert not own.running
        with pytest.raises(Unavailable):
            await locks.lock("b").acquire(timeout=0.1)
    assert own.running
    await (await locks.lock("a").acquire(timeout=10)).release()
    await locks.close()


@pytest.mark.parametrize("outage", [server_paused, server_down])
async def test_a_lease_may_expire_during_an_outage_but_no_server_can_revoke_it(mode, own, outage):
    locks = mode.interlock(own.url)
    lease, other = [await held(mode, locks.lock(name)) for name in "ab"]
    with outage(own):
        for fault in (lambda: lose_lease(real(other), "revoked"), lambda: lose_lease(real(other), "forgotten")):
            with pytest.raises(Unavailable, match="needs the private server, which is paused or was killed"):
                fault()
        other.ensure()
        with pause_renewal(real(other)):
            assert other.state is LeaseState.JEOPARDY
        assert other.state is LeaseState.JEOPARDY, "nobody could renew it"
        lose_lease(real(lease))
        assert lease.state is LeaseState.LOST
    await locks.close()


def test_reset_forgets_a_restart_for_every_interlock_of_the_process(own):
    with interlock.Interlock(own.url) as locks:
        locks.lock("a").acquire().release()
        restart_server(own)
        with pytest.raises(AcquireTimeout):
            locks.lock("a").acquire(timeout=0)
        own.pause()
        own.reset()
        kept = locks.lock("a").acquire(timeout=5)
        own.reset()
        assert kept.lost.wait(20), "it was emptied"
        own.kill()
        own.reset()
        locks.lock("a").acquire(timeout=5).release()
        own.stop()
        own.reset()
        assert own.running


async def test_the_servers_of_a_quorum_count_at_once_after_their_start_and_a_reset_and_after_no_other_fault(mode):
    with contextlib.ExitStack() as ends:
        servers = [ends.enter_context(BreakableServer(quorum_prefix="app:")) for _ in range(3)]
        locks = mode.interlock([server.url for server in servers], prefix="app:", max_ttl=300)

        async def is_quarantined():
            with pytest.raises(AcquireTimeout) as error:
                await locks.lock("a").acquire(timeout=0)
            return error.value.quarantined

        await (await locks.lock("a").acquire(timeout=5)).release()

        def empty(server):
            with redis.from_url(server.url) as client:
                client.flushall()

        def start_again(server):
            server.stop()
            server.start()

        for fault in (restart_server, empty, start_again):
            for server in servers:
                fault(server)
            assert await is_quarantined(), fault
            for server in servers:
                server.reset()
            await (await locks.lock("a").acquire(timeout=5)).release()
        assert await mode.interlock([server.url for server in servers]).lock("a").try_acquire() is None, (
            "nobody vouches"
        )
        await locks.close()


def test_a_server_of_a_quorum_that_refuses_info_is_no_server_for_a_test():
    with pytest.raises(Unavailable, match="must answer INFO"):
        BreakableServer(config={"rename-command": 'INFO ""'}, quorum_prefix="lock:").start()


def test_reset_forgets_a_server_whose_handshake_a_busy_thread_notes_late(own, monkeypatch):
    with interlock.Interlock(own.url) as locks:
        locks.lock("a").acquire().release()
        (history,) = (
            each for histories in _histories for each in histories._by_url.values() if own._is_at(each.address)
        )
        former, restart = history.latest, own.restart

        def noting(**options):
            history.latest = former  # the last step of identify(), in a thread that stood still
            restart(**options)

        monkeypatch.setattr(own, "restart", noting)
        own.kill()
        own.reset()
        locks.lock("a").acquire(timeout=5).release()


def test_a_child_after_a_fork_has_no_server_to_reset(own, monkeypatch):
    monkeypatch.setattr(server_module, "_processes", {})  # as in the child
    with pytest.raises(ConfigError, match="belongs to the process that started it before a fork"):
        own.reset()


def test_what_was_killed_has_no_data_to_keep(own):
    own.kill()
    with pytest.raises(Unavailable, match="it has no data to keep"):
        restart_server(own, keep_data=True)
    restart_server(own)
    own.pause()
    with pytest.raises(Unavailable, match="is paused: call resume"):
        restart_server(own, keep_data=True)


def test_the_package_needs_no_pytest():
    code = "import sys; sys.modules['pytest'] = None; import interlock.testing; print('redis' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
