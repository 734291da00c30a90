"""A connection that somebody forgot while it was idle (a firewall, a NAT, a dead host): what a call over it costs.

Not here: a server that does not answer at all (test_silence.py), connections that end with a sign
(test_connections.py).
"""

from __future__ import annotations

import asyncio
import socket

import pytest
import redis
import redis.asyncio

import interlock
from harness.clock import machine_time
from harness.forgotten import close_forgotten, connections, forget, pools, socket_of, stay_idle
from harness.matrix import NO_CERTIFICATES, has_certificates, required
from harness.modes import is_subscribed, outcome, subscribe, until
from harness.topology import Cluster, Independents, Sentinels
from interlock import LeaseState, Unavailable
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER, TOMBSTONE_TTL, now
from interlock._transports import idle
from interlock._transports.resp import PING

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on(
    "valkey-9.1", full="each server in both modes", starts="a primary with sentinels, a cluster, a quorum"
)

SOON = 3.0  # seconds: far more than a forgotten connection costs, and less than a whole silence of 5 s


@pytest.fixture(autouse=True)
def forgotten_for_this_test_only():
    yield
    close_forgotten()


async def in_time(call):
    """The result of a call, which must not take the time of a silent server."""
    began = machine_time()
    result = await outcome(call)
    assert machine_time() - began < SOON, result
    return result


@rule(8)
@pytest.mark.parametrize("timeout", [None, 20, 0])
async def test_a_lock_is_granted_soon_although_the_idle_connection_is_forgotten(mode, clean, proxy, timeout):
    locks = mode.interlock(proxy.url, try_for=2.5)
    await (await locks.lock("warm").acquire()).release()
    stay_idle(mode.session(locks))
    proxy.freeze()
    lease = await in_time(locks.lock("a").acquire(timeout))
    assert not isinstance(lease, Unavailable), lease
    assert await lease.release()


@rule(8)
async def test_a_lease_is_released_soon_although_the_idle_connection_is_forgotten(mode, clean, proxy):
    locks = mode.interlock(proxy.url)
    lease = await locks.lock("a").acquire()
    stay_idle(mode.session(locks))
    proxy.freeze()
    assert await in_time(lease.release()) is True
    assert not clean.exists("lock:a")


@rule(8)
async def test_a_with_that_does_not_wait_gives_its_lease_back_over_a_new_connection(mode, clean, proxy):
    locks = mode.interlock(proxy.url, confirm=False)

    async def section():
        async with locks.lock("a"):
            stay_idle(mode.session(locks))
            proxy.freeze()

    await in_time(section())
    await until(lambda: not clean.exists("lock:a"), SOON)


@rule(6)
async def test_a_renewal_over_a_forgotten_connection_is_in_time(mode, clean, proxy, caplog):
    """It lost a second of three, and the lease was in jeopardy."""
    locks = mode.interlock(proxy.url, registry=False)
    lease = await mode.keep(locks.lock("a", ttl=3).acquire())
    stay_idle(mode.session(locks))
    proxy.freeze()
    deadline, states = lease._grant.hold.deadline, set()

    def is_renewed():
        states.add(lease.state)
        return lease._grant.hold.deadline > deadline or lease.state is LeaseState.LOST

    await until(is_renewed)
    assert states == {LeaseState.HELD}
    assert "renewal failed" not in caplog.text
    assert await lease.release()


@rule(8)
async def test_a_late_copy_of_what_went_over_the_forgotten_connection_changes_nothing(mode, clean, proxy):
    """Nothing went there but a question whether anybody answers, so there was nothing to undo."""
    locks = mode.interlock(proxy.url, registry=False)
    await (await locks.lock("warm").acquire()).release()
    stay_idle(mode.session(locks))
    proxy.freeze()
    lease = await in_time(locks.lock("a").acquire())
    assert await lease.release()
    before = sorted(clean.keys())
    assert proxy.deliver_late() == b"*1\r\n$4\r\nPING\r\n"
    assert not clean.exists("lock:a")
    assert sorted(clean.keys()) == before
    assert not [key for key in before if key.endswith(b"{gone}")]  # no tombstone


@rule(8)
async def test_a_command_under_a_lease_runs_once_although_the_connection_is_forgotten(mode, clean, proxy):
    locks = mode.interlock(proxy.url, registry=False)
    lease = await locks.lock("users:{7}").acquire()
    stay_idle(mode.session(locks))
    proxy.freeze()
    assert await in_time(lease.execute("INCR", "users:{7}:visits", keys=["users:{7}:visits"])) == 1
    assert b"INCR" not in proxy.deliver_late()
    assert await lease.execute("GET", "users:{7}:visits", keys=["users:{7}:visits"]) == b"1"
    assert await lease.release()


