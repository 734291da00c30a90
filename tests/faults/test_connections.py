"""The connections of a pool, the subscription and the handshake: they die, are refused, are slow, or are too many.

Not here: what becomes of a lock or a waiter if a connection is cut (test_network.py), TLS (test_tls.py), a whole server
that does not answer (test_silence.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis
import redis.asyncio

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.modes import SLACK, is_subscribed, outcome, queued, until, wait_until
from harness.proxy import Proxy
from interlock import ConfigError, LeaseState, LockError, Unavailable
from interlock._connect.refusals import connection_error
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER
from interlock._transports.resp import pack

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")

SHORT = 1.2  # seconds: a ttl after which a lease that nobody renews is over


@rule(6)
async def test_idle_connections_that_died_together_cost_no_lease(mode, clean):
    locks = mode.interlock()
    many = await asyncio.gather(*(locks.lock(f"a{i}").acquire() for i in range(20)))
    await asyncio.gather(*(lease.release() for lease in many))
    lease = await locks.lock("a", ttl=3).acquire()
    clean.client_kill_filter(_type="normal", skipme=True)
    overdue = lease._grant.hold.jeopardy_after
    await until(lambda: lease._grant.hold.jeopardy_after > overdue)  # it was renewed
    lease.ensure()
    assert await lease.release()


@rule(6)
@pytest.mark.parametrize("options", ["", "?socket_timeout=20"])
async def test_connections_that_a_firewall_forgot_cost_no_lease(mode, clean, proxy, options):
    locks = mode.interlock(proxy.url + options)
    many = await asyncio.gather(*(locks.lock(f"a{i}").acquire() for i in range(10)))
    lease = await locks.lock("a", ttl=3.9).acquire()
    await asyncio.gather(*(each.release() for each in many))  # now ten connections are idle
    proxy.freeze()
    deadline = lease._grant.hold.deadline
    await until(lambda: lease._grant.hold.deadline > deadline or lease.lost.is_set())
    lease.ensure()
    again = await asyncio.wait_for(locks.lock("b").acquire(), 30)
    assert await again.release()
    assert await lease.release()


@rule(8)
async def test_a_long_socket_timeout_of_the_users_client_makes_no_call_longer(mode, proxy):
    locks = mode.interlock(f"{proxy.url}?socket_timeout=60")
    lease = await locks.lock("warm").acquire()
    proxy.hold = True
    started = machine_time()
    for call in (locks.lock("a").acquire(), lease.release()):
        assert isinstance(await outcome(call), Unavailable)
    assert machine_time() - started < 16
    proxy.hold = False


async def test_a_server_that_became_a_replica_is_left_for_the_new_primary(mode, node, server_pool, cell):
    """The address (of a service, a name, a proxy) leads to the new primary; open connections still to the old one."""
    with server_pool.spare(cell.kind) as other, Proxy(node.socket) as proxy:
        locks = mode.interlock(proxy.url, max_ttl=3)  # for so long nobody gets it then
        lease = await locks.lock("a", ttl=2).acquire()
        waiting = asyncio.ensure_future(locks.lock("a").acquire(timeout=30))
        await until(lambda: queued(locks, 1))
        proxy.target = str(other.socket)  # first: a new connection that reaches a replica is an error, and rightly
        with redis.Redis.from_url(node.url) as old:
            old.replicaof("127.0.0.1", other.port)
        mine = await waiting
        assert mine.fence > lease.fence
        assert await mine.release()
        fresh = await asyncio.wait_for(locks.lock("b").acquire(), 30)
        assert await fresh.release()
        await until(lambda: lease.state is LeaseState.LOST)
        await locks.close()


@rule(3)
async def test_a_subscription_that_was_refused_once_is_tried_again(mode, node, client, caplog):
    locks, others = mode.interlock(node.url), mode.interlock(node.url)
    lease = await locks.lock("a").acquire()
    session = mode.session(others)
    busy = asyncio.ensure_future(asyncio.to_thread(_busy, node))
    await until(lambda: _is_busy(client))
    session.server.ensure_subscribed("a")
    await asyncio.sleep(0.3)
    with contextlib.suppress(redis.ResponseError):
        client.script_kill()
    await busy
    await until(lambda: client.pubsub_numsub(session.channel)[0][1] == 1)
    await until(lambda: is_subscribed(session))
    assert "acl" not in caplog.text
    assert await lease.release()


def _busy(node) -> None:
    with redis.Redis.from_url(node.url) as client, contextlib.suppress(redis.RedisError):
        client.config_set("lua-time-limit", "10")
        client.eval("while true do end", 0)


def _is_busy(client) -> bool:
    try:
        client.get("x")
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


async def test_a_subscription_that_the_server_always_ends_does_not_spin(mode, node, client):
    client.config_set("client-output-buffer-limit", "pubsub 1 0 0")
    locks = mode.interlock(node.url)
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(mode.interlock(node.url).lock("a").acquire(timeout=30))
    await until(lambda: queued(locks, 1))
    before, started = client.info("stats")["total_connections_received"], time.monotonic()
    await until(lambda: time.monotonic() - started > 2)
    assert client.info("stats")["total_connections_received"] - before < 60
    client.config_set("client-output-buffer-limit", "pubsub 0 0 0")
    await outcome(lease.release())
    with contextlib.suppress(Unavailable):  # asyncio has no other connection, so it may be out of luck
        await (await waiting).release()


@rule(8)
async def test_a_timeout_bounds_the_handshake_on_a_slow_line(mode, proxy):
    proxy.delay = 6.0
    for options in ("", "?db=2&client_name=me"):
        started = machine_time()
        error = await outcome(mode.interlock(proxy.url + options).lock("a").acquire(timeout=0.5))
        assert isinstance(error, TimeoutError | Unavailable)
        assert machine_time() - started < 0.5 + SLACK


async def test_the_handshake_is_one_write_and_its_refusal_is_raised(mode, clean, proxy):
    locks = mode.interlock(f"{proxy.url}?db=2&client_name=shop")
    lease = await locks.lock("a").acquire()
    assert "shop" in {each["name"] for each in clean.client_list()}
    assert not clean.exists("lock:a")  # it is in db 2
    assert await lease.release()
    error = await outcome(mode.interlock(f"{proxy.url}?db=99999").lock("a").acquire(timeout=3))
    assert isinstance(error, ConfigError)
    assert "DB index" in str(error)


class Sealed(redis.CredentialProvider):
    """A credential provider that raises once it is sealed."""

    def __init__(self) -> None:
        self.sealed = False

    def get_credentials(self):
        if self.sealed:
            raise ValueError("the vault is sealed")
        return ("default", "")

    async def get_credentials_async(self):
        return self.get_credentials()


async def test_a_credential_provider_that_fails_is_quoted_in_the_error(mode, node, client):
    vault = Sealed()
    library = redis if mode.name == "threads" else redis.asyncio
    given = library.Redis(unix_socket_path=str(node.socket), credential_provider=vault)
    mode.clients.append(given)
    locks = mode.interlock(given)
    lease = await locks.lock("a").acquire()
    vault.sealed = True
    client.client_kill_filter(_type="normal", skipme=True)
    error = await outcome(locks.lock("b").acquire(timeout=1))
    assert isinstance(error, LockError)
    assert "the vault is sealed" in str(error)
    await locks.close()
    assert lease.state is LeaseState.RELEASED


def echo(number):
    return pack(("ECHO", str(number)))


@rule(8)
async def test_a_reply_that_nobody_has_read_yet_reaches_no_other_command(mode):
    locks = mode.interlock()
    await (await locks.lock("a").acquire()).release()
    pool = mode.session(locks).server.pool

    async def talk():
        connection = pool.take()
        owed = connection.send([echo(1), echo(2)], FOREVER)
        connection.send([echo(3)], FOREVER)  # its reply is never read
        assert await connection.exchange(echo(4), FOREVER) == b"4"
        later = connection.send([echo(5)], FOREVER)
        assert await pool.wait_any([owed, later], 2, FOREVER) == [0, 1]
        assert await connection.receive(later, FOREVER) == [b"5"]
        assert await connection.receive(owed, FOREVER) == [b"1", b"2"]
        connection.checkin()

    await (mode.in_thread(run, talk()) if mode.name == "threads" else talk())
    assert await (await locks.lock("a").acquire()).release()


@rule(8)
async def test_a_connection_with_an_unread_reply_serves_the_next_call(mode):
    locks = mode.interlock()
    await (await locks.lock("a").acquire()).release()
    connection = mode.session(locks).server.pool.take()
    connection.send([echo(1)], FOREVER)
    connection.checkin()
    lease = await locks.lock("a").acquire()
    assert (await locks.lock("a").inspect()).fence == lease.fence
    assert await lease.release()


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(6)
def test_threads_open_no_more_connections_than_max_connections(server, clean):
    with interlock.Interlock(server.url, max_connections=3) as locks:
        start = threading.Barrier(20)

        def use(name: str) -> None:
            start.wait()
            for _ in range(10):
                with locks.lock(name):
                    pass

        with ThreadPoolExecutor(20) as threads:
            list(threads.map(use, [f"a{number}" for number in range(20)]))
        pool = locks._session.server.pool
        assert pool._open_number <= 3 + len(locks._session.workers)
        assert len(pool.idle) <= pool._open_number


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(6)
def test_a_lease_is_renewed_although_threads_have_all_connections(server, clean):
    with interlock.Interlock(server.url, max_connections=2, try_for=0.2, registry=False) as locks:
        lease = locks.lock("held", ttl=SHORT).acquire()
        pool = locks._session.server.pool
        taken = [run(pool.checkout(FOREVER)) for _ in range(2)]
        with pytest.raises(Unavailable, match="all 2 connections are in use"):
            locks.lock("a").try_acquire()
        before = lease._grant.hold.deadline
        wait_until(lambda: lease._grant.hold.deadline > before)
        for connection in taken:
            connection.checkin()
        assert lease.release()


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(6)
@pytest.mark.parametrize("broken", [False, True])
def test_a_thread_without_a_connection_waits_until_one_is_idle_or_closed(server, clean, broken):
    with interlock.Interlock(server.url, max_connections=2) as locks, ThreadPoolExecutor(1) as threads:
        pool = locks._session.server.pool
        taken = [run(pool.checkout(FOREVER)) for _ in range(2)]
        waiting = threads.submit(locks.lock("a").acquire, timeout=20)
        wait_until(lambda: pool.waiting)
        taken[0].discard(Disconnected("broken", sent=True)) if broken else taken[0].checkin()
        assert waiting.result().release()
        assert pool._open_number == 2
        taken[1].checkin()


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
@rule(10)
def test_a_connection_for_which_a_thread_waited_is_confirmed_like_any_other(server, clean):
    """After the thread's own connection turned out to lead to an old primary."""
    with interlock.Interlock(server.url) as locks:
        pool = locks._session.server.pool
        old, idle = (run(pool.checkout(FOREVER)) for _ in range(2))
        pool._can_fail_over, asked = True, []
        for connection in (old, idle):
            connection.last_answered_sent = -FOREVER

        async def confirm(connection, _until):
            asked.append(connection)
            return connection is idle

        async def wait_for_idle(_until):
            return idle

        pool._is_still_primary, pool._open_or_wait = confirm, wait_for_idle
        old.checkin()
        assert run(pool.checkout(FOREVER)) is idle
        assert asked == [old, idle]


