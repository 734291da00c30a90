"""Quarantine: what proves that a server lost nothing, which clients are witnesses, and how revoke() ends one.

Not here: when a quarantine begins and how long it lasts (test_quarantine.py), proofs in a real failover
(`topologies/test_sentinel.py`, `topologies/test_cluster.py`).
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading

import pytest
import redis

from harness.clock import machine_time
from harness.matrix import ROOT
from harness.modes import outcome, until
from harness.servers import free_ports
from harness.topology import Sentinels
from interlock import AcquireTimeout
from interlock._connect.address import config_value
from interlock._quarantine.identity import NO_REPLID, Facts, parse_facts
from interlock._quarantine.stamp import IdentityStamp
from interlock.primitives.codes import GRANTED, NOT_FOUND

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", starts="primaries with replicas")


PROOF = "interlock._servers.single.least_lossless_ttl"


KINDS = {"lock": lambda locks: locks.lock("a"), "semaphore": lambda locks: locks.semaphore("a", 1)}


def crash(node):
    node.kill()
    node.restart()


@rule(8)
@pytest.mark.parametrize("timeout", [0, 0.5])
async def test_a_proof_that_changes_nothing_is_looked_for_once(mode, node, monkeypatch, timeout):
    """A client with quarantine=False can not pass the proof on in a message; it asked again, without pause or end."""
    locks, other = mode.interlock(node.url, max_ttl=60), mode.interlock(node.url, quarantine=False)
    await (await locks.lock("a").acquire()).release()
    crash(node)
    assert isinstance(await outcome(locks.lock("a").acquire(timeout=0)), AcquireTimeout)  # its marker stays
    monkeypatch.setattr(PROOF, lambda *_: 0.0)
    error = await outcome(other.lock("a").acquire(timeout=timeout))
    assert isinstance(error, AcquireTimeout)
    assert "quarantine" in str(error)


@rule(10)
async def test_revoke_by_force_ends_a_quarantine_that_a_witness_began(mode, node):
    """The witness does not know the kind of the resource; the record with the kind was lost."""
    locks = mode.interlock(node.url, max_ttl=10)
    lease = await mode.keep(locks.election("a", ttl=2).campaign())
    crash(node)
    await until(lambda: lease.state == "lost")
    fresh = mode.interlock(node.url, max_ttl=10)
    assert await fresh.election("a", ttl=2).revoke("all have been stopped", force=True)
    assert await fresh.election("a", ttl=2).leader() is None
    await (await fresh.election("a", ttl=2).campaign(timeout=1)).release()


@rule(6)
async def test_one_caller_looks_for_a_proof_for_all_and_delays_no_renewal(mode, node, client, monkeypatch):
    """Each look costs connections, to sentinels and replicas too; hundreds looked, and renewals waited for them."""
    looks, former, over = [], [""], threading.Event()

    def look(*args):
        looks.append(args)
        over.wait(30)

    monkeypatch.setattr(IdentityStamp, "old_primary", lambda *_: former[0])
    monkeypatch.setattr(PROOF, look)
    locks = mode.interlock(node.url)
    leases = [await mode.keep(locks.lock(f"held-{number}", ttl=1, renew=bool(number)).acquire()) for number in range(2)]
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


@rule(8)
@pytest.mark.parametrize("timeout", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_search_for_a_proof_does_not_outlast_the_timeout_of_its_caller(mode, node, monkeypatch, kind, timeout):
    """Each step of a search may take as long as a replica takes that does not answer."""
    locks, over = mode.interlock(node.url), threading.Event()
    await (await KINDS[kind](locks).acquire()).release()
    crash(node)
    monkeypatch.setattr(PROOF, lambda *_: over.wait(30) and None)
    began = machine_time()
    try:
        errors = await asyncio.gather(*(outcome(KINDS[kind](locks).acquire(timeout=timeout)) for _ in range(3)))
        assert machine_time() - began < 20, "they waited for the search"
    finally:
        over.set()
    for error in errors:
        assert isinstance(error, AcquireTimeout), error
        assert error.quarantined


def test_a_proof_that_is_found_twice_stands_once_in_the_stamp():
    """The stamp travels with every message."""
    epoch = IdentityStamp(Facts("r" * 40, "p" * 40, NO_REPLID, uptime=5, now_ms=100_000, replicas=0), 60, "a:b")
    epoch.mark_lossless("a:b")
    text = epoch.text
    epoch.mark_lossless("a:b")
    assert epoch.text == text


@rule(10)
async def test_a_connection_for_acks_that_outlives_a_demotion_is_not_trusted(mode):
    """As in test_quarantine, for the connections on which grants wait for replicas: asyncio has others for them."""
    with Sentinels(replicas=1, sentinels=1, config={"min-replicas-to-write": "0"}) as group:
        locks = mode.interlock(group.url, max_ttl=30)
        await (await locks.lock("a", acks=1).acquire()).release()
        node, other = group.nodes
        with redis.Redis.from_url(node.url) as plain:
            await asyncio.sleep(1.1)  # it is idle for longer than a connection is trusted
            plain.replicaof("127.0.0.1", other.port)
            plain.replicaof("NO", "ONE")
        error = await outcome(locks.lock("a", acks=1).acquire(timeout=0))
        assert isinstance(error, AcquireTimeout), error
        assert "quarantine" in str(error)


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_revoke_by_force_ends_a_quarantine_that_inspect_only_saw(mode, node, kind):
    """Nobody had asked for the lock since the restart, so there was no marker, or no record, to end."""
    locks, other = mode.interlock(node.url), mode.interlock(node.url)
    for each in (locks, other):
        await (await KINDS[kind](each).acquire()).release()
    crash(node)
    state = await KINDS[kind](locks).inspect()
    assert state.quarantined if kind == "lock" else state.quarantine
    assert await KINDS[kind](locks).revoke("all have been stopped", force=True)
    for each in (other, locks):
        await (await KINDS[kind](each).acquire(timeout=0)).release()


@rule(10)
async def test_a_client_that_held_a_permit_is_a_witness_of_the_restart(mode, node):
    locks = mode.interlock(node.url)
    lease = await mode.keep(locks.semaphore("a", 2, ttl=2).acquire())
    crash(node)
    await until(lambda: lease.state == "lost")
    fresh = mode.interlock(node.url).semaphore("a", 2)
    error = await outcome(fresh.acquire(timeout=0))
    assert isinstance(error, AcquireTimeout), error
    assert "quarantine" in str(error)
    assert (await fresh.inspect()).limit in {None, 2}


@rule(6, 10)
@pytest.mark.parametrize("script", ["lock", "permits"])
@pytest.mark.parametrize("full", [False, True])
def test_marks_of_witnesses_keep_no_lease_from_its_renewal(monkeypatch, script, full):
    """Each witness marks its own lock; if the server has no memory for that, it renews the leases behind it anyway."""
    pytest.importorskip("lupa")
    from model import script_model as walk

    walk.able(monkeypatch)
    world = walk.World(script, ())
    here, now_ms = "r" * 12 + ":" + "p" * 12, int(world.now)
    parts = {"lock": ("lock", "record"), "permits": ("holders", "record", "shares")}[script]

    def keys(*names, parts=parts):
        return [f"{name}-{part}".encode() for name in names for part in parts]

    def say(*args, keys, former):
        words = [str(arg).encode() for arg in (*args, f"{here} {now_ms} 60000 0 {former}")]
        return world.server.eval(world.source, keys, words)

    every = keys("held", parts=(*parts[:2], "queue", "waiters", "gone", *parts[2:]))
    terms = {"lock": ("", "lock"), "permits": ("semaphore", 1, 1, "")}[script]
    assert say("acquire", "me", 5000, 3000, 0, "c", 0, *terms, keys=every, former="-")[0] == GRANTED
    world.server.full = full
    asked = ("lost", 9000, "lost", 9000, "me", 9000)
    assert say("renew", *asked, keys=keys("one", "two", "held"), former="a:b") == [NOT_FOUND, NOT_FOUND, GRANTED]
    marks = [world.look(keys(name)[script == "permits"]) for name in ("one", "two")]
    assert marks == [None, None] if full else all(b"a:b>" in mark for mark in marks)


def test_a_server_that_hides_its_identity_has_no_quarantine():
    """A proxy may hide it; the scripts would take another text for the identity, and fail."""
    info = b"# Server\r\nrun_id:%b\r\n"
    replication, time = b"master_replid:%b\r\n" % (b"b" * 40), [b"1", b"1"]
    assert parse_facts(info % (b"a" * 40), replication, time).identity == "a" * 12 + ":" + "b" * 12
    assert parse_facts(info % b"0", replication, time) is None
    assert config_value({}) is None


REDIS_CLI = """#!%s -SE
import socket, sys

