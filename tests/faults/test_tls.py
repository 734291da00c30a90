"""Connections over TLS that fail: they leave no socket, and the error says what is wrong.

Not here: locks over TLS that work (the conformance suite), a cluster and sentinels over TLS
(`topologies/test_topologies_over_tls.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import shutil
import socket
import ssl
import struct
import threading
import time
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import Connection, SSLConnection

from harness.clock import machine_time
from harness.modes import Residue, outcome, until, wait_until
from harness.topology.group import ask
from interlock import AcquireTimeout, ConfigError, Unavailable
from interlock._connect import tls
from interlock._connect.address import make_address
from interlock._connect.refusals import connection_error
from interlock._protocol.server import Disconnected

pytestmark = pytest.mark.runs_on("valkey-9.1", starts="a redis-7.0 that speaks TLS")

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: to close is to reset


class Mute:
    """A server that speaks TLS up to some point, and from then on is silent, or resets the connection."""

    def __init__(self, certificate: tuple[str, str, str], until: str) -> None:
        self.until = until
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(*certificate[:2])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"rediss://127.0.0.1:{self.listener.getsockname()[1]}?ssl_ca_certs={certificate[2]}"
        self.taken: list[socket.socket] = []
        self.over = False
        self.thread = threading.Thread(target=self._run, name="mute")

    def __enter__(self) -> Mute:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over = True
        self.thread.join()
        self.listener.close()
        for one in self.taken:
            one.close()

    def _run(self) -> None:
        while not self.over:
            if not select.select([self.listener], [], [], 0.02)[0]:
                continue
            one, _ = self.listener.accept()
            if self.until == "reset":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                one.close()
                continue
            if self.until == "greeting":
                one.settimeout(5)
                with contextlib.suppress(OSError):
                    one = self.context.wrap_socket(one, server_side=True)
            self.taken.append(one)


@pytest.mark.rule(8)
@pytest.mark.parametrize("point", ["reset", "handshake", "greeting"])
async def test_a_tls_connection_that_stops_half_way_leaves_no_socket(mode, server_pool, cell, monkeypatch, point):
    if cell.kind != "valkey-9.1":
        pytest.skip("once is enough")
    server_pool.node("redis-7.0")  # it makes the certificate, where there is a server that speaks TLS
    connect = Connection._connect

    def late(self):
        """Between the connection and its handshake, the server resets it."""
        connected = connect(self)
        if point == "reset":
            select.select([connected], [], [], 5)
        return connected

    monkeypatch.setattr(Connection, "_connect", late)
    with Mute(server_pool.certificate, point) as mute:
        before = Residue.sockets()
        locks = mode.interlock(mute.url, try_for=0.6)
        assert isinstance(await outcome(locks.lock("a").try_acquire()), Unavailable)
        await locks.close()
        mode.made.remove(locks)
        gc.collect()
        theirs = {one for one in Residue.sockets() - before if one in _inodes(mute.taken)}
        await until(lambda: not Residue.sockets() - before - theirs)


def _inodes(sockets) -> set[str]:
    return {os.readlink(f"/proc/self/fd/{one.fileno()}") for one in sockets}


@pytest.fixture
def other_authority(tmp_path):
    """A file with an authority that the server's certificate is not from."""
    trustme = pytest.importorskip("trustme")  # needs a build of cryptography for this Python
    file = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    return file


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
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
async def test_a_wrong_tls_configuration_raises_config_error_at_once(
    mode, server_pool, cell, tmp_path, other_authority, wrong, says
):
    if cell.kind != "valkey-9.1":
        pytest.skip("TLS needs Debian's server: once is enough")
    node = server_pool.node("redis-7.0")
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    url = node.tls_url.partition("?")[0] + wrong.format(other=other_authority, junk=junk)
    started = machine_time()
    with pytest.raises(ConfigError, match=says):
        await mode.interlock(url).lock("a").acquire(timeout=20)
    assert machine_time() - started < 4


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
def test_a_tls_handshake_that_is_cut_off_is_no_config_error():
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


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
async def test_tls_to_a_port_without_tls_raises_within_the_timeout(mode, server):
    with pytest.raises((ConfigError, Unavailable, AcquireTimeout)):
        await mode.interlock(f"rediss://127.0.0.1:{server.port}").lock("a").acquire(timeout=1)


