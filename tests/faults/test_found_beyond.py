"""What hostile eyes found beyond one server: each test failed once."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis

from harness.matrix import MODES
from harness.modes import outcome, until
from harness.servers import Node
from harness.topology import Cluster, Sentinels
from interlock import AcquireTimeout, ConfigError, Unavailable
from interlock._connect import sentinels as sentinel
from interlock._connect.address import config_value
from interlock._connect.target import address
from interlock._protocol.acks import Acks
from interlock._protocol.types import Disconnected
from interlock._quarantine.history import ServerHistory
from interlock._quarantine.identity import NO_REPLID, Facts, parse_facts
from interlock._quarantine.stamp import IdentityStamp
from interlock.primitives.codes import GRANTED, NOT_FOUND

rule = pytest.mark.rule
TRANSPORTS = {"threads": "interlock._transports.blocking", "asyncio": "interlock._transports.asyncio"}
KINDS = {"lock": lambda locks: locks.lock("a"), "semaphore": lambda locks: locks.semaphore("a", 1)}


def crash(node):
    node.kill()
    node.restart()


@rule(8)
@pytest.mark.parametrize("timeout", [0, 0.5])
async def test_a_proof_that_changes_nothing_is_looked_for_once(kit, node, monkeypatch, timeout):
    """Who has no quarantine knows what no message of it can say; it asked again, without a pause and without an end."""
    locks, other = kit.interlock(node.url, max_ttl=60), kit.interlock(node.url, quarantine=False)
    await (await locks.lock("a").acquire()).release()
    crash(node)
    assert isinstance(await outcome(locks.lock("a").acquire(timeout=0)), AcquireTimeout)  # its marker stays
    monkeypatch.setattr(TRANSPORTS[kit.mode] + ".least_lossless_ttl", lambda *_: 0.0)
    error = await outcome(other.lock("a").acquire(timeout=timeout))
    assert isinstance(error, AcquireTimeout)
    assert "quarantine" in str(error)


@rule(10)
async def test_a_quarantine_that_a_witness_began_can_be_ended_by_hand(kit, node):
    """The witness does not know what the lock is used as; the record that said so was lost."""
    locks = kit.interlock(node.url, max_ttl=10)
    lease = await kit.keep(locks.election("a", ttl=2).campaign())
    crash(node)
    await until(lambda: lease.state == "lost")
    fresh = kit.interlock(node.url, max_ttl=10)
    assert await fresh.election("a", ttl=2).revoke("all have been stopped", force=True)
    assert await fresh.election("a", ttl=2).leader() is None
    await (await fresh.election("a", ttl=2).campaign(timeout=1)).release()


@pytest.fixture
def cluster():
    with Cluster(shards=3, replicas=1) as made:
        yield made


@rule(6)
async def test_who_only_renews_follows_a_failover_of_its_shard(kit, cluster):
    """Renewals asked the dead node, and nobody asked who has its slots by now."""
    locks = kit.interlock(cluster.url)
    primary = cluster.nodes[0]
    names = [name for name in map(str, range(60)) if cluster.primary_of(f"lock:{name}") is primary]
    leases = [await kit.keep(locks.lock(name, ttl=12).acquire()) for name in names]
    cluster.catch_up(*cluster.nodes)
    primary.kill()
    await until(lambda: {lease.state for lease in leases} == {"jeopardy"})
    await until(lambda: {lease.state for lease in leases} == {"held"})


@rule(6)
async def test_a_look_whether_something_was_lost_is_one_for_all_and_holds_up_nobody(kit, node, client, monkeypatch):
    """Each costs connections, to sentinels and replicas too; hundreds looked, and renewals waited for them in turn."""
    looks, former, over = [], [""], threading.Event()

    def look(*args):
        looks.append(args)
        over.wait(30)

    monkeypatch.setattr(IdentityStamp, "old_primary", lambda *_: former[0])
    for mode in MODES:
        monkeypatch.setattr(TRANSPORTS[mode] + ".least_lossless_ttl", look)
    locks = kit.interlock(node.url)
    leases = [await kit.keep(locks.lock(f"held-{number}", ttl=1, renew=bool(number)).acquire()) for number in range(2)]
    former[0] = "who:knows"
    askers = [asyncio.ensure_future(locks.lock(f"asked-{number}").acquire()) for number in range(20)]
    try:
        await until(lambda: len(client.keys("lock:asked-*[0-9]")) == len(askers))
        await until(lambda: all(lease.lost.is_set() for lease in leases))  # and told of it, while somebody looks
        assert len(looks) == 1
    finally:
        former[0] = ""
        over.set()
    for asker in askers:
        await (await asker).release()


def test_what_is_proven_twice_is_said_once():
    """It goes out with every message."""
    epoch = IdentityStamp(Facts("r" * 40, "p" * 40, NO_REPLID, uptime=5, now_ms=100_000, replicas=0), 60, "a:b", " ")
    epoch.mark_lossless("a:b")
    text = epoch.text
    epoch.mark_lossless("a:b")
    assert epoch.text == text


@rule(10)
async def test_nor_is_a_connection_trusted_on_which_grants_wait_for_replicas(kit):
    """As test_quarantine's other one that outlives a demotion; asyncio keeps those apart."""
    with Sentinels(replicas=1, sentinels=1, config={"min-replicas-to-write": "0"}) as group:
        locks = kit.interlock(group.url, max_ttl=30)
        await (await locks.lock("a", acks=1).acquire()).release()
        node, other = group.nodes
        with redis.Redis.from_url(node.url) as plain:
            await asyncio.sleep(1.1)  # it is idle for longer than a connection is trusted
            plain.replicaof("127.0.0.1", other.port)
            plain.replicaof("NO", "ONE")
        error = await outcome(locks.lock("a", acks=1).acquire(timeout=0))
        assert isinstance(error, AcquireTimeout), error
        assert "quarantine" in str(error)


