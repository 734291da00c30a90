"""Thousands of waiters whose processes were killed or stopped: living waiters do not wait for them.

Not here: one waiter that is killed or stopped (test_processes.py), that has lost its connection (test_network.py,
test_outages.py), or that its caller interrupts (test_waiters.py).
"""

from __future__ import annotations

import asyncio
import time

import pytest

from harness.modes import until
from interlock.primitives.codes import GRANTED, QUEUED
from interlock.primitives.election import election_resource
from interlock.primitives.lock import lock_resource
from interlock.primitives.permits import semaphore_resource, write_resource

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
KINDS = {
    "stopped lock": (lock_resource("a", "lock:"), lambda locks: locks.lock("a")),
    "killed lock": (lock_resource("b", "lock:"), lambda locks: locks.lock("b")),
    "stopped semaphore": (semaphore_resource("c", "lock:", 1), lambda locks: locks.semaphore("c", 1)),
    "killed rwlock": (write_resource("d", "lock:"), lambda locks: locks.rwlock("d").write()),
    "stopped election": (election_resource("e", "lock:"), lambda locks: locks.election("e")),
}


def say(pipe, primitive, *words):
    """Send one message, as a client does whose stamp names no server."""
    return pipe.eval(primitive.script.source, len(primitive.keys), *primitive.keys, *words, "")


def crowd(client, primitive, number, *, killed):
    """Send one acquire for each of so many clients, which then send nothing more. The first one holds the lock.

    A killed client said that it is subscribed, and nobody is.
    """
    sha = client.script_load(primitive.script.source)
    pipe = client.pipeline(transaction=False)
    for i in range(number):
        words = ("acquire", f"dead/{i}", 30_000, 3000, int(killed), "nobody", "inf", *primitive.acquire_args, "")
        pipe.evalsha(sha, len(primitive.keys), *primitive.keys, *words)
    first, *others = (reply[0] for reply in pipe.execute())
    assert first == GRANTED
    assert set(others) == {QUEUED}


@rule(4)
async def test_thousands_of_dead_waiters_are_skipped_within_a_second(mode, clean):
    """The first dead waiter gets the lock for 3 s; a heartbeat of the living waiter notices that within 1 s."""
    locks, took = mode.interlock(), {}
    made = {kind: make(locks) for kind, (_, make) in KINDS.items()}

    async def follow(kind):
        lease = await (made[kind].campaign() if "election" in kind else made[kind].acquire())
        took[kind] = time.monotonic() - released
        await lease.release()

    for kind, (primitive, _) in KINDS.items():
        await asyncio.to_thread(crowd, clean, primitive, 5_000, killed="killed" in kind)
    released = time.monotonic()
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
    mode.session(locks).core.release_in_background(lease._grant)
    await until(lambda: not clean.exists(queue, waiters), within=20)  # of the 39 s that pauses would take


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
    ask, answers = core.request, []

    async def slow(attempt, args, until):
        answer = await ask(attempt, args, until)
        if args[0] == "release":
            answers.append(answer[0])
            clean.set("{lock:a}{record}", "1 lock 9 - 0 somebody - -", px=60_000)  # who has had it meanwhile
        return answer

    core.request = slow
    try:
        assert await lease.release()
    finally:
        del core.request
    assert answers == [[1, 1], [0, 0]]
