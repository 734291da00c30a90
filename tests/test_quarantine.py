"""Rule 10: a server that may have forgotten leases grants nothing until all of them have run out."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from interlock import AcquireTimeout, Skipped
from interlock.ports._memory import NO_REPLID, Epoch, Facts
from interlock.testing.servers import Node
from interlock.testing.topology import Sentinels
from kit import outcome, until

rule = pytest.mark.rule
DURABLE = {"appendonly": "yes", "appendfsync": "always"}
LONGEST = 2.0  # seconds: max_ttl in these tests, and ttl
SLACK = 0.1  # seconds by which the server's clock and ours may differ in rounding

KINDS = {
    "lock": lambda locks, name: locks.lock(name, ttl=LONGEST),
    "rlock": lambda locks, name: locks.rlock(name, ttl=LONGEST),
    "semaphore": lambda locks, name: locks.semaphore(name, 1, ttl=LONGEST),
    "write": lambda locks, name: locks.rwlock(name, ttl=LONGEST).write(),
    "read": lambda locks, name: locks.rwlock(name, ttl=LONGEST).read(),
    "election": lambda locks, name: locks.election(name, ttl=LONGEST),
    "multi": lambda locks, name: locks.multi(locks.lock(name, ttl=LONGEST), locks.lock("other", ttl=LONGEST)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def crash(node) -> float:
    """The server dies and starts again; when it did."""
    node.kill()
    node.restart()
    return time.monotonic()


async def remembering(kit, url, **options):
    """A client that has met the server."""
    made = kit.interlock(url, max_ttl=LONGEST, **options)
    await (await made.lock("hello", ttl=LONGEST).acquire()).release()
    return made


async def refused(lockable) -> str:
    """What is said to one that does not wait."""
    error = await outcome(lockable.acquire(timeout=0))
    assert isinstance(error, AcquireTimeout), error
    return str(error)


@rule(10)
@every_kind
async def test_a_restart_without_memory_bars_what_may_be_held(kit, node, kind):
    dead, other = await remembering(kit, node.url), await remembering(kit, node.url)
    await kit.keep(KINDS[kind](dead, "a").acquire())
    began = crash(node)
    assert "quarantine" in await refused(KINDS[kind](other, "a")) or kind == "multi"
    fresh = kit.interlock(node.url, max_ttl=LONGEST)
    await refused(KINDS[kind](fresh, "a"))  # it has no memory of its own, but finds what the other one wrote
    lease = await kit.keep(KINDS[kind](fresh, "a").acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    await lease.release()
    await (await KINDS[kind](other, "a").acquire(timeout=0)).release()  # once it is over, it is over for all


@rule(10)
async def test_what_may_still_run_is_skipped_and_nobody_is_named(kit, node):
    locks = await remembering(kit, node.url)
    crash(node)
    result = await locks.once("job", at_most=LONGEST).run(time.sleep if kit.mode == "threads" else asyncio.sleep)
    assert isinstance(result, Skipped)
    assert result.by is None
    assert (await locks.once("job", at_most=LONGEST).inspect()).running is None


@rule(10)
async def test_records_are_evidence_for_those_who_have_no_memory(kit, node, client):
    locks = kit.interlock(node.url, max_ttl=LONGEST)
    await (await locks.lock("a", ttl=LONGEST).acquire()).release()
    client.save()
    lease = await kit.keep(locks.lock("a", ttl=LONGEST).acquire())  # this one the server will forget
    began = crash(node)
    fresh = kit.interlock(node.url, max_ttl=LONGEST)
    assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))
    second = await kit.keep(fresh.lock("a", ttl=LONGEST).acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    assert second.fence > lease.fence
    await second.release()


@rule(10)
async def test_who_held_it_is_a_witness(kit, node):
    locks = kit.interlock(node.url, max_ttl=LONGEST)
    lease = await kit.keep(locks.lock("a", ttl=LONGEST).acquire())
    crash(node)
    await until(lambda: lease.state == "lost")  # its renewal found nothing, and set the marker
    fresh = kit.interlock(node.url, max_ttl=LONGEST)
    assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))


@rule(10)
async def test_a_quarantine_excludes_foreigners_and_can_be_seen(kit, node, client):
    locks = await remembering(kit, node.url)
    await kit.keep(locks.lock("a", ttl=LONGEST).acquire())
    crash(node)
    await refused(locks.lock("a", ttl=LONGEST))
    assert not client.set("lock:a", "mine", nx=True, px=1000)
    state = await locks.lock("a", ttl=LONGEST).inspect()
    assert state.quarantined
    assert not state.held
    assert 0 < state.remaining <= LONGEST
    permits = locks.semaphore("s", 1, ttl=LONGEST)
    await refused(permits)
    assert 0 < (await permits.inspect()).quarantine <= LONGEST


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_it_is_ended_by_hand_for_all(kit, node, kind):
    one = kit.interlock(node.url, max_ttl=60)
    other = kit.interlock(node.url, max_ttl=60)
    for locks in (one, other):
        await (await locks.lock("hello").acquire()).release()
    await kit.keep(KINDS[kind](one, "a").acquire())
    crash(node)
    await refused(KINDS[kind](other, "a"))
    assert not await KINDS[kind](other, "a").revoke("not enough")
    assert await KINDS[kind](other, "a").revoke("all have been stopped", force=True)
    await (await KINDS[kind](other, "a").acquire(timeout=0)).release()
    await (await KINDS[kind](one, "a").acquire(timeout=0)).release()


@rule(10)
def test_a_server_that_says_a_second_too_much_shortens_nothing():
    """Its uptime is the difference of two times that are rounded down."""
    facts = Facts("r" * 40, "p" * 40, NO_REPLID, uptime=5, now_ms=100_000, replicas=0)  # it started at 95.0 to 96.0
    assert Epoch(facts, 60, "-", " ").since >= 96_000


@rule(10)
async def test_without_a_quarantine_it_is_granted_at_once(kit, node):
    locks = await remembering(kit, node.url, quarantine=False)
    await kit.keep(locks.lock("a", ttl=LONGEST).acquire())
    crash(node)
    await kit.keep(locks.lock("a", ttl=LONGEST).acquire(timeout=0))


@rule(10)
async def test_a_new_server_does_not_stall_its_first_user(kit, node):
    locks = kit.interlock(node.url, max_ttl=60)
    await kit.keep(locks.lock("a").acquire(timeout=0))


@rule(10)
async def test_a_restart_that_lost_nothing_need_not_wait(kit):
    with Node(config=DURABLE) as node:
        locks = kit.interlock(node.url, max_ttl=60)
        lease = await kit.keep(locks.lock("a").acquire())
        crash(node)
        assert await lease.release()
        fresh = kit.interlock(node.url, max_ttl=60)
        for each in (locks, fresh):
            await (await each.lock("a").acquire(timeout=0)).release()
            await (await each.lock("never had").acquire(timeout=0)).release()


@rule(10)
async def test_the_holder_goes_on_and_hands_over_only_when_it_is_over(kit, node, client):
    locks, other = await remembering(kit, node.url), await remembering(kit, node.url)
    lease = await kit.keep(locks.lock("a", ttl=LONGEST).acquire())
    client.save()
    began = crash(node)  # the lease itself was saved; what came after may be lost
    await lease.extend(LONGEST)
    assert await lease.release()
    second = await kit.keep(other.lock("a", ttl=LONGEST).acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    assert second.fence > lease.fence


@rule(10)
async def test_the_first_replica_is_no_failover(kit, node, client):
    locks = kit.interlock(node.url, max_ttl=60)
    await (await locks.lock("a").acquire()).release()
    before = client.info("replication")["master_replid"]
    with Node() as replica, redis.Redis.from_url(replica.url) as plain:
        plain.replicaof("127.0.0.1", node.port)
        await until(lambda: plain.info("replication")["master_link_status"] == "up")
        fresh = kit.interlock(node.url, max_ttl=60)
        await (await fresh.lock("a").acquire(timeout=0)).release()
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await (await locks.lock("a").acquire(timeout=5)).release()
    assert before  # it changes with the first replica, or not: neither may matter


@rule(10)
async def test_where_info_is_refused_there_is_none_and_that_is_said(kit, node, client, caplog):
    client.execute_command("ACL", "SETUSER", "blind", "on", ">x", "~*", "&*", "+@all", "-info")
    locks = kit.interlock(f"redis://blind:x@127.0.0.1:{node.port}/0", max_ttl=LONGEST)
    await kit.keep(locks.lock("a", ttl=LONGEST).acquire())
    assert "no quarantine" in caplog.text


@rule(10)
async def test_a_connection_that_outlives_a_demotion_is_not_trusted(kit):
    """There and back again while a client is idle: its connection still works, and knows nothing of it."""
    with Sentinels(replicas=1, sentinels=1, config={"min-replicas-to-write": "0"}) as group:
        locks = kit.interlock(group.url, max_ttl=LONGEST)
        await (await locks.lock("a", ttl=LONGEST).acquire()).release()
        node, other = group.nodes
        with redis.Redis.from_url(node.url) as plain:
            before = plain.info("replication")["master_replid"]
            await asyncio.sleep(1.1)  # it is idle for longer than a connection is trusted
            plain.replicaof("127.0.0.1", other.port)
            plain.replicaof("NO", "ONE")
            assert plain.info("replication")["master_replid"] != before
        assert "quarantine" in await refused(locks.lock("a", ttl=LONGEST))


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_those_who_come_later_do_not_lengthen_it(kit, kind):
    """Each of them knows only since when it knows the promoted replica itself."""
    with Sentinels(replicas=1, sentinels=0) as group:
        old, new = group.nodes
        locks = kit.interlock(old.tcp_url, max_ttl=LONGEST)
        await (await KINDS[kind](locks, "a").acquire()).release()
        group.catch_up(new)
        old.kill()
        group.promote(new)
        began = time.monotonic()

        async def granted():
            newcomer = kit.interlock(new.tcp_url, max_ttl=LONGEST)
            lease = await KINDS[kind](newcomer, "a").try_acquire()
            await newcomer.close()
            return lease

        await until(granted)
        assert time.monotonic() - began >= LONGEST - SLACK
