"""The least rights of docs/acl.md, on one server, a cluster and a quorum; and the error for a missing right."""

from __future__ import annotations

import asyncio
import re

import pytest

from harness.groups import handed_over, met, started
from harness.matrix import BASE, PASSWORD, USER, cluster_rights, least_rights
from harness.modes import outcome, until
from harness.topology import Cluster, Independents
from harness.topology.group import ask
from interlock import AcquireTimeout, ConfigError, LockError
from interlock._client import waiting as _waiters
from interlock._client.error_texts import CLUSTER_RIGHTS, LEAST_RIGHTS, SHARDED_CHANNEL_RIGHTS
from interlock._connect.address import _warn_of_defaults

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", starts="clusters of valkey-9.1 and redis-6.2, a quorum")


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
@rule(9)
@pytest.mark.parametrize("missing", ["-time", "-set", "-exists", "-pexpire", "-zadd"])
async def test_a_right_that_a_script_lacks_is_named_and_leaves_no_key_without_a_ttl(mode, server, clean, missing):
    lease = await mode.interlock().lock("a").acquire()
    clean.execute_command("ACL SETUSER", *least_rights().split(), missing)
    locks = mode.interlock(f"unix://{USER}:{PASSWORD}@{server.socket}")
    await outcome(locks.ping())  # connecting is not what the timeouts are for
    refused = []
    for name in ("a", "b"):
        result = await outcome(locks.lock(name).acquire(timeout=0.3))
        if isinstance(result, LockError):
            refused.append(result)
        else:
            await outcome(result.release())
    told = [error for error in refused if not isinstance(error, AcquireTimeout)]
    assert told
    assert all(isinstance(error, ConfigError) and LEAST_RIGHTS in str(error) for error in told), told
    assert all(clean.pttl(key) != -1 for key in clean.scan_iter())
    await locks.close()
    mode.made.remove(locks)
    clean.acl_deluser(USER)
    assert await lease.release()


def test_the_error_names_the_least_rights_of_the_page():
    """Installed packages do not contain the page."""
    assert {*LEAST_RIGHTS.split()} == {*least_rights().split()} - {USER, "on", f">{PASSWORD}", "resetchannels"}
    assert {*cluster_rights("redis-6.2").split()} == {*CLUSTER_RIGHTS.split()}
    assert {*cluster_rights(BASE).split()} == {*CLUSTER_RIGHTS.split(), *SHARDED_CHANNEL_RIGHTS.split()}


def grant_least(group, *more):
    """Make the user of docs/acl.md on every node, with these rules besides."""
    _, *rules = least_rights().split()
    for node in group.nodes:
        ask(node, "ACL", "SETUSER", USER, "reset", *rules, *more)
        ask(node, "ACL", "LOG", "RESET")


def refusals(group):
    """What a node refused to the user of docs/acl.md."""
    return [entry for node in group.nodes if node.running for entry in ask(node, "ACL", "LOG") if USER in entry]


def as_user(url):
    return url.replace("://", f"://{USER}:{PASSWORD}@", 1)


