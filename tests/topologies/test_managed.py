"""Servers with the restrictions of managed services, as docs/managed.md lists them. No service itself ran a test.

A command that a service removes is renamed to nothing here, and one that it refuses is forbidden by an ACL.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis

from harness.groups import started
from harness.modes import outcome
from harness.servers import Node
from harness.topology import Cluster
from harness.topology.group import ask
from interlock import AcquireTimeout, ConfigError

pytestmark = pytest.mark.runs_on("valkey-9.1", starts="servers and a cluster of valkey-9.1")

# What each service's documentation says that it does not have; commands of the server only, not of a cluster's nodes.
REMOVED = {
    "ElastiCache": "bgrewriteaof bgsave config debug migrate replicaof save slaveof shutdown sync",
    "MemoryDB": "acl bgrewriteaof bgsave config debug migrate module psync replicaof save shutdown slaveof sync",
    "OCI Cache": "acl bgrewriteaof bgsave cluster config debug migrate module psync replicaof save shutdown sync",
    "Aiven": "acl bgrewriteaof bgsave cluster command config debug failover lastsave migrate monitor replicaof save "
    "shutdown slaveof",
}


def doctor(url):
    """What `interlock doctor` says, and its exit status."""
    command = [sys.executable, "-m", "interlock", "doctor", "--url", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout, ended.returncode


async def works(mode, url):
    """Each synchronizer works once, and a lock is handed over to a waiter of another client."""
    locks, others = mode.interlock(url), mode.interlock(url)
    lease = await locks.lock("a").acquire(10)
    assert await others.lock("a").try_acquire() is None
    assert isinstance(await outcome(others.lock("a").acquire(0.2)), AcquireTimeout)
    assert await lease.execute("SET", "{lock:a}left", "9", "PX", "9000", keys=["{lock:a}left"])
    await lease.extend(20)
    assert await lease.release()
    for each in (locks.rlock("r"), locks.rwlock("w").read(), locks.semaphore("s", 2), locks.election("e")):
        assert await (await each.acquire(timeout=10)).release()
    assert await locks.latch("l", 1).count_down() == 0
    for made in mode.made:
        await made.close()
    mode.made.clear()


@pytest.mark.parametrize("service", REMOVED)
async def test_a_server_without_the_commands_that_a_service_removes(mode, service):
    removed = {f"rename-command {each}": '""' for each in REMOVED[service].split()}
    with started(Node, config=removed) as node:
        await works(mode, node.url)
        said, status = doctor(node.url)
        assert status == 0, said
        assert "danger" not in said


async def test_without_wait_only_acks_fail(mode, server, clean):
    ask(server, "ACL", "SETUSER", "managed", "reset", "on", ">pw", "~*", "&*", "+@all", "-wait", "-waitaof", "-config")
    try:
        url = f"unix://managed:pw@{server.socket}"
        await works(mode, url)
        error = await outcome(mode.interlock(url).lock("a", acks=1).acquire(5))
        assert isinstance(error, ConfigError)
        assert "'wait'" in str(error).lower()
    finally:
        ask(server, "ACL", "DELUSER", "managed")


async def test_one_node_that_serves_all_slots_and_says_little(mode):
    """As ElastiCache Serverless shows itself: a cluster of one virtual node, nothing to configure."""
    with started(Cluster, shards=1, replicas=0) as cluster:
        for node in cluster.nodes:
            ask(node, "ACL", "SETUSER", "managed", "reset", "on", ">pw", "~*", "&*", "+@all", "-config", "-wait",
                "-@dangerous", "+info", "+cluster|slots", "+cluster|info")  # fmt: skip
        await works(mode, cluster.url.replace("://", "://managed:pw@", 1))


END = "test_managed:end"


async def test_each_script_names_its_keys(mode, server, clean):
    """Dragonfly, and services that route by key, refuse a script without keys."""
    with redis.Redis.from_url(server.url) as watching, watching.monitor() as monitor:
        await works(mode, server.url)
        ask(server, "PING", END)
        scripts = []
        for said in monitor.listen():
            if said["command"] == f"PING {END}":
                break
            if said["command"].startswith("EVAL") and said["client_type"] != "lua":
                scripts.append(said["command"].split(" ", 3))
    assert len(scripts) > 10
    assert all(int(keys) > 0 for _, _, keys, _ in scripts if keys.isdecimal())


NO_LUA = "runs no Lua scripts"


async def test_a_valkey_without_its_lua_module_is_named(mode):
    with started(Node, config={"enable-module-command": "yes"}) as node:
        ask(node, "MODULE", "UNLOAD", "lua")
        error = await outcome(mode.interlock(node.url).lock("a").acquire(5))
        assert isinstance(error, ConfigError)
        assert NO_LUA in str(error)
        assert "MODULE LIST" in str(error)
        said, status = doctor(node.url)
        assert (NO_LUA in said, status) == (True, 1)


async def test_a_service_without_eval_is_named(mode):
    """As a sharded cluster of OCI Cache."""
    with started(Node, config={"rename-command EVAL": '""', "rename-command EVALSHA": '""'}) as node:
        error = await outcome(mode.interlock(node.url).lock("a").acquire(5))
        assert isinstance(error, ConfigError)
        assert NO_LUA in str(error)


async def test_an_acl_that_forbids_eval_names_the_right(mode, server, clean):
    ask(server, "ACL", "SETUSER", "managed", "reset", "on", ">pw", "~*", "&*", "+@all", "-eval", "-evalsha")
    try:
        error = await outcome(mode.interlock(f"unix://managed:pw@{server.socket}").lock("a").acquire(5))
        assert isinstance(error, ConfigError)
        assert "+evalsha +eval" in str(error)
    finally:
        ask(server, "ACL", "DELUSER", "managed")


async def test_a_server_without_resp3_is_named(mode):
    with started(Node, config={"rename-command HELLO": '""'}) as node:
        error = await outcome(mode.interlock(node.url).lock("a").acquire(5))
        assert isinstance(error, ConfigError)
        assert "has no HELLO" in str(error)