@pytest.mark.runs_on("valkey-9.1")
@pytest.mark.parametrize("number", [0, -1, 1.5, True, "many"])
def test_a_number_of_connections_that_is_none_is_refused(number):
    with pytest.raises(ConfigError, match="max_connections must be a whole number"):
        interlock.Interlock("redis://127.0.0.1", max_connections=number)


@pytest.mark.runs_on("its own servers", starts="valkey-9.1", modes="threads")
@rule(6)
def test_the_next_connection_that_a_thread_gives_back_renews_if_the_server_takes_no_more(node, client):
    with interlock.Interlock(node.url, registry=False) as locks:
        lease = locks.lock("held", ttl=SHORT).acquire()
        pool = locks._session.server.pool
        for _ in range(3):
            connection = run(pool.checkout(FOREVER))  # the only one
            client.config_set("maxclients", client.info("clients")["connected_clients"])
            before = lease._grant.hold.deadline
            wait_until(lambda: (not pool.idle and pool.turns) or lease.lost.is_set())
            connection.checkin()
            assert pool.take() is None, "a thread at work that gives it back must not be faster than the renewal"
            wait_until(lambda: lease._grant.hold.deadline > before)
            wait_until(lambda: pool.idle)
        assert client.info("stats")["rejected_connections"]
        assert pool._open_number == 1
        assert not pool.turns
        assert lease.release()


