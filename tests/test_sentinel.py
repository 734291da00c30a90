"""Sentinel: after a failover holders, waiters and renewals go on with the new primary, and nobody has it twice."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis.asyncio.sentinel
import redis.sentinel

from grounds import required
from interlock import AcquireTimeout, ConfigError, Unavailable
from interlock.testing.servers import KINDS, Missing
from interlock.testing.topology import Sentinels
from kit import outcome, queued, until

rule = pytest.mark.rule
GUARDED = {"min-replicas-to-write": "1", "min-replicas-max-lag": "1"}
LONGEST = 2.0  # seconds: max_ttl in these tests
SLACK = 0.1


def watched(kind="valkey-9.1", **options):
    """A primary with replicas and sentinels, or a skip."""
    try:
        return Sentinels(kind, **{"config": GUARDED, **options})
    except Missing as missing:
        required(f"no {kind} here: {missing}")
        raise


@pytest.fixture
def group():
    with watched() as made:
        yield made


@pytest.mark.parametrize("server_kind", KINDS)
@rule(10)
async def test_a_failover_is_outlived(kit, server_kind):
    with watched(server_kind) as group:
        locks, other = kit.interlock(group.url, max_ttl=10), kit.interlock(group.url, max_ttl=10)
        held = await kit.keep(locks.lock("held", ttl=10).acquire())
        waiter = asyncio.ensure_future(other.lock("held", ttl=10).acquire(timeout=60))
        await until(lambda: queued(locks, 1, "held"))
        old = group.primary
        await held.extend(10)
        group.catch_up(*group.replicas)
        old.kill()
        await held.extend(10)  # it goes on with the new primary
        assert await held.release()
        lease = await kit.keep(waiter)  # and so does who waits, once the quarantine is over
        assert lease.fence > held.fence


@rule(10)
async def test_a_grant_that_the_failover_lost_is_waited_for(kit):
    with watched(config={}) as group:
        dead, other = kit.interlock(group.url, max_ttl=LONGEST), kit.interlock(group.url, max_ttl=LONGEST)
        await (await other.lock("hello", ttl=LONGEST).acquire()).release()
        group.catch_up(*group.replicas)
        old = group.primary
        group.lag(*group.replicas)
        lost = await kit.keep(dead.lock("a", ttl=LONGEST).acquire())
        old.kill()
        await asyncio.to_thread(group.wait_for_primary, old)
        refused = await outcome(other.lock("a", ttl=LONGEST).acquire(timeout=1))
        assert isinstance(refused, AcquireTimeout)
        assert "quarantine" in str(refused)
        lease = await kit.keep(other.lock("a", ttl=LONGEST).acquire(timeout=30))
        assert lost.state == "lost"
        assert lease.fence > lost.fence


@rule(10)
async def test_an_isolated_primary_that_still_answers_holds_nothing_for_long(kit, group):
    old = group.primary
    left, other = kit.interlock(old.tcp_url, max_ttl=LONGEST), kit.interlock(group.url, max_ttl=LONGEST)
    await (await other.lock("hello", ttl=LONGEST).acquire()).release()
    held = await kit.keep(left.lock("a", ttl=LONGEST).acquire())
    group.catch_up(*group.replicas)
    group.isolate(old)
    await asyncio.to_thread(group.wait_for_primary, old)
    with redis.Redis.from_url(old.url) as plain:
        assert plain.info("replication")["role"] == "master"
    lease = await kit.keep(other.lock("a", ttl=LONGEST).acquire(timeout=30))
    assert held.state == "lost"  # before anybody else had it
    assert lease.fence > held.fence
    error = await outcome(left.lock("b", ttl=LONGEST).acquire(timeout=0))
    assert isinstance(error, Unavailable)
    assert "NOREPLICAS" in str(error)


@rule(10)
async def test_who_was_left_with_an_isolated_primary_finds_the_new_one(kit, group):
    left, other = kit.interlock(group.url, max_ttl=20), kit.interlock(group.url, max_ttl=20)
    held = await kit.keep(left.lock("a", ttl=12).acquire())
    await (await other.lock("hello", ttl=LONGEST).acquire()).release()
    old = group.primary
    group.catch_up(*group.replicas)
    group.isolate(old)
    await asyncio.to_thread(group.wait_for_primary, old)
    await held.extend(15)
    assert await other.lock("a", ttl=12).try_acquire() is None
    assert await held.release()


@rule(10)
async def test_what_a_new_primary_renews_counts_once_the_old_one_must_have_stopped(kit):
    """For min-replicas-max-lag, and a second: meanwhile the old one may grant what has run out there."""
    with watched(config={"min-replicas-to-write": "1", "min-replicas-max-lag": "4"}) as group:
        locks = kit.interlock(group.url, max_ttl=30)
        held, brief = (
            await kit.keep(locks.lock("a", ttl=20).acquire()),
            await kit.keep(locks.lock("b", ttl=3).acquire()),
        )
        group.catch_up(*group.replicas)
        old, began = group.primary, time.monotonic()
        old.kill()
        await held.extend(25)
        assert time.monotonic() - began >= 5
        await until(lambda: brief.state == "lost")
        assert await held.release()


@rule(1, 10)
async def test_nobody_holds_it_beside_a_primary_that_was_cut_off_and_still_grants(kit):
    with watched(replicas=3, config={"min-replicas-to-write": "1", "min-replicas-max-lag": "10"}) as group:
        old, (_, _, beside) = group.primary, group.replicas
        left, other = kit.interlock(old.tcp_url, max_ttl=20), kit.interlock(group.url, max_ttl=20)
        held = await kit.keep(other.lock("a", ttl=4).acquire())
        waiter = asyncio.ensure_future(left.lock("a", ttl=4).acquire(timeout=60))
        await until(lambda: queued(left, 1))
        group.catch_up(*group.replicas)
        group.isolate(old, beside)  # with a replica, so that it may write
        await asyncio.to_thread(group.wait_for_primary, old)
        with redis.Redis.from_url(old.url) as plain:
            for kind in ("normal", "pubsub"):
                plain.client_kill_filter(_type=kind, skipme=True)  # who asks the sentinels goes to the new one
        lease = await kit.keep(waiter)
        assert held.state == "lost"  # though the new one has renewed it
        assert lease.state == "held"


@rule(10)
async def test_a_handover_loses_nothing_and_need_not_wait(kit, group):
    locks = kit.interlock(group.url, max_ttl=60)
    await (await locks.lock("a").acquire()).release()
    held = await kit.keep(locks.lock("held").acquire())
    new = await asyncio.to_thread(group.handover)
    assert new is group.primary
    await (await locks.lock("a").acquire(timeout=20)).release()
    fresh = kit.interlock(group.url, max_ttl=60)
    await (await fresh.lock("a").acquire(timeout=20)).release()
    assert await held.release()
    await (await fresh.lock("held").acquire(timeout=20)).release()


async def test_a_client_of_sentinel_is_taken_as_it_is(kit, group):
    ports = [("127.0.0.1", sentinel.port) for sentinel in group.sentinels]
    module = redis.sentinel if kit.mode == "threads" else redis.asyncio.sentinel
    sentinel = module.Sentinel(ports, decode_responses=True)
    client = sentinel.master_for("mymaster", db=1)
    kit.clients += [client, *sentinel.sentinels]
    locks = kit.interlock(client)
    await kit.keep(locks.lock("a").acquire())
    with redis.Redis.from_url(f"redis://127.0.0.1:{group.primary.port}/1") as plain:
        assert plain.exists("lock:a")
    replica = sentinel.slave_for("mymaster")
    kit.clients.append(replica)
    with pytest.raises(ConfigError, match=r"master_for"):
        kit.interlock(replica)


async def test_wrong_sentinels_are_told(kit, group):
    with pytest.raises(ConfigError, match=r"names no service: it is redis\+sentinel://"):
        kit.interlock(group.url.partition("?")[0])
    with pytest.raises(ConfigError, match=r"between two commas"):
        kit.interlock("redis+sentinel://127.0.0.1:1,,127.0.0.1:2/0?service=mymaster")
    error = await outcome(kit.interlock(group.url.replace("mymaster", "yours")).lock("a").acquire())
    assert isinstance(error, ConfigError)
    assert "'yours'. They watch: mymaster" in str(error)
    servers = ",".join(f"127.0.0.1:{node.port}" for node in group.nodes)
    for url, says in (
        (f"redis+sentinel://{servers}/0?service=mymaster", "is no sentinel, but a server"),
        (f"{group.url}&sentinel_username=nobody&sentinel_password=wrong", r"\?sentinel_password="),
        (f"redis://127.0.0.1:{group.sentinels[0].port}/0", r"is a sentinel.*redis\+sentinel://"),
        (f"redis+cluster://127.0.0.1:{group.sentinels[0].port}", r"sentinel.*redis\+sentinel://"),
    ):
        with pytest.raises(ConfigError, match=says):
            await kit.interlock(url).lock("a").acquire()
    nobody = kit.interlock("redis+sentinel://127.0.0.1:1,127.0.0.1:2/0?service=mymaster")
    started = time.monotonic()
    error = await outcome(nobody.lock("a").acquire(timeout=1))
    assert isinstance(error, Unavailable | AcquireTimeout)
    assert "none of the sentinels at 127.0.0.1:1, 127.0.0.1:2 answers" in str(error)
    assert time.monotonic() - started < 5


async def test_a_dead_sentinel_is_no_harm(kit, group):
    group.sentinels[0].kill()
    await kit.keep(kit.interlock(group.url).lock("a").acquire(timeout=10))


async def test_a_primary_that_could_be_isolated_is_warned_of(kit, caplog):
    with watched(config={}) as group:
        await kit.keep(kit.interlock(group.url).lock("a").acquire())
        assert "min-replicas-to-write" in caplog.text