@rule(8)
@pytest.mark.runs_on("its own servers")
async def test_a_grant_with_acks_comes_soon_although_the_connection_is_forgotten(mode, watched):
    locks = mode.interlock(watched.primary.url)
    lock = locks.lock("a", acks=1)
    await (await lock.acquire()).release()
    forget(mode.session(locks))
    assert await (await in_time(lock.acquire())).release()


@rule(8)
async def test_an_idle_connection_that_lives_stays_in_use(mode, clean):
    locks = mode.interlock(registry=False)
    await (await locks.lock("warm").acquire()).release()
    (pool,) = pools(mode.session(locks))
    before, number = connections(pool), clean.info("stats")["total_connections_received"]
    for _ in range(3):
        stay_idle(mode.session(locks))
        assert await (await locks.lock("a").acquire()).release()
    assert connections(pool) == before
    assert clean.info("stats")["total_connections_received"] == number


@rule(8)
@pytest.mark.asyncio_only
async def test_a_call_without_the_time_to_tell_ends_no_connection_of_other_tasks(mode, clean, proxy):
    locks = mode.interlock(proxy.url, registry=False)
    await (await locks.lock("warm").acquire()).release()
    (pool,) = pools(mode.session(locks))
    (before,) = connections(pool)
    stay_idle(mode.session(locks))
    proxy.hold = True
    assert isinstance(await outcome(locks.lock("a").acquire(timeout=0.02)), Unavailable)
    proxy.hold = False
    assert await (await locks.lock("b").acquire()).release()
    assert connections(pool) == [before]


@pytest.mark.runs_on("valkey-9.1")
@pytest.mark.parametrize(("left", "within"), [(FOREVER, 0.5), (20, 0.5), (1, 0.25), (0.3, 0.1), (0, 0.1)])
def test_a_ping_takes_a_quarter_of_the_call_at_most_and_a_moment_at_least(monkeypatch, left, within):
    monkeypatch.setattr(idle, "now", lambda: 100.0)
    assert idle.answer_by(100.0 + left) == 100.0 + within


@rule(8)
async def test_a_slow_server_is_waited_for_over_a_new_connection(mode, node, client):
    locks = mode.interlock(node.url)
    await (await locks.lock("warm").acquire()).release()
    stay_idle(mode.session(locks))
    node.pause()
    acquiring = asyncio.ensure_future(outcome(locks.lock("a").acquire()))
    resuming = asyncio.get_running_loop().call_later(2.0, node.resume)
    lease = await acquiring
    resuming.cancel()
    node.resume()
    assert not isinstance(lease, Unavailable), lease
    assert await lease.release()


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(8)
def test_one_silence_drops_all_connections_that_were_idle_for_as_long(server, clean):
    with interlock.Interlock(server.url, max_connections=4, registry=False) as locks:
        pool = locks._session.server.pool
        for connection in [run(pool.checkout(FOREVER)) for _ in range(4)]:
            connection.checkin()
        forget(locks._session)
        began = machine_time()
        lease = locks.lock("a").acquire()
        assert machine_time() - began < SOON
        assert len(pool.idle) == pool._open_number == 1
        assert lease.release()


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(8)
def test_a_silence_keeps_the_connections_that_have_answered_lately(server, clean):
    with interlock.Interlock(server.url, registry=False) as locks:
        pool = locks._session.server.pool
        old = [run(pool.checkout(FOREVER)) for _ in range(2)]
        for connection in old:
            connection.checkin()
        forget(locks._session)
        silent = pool.idle.pop()
        lively = pool.open(FOREVER)
        pool.idle.appendleft(lively)  # below the other one that was idle for long
        pool.idle.append(silent)
        assert locks.lock("a").acquire().release()
        assert list(pool.idle) == [lively]


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(6)
def test_connections_that_were_dropped_leave_their_places_to_others(server, clean):
    with interlock.Interlock(server.url, max_connections=2, registry=False) as locks:
        pool = locks._session.server.pool
        for _ in range(3):
            taken = [run(pool.checkout(FOREVER)) for _ in range(2)]
            assert pool._open_number == 2
            for connection in taken:
                connection.checkin()
            forget(locks._session)
        assert locks.lock("a").acquire().release()
        assert len(pool.idle) == pool._open_number


def listener(session):
    """The connection on which the client listens for pushes."""
    pool = session.server.pool
    return pool._subscription._listening.connection if hasattr(pool, "_subscription") else pool._connection


