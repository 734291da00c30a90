"""Acknowledged grants (acks, fsync): a grant that too few replicas or disks have does not count, and is undone."""

from __future__ import annotations

import asyncio
import re

import pytest
import redis

import interlock
import interlock.aio
from harness.modes import outcome, until
from harness.topology import Cluster, Sentinels
from interlock import Assurance, ConfigError, Unavailable
from interlock._protocol.acks import Acks

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="primaries with replicas and a cluster of valkey-9.1")


@pytest.fixture(scope="module")
def group():
    with Sentinels(sentinels=0) as made:
        yield made


@pytest.fixture
def healthy(group):
    """The group; all of its replicas run again after the test."""
    yield group
    for node in group.nodes:
        node.resume()
    group.wait_ok()


KINDS = {
    "lock": lambda locks, **options: locks.lock("a", **options),
    "rlock": lambda locks, **options: locks.rlock("a", **options),
    "semaphore": lambda locks, **options: locks.semaphore("s", 3, **options),
    "read": lambda locks, **options: locks.rwlock("rw", **options).read(),
    "write": lambda locks, **options: locks.rwlock("rw", **options).write(),
    "election": lambda locks, **options: locks.election("e", **options),
}


@rule(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("acks", "least"), [(1, 1), (2, 2), ("majority", 1), ("all", 2)])
async def test_the_assurance_of_a_lease_counts_its_replicas_and_servers(mode, healthy, kind, acks, least):
    locks = mode.interlock(healthy.url)
    lease = await mode.keep(KINDS[kind](locks, acks=acks).acquire())
    assert lease.assurance.replicas >= least
    assert lease.assurance.servers == 1
    await lease.release()
    plain = await mode.keep(KINDS[kind](locks).acquire())
    assert plain.assurance == Assurance()
    await plain.release()


@rule(8, 10)
@pytest.mark.parametrize("kind", KINDS)
async def test_too_few_replicas_undo_the_grant(mode, healthy, kind):
    locks = mode.interlock(healthy.url)
    error = await outcome(KINDS[kind](locks, acks=3, ttl=1).acquire())
    assert isinstance(error, Unavailable)
    assert re.search(r"needs 3 replicas .* but 2 had it .*reported 2 replicas: attach more, or lower acks=", str(error))

    async def free():
        lease = await KINDS[kind](locks).try_acquire()
        return lease is not None and await lease.release()

    await until(free)


@rule(10)
async def test_acks_all_fails_while_a_replica_is_paused_and_a_majority_does_not(mode, healthy):
    locks = mode.interlock(healthy.url)
    await (await locks.lock("a", acks="all").acquire()).release()
    healthy.replicas[0].pause()
    error = await outcome(locks.lock("a", acks="all", ttl=1).acquire())
    assert re.search(r"needs 2 replicas .* but 1 had it .*Are all of them connected", str(error))
    await (await locks.lock("a", acks="majority").acquire(timeout=10)).release()


@rule(10)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_retry_of_a_grant_that_no_replica_has_counts_no_replica(mode, healthy, kind):
    """The lease that stands ends later than the retry asks for, as after a failover to a clock that is behind.

    The retry then had nothing to write, and a server answers WAIT after a request without a write at once, with the
    number of its replicas.
    """
    locks = mode.interlock(healthy.url)
    await (await KINDS[kind](locks).acquire()).release()  # the scripts and the connections are there
    for replica in healthy.replicas:
        replica.pause()
    with redis.Redis.from_url(healthy.primary.url) as plain:
        acquiring = asyncio.ensure_future(outcome(KINDS[kind](locks, acks=1, ttl=3).acquire()))

        def waiting():
            return [client["id"] for client in plain.client_list() if "b" in client["flags"]]

        await until(waiting)
        (key,) = plain.keys("lock:?") or plain.keys("lock:rw")
        if plain.type(key) == b"zset":
            plain.zincrby(key, 57_000, plain.zrange(key, 0, -1)[0])
        plain.pexpire(key, 60_000)
        plain.client_kill_filter(_id=waiting()[0])
    error = await acquiring
    assert isinstance(error, Unavailable), error
    assert re.search(r"acks=1 needs 1 replicas .* but 0 had it", str(error))


