"""A cluster: locks, waiters and leases follow their slot to whichever node serves it, and delay no other slot."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis
import redis.asyncio

import interlock.aio
from harness.clock import machine_time
from harness.matrix import BASE, MODES, required
from harness.modes import SLACK, outcome, queued, until
from harness.servers import Missing, faketime
from harness.topology import Cluster
from harness.topology.group import ask, info, wait
from interlock import AcquireTimeout, ConfigError, LeaseLost, LeaseState, Unavailable
from interlock._client import waiting as _waiters
from interlock._connect.target import address_of
from interlock._protocol.run_to_end import run
from interlock._protocol.timing import RETRY_FOR
from interlock._quarantine.identity import Facts
from interlock._quarantine.server_history import ServerHistory
from interlock._quarantine.stamp import SlotHistory
from interlock._servers import single, slot_map
from interlock._servers.slots import SLOTS, slot_of, tag_of

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="clusters of valkey-9.1, redis-7.0 and redis-6.2")
PLAIN = [f"job-{number}" for number in range(12)]
TAGGED = [f"job:{{{number}}}:x" for number in range(6)]


@pytest.fixture(scope="module", params=[BASE])
def cluster(request):
    """Three shards with a replica each, for all tests of this module."""
    try:
        made = Cluster(request.param)
    except Missing as missing:
        required(f"no {request.param} here: {missing}")
        raise
    with made:
        yield made


@pytest.fixture
def server(cluster):
    """The cluster: `mode` connects to it."""
    return cluster


@pytest.fixture
def harmed(clean, cluster):
    """The cluster, for a test that harms it; it is whole again after the test."""
    yield cluster
    for node in cluster.nodes:
        if not node.running:
            node.restart()
        node.resume()
    cluster.catch_up(*cluster.nodes)
    cluster.wait_ok()


@rule(6)
async def test_a_with_waits_for_the_reply_to_its_release_whatever_confirm_says(mode, clean):
    """The reply may be a redirection, which only a caller that waits can follow."""
    locks = mode.interlock(confirm=False)
    with pytest.raises(LeaseLost):
        async with locks.lock("a"):
            clean.delete("lock:a")


def subscription(mode, locks, name):
    """Whether this client is subscribed for a lock, and to which channel."""
    return mode.session(locks).server.subscription_of(f"lock:{name}")


def server_of(mode, locks):
    return mode.session(locks).server


def one_on_each(cluster, prefix="on"):
    """A name on each of the shards."""
    found = {}
    for number in range(1000):
        name = f"{prefix}-{number}"
        found.setdefault(cluster.primary_of(f"lock:{name}"), name)
        if len(found) == cluster.shards:
            break
    return found


async def use(lockable, timeout=None):
    """A short section."""
    async with await lockable.acquire(timeout=timeout) as lease:
        lease.ensure()


async def knows_all(mode, locks):
    """Make a client meet all primaries: from then on it is a witness of their restarts."""
    await use(locks.lock("hello"))
    server = server_of(mode, locks)
    await until(
        lambda: all(member is not None and member.history.identity_at_map for member in {*server.slots.serving})
    )
    return server


# Slots and places


def test_computed_slots_are_those_of_the_server(cluster):
    with redis.Redis(port=cluster.nodes[0].port) as client:
        for key in ("a", "lock:{a}", "{lock:a}{queue}", "x{}y", "x{", "{}{a}", "lock:ä", "}{a}", "a{b{c}d}"):
            assert slot_of(key) == slot_of(key.encode()) == client.cluster("KEYSLOT", key), key


def test_there_is_a_tag_for_every_slot():
    assert all(slot_of(f"interlock:ab{{{tag_of(slot)}}}") == slot for slot in range(SLOTS))


async def test_names_with_and_without_hash_tags_work_on_all_shards(mode, clean, cluster):
    locks, others = mode.interlock(), mode.interlock()
    assert len({cluster.primary_of(f"lock:{name}") for name in (*PLAIN, *TAGGED)}) == cluster.shards
    for name in (*PLAIN, *TAGGED):
        first = await locks.lock(name).acquire()
        assert await others.lock(name).try_acquire() is None
        assert await first.release()
        second = await others.lock(name).acquire()
        assert second.fence > first.fence
        await second.release()


@rule(3)
@pytest.mark.parametrize("cluster", [BASE, "redis-7.0", "redis-6.2"], indirect=True)
async def test_waiters_on_all_nodes_are_woken_by_push(mode, clean, cluster, monkeypatch):
    monkeypatch.setattr(_waiters, "HEARTBEAT_INTERVAL", 1000.0)  # a message that is lost would be missed for ever
    locks, others = mode.interlock(), mode.interlock()
    for name in one_on_each(cluster).values():
        lease = await locks.lock(name).acquire()
        waiter = asyncio.ensure_future(others.lock(name).acquire())
        await until(lambda name=name: subscription(mode, others, name)[0] == "1")
        await until(lambda name=name: queued(locks, 1, name))
        asked = []
        real = single.evalsha
        monkeypatch.setattr(single, "evalsha", lambda *message: (asked.append(message[2][0]), real(*message))[1])
        await lease.release()
        await (await asyncio.wait_for(waiter, 10)).release()
        assert asked.count("acquire") <= 2, asked  # that of the subscription, if it was late, and the confirmation
        assert "heartbeat" not in asked
        monkeypatch.setattr(single, "evalsha", real)


@rule(3)
async def test_a_handover_pushes_to_one_channel_only(mode, clean, cluster, monkeypatch):
    locks, others = mode.interlock(), mode.interlock()
    names = [*one_on_each(cluster).values()]
    leases = [await locks.lock(name).acquire() for name in names]
    waiters = [asyncio.ensure_future(others.lock(name).acquire()) for name in names]
    await until(lambda: all(subscription(mode, others, name)[0] == "1" for name in names))
    woken, session = [], mode.session(others)

    async def wakes_the_first_only():
        """In the end: at first the subscriptions of the other channels may still wake their waiters."""
        woken.clear()
        session.subscribed(subscription(mode, others, names[0])[1])
        await until(lambda: woken)
        return [attempt.resource.name for attempt in woken] == names[:1]

    with monkeypatch.context() as patched:
        patched.setattr(session.waiters, "_wake", woken.extend)
        await until(wakes_the_first_only)
    session.waiters.wake_all()
    for lease in leases:
        await lease.release()
    for waiter in waiters:
        await (await waiter).release()


@pytest.mark.parametrize("cluster", [BASE, "redis-6.2"], indirect=True)
async def test_a_revocation_reaches_its_holder_by_push(mode, clean, cluster, monkeypatch):
    locks, others = mode.interlock(max_ttl=60), mode.interlock()
    lease = await locks.lock("a", ttl=60).acquire()
    await until(lambda: subscription(mode, locks, "a")[0] == "1")
    assert await others.lock("a").revoke("enough")
    await until(lambda: lease.state is LeaseState.LOST, within=15)  # the renewal is due in 20


@rule(6)
@pytest.mark.parametrize("cluster", [BASE, "redis-6.2"], indirect=True)
async def test_a_revocation_of_a_young_lease_reaches_it_on_every_shard(mode, clean, cluster):
    """A client that is subscribed to the channel of one slot does not hear the channel of another slot."""
    locks, others = mode.interlock(), mode.interlock()
    for name in one_on_each(cluster).values():
        lease = await locks.lock(name, renew=name != "a").acquire()
        began = machine_time()
        assert await others.lock(name).revoke("enough")
        await until(lambda lease=lease: lease.state is LeaseState.LOST)
        assert machine_time() - began < 1 + SLACK  # its renewal is due in 10
        with pytest.raises(LeaseLost, match="it was revoked: enough"):
            lease.ensure()
        await lease.release()


async def test_a_multi_lock_takes_locks_on_several_shards(mode, clean, cluster):
    locks, others = mode.interlock(), mode.interlock()
    names = [*one_on_each(cluster).values()]
    async with await locks.multi(*map(locks.lock, names)).acquire() as leases:
        leases.ensure()
        for name in names:
            assert await others.lock(name).try_acquire() is None
        assert await others.multi(*map(others.lock, names)).try_acquire() is None
    held = await others.lock(names[-1]).acquire()
    with pytest.raises(AcquireTimeout):
        await locks.multi(*map(locks.lock, names)).acquire(timeout=0.2)
    await held.release()
    await use(others.multi(*(others.lock(f"{part}:{{one}}") for part in "abc")))  # in one step


async def test_execute_needs_keys_in_the_slot_of_its_lease(mode, clean):
    lease = await mode.interlock().lock("job:{7}").acquire()
    assert await lease.execute("SET", "users:{7}", "ann", "EX", "60") == b"OK"
    with pytest.raises(ConfigError, match="same hash tag"):
        await lease.execute("SET", "users:8", "bob", "EX", "60", keys=["users:8"])
    lease.ensure()
    await lease.release()


# Renewal


@rule(6)
@pytest.mark.parametrize("cluster", [BASE], indirect=True)
async def test_a_silent_node_delays_no_renewal_on_other_nodes(mode, clean, harmed):
    locks = mode.interlock(max_ttl=6)
    primaries = {name: harmed.primary_of(f"lock:{name}") for name in (*PLAIN, *TAGGED)}  # this blocks the event loop
    leases = {name: await locks.lock(name, ttl=6).acquire() for name in primaries}
    paused = primaries[PLAIN[0]]
    others = [lease for name, lease in leases.items() if primaries[name] is not paused]
    paused.pause()
    began = mode.session(locks).runtime.now()
    grants = [lease._grant for lease in others]
    while min(grant.hold.deadline for grant in grants) < began + 10:  # each was renewed twice, at least
        assert not any(lease.state is LeaseState.LOST for lease in others)
        await asyncio.sleep(0.02)
    paused.resume()
    for lease in leases.values():
        await outcome(lease.release())
    assert len(others) < len(leases)


# Slots that move


@rule(10)
async def test_a_slot_that_moved_is_followed_and_has_no_quarantine(mode, clean, harmed):
    locks, others, idle = mode.interlock(), mode.interlock(), mode.interlock()
    for each in (locks, others, idle):
        await knows_all(mode, each)
    held, free = await locks.lock("held:{m}").acquire(), await locks.lock("free:{m}").acquire()
    fence = free.fence
    await free.release()
    slot = harmed.slot("lock:free:{m}")
    old = harmed.primary_of(slot)
    new = _another(harmed, old)
    harmed.migrate(slot, to=new)
    await held.extend(30)
    for each in (locks, others, idle):
        lease = await each.lock("free:{m}").try_acquire()
        assert lease is not None
        assert lease.fence > fence
        fence = lease.fence
        await lease.release()
        lease = await each.lock("never-used:{m}").try_acquire()
        assert lease is not None
        await lease.release()
    waiter = asyncio.ensure_future(others.lock("held:{m}").acquire())
    await until(lambda: queued(locks, 1, "held:{m}"))
    await until(lambda: subscription(mode, others, "held:{m}")[0] == "1")
    assert await held.release()
    await (await waiter).release()
    harmed.migrate(slot, to=old)
    lease = await idle.lock("free:{m}").try_acquire()
    assert lease is not None
    await lease.release()


@rule(3)
async def test_waiters_move_with_their_slot(mode, clean, harmed):
    locks, others = mode.interlock(), mode.interlock()
    for each in (locks, others):
        await knows_all(mode, each)
    lease = await locks.lock("w").acquire()
    waiter = asyncio.ensure_future(others.lock("w").acquire())
    await until(lambda: subscription(mode, others, "w")[0] == "1")
    slot = harmed.slot("lock:w")
    old = harmed.primary_of(slot)
    new = _another(harmed, old)
    harmed.migrate(slot, to=new)
    await until(lambda: server_of(mode, others).slots.serving[slot].address.parameters["port"] == new.port)
    await until(lambda: subscription(mode, others, "w")[0] == "1")
    assert await lease.release()
    await (await asyncio.wait_for(waiter, 10)).release()
    harmed.migrate(slot, to=old)


def _another(cluster, node):
    """A primary other than this one."""
    return next(
        each for each, view in cluster._selves().items() if each is not node and "master" in view.flags and view.slots
    )


@rule(1, 6)
async def test_mutual_exclusion_and_leases_last_while_a_slot_moves_under_load(mode, clean, harmed):
    clients = [mode.interlock(), mode.interlock()]
    for each in clients:
        await knows_all(mode, each)
    held = await clients[0].lock("held:{load}", ttl=2).acquire()
    inside, sections, over = [], [], False

    async def work(locks):
        while not over:
            async with await locks.lock("busy:{load}").acquire() as lease:
                inside.append(lease.fence)
                await asyncio.sleep(0.001)
                assert len(inside) == 1
                lease.ensure()
                sections.append(inside.pop())

    workers = [asyncio.ensure_future(work(each)) for each in clients for _ in range(2)]
    slot = harmed.slot("lock:busy:{load}")
    old = harmed.primary_of(slot)
    try:
        for target in (_another(harmed, old), old):
            before = len(sections)
            await until(lambda before=before: len(sections) > before + 10)
            for step in harmed.migrating(slot, to=target):
                if step != "half":  # both keys of the lease are in one place then
                    await held.extend(2)
                await asyncio.sleep(0)
            before = len(sections)
            await until(lambda before=before: len(sections) > before + 10)
            held.ensure()
    finally:
        over = True
        await asyncio.wait(workers, timeout=30)
    for worker in workers:
        worker.result()
    assert sections == sorted(sections)
    assert len({*sections}) == len(sections)
    assert await held.release()


async def test_a_lease_that_has_moved_to_the_next_node_is_renewed_there(mode, clean, harmed):
    locks = mode.interlock(max_ttl=40)
    await knows_all(mode, locks)
    leases = [await locks.lock(f"{name}:{{ask}}").acquire() for name in "ab"]
    slot = harmed.slot("lock:a:{ask}")
    old = harmed.primary_of(slot)
    new = _another(harmed, old)
    steps = []
    for step in harmed.migrating(slot, to=new):
        steps.append(step)
        if step == "moved":
            for lease in leases:
                await lease.extend(40)  # ASK
                assert lease.remaining() > 35
            # A new lock has keys that exist nowhere, which no server answers for until the slot has arrived.
            assert isinstance(await outcome(locks.lock("c:{ask}").acquire(timeout=0.3)), AcquireTimeout | Unavailable)
            assert (
                server_of(mode, locks).slots.serving[slot].address.parameters["port"] == old.port
            )  # ASK changes no map
    assert steps == ["open", "half", "moved"]
    for lease in leases:
        assert await lease.release()
    await use(locks.lock("c:{ask}"))
    harmed.migrate(slot, to=old)


@rule(6)
async def test_a_release_that_a_moving_slot_ends_midway_is_sent_again_and_is_no_loss(mode, clean, harmed):
    """The script deletes the key of the holders, and reads it again: by then that key belongs to the other server."""
    locks, others = mode.interlock(), mode.interlock()
    for each in (locks, others):
        await knows_all(mode, each)
    lease = await locks.semaphore("midway:{m}", 1).acquire()
    holders, _, queue, _, tombstones, *_ = lease._grant.resource.keys
    waiter = asyncio.ensure_future(others.semaphore("midway:{m}", 1).acquire())
    slot = harmed.slot(holders)
    old = harmed.primary_of(slot)
    await until(lambda: ask(old, "ZCARD", queue) == 1)
    ask(old, "ZADD", tombstones, 10**15, "of another attempt")  # so that all keys are there, and the old server answers
    ask(old, "PEXPIRE", tombstones, 60_000)
    for step in harmed.migrating(slot, to=_another(harmed, old)):
        if step == "open":
            release = asyncio.ensure_future(lease.release())
            await until(lambda: holders not in ask(old, "KEYS", "*"))
    assert await release
    assert await (await waiter).release()
    harmed.migrate(slot, to=old)


async def test_leases_of_a_slot_that_is_moving_are_renewed_one_by_one(mode, clean, harmed):
    locks = mode.interlock(max_ttl=6)
    await knows_all(mode, locks)
    leases = [await locks.lock(f"{number}:{{half}}", ttl=4).acquire() for number in range(6)]
    slot = harmed.slot("lock:0:{half}")
    old = harmed.primary_of(slot)
    new = _another(harmed, old)
    for step in harmed.migrating(slot, to=new):
        if step == "half":
            whole = [lease for lease in leases if _together(old, new, lease.name)]
            grants = [lease._grant for lease in whole]
            began = server_of(mode, locks).runtime.now()
            await until(lambda: all(grant.hold.deadline > began + 6 for grant in grants))
    harmed.migrate(slot, to=old)
    for lease in leases:
        assert await lease.release() or lease not in whole


def _together(old, new, name):
    """Whether a lock's key and its record are on one node."""
    counts = []
    for node in (old, new):
        with redis.Redis.from_url(node.url) as client:
            keys = client.execute_command("CLUSTER", "GETKEYSINSLOT", slot_of(f"lock:{name}"), 1000)
            counts.append(sum(key in (f"lock:{name}".encode(), f"lock:{name}:{{record}}".encode()) for key in keys))
    return 2 in counts


