"""Thousands of waiters whose processes were killed or stopped: living waiters do not wait for them.

Not here: one waiter that is killed or stopped (test_processes.py), that has lost its connection (test_network.py,
test_outages.py), or that its caller interrupts (test_waiters.py).
"""

from __future__ import annotations

import asyncio

import pytest

from harness.clock import machine_time
from harness.modes import until
from interlock._client.multi import MAX_TOGETHER
from interlock._client.renewal import RENEWAL_BATCH
from interlock._client.waiting import HEARTBEAT_BATCH
from interlock.primitives.barrier import barrier_resource
from interlock.primitives.codes import GRANTED, QUEUED
from interlock.primitives.election import election_resource
from interlock.primitives.latch import latch_resource
from interlock.primitives.lock import lock_resource
from interlock.primitives.messages import AcquireCall, HeartbeatCall, RenewCall
from interlock.primitives.multi import Part, TogetherCall, multi_resource
from interlock.primitives.permits import read_resource, semaphore_resource, write_resource

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
KINDS = {
    "stopped lock": (lock_resource("a", "lock:"), lambda locks: locks.lock("a")),
    "killed lock": (lock_resource("b", "lock:"), lambda locks: locks.lock("b")),
    "stopped semaphore": (semaphore_resource("c", "lock:", 1), lambda locks: locks.semaphore("c", 1)),
    "killed rwlock": (write_resource("d", "lock:"), lambda locks: locks.rwlock("d").write()),
    "stopped election": (election_resource("e", "lock:"), lambda locks: locks.election("e")),
}

LOCK, SEMAPHORE, READ = lock_resource("a", "lock:"), semaphore_resource("c", "lock:", 100), read_resource("d", "lock:")
LATCH, BARRIER = latch_resource("l", "lock:", 1, 3600.0), barrier_resource("b", "lock:", 10_000)


def say(pipe, primitive, *words):
    """Send one message, as a client does whose stamp names no server."""
    return pipe.eval(primitive.script.source, len(primitive.keys), *primitive.keys, *words, "")


def arrive(client, primitive, number, *, killed=False):
    """Send one acquire for each of so many clients, which then send nothing more. Returns the codes of the replies.

    A killed client said that it is subscribed, and nobody is.
    """
    own = (*primitive.acquire_args, "") if primitive.has_generation else primitive.acquire_args
    sha = client.script_load(primitive.script.source)
    pipe = client.pipeline(transaction=False)
    for i in range(number):
        words = ("acquire", f"dead/{i}", 30_000, 3000, int(killed), "nobody", "inf", *own, "")
        pipe.evalsha(sha, len(primitive.keys), *primitive.keys, *words)
    return [reply[0] for reply in pipe.execute()]


def crowd(client, primitive, number, *, killed):
    """So many clients whose processes end: the first one holds the lock, the others wait."""
    first, *others = arrive(client, primitive, number, killed=killed)
    assert first == GRANTED
    assert set(others) == {QUEUED}


@rule(4)
async def test_thousands_of_dead_waiters_are_skipped_within_a_second(mode, clean):
    """The first dead waiter gets the lock for 3 s; a heartbeat of the living waiter notices that within 1 s."""
    locks, took = mode.interlock(), {}
    made = {kind: make(locks) for kind, (_, make) in KINDS.items()}

    async def follow(kind):
        lease = await (made[kind].campaign() if "election" in kind else made[kind].acquire())
        took[kind] = machine_time() - released
        await lease.release()

    for kind, (primitive, _) in KINDS.items():
        await asyncio.to_thread(crowd, clean, primitive, 5_000, killed="killed" in kind)
    released = machine_time()
    following = [asyncio.ensure_future(follow(kind)) for kind in KINDS]
    for primitive, _ in KINDS.values():
        await asyncio.to_thread(say, clean, primitive, "release", "dead/0", "0")
    await asyncio.gather(*following)
    assert max(took.values()) < 7.5, took


@rule(4)
async def test_an_undo_skips_dead_waiters_without_a_pause(mode, clean):
    """With pauses an undo skipped 32 of them every 250 ms, and the living waiters behind them waited for that."""
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    _, _, queue, waiters, _ = lease._grant.resource.keys
    clean.zadd(queue, {f"dead/{i}": i for i in range(5_000)})
    clean.hset(waiters, mapping={f"dead/{i}": f"{i} 3000 0 nowhere" for i in range(5_000)})
    clean.pexpire(queue, 60_000)
    clean.pexpire(waiters, 60_000)
    mode.session(locks).core.giving_back.in_background(lease._grant)
    await until(lambda: not clean.exists(queue, waiters), within=20)  # of the 39 s that pauses would take


# What one script call does, whatever the crowd: a server serves nobody else meanwhile

MANY = 10_000
MOST_SCANNED = 500  # waiters that one script call looks at
MOST_COMMANDS = 1_500  # that one script call runs: they take less than 2 ms (see docs/benchmarks.md)