@pytest.mark.parametrize("kind", [BASE, "redis-6.2"])
async def test_the_least_rights_on_a_cluster_are_enough(mode, kind, monkeypatch):
    monkeypatch.setattr(_waiters, "HEARTBEAT_INTERVAL", 1000.0)  # a push that is lost would be missed for ever
    with started(Cluster, kind, shards=3, replicas=1) as cluster:
        grant_least(cluster, *cluster_rights(kind).split())
        locks, others = (mode.interlock(as_user(cluster.url), max_ttl=30) for _ in range(2))
        await met(locks)
        await met(others)
        server = others._session.server
        await handed_over(locks.lock("a"), others.lock("a"), lambda: server.subscription_of("lock:a")[0] == "1")
        await handed_over(
            locks.semaphore("s", 1), others.semaphore("s", 1), lambda: server.subscription_of("lock:s")[0] == "1"
        )
        slot = cluster.slot("lock:held")
        held = await mode.keep(locks.lock("held").acquire())
        old = cluster.primary_of(slot)
        to = next(node for node in cluster.nodes[:3] if node is not old)
        for step in cluster.migrating(slot, to=to):
            if step == "moved":
                await held.extend(25)  # ASK
        await held.extend(25)
        await (await others.lock("free:{lock:held}").acquire(timeout=10)).release()
        cluster.failover(cluster.replica_of(to))  # which loses nothing
        await held.extend(25)
        await (await others.lock("free:{lock:held}").acquire(timeout=10)).release()
        new = cluster.primary_of(slot)
        cluster.lag(cluster.replica_of(new))
        await mode.keep(locks.lock("lost:{lock:held}", renew=False).acquire())
        new.kill()
        cluster.wait_ok()
        await others.lock("lost:{lock:held}").inspect()  # it has found the new primary
        assert "quarantine" in str(await outcome(others.lock("lost:{lock:held}").acquire(timeout=0)))
        assert (await others.lock("lost:{lock:held}").inspect()).quarantined
        assert await others.lock("lost:{lock:held}").revoke("all have been stopped", force=True)
        await (await others.lock("lost:{lock:held}").acquire(timeout=10)).release()
        assert not refusals(cluster)


async def test_the_least_rights_of_a_quorum_are_those_of_one_server(mode, monkeypatch):
    monkeypatch.setattr(_waiters, "HEARTBEAT_INTERVAL", 1000.0)
    with started(Independents, BASE, number=3) as servers:
        grant_least(servers)
        locks, others = (mode.interlock([as_user(url) for url in servers.urls], max_ttl=3) for _ in range(2))
        server = others._session.server
        await handed_over(
            locks.lock("a"),
            others.lock("a"),
            lambda: all(each.server.subscription_of("lock:a")[0] == "1" for each in server.nodes),
        )
        await mode.keep(locks.lock("lost", renew=False).acquire())
        for node in servers.nodes[1:]:
            node.kill()
            node.restart()
        grant_least(servers)
        assert "grant nothing" in str(await outcome(others.lock("lost", ttl=3).acquire(timeout=0.5)))
        await (await others.lock("lost", ttl=3).acquire(timeout=20)).release()
        assert not refusals(servers)


@pytest.fixture
def rights(server_pool):
    """The cluster of this run, with the user of docs/acl.md."""
    cluster = server_pool.clean_cluster(BASE)
    yield cluster
    for node in cluster.nodes:
        ask(node, "ACL", "DELUSER", USER)


@pytest.mark.parametrize("missing", ["-cluster|slots", "-cluster|info", "-config|get", "-ssubscribe", "-spublish"])
async def test_a_right_that_is_missing_on_a_cluster_is_named(mode, clean, rights, caplog, missing):
    _warn_of_defaults.cache_clear()
    grant_least(rights, *cluster_rights(BASE).split(), missing)
    locks, others = mode.interlock(as_user(rights.url)), mode.interlock(as_user(rights.url))
    if missing.startswith("-cluster"):
        with pytest.raises(ConfigError, match=re.escape(f"the rights {CLUSTER_RIGHTS}")):
            await locks.lock("a").acquire(5)
        return
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire(timeout=30))
    said = "assumes the server's default" if missing == "-config|get" else "polling only"
    await until(lambda: said in caplog.text)
    await lease.release()
    assert await (await waiting).release()


async def test_without_the_right_to_asking_the_error_for_a_moving_slot_says_so(mode, clean, rights):
    grant_least(rights, *cluster_rights(BASE).split(), "-asking")
    lease = await mode.keep(mode.interlock(as_user(rights.url)).lock("a").acquire())
    slot = rights.slot("lock:a")
    old = rights.primary_of(slot)
    to = next(node for node in rights.nodes if node is not old)
    for step in rights.migrating(slot, to=to):
        if step == "moved":
            with pytest.raises(ConfigError, match=r"ACL forbids it.*\+asking.*'asking'"):
                await lease.extend(25)
    await lease.extend(25)
    rights.migrate(slot, to=old)