# Failover


@rule(6)
async def test_a_failover_of_one_shard_disturbs_no_other(mode, clean, harmed):
    locks = mode.interlock(max_ttl=10)
    await knows_all(mode, locks)
    names = one_on_each(harmed, "f")
    leases = {node: await locks.lock(name, ttl=10).acquire() for node, name in names.items()}
    dead = harmed.primary_of("lock:hello")
    for node in names:
        harmed.catch_up(harmed.replica_of(node))  # each replica has its lease
    others = [lease for node, lease in leases.items() if node is not dead]
    grant = leases[dead]._grant
    deadline = grant.hold.deadline
    dead.kill()
    replica_serves = asyncio.get_running_loop().run_in_executor(None, harmed.wait_ok)
    while not replica_serves.done():
        for lease in others:
            lease.ensure()
            assert lease.state is LeaseState.HELD
        await use(locks.lock(f"more:{{lock:{others[0].name}}}"))
        await asyncio.sleep(0.02)
    await replica_serves
    await until(lambda: grant.hold.deadline > deadline)  # its renewals alone have found the new primary
    await leases[dead].extend(10)  # the same lease
    leases[dead].ensure()
    for lease in leases.values():
        assert await lease.release()


@rule(10)
async def test_a_failover_that_lost_a_grant_begins_a_quarantine(mode, clean, harmed):
    locks, others, fearless = mode.interlock(max_ttl=4), mode.interlock(max_ttl=4), mode.interlock(quarantine=False)
    for each in (locks, others):
        await knows_all(mode, each)
    name = "lost"
    primary = harmed.primary_of(f"lock:{name}")
    replica = harmed.replica_of(primary)
    harmed.lag(replica)
    lost = await locks.lock(name, ttl=4, renew=False).acquire()
    primary.kill()
    harmed.wait_ok()
    assert harmed.primary_of(f"lock:{name}") is replica
    refused = await outcome(others.lock(name, ttl=4).acquire(timeout=0))
    assert "quarantine" in str(refused)
    assert (await fearless.lock(name).inspect()).quarantined
    got = await others.lock(name, ttl=4).acquire()
    assert lost.state is LeaseState.LOST
    await got.release()