@rule(4, 10)
async def test_a_handed_over_lock_is_acknowledged_too(mode, healthy):
    locks = mode.interlock(healthy.url)
    first = await mode.keep(locks.lock("a").acquire())
    waiter = asyncio.ensure_future(locks.lock("a", acks=2).acquire(timeout=10))

    async def waits():
        return (await locks.lock("a").inspect()).waiting == 1

    await until(waits)
    await first.release()
    lease = await mode.keep(waiter)
    assert lease.assurance.replicas == 2
    await lease.release()


async def test_many_grants_that_wait_for_replicas_delay_no_other_lock(mode, healthy):
    locks = mode.interlock(healthy.url)
    healthy.replicas[0].pause()
    slow = [asyncio.ensure_future(outcome(locks.lock(f"slow{i}", acks=2).acquire())) for i in range(5)]
    for _ in range(50):  # each would wait for a second behind them
        await (await locks.lock("quick").acquire()).release()
    assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*slow))


@rule(10)
async def test_fsync_waits_for_the_disk(mode):
    with Sentinels(sentinels=0, replicas=1, config={"appendonly": "yes"}) as group:
        locks = mode.interlock(group.url)
        lease = await mode.keep(locks.lock("a", acks=1, fsync=True).acquire())
        assert lease.assurance == Assurance(1, 1, 1)
        alone = await mode.keep(locks.lock("b", fsync=True).acquire())
        assert alone.assurance.disks == 1


async def test_fsync_is_refused_by_a_server_without_an_aof(mode, healthy, clean):
    locks = mode.interlock(healthy.url)
    error = await outcome(locks.lock("a", fsync=True).acquire())
    assert isinstance(error, ConfigError)
    assert "appendonly yes" in str(error)
    await until(lambda: not clean.exists("lock:a"))


async def test_each_lock_of_a_multi_lock_is_acknowledged(mode, healthy):
    locks = mode.interlock(healthy.url)
    lease = await mode.keep(locks.multi(locks.lock("a", acks=2), locks.lock("b")).acquire(timeout=0))
    assert lease["a"].assurance.replicas == 2
    await lease.release()
    assert isinstance(await outcome(locks.multi(locks.lock("a", acks=3), locks.lock("b")).acquire()), Unavailable)


async def test_bad_acks_are_refused(mode):
    locks = mode.interlock()
    for wrong in (-1, 1.5, True, "most", b"all"):
        with pytest.raises(ConfigError, match=r'acks must be a number of replicas, "majority" or "all"'):
            locks.lock("a", acks=wrong)
    with pytest.raises(ConfigError, match="fsync must be"):
        locks.lock("a", fsync=1)


@rule(10)
async def test_the_replicas_of_a_shard_acknowledge_too(mode):
    with Cluster(shards=1, replicas=1) as cluster:
        locks = mode.interlock(cluster.url)
        lease = await mode.keep(locks.lock("a", acks=1).acquire())
        assert lease.assurance.replicas == 1
        error = await outcome(locks.lock("b", acks=2, ttl=1).acquire())
        assert isinstance(error, Unavailable)


def test_a_quorum_refuses_acks(mode):
    factory = interlock.Interlock if mode.name == "threads" else interlock.aio.Interlock
    locks = factory.quorum(["redis://127.0.0.1:1", "redis://127.0.0.1:2", "redis://127.0.0.1:3"])
    for options in ({"acks": 1}, {"fsync": True}):
        with pytest.raises(ConfigError, match="a quorum takes no acks="):
            locks.lock("a", **options)


@rule(8)
async def test_a_grant_waits_for_replicas_no_longer_than_its_timeout(mode, node, monkeypatch):
    patiences, command = [], Acks.command

    def seen(self, known, timeout):
        patiences.append(timeout)
        return command(self, known, timeout)

    monkeypatch.setattr(Acks, "command", seen)
    error = await outcome(mode.interlock(node.url).lock("a", acks=1).acquire(timeout=0.8))
    assert isinstance(error, Unavailable), error
    assert max(patiences, default=0) < 0.8  # they may take a second; on a busy machine the time may be over before
