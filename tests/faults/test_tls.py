"""Connections over TLS that fail: they leave no socket, and the error says what is wrong.

Not here: locks over TLS that work (the conformance suite), a cluster and sentinels over TLS
(`topologies/test_topologies_over_tls.py`).
"""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import ssl
import struct
import threading
from types import SimpleNamespace

import pytest
from redis.connection import Connection

from harness.clock import machine_time
from harness.modes import Residue, outcome, until
from interlock import AcquireTimeout, ConfigError, Unavailable
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
    import os

    return {os.readlink(f"/proc/self/fd/{one.fileno()}") for one in sockets}


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
async def test_a_wrong_tls_configuration_raises_config_error_at_once(mode, server_pool, cell, tmp_path, wrong, says):
    trustme = pytest.importorskip("trustme")  # needs a build of cryptography for this Python
    if cell.kind != "valkey-9.1":
        pytest.skip("TLS needs Debian's server: once is enough")
    node = server_pool.node("redis-7.0")
    other, junk = tmp_path / "other.pem", tmp_path / "junk.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    junk.write_text("junk")
    url = node.tls_url.partition("?")[0] + wrong.format(other=other, junk=junk)
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
