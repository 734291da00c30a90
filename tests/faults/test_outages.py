"""The server dies, stops, forgets, evicts, ends connections, or its clock is set: what holders and waiters see.

Not here: faults of the network before a server that works (test_network.py), what a server that has forgotten leases
may grant (test_quarantine.py), which error a silence raises and when (test_silence.py), failovers (`topologies/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import pytest
import redis

from harness.clock import machine_time
from harness.matrix import required
from harness.modes import SLACK, outcome, queued, real, until
from harness.processes import processes
from harness.proxy import Proxy
from harness.servers import Missing, faketime
from interlock import AcquireTimeout, LeaseLost, LeaseState, Unavailable

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


def free(client, name: str = "a") -> bool:
    """Whether this lock has no holder, no queue and no waiter."""
    return not client.exists(f"lock:{name}", f"{{lock:{name}}}{{queue}}", f"{{lock:{name}}}{{waiters}}")


class Crowd:
    """Clients that contend for one lock until told to stop; each checks that it is alone and that fences grow."""

    def __init__(self, mode, url: str, size: int = 6, ttl: float = 2.0) -> None:
        self.fences: list[int] = []
        self.errors: list[Exception] = []
        self.over = False
        self.inside = 0
        self.most = 0
        self.ttl = ttl
        self.clients = [mode.interlock(url, max_ttl=ttl) for _ in range(size)]
        self.tasks = [asyncio.ensure_future(self.work(locks)) for locks in self.clients]

    async def work(self, locks) -> None:
        while not self.over:
            try:
                async with await locks.lock("a", ttl=self.ttl).acquire(timeout=20) as lease:
                    self.inside += 1
                    self.most = max(self.most, self.inside)
                    self.fences.append(lease.fence)
                    try:
                        await asyncio.sleep(0.002)
                    finally:
                        self.inside -= 1
            except Exception as error:
                self.errors.append(error)

    async def more(self, number: int = 20) -> None:
        """Wait until there were so many more sections."""
        goal = len(self.fences) + number
        await until(lambda: len(self.fences) >= goal)

    async def stop(self) -> None:
        self.over = True
        await asyncio.gather(*self.tasks)
        assert self.fences == sorted(set(self.fences))


# It dies


@rule(6, 7)
async def test_after_a_restart_of_an_empty_server_the_loss_is_reported_and_fences_grow(mode, node, client):
    locks = mode.interlock(node.url, max_ttl=3)  # for so long nobody gets it then
    lease = await locks.lock("a", ttl=3).acquire()
    waiting = asyncio.ensure_future(mode.interlock(node.url, max_ttl=3).lock("a").acquire(timeout=30))
    await until(lambda: queued(locks, 1))
    node.kill()
    node.restart()
    mine = await waiting
    assert mine.fence > lease.fence
    await until(lease.lost.is_set)
    with pytest.raises(LeaseLost):
        lease.ensure()
    assert await lease.release() is False
    mine.ensure()
    assert await mine.release()
    await until(lambda: free(client))


@rule(6, 9)
async def test_a_server_that_restarts_from_its_aof_keeps_holder_waiters_and_their_order(mode, server_pool, cell):
    with server_pool.spare(cell.kind, config=DURABLE) as node, redis.Redis.from_url(node.url) as client:
        holder = mode.interlock(node.url, max_ttl=8)
        lease = await holder.lock("a", ttl=8).acquire()
        others = [mode.interlock(node.url, max_ttl=8) for _ in range(3)]
        waiting = []
        for number, other in enumerate(others):
            waiting.append(asyncio.ensure_future(other.lock("a", ttl=8).acquire(timeout=30)))
            await until(lambda number=number: queued(holder, number + 1))
        order = (await holder.lock("a").inspect()).waiters
        node.kill()
        node.restart()
        channels = [mode.session(other).channel for other in others]
        await until(lambda: _heard(client, channels))  # one that can't be woken yet would be passed over
        state = await holder.lock("a").inspect()
        assert state.holder == lease.token
        assert state.waiters == order
        lease.ensure()
        assert await lease.release()
        fences = [lease.fence]
        for number, task in enumerate(waiting):
            mine = await task
            assert mine.token == order[number]
            fences.append(mine.fence)
            assert await mine.release()
        assert fences == sorted(set(fences))
        await until(lambda: free(client))


def _heard(client, channels) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return all(number for _, number in client.pubsub_numsub(*channels))
    return False


@rule(1)
async def test_a_waiter_without_a_connection_is_skipped_and_keeps_its_place_in_the_queue(mode, node, client):
    """Nobody waits for a waiter that cannot be woken; nor does that waiter go to the end of the queue."""
    locks, other = mode.interlock(node.url), mode.interlock(node.url)
    with Proxy(node.socket) as proxy:
        cut = mode.interlock(proxy.url)
        lease = await locks.lock("a").acquire()
        first = asyncio.ensure_future(cut.lock("a").acquire(timeout=30))
        await until(lambda: queued(locks, 1))
        token = (await locks.lock("a").inspect()).waiters[0]
        await until(lambda: client.hget("{lock:a}{waiters}", token).split()[2] == b"1")
        second = asyncio.ensure_future(other.lock("a").acquire(timeout=30))
        await until(lambda: queued(locks, 2))
        proxy.refuse = True
        proxy.cut()
        await until(lambda: not client.pubsub_numsub(mode.session(cut).channel)[0][1])
        await lease.release()
        mine = await second
        third = asyncio.ensure_future(mode.interlock(node.url).lock("a").acquire(timeout=30))
        await until(lambda: queued(locks, 2))
        assert (await locks.lock("a").inspect()).waiters[0] == token
        proxy.refuse = False
        await until(lambda: client.pubsub_numsub(mode.session(cut).channel)[0][1])
        await mine.release()
        turn = await first
        assert turn.token == token
        assert not third.done()
        await turn.release()
        assert await (await third).release()
        await cut.close()


@rule(6)
async def test_a_lease_outlives_a_restart_from_the_aof(mode, server_pool, cell):
    """Renewals fail while the server is away, which is no loss, and go on after the restart."""
    with server_pool.spare(cell.kind, config=DURABLE) as node:
        lease = await mode.interlock(node.url).lock("a", ttl=8).acquire()
        node.kill()
        await until(lambda: lease.state is LeaseState.JEOPARDY)
        node.restart()
        await until(lambda: lease.state is LeaseState.HELD)
        assert not lease.lost.is_set()
        assert await lease.release()


@rule(1, 7)
async def test_a_crowd_outlives_crashes_of_a_durable_server(mode, server_pool, cell):
    """With every write on disk before its reply, a crash ends no lease: one holder at a time, all through."""
    with server_pool.spare(cell.kind, config=DURABLE) as node:
        crowd = Crowd(mode, node.url, ttl=4)
        for _ in range(2):
            await crowd.more()
            node.kill()
            node.restart()
        await crowd.more()
        await crowd.stop()
    assert not crowd.errors
    assert crowd.most == 1


@rule(1, 7, 10)
async def test_a_crowd_outlives_crashes_of_a_server_that_forgets(mode, node):
    """A server without a disk forgets the holder: it grants the lock to nobody meanwhile, and fences only grow."""
    crowd = Crowd(mode, node.url)
    for _ in range(3):
        await crowd.more()
        node.kill()
        node.restart()
    await crowd.more()
    await crowd.stop()
    assert all(isinstance(error, LeaseLost) for error in crowd.errors), crowd.errors
    assert len(crowd.errors) <= 3  # one holder at most for each crash
    assert crowd.most == 1


# It stops


@rule(6)
async def test_a_server_that_is_stopped_for_less_than_the_ttl_costs_no_lease(mode, node, client):
    locks = mode.interlock(node.url)
    lease = await locks.lock("a", ttl=8).acquire()
    waiting = asyncio.ensure_future(mode.interlock(node.url).lock("a").acquire(timeout=30))
    await until(lambda: queued(locks, 1))
    node.pause()
    try:
        await until(lambda: lease.state is LeaseState.JEOPARDY)
        lease.ensure()
    finally:
        node.resume()
    await until(lambda: lease.state is LeaseState.HELD)
    assert await lease.release()
    assert await (await waiting).release()
    await until(lambda: free(client))


@rule(5, 6)
async def test_a_server_that_is_stopped_for_longer_than_the_ttl_is_reported_as_a_loss_meanwhile(mode, node, client):
    locks = mode.interlock(node.url)
    lease = await locks.lock("a", ttl=0.9).acquire()
    node.pause()
    try:
        await until(lease.lost.is_set)  # by our own clock: nobody could have told us
        with pytest.raises(LeaseLost):
            lease.ensure()
    finally:
        node.resume()
    mine = await mode.interlock(node.url).lock("a").acquire(timeout=30)
    assert mine.fence > lease.fence
    assert await lease.release() is False
    assert await mine.release()
    await until(lambda: free(client))


@rule(8)
@pytest.mark.parametrize("warm", [True, False], ids=["connected", "connecting"])
async def test_a_timeout_bounds_the_call_while_the_server_is_stopped_and_leaves_nothing(mode, node, client, warm):
    locks = mode.interlock(node.url)
    if warm:
        await (await locks.lock("warm").acquire()).release()
    node.pause()
    try:
        started = machine_time()
        error = await outcome(locks.lock("a").acquire(timeout=0.5))
        assert isinstance(error, Unavailable)
        assert machine_time() - started < 0.5 + SLACK
    finally:
        node.resume()
    await until(lambda: free(client))


@rule(8)
async def test_a_release_while_the_server_is_stopped_reaches_it_afterwards(mode, node, client):
    lease = await mode.interlock(node.url).lock("a", ttl=20).acquire()
    node.pause()
    try:
        releasing = asyncio.ensure_future(outcome(lease.release()))
        await until(lambda: lease.state is LeaseState.RELEASED)
    finally:
        node.resume()
    assert await releasing is True
    assert free(client)


# It forgets


@rule(8)
async def test_an_undo_goes_on_for_as_long_as_the_lease_was_extended(mode, clean, proxy):
    answered = mode.name == "threads"  # in the other mode the server extends, and its reply is lost
    locks = mode.interlock(f"{proxy.url}?socket_timeout=0.5")
    lease = await locks.lock("a", ttl=2).acquire()
    proxy.drop_replies = not answered
    extending = await outcome(lease.extend(30))
    assert answered == (extending is None)
    proxy.refuse, proxy.drop_replies = True, False
    proxy.cut()
    undone = real(lease)._abandon()
    started = time.monotonic()
    await until(lambda: time.monotonic() > started + 4.2)  # longer than the ttl, and than a handover waits
    assert clean.exists("lock:a")
    proxy.refuse = False
    await until(lambda: not clean.exists("lock:a"))
    assert undone is not None


@rule(6, 7)
async def test_after_flushall_the_loss_is_reported_and_waiters_queue_again(mode, node, client):
    locks = mode.interlock(node.url)
    lease = await locks.lock("a", ttl=4).acquire()
    waiting = [asyncio.ensure_future(mode.interlock(node.url).lock("a").acquire(timeout=30)) for _ in range(4)]
    await until(lambda: queued(locks, 4))
    client.flushall()
    fences = [lease.fence]
    for task in asyncio.as_completed(waiting):
        mine = await task
        fences.append(mine.fence)
        assert await mine.release()
    assert fences == sorted(set(fences))
    await until(lease.lost.is_set)
    assert await lease.release() is False
    await until(lambda: free(client))


@rule(1, 9)
async def test_script_flush_disturbs_no_client_of_a_crowd(mode, node, client):
    crowd = Crowd(mode, node.url)
    for _ in range(20):
        client.script_flush()
        await crowd.more(5)
    await crowd.stop()
    assert not crowd.errors
    assert crowd.most == 1


@rule(6, 7)
async def test_after_an_eviction_of_the_lock_the_loss_is_reported_and_fences_grow(mode, server_pool, cell):
    limits = {"maxmemory": "4mb", "maxmemory-policy": "allkeys-random"}
    with server_pool.spare(cell.kind, config=limits) as node, redis.Redis.from_url(node.url) as client:
        locks = mode.interlock(node.url)
        lease = await locks.lock("a", ttl=2).acquire()
        number = 0

        def evicted() -> bool:
            nonlocal number
            with client.pipeline(transaction=False) as filling:
                for _ in range(100):
                    number += 1
                    filling.set(f"users:{number}", "x" * 2000, px=60_000)
                with contextlib.suppress(redis.ResponseError):
                    filling.execute()
            return not client.exists("lock:a")

        await until(evicted)
        await until(lease.lost.is_set)
        with pytest.raises(LeaseLost):
            lease.ensure()
        client.config_set("maxmemory", "0")
        mine = await locks.lock("a").acquire(timeout=30)
        assert mine.fence > lease.fence
        assert await mine.release()


# It loses its connections, or makes everybody wait


@rule(1, 3, 8)
async def test_a_crowd_outlives_a_kill_of_all_connections(mode, node, client):
    crowd = Crowd(mode, node.url)
    for _ in range(15):
        for kind in ("normal", "pubsub"):
            client.client_kill_filter(_type=kind, skipme=True)
        await crowd.more(3)
    await crowd.stop()
    assert not crowd.errors
    assert crowd.most == 1
    await until(lambda: free(client))


@rule(6)
async def test_client_pause_delays_messages_and_loses_no_lease(mode, node, client):
    locks = mode.interlock(node.url)
    lease = await locks.lock("a", ttl=4).acquire()
    waiting = asyncio.ensure_future(mode.interlock(node.url).lock("a").acquire(timeout=30))
    await until(lambda: queued(locks, 1))
    deadline = lease._grant.hold.deadline
    client.client_pause(1500)
    await until(lambda: lease._grant.hold.deadline > deadline)  # a renewal waited, and got through
    lease.ensure()
    assert await lease.release()
    assert await (await waiting).release()


# Its clock is set


@pytest.fixture
def shifting(server_pool, cell):
    """A server whose clock can be set. libfaketime does not work with servers that bring their own malloc."""
    try:
        faketime()
    except Missing as missing:
        required(f"no libfaketime here: {missing}")
    if cell.kind in {"redis-7.0", "redis-8.2"}:
        pytest.skip("its jemalloc does not bear libfaketime")
    # Else the server puts off what it writes while a slow disk syncs: a kill would forget a release that was answered.
    with server_pool.spare(cell.kind, clock=True, config=DURABLE) as made:
        for seconds in (5000, 0):
            asyncio.run(shift(made, seconds))
        yield made


async def shift(node, seconds: float) -> None:
    """Set the clock, and wait until the server shows the new time: it reads the clock once in each turn of its loop."""
    node.shift(seconds)
    with redis.Redis.from_url(node.url) as client:
        await until(lambda: abs(client.time()[0] - time.time() - seconds) < 10)


@rule(5, 7)
@pytest.mark.parametrize("seconds", [60, -600])
async def test_after_the_servers_clock_is_set_leases_may_end_early_and_fences_grow(mode, shifting, seconds):
    """Set forward, leases end early (outside the promise, and reported); set back, no lease is lost."""
    locks = mode.interlock(shifting.url)
    lease = await locks.lock("a", ttl=6).acquire()
    waiting = [asyncio.ensure_future(mode.interlock(shifting.url).lock("a").acquire(timeout=30)) for _ in range(3)]
    await until(lambda: queued(locks, 3))
    await shift(shifting, seconds)
    if seconds < 0:
        deadline = lease._grant.hold.deadline
        await until(lambda: lease._grant.hold.deadline > deadline)
        lease.ensure()
        assert await lease.release()
    fences = [lease.fence]
    for task in asyncio.as_completed(waiting):
        mine = await task
        fences.append(mine.fence)
        assert await mine.release()
    assert fences == sorted(set(fences))
    if seconds > 0:
        await until(lease.lost.is_set)
    await shift(shifting, 0)
    mine = await locks.lock("a").acquire(timeout=30)
    assert mine.fence > fences[-1]
    assert await mine.release()


@rule(7)
@pytest.mark.parametrize("kind", ["lock", "election", "semaphore"])
async def test_a_quarantine_that_revoke_ended_after_the_clock_was_set_back_keeps_the_fence(mode, shifting, kind):
    """The restarted server is an hour behind the fence. The record must outlive that hour, even if nobody acquires."""

    def made(locks):
        return locks.semaphore("a", 1) if kind == "semaphore" else getattr(locks, kind)("a")

    lease = await made(mode.interlock(shifting.url)).acquire()
    assert await lease.release()
    shifting.kill()
    shifting.shift(-3600)
    shifting.restart()
    locks = mode.interlock(shifting.url)
    assert isinstance(await outcome(made(locks).acquire(timeout=0)), AcquireTimeout)
    assert await made(locks).revoke("nobody is at work", force=True)
    await shift(shifting, -3600 + 310)  # longer than a record lives by itself
    mine = await made(locks).acquire(timeout=30)
    assert mine.fence > lease.fence
    assert await mine.release()


@rule(4)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_a_quarantine_lasts_no_longer_after_the_clock_was_set_back(mode, shifting, kind):
    """The time since which it counts then lies an hour ahead, and the quarantine would last for that hour."""

    def made(locks):
        return locks.semaphore("a", 1, ttl=2) if kind == "semaphore" else locks.lock("a", ttl=2)

    locks = mode.interlock(shifting.url, max_ttl=2)
    assert await (await made(locks).acquire()).release()
    shifting.kill()
    shifting.restart()
    refused = await outcome(made(locks).acquire(timeout=0))
    assert isinstance(refused, AcquireTimeout)
    assert refused.quarantined
    await shift(shifting, -3600)
    mine = await made(locks).acquire(timeout=20)
    assert await mine.release()


@rule(4, 5)
async def test_a_dead_waiter_is_skipped_even_if_the_clock_was_set_back(mode, shifting):
    """Its last heartbeat then seems to lie ten minutes ahead; the end of its subscription shows that it is dead."""
    locks = mode.interlock(shifting.url)
    async with processes(mode, 1, shifting.url) as (dying,):
        lease = await locks.lock("a").acquire()
        await dying.say("acquire", "a", {}, 60)
        await until(lambda: queued(locks, 1))
        token = (await locks.lock("a").inspect()).waiters[0]
        with redis.Redis.from_url(shifting.url) as client:
            await until(lambda: client.hget("{lock:a}{waiters}", token).split()[2] == b"1")  # it was heard
        await dying.end(signal.SIGKILL)
        await shift(shifting, -600)
        await lease.release()
        mine = await locks.lock("a").acquire(timeout=30)
        assert await mine.release()
