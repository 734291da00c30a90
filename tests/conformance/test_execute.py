"""`lease.execute` of a lease that has ended in the server, which its client does not know yet: the command never runs.

Also if the key of the lock has a value, since somebody else holds it by now. What `execute` does while the lease is
alive: test_lock.py, test_semaphore.py; which commands it refuses: test_own_keys.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from harness.modes import AsyncView, outcome, real
from interlock import LeaseLost

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")

KINDS = {
    "lock": lambda locks: locks.lock("a").acquire(),
    "rlock": lambda locks: locks.rlock("a").acquire(),
    "election": lambda locks: locks.election("a").campaign(),
    "semaphore": lambda locks: locks.semaphore("a", 2).acquire(),
    "reader": lambda locks: locks.rwlock("a").read().acquire(),
    "writer": lambda locks: locks.rwlock("a").write().acquire(),
}
OTHER = "elsewhere/1/main/0"


def gone(client, keys, token):
    """The lease has run out, and nobody has come since."""
    client.delete(keys[0])


def gone_to_another(client, keys, token):
    """The lease has run out, and somebody else has one."""
    if client.type(keys[0]) == b"string":
        client.set(keys[0], OTHER, px=60_000)
        return
    client.zadd(keys[0], {OTHER: time.time() * 1000 + 60_000})
    client.zrem(keys[0], token)
    client.hset(keys[5], OTHER, "1 1 -")


def revoked(client, keys, token):
    """Somebody has revoked the lease, and the client has not heard of it."""
    if client.type(keys[0]) == b"string":
        client.set(keys[0], f"!{token}", px=60_000)
        return
    client.hset(keys[5], token, client.hget(keys[5], token) + b" !disk full")


async def runs_nothing(clean, lease, end):
    end(clean, lease._grant.resource.keys, lease.token)
    assert isinstance(await outcome(lease.execute("SET", "users:x", "late", keys=["users:x"])), LeaseLost)
    assert not clean.exists("users:x")
    assert lease.lost.is_set()
    assert not await lease.release()


@rule(6)
@pytest.mark.parametrize("end", [gone, gone_to_another, revoked], ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_execute_runs_nothing_once_the_lease_has_ended_in_the_server(mode, clean, kind, end):
    lease = await KINDS[kind](mode.interlock())
    assert await lease.execute("SET", "users:x", "ann", keys=["users:x"]) == b"OK"
    clean.delete("users:x")
    await runs_nothing(clean, lease, end)


@rule(6)
@pytest.mark.parametrize("end", [gone, gone_to_another, revoked], ids=lambda end: end.__name__)
async def test_execute_in_a_run_that_has_ended_in_the_server_runs_nothing(mode, clean, end):
    done = []

    async def work(lease):
        assert await lease.execute("SET", "users:x", "ann", keys=["users:x"]) == b"OK"
        clean.delete("users:x")
        await runs_nothing(clean, lease, end)
        done.append(real(lease))

    in_threads = mode.name == "threads"
    once = mode.interlock().once("a", at_most=60)
    run = once.run((lambda lease: asyncio.run(work(AsyncView(lease, mode)))) if in_threads else work)
    assert isinstance(await outcome(run), LeaseLost)
    assert done
