"""A cluster and sentinels over TLS."""

from __future__ import annotations

import pytest

from harness.groups import handed_over, met, started
from harness.topology import Cluster, Sentinels
from interlock import ConfigError

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="a cluster and sentinels of redis-7.0")


@pytest.fixture
def tls(server_pool):
    """The files of a certificate, where there is a server that speaks TLS."""
    server_pool.node("redis-7.0")
    return server_pool.certificate


async def is_not_trusted(locks):
    """Fails unless an untrusted certificate raises ConfigError at once: waiting would not help."""
    with pytest.raises(ConfigError, match=r"certificate is not trusted.*\?ssl_ca_certs="):
        await locks.lock("a").acquire()
    await locks.close()


async def test_a_cluster_over_tls_works_and_an_untrusted_certificate_is_refused(mode, tls):
    with started(Cluster, "redis-7.0", shards=3, replicas=1, tls=tls) as cluster:
        locks, others = mode.interlock(cluster.url), mode.interlock(cluster.url)
        await met(locks)
        await met(others)
        leases = [await mode.keep(locks.lock(f"held-{number}").acquire()) for number in range(12)]
        assert len({cluster.primary_of(f"lock:{lease.name}") for lease in leases}) == 3
        server = others._session.server
        assert all(member.address.kind == "tls" for member in {*server.slots.serving})
        await handed_over(locks.lock("a"), others.lock("a"), lambda: server.subscription_of("lock:a")[0] == "1")
        slot = cluster.slot("lock:held-0")
        old = cluster.primary_of(slot)
        cluster.migrate(slot, to=next(node for node in cluster.nodes[:3] if node is not old))
        await leases[0].extend(30)
        cluster.failover(cluster.replica_of(old))
        for lease in leases:
            await lease.extend(30)
        await is_not_trusted(mode.interlock(cluster.url.partition("?")[0]))


async def test_sentinels_over_tls_work_and_an_untrusted_certificate_is_refused(mode, tls):
    with started(Sentinels, "redis-7.0", replicas=1, sentinels=1, tls=tls) as group:
        locks, others = mode.interlock(group.url), mode.interlock(group.url)
        server = others._session.server
        await handed_over(locks.lock("a"), others.lock("a"), lambda: server.subscription_of("lock:a")[0] == "1")
        held = await mode.keep(locks.lock("held").acquire())
        group.catch_up(*group.replicas)
        group.primary.kill()
        await held.extend(30)
        await is_not_trusted(mode.interlock(group.url.partition("&")[0]))