@rule(10)
async def test_a_lossless_failover_inside_a_quarantine_keeps_its_beginning(mode, clean, harmed):
    locks = mode.interlock(max_ttl=60)
    await knows_all(mode, locks)
    await use(locks.lock("used:{lock:hello}"))
    old = harmed.primary_of("lock:hello")
    harmed.catch_up(harmed.replica_of(old))
    old.kill()
    harmed.wait_ok()

    async def quarantine_end(name):
        assert isinstance(await outcome(locks.lock(name).acquire(timeout=1)), AcquireTimeout)
        state = await locks.lock(name).inspect()
        assert state.quarantined
        return machine_time() + state.remaining

    names = ("used:{lock:hello}", "never used:{lock:hello}")
    ends = {name: await quarantine_end(name) for name in names}  # a second each, and so a second ago
    old.restart()
    harmed.catch_up(old)
    harmed.wait_ok()
    harmed.failover(old)
    for name, end in ends.items():
        assert await quarantine_end(name) < end + 0.5


@rule(1, 10)
async def test_a_primary_that_comes_back_has_another_identity(mode):
    """The other nodes make a replica of it first, and its history of writes ends with that."""
    with Cluster(config={"cluster-replica-validity-factor": "0"}) as group:
        witness, idle = mode.interlock(group.url, max_ttl=30), mode.interlock(group.url, max_ttl=30)
        for locks in (witness, idle):
            await knows_all(mode, locks)
        name = next(iter(one_on_each(group, "back").values()))
        await use(witness.lock(name))
        old = group.primary_of(f"lock:{name}")
        new = group.replica_of(old)
        group.catch_up(new)
        before = ask(old, "INFO", "replication")
        old.pause()
        await asyncio.to_thread(wait, lambda: "" if info(new)["role"] == "master" else "it is a replica")
        await mode.keep(mode.interlock(group.url, quarantine=False).lock(name, ttl=30, renew=False).acquire())
        await witness.lock(name).inspect()
        new.kill()
        old.resume()
        await asyncio.to_thread(wait, lambda: "" if info(old)["master_replid"] not in before else "it is as it was")
        for locks in (witness, idle, mode.interlock(group.url, max_ttl=30)):
            refused = await outcome(locks.lock(name).acquire(timeout=5))
            assert "quarantine" in str(refused)