@pytest.mark.runs_on("its own servers", starts="valkey-9.1", modes="threads")
@rule(6)
def test_threads_at_work_on_a_server_that_takes_no_more_connections_cost_no_lease(node, client):
    number = 6
    with interlock.Interlock(node.url, registry=False) as locks, ThreadPoolExecutor(number) as threads:
        lease = locks.lock("held", ttl=SHORT).acquire()
        pool = locks._session.server.pool
        for connection in [run(pool.checkout(FOREVER)) for _ in range(number)]:
            connection.checkin()
        client.config_set("maxclients", client.info("clients")["connected_clients"])
        done = threading.Event()

        def work(name):
            while not done.is_set():
                with locks.lock(name):
                    pass

        working = [threads.submit(work, f"busy{i}") for i in range(number)]
        try:
            for _ in range(3):
                before = lease._grant.hold.deadline
                wait_until(lambda: lease._grant.hold.deadline > before or lease.lost.is_set())
                lease.ensure()
        finally:
            done.set()
        for each in working:
            each.result()
        assert lease.release()


def test_a_node_of_a_cluster_that_takes_no_more_connections_may_take_some_in_a_moment():
    """A single server says "max number of clients reached", which redis-py makes a ConnectionError."""
    error = redis.ResponseError("max number of clients + cluster connections reached")
    address = SimpleNamespace(kind="tcp", display_url="redis://localhost:7000")
    assert isinstance(connection_error(error, address), Disconnected)