@pytest.fixture(autouse=True)
def nothing_shared():
    """No context is shared before a test; and what it made, no other test shares."""
    tls._contexts.clear()
    yield
    tls._contexts.clear()


@pytest.fixture
def over_tls(server_pool):
    """The URL of an empty server that speaks TLS, and the file of its authority."""
    node = server_pool.node("redis-7.0")
    ask(node, "FLUSHALL")
    return node.tls_url.partition("?")[0], server_pool.certificate[2]


def shares(mode):
    """Skip if redis-py makes a context for each connection of this mode."""
    if mode.name == "threads" and not hasattr(SSLConnection, "_wrap_socket_with_ssl"):
        pytest.skip("redis-py before 5.1 has no place to share the context of a thread")


def count_contexts(monkeypatch):
    """A list that grows with each context."""
    made, make = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda *args, **more: made.append(1) or make(*args, **more))
    return made


async def test_connections_share_a_context(mode, over_tls, monkeypatch):
    shares(mode)
    url, authority = over_tls
    made = count_contexts(monkeypatch)
    clients = [mode.interlock(f"{url}?ssl_ca_certs={authority}") for _ in range(3)]
    leases = await asyncio.gather(*(each.lock(f"{i}").acquire() for i, each in enumerate(clients * 3)))
    assert len(made) == 1
    for lease in leases:
        await lease.release()


async def test_a_context_is_for_its_options_only(mode, over_tls):
    url, authority = over_tls
    for _ in range(2):
        assert await (await mode.interlock(f"{url}?ssl_ca_certs={authority}").lock("a").acquire()).release()
        assert "not trusted" in str(await outcome(mode.interlock(url).lock("a").try_acquire()))
        assert await (await mode.interlock(f"{url}?ssl_cert_reqs=none").lock("a").acquire()).release()


async def test_a_file_that_was_renewed_counts_for_the_next_connection(mode, over_tls, other_authority):
    url, authority = over_tls
    url = f"{url}?ssl_ca_certs={other_authority}"
    locks = mode.interlock(url)
    assert isinstance(await outcome(locks.lock("a").try_acquire()), ConfigError)
    before = other_authority.read_bytes()
    shutil.copy(authority, other_authority)
    assert await (await locks.lock("a").acquire()).release()
    other_authority.write_bytes(before)
    assert isinstance(await outcome(mode.interlock(url).lock("a").try_acquire()), ConfigError)


def test_a_context_serves_for_its_time_only(mode, monkeypatch):
    shares(mode)
    first = context_of(mode.name, {})
    assert context_of(mode.name, {}) is first
    monkeypatch.setattr(tls, "MAX_AGE", 0.0)
    assert context_of(mode.name, {}) is not first


def is_being_made():
    """Whether a thread makes a context."""
    return any(isinstance(each, tls._Making) for each in tls._contexts.copy().values())


async def test_a_file_that_does_not_answer_stops_no_connection_with_other_files(mode, over_tls, tmp_path):
    url, authority = over_tls
    silent = tmp_path / "silent.pem"
    os.mkfifo(silent)  # opens when somebody opens it to write
    hung = threading.Thread(target=outcome_of_context, args=("asyncio", {"ssl_ca_certs": str(silent)}), name="hung")
    hung.start()
    try:
        await until(is_being_made)
        assert await (await mode.interlock(f"{url}?ssl_ca_certs={authority}").lock("a").acquire()).release()
    finally:
        while hung.is_alive():
            with contextlib.suppress(OSError), open(os.open(silent, os.O_WRONLY | os.O_NONBLOCK), "w"):
                pass
            hung.join(0.01)