@rule(6, 10)
async def test_a_shard_that_comes_back_from_a_node_which_the_client_never_met_is_found(mode):
    """The client saw the move there, and no reply from there: it then asked that node for ever, a replica again."""
    with Cluster(config={"cluster-replica-validity-factor": "0"}) as group:
        locks, others = mode.interlock(group.url, max_ttl=3), mode.interlock(group.url, max_ttl=3)
        await knows_all(mode, locks)
        name = next(iter(one_on_each(group, "returned").values()))
        await use(locks.lock(name, ttl=3))
        first = group.primary_of(f"lock:{name}")
        second = group.replica_of(first)
        await asyncio.to_thread(group.failover, second)
        await asyncio.to_thread(group.wait_ok)
        lost = await others.lock(name, ttl=3, renew=False).acquire()
        second.pause()
        assert isinstance(await outcome(locks.lock(name, ttl=3).acquire(timeout=0.5)), Unavailable)
        await asyncio.to_thread(group.wait_for_primary, f"lock:{name}", second)
        second.resume()
        await asyncio.to_thread(group.wait_ok)
        moves = server_of(mode, locks).histories.moves[group.slot(f"lock:{name}")]
        assert [bool(move.source_stamp.identity) for move in moves][:1] == [True]
        got = await locks.lock(name, ttl=3).acquire(timeout=20)
        assert lost.state is LeaseState.LOST
        assert await got.release()


