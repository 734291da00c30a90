"""D10: a server that may have forgotten leases grants nothing until all of them have run out.

Not here: the proofs and witnesses that end or begin a quarantine (test_quarantine_proofs.py), what holders and waiters
see of a restart besides (test_outages.py).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from itertools import product

import pytest
import redis

from harness.matrix import required
from harness.modes import outcome, until, waiting
from harness.servers import Missing, Node, faketime
from harness.topology import Sentinels
from interlock import AcquireTimeout, Skipped
from interlock._client.retries import Requests
from interlock._connect.target import address_of
from interlock._quarantine import lossless
from interlock._quarantine.identity import NO_REPLID, Facts, is_loading, parse_facts
from interlock._quarantine.lossless import Reading, least_ttl
from interlock._quarantine.server_history import ServerHistory
from interlock._quarantine.stamp import IdentityStamp
from interlock._transports import handshake
from interlock.primitives.codes import BUSY, GRANTED

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", starts="primaries with replicas")
DURABLE = {"appendonly": "yes", "appendfsync": "always"}
SLOWLY = {"key-load-delay": "50"}  # µs that the server pauses for each command of a log that it loads
AT_ONCE = {"repl-diskless-sync-delay": "0"}  # a replica is sent all without a pause
LONGEST = 4.0  # seconds: max_ttl in these tests, and ttl: what is refused must be asked for in this time
LONGER = 3 * LONGEST  # seconds: max_ttl of other processes of the fleet, and the ttl of their leases
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
    """Kill the server and start it again; returns when it was dead: no lease is younger."""
    node.kill()
    died = time.monotonic()
    node.restart()
    return died


async def remembering(mode, url, **options):
    """A client that has met the server."""
    made = mode.interlock(url, **{"max_ttl": LONGEST, **options})
    await (await made.lock("hello", ttl=LONGEST).acquire()).release()
    return made


async def refused(lockable) -> str:
    """The text of the AcquireTimeout of a caller that does not wait."""
    error = await outcome(lockable.acquire(timeout=0))
    assert isinstance(error, AcquireTimeout), error
    return str(error)


@rule(10)
@every_kind
async def test_after_a_restart_without_its_keys_a_server_grants_no_lock_that_may_be_held(mode, node, kind):
    dead, other = await remembering(mode, node.url), await remembering(mode, node.url)
    await mode.keep(KINDS[kind](dead, "a").acquire())
    began = crash(node)
    assert "quarantine" in await refused(KINDS[kind](other, "a"))
    fresh = mode.interlock(node.url, max_ttl=LONGEST)
    await refused(KINDS[kind](fresh, "a"))  # it has no memory of its own, but finds what the other one wrote
    lease = await mode.keep(KINDS[kind](fresh, "a").acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    await lease.release()
    await (await KINDS[kind](other, "a").acquire(timeout=0)).release()  # once it is over, it is over for all


@rule(4, 10)
@pytest.mark.asyncio_only
@pytest.mark.parametrize("first", ["write", "read"])
async def test_a_reader_beside_its_own_lease_enters_after_the_quarantine_whoever_waits(mode, server_pool, first):
    """The reader stood in the queue, so it waited for its own lease, or for a writer that waited for this lease."""
    with server_pool.spare("valkey-9.1", config=DURABLE) as node:
        locks, others = [(await remembering(mode, node.url)).rwlock("a", ttl=LONGEST) for _ in range(2)]
        lease = await getattr(locks, first)().acquire()
        crash(node)
        await lease.extend(LONGEST)  # it survived, and is confirmed
        writing = asyncio.ensure_future(others.write().acquire())
        await until(lambda: waiting(locks.read(), 1))
        assert "quarantine" in await refused(locks.read())
        async with asyncio.timeout(25):  # it would wait for ever in the queue
            reading = await locks.read().acquire(timeout=None)
        assert await lease.release()
        reading.ensure()
        assert await others.read().try_acquire() is None  # the writer was there first
        assert await reading.release()
        await (await writing).release()


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore", "multi"])
async def test_log_and_error_say_which_names_wait_why_and_how_long(mode, node, client, caplog, kind):
    locks = await remembering(mode, node.url)
    client.save()
    crash(node)
    error = await outcome(KINDS[kind](locks, "never used").acquire(timeout=0))
    assert isinstance(error, AcquireTimeout)
    assert (error.quarantined, error.holder) == (True, None)
    left = re.search(
        r"'.*never used'.* is in quarantine for (\S+) s more, since its server was (.*), and may", str(error)
    )
    assert left is not None and 0 < float(left[1]) <= LONGEST + 1
    assert left[2] == "restarted or replaced"
    assert "A smaller max_ttl makes" in str(error)
    (text,) = caplog.messages
    logged = re.search(r"was restarted .* for (\S+) s it grants only names that it has granted since then\.", text)
    assert logged is not None and float(left[1]) <= float(logged[1]) <= LONGEST + 1
    assert "Every other name waits, used or not. FAILOVER to a replica" in text

    fresh = mode.interlock(node.url, max_ttl=LONGEST)
    assert "was started with the keys of a snapshot or a log" in await refused(KINDS["lock"](fresh, "another"))
    assert re.search(r"started a moment ago with the keys of .* for \S+ s it grants only", caplog.messages[-1])
    client.delete("lock:another")
    assert await locks.lock("granted since").revoke("nothing is at work", force=True)
    for each in (locks, fresh):
        await (await each.lock("granted since", ttl=LONGEST).acquire(timeout=0)).release()


@rule(10)
async def test_in_a_quarantine_a_job_that_may_still_run_is_skipped_and_its_runner_is_not_named(mode, node):
    locks = await remembering(mode, node.url)
    crash(node)
    result = await locks.once("job", at_most=LONGEST).run(time.sleep if mode.name == "threads" else asyncio.sleep)
    assert isinstance(result, Skipped)
    assert result.by is None
    assert (await locks.once("job", at_most=LONGEST).inspect()).running is None


@rule(10)
async def test_a_record_of_an_earlier_server_is_evidence_for_a_new_client(mode, node, client):
    locks = mode.interlock(node.url, max_ttl=LONGEST)
    await (await locks.lock("a", ttl=LONGEST).acquire()).release()
    client.save()
    lease = await mode.keep(locks.lock("a", ttl=LONGEST).acquire())  # this one the server will forget
    began = crash(node)
    fresh = mode.interlock(node.url, max_ttl=LONGEST)
    assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))
    second = await mode.keep(fresh.lock("a", ttl=LONGEST).acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    assert second.fence > lease.fence
    await second.release()


@rule(10)
@pytest.mark.runs_on("each server", full="each server in both modes")
@pytest.mark.parametrize("durable", ["snapshot", "log"])
async def test_a_server_that_began_with_keys_grants_no_lock_of_which_it_has_no_record(mode, server_pool, cell, durable):
    """A client acquired the name only after the snapshot; now a client that was never there before asks for it."""
    with server_pool.spare(cell.kind, config=DURABLE if durable == "log" else {}) as node:
        locks = mode.interlock(node.url, max_ttl=30)
        await (await locks.lock("of before").acquire()).release()
        with redis.Redis.from_url(node.url) as plain:
            if durable == "snapshot":
                plain.save()
            lease = await mode.keep(locks.lock("a", renew=False).acquire())
            if durable == "log":  # what had not reached the disk
                plain.delete("lock:a", "{lock:a}{record}")
        crash(node)
        assert "quarantine" in await refused(mode.interlock(node.url, max_ttl=30).lock("a", ttl=LONGEST))
        assert lease.remaining() > 0


@rule(10)
async def test_a_client_that_connects_while_the_server_loads_learns_that_it_began_with_keys(
    mode, server_pool, monkeypatch
):
    """Until it has loaded its log, INFO says nothing of the log, and looks like that of a server that began empty."""
    seen = []
    monkeypatch.setattr(handshake, "is_loading", lambda reply: seen.append(is_loading(reply)) or seen[-1])
    with server_pool.spare("valkey-9.1", config=DURABLE | SLOWLY) as node, redis.Redis.from_url(node.url) as plain:
        with plain.pipeline(transaction=False) as pipeline:
            for number in range(8000):
                pipeline.set(f"what others keep there {number}", 1)
            pipeline.execute()
        node.kill()
        restart = asyncio.create_task(asyncio.to_thread(node.restart))
        fresh = mode.interlock(node.url, max_ttl=30)
        while not restart.done():
            await outcome(fresh.lock("a", ttl=LONGEST).acquire(timeout=0))
        assert seen[0]
        await restart
        assert plain.ping()  # restart() waits until it has loaded
        assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "read", "multi"])
async def test_a_server_that_began_with_keys_quarantines_every_kind_of_lock(mode, node, client, kind, caplog):
    client.set("what others keep there", 1)
    client.save()
    began = crash(node)
    fresh, other = (mode.interlock(node.url, max_ttl=LONGEST) for _ in range(2))
    await refused(KINDS[kind](fresh, "a"))
    assert "snapshot or a log" in caplog.text
    lease = await mode.keep(KINDS[kind](fresh, "a").acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    await lease.release()
    for each in (fresh, other):
        await (await KINDS[kind](each, "never had").acquire(timeout=0)).release()


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_the_quarantine_of_a_server_that_began_with_keys_ends_by_revoke_for_all(mode, node, client, kind):
    client.set("what others keep there", 1)
    client.save()
    crash(node)
    fresh, other = (mode.interlock(node.url, max_ttl=60) for _ in range(2))
    await refused(KINDS[kind](fresh, "a"))
    assert await KINDS[kind](fresh, "a").revoke("nothing is at work", force=True)
    for each in (other, fresh):
        await (await KINDS[kind](each, "a").acquire(timeout=0)).release()


@rule(10)
@pytest.mark.runs_on("each server", full="each server in both modes")
async def test_a_server_that_began_without_keys_has_no_quarantine(mode, server_pool, cell):
    """Nor has it one when it has keys by now, a log, and a replica, which has loaded all of them."""
    with (
        server_pool.spare(cell.kind, config={"appendonly": "yes"} | AT_ONCE) as node,
        server_pool.spare(cell.kind) as replica,
    ):
        for _ in range(3):
            each = mode.interlock(node.url, max_ttl=60)
            for name in ("a", "b"):
                await (await each.lock(name).acquire(timeout=0)).release()
        with redis.Redis.from_url(replica.url) as plain:
            plain.replicaof("127.0.0.1", node.port)
            await until(lambda: plain.info("replication")["master_link_status"] == "up")
            for name in ("b", "c"):
                await (await mode.interlock(node.url, max_ttl=60).lock(name).acquire(timeout=0)).release()
            plain.replicaof("NO", "ONE")
        await (await mode.interlock(replica.url, max_ttl=60).lock("d").acquire(timeout=0)).release()


@rule(10)
@pytest.mark.runs_on("each server", full="each server in both modes")
async def test_a_primary_with_replicas_that_began_with_a_snapshot_is_not_taken_for_a_promoted_replica(
    mode, server_pool, cell
):
    """From 7.0 on it takes its replication history from the snapshot, and then it looks like one."""
    with server_pool.spare(cell.kind, config=AT_ONCE) as node, server_pool.spare(cell.kind) as replica:
        with redis.Redis.from_url(node.url) as plain, redis.Redis.from_url(replica.url) as follower:
            plain.set("what others keep there", 1)
            follower.replicaof("127.0.0.1", node.port)
            await until(lambda: follower.info("replication")["master_link_status"] == "up")
            await until(lambda: plain.info("persistence")["rdb_bgsave_in_progress"] == 0)
            plain.save()
        crash(node)
        fresh = mode.interlock(node.url, max_ttl=LONGEST)
        assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))


@rule(10)
async def test_a_client_that_held_the_lock_is_a_witness_of_the_restart(mode, node):
    locks = mode.interlock(node.url, max_ttl=LONGEST)
    lease = await mode.keep(locks.lock("a", ttl=LONGEST).acquire())
    crash(node)
    await until(lambda: lease.state == "lost")  # its renewal found nothing, and set the marker
    fresh = mode.interlock(node.url, max_ttl=LONGEST)
    assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))


@rule(10)
async def test_a_quarantine_excludes_foreign_holders_and_inspect_shows_it(mode, node, client):
    locks = await remembering(mode, node.url)
    await mode.keep(locks.lock("a", ttl=LONGEST).acquire())
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
async def test_revoke_by_force_ends_a_quarantine_for_all_clients(mode, node, kind):
    one = mode.interlock(node.url, max_ttl=60)
    other = mode.interlock(node.url, max_ttl=60)
    for locks in (one, other):
        await (await locks.lock("hello").acquire()).release()
    await mode.keep(KINDS[kind](one, "a").acquire())
    crash(node)
    await refused(KINDS[kind](other, "a"))
    assert not await KINDS[kind](other, "a").revoke("not enough")
    assert await KINDS[kind](other, "a").revoke("all have been stopped", force=True)
    await (await KINDS[kind](other, "a").acquire(timeout=0)).release()
    await (await KINDS[kind](one, "a").acquire(timeout=0)).release()


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore", "write"])
@pytest.mark.parametrize("marked", [True, False])
async def test_a_revoke_that_ends_a_quarantine_ends_no_later_quarantine(mode, node, client, kind, marked, monkeypatch):
    """The server restarts once more while the message is on its way, and has lost other leases by then."""
    locks = mode.interlock(node.url, max_ttl=60)
    await (await KINDS[kind](locks, "a").acquire()).release()
    client.save()
    crash(node)
    await refused(KINDS[kind](locks, "a"))
    if not marked:
        client.delete("lock:a")
    client.save()
    query, crashes = Requests.query, []

    async def delayed(requests, primitive, verb, *args):
        if verb == "revoke" and not crashes:
            crashes.append(crash(node))
        return await query(requests, primitive, verb, *args)

    monkeypatch.setattr(Requests, "query", delayed)
    assert not await KINDS[kind](locks, "a").revoke("nothing is at work", force=True)
    assert crashes
    for each in (locks, mode.interlock(node.url, max_ttl=60)):
        assert "quarantine" in await refused(KINDS[kind](each, "a"))
    assert await KINDS[kind](locks, "a").revoke("nothing is at work here either", force=True)
    await (await KINDS[kind](locks, "a").acquire(timeout=0)).release()


@rule(7)
@pytest.mark.parametrize("kind", ["lock", "semaphore", "write"])
async def test_the_fence_after_a_revoked_quarantine_is_higher_than_any_lost_one(mode, node, client, kind):
    """The clock may be behind that of the server which granted the lost lease, by as much as the whole quarantine."""
    locks = mode.interlock(node.url, max_ttl=60)
    await (await locks.lock("hello").acquire()).release()
    lost = await mode.keep(KINDS[kind](mode.interlock(node.url, max_ttl=60), "a").acquire())
    crash(node)
    await refused(KINDS[kind](locks, "a"))
    assert await KINDS[kind](locks, "a").revoke("nothing is at work", force=True)
    first = await KINDS[kind](locks, "a").acquire(timeout=0)
    await first.release()
    second = await KINDS[kind](locks, "a").acquire(timeout=0)
    await second.release()
    assert lost.fence + 50e6 < first.fence < second.fence
    assert client.pttl("{lock:a}{record}") > (second.fence - lost.fence) / 1000


@rule(10)
def test_an_uptime_that_is_a_second_too_long_shortens_no_quarantine():
    """The uptime is the difference of two times that are rounded down."""
    facts = Facts("r" * 40, "p" * 40, NO_REPLID, uptime=5, now_ms=100_000, replicas=0)  # it started at 95.0 to 96.0
    assert IdentityStamp(facts, 60, "-").since_ms >= 96_000


@rule(10)
def test_an_uptime_that_is_a_second_too_long_hides_no_young_process():
    """The process may have run for 59 s only, and what its snapshot lacks may last for another second."""
    where = address_of("redis://127.0.0.1", for_asyncio=False)
    facts = Facts("r" * 40, "p" * 40, NO_REPLID, uptime=60, now_ms=100_000, replicas=0, loaded=True)
    assert ServerHistory(60.0).identify(facts, where).in_quarantine


@rule(10)
def test_a_part_of_a_millisecond_shortens_no_quarantine():
    """A promoted server whose identity the client read at 7 ms and 1 µs may have begun to grant at that moment."""
    info = b"run_id:%s\r\nmaster_replid:%s\r\nmaster_replid2:%s" % (b"a" * 40, b"b" * 40, b"c" * 40)
    facts = parse_facts(info, b"", [b"0", b"7001"])
    assert facts is not None and facts.promoted
    assert IdentityStamp(facts, 60, "-").since_ms == 8


@rule(10)
async def test_a_client_with_quarantine_false_acquires_at_once_after_a_restart(mode, node):
    locks = await remembering(mode, node.url, quarantine=False)
    await mode.keep(locks.lock("a", ttl=LONGEST).acquire())
    crash(node)
    await mode.keep(locks.lock("a", ttl=LONGEST).acquire(timeout=0))


@rule(10)
async def test_a_new_server_does_not_stall_its_first_user(mode, node):
    locks = mode.interlock(node.url, max_ttl=60)
    await mode.keep(locks.lock("a").acquire(timeout=0))


@rule(10)
async def test_appendfsync_always_after_a_restart_proves_nothing_about_the_time_before(mode):
    """The file says appendfsync always; somebody had changed that setting before the power failed."""
    with Node(config=DURABLE) as node, redis.Redis.from_url(node.url) as plain:
        locks = mode.interlock(node.url, max_ttl=LONGEST)
        await (await locks.lock("a", ttl=LONGEST).acquire()).release()
        plain.config_set("appendfsync", "everysec")
        log = next((node.socket.parent / "appendonlydir").glob("*.incr.aof"))
        written = log.stat().st_size
        lease = await mode.keep(locks.lock("a", ttl=LONGEST, renew=False).acquire())
        node.kill()
        with log.open("r+b") as file:
            file.truncate(written)  # what had not reached the disk
        node.restart()
        fresh = mode.interlock(node.url, max_ttl=LONGEST)
        assert "quarantine" in await refused(fresh.lock("a", ttl=LONGEST))
        await (await fresh.lock("a", ttl=LONGEST).acquire(timeout=30)).release()
        assert lease.remaining() == 0


@pytest.fixture
def clocks():
    """A primary and a replica, whose clocks can be set."""
    try:
        faketime()
    except Missing as missing:
        required(f"no libfaketime here: {missing}")
    with Sentinels(replicas=1, sentinels=0, clock=True) as group:
        yield group


async def handed_over(group, ahead: float):
    """Make the replica, whose clock is so many seconds ahead, take over without a loss; returns it."""
    old, new = group.nodes
    new.shift(ahead)
    with redis.Redis.from_url(old.url) as one, redis.Redis.from_url(new.url) as other:
        await until(lambda: abs(other.time()[0] - one.time()[0] - ahead) < 1.1)
    await asyncio.to_thread(group.handover)
    return new


@rule(5, 10)
async def test_a_failover_to_a_server_whose_clock_is_ahead_begins_a_quarantine(mode, clocks, caplog):
    """The replica has every lease with the time at which it ends, which is sooner by its clock."""
    locks = mode.interlock(clocks.nodes[0].tcp_url, max_ttl=4)
    lease = await mode.keep(locks.lock("a", ttl=4, renew=False).acquire())
    new = await handed_over(clocks, 3)
    fresh = mode.interlock(new.tcp_url, max_ttl=4)
    second = await mode.keep(fresh.lock("a", ttl=4).acquire(timeout=30))
    assert lease.remaining() == 0
    assert second.fence > lease.fence
    assert "ahead of the clock" in caplog.text


@rule(5, 10)
async def test_a_failover_to_a_server_whose_clock_is_behind_begins_no_quarantine(mode, clocks):
    locks = mode.interlock(clocks.nodes[0].tcp_url, max_ttl=60)
    for kind in ("lock", "semaphore"):
        await (await KINDS[kind](locks, kind).acquire()).release()
    new = await handed_over(clocks, -3)
    fresh = mode.interlock(new.tcp_url, max_ttl=60)
    for kind in ("lock", "semaphore"):
        await (await KINDS[kind](fresh, kind).acquire(timeout=5)).release()


@rule(5, 10)
async def test_a_clock_that_is_ahead_by_a_little_quarantines_only_short_leases(mode, monkeypatch):
    monkeypatch.setattr(lossless, "least_ttl", lambda *_: 3.0)
    kinds = {"lock": lambda locks, name, ttl: locks.lock(name, ttl=ttl),
             "semaphore": lambda locks, name, ttl: locks.semaphore(name, 1, ttl=ttl)}  # fmt: skip
    with Sentinels(replicas=1, sentinels=0) as group:
        locks = mode.interlock(group.nodes[0].tcp_url, max_ttl=60)
        for kind, of in kinds.items():
            await (await of(locks, f"short {kind}", 2.9).acquire()).release()
            await (await of(locks, f"long {kind}", 3).acquire()).release()
        new = await asyncio.to_thread(group.handover)
        fresh = mode.interlock(new.tcp_url, max_ttl=60)
        for kind, of in kinds.items():
            await (await of(fresh, f"long {kind}", 1).acquire(timeout=5)).release()
            await refused(of(fresh, f"short {kind}", 30))


@rule(5)
def test_clocks_that_differ_by_less_than_the_margin_of_a_lease_count_as_equal():
    """A holder stops before the server does, by a thousandth of the ttl; half of that is for clocks that differ."""

    def least(ahead: float, trip: float = 0.0) -> float:
        return least_ttl(Reading({}, 100 + ahead, 5, 5 + trip), Reading({}, 101, 6, 6 + trip), "here", 60)

    assert least(0) == least(-10) == 0
    assert least(0.0004) == 0
    assert least(0.002) == pytest.approx(4)
    assert least(0.001, trip=0.001) == pytest.approx(4)  # it may be so much
    assert least(1) == math.inf


@rule(10)
def test_a_lease_that_came_through_two_lossless_failovers_is_lossless():
    """Records of the first server are valid at the third, for leases that the clocks on the way did not cut short."""
    memory = ServerHistory(60.0)
    where = address_of("redis://127.0.0.1", for_asyncio=False)
    one, two, three = (
        memory.identify(Facts(each * 40, each * 40, "f" * 40, uptime=500, now_ms=1_000_000, replicas=1), where)
        for each in "abc"
    )
    two.mark_lossless(one.identity, 2.0)
    three.mark_lossless(two.identity, 3.0)
    assert three.text.split()[4:] == ["-", f"{two.identity}/3000", f"{one.identity}/5000"]


@rule(10)
@pytest.mark.parametrize("least_ttl", [0.0, 2.0])
def test_a_quarantine_keeps_its_beginning_if_nothing_was_lost_since(least_ttl):
    """Not if the clocks cut short leases that began in the meantime."""
    memory = ServerHistory(60.0)
    where = address_of("redis://127.0.0.1", for_asyncio=False)

    def promoted(each):
        return memory.identify(Facts(each * 40, each * 40, "f" * 40, uptime=500, now_ms=1_000_000, replicas=1), where)

    one, two = promoted("a"), promoted("b")
    two.met_at -= 20  # seconds before the third
    three = promoted("c")
    assert three.since_ms == 1_000_000
    three.mark_lossless(two.identity, least_ttl)
    assert three.previous == one.identity
    assert three.since_ms == pytest.approx(1_000_000 if least_ttl else 980_000, abs=500)
    assert three.in_quarantine


def past_in(stamp):
    """Which server was there before, as the messages with this stamp say."""
    return re.split("[ +*]", stamp.text)[4]


def meeting(memory, uptime=500, *, loaded=False):
    """A function: the stamp of a connection to a server, which the sentinels name under this epoch."""
    where = address_of("redis://127.0.0.1", for_asyncio=False)

    def meet(server, epoch=None, replid=None):
        facts = Facts(server * 40, (replid or server) * 40, NO_REPLID, uptime, 1_000_000, replicas=1, loaded=loaded)
        for each in memory.stamps.values():
            each.answered_at = -math.inf  # long before the next process started: see test_spares.py
        return memory.identify(facts, where, 0.0, epoch)

    return meet


@rule(10)
def test_two_event_loops_that_meet_a_restarted_server_at_once_agree_what_was_there_before(monkeypatch):
    """They may run in two threads, which share the history without a mutex."""
    memory = ServerHistory(60.0)
    meet, make, stamps = meeting(memory), ServerHistory._make_stamp, []
    before = meet("a")

    def slow(self, *args):
        monkeypatch.setattr(ServerHistory, "_make_stamp", make)
        stamps.append(meet("b"))  # in the other thread
        return make(self, *args)

    monkeypatch.setattr(ServerHistory, "_make_stamp", slow)
    stamps.append(meet("b"))
    assert stamps[0] is stamps[1] is meet("b")
    assert stamps[0].previous == before.identity

    def slower(self, facts, previous, grace):
        monkeypatch.setattr(ServerHistory, "_make_stamp", make)
        meet("c")
        return make(self, facts, memory.latest.identity, grace)  # of the server itself

    monkeypatch.setattr(ServerHistory, "_make_stamp", slower)
    assert meet("c").previous == stamps[0].identity


@rule(10)
def test_an_event_loop_takes_no_server_for_a_returned_one_that_another_is_just_meeting():
    memory = ServerHistory(60.0)
    meet, stamps = meeting(memory), []
    before = meet("a")

    class Stamps(dict):
        def setdefault(self, identity, stamp):
            published = super().setdefault(identity, stamp)
            if not stamps:
                stamps.append(published)
                stamps.append(meet("b"))  # in the other thread
            return published

    memory.stamps = Stamps(memory.stamps)
    assert meet("b") is stamps[0] is stamps[1]
    assert stamps[0].previous == before.identity
    assert meet("a").previous.startswith("@"), "this one has returned"


@rule(10)
def test_a_late_reply_makes_no_earlier_server_the_latest():
    """One of the sentinels may not say under which epoch it names a server."""
    meet = meeting(ServerHistory(60.0))
    first, second = meet("a", 1), meet("b", 2)
    assert meet("a", 1) is first, "a late reply"
    assert meet("a").previous == f"@{second.identity}"
    assert meet("b").previous == f"@{first.identity}"


@rule(10)
def test_a_proof_during_a_failover_hides_no_server_that_was_there_before(monkeypatch):
    """The proof is about a failover before: another event loop may have it while this one meets the next server."""
    memory = ServerHistory(60.0)
    meet = meeting(memory, uptime=1)
    first, second = meet("a"), meet("b")
    in_quarantine = IdentityStamp.in_quarantine.fget

    def proven(self):
        was_so = in_quarantine(self)
        second.mark_lossless(first.identity)
        return was_so

    monkeypatch.setattr(IdentityStamp, "in_quarantine", property(proven))
    assert past_in(meet("c")) in (first.identity, second.identity)


@rule(10)
@pytest.mark.parametrize("met", ["both", "one"])
def test_a_primary_that_returns_under_another_epoch_begins_a_quarantine(met):
    meet = meeting(ServerHistory(60.0))
    first = meet("a", 1)
    assert meet("a", 1) is first
    if met == "both":
        meet("b", 2)
        assert meet("a", 1) is first  # a connection that was opened before the failover, and is ready after it
        meet("b", 2)
    second = meet("a", 3)
    assert second.in_quarantine
    assert second.text == f"{first.identity}*1000000 60000 0 @3"  # not as old as its process, and nothing is lossless
    assert meet("a", 3) is second
    third = meet("c", 4)
    assert third.previous == "@3"  # the quarantine is not over
    assert meet("a", 5).previous == "@5"  # revoke(force=True) ends one of them, and no later one


@rule(10)
def test_a_server_that_returns_without_an_epoch_is_known_by_the_server_in_between():
    meet = meeting(ServerHistory(60.0))
    first, other = meet("a"), meet("b")
    assert meet("b") is other
    assert meet("a").text == f"{first.identity}*1000000 60000 0 @{other.identity}"


@rule(10)
def test_sentinels_that_count_anew_begin_no_quarantine():
    """Their epochs start at 0 if all of them are set up again."""
    meet = meeting(ServerHistory(60.0))
    first = meet("a", 5)
    assert meet("a", 0) is first
    assert meet("a", 1) is not first


@rule(10)
async def test_a_holder_that_the_server_remembers_goes_on_and_hands_over_after_the_quarantine(mode, node, client):
    locks, other = await remembering(mode, node.url), await remembering(mode, node.url)
    lease = await mode.keep(locks.lock("a", ttl=LONGEST).acquire())
    client.save()
    began = crash(node)  # the lease itself was saved; what came after may be lost
    await lease.extend(LONGEST)
    assert await lease.release()
    second = await mode.keep(other.lock("a", ttl=LONGEST).acquire(timeout=30))
    assert time.monotonic() - began >= LONGEST - SLACK
    assert second.fence > lease.fence


@rule(10)
async def test_attaching_the_first_replica_is_no_failover(mode, node, client):
    locks = mode.interlock(node.url, max_ttl=60)
    await (await locks.lock("a").acquire()).release()
    before = client.info("replication")["master_replid"]
    with Node() as replica, redis.Redis.from_url(replica.url) as plain:
        plain.replicaof("127.0.0.1", node.port)
        await until(lambda: plain.info("replication")["master_link_status"] == "up")
        fresh = mode.interlock(node.url, max_ttl=60)
        await (await fresh.lock("a").acquire(timeout=0)).release()
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await (await locks.lock("a").acquire(timeout=5)).release()
    assert before  # it changes with the first replica, or not: neither may matter


@rule(10)
async def test_without_the_right_to_info_there_is_no_quarantine_and_a_warning_says_so(mode, node, client, caplog):
    client.execute_command("ACL", "SETUSER", "blind", "on", ">x", "~*", "&*", "+@all", "-info")
    locks = mode.interlock(f"redis://blind:x@127.0.0.1:{node.port}/0", max_ttl=LONGEST)
    await mode.keep(locks.lock("a", ttl=LONGEST).acquire())
    assert "no quarantine" in caplog.text


@rule(10)
async def test_a_connection_that_outlives_a_demotion_is_not_trusted(mode):
    """A primary became a replica and a primary again while a client was idle: the connection still works."""
    with Sentinels(replicas=1, sentinels=1, config={"min-replicas-to-write": "0"}) as group:
        locks = mode.interlock(group.url, max_ttl=LONGEST)
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
async def test_later_clients_do_not_lengthen_a_quarantine(mode, kind):
    """Each of them knows only since when it has known the promoted replica itself."""
    with Sentinels(replicas=1, sentinels=0) as group:
        old, new = group.nodes
        locks = mode.interlock(old.tcp_url, max_ttl=LONGEST)
        await (await KINDS[kind](locks, "a").acquire()).release()
        group.catch_up(new)
        old.kill()
        group.promote(new)
        began = time.monotonic()

        async def granted():
            newcomer = mode.interlock(new.tcp_url, max_ttl=LONGEST)
            lease = await KINDS[kind](newcomer, "a").try_acquire()
            await newcomer.close()
            return lease

        await until(granted)
        assert time.monotonic() - began >= LONGEST - SLACK


# Processes that differ in max_ttl


async def quarantine_ends(lockable) -> float:
    """When the quarantine ends, by the error of a caller that does not wait."""
    text = await refused(lockable)
    left = re.search(r"in quarantine for (\S+) s more", text)
    assert left is not None, text
    return time.monotonic() + float(left[1])


async def queue_and_get(mode, first, second, client):
    holder = await first.acquire()
    waiter = asyncio.ensure_future(second.acquire(timeout=30))
    await until(lambda: client.zcard("{lock:a}{queue}") == 1)
    await holder.release()
    await mode.keep(waiter)


@rule(10)
@pytest.mark.parametrize(
    ("kind", "how"),
    [*product(("lock", "semaphore"), ("granted", "handed over", "extended")), ("semaphore", "beside a shorter one")],
)
async def test_a_lost_lease_that_was_longer_than_max_ttl_of_the_next_client_ends_its_quarantine(
    mode, node, client, kind, how
):
    """The server has the record, which says how long the lease may last, and not the lease."""
    locks = mode.interlock(node.url, max_ttl=LONGER)
    limit = 2 if how == "beside a shorter one" else 1

    def named(owner, ttl):
        return owner.lock("a", ttl=ttl) if kind == "lock" else owner.semaphore("a", limit, ttl=ttl)

    if how == "handed over":
        other = mode.interlock(node.url, max_ttl=LONGER)
        await queue_and_get(mode, named(other, LONGEST), named(locks, LONGER), client)
    elif how == "extended":
        await (await mode.keep(named(locks, LONGEST).acquire())).extend(LONGER)
    else:
        await mode.keep(named(locks, LONGER).acquire())
    if how == "beside a shorter one":
        await mode.keep(named(locks, LONGEST).acquire())
    client.save()
    began = crash(node)
    client.delete("lock:a", "{lock:a}{shares}")
    ends = await quarantine_ends(named(mode.interlock(node.url, max_ttl=LONGEST), LONGEST))
    assert began + LONGER - SLACK <= ends <= began + LONGER + 2


@pytest.fixture
def asked(monkeypatch):
    """A function: the reply of lock.lua to an acquire, in a server of this identity that began now."""
    pytest.importorskip("lupa")
    from model import script_model as walk

    walk.able(monkeypatch)
    world = walk.World("lock", [b"lock", b"record", b"queue", b"waiters", b"gone"])

    def ask(letter, max_ttl, *, previous="-", grace=0.0, ttl=LONGEST):
        facts = Facts(letter * 40, letter * 40, NO_REPLID, uptime=0, now_ms=int(world.now), replicas=0)
        text = IdentityStamp(facts, max_ttl, previous, grace).text
        words = ["acquire", f"me/{letter}", str(int(ttl * 1000)), "3000", "0", "c", "0", "", "lock", text]
        return world.server.eval(world.source, world.keys, [word.encode() for word in words])

    ask.data = world.server.data
    return ask


@rule(10)
def test_an_old_primary_may_have_renewed_a_lease_that_was_longer_than_max_ttl(asked):
    """For the seconds of the isolation grace, so they are added to the ttl in the record, too."""
    assert asked("a", LONGER, ttl=LONGER)[0] == GRANTED
    del asked.data[b"lock"]
    code, marker, pttl, _ = asked("b", LONGEST, grace=2.0)
    assert (code, marker[:12], pttl) == (BUSY, b"!quarantine:", (LONGER + 2.0) * 1000)


@rule(10)
def test_the_largest_max_ttl_counts_through_one_more_failover(asked):
    """A lease of the first server may be as long as any client of the second allows; nobody has a record."""
    for letter, max_ttl in (("b", LONGER), ("c", LONGEST)):
        code, marker, pttl, _ = asked(letter, max_ttl, previous=f"{'a' * 12}:{'a' * 12}")
        assert (code, marker[12:25], pttl) == (BUSY, b"a" * 12 + b":", LONGER * 1000)


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore", "multi"])
async def test_a_quarantine_lasts_as_long_as_the_largest_max_ttl_that_asked_for_the_name(mode, node, kind):
    """Nobody had used the name, so the server knows only what the clients say."""
    short, long = await remembering(mode, node.url), await remembering(mode, node.url, max_ttl=LONGER)
    began = crash(node)
    assert await quarantine_ends(KINDS[kind](short, "a")) <= began + LONGEST + 2
    assert await quarantine_ends(KINDS[kind](long, "a")) >= began + LONGER - SLACK
    for each in (short, mode.interlock(node.url, max_ttl=LONGEST)):
        assert began + LONGER - SLACK <= await quarantine_ends(KINDS[kind](each, "a")) <= began + LONGER + 2
    if kind != "multi":
        assert await KINDS[kind](short, "a").revoke("nothing is at work", force=True)
        for each in (short, long):
            await (await KINDS[kind](each, "a").acquire(timeout=0)).release()
