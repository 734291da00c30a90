"""A primary of a cluster that is cut off or paused: nobody holds a lock on both sides."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from harness.clock import machine_time
from harness.groups import last_write, met, started
from harness.matrix import BASE
from harness.modes import SLACK, outcome, queued, until
from harness.topology import Cluster
from harness.topology.group import ask
from interlock import AcquireTimeout, Unavailable
from interlock._connect.address import Address

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="clusters of valkey-9.1")


@pytest.fixture
def wired():
    with started(Cluster, BASE, shards=3, replicas=1, node_timeout=2.0, wired=True) as cluster:
        yield cluster


@pytest.fixture
def patient():
    """A cluster whose nodes notice late that they are cut off, and may be read afterwards."""
    config = {"cluster-allow-reads-when-down": "yes"}
    with started(Cluster, BASE, shards=3, replicas=1, node_timeout=5.0, wired=True, config=config) as cluster:
        yield cluster


def kept_from(node, monkeypatch):
    """Cut clients named "far" off from this node."""
    real = Address._make_connection

    def made(self, *args, **options):
        if self.parameters.get("client_name") == "far" and self.parameters["port"] == node.port:
            raise ConnectionError("cut off")
        return real(self, *args, **options)

    monkeypatch.setattr(Address, "_make_connection", made)
    close(node, "far")


def close(node, name):
    """End the connections of clients of this name to a node."""
    for line in ask(node, "CLIENT", "LIST").splitlines():
        if f" name={name} " in line:
            ask(node, "CLIENT", "KILL", "ID", line.split()[0].partition("=")[2])


@rule(1, 10)
async def test_two_clients_on_both_sides_of_a_cut_never_hold_a_lock_together(mode, patient, monkeypatch):
    near = mode.interlock(patient.url, max_ttl=1)
    far = mode.interlock(f"{patient.url}?client_name=far", max_ttl=1)
    await met(near)
    await met(far)
    held = await mode.keep(far.lock("a", ttl=1).acquire())
    old = patient.primary_of("lock:a")
    new = patient.replica_of(old)
    patient.catch_up(new)
    waiting = asyncio.ensure_future(near.lock("a", ttl=1).acquire())
    await until(lambda: queued(near, 1))
    patient.isolate(old)
    kept_from(old, monkeypatch)
    ask(new, "CLUSTER", "FAILOVER", "TAKEOVER")
    # It renews at the new primary. The old one gives what is not renewed there to a client that waits there, and talks
    # to it all the time: else that client would ask another node who the primary is.
    while not waiting.done():
        await outcome(near.lock("a").inspect())
        await asyncio.sleep(0.05)
    lease = await mode.keep(waiting)
    with redis.Redis.from_url(old.url) as plain:
        granted_by_old = plain.get("lock:a") == lease.token.encode()
    assert held.state == "lost"
    if not granted_by_old:  # it was stopped for a second, so it asked another node who the primary is
        assert lease.fence > held.fence
        pytest.skip("this machine was too busy for the client to stay with the old primary")
    later = await mode.keep(far.lock("a", ttl=1).acquire(timeout=60))
    assert lease.state == "lost"
    assert later.fence > lease.fence > held.fence


@rule(10)
async def test_an_isolated_primary_stops_before_the_isolation_grace_ends(mode, wired):
    """Its links stay open: it tests each of them after half a node timeout, and waits a whole one for the answer."""
    locks = mode.interlock(wired.url, max_ttl=1)
    await met(locks)
    old = wired.primary_of("users:a")
    wired.isolate(old, silent=True)
    silent = time.monotonic()
    last = await last_write(old, "cluster is down")
    graces = {member.history.latest.isolation_grace for member in {*locks._session.server.slots.serving}}
    assert graces == {4.0}
    assert last - silent < 4.0


@rule(1, 10)
async def test_a_node_that_was_paused_and_resumes_grants_nothing(mode):
    """It takes itself for a primary; the other nodes have replaced it, and it does not know that yet."""
    with started(Cluster, BASE, shards=3, replicas=1, node_timeout=1.0, wired=True) as cluster:
        idle, cut = mode.interlock(cluster.url, max_ttl=4), mode.interlock(f"{cluster.url}?client_name=cut", max_ttl=4)
        for locks in (idle, cut):
            await met(locks)
            await (await locks.lock("a", ttl=1).acquire()).release()
        old = cluster.primary_of("lock:a")
        new = cluster.replica_of(old)
        cluster.catch_up(new)
        cluster.isolate(old, silent=True)
        close(old, "cut")  # it connects anew, by a map of before
        old.pause()
        try:
            ask(new, "CLUSTER", "FAILOVER", "TAKEOVER")
            other = mode.interlock(cluster.url, max_ttl=4)
            lease = await mode.keep(other.lock("a", ttl=4).acquire(timeout=40))
        finally:
            old.resume()
        for locks in (idle, cut):
            refused = await outcome(locks.lock("a", ttl=1).acquire(timeout=0))
            assert isinstance(refused, AcquireTimeout), refused
            assert refused.holder == lease.token
        assert not ask(old, "EXISTS", "lock:a")


@rule(8, 10)
async def test_a_node_that_was_paused_grants_nothing_while_no_other_node_answers(mode):
    """No caller waits for longer than its timeout."""
    with started(Cluster, BASE, shards=3, replicas=0, node_timeout=15.0) as cluster:
        locks = mode.interlock(cluster.url)
        await met(locks)
        await (await locks.lock("a").acquire()).release()
        serving = cluster.primary_of("lock:a")
        others = [node for node in cluster.nodes if node is not serving]
        for node in others:
            node.pause()
        await asyncio.sleep(1.1)  # then a connection is not one in use any more
        try:
            began = machine_time()
            error = await outcome(locks.lock("a").acquire(timeout=0.5))
            assert isinstance(error, Unavailable | AcquireTimeout), error
            assert machine_time() - began < 0.5 + SLACK
            assert not ask(serving, "EXISTS", "lock:a")
        finally:
            for node in others:
                node.resume()
        await mode.keep(locks.lock("a").acquire(timeout=20))


@rule(6, 10)
async def test_a_lease_outlives_the_isolation_of_its_primary(mode, wired):
    near, far = mode.interlock(wired.url, max_ttl=20), mode.interlock(wired.url, max_ttl=20)
    await met(near)
    await met(far)
    held = await mode.keep(near.lock("a", ttl=12).acquire())
    old = wired.primary_of("lock:a")
    wired.catch_up(wired.replica_of(old))
    began = time.monotonic()
    wired.isolate(old)
    await asyncio.to_thread(wired.wait_for_primary, "lock:a", old)
    await until(lambda: "fail" in ask(old, "CLUSTER", "INFO").splitlines()[0])
    await held.extend(15)
    assert time.monotonic() - began >= 4  # 1.5 node timeouts, and a second: the old one must have stopped
    assert await far.lock("a", ttl=12).try_acquire() is None
    wired.heal()
    wired.wait_ok()
    assert await held.release()