@rule(1, 10)
async def test_a_slot_taken_back_from_a_dead_node_which_the_client_never_met_is_in_quarantine(mode):
    """The evidence was the identity of the node that got the slot back, and so none for that node."""
    with Cluster(replicas=0) as group:
        locks, others = mode.interlock(group.url, max_ttl=20), mode.interlock(group.url, max_ttl=20)
        server_of(mode, locks)._learn_identities = _learn_none
        await knows_all(mode, others)
        first, second, third = group.nodes
        name = one_on_each(group, "back")[first]
        await use(locks.lock(name))
        slot = group.slot(f"lock:{name}")
        await asyncio.to_thread(group.migrate, slot, to=second)
        kept = await mode.keep(others.lock(name, ttl=20, renew=False).acquire(timeout=10))
        deadline = kept._grant.hold.deadline
        await new_map(mode, locks)
        second.kill()
        for node in (first, third):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", group._ids[first])
        refused = await outcome(locks.lock(name, ttl=20).acquire(timeout=2))
        assert "quarantine" in str(refused)
        assert server_of(mode, locks).runtime.now() < deadline


async def _learn_none():
    """In place of `_learn_identities`, of a client that only meets a node when it sends a message there."""


async def new_map(mode, locks):
    """Let a client read the map now."""
    server = server_of(mode, locks)
    server.slots._next_map_at = 0.0
    loading = server.slots.load(server.runtime.now() + 10)
    if mode.name == "asyncio":
        await loading
    else:
        await asyncio.to_thread(run, loading)


