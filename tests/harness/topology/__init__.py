"""Whole topologies of real servers on loopback, for tests: with Sentinel, as a cluster, or independent of each other.

    with Sentinels() as group:                        # 1 primary, 2 replicas, 3 sentinels
        locks = Interlock(group.url)
        group.lag(*group.replicas)                    # what is written from now on reaches the primary only
        lease = locks.lock("a").acquire()
        old = group.primary
        old.kill()
        new = group.wait_for_primary(old)             # it has never heard of the lease

    with Cluster(shards=3, replicas=1) as cluster:
        cluster.migrate(42, to=cluster.nodes[1])
        cluster.primary_of("lock:a").kill()
        cluster.wait_ok()

    with Independents(number=5) as servers:
        Interlock.quorum(servers.urls)

Every server is a `harness.servers.Node`: it can be killed, restarted, paused, and it ends with the process
that started it. All kinds of `servers.KINDS` will do; `servers.Missing` says how to get one that is not here.
A wait that takes too long is a `TimeoutError` that says what is missing.
"""

from .cluster import Cluster
from .independents import Independents, empty, serve_long
from .sentinels import Sentinels

__all__ = ["Cluster", "Independents", "Sentinels", "empty", "serve_long"]
