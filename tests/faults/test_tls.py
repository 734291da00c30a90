"""A connection over TLS that does not come about leaves no socket behind, wherever it stopped."""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import ssl
import struct
import threading

import pytest
from redis.connection import Connection

from harness.modes import Residue, outcome, until
from interlock import Unavailable

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
async def test_a_tls_connection_that_stops_half_way_leaves_no_socket(kit, park, ground, monkeypatch, point):
    if ground.server != "valkey-9.1":
        pytest.skip("once is enough")
    park.node("redis-7.0")  # it makes the certificate, where there is a server that speaks TLS
    connect = Connection._connect

    def late(self):
        """Between the connection and its handshake, the server resets it."""
        connected = connect(self)
        if point == "reset":
            select.select([connected], [], [], 5)
        return connected

    monkeypatch.setattr(Connection, "_connect", late)
    with Mute(park.certificate, point) as mute:
        before = Residue.sockets()
        locks = kit.interlock(mute.url, try_for=0.6)
        assert isinstance(await outcome(locks.lock("a").try_acquire()), Unavailable)
        await locks.close()
        kit.made.remove(locks)
        gc.collect()
        theirs = {one for one in Residue.sockets() - before if one in _inodes(mute.taken)}
        await until(lambda: not Residue.sockets() - before - theirs)


def _inodes(sockets) -> set[str]:
    import os

    return {os.readlink(f"/proc/self/fd/{one.fileno()}") for one in sockets}
