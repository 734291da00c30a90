"""Edges beyond one server: fork, least rights, TLS, and a primary that is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import pytest
import redis

from harness.matrix import BASE, PASSWORD, USER, cluster_rights, least_rights, required
from harness.modes import SLACK, outcome, queued, until
from harness.processes import PROGRAMS
from harness.servers import Missing
from harness.topology import Cluster, Independents, Sentinels
from harness.topology.group import ask
from interlock import AcquireTimeout, ConfigError, Unavailable
from interlock._client import waiting as _waiters
from interlock._connect.address import Address, _warn_of_defaults

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
    script = str(PROGRAMS / "forking.py")
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
            await until(lambda: waits(locks.lock("wanted")))
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


@pytest.fixture
def patient():
    """Its nodes notice late that they are cut off, and may be read afterwards."""
    config = {"cluster-allow-reads-when-down": "yes"}
    with started(Cluster, BASE, shards=3, replicas=1, node_timeout=5.0, wired=True, config=config) as cluster:
        yield cluster


def kept_from(node, monkeypatch):
    """Clients named "far" do not reach this node any more."""
    real = Address._made

    def made(self, *args, **options):
        if self.parameters.get("client_name") == "far" and self.parameters["port"] == node.port:
            raise ConnectionError("cut off")
        return real(self, *args, **options)

    monkeypatch.setattr(Address, "_made", made)
    close(node, "far")


def close(node, name):
    """End the connections of these clients to a node."""
    for line in ask(node, "CLIENT", "LIST").splitlines():
        if f" name={name} " in line:
            ask(node, "CLIENT", "KILL", "ID", line.split()[0].partition("=")[2])


async def met(locks):
    """Once it has met all primaries, it is a witness of what they do."""
    await (await locks.lock("hello", ttl=1).acquire()).release()
    port = locks._session.port
    await until(lambda: all(member is not None and member.history.known for member in {*port._map}))


@rule(1, 10)
async def test_on_both_sides_of_a_cut_nobody_believes_in_what_another_one_was_granted(kit, patient, monkeypatch):
    near = kit.interlock(patient.url, max_ttl=1)
    far = kit.interlock(f"{patient.url}?client_name=far", max_ttl=1)
    await met(near)
    await met(far)
    held = await kit.keep(far.lock("a", ttl=1).acquire())
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
    lease = await kit.keep(waiting)
    with redis.Redis.from_url(old.url) as plain:
        granted_by_old = plain.get("lock:a") == lease.token.encode()
    assert held.state == "lost"
    if not granted_by_old:  # it was stopped for a second, so it asked another node who the primary is
        assert lease.fence > held.fence
        pytest.skip("this machine was too busy for the client to stay with the old primary")
    later = await kit.keep(far.lock("a", ttl=1).acquire(timeout=60))
    assert lease.state == "lost"
    assert later.fence > lease.fence > held.fence


@rule(10)
async def test_a_primary_that_hears_nothing_more_stops_before_it_is_no_longer_waited_for(kit, wired):
    """Its links stay open: it tests each of them after half a node timeout, and waits a whole one for the answer."""
    locks = kit.interlock(wired.url, max_ttl=1)
    await met(locks)
    old = wired.primary_of("users:a")
    with redis.Redis.from_url(old.url) as plain:
        wired.isolate(old, silent=True)
        silent = last = time.monotonic()

        def refuses():
            nonlocal last
            asked = time.monotonic()
            try:
                plain.set("users:a", 1)
            except redis.ResponseError as error:
                assert "cluster is down" in str(error)
                return True
            last = asked  # and not when the answer was read, for which this process may have had no time
            return False

        await until(refuses)
    longer = {member.history.latest.isolation_grace for member in {*locks._session.port._map}}
    assert longer == {4.0}
    assert last - silent < 4.0


@rule(1, 10)
async def test_a_node_that_was_paused_and_goes_on_grants_nobody(kit):
    """It says that it is a primary; the others have replaced it, and it has not heard of that."""
    with started(Cluster, BASE, shards=3, replicas=1, node_timeout=1.0, wired=True) as cluster:
        idle, cut = kit.interlock(cluster.url, max_ttl=4), kit.interlock(f"{cluster.url}?client_name=cut", max_ttl=4)
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
            other = kit.interlock(cluster.url, max_ttl=4)
            lease = await kit.keep(other.lock("a", ttl=4).acquire(timeout=40))
        finally:
            old.resume()
        for locks in (idle, cut):
            refused = await outcome(locks.lock("a", ttl=1).acquire(timeout=0))
            assert isinstance(refused, AcquireTimeout), refused
            assert refused.holder == lease.token
        assert not ask(old, "EXISTS", "lock:a")


@rule(8, 10)
async def test_a_node_grants_nobody_anything_after_a_pause_while_no_other_one_answers(kit):
    """Nor does anybody wait for longer than he wants to."""
    with started(Cluster, BASE, shards=3, replicas=0, node_timeout=15.0) as cluster:
        locks = kit.interlock(cluster.url)
        await met(locks)
        await (await locks.lock("a").acquire()).release()
        serving = cluster.primary_of("lock:a")
        others = [node for node in cluster.nodes if node is not serving]
        for node in others:
            node.pause()
        await asyncio.sleep(1.1)  # then a connection is not one in use any more
        try:
            began = time.monotonic()
            error = await outcome(locks.lock("a").acquire(timeout=0.5))
            assert isinstance(error, Unavailable | AcquireTimeout), error
            assert time.monotonic() - began < 0.5 + SLACK
            assert not ask(serving, "EXISTS", "lock:a")
        finally:
            for node in others:
                node.resume()
        await kit.keep(locks.lock("a").acquire(timeout=20))


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
    assert time.monotonic() - began >= 4  # 1.5 node timeouts, and a second: the old one must have stopped
    assert await far.lock("a", ttl=12).try_acquire() is None
    wired.heal()
    wired.wait_ok()
    assert await held.release()


# The least rights


def grant_least(group, *more):
    """Make the user of docs/acl.md on every node, with these rules besides."""
    _, *rules = least_rights().split()
    for node in group.nodes:
        ask(node, "ACL", "SETUSER", USER, "reset", *rules, *more)
        ask(node, "ACL", "LOG", "RESET")


def refusals(group):
    """What a node refused to that user."""
    return [entry for node in group.nodes if node.running for entry in ask(node, "ACL", "LOG") if USER in entry]


def as_user(url):
    return url.replace("://", f"://{USER}:{PASSWORD}@", 1)


async def handed_over(lockable, other, heard):
    """It goes to who waits, by push."""
    lease = await lockable.acquire()
    waiting = asyncio.ensure_future(other.acquire())
    await until(heard)
    await until(lambda: waits(lockable))
    await lease.release()
    await (await asyncio.wait_for(waiting, 30)).release()


async def waits(lockable):
    return (await lockable.inspect()).waiting == 1


@pytest.mark.parametrize("kind", [BASE, "redis-6.2"])
async def test_the_least_rights_on_a_cluster_are_enough(kit, kind, monkeypatch):
    monkeypatch.setattr(_waiters, "HEARTBEAT_INTERVAL", 1000.0)  # a push that is lost would be missed for ever
    with started(Cluster, kind, shards=3, replicas=1) as cluster:
        grant_least(cluster, *cluster_rights(kind).split())
        locks, others = (kit.interlock(as_user(cluster.url), max_ttl=30) for _ in range(2))
        await met(locks)
        await met(others)
        port = others._session.port
        await handed_over(locks.lock("a"), others.lock("a"), lambda: port.subscription_of("lock:a")[0] == "1")
        await handed_over(
            locks.semaphore("s", 1), others.semaphore("s", 1), lambda: port.subscription_of("lock:s")[0] == "1"
        )
        slot = cluster.slot("lock:held")
        held = await kit.keep(locks.lock("held").acquire())
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
        await kit.keep(locks.lock("lost:{lock:held}", renew=False).acquire())
        new.kill()
        cluster.wait_ok()
        await others.lock("lost:{lock:held}").inspect()  # it has found the new primary
        assert "quarantine" in str(await outcome(others.lock("lost:{lock:held}").acquire(timeout=0)))
        assert (await others.lock("lost:{lock:held}").inspect()).quarantined
        assert await others.lock("lost:{lock:held}").revoke("all have been stopped", force=True)
        await (await others.lock("lost:{lock:held}").acquire(timeout=10)).release()
        assert not refusals(cluster)


async def test_the_least_rights_of_a_quorum_are_those_of_one_server(kit, monkeypatch):
    monkeypatch.setattr(_waiters, "HEARTBEAT_INTERVAL", 1000.0)
    with started(Independents, BASE, number=3) as servers:
        grant_least(servers)
        locks, others = (kit.interlock([as_user(url) for url in servers.urls], max_ttl=30) for _ in range(2))
        port = others._session.port
        await handed_over(
            locks.lock("a"),
            others.lock("a"),
            lambda: all(each.port.subscription_of("lock:a")[0] == "1" for each in port.nodes),
        )
        await kit.keep(locks.lock("lost", renew=False).acquire())
        for node in servers.nodes[1:]:
            node.kill()
            node.restart()
        grant_least(servers)
        assert "quarantine" in str(await outcome(others.lock("lost").acquire(timeout=2)))
        assert await others.lock("lost").revoke("all have been stopped", force=True)
        await (await others.lock("lost").acquire(timeout=10)).release()
        assert all("config|get" in entry for entry in refusals(servers))  # for proofs; it goes without


@pytest.fixture
def rights(park):
    """The cluster of this session, with a user more."""
    cluster = park.cluster(BASE)
    yield cluster
    for node in cluster.nodes:
        ask(node, "ACL", "DELUSER", USER)


@pytest.mark.parametrize("missing", ["-cluster|slots", "-cluster|info", "-config|get", "-ssubscribe", "-spublish"])
async def test_a_right_that_is_missing_on_a_cluster_is_told(kit, clean, rights, caplog, missing):
    _warn_of_defaults.cache_clear()
    grant_least(rights, *cluster_rights(BASE).split(), missing)
    locks, others = kit.interlock(as_user(rights.url)), kit.interlock(as_user(rights.url))
    if missing.startswith("-cluster"):
        with pytest.raises(ConfigError, match=r"docs/acl\.md"):
            await locks.lock("a").acquire(5)
        return
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire(timeout=30))
    said = "assumes the default" if missing == "-config|get" else "polling only"
    await until(lambda: said in caplog.text)
    await lease.release()
    assert await (await waiting).release()


async def test_without_the_right_to_ask_a_lease_on_its_way_says_so(kit, clean, rights):
    grant_least(rights, *cluster_rights(BASE).split(), "-asking")
    lease = await kit.keep(kit.interlock(as_user(rights.url)).lock("a").acquire())
    slot = rights.slot("lock:a")
    old = rights.primary_of(slot)
    to = next(node for node in rights.nodes if node is not old)
    for step in rights.migrating(slot, to=to):
        if step == "moved":
            with pytest.raises(ConfigError, match=r"asking.*docs/acl\.md|docs/acl\.md.*asking"):
                await lease.extend(25)
    await lease.extend(25)
    rights.migrate(slot, to=old)


# TLS


@pytest.fixture
def tls(park):
    """The files of a certificate, where there is a server that speaks TLS."""
    park.node("redis-7.0")
    return park.certificate


async def is_not_trusted(locks):
    """That is said at once, for waiting does not mend it."""
    with pytest.raises(ConfigError, match=r"certificate is not trusted.*\?ssl_ca_certs="):
        await locks.lock("a").acquire()
    await locks.close()


async def test_a_cluster_over_tls(kit, tls):
    with started(Cluster, "redis-7.0", shards=3, replicas=1, tls=tls) as cluster:
        locks, others = kit.interlock(cluster.url), kit.interlock(cluster.url)
        await met(locks)
        await met(others)
        leases = [await kit.keep(locks.lock(f"held-{number}").acquire()) for number in range(12)]
        assert len({cluster.primary_of(f"lock:{lease.name}") for lease in leases}) == 3
        port = others._session.port
        assert all(member.address.kind == "tls" for member in {*port._map})
        await handed_over(locks.lock("a"), others.lock("a"), lambda: port.subscription_of("lock:a")[0] == "1")
        slot = cluster.slot("lock:held-0")
        old = cluster.primary_of(slot)
        cluster.migrate(slot, to=next(node for node in cluster.nodes[:3] if node is not old))
        await leases[0].extend(30)
        cluster.failover(cluster.replica_of(old))
        for lease in leases:
            await lease.extend(30)
        await is_not_trusted(kit.interlock(cluster.url.partition("?")[0]))


async def test_sentinel_over_tls(kit, tls):
    with started(Sentinels, "redis-7.0", replicas=1, sentinels=1, tls=tls) as group:
        locks, others = kit.interlock(group.url), kit.interlock(group.url)
        port = others._session.port
        await handed_over(locks.lock("a"), others.lock("a"), lambda: port.subscription_of("lock:a")[0] == "1")
        held = await kit.keep(locks.lock("held").acquire())
        group.catch_up(*group.replicas)
        group.primary.kill()
        await held.extend(30)
        await is_not_trusted(kit.interlock(group.url.partition("&")[0]))
