"""Fork with Sentinel, a cluster, a quorum: a child connects anew, and remembers which servers served before.

Not here: fork with one server, which is the plain case (`faults/test_processes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from harness.groups import started, waits
from harness.matrix import BASE
from harness.modes import until
from harness.processes import PROGRAMS
from harness.topology import Cluster, Independents, Sentinels
from harness.topology.group import ask
from harness.unseen import HOW

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="sentinels, clusters and quorums of valkey-9.1")


KINDS = {
    "sentinel": lambda: started(Sentinels, BASE, replicas=1, sentinels=3),
    "cluster": lambda: started(Cluster, BASE, replicas=0),
    "quorum": lambda: started(Independents, BASE, number=3),
}


class Parent:
    """A process that runs forking.py."""

    def __init__(self, process) -> None:
        self.process = process

    async def does(self, line: str) -> str:
        """Send one command to the process; its answer."""
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
async def parent(mode, urls, how="os.fork"):
    script = str(PROGRAMS / "forking.py")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, mode.name, how, *urls, stdin=pipe, stdout=pipe
    )
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
    """The connections of clients named "parent" at each server."""
    return {
        (node.port, line.split()[0])
        for node in group.nodes
        for line in ask(node, "CLIENT", "LIST").splitlines()
        if " name=parent " in line
    }


@rule(3, 6, 11)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("topology", KINDS)
async def test_a_child_after_fork_connects_anew_and_its_parent_goes_on(mode, topology, how):
    with KINDS[topology]() as group:
        urls = group.urls if topology == "quorum" else [group.url]
        locks = mode.interlock(urls if topology == "quorum" else urls[0], max_ttl=5)
        wanted = await locks.lock("wanted", ttl=5).acquire()
        named = [f"{url}{'&' if '?' in url else '?'}client_name=parent" for url in urls]
        async with parent(mode, named, how) as forking:
            await forking.does("hold")
            await until(lambda: waits(locks.lock("wanted")))
            before = connections(group)
            assert before
            for _ in range(2):
                await forking.does("fork")
            # A server of a quorum that was silent for 0.25 s, as on a busy machine, has lost its connections by that.
            cut = {port for port, _ in before - connections(group)}
            assert len(cut) <= (len(urls) - 1) // 2
            assert await forking.does("go") == "renewed"
            await wanted.release()
            assert await asyncio.wait_for(forking.hears(), 10) == "done"


@rule(10, 11)
async def test_a_child_after_fork_remembers_which_server_served_before(mode):
    """Its parent knows of a failover and has not asked for this lock since; nobody else knows of the lost grant."""
    with started(Cluster, BASE, shards=1) as cluster:
        locks = mode.interlock(cluster.url, max_ttl=5)
        old, new = cluster.nodes
        async with parent(mode, [f"{cluster.url},127.0.0.1:{new.port}"]) as forking:
            await forking.does("use hello")
            cluster.lag(new)
            await mode.keep(locks.lock("lost", ttl=5, renew=False).acquire())
            old.kill()
            cluster.failover(new, takeover=True)
            await forking.does("use other")
            assert await forking.does("look lost") == "no"