_, _, port, *words = sys.argv
command = "".join(f"${len(word)}\\r\\n{word}\\r\\n" for word in words)
with socket.create_connection(("127.0.0.1", int(port))) as connection:
    connection.sendall(f"*{len(words)}\\r\\n{command}QUIT\\r\\n".encode())
    reply = connection.makefile().read()
print(reply)
sys.exit(reply.startswith("-"))
"""


@rule(10)
@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
async def test_after_a_shutdown_with_a_complete_log_holders_go_on_and_free_names_wait(mode, server_pool, cell):
    """As docs/failover.md says of `appendfsync always`: the new process can't know that its log is complete."""
    with server_pool.spare(cell.kind, config={"appendonly": "yes", "appendfsync": "always"}) as node:
        locks = mode.interlock(node.url, max_ttl=60)
        lease = await mode.keep(locks.lock("a").acquire())
        with redis.Redis.from_url(node.url) as plain:
            plain.shutdown()
        crash(node)  # it has ended already
        await lease.extend(30)
        error = await outcome(locks.lock("never used").acquire(timeout=0))
        assert isinstance(error, AcquireTimeout)
        assert error.quarantined
        assert await lease.release()


async def shell(script, path):
    """Run these lines with the commands in `path`."""
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec("sh", "-ec", script, env=environment)
    assert await asyncio.wait_for(process.wait(), 60) == 0