def context_of(mode_name, options, *, plain=False):
    """The context of a new connection with these options; with `plain`, as redis-py makes it by itself."""
    address = make_address("tls", {"host": "localhost", "port": 1, **options})
    if mode_name == "asyncio":
        connection = address.async_connection(1)
        return (AsyncSSLConnection if plain else type(connection))._connection_arguments(connection)["ssl"]
    connection = address.connection(1)
    wrap = (SSLConnection if plain else type(connection))._wrap_socket_with_ssl
    with socket.socket() as unconnected, wrap(connection, unconnected) as wrapped:
        return wrapped.context


def outcome_of_context(mode_name, options, *, plain=False):
    """The context, or the error."""
    try:
        return context_of(mode_name, options, plain=plain)
    except Exception as error:
        return error


FIELDS = ("verify_mode", "check_hostname", "verify_flags", "minimum_version", "maximum_version", "options")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ssl_cert_reqs": "none", "ssl_check_hostname": False},
        {"ssl_cert_reqs": "optional"},
        {"ssl_check_hostname": True},
        {"ssl_ca_certs": "authority"},
        {"ssl_certfile": "certificate", "ssl_keyfile": "key"},
        {"ssl_certfile": "both"},
        {"ssl_ciphers": "ECDHE+AESGCM"},
        {"ssl_min_version": ssl.TLSVersion.TLSv1_3},
        {"ssl_include_verify_flags": [ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF]},
        {"ssl_validate_ocsp": False},
    ],
    ids=str,
)
def test_a_shared_context_is_what_redis_py_would_make(mode, server_pool, options, monkeypatch, tmp_path):
    shares(mode)
    known = signature((SSLConnection if mode.name == "threads" else AsyncSSLConnection).__init__).parameters
    if not known.keys() >= options.keys():
        pytest.skip("this redis-py has no such option in this mode")
    certificate, key, authority = server_pool.certificate
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate).read_text() + Path(key).read_text())
    files = {"certificate": certificate, "key": key, "authority": authority, "both": str(both)}
    options = {name: files.get(value, value) if isinstance(value, str) else value for name, value in options.items()}
    loaded, load = [], ssl.SSLContext.load_cert_chain

    def load_noted(context, *args, **more):
        loaded.append((args, more))
        load(context, *args, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_noted)
    first, second = context_of(mode.name, options), context_of(mode.name, options)
    theirs = context_of(mode.name, options, plain=True)
    assert first is second is not theirs
    for name in FIELDS:
        assert getattr(first, name) == getattr(theirs, name), name
    assert first.get_ca_certs() == theirs.get_ca_certs()
    assert first.get_ciphers() == theirs.get_ciphers()
    assert len(loaded) in (0, 2)
    assert loaded[:1] == loaded[1:]


@pytest.mark.parametrize(
    "options",
    [
        {"ssl_ca_certs": "/nonexistent.pem"},
        {"ssl_ca_certs": ""},
        {"ssl_certfile": "/nonexistent.pem"},
        {"ssl_ca_data": "junk"},
        {"ssl_ciphers": "none of them"},
    ],
    ids=str,
)
def test_a_wrong_option_raises_at_each_connection_what_redis_py_raises(mode, options):
    shares(mode)
    theirs = outcome_of_context(mode.name, options, plain=True)
    for _ in range(2):
        ours = outcome_of_context(mode.name, options)
        if isinstance(theirs, Exception):
            assert (type(ours), str(ours)) == (type(theirs), str(theirs))
        else:  # redis-py passes over an empty name in asyncio
            assert isinstance(ours, ssl.SSLContext)


@pytest.mark.parametrize(
    "options",
    [
        {"ssl_validate_ocsp_stapled": True},
        {"ssl_validate_ocsp": True},
        {"ssl_ca_data": bytearray(b"")},
        {"ssl_ca_data": memoryview(bytearray(b""))},
    ],
    ids=["stapled OCSP", "OCSP", "a bytearray", "a memoryview"],
)
def test_options_that_cannot_be_a_key_or_need_more_than_a_context_are_not_shared(options):
    assert tls.shared_context("threads", options, pytest.fail) is None