@rule(3)
async def test_a_forgotten_subscription_is_replaced_before_anybody_needs_it(mode, proxy):
    """After 5 s without a message, and a second for the answer to a PING: it took 10 s."""
    locks = mode.interlock(proxy.url, registry=False)
    session = mode.session(locks)
    await (await locks.lock("a").acquire()).release()
    await subscribe(session, "a")
    before = listener(session)
    proxy.freeze()
    await until(lambda: listener(session) is not before and is_subscribed(session), 9.0)


@rule(8)
@pytest.mark.runs_on("its own servers")
async def test_with_sentinels_a_lock_is_granted_soon_although_the_connection_is_forgotten(mode, watched):
    locks = mode.interlock(watched.url)
    await (await locks.lock("warm").acquire()).release()
    forget(mode.session(locks))
    assert await (await in_time(locks.lock("a").acquire())).release()


@rule(8)
@pytest.mark.runs_on("its own servers")
async def test_in_a_cluster_a_lock_is_granted_soon_although_all_connections_are_forgotten(mode, shards):
    locks = mode.interlock(shards.url)
    names = [f"job-{number}" for number in range(6)]
    for name in names:
        await (await locks.lock(name).acquire()).release()
    forget(mode.session(locks))
    leases = [await in_time(locks.lock(name).acquire()) for name in names]
    assert [await lease.release() for lease in leases] == [True] * 6


@rule(8)
@pytest.mark.runs_on("its own servers")
@pytest.mark.parametrize("timeout", [None, 0])
async def test_a_quorum_grants_soon_although_all_connections_are_forgotten(mode, three, timeout):
    locks = mode.interlock(three.urls, try_for=1.5)
    leases = [await locks.lock(f"warm{number}").acquire() for number in range(3)]
    await asyncio.gather(*(lease.release() for lease in leases))
    forget(mode.session(locks))
    lease = await in_time(locks.lock("a").acquire(timeout))
    assert not isinstance(lease, Unavailable), lease
    assert await lease.release()


@pytest.fixture(scope="module")
def watched():
    with Sentinels(replicas=1, sentinels=1) as made:
        yield made


@pytest.fixture(scope="module")
def shards():
    with Cluster(replicas=0) as made:
        yield made


@pytest.fixture(scope="module")
def three():
    with Independents(number=3) as made:
        yield made


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(8)
def test_a_reply_whose_time_is_over_is_not_waited_for_again(proxy):
    """So the votes of a quorum that never came delayed its next round, one after another."""
    with interlock.Interlock(proxy.url) as locks:
        locks.lock("a").acquire().release()
        connection = locks._session.server.pool.take()
        proxy.freeze()
        pending = connection.send([PING], now() + 2.0)
        began = machine_time()
        with pytest.raises(Disconnected) as caught:
            run(connection.receive(pending, now() - 1.0))
        assert machine_time() - began < 1.5
        connection.discard(caught.value)


# What the kernel does with the sockets


def options(connection):
    """Whether the kernel asks an idle peer of this connection; after how many seconds, how often; and for how long
    it delivers what the client has sent."""
    sock = socket_of(connection)
    return (
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        *(
            sock.getsockopt(socket.IPPROTO_TCP, each)
            for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        ),
    )


async def connected(mode, target):
    locks = mode.interlock(target)
    await (await locks.lock("options").acquire()).release()
    (pool,) = pools(mode.session(locks))
    return connections(pool)[0]


async def test_the_kernel_asks_after_an_idle_peer_and_delivers_no_request_after_its_tombstone(mode, server):
    *keepalive, deliver = options(await connected(mode, server.tcp_url))
    assert keepalive == [1, 30, 5, 3]
    assert 45_000 <= deliver < TOMBSTONE_TTL * 1000


async def test_a_users_client_says_how_the_kernel_asks(mode, server):
    library = redis if mode.name == "threads" else redis.asyncio
    mine = library.Redis(port=server.port, socket_keepalive=True, socket_keepalive_options={socket.TCP_KEEPIDLE: 77})
    none = library.Redis(port=server.port, socket_keepalive=False)
    mode.clients += [mine, none]
    assert options(await connected(mode, mine))[:2] == (1, 77)
    on, *_, deliver = options(await connected(mode, none))
    assert not on
    assert deliver  # that is no matter of taste


async def test_a_unix_socket_is_left_as_it_is(mode, server):
    sock = socket_of(await connected(mode, server.url))
    assert sock.family == socket.AF_UNIX
    assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.runs_on("valkey-9.1", starts="a redis-7.0 that speaks TLS")
async def test_a_connection_over_tls_has_the_same_options(mode, server_pool):
    if not has_certificates():
        required(NO_CERTIFICATES)
    node = server_pool.node("redis-7.0")
    assert options(await connected(mode, node.tls_url)) == options(await connected(mode, node.tcp_url))
