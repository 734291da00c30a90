"""The registry: who holds what and who waits for it, and where in their code, as their processes say themselves."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import time

import pytest

from harness.matrix import PASSWORD, USER, least_rights
from harness.modes import outcome, until, waiting
from harness.processes import processes
from interlock import AcquireTimeout, ConfigError
from interlock._client import long_waits
from interlock._protocol.timing import FOREVER
from interlock.primitives.registry import INDEX, entries_key

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")

KINDS = {
    "lock": lambda locks: locks.lock("a"),
    "rwlock": lambda locks: locks.rwlock("a").write(),
    "semaphore": lambda locks: locks.semaphore("a", 1),
    "election": lambda locks: locks.election("a"),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Sessions report several times a second."""
    from interlock._client import registry as client

    monkeypatch.setattr(client, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(client, "REPORT_DELAY", 0.05)


def waits_for(lockable, timeout=30):
    """A task whose own code waits: no line of ours is on the stack of a task made of `acquire()` itself."""

    async def wait():
        return await lockable.acquire(timeout)

    return asyncio.ensure_future(outcome(wait()))


async def holders_of(locks, name="a"):
    return [party for each in await locks.ls() if each.name == name for party in each.holders]


@pytest.mark.parametrize("kind", KINDS)
async def test_ls_says_who_holds_it_and_who_waits_for_it_and_where(mode, kind):
    locks, others = mode.interlock(label="web"), mode.interlock()
    lease = await KINDS[kind](locks).acquire()
    wait = waits_for(KINDS[kind](others))

    async def complete():
        found = await others.ls("a*")
        return found and found[0].holders and found[0].waiters

    await until(complete)
    (found,) = await others.ls("a*")
    assert (found.kind, found.name, found.prefix) == (kind, "a", "lock:")
    (holder,), (waiter,) = found.holders, found.waiters
    assert (holder.token, holder.fence, holder.label) == (lease.token, lease.fence, "web")
    assert (waiter.fence, waiter.label) == (None, "")
    for party in holder, waiter:
        assert re.search(r"\.py:\d+$", party.place)
        assert f"{party.host}/{party.pid}/{party.caller}/" in party.token
        assert 0 <= party.reported_ago <= party.seconds < 30
        assert not party.is_silent
    assert holder.caller_id != waiter.caller_id
    assert await others.ls("b*") == []
    await lease.release()
    assert await (await wait).release()


@pytest.mark.runs_on("each server and way", full="every combination", quorum=True)
async def test_every_kind_of_server_keeps_entries(mode):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: holders_of(others))
    (holder,) = await holders_of(others)
    assert (holder.token, holder.fence) == (lease.token, lease.fence)
    await lease.release()

    async def is_gone():
        return not await others.ls()

    await until(is_gone)
    assert await locks.ping() < 30


async def test_an_entry_ends_with_the_last_lease_and_no_key_lasts_for_ever(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: clean.exists(INDEX))
    (entries,) = clean.keys(f"{INDEX}:*")
    assert 0 < clean.pttl(INDEX) <= 60_000
    assert 0 < clean.pttl(entries) <= 60_000
    await lease.release()
    await until(lambda: not clean.exists(INDEX, entries))
    again = await locks.lock("a").acquire()  # and begins anew
    await until(lambda: clean.exists(INDEX))
    await again.release()


async def test_close_deletes_the_entry_at_once(mode, clean):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    await until(lambda: clean.exists(INDEX))
    await locks.close()
    assert not clean.keys("{interlock:*")


async def test_a_dead_process_leaves_its_entry_so_that_people_see_where_it_was(mode, clean):
    locks = mode.interlock()
    async with processes(mode, 1) as (process,):
        await process.do("acquire", "a", {}, 5)
        await until(lambda: clean.exists(INDEX))
        await process.end(signal.SIGKILL)
        (holder,) = await holders_of(locks)
        assert holder.pid == process.process.pid
        assert "lock_client.py:" in holder.place
        error = await waits_for(locks.lock("a"), 1.5)
        assert isinstance(error, AcquireTimeout)
        assert error.place == holder.place
        assert re.search(rf"It was acquired \S+ s ago at {re.escape(holder.place)}\. Wait longer", str(error))


@pytest.mark.asyncio_only  # a thread of the pool would wait for itself
async def test_a_holder_in_this_process_is_named_without_asking(mode):
    locks, others = mode.interlock(registry=False), mode.interlock()
    lease = await locks.lock("a").acquire()
    error = await waits_for(others.lock("a"), 1.0)
    assert error.place == re.search(r"at (\S+\.py:\d+)\.", str(error))[1]
    assert "Wait longer" in str(error)
    short = await waits_for(others.lock("a"), 0.2)  # a short wait asks nothing
    assert short.place is None
    await lease.release()


async def test_a_long_timeout_names_the_holder_of_its_end(mode, monkeypatch):
    from interlock._client import core

    monkeypatch.setattr(core, "LONG_TIMEOUT", 1.0)
    locks, others, third = (mode.interlock() for _ in range(3))
    lease = await locks.lock("a").acquire()
    next_one = waits_for(third.lock("a"))
    await until(lambda: waiting(locks.lock("a"), 1))
    late = waits_for(others.lock("a"), 3.0)
    await until(lambda: waiting(locks.lock("a"), 2))
    await lease.release()
    following = await next_one
    error = await late
    assert error.holder == following.token
    await following.release()