def waits(client, primitive, number, *, alive, wants=""):
    """So many waiters, who are alive or dead."""
    _, _, queue, waiters, *_ = primitive.keys
    until_ms = 10**13 if alive else 1
    client.zadd(queue, {f"waits/{i}": i + 1 for i in range(number)})
    client.hset(waiters, mapping={f"waits/{i}": f"{until_ms} 3000 0 nobody{wants}" for i in range(number)})
    client.expire(queue, 60)
    client.expire(waiters, 60)
    return [f"waits/{i}" for i in range(number)]


def a_release_behind_the_dead(client):
    arrive(client, LOCK, 1)
    waits(client, LOCK, MANY, alive=False)
    yield LOCK, LOCK.keys, ("release", "dead/0", "60000")


def a_refusal_beside_the_dead(client):
    arrive(client, LOCK, 1)
    waits(client, LOCK, MANY, alive=False)
    yield LOCK, LOCK.keys, ("acquire", "x", 30_000, 3000, 0, "nobody", "1", *LOCK.acquire_args)


def heartbeats_that_let_many_in(client):
    tokens = waits(client, READ, MANY, alive=True, wants=" 1")[:HEARTBEAT_BATCH]
    yield READ, READ.keys, HeartbeatCall("nobody", "1", [(token, "3000") for token in tokens]).encode()


def heartbeats_of_the_parties_of_a_barrier(client):
    arrive(client, BARRIER, HEARTBEAT_BATCH)
    tokens = [f"dead/{i}" for i in range(HEARTBEAT_BATCH)]
    yield BARRIER, BARRIER.keys, HeartbeatCall("nobody", "1", [(token, "3000") for token in tokens]).encode()


def renewals_of_many_readers(client):
    arrive(client, READ, RENEWAL_BATCH)
    call = RenewCall([(f"dead/{i}", "60000") for i in range(RENEWAL_BATCH)])
    yield READ, READ.renew_keys * RENEWAL_BATCH, call.encode()


def permits_of_many_who_have_died(client):
    holders, _, _, _, _, shares = SEMAPHORE.keys
    client.zadd(holders, {f"gone/{i}": i for i in range(MANY)})
    client.hset(shares, mapping={f"gone/{i}": "1 1 nobody" for i in range(MANY)} | {"sum": MANY})
    client.expire(holders, 60)
    client.expire(shares, 60)
    waits(client, SEMAPHORE, MANY, alive=True, wants=" 1")
    yield SEMAPHORE, SEMAPHORE.keys, ("acquire", "x", 30_000, 3000, 0, "nobody", "0", *SEMAPHORE.acquire_args)


def a_multi(client):
    members = [semaphore_resource(f"{{m}}{i}", "lock:", 1) for i in range(MAX_TOGETHER)]
    whole = multi_resource(members)
    parts = [
        Part("permits", len(each.keys), AcquireCall(f"x/{i}", "30000", "3000", "0", "-", "0", each.acquire_args))
        for i, each in enumerate(members)
    ]
    yield whole, whole.keys, TogetherCall(parts).encode()


def an_open_latch(client):
    arrive(client, LATCH, 1)
    waits(client, LATCH, MANY, alive=True)
    yield LATCH, LATCH.keys, ("count", "op", 1, *LATCH.acquire_args[:2])


@pytest.mark.parametrize(
    "state",
    [
        a_release_behind_the_dead,
        a_refusal_beside_the_dead,
        heartbeats_that_let_many_in,
        heartbeats_of_the_parties_of_a_barrier,
        renewals_of_many_readers,
        permits_of_many_who_have_died,
        a_multi,
        an_open_latch,
    ],
)
def test_no_script_call_does_much(clean, state):
    for primitive, keys, args in state(clean):
        sha = clean.script_load(primitive.script.source)
        queue = primitive.keys[2]
        before, waited = commands_run(clean), clean.zcard(queue)
        clean.evalsha(sha, len(keys), *keys, *args, "")
        ran = commands_run(clean) - before
        assert 10 < ran <= MOST_COMMANDS, ran
        assert clean.zcard(queue) >= waited - MOST_SCANNED


def commands_run(client):
    return sum(stats["calls"] for name, stats in client.info("commandstats").items() if name != "cmdstat_info")


@rule(6)
async def test_a_release_that_is_sent_again_for_more_dead_waiters_is_no_loss(mode, clean):
    """One step skips only some dead waiters. While others release, the server forgets who released first."""
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    _, _, queue, waiters, _ = lease._grant.resource.keys
    clean.zadd(queue, {f"dead/{i}": i for i in range(600)})
    clean.hset(waiters, mapping={f"dead/{i}": f"{i} 3000 0 nowhere" for i in range(600)})
    clean.pexpire(queue, 9000)
    clean.pexpire(waiters, 9000)
    core = mode.session(locks).core
    ask, answers = core.requests.ask_until_answered, []

    async def slow(question, args, *more):
        answer = await ask(question, args, *more)
        if args[0] == "release":
            answers.append(answer[0])
            clean.set("{lock:a}{record}", "1 lock 9 - 0 somebody - -", px=60_000)  # who has had it meanwhile
        return answer

    core.requests.ask_until_answered = slow
    try:
        assert await lease.release()
    finally:
        del core.requests.ask_until_answered
    assert answers == [[1, 1], [0, 0]]