@rule(1, 10)
async def test_a_restart_after_a_move_begins_a_quarantine_in_slots_that_were_not_used_since_the_move(mode):
    """The quarantine of such a slot counted from the move, and so was over."""
    with Cluster(node_timeout=2.0) as group:
        locks, others = mode.interlock(group.url, max_ttl=3), mode.interlock(group.url, max_ttl=3)
        first = group.nodes[0]
        name, noticing = names_on(group, first)
        for each in (locks, others):
            await knows_all(mode, each)
            await use(each.lock(noticing, ttl=3))
        second = group.replica_of(first)
        await asyncio.to_thread(group.failover, second)
        await use(locks.lock(noticing, ttl=3), 20)
        assert group.slot(f"lock:{name}") in server_of(mode, locks).histories.moves
        await asyncio.sleep(3 + 4 + 0.5)  # a quarantine and its isolation grace
        await mode.keep(others.lock(name, ttl=3, renew=False).acquire(timeout=20))
        second.kill()
        second.restart()
        refused = await outcome(locks.lock(name, ttl=3).acquire(timeout=4))
        assert "quarantine" in str(refused)


@rule(1, 10)
async def test_a_restart_between_two_moves_there_and_back_begins_a_quarantine(mode):
    """The evidence was the identity of the node to which the slot came back, and so none for that node."""
    with Cluster(replicas=0, node_timeout=2.0) as group:
        locks, others = mode.interlock(group.url, max_ttl=6), mode.interlock(group.url, max_ttl=6)
        await asyncio.sleep(6 + 4 + 0.5)  # until the age of the nodes allows a grant at once
        first, second, _ = group.nodes
        name, there = names_on(group, first)[0], names_on(group, second)[0]
        for each in (locks, others):
            await knows_all(mode, each)
            await use(each.lock(there, ttl=6))
        slot = group.slot(f"lock:{name}")
        await asyncio.to_thread(group.migrate, slot, to=second)
        await new_map(mode, locks)
        await mode.keep(others.lock(name, ttl=6, renew=False).acquire(timeout=10))
        second.kill()
        second.restart()
        await asyncio.to_thread(group.wait_ok)
        assert "quarantine" in str(await outcome(locks.lock(there, ttl=6).acquire(timeout=0.5)))
        await new_map(mode, locks)
        nodes = {*server_of(mode, locks).slots.serving}
        await until(lambda: all(node.history.identity_at_map == node.history.latest.identity for node in nodes))
        await asyncio.to_thread(group.migrate, slot, to=first)
        await new_map(mode, locks)
        refused = await outcome(locks.lock(name, ttl=6).acquire(timeout=1))
        assert "quarantine" in str(refused)


def names_on(cluster, node):
    """Two names, in two slots of this node."""
    names = [f"two-{number}" for number in range(100)]
    return [name for name in names if cluster.primary_of(f"lock:{name}") is node][:2]


@rule(10)
async def test_a_move_that_is_noted_while_a_caller_looks_at_an_earlier_one_is_not_forgotten():
    """Of two callers that looked at a move, the slower one then forgot the move that was noted meanwhile."""
    with Cluster() as group:
        async with interlock.aio.Interlock(group.url, max_ttl=6) as locks:
            server = locks._session.server
            first = group.nodes[0]
            name = names_on(group, first)[0]
            await use(locks.lock(name))
            await until(lambda: all(node.history.identity_at_map for node in {*server.slots.serving}))
            slot, second = group.slot(f"lock:{name}"), group.replica_of(first)
            learn, targets, goes_on = server._learn_slot_history, [], asyncio.Event()

            async def learn_slowly(*args):
                targets.append(args[1].address.parameters["port"])
                number = len(targets)
                await learn(*args)
                if number == 2:
                    await goes_on.wait()

            async def read_map():
                server.slots._next_map_at = 0.0
                await server.slots.load(server.runtime.now() + 10)

            server._learn_slot_history = learn_slowly
            await asyncio.to_thread(group.failover, second)
            await read_map()
            end = server.runtime.now() + 30
            faster, slower = (asyncio.ensure_future(server._process_moves(slot, end)) for _ in range(2))
            await faster
            await asyncio.to_thread(group.failover, first)
            await read_map()
            assert len(server.histories.moves[slot]) == 1
            goes_on.set()
            await slower
            assert targets == [second.port, second.port, first.port]


@rule(6)
def test_a_loop_whose_map_is_older_than_the_move_which_another_loop_noted_reads_the_map():
    """It asked the target of that move for ever, which was a replica again, since its own map named another node."""
    with Cluster() as group, contextlib.ExitStack() as ending:
        first = group.nodes[0]
        name, noticing = names_on(group, first)
        locks = interlock.aio.Interlock(group.url, max_ttl=3)
        runners = [ending.enter_context(asyncio.Runner()) for _ in range(2)]
        other_thread = ending.enter_context(ThreadPoolExecutor(1))

        def use_in(loop, name):
            call = partial(runners[loop].run, use(locks.lock(name, ttl=3), 20))
            other_thread.submit(call).result() if loop else call()

        use_in(0, name)
        use_in(1, noticing)
        second = group.replica_of(first)
        group.failover(second)
        use_in(1, noticing)  # notes the move of all slots
        group.failover(first)
        use_in(0, name)
        runners[0].run(locks.close())
        other_thread.submit(runners[1].run, locks.close()).result()