async def test_it_can_be_turned_off(mode, clean):
    locks = mode.interlock(registry=False)
    lease = await locks.lock("a", ttl=1.0).acquire()
    fence = clean.get("lock:a")
    await asyncio.sleep(1.2)  # past several ticks of the workers, and renewals
    assert clean.get("lock:a") == fence
    assert not clean.exists(INDEX)
    assert await locks.ls() == []
    await lease.release()


async def test_a_server_that_refuses_entries_refuses_no_lock(mode, server, clean, caplog):
    caplog.set_level(logging.INFO, "interlock")
    rules = least_rights().replace(" ~{interlock:processes}*", "")
    clean.execute_command("ACL SETUSER", *rules.split())
    locks = mode.interlock(f"unix://{USER}:{PASSWORD}@{server.socket}")
    lease = await locks.lock("a").acquire()
    await until(lambda: "refuses the entries of the registry" in caplog.text)
    assert "registry=False" in caplog.text
    error = await outcome(locks.ls())
    assert isinstance(error, ConfigError)
    assert "{interlock:processes}*" in str(error)
    assert await lease.release()
    assert await locks.ping() < 30
    clean.acl_deluser(USER)


async def test_keys_of_somebody_else_in_its_place_break_no_lock(mode, clean):
    clean.set(INDEX, "somebody else's", ex=60)
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: mode.session(locks).registry.refused)
    error = await outcome(locks.ls())
    assert isinstance(error, ConfigError)
    assert "holds something else" in str(error)
    assert clean.get(INDEX) == b"somebody else's"
    assert await lease.release()
    clean.delete(INDEX)


async def test_entries_that_this_version_can_not_read_hide_no_others(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: clean.exists(INDEX))
    now_ms = int(time.time() * 1000)
    item = ["lock", "b", "lock:", "t", 1, "x.py:1", 0, "", "", 1, 1, 0]
    good = json.dumps({"v": 1, "library": "9", "holds": [[*item, "of a later version"]], "waits": [], "more": 1})
    for process, entry in {
        "h/1": good,
        "h/2": json.dumps({"v": 2, "holds": "anew"}),
        "h/3": "[" * 100_000,
        "h/4": json.dumps({"v": 1, "holds": [["lock"]], "waits": []}),
        "h/5": json.dumps({"v": 1, "holds": [[1, *item[1:]]], "waits": []}),
        "no number": good,
        "\xff": good,
    }.items():
        clean.zadd(INDEX, {process: now_ms + 60_000})
        clean.hset(entries_key(process), "s", f"{now_ms} {entry}")
        clean.hset(entries_key(process), "of nobody", "nonsense")
        clean.pexpire(entries_key(process), 60_000)
    found = await locks.ls()
    assert [each.name for each in found] == ["a", "b"]
    assert found[1].holders[0].place == "x.py:1"
    await lease.release()


async def test_an_entry_has_the_oldest_leases_and_waiters_only(mode, clean):
    locks = mode.interlock()
    leases = [await locks.lock(f"lock {i:02}").acquire() for i in range(55)]

    async def complete():
        return len(await locks.ls()) == 50

    await until(complete)
    assert [each.name for each in await locks.ls()] == [f"lock {i:02}" for i in range(50)]
    for lease in leases:
        await lease.release()


async def test_a_long_wait_is_logged_with_growing_pauses(mode, caplog, monkeypatch):
    monkeypatch.setattr(long_waits, "FIRST", 0.2)
    caplog.set_level(logging.INFO, "interlock")
    locks, others = mode.interlock(), mode.interlock(registry=False)
    lease = await locks.lock("a").acquire()
    waits = [waits_for(others.lock("a")) for _ in range(3)]

    def lines():
        return [each for each in caplog.records if "waiting for" in each.getMessage()]

    await until(lambda: len(lines()) >= 3)
    for record in lines():
        assert re.search(
            r"^lock 'a': waiting for \d+ s at .*\.py:\d+, as 2 more callers of this process do; held by "
            + re.escape(lease.token)
            + r", for \d+ s, since .*\.py:\d+$",
            record.getMessage(),
        )
        assert record.lock == "a"
    first, second, third = (record.created for record in lines()[:3])
    assert third - second > second - first
    await lease.release()
    for wait in asyncio.as_completed(waits):
        assert await (await wait).release()


async def test_a_pattern_must_be_a_text(mode):
    assert "ls(): the pattern must be a str" in str(await outcome(mode.interlock().ls(42)))


async def test_a_short_section_costs_no_message(mode, clean, monkeypatch):
    from interlock._client import registry as client

    monkeypatch.setattr(client, "REPORT_DELAY", 1.0)
    locks = mode.interlock()
    for _ in range(3):
        assert await (await locks.lock("a").acquire()).release()
    registry = mode.session(locks).registry
    await until(lambda: registry.next_look == FOREVER)  # it has looked, or had no reason to
    assert registry.reported_at == -FOREVER
    assert not clean.exists(INDEX)