@rule(10)
@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
async def test_a_server_is_replaced_without_a_pause_as_the_page_says(mode, server_pool, cell, tmp_path, caplog):
    """Names that nobody ever used are acquired all the time, and a lease is held through it."""
    caplog.set_level("INFO", "interlock")
    page = (ROOT / "docs/failover.md").read_text()
    start, *commands = re.findall(r"```sh\n(redis-server .*?)```", page, re.DOTALL)[0].splitlines()
    cli = tmp_path / "redis-cli"
    cli.write_text(REDIS_CLI % sys.executable)
    cli.chmod(0o700)
    config = {"repl-diskless-sync-delay": "0"}
    with server_pool.spare(cell.kind, config=config) as old, server_pool.spare(cell.kind, config=config) as new:
        locks = mode.interlock(old.tcp_url, max_ttl=60)
        held = await mode.keep(locks.lock("held", ttl=9).acquire())
        waits, over = [], asyncio.Event()

        async def work():
            while not over.is_set():
                began = machine_time()
                await (await locks.lock(f"never used {len(waits)}").acquire(timeout=30)).release()
                waits.append(machine_time() - began)
                await asyncio.sleep(0.01)

        working = asyncio.create_task(work())
        assert start == "redis-server new.conf --port 6380 --replicaof 127.0.0.1 6379 --daemonize yes"
        with redis.Redis.from_url(new.url) as plain:
            plain.replicaof("127.0.0.1", old.port)
        script = "\n".join(commands)
        for port, ours in {"6379": old.port, "6380": new.port, "6381": free_ports()[0]}.items():
            script = script.replace(port, str(ours))
        attach, hand_over = script.split("sleep 5\n")
        await shell(attach, tmp_path)
        with redis.Redis.from_url(old.url) as plain:
            replid = plain.info("replication")["master_replid"]
        await until(lambda: mode.session(locks).server.history.latest.facts.replid == replid)
        await shell(hand_over, tmp_path)
        granted = len(waits)
        await until(lambda: len(waits) > granted + 5, within=15)
        over.set()
        await working
        assert [text for text in caplog.messages if "lost no lease when it took over" in text]
        assert max(waits) < 15  # a quarantine lasts 60
        assert await held.release()
        for each in (locks, mode.interlock(old.tcp_url, max_ttl=60)):
            await (await each.lock(f"never used {len(waits) - 1}").acquire(timeout=10)).release()