@rule(10)
async def test_a_lossless_failover_begins_no_quarantine(mode, clean, harmed):
    locks, others = mode.interlock(), mode.interlock()
    for each in (locks, others):
        await knows_all(mode, each)
    held = await locks.lock("kept").acquire()
    await use(locks.lock("used:{lock:kept}"))
    primary = harmed.primary_of("lock:kept")
    harmed.failover(harmed.replica_of(primary))
    await held.extend(30)
    for each in (others, locks):
        await use(each.lock("used:{lock:kept}"), 10)
        await use(each.lock("never-used:{lock:kept}"), 10)
    assert await others.lock("kept").try_acquire() is None
    assert await held.release()
    await (await others.lock("kept").acquire(timeout=10)).release()


@rule(10)
@pytest.mark.parametrize("is_silent", [False, True], ids=["", "silent when it was asked for a map"])
async def test_a_slot_that_moves_to_a_node_that_was_demoted_and_promoted_has_no_quarantine(
    mode, clean, harmed, is_silent, monkeypatch
):
    """The client knew that node by its earlier identity, until it read a map by chance."""
    ask_server, silent = slot_map.ask_server, set()

    def ask_server_once_silent(address, *args):
        if (port := address.parameters["port"]) in silent:
            silent.remove(port)
            raise TimeoutError
        return ask_server(address, *args)

    monkeypatch.setattr(slot_map, "ask_server", ask_server_once_silent)
    locks = mode.interlock()
    server = await knows_all(mode, locks)
    name = next(iter(one_on_each(harmed, "again").values()))
    slot = harmed.slot(f"lock:{name}")
    new = _another(harmed, harmed.primary_of(slot))
    there = next(each for node, each in one_on_each(harmed, "there").items() if node is new)
    await use(locks.lock(name))
    for is_back in (False, True):  # there and back, without loss
        await until(lambda: not server.slots._learning and server.slots._runtime.now() >= server.slots._next_map_at)
        serving = harmed.replica_of(harmed.primary_of(f"lock:{there}"))
        harmed.failover(serving)
        silent |= {serving.port} if is_silent and is_back else set()
        await use(locks.lock(there), 10)
    silent.clear()  # on a busy machine the client may have asked another node
    member = next(each for each in {*server.slots.serving} if each.address.parameters["port"] == serving.port)
    await until(lambda: member.history.identity_at_map == member.history.latest.identity)
    old = harmed.primary_of(slot)
    harmed.migrate(slot, to=serving)
    try:
        await use(locks.lock(name), 0)
    finally:
        harmed.migrate(slot, to=old)


@rule(10)
def test_a_slot_that_moved_before_a_lossless_failover_has_no_quarantine():
    """A name that was not used between the two was in quarantine, because the client looked at the last step only."""
    where = address_of("redis://127.0.0.1", for_asyncio=False)
    epoch = ServerHistory(60.0).identify(
        Facts("d" * 40, "d" * 40, "b" * 40, uptime=500, now_ms=1_000_000, replicas=1), where
    )
    epoch.set_slot_history(
        7, SlotHistory("bb:bb", epoch.met_at, (), SlotHistory("-", epoch.met_at - 9, ("aa:aa/1000",)))
    )
    epoch.set_slot_history(
        8, SlotHistory("bb:bb", epoch.met_at, (), SlotHistory("zz:zz", epoch.met_at - 9, ("aa:aa",)))
    )
    assert epoch.text_for(7).split()[4:] == ["bb:bb"]
    epoch.mark_lossless("bb:bb", 2.0)
    assert epoch.text_for(7).split()[4:] == ["-", "bb:bb/2000", "aa:aa/3000"]
    assert epoch.text_for(8).split()[4:] == ["zz:zz", "bb:bb/2000", "aa:aa/2000"]  # that one is waited for, as before
    assert int(epoch.text_for(8).split()[1]) == 1_000_000


@rule(10)
@pytest.mark.parametrize("least_ttl", [0.0, 2.0])
def test_a_lease_that_a_clock_cut_short_is_waited_for_from_the_last_move(least_ttl):
    """The quarantine of shorter leases counted from the first move, and so was over before these leases began."""
    where = address_of("redis://127.0.0.1", for_asyncio=False)
    facts = Facts("d" * 40, "d" * 40, "b" * 40, uptime=500, now_ms=1_000_000, replicas=1)
    stamp = ServerHistory(60.0).identify(facts, where)
    stamp.set_slot_history(7, SlotHistory("bb:bb", stamp.met_at, (), SlotHistory("-", stamp.met_at - 900, ())))
    stamp.mark_lossless("bb:bb", least_ttl)
    assert int(stamp.text_for(7).split()[1]) == (1_000_000 if least_ttl else 100_000)