@rule(8)
async def test_replicas_are_waited_for_no_longer_than_the_caller_has(kit, node, monkeypatch):
    patiences, command = [], Acks.command

    def seen(self, known, timeout):
        patiences.append(timeout)
        return command(self, known, timeout)

    monkeypatch.setattr(Acks, "command", seen)
    error = await outcome(kit.interlock(node.url).lock("a", acks=1).acquire(timeout=0.8))
    assert isinstance(error, Unavailable), error
    assert max(patiences, default=0) < 0.8  # they may take a second; on a busy machine the time may be over before


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_a_quarantine_that_is_only_seen_can_be_ended_by_hand_too(kit, node, kind):
    """Nobody had asked for the lock since, so there was no marker, or no record, to end."""
    locks, other = kit.interlock(node.url), kit.interlock(node.url)
    for each in (locks, other):
        await (await KINDS[kind](each).acquire()).release()
    crash(node)
    state = await KINDS[kind](locks).inspect()
    assert state.quarantined if kind == "lock" else state.quarantine
    assert await KINDS[kind](locks).revoke("all have been stopped", force=True)
    for each in (other, locks):
        await (await KINDS[kind](each).acquire(timeout=0)).release()


@rule(10)
async def test_who_held_a_permit_is_a_witness(kit, node):
    locks = kit.interlock(node.url)
    lease = await kit.keep(locks.semaphore("a", 2, ttl=2).acquire())
    crash(node)
    await until(lambda: lease.state == "lost")
    fresh = kit.interlock(node.url).semaphore("a", 2)
    error = await outcome(fresh.acquire(timeout=0))
    assert isinstance(error, AcquireTimeout), error
    assert "quarantine" in str(error)
    assert (await fresh.inspect()).limit in {None, 2}


@rule(6, 10)
@pytest.mark.parametrize("script", ["lock", "permits"])
@pytest.mark.parametrize("full", [False, True])
def test_witnesses_keep_nobody_from_being_renewed(monkeypatch, script, full):
    """Each marks its own lock; and if there is no memory for that, those behind it are renewed all the same."""
    walk = pytest.importorskip("walk")
    walk.able(monkeypatch)
    world = walk.World(script, ())
    here, now_ms = "r" * 12 + ":" + "p" * 12, int(world.now)
    parts = {"lock": ("lock", "record"), "permits": ("holders", "record", "shares")}[script]

    def keys(*names, parts=parts):
        return [f"{name}-{part}".encode() for name in names for part in parts]

    def say(*args, keys, former):
        words = [str(arg).encode() for arg in (*args, f"{here} {now_ms} 60000 {former}")]
        return world.server.eval(world.source, keys, words)

    every = keys("held", parts=(*parts[:2], "queue", "waiters", "gone", *parts[2:]))
    terms = {"lock": ("", "lock"), "permits": ("semaphore", 1, 1, "")}[script]
    assert say("acquire", "me", 5000, 3000, 0, "c", 0, *terms, keys=every, former="-")[0] == GRANTED
    world.server.full = full
    asked = ("lost", 9000, "lost", 9000, "me", 9000)
    assert say("renew", *asked, keys=keys("one", "two", "held"), former="a:b") == [NOT_FOUND, NOT_FOUND, GRANTED]
    marks = [world.look(keys(name)[script == "permits"]) for name in ("one", "two")]
    assert marks == [None, None] if full else all(b"a:b>" in mark for mark in marks)


@rule(8)
def test_sentinels_that_are_all_silent_take_no_longer_than_the_caller_has(monkeypatch):
    withins = []

    def silent(_, within, *__):
        withins.append(within)
        raise TimeoutError

    monkeypatch.setattr(sentinel.Sentinels, "_ask", staticmethod(silent))
    group = address("redis+sentinel://a:1,b:2,c:3,d:4,e:5/0?service=x", for_asyncio=False)
    with pytest.raises(Disconnected):
        group.sentinels.primary(0.3)
    assert len(withins) == 5
    assert sum(withins) < 0.31


async def test_sentinels_that_refuse_us_are_no_outage(kit):
    """It took a minute until a wrong password was told."""
    with Node() as node, redis.Redis.from_url(node.url) as plain:
        plain.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        locks = kit.interlock(f"redis+sentinel://127.0.0.1:{node.port}/0?service=x")
        error = await outcome(locks.lock("a").acquire(timeout=2))
    assert isinstance(error, ConfigError), error
    assert "sentinel_password" in str(error)


@rule(10)
def test_the_old_primary_goes_on_for_as_long_as_it_was_told_to():
    """min-replicas-max-lag may be set at one of them only."""
    memory = ServerHistory(60.0)
    where = address("redis://127.0.0.1", for_asyncio=False)
    memory.meet(
        Facts("a" * 40, "b" * 40, NO_REPLID, uptime=500, now_ms=1_000_000, replicas=1), where, isolation_grace=11.0
    )
    new = memory.meet(
        Facts("c" * 40, "d" * 40, "b" * 40, uptime=500, now_ms=1_000_000, replicas=0), where, isolation_grace=0.0
    )
    assert new.isolation_grace == 11
    assert new.old_primary()


def test_who_does_not_tell_its_identity_has_no_quarantine():
    """A proxy may hide it; the scripts would take something else for it, and fail."""
    info = b"# Server\r\nrun_id:%b\r\n"
    replication, time = b"master_replid:%b\r\n" % (b"b" * 40), [b"1", b"1"]
    assert parse_facts(info % (b"a" * 40), replication, time).identity == "a" * 12 + ":" + "b" * 12
    assert parse_facts(info % b"0", replication, time) is None
    assert config_value({}) is None
