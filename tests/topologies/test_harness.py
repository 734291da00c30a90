"""The topologies of `harness.topology` start, and each harm that they offer does what it says."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest
import redis
from redis.exceptions import AskError, MovedError, TryAgainError

from harness.matrix import required
from harness.modes import wait_until
from harness.processes import lives
from harness.proxy import Proxy
from harness.servers import KINDS, Missing
from harness.topology import Cluster, Independents, Sentinels

pytestmark = pytest.mark.runs_on("its own servers", starts="servers, sentinels, clusters and quorums of every kind")

BASE = "valkey-9.1"
every_kind = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def running(topology, kind=BASE, **options):
    """Start the topology; skip the test, with the name of the server, if this machine lacks it."""
    try:
        made = topology(kind, **options)
    except Missing as missing:
        required(f"no {kind} here: {missing}")
        raise
    with made:
        yield made


@contextlib.contextmanager
def client(node, **options):
    """An ordinary client of one server."""
    made = redis.Redis.from_url(node.tcp_url, decode_responses=True, **options)
    try:
        yield made
    finally:
        made.close()


def put(node, key, value, *, replicas=0):
    """Write, and wait until so many replicas have the write (WAIT counts the writes of its own connection only)."""
    with client(node, single_connection_client=True) as plain:
        plain.set(key, value)
        assert plain.wait(replicas, 5000) >= replicas


def get(node, key):
    with client(node) as plain:
        return plain.get(key)


# Sentinel


@every_kind
def test_sentinels_promote_a_replica_when_the_primary_dies(kind):
    with running(Sentinels, kind) as group:
        ports = [("127.0.0.1", sentinel.port) for sentinel in group.sentinels]
        asked = redis.Sentinel(ports, decode_responses=True)
        assert asked.discover_master("mymaster") == ("127.0.0.1", group.primary.port)
        assert group.url == "redis+sentinel://" + ",".join(f"{host}:{port}" for host, port in ports) + (
            "/0?service=mymaster"
        )
        old, first = group.primary, group.nodes[1]
        assert group.replicas == group.nodes[1:]
        put(old, "a", "kept", replicas=2)
        old.kill()
        assert group.wait_for_primary(old) is first, "the order of promotion is that of the replicas"
        assert get(first, "a") == "kept"
        for sentinel in asked.sentinels:
            sentinel.close()


@every_kind
def test_a_cluster_starts_and_moves_a_slot_with_its_keys(kind):
    with running(Cluster, kind) as cluster:
        source = cluster.primary_of("{a}1")
        target = next(node for node in cluster.nodes[:3] if node is not source)
        assert cluster.primary_of(cluster.slot("a")) is source
        for number in range(4):
            put(source, f"{{a}}{number}", number)
        seen = {}

        def look(step):
            with client(source) as one, client(target) as other:
                seen[step] = one.dbsize(), other.dbsize()
                if step == "open":
                    with pytest.raises(AskError):
                        one.get("{a}new")
                if step == "half":
                    with pytest.raises((TryAgainError, AskError)):  # 6.2 asks there to try again
                        one.mget("{a}0", "{a}1", "{a}2", "{a}3")

        cluster.migrate(cluster.slot("a"), to=target, between=look)
        assert seen == {"open": (4, 0), "half": (2, 2), "moved": (0, 4)}
        assert cluster.primary_of("{a}1") is target
        assert [get(target, f"{{a}}{number}") for number in range(4)] == ["0", "1", "2", "3"]
        with pytest.raises(MovedError):
            get(source, "{a}0")


def test_a_handover_loses_no_write():
    with running(Sentinels) as group, contextlib.ExitStack() as clients:
        old = group.primary
        plain = clients.enter_context(client(old))
        for number in range(200):
            plain.set(f"a{number}", number)
        new = group.handover()
        assert new is not old
        assert group.primary is new
        assert old in group.replicas
        assert int(plain.info("replication")["second_repl_offset"]) > 0, "the old one remembers whom it followed"
        with client(new) as other:
            assert other.dbsize() == 200


def test_a_healthy_primary_can_be_failed_over():
    with running(Sentinels) as group:
        old = group.primary
        new = group.failover()
        assert new is group.primary is not old
        assert len(group.replicas) == 2
        assert group.failover() is not new, "and another one at once"


def test_an_isolated_primary_still_answers_its_clients_while_another_is_promoted():
    with running(Sentinels) as group:
        old = group.primary
        with client(old) as plain:
            put(old, "a", 1, replicas=2)
            group.isolate(old)
            assert plain.info("replication")["connected_slaves"] == 0
            new = group.wait_for_primary(old)
            plain.set("a", 2)  # on the connection that it had
            assert get(old, "a") == "2", "and on a new one"
            assert get(new, "a") == "1"
            group.heal()
            group.wait_ok()
            assert group.primary is new
            assert plain.get("a") == "1", "the old one follows, and has lost its writes"
            with pytest.raises(redis.ReadOnlyError):
                plain.set("a", 3)


def test_a_sentinel_on_the_side_of_an_isolated_primary_names_it_still():
    with running(Sentinels) as group:
        old, lonely = group.primary, group.sentinels[0]
        group.isolate(old, lonely)
        new = group.wait_for_primary(old)
        with redis.Redis(port=lonely.port, decode_responses=True) as asked:
            assert asked.sentinel_get_master_addr_by_name("mymaster") == ("127.0.0.1", old.port)
        group.heal()
        group.wait_ok()
        assert group.primary is new


def test_a_replica_that_lags_is_promoted_without_the_last_writes():
    with running(Sentinels) as group:
        old = group.primary
        put(old, "before", 1, replicas=2)
        group.lag(*group.replicas)
        put(old, "after", 1)
        old.kill()
        new = group.wait_for_primary(old)
        assert (get(new, "before"), get(new, "after")) == ("1", None)


def test_without_sentinels_replicas_are_promoted_by_hand():
    with running(Sentinels, sentinels=0) as group:
        old, one, other = group.nodes
        assert group.url == old.tcp_url
        group.lag(one)
        put(old, "a", 1, replicas=1)
        assert (get(one, "a"), get(other, "a")) == (None, "1")
        group.catch_up(one)
        assert get(one, "a") == "1"
        group.lag(one, other)
        put(old, "b", 1)
        old.kill()
        group.promote(one)
        assert group.primary is one
        assert get(one, "b") is None
        group.heal()
        group.wait_ok()
        put(one, "c", 1, replicas=1)
        assert get(other, "c") == "1", "it follows the new one"


def test_a_server_or_a_sentinel_that_is_restarted_takes_its_place_again():
    with running(Sentinels) as group:
        sentinel, replica = group.sentinels[0], group.replicas[0]
        for node in (sentinel, replica):
            node.kill()
        for node in (sentinel, replica):
            node.restart()
        group.wait_ok()
        assert group.replicas == group.nodes[1:]


def test_the_error_of_a_wait_that_takes_too_long_says_what_is_missing():
    with running(Sentinels, replicas=1, sentinels=1) as group:
        with pytest.raises(TimeoutError, match="fewer than 1 sentinels name a primary other than"):
            group.wait_for_primary(group.primary, timeout=0.1)
        group.replicas[0].pause()
        with pytest.raises(TimeoutError, match="lacks 1 of the others|does not answer"):
            group.wait_ok(timeout=1)


# Cluster


def test_a_shard_whose_primary_dies_is_taken_over_and_the_others_serve_meanwhile():
    with running(Cluster) as cluster:
        primary = cluster.primary_of("a")
        replica = cluster.replica_of(primary)
        bystander = next(node for node in cluster.nodes[:3] if node is not primary)
        key = next(key for key in map(str, range(1000)) if cluster.primary_of(cluster.slot(key)) is bystander)
        primary.kill()
        with pytest.raises(LookupError, match="no node that runs serves slot"):
            cluster.primary_of("a")
        put(bystander, key, 1)
        cluster.wait_ok()
        put(bystander, key, 2)
        assert cluster.primary_of("a") is replica
        primary.restart()
        cluster.wait_ok()
        assert cluster.replica_of(replica) is primary


def test_a_replica_takes_over_its_shard_with_and_without_its_primarys_last_writes():
    with running(Cluster) as cluster:
        old = cluster.primary_of("a")
        new = cluster.replica_of(old)
        put(old, "a", 1)
        cluster.failover(new)
        assert cluster.primary_of("a") is new
        assert get(new, "a") == "1"
        cluster.lag(old)
        put(new, "a", 2)
        new.kill()
        cluster.failover(old, takeover=True)
        assert get(old, "a") == "1"


def test_the_move_of_a_slot_can_be_left_half_way():
    with running(Cluster, shards=2, replicas=0) as cluster:
        source = cluster.primary_of("a")
        target = next(node for node in cluster.nodes if node is not source)
        with pytest.raises(ValueError, match="already"):
            cluster.migrate(cluster.slot("a"), to=source)
        put(source, "a", 1)
        for step in cluster.migrating(cluster.slot("a"), to=target):
            if step == "moved":
                break
        assert cluster.primary_of("a") is source
        with pytest.raises(AskError):
            get(source, "a")


# Independents, and what all have


def test_independents_know_nothing_of_each_other():
    with running(Independents, number=5, config={"maxmemory": "64mb"}, new=True) as servers:
        clients = [redis.Redis.from_url(url) for url in servers.urls]
        assert len({each.info("server")["run_id"] for each in clients}) == 5
        assert {each.config_get("maxmemory")["maxmemory"] for each in clients} == {str(64 << 20)}
        clients[0].set("a", 1)
        assert [each.dbsize() for each in clients] == [1, 0, 0, 0, 0]
        for each in clients:
            each.close()


def test_a_server_that_is_missing_is_named_before_anything_starts():
    with pytest.raises(KeyError, match=r"redis-1\.0"):
        Cluster("redis-1.0")


def test_all_servers_end_with_the_process_that_started_them():
    code = """
import sys
from harness.topology import Cluster, Sentinels
one, other = Sentinels(replicas=1, sentinels=1), Cluster(shards=1, replicas=0)
one.start(), other.start()
print(*(node.pid for node in (*one.nodes, *one.sentinels, *other.nodes)), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        pids = [int(pid) for pid in child.stdout.readline().split()]
        child.kill()
    assert len(pids) == 4
    wait_until(lambda: not any(lives(pid) for pid in pids))


def test_a_proxy_without_a_server_ends_each_connection_and_goes_on(tmp_path):
    with Proxy(tmp_path / "nobody") as proxy:
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as client_socket:
                client_socket.settimeout(20)
                client_socket.connect(proxy.path)
                assert client_socket.recv(1) == b""
        assert not proxy.pairs