@pytest.mark.runs_on("valkey-9.1", full="valkey-9.1", modes="threads")
def test_a_worker_to_which_nobody_gives_a_connection_says_why_it_could_open_none(server, clean):
    """And a connection that comes back a moment later is idle: no thread is told of it that waits no more."""
    with interlock.Interlock(server.url, registry=False) as locks:
        pool = locks._session.server.pool
        connection, failed = run(pool.checkout(FOREVER)), []

        def refused(_until):
            raise Disconnected("max number of clients reached", sent=False)

        async def ask():
            with pytest.raises(Disconnected) as caught:
                await pool.checkout(pool.runtime.now() + 0.1)
            failed.append(str(caught.value))

        pool.open = refused
        locks._session.runtime.spawn(ask, "interlock-test", lambda: None)
        wait_until(lambda: failed)
        connection.checkin()
        assert failed == ["max number of clients reached"]
        assert list(pool.idle) == [connection]
        assert not pool.turns
        del pool.open


@contextlib.contextmanager
def resetting(reads: bool):
    """A port that resets each connection: at once, or after the first bytes. Yields its number."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError), connection:
                    if reads:
                        connection.recv(1)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize("reads", [False, True], ids=["at once", "after the first bytes"])
async def test_a_connection_that_is_reset_in_its_handshake_leaves_no_error_that_nobody_reads(
    mode, clean, monkeypatch, reads
):
    """asyncio logged "Future exception was never retrieved", once in 147 runs: as the garbage collector has it."""
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")  # with which asyncio prevents that in most cases
    unread = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    with resetting(reads) as port:
        locks = mode.interlock(f"redis://127.0.0.1:{port}")
        assert isinstance(await outcome(locks.lock("a").acquire(timeout=0.3)), Unavailable)
        acquiring = asyncio.ensure_future(locks.lock("a").acquire(timeout=0.3))
        await asyncio.sleep(0)
        acquiring.cancel()
        with contextlib.suppress(asyncio.CancelledError, Unavailable):
            await acquiring
        await locks.close()
    await asyncio.sleep(0)
    gc.collect()
    assert not unread