def test_a_context_of_another_class_than_that_of_ssl_is_not_shared():
    """With truststore, a socket names only the inner context, which does not ask the system's store."""
    for _ in range(2):
        assert tls.shared_context("threads", {}, object) is None


def bare():
    """A context that loads no certificates."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_or_an_interrupt_while_it_is_made_leaves_nothing(error):

    def fail():
        raise error

    with pytest.raises(error):
        tls.shared_context("asyncio", {}, fail)
    assert not tls._contexts
    assert tls.shared_context("asyncio", {}, bare) is tls.shared_context("asyncio", {}, pytest.fail)


def test_a_signal_handler_may_connect_while_its_thread_makes_the_context():
    inner = []

    def make():
        inner.append(tls.shared_context("asyncio", {}, bare))
        return bare()

    outer = tls.shared_context("asyncio", {}, make)
    assert isinstance(outer, ssl.SSLContext) and isinstance(inner[0], ssl.SSLContext)
    assert tls.shared_context("asyncio", {}, pytest.fail) is outer


def looking(maker, others, may_end, monkeypatch):
    """Threads: the first one makes a context, and all others have looked for it and sleep until `may_end` is set."""
    looks = set()

    class Clock:
        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds):
            looks.add(threading.get_ident())
            may_end.wait(30)
            time.sleep(seconds)

    monkeypatch.setattr(tls, "time", Clock)
    threads = [threading.Thread(target=each) for each in (maker, *others)]
    threads[0].start()
    wait_until(is_being_made)
    for one in threads[1:]:
        one.start()
    wait_until(lambda: len(looks) == len(others))
    return threads


@pytest.mark.parametrize("fails", [True, False])
def test_who_looks_for_a_context_that_another_thread_makes(fails, monkeypatch):
    """They share it; and if it fails, they make another one, and nobody waits for a third."""
    may_end, contexts = threading.Event(), []

    def make():
        may_end.wait(30)
        if fails:
            raise OSError
        return bare()

    def first():
        with contextlib.suppress(OSError):
            contexts.append(tls.shared_context("asyncio", {}, make))

    others = [lambda: contexts.append(tls.shared_context("asyncio", {}, bare))] * 3
    threads = looking(first, others, may_end, monkeypatch)
    may_end.set()
    for one in threads:
        one.join()
    assert len(contexts) == 3 if fails else len(set(contexts)) == 1
    assert isinstance(tls.shared_context("asyncio", {}, pytest.fail), ssl.SSLContext)


def test_threads_that_look_share_a_context_for_the_file_that_was_renewed_meanwhile(tmp_path, monkeypatch):
    """As when a certificate is renewed while many threads connect."""
    may_end, file = threading.Event(), tmp_path / "file"
    file.write_text("a")
    options = {"ssl_ca_certs": str(file)}

    def make():
        may_end.wait(30)
        return bare()

    def connect():
        tls.shared_context("asyncio", options, make)

    threads = looking(connect, [connect] * 3, may_end, monkeypatch)
    file.write_text("renewed")
    may_end.set()
    for one in threads:
        one.join()
    assert isinstance(tls.shared_context("asyncio", options, pytest.fail), ssl.SSLContext)


def test_nobody_looks_for_ever(monkeypatch):
    """As for what an interrupt left behind before the making began."""
    monkeypatch.setattr(tls, "MAX_LOOKS", 2)
    tls.shared_context("asyncio", {}, bare)
    (key,) = tls._contexts
    tls._contexts[key] = tls._Making(0)
    assert tls.shared_context("asyncio", {}, bare) is tls.shared_context("asyncio", {}, pytest.fail) is not None


def test_what_is_old_is_dropped_and_nothing_else(monkeypatch):
    for password in "ab":
        tls.shared_context("asyncio", {"ssl_password": password}, bare)
    assert len(tls._contexts) == 2
    monkeypatch.setattr(tls, "MAX_AGE", 0.0)
    tls.shared_context("asyncio", {"ssl_password": "c"}, bare)
    assert len(tls._contexts) == 1


def test_a_context_does_not_depend_on_the_current_directory(monkeypatch, tmp_path):
    first = tls.shared_context("asyncio", {}, bare)
    monkeypatch.chdir(tmp_path)
    assert tls.shared_context("asyncio", {}, pytest.fail) is first


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "SSL_CERT_FILE"])
@pytest.mark.parametrize("change", ["another file", "new text", "new text, old time"])
def test_each_file_counts_with_its_identity(option, change, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("a")
    if option == "SSL_CERT_FILE":
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        option = "ssl_ciphers"
    first = tls.shared_context("asyncio", {option: str(file)}, bare)
    assert tls.shared_context("asyncio", {option: str(file)}, pytest.fail) is first
    time_before = file.stat().st_mtime_ns
    if change == "another file":
        (tmp_path / "other").write_text("b")
        (tmp_path / "other").rename(file)
    while file.stat().st_ctime_ns == time_before:  # the clock of files advances in steps
        file.write_text("b")
    if "old time" in change:
        os.utime(file, ns=(time_before, time_before))
    assert tls.shared_context("asyncio", {option: str(file)}, bare) is not first
    assert len(tls._contexts) == 1, "the context of the file before is dropped"


def test_a_context_is_not_shared_if_a_file_changes_while_it_is_made(tmp_path):
    """Nobody knows from which one it was made, if the link is switched back later."""
    link = tmp_path / "link"
    for name in "ab":
        (tmp_path / name).write_text(name)
    link.symlink_to("a")

    def make():
        link.unlink()
        link.symlink_to("b")
        return bare()

    assert isinstance(tls.shared_context("asyncio", {"ssl_ca_certs": str(link)}, make), ssl.SSLContext)
    link.unlink()
    link.symlink_to("a")
    assert not tls._contexts


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"])
def test_a_context_is_for_its_environment_only(variable, monkeypatch, tmp_path):
    first = tls.shared_context("asyncio", {}, bare)
    monkeypatch.setenv(variable, f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert tls.shared_context("asyncio", {}, bare) is not first


def test_a_connection_that_connects_again_looks_for_a_context_again(monkeypatch):
    connection = make_address("tls", {"host": "localhost", "port": 1}).async_connection(1)
    first = connection._connection_arguments()["ssl"]
    monkeypatch.setenv("SSL_CERT_DIR", "/nonexistent")
    assert connection._connection_arguments()["ssl"] is not first


def test_options_that_are_equal_but_not_the_same_share_nothing():
    contexts = {tls.shared_context("asyncio", {"ssl_cert_reqs": value}, bare) for value in (0, False, 0.0)}
    assert len(contexts) == 3


def test_a_shared_context_checks_the_name_of_each_host():
    for host in ("a.example", "b.example"):
        address = make_address("tls", {"host": host, "port": 1})
        assert address.async_connection(1)._connection_arguments()["host"] == host
        connection = address.connection(1)
        if hasattr(SSLConnection, "_wrap_socket_with_ssl"):
            with socket.socket() as unconnected, connection._wrap_socket_with_ssl(unconnected) as wrapped:
                assert wrapped.server_hostname == host


@pytest.mark.skipif(not hasattr(SSLConnection, "_wrap_socket_with_ssl"), reason="redis-py before 5.1")
def test_threads_and_asyncio_share_no_context():
    """Each mode of redis-py makes its own: versions 5.1 to 7.1 read a certificate without a key in two ways."""
    assert context_of("asyncio", {}) is context_of("asyncio", {})
    assert context_of("asyncio", {}) is not context_of("threads", {})


def test_a_child_begins_without_contexts():
    context_of("asyncio", {})
    assert tls._contexts
    if (child := os.fork()) == 0:
        os._exit(len(tls._contexts))
    assert os.waitpid(child, 0)[1] == 0
