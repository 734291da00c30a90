"""What a hostile review of connections, handshakes and event loops found, each kept as a test."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import redis
import redis.asyncio

import interlock
import interlock.aio
from harness.modes import hears, outcome, queued, until
from harness.proxy import Proxy
from interlock import AcquireTimeout, ConfigError, LeaseState, LockError, Unavailable
from interlock._connect.refusals import connection_error
from interlock._protocol.types import Disconnected

rule = pytest.mark.rule
pytestmark = pytest.mark.matrix("servers")


# Signals


def test_a_signal_handler_that_raises_does_not_end_the_interpreter(server, clean):
    """hiredis calls back into Python for a number; a handler that raised there was a segmentation fault."""
    code = """
import signal, sys, interlock
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
locks = interlock.Interlock(sys.argv[1])
for number in range(1500):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 40 * 0.00002)
        try:
            for _ in range(50):
                with locks.lock(f"users:{number}", ttl=2):
                    pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        pass
locks.close()
print("OK")
"""
    import subprocess

    command = [sys.executable, "-W", "ignore", "-c", code, server.url]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"OK\n"), done.stderr[-500:]


@rule(8)
def test_nothing_but_text_is_given_to_the_packer(kit_less_interlock, monkeypatch):
    from interlock._transports import resp

    real, seen = resp.pack, []
    monkeypatch.setattr(resp, "pack", lambda words: seen.extend(words) or real(words))
    with kit_less_interlock as locks:
        lease = locks.lock("a").acquire()
        lease.extend(10)
        lease.execute("SET", "users:1", 1.5)
        lease.execute("INCRBY", "users:n", 2)
        locks.lock("a").inspect()
        locks.lock("a").revoke("test")
        lease.release()
        locks._session.core.port.ensure_subscribed("a")
    assert seen
    assert all(type(word) in {str, bytes} for word in seen)


@pytest.fixture
def kit_less_interlock(server, clean):
    yield interlock.Interlock(server.url)
    clean.delete("users:1", "users:n")


# Connections that are dead, and nobody has told


@rule(6)
@pytest.mark.parametrize("options", ["", "?socket_timeout=20"])
async def test_connections_that_a_firewall_forgot_cost_no_lease(kit, clean, proxy, options):
    locks = kit.interlock(proxy.url + options)
    many = await asyncio.gather(*(locks.lock(f"a{i}").acquire() for i in range(10)))
    lease = await locks.lock("a", ttl=3.9).acquire()
    await asyncio.gather(*(each.release() for each in many))  # now ten connections are idle
    proxy.freeze()
    deadline = lease._grant.deadline
    await until(lambda: lease._grant.deadline > deadline or lease.lost.is_set())
    lease.ensure()
    again = await asyncio.wait_for(locks.lock("b").acquire(), 5)
    assert await again.release()
    assert await lease.release()


@rule(8)
async def test_a_clients_long_socket_timeout_makes_no_call_longer(kit, proxy):
    locks = kit.interlock(f"{proxy.url}?socket_timeout=60")
    lease = await locks.lock("warm").acquire()
    proxy.hold = True
    started = time.monotonic()
    for call in (locks.lock("a").acquire(), lease.release()):
        assert isinstance(await outcome(call), Unavailable)
    assert time.monotonic() - started < 16
    proxy.hold = False


async def test_a_server_that_became_a_replica_is_left_for_the_new_primary(kit, node, park, ground):
    """The address (of a service, a name, a proxy) leads to the new primary; open connections still to the old one."""
    with park.spare(ground.server) as other, Proxy(node.socket) as proxy:
        locks = kit.interlock(proxy.url, max_ttl=3)  # for so long nobody gets it then
        lease = await locks.lock("a", ttl=2).acquire()
        waiting = asyncio.ensure_future(locks.lock("a").acquire(timeout=30))
        await until(lambda: queued(locks, 1))
        with redis.Redis.from_url(node.url) as old:
            old.replicaof("127.0.0.1", other.port)
        proxy.target = str(other.socket)
        mine = await waiting
        assert mine.fence > lease.fence
        assert await mine.release()
        fresh = await asyncio.wait_for(locks.lock("b").acquire(), 5)
        assert await fresh.release()
        await until(lambda: lease.state is LeaseState.LOST)
        await locks.close()


# Subscriptions


@rule(3)
async def test_a_subscription_that_was_refused_for_a_moment_is_asked_for_again(kit, node, client, caplog):
    locks, others = kit.interlock(node.url), kit.interlock(node.url)
    lease = await locks.lock("a").acquire()
    session = kit.session(others)
    busy = asyncio.ensure_future(asyncio.to_thread(_busy, node))
    await until(lambda: _is_busy(client))
    session.port.ensure_subscribed("a")
    await asyncio.sleep(0.3)
    with contextlib.suppress(redis.ResponseError):
        client.script_kill()
    await busy
    await until(lambda: client.pubsub_numsub(session.channel)[0][1] == 1)
    await until(lambda: hears(session))
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


async def test_a_listener_that_is_thrown_out_at_once_does_not_spin(kit, node, client):
    client.config_set("client-output-buffer-limit", "pubsub 1 0 0")
    locks = kit.interlock(node.url)
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(kit.interlock(node.url).lock("a").acquire(timeout=30))
    await until(lambda: queued(locks, 1))
    before, started = client.info("stats")["total_connections_received"], time.monotonic()
    await until(lambda: time.monotonic() - started > 2)
    assert client.info("stats")["total_connections_received"] - before < 60
    client.config_set("client-output-buffer-limit", "pubsub 0 0 0")
    await outcome(lease.release())
    with contextlib.suppress(Unavailable):  # asyncio has no other connection, so it may be out of luck
        await (await waiting).release()


# Handshakes


@rule(8)
async def test_a_timeout_bounds_the_handshake_on_a_slow_line(kit, proxy):
    proxy.delay = 0.3
    for options in ("", "?db=2&client_name=me"):
        started = time.monotonic()
        error = await outcome(kit.interlock(proxy.url + options).lock("a").acquire(timeout=0.5))
        assert isinstance(error, TimeoutError | Unavailable)
        assert time.monotonic() - started < 0.5 + 0.4


async def test_the_greeting_is_one_write_and_its_refusal_is_told(kit, clean, proxy):
    locks = kit.interlock(f"{proxy.url}?db=2&client_name=shop")
    lease = await locks.lock("a").acquire()
    assert "shop" in {each["name"] for each in clean.client_list()}
    assert not clean.exists("lock:a")  # it is in db 2
    assert await lease.release()
    error = await outcome(kit.interlock(f"{proxy.url}?db=99999").lock("a").acquire(timeout=3))
    assert isinstance(error, ConfigError)
    assert "DB index" in str(error)


class Sealed(redis.CredentialProvider):
    """A vault that opens once."""

    def __init__(self) -> None:
        self.sealed = False

    def get_credentials(self):
        if self.sealed:
            raise ValueError("the vault is sealed")
        return ("default", "")

    async def get_credentials_async(self):
        return self.get_credentials()


async def test_a_credential_provider_that_fails_is_a_server_that_cannot_be_reached(kit, node, client):
    vault = Sealed()
    library = redis if kit.mode == "threads" else redis.asyncio
    given = library.Redis(unix_socket_path=str(node.socket), credential_provider=vault)
    kit.clients.append(given)
    locks = kit.interlock(given)
    lease = await locks.lock("a").acquire()
    vault.sealed = True
    client.client_kill_filter(_type="normal", skipme=True)
    error = await outcome(locks.lock("b").acquire(timeout=1))
    assert isinstance(error, LockError)
    assert "the vault is sealed" in str(error)
    await locks.close()
    assert lease.state is LeaseState.RELEASED


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("", "not trusted.*ssl_ca_certs"),
        ("?ssl_ca_certs={other}", "not trusted"),
        ("?ssl_ca_certs=/nonexistent.pem", "can't be read"),
        ("?ssl_ca_certs={junk}", "no TLS connection"),
    ],
    ids=["no authority", "another authority", "no such file", "junk"],
)
async def test_what_is_wrong_with_tls_is_said_at_once(kit, park, ground, tmp_path, wrong, says):
    import trustme

    if ground.server != "valkey-9.1":
        pytest.skip("TLS needs Debian's server: once is enough")
    node = park.node("redis-7.0")
    other, junk = tmp_path / "other.pem", tmp_path / "junk.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    junk.write_text("junk")
    url = node.tls_url.partition("?")[0] + wrong.format(other=other, junk=junk)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=says):
        await kit.interlock(url).lock("a").acquire(timeout=20)
    assert time.monotonic() - started < 4


def test_a_tls_handshake_that_is_cut_off_is_not_a_wrong_configuration():
    """asyncio raises the reset while it handles that the handshake wants to read more."""
    try:
        try:
            raise ssl.SSLWantReadError(2, "The operation did not complete (read)")
        except ssl.SSLError:
            raise ConnectionResetError(104, "Connection reset by peer")  # noqa: B904 (its context is the point)
    except ConnectionResetError as raised:
        error = raised
    address = SimpleNamespace(kind="tls", display_url="rediss://localhost:6379/0")
    refused = connection_error(error, address)
    assert isinstance(refused, Disconnected), refused
    wrong = connection_error(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), address)
    assert isinstance(wrong, ConfigError)


async def test_tls_to_a_port_that_has_none(kit, server):
    with pytest.raises((ConfigError, Unavailable, AcquireTimeout)):
        await kit.interlock(f"rediss://127.0.0.1:{server.port}").lock("a").acquire(timeout=1)


# Rights and settings


@rule(9)
@pytest.mark.parametrize("missing", ["-time", "-set", "-exists", "-pexpire", "-zadd"])
async def test_a_right_that_is_missing_inside_a_script_is_named_and_leaves_no_key_for_ever(kit, server, clean, missing):
    from harness.matrix import PASSWORD, USER, least_rights

    lease = await kit.interlock().lock("a").acquire()
    clean.execute_command("ACL SETUSER", *least_rights().split(), missing)
    locks = kit.interlock(f"unix://{USER}:{PASSWORD}@{server.socket}")
    refused = []
    for name in ("a", "b"):
        result = await outcome(locks.lock(name).acquire(timeout=0.3))
        if isinstance(result, LockError):
            refused.append(result)
        else:
            await outcome(result.release())
    told = [error for error in refused if not isinstance(error, AcquireTimeout)]
    assert told
    assert all(isinstance(error, ConfigError) and "docs/acl.md" in str(error) for error in told), told
    assert all(clean.pttl(key) != -1 for key in clean.scan_iter())
    await locks.close()
    kit.made.remove(locks)
    clean.acl_deluser(USER)
    assert await lease.release()


async def test_extend_does_not_hold_beyond_max_hold(kit, clean):
    lease = await kit.interlock().lock("a", max_hold=1).acquire()
    await lease.extend(60)
    assert clean.pttl("lock:a") < 1500
    await until(lambda: not clean.exists("lock:a"))
    await until(lambda: lease.state is LeaseState.LOST)
    assert not await lease.release()


# Event loops


@rule(6, 8)
async def test_when_all_tasks_are_cancelled_the_next_one_is_kept_alive_all_the_same(server, clean):
    """The usual recipe of a graceful shutdown cancels our keeper, too."""
    async with interlock.aio.Interlock(server.url) as locks:
        first = await locks.lock("a", ttl=0.9).acquire()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        second = await locks.lock("b", ttl=0.9).acquire()
        deadlines = [lease._grant.deadline for lease in (first, second)]
        await until(lambda: all(x._grant.deadline > y for x, y in zip((first, second), deadlines, strict=True)))
        waiting = asyncio.ensure_future(locks.lock("b").acquire())
        await until(lambda: queued(locks, 1, "b"))
        waiting.cancel()
        await until(lambda: queued(locks, 0, "b"))
        clean.delete("lock:b")
        await until(second.lost.is_set)
        assert await first.release()


@rule(8)
def test_what_a_loop_left_to_be_undone_the_next_one_undoes(server, clean):
    with Proxy(server.socket) as proxy:
        through = interlock.aio.Interlock(proxy.url)

        async def cut_short():
            await (await through.lock("warm").acquire()).release()
            proxy.drop_replies = True
            acquiring = asyncio.ensure_future(through.lock("a").acquire())
            await until(lambda: clean.exists("lock:a"))
            proxy.refuse = True
            proxy.cut()
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acquiring

        asyncio.run(cut_short())
        proxy.drop_replies = proxy.refuse = False
        assert clean.exists("lock:a")

        async def again():
            async with through:
                lease = await through.lock("a").acquire(timeout=5)
                assert await lease.release()

        asyncio.run(again())
    assert not clean.exists("lock:a")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks_survive_a_first_connection_that_fails(tmp_path, server):
    path = tmp_path / "s"

    async def main():
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        async with interlock.aio.Interlock(f"unix://{path}") as locks:
            assert isinstance(await outcome(locks.lock("a").acquire(timeout=0.3)), LockError)
            path.symlink_to(server.socket)
            assert await (await locks.lock("a").acquire(timeout=5)).release()

    asyncio.run(main())


def test_closing_is_whole_even_if_the_goodbye_fails(server, clean, monkeypatch):
    locks = interlock.Interlock(server.url)
    lease = locks.lock("a").acquire()

    async def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(locks._session, "release_all", broken)
    with pytest.raises(ZeroDivisionError):
        locks.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("interlock-keeper")]
    lease._grant.end_reason = "test"
    clean.delete("lock:a")