@rule(5, 10)
async def test_permits_that_move_to_a_node_whose_clock_is_ahead_are_waited_for(mode):
    """A permit moves with the time at which it ends, which is sooner by that clock."""
    try:
        faketime()
    except Missing as missing:
        required(f"no libfaketime here: {missing}")
    with Cluster(replicas=0, clock=True) as skewed:
        locks, others = (mode.interlock(skewed.url, max_ttl=2.5) for _ in range(2))
        slot = skewed.slot("lock:s")
        new = _another(skewed, skewed.primary_of(slot))
        new.shift(2)
        await until(lambda: wrong_by(new) > 0.9)
        skewed.wait_ok()
        for each in (locks, others):
            await knows_all(mode, each)
        lease = await mode.keep(locks.semaphore("s", 1, ttl=2.5, renew=False).acquire())
        skewed.migrate(slot, to=new)
        second = await mode.keep(others.semaphore("s", 1, ttl=2.5).acquire(timeout=30))
        assert lease.remaining() == 0
        assert second.fence > lease.fence


def wrong_by(node):
    """Seconds by which the clock of a server is ahead of this process's clock."""
    with redis.Redis.from_url(node.url) as client:
        return client.time()[0] - time.time()


# What is given


def cluster_client(module, cluster, mode_name, **options):
    """A client of redis-py or valkey-py for the whole cluster."""
    home = module if mode_name == "threads" else module.asyncio
    kind = getattr(home, "RedisCluster", None) or home.ValkeyCluster
    return kind(host="127.0.0.1", port=cluster.nodes[0].port, **options)


@pytest.mark.parametrize("library", ["redis", "valkey"])
@pytest.mark.parametrize("decode", [False, True])
async def test_a_cluster_client_of_redis_py_or_valkey_py_is_accepted(mode, clean, cluster, library, decode):
    module = pytest.importorskip(library)
    client = cluster_client(module, cluster, mode.name, decode_responses=decode)
    mode.clients.append(client)
    locks = mode.interlock(client)
    for name in one_on_each(cluster).values():
        await use(locks.lock(name))
    if mode.name == "asyncio":
        await client.initialize()


async def test_a_wrong_cluster_address_raises_one_clear_error(mode, clean, cluster, server_pool):
    single = server_pool.node(BASE)
    for target, error, said in (
        (f"redis+cluster://127.0.0.1:{single.port}", ConfigError, "is no node of a cluster. Use a URL redis://"),
        (f"redis://127.0.0.1:{cluster.nodes[0].port}", ConfigError, r"Use a URL redis\+cluster://"),
        ("redis+cluster://127.0.0.1:1,127.0.0.1:2", Unavailable, "Is the server up"),
    ):
        locks = mode.interlock(target)
        with pytest.raises(error, match=said):
            await locks.lock("a").acquire(timeout=30)
    for url, said in (
        ("redis+cluster://127.0.0.1:7000,,127.0.0.1:7001", "a host is missing"),
        ("redis+cluster://127.0.0.1:7000/3", "database 0"),
        ("redis+cluster://127.0.0.1:7000?db=3", "database 0"),
        ("redis+cluster://me:se/cret@127.0.0.1:7000", "Percent-encode"),
        ("redis+cluster://127.0.0.1:port", "Write redis\\+cluster://"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            mode.interlock(url)
        assert "cret" not in str(caught.value)


async def test_one_node_in_the_url_is_enough_even_a_replica(mode, clean, cluster):
    replica = cluster.replica_of(cluster.primary_of("lock:a"))
    locks = mode.interlock(f"redis+cluster://127.0.0.1:1,127.0.0.1:{replica.port}/0")
    for name in one_on_each(cluster).values():
        await use(locks.lock(name))


async def test_a_client_of_the_other_mode_is_refused(mode, clean, cluster):
    other = next(name for name in MODES if name != mode.name)
    client = cluster_client(redis, cluster, other)
    with pytest.raises(ConfigError, match="use it with"):
        mode.interlock(client)
    with contextlib.suppress(Exception):
        closing = client.close() if other == "threads" else getattr(client, "aclose", client.close)()
        if closing is not None:
            await closing


async def test_a_client_that_has_met_the_cluster_retries_for_longer(mode, clean):
    locks = mode.interlock()
    assert server_of(mode, locks).retry_for == RETRY_FOR
    await use(locks.lock("a"))
    assert server_of(mode, locks).retry_for > RETRY_FOR


@pytest.fixture
def replicated():
    with Cluster(shards=3, replicas=1) as made:
        yield made


@rule(6)
async def test_a_client_that_only_renews_follows_a_failover_of_its_shard(mode, replicated):
    """Renewals went to the dead node, and nothing else made the client ask for the new map."""
    locks = mode.interlock(replicated.url)
    primary = replicated.nodes[0]
    names = [name for name in map(str, range(60)) if replicated.primary_of(f"lock:{name}") is primary]
    leases = [await mode.keep(locks.lock(name, ttl=12).acquire()) for name in names]
    replicated.catch_up(*replicated.nodes)
    primary.kill()
    await until(lambda: {lease.state for lease in leases} == {"jeopardy"})
    await until(lambda: {lease.state for lease in leases} == {"held"})
