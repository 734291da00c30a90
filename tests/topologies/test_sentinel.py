"""Sentinel: after a failover holders, waiters and renewals go on with the new primary, and no lock has two holders."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from harness.clock import machine_time
from harness.groups import last_write
from harness.matrix import required
from harness.modes import SLACK, outcome, queued, until
from harness.servers import KINDS, Missing, Node
from harness.topology import Sentinels
from harness.topology.group import ask, info
from interlock import AcquireTimeout, ConfigError, Unavailable
from interlock._connect import sentinels as sentinel
from interlock._connect.target import address_of
from interlock._protocol.server import Disconnected
from interlock._quarantine.identity import NO_REPLID, Facts
from interlock._quarantine.server_history import ServerHistory

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="primaries and replicas under sentinels, of every kind")
GUARDED = {"min-replicas-to-write": "1", "min-replicas-max-lag": "1"}
LONGEST = 4.0  # seconds: max_ttl in these tests. A lease of so long outlives that this process is stopped for two


def watched(kind="valkey-9.1", **options):
    """A primary with replicas and sentinels; skips the test if this machine lacks the server."""
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
async def test_leases_waiters_and_renewals_outlive_a_failover(mode, server_kind):
    # Sentinels of 6.2 may leave the other replica with the dead primary for 10 s (see Sentinels): a new primary that
    # wants a replica for each write takes no write meanwhile, and the lease ends.
    config = {} if server_kind == "redis-6.2" else GUARDED
    with watched(server_kind, config=config) as group:
        locks, other = mode.interlock(group.url, max_ttl=10), mode.interlock(group.url, max_ttl=10)
        held = await mode.keep(locks.lock("held", ttl=10).acquire())
        waiter = asyncio.ensure_future(other.lock("held", ttl=10).acquire(timeout=60))
        await until(lambda: queued(locks, 1, "held"))
        old = group.primary
        await held.extend(10)
        group.catch_up(*group.replicas)
        old.kill()
        await held.extend(10)  # it goes on with the new primary
        assert await held.release()
        lease = await mode.keep(waiter)  # and so does who waits, once the quarantine is over
        assert lease.fence > held.fence


@rule(10)
async def test_a_lease_that_the_failover_lost_is_waited_for(mode):
    with watched(config={}) as group:
        dead, other = mode.interlock(group.url, max_ttl=LONGEST), mode.interlock(group.url, max_ttl=LONGEST)
        await (await other.lock("hello", ttl=LONGEST).acquire()).release()
        group.catch_up(*group.replicas)
        old = group.primary
        group.lag(*group.replicas)
        lost = await mode.keep(dead.lock("a", ttl=LONGEST).acquire())
        old.kill()
        await asyncio.to_thread(group.wait_for_primary, old)
        refused = await outcome(other.lock("a", ttl=LONGEST).acquire(timeout=1))
        assert isinstance(refused, AcquireTimeout)
        assert "quarantine" in str(refused)
        lease = await mode.keep(other.lock("a", ttl=LONGEST).acquire(timeout=30))
        assert lost.state == "lost"
        assert lease.fence > lost.fence


@rule(10)
async def test_a_lease_at_an_isolated_primary_ends_soon(mode, group):
    old = group.primary
    left, other = mode.interlock(old.tcp_url, max_ttl=LONGEST), mode.interlock(group.url, max_ttl=LONGEST)
    await (await other.lock("hello", ttl=LONGEST).acquire()).release()
    held = await mode.keep(left.lock("a", ttl=LONGEST).acquire())
    group.catch_up(*group.replicas)
    group.isolate(old)
    await asyncio.to_thread(group.wait_for_primary, old)
    with redis.Redis.from_url(old.url) as plain:
        assert plain.info("replication")["role"] == "master"
    lease = await mode.keep(other.lock("a", ttl=LONGEST).acquire(timeout=30))
    assert held.state == "lost"  # before anybody else had it
    assert lease.fence > held.fence
    error = await outcome(left.lock("b", ttl=LONGEST).acquire(timeout=0))
    assert isinstance(error, Unavailable)
    assert "NOREPLICAS" in str(error)


@rule(10)
async def test_a_client_of_an_isolated_primary_finds_the_new_primary(mode, group):
    left, other = mode.interlock(group.url, max_ttl=20), mode.interlock(group.url, max_ttl=20)
    held = await mode.keep(left.lock("a", ttl=12).acquire())
    await (await other.lock("hello", ttl=LONGEST).acquire()).release()
    old = group.primary
    group.catch_up(*group.replicas)
    group.isolate(old)
    await asyncio.to_thread(group.wait_for_primary, old)
    await held.extend(15)
    assert await other.lock("a", ttl=12).try_acquire() is None
    assert await held.release()


@rule(10)
async def test_a_renewal_by_a_new_primary_counts_once_the_old_one_must_have_stopped(mode):
    """That takes min-replicas-max-lag and two seconds: meanwhile the old primary may grant what ran out there."""
    with watched(config={"min-replicas-to-write": "1", "min-replicas-max-lag": "4"}) as group:
        locks = mode.interlock(group.url, max_ttl=30)
        held, brief = (
            await mode.keep(locks.lock("a", ttl=20).acquire()),
            await mode.keep(locks.lock("b", ttl=3).acquire()),
        )
        group.catch_up(*group.replicas)
        old, began = group.primary, time.monotonic()
        old.kill()
        await held.extend(25)
        assert time.monotonic() - began >= 6
        await until(lambda: brief.state == "lost")
        assert await held.release()


@rule(1, 10)
async def test_no_lock_is_held_twice_beside_an_isolated_primary_that_still_grants(mode):
    with watched(replicas=3, config={"min-replicas-to-write": "1", "min-replicas-max-lag": "10"}) as group:
        old, (_, _, beside) = group.primary, group.replicas
        left, other = mode.interlock(old.tcp_url, max_ttl=20), mode.interlock(group.url, max_ttl=20)
        held = await mode.keep(other.lock("a", ttl=4).acquire())
        waiter = asyncio.ensure_future(left.lock("a", ttl=4).acquire(timeout=60))
        await until(lambda: queued(left, 1))
        group.catch_up(*group.replicas)
        group.isolate(old, beside)  # with a replica, so that it may write
        await asyncio.to_thread(group.wait_for_primary, old)
        with redis.Redis.from_url(old.url) as plain:
            for kind in ("normal", "pubsub"):
                plain.client_kill_filter(_type=kind, skipme=True)  # who asks the sentinels goes to the new one
        lease = await mode.keep(waiter)
        assert held.state == "lost"  # though the new one has renewed it
        assert lease.state == "held"


@rule(1, 10)
async def test_a_primary_that_was_paused_and_resumes_grants_nothing(mode):
    """It takes itself for the primary, and counts its replica as alive, because no link to the replica has ended."""
    with watched(wired=True) as group:
        idle = mode.interlock(group.url, max_ttl=LONGEST)
        await (await idle.lock("a", ttl=LONGEST).acquire()).release()
        group.catch_up(*group.replicas)
        old = group.primary
        group.isolate(old, silent=True)
        old.pause()
        try:
            await asyncio.to_thread(group.wait_for_primary, old)
            other = mode.interlock(group.url, max_ttl=LONGEST)
            lease = await mode.keep(other.lock("a", ttl=LONGEST).acquire(timeout=40))
        finally:
            old.resume()
        refused = await outcome(idle.lock("a", ttl=LONGEST).acquire(timeout=0))
        assert isinstance(refused, AcquireTimeout), refused
        assert refused.holder == lease.token
        assert not ask(old, "EXISTS", "lock:a")


@rule(1, 10)
async def test_an_answer_after_a_pause_does_not_prove_who_is_the_primary(mode):
    """A reply after the pause to a request before the pause does not make its connection count as in use."""
    with watched(wired=True) as group:
        busy = mode.interlock(group.url, quarantine=False)
        await (await busy.lock("a", ttl=LONGEST).acquire()).release()
        group.catch_up(*group.replicas)
        old = group.primary
        group.isolate(old, silent=True)
        await busy.lock("b").inspect()
        old.pause()
        asking = []

        async def replaced():
            await asyncio.to_thread(group.wait_for_primary, old)
            await asyncio.sleep(1.2)  # for longer than a connection is trusted that is not in use
            return await mode.keep(mode.interlock(group.url, quarantine=False).lock("a").acquire(timeout=40))

        replacing = asyncio.ensure_future(replaced())
        try:
            while not replacing.done():
                asking.append(asyncio.ensure_future(outcome(busy.lock("b").inspect())))
                await asyncio.sleep(0.1)
            lease = await replacing
        finally:
            old.resume()
        await asking[0]
        refused = await outcome(busy.lock("a").acquire(timeout=0))
        assert isinstance(refused, AcquireTimeout), refused
        assert refused.holder == lease.token
        await asyncio.gather(*asking)


@rule(8, 10)
async def test_a_primary_that_was_paused_grants_nothing_while_no_sentinel_answers(mode, group):
    """No caller waits for longer than its timeout."""
    locks, primary = mode.interlock(group.url), group.primary
    await (await locks.lock("a").acquire()).release()
    for each in group.sentinels:
        each.pause()
    await asyncio.sleep(1.1)  # then a connection is not one in use any more
    try:
        started = machine_time()
        error = await outcome(locks.lock("a").acquire(timeout=0.5))
        assert isinstance(error, Unavailable | AcquireTimeout), error
        assert machine_time() - started < 0.5 + SLACK
        assert not ask(primary, "EXISTS", "lock:a")
    finally:
        for each in group.sentinels:
            each.resume()
    await mode.keep(locks.lock("a").acquire(timeout=20))


@rule(10)
async def test_a_planned_failover_inside_a_quarantine_keeps_its_beginning(mode, group):
    """It lost nothing, so what may be lost is what the failover before it lost, and that is no younger."""
    locks = mode.interlock(group.url, max_ttl=60)
    await (await locks.lock("used").acquire()).release()
    old = group.primary
    group.catch_up(*group.replicas)
    old.kill()
    await asyncio.to_thread(group.wait_ok)

    async def quarantine_end(name):
        assert isinstance(await outcome(locks.lock(name).acquire(timeout=1)), AcquireTimeout)
        state = await locks.lock(name).inspect()
        assert state.quarantined
        return machine_time() + state.remaining

    ends = {name: await quarantine_end(name) for name in ("used", "never used")}  # a second each, and so a second ago
    new = await asyncio.to_thread(group.handover)
    for name, end in ends.items():
        assert await quarantine_end(name) < end + 0.5
    assert group.primary is new


USED = {
    "lock": lambda locks, name: locks.lock(name, ttl=20, renew=False),
    "semaphore": lambda locks, name: locks.semaphore(name, 1, ttl=20, renew=False),
}


@rule(1, 10)
@pytest.mark.parametrize("kind", USED)
async def test_a_primary_that_comes_back_lacks_what_the_one_in_between_granted(mode, kind):
    """It is the same process with the same history of writes, so its own identity stands beside its locks."""
    use = USED[kind]
    with watched(replicas=1, config={}) as group:
        old = group.primary
        witness, idle = mode.interlock(group.url, max_ttl=20), mode.interlock(group.url, max_ttl=20)
        for locks, name in ((witness, "met both"), (idle, "met one")):
            await (await use(locks, name).acquire()).release()
        group.catch_up(*group.replicas)
        before = ask(old, "INFO", "replication")
        old.pause()
        new = await asyncio.to_thread(group.wait_for_primary, old)
        await witness.lock("hello").inspect()
        others = mode.interlock(group.url, quarantine=False)
        names = [name + used for name in ("met both", "met one") for used in ("", ", never used")]
        for name in names:
            await mode.keep(use(others, name).acquire())
        new.kill()
        old.resume()
        assert await asyncio.to_thread(group.wait_for_primary, new) is old
        assert info(old)["master_replid"] in before
        for locks, name in zip((witness, witness, idle, idle), names, strict=True):
            refused = await outcome(use(locks, name).acquire(timeout=0))
            assert isinstance(refused, AcquireTimeout), refused
            assert "quarantine" in str(refused)
        fresh = mode.interlock(group.url, max_ttl=20)
        for name in names:  # those that know have written the evidence down
            assert isinstance(await outcome(use(fresh, name).acquire(timeout=0)), AcquireTimeout)
        assert await use(idle, names[0]).revoke("the holder has ended", force=True)
        for locks in (witness, idle, fresh):
            await (await use(locks, names[0]).acquire(timeout=0)).release()


@rule(10)
async def test_a_planned_failover_loses_nothing_and_begins_no_quarantine(mode, group):
    locks = mode.interlock(group.url, max_ttl=60)
    await (await locks.lock("a").acquire()).release()
    held = await mode.keep(locks.lock("held").acquire())
    new = await asyncio.to_thread(group.handover)
    assert new is group.primary
    await (await locks.lock("a").acquire(timeout=20)).release()
    fresh = mode.interlock(group.url, max_ttl=60)
    await (await fresh.lock("a").acquire(timeout=20)).release()
    assert await held.release()
    await (await fresh.lock("held").acquire(timeout=20)).release()


async def test_a_sentinel_client_of_redis_py_is_accepted(mode, group):
    ports = [("127.0.0.1", sentinel.port) for sentinel in group.sentinels]
    module = redis.sentinel if mode.name == "threads" else redis.asyncio.sentinel
    manager = module.Sentinel(ports, decode_responses=True)
    client = manager.master_for("mymaster", db=1)
    mode.clients += [client, *manager.sentinels]
    locks = mode.interlock(client)
    await mode.keep(locks.lock("a").acquire())
    with redis.Redis.from_url(f"redis://127.0.0.1:{group.primary.port}/1") as plain:
        assert plain.exists("lock:a")
    replica = manager.slave_for("mymaster")
    mode.clients.append(replica)
    with pytest.raises(ConfigError, match=r"master_for"):
        mode.interlock(replica)


async def test_a_wrong_sentinel_address_raises_a_clear_error(mode, group):
    with pytest.raises(ConfigError, match=r"names no service. Write redis\+sentinel://"):
        mode.interlock(group.url.partition("?")[0])
    with pytest.raises(ConfigError, match=r"between two commas"):
        mode.interlock("redis+sentinel://127.0.0.1:1,,127.0.0.1:2/0?service=mymaster")
    error = await outcome(mode.interlock(group.url.replace("mymaster", "yours")).lock("a").acquire())
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
            await mode.interlock(url).lock("a").acquire()
    nobody = mode.interlock("redis+sentinel://127.0.0.1:1,127.0.0.1:2/0?service=mymaster")
    started = machine_time()
    error = await outcome(nobody.lock("a").acquire(timeout=1))
    assert isinstance(error, Unavailable | AcquireTimeout)
    assert "none of the sentinels at 127.0.0.1:1, 127.0.0.1:2 answers" in str(error)
    assert machine_time() - started < 1 + SLACK


async def test_sentinels_that_refuse_the_epoch_name_the_primary_all_the_same(mode, group):
    for each in group.sentinels:
        rights = ("resetchannels", "+hello", "+sentinel|get-master-addr-by-name")
        ask(each, "ACL", "SETUSER", "plain", "on", ">secret", *rights)
    url = f"{group.url}&sentinel_username=plain&sentinel_password=secret"
    await mode.keep(mode.interlock(url).lock("a").acquire(timeout=10))
    assert address_of(url, for_asyncio=False).sentinels.primary(5).epoch is None
    assert address_of(group.url, for_asyncio=False).sentinels.primary(5).epoch == 0


async def test_a_dead_sentinel_disturbs_nobody(mode, group):
    group.sentinels[0].kill()
    await mode.keep(mode.interlock(group.url).lock("a").acquire(timeout=10))


@rule(10)
def test_an_isolated_primary_is_waited_for_until_it_must_have_stopped():
    """It compares whole seconds, once a second; a node of a cluster tests a silent link after half a timeout."""
    watched = address_of("redis+sentinel://a:1/0?service=x", for_asyncio=False)
    assert watched.isolation_grace([[b"min-replicas-to-write", b"1"], [b"min-replicas-max-lag", b"1"]]) == 3
    node = address_of("redis+cluster://a:1", for_asyncio=False).seeds[0]
    assert node.isolation_grace([[b"cluster-node-timeout", b"4000"]]) == 7


@rule(10)
async def test_a_primary_whose_replicas_fall_silent_stops_before_the_isolation_grace_ends(mode):
    """Its links to them stay open: only time shows the silence. A primary misses replicas whose links end at once."""
    with watched(wired=True, replicas=1, sentinels=1) as group:
        locks = mode.interlock(group.url, max_ttl=LONGEST)
        await (await locks.lock("hello", ttl=LONGEST).acquire()).release()
        old = group.primary
        group.isolate(old, silent=True)
        silent = time.monotonic()
        assert "connected_slaves:1" in ask(old, "INFO", "replication")
        last = await last_write(old, "NOREPLICAS")
        assert last - silent < locks._session.server.history.latest.isolation_grace


@rule(10)
async def test_sentinels_that_disagree_without_a_majority_name_no_primary(mode):
    """One of them was left behind with the old primary, and the third one is dead: nobody can know which one it was."""
    alone = {"replicas": 0, "sentinels": 1, "config": {}}
    with watched(**alone) as old, watched(**alone) as new:
        ports = [old.sentinels[0].port, new.sentinels[0].port, 1]
        url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/0?service=mymaster"
        error = await outcome(mode.interlock(url).lock("a").acquire(timeout=0.5))
        assert isinstance(error, Unavailable), error
        assert "disagree: 1 say 127.0.0.1:" in str(error)
        for group in (old, new):
            assert not ask(group.primary, "EXISTS", "lock:a")
        agreeing = url.replace(f":{old.sentinels[0].port}", ":2")  # all that answer
        await mode.keep(mode.interlock(agreeing).lock("a").acquire(timeout=5))
        assert ask(new.primary, "EXISTS", "lock:a")


async def test_a_silent_sentinel_delays_one_look_only(mode, group, monkeypatch):
    silent, asked = group.sentinels[0], []
    real = sentinel.Sentinels._ask

    def seen(each, *args):
        asked.append(each.parameters["port"])
        return real(each, *args)

    monkeypatch.setattr(sentinel.Sentinels, "_ask", staticmethod(seen))
    locks = mode.interlock(group.url)
    silent.pause()
    try:
        await mode.keep(locks.lock("a").acquire(timeout=10))
        assert asked[0] == silent.port
        asked.clear()
        locks._session.server.address.sentinels.primary(5)
        assert silent.port not in asked
    finally:
        silent.resume()


async def test_a_primary_that_would_go_on_in_isolation_is_logged(mode, caplog):
    with watched(config={}) as group:
        await mode.keep(mode.interlock(group.url).lock("a").acquire())
        assert "min-replicas-to-write" in caplog.text


@rule(8)
def test_sentinels_that_are_all_silent_take_no_longer_than_the_timeout(monkeypatch):
    withins = []

    def silent(_, within, *__):
        withins.append(within)
        raise TimeoutError

    monkeypatch.setattr(sentinel.Sentinels, "_ask", staticmethod(silent))
    group = address_of("redis+sentinel://a:1,b:2,c:3,d:4,e:5/0?service=x", for_asyncio=False)
    with pytest.raises(Disconnected):
        group.sentinels.primary(0.3)
    assert len(withins) == 5
    assert sum(withins) < 0.31


async def test_sentinels_that_refuse_the_password_raise_config_error(mode):
    """It took a minute until the wrong password was raised."""
    with Node() as node, redis.Redis.from_url(node.url) as plain:
        plain.execute_command("ACL", "SETUSER", "default", "resetpass", ">secret")
        locks = mode.interlock(f"redis+sentinel://127.0.0.1:{node.port}/0?service=x")
        error = await outcome(locks.lock("a").acquire(timeout=2))
    assert isinstance(error, ConfigError), error
    assert "sentinel_password" in str(error)


@rule(10)
def test_the_isolation_grace_is_that_of_the_old_primary():
    """min-replicas-max-lag may be set at one of the servers only."""
    memory = ServerHistory(60.0)
    where = address_of("redis://127.0.0.1", for_asyncio=False)
    memory.identify(
        Facts("a" * 40, "b" * 40, NO_REPLID, uptime=500, now_ms=1_000_000, replicas=1), where, isolation_grace=11.0
    )
    new = memory.identify(
        Facts("c" * 40, "d" * 40, "b" * 40, uptime=500, now_ms=1_000_000, replicas=0), where, isolation_grace=0.0
    )
    assert new.isolation_grace == 11
    assert new.old_primary()
