"""Edges beyond one server: fork, least rights, TLS, and a primary that is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import pytest
import redis

from grounds import BASE, required
from interlock.connect import Address
from interlock.testing.servers import Missing
from interlock.testing.topology import Cluster, Independents, Sentinels
from interlock.testing.topology.group import ask
from kit import queued, until

rule = pytest.mark.rule


def started(kind, *args, **options):
    """A topology, or a skip."""
    try:
        return kind(*args, **options)
    except Missing as missing:
        required(str(missing))
        raise


KINDS = {
    "sentinel": lambda: started(Sentinels, BASE, replicas=1, sentinels=3),
    "cluster": lambda: started(Cluster, BASE, replicas=0),
    "quorum": lambda: started(Independents, BASE, number=3),
}


# Fork


class Parent:
    """A process that runs forking.py."""

    def __init__(self, process) -> None:
        self.process = process

    async def does(self, line: str) -> str:
        """What it says when that is done."""
        await self.say(line)
        return await self.hears()

    async def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def hears(self) -> str:
        line = await self.process.stdout.readline()
        assert line, "it failed"
        return line.decode().strip()


@contextlib.asynccontextmanager
async def parent(kit, urls):
    script = str(Path(__file__).with_name("forking.py"))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, script, kit.mode, *urls, stdin=pipe, stdout=pipe)
    try:
        yield Parent(process)
        process.stdin.close()
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()


def connections(group):
    """Of clients named "parent", at each server."""
    return {
        (node.port, line.split()[0])
        for node in group.nodes
        for line in ask(node, "CLIENT", "LIST").splitlines()
        if " name=parent " in line
    }


@rule(3, 6, 11)
@pytest.mark.parametrize("topology", KINDS)
async def test_a_child_after_fork_begins_anew_and_its_parent_goes_on(kit, topology):
    with KINDS[topology]() as group:
        urls = group.urls if topology == "quorum" else [group.url]
        locks = kit.interlock(urls if topology == "quorum" else urls[0], max_ttl=5)
        wanted = await locks.lock("wanted", ttl=5).acquire()
        named = [f"{url}{'&' if '?' in url else '?'}client_name=parent" for url in urls]
        async with parent(kit, named) as forking:
            await forking.does("hold")

            async def waits():
                return (await locks.lock("wanted").inspect()).waiting == 1

            await until(waits)
            before = connections(group)
            assert before
            for _ in range(2):
                await forking.does("fork")
            assert before <= connections(group)
            assert await forking.does("go") == "renewed"
            await wanted.release()
            assert await asyncio.wait_for(forking.hears(), 10) == "done"


@rule(10, 11)
async def test_a_child_remembers_who_served_before(kit):
    """Its parent has heard of a failover and not asked for this lock since; nobody else knows of the lost grant."""
    with started(Cluster, BASE, shards=1) as cluster:
        locks = kit.interlock(cluster.url, max_ttl=5)
        old, new = cluster.nodes
        async with parent(kit, [f"{cluster.url},127.0.0.1:{new.port}"]) as forking:
            await forking.does("use hello")
            cluster.lag(new)
            await kit.keep(locks.lock("lost", ttl=5, renew=False).acquire())
            old.kill()
            cluster.failover(new, takeover=True)
            await forking.does("use other")
            assert await forking.does("look lost") == "no"


# A primary of a cluster that is cut off


@pytest.fixture
def wired():
    with started(Cluster, BASE, shards=3, replicas=1, node_timeout=2.0, wired=True) as cluster:
        yield cluster


def kept_from(node, monkeypatch):
    """Clients named "far" do not reach this node any more."""
    real = Address._made

    def made(self, *args, **options):
        if self.parameters.get("client_name") == "far" and self.parameters["port"] == node.port:
            raise ConnectionError("cut off")
        return real(self, *args, **options)

    monkeypatch.setattr(Address, "_made", made)
    for line in ask(node, "CLIENT", "LIST").splitlines():
        if " name=far " in line:
            ask(node, "CLIENT", "KILL", "ID", line.split()[0].partition("=")[2])


async def met(locks):
    """Once it has met all primaries, it is a witness of what they do."""
    await (await locks.lock("hello", ttl=1).acquire()).release()
    port = locks._session.port
    await until(lambda: all(member is not None and member.memory.known for member in {*port._map}))


@rule(1, 10)
async def test_on_both_sides_of_a_cut_nobody_believes_in_what_another_one_was_granted(kit, wired, monkeypatch):
    near = kit.interlock(wired.url, max_ttl=1)
    far = kit.interlock(f"{wired.url}?client_name=far", max_ttl=1)
    await met(near)
    await met(far)
    held = await kit.keep(far.lock("a", ttl=1).acquire())
    old = wired.primary_of("lock:a")
    new = wired.replica_of(old)
    wired.catch_up(new)
    waiting = asyncio.ensure_future(near.lock("a", ttl=1).acquire())
    await until(lambda: queued(near, 1))
    wired.isolate(old)
    kept_from(old, monkeypatch)
    ask(new, "CLUSTER", "FAILOVER", "TAKEOVER")
    # It renews at the new primary, and the old one gives what is not renewed there to who waits.
    lease = await kit.keep(waiting)
    with redis.Redis.from_url(old.url) as plain:
        assert plain.get("lock:a") == lease.token.encode(), plain.get("lock:a")
    assert held.state == "lost"
    later = await kit.keep(far.lock("a", ttl=1).acquire(timeout=30))
    assert lease.state == "lost"
    assert later.fence > lease.fence > held.fence


@rule(6, 10)
async def test_a_lease_outlives_that_its_primary_is_cut_off(kit, wired):
    near, far = kit.interlock(wired.url, max_ttl=20), kit.interlock(wired.url, max_ttl=20)
    await met(near)
    await met(far)
    held = await kit.keep(near.lock("a", ttl=12).acquire())
    old = wired.primary_of("lock:a")
    wired.catch_up(wired.replica_of(old))
    began = time.monotonic()
    wired.isolate(old)
    await asyncio.to_thread(wired.wait_for_primary, "lock:a", old)
    await until(lambda: "fail" in ask(old, "CLUSTER", "INFO").splitlines()[0])
    await held.extend(15)
    assert time.monotonic() - began >= 3  # the node timeout, and a second: the old one must have stopped
    assert await far.lock("a", ttl=12).try_acquire() is None
    wired.heal()
    wired.wait_ok()
    assert await held.release()
