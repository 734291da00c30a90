"""A proxy between clients and a server, which plays a bad network: it loses, holds and cuts."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Proxy:
    """A unix socket, or with `tcp` a port, that forwards to the server's socket. `with Proxy(path) as proxy: proxy.url`

    `target` may be a function, if the server starts after the proxy.

    `drop_replies`: the replies of the server are lost, though it has run the requests.
    `hold`: nothing goes through, in either direction, until it is False again. `refuse`: new connections end at once.
    `cut_request`, `cut_reply`: how many bytes go through of the next request with `marked` in it, or of the reply to
    it; then the proxy cuts the connection.
    """

    def __init__(self, target: str | Path | Callable[[], Path], *, tcp: bool = False) -> None:
        self.target = target
        self.directory = tempfile.mkdtemp(prefix="ilp-")
        self.path = os.path.join(self.directory, "s")
        self.tcp = tcp
        self._drops = False
        self._dropped = threading.Event()
        self.hold = False
        self.refuse = False
        self.cut_request: int | None = None
        self.cut_reply: int | None = None
        self.marked = b""
        self.requests = 0
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.servers: set[socket.socket] = set()
        self.frozen: set[socket.socket] = set()
        self.withheld: dict[socket.socket, bytes] = {}
        self.delay = 0.0  # seconds before each reply
        self.doomed: dict[socket.socket, int] = {}
        self.lock = threading.RLock()
        self.done = False

    def __enter__(self) -> Proxy:
        if self.tcp:
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.path)
            self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="proxy")
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.done = True
        self.thread.join()
        self.cut()
        self.listener.close()
        self.selector.close()
        if not self.tcp:
            os.unlink(self.path)
        os.rmdir(self.directory)

    @property
    def port(self) -> int:
        """Of a proxy with `tcp`."""
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://127.0.0.1:{self.port}/0" if self.tcp else f"unix://{self.path}"

    def cut(self) -> None:
        """End every connection, now."""
        with self.lock:
            for one in list(self.pairs):
                self._close(one)

    def freeze(self) -> None:
        """Let every open connection be dead from now on, without a sign: as when a firewall forgot them."""
        with self.lock:
            self.frozen |= set(self.pairs)

    def deliver_late(self) -> bytes:
        """Give the server now what clients have sent over frozen connections. Returns that."""
        with self.lock:
            for client, data in self.withheld.items():
                self._send(self.pairs[client], data)
            late = b"".join(self.withheld.values())
            self.withheld.clear()
        return late

    def _server(self) -> str:
        return str(self.target() if callable(self.target) else self.target)

    def _close(self, one: socket.socket) -> None:
        other = self.pairs.pop(one, None)
        for end in (one, other):
            if end is not None:
                self.pairs.pop(end, None)
                self.servers.discard(end)
                with contextlib.suppress(KeyError, ValueError):
                    self.selector.unregister(end)
                end.close()

    def _run(self) -> None:
        while not self.done:
            for key, _ in self.selector.select(0.02):
                with self.lock:
                    self._ready(key.fileobj)
            while self.hold and not self.done:
                threading.Event().wait(0.005)

    def _ready(self, one) -> None:
        if one is self.listener:
            client, _ = self.listener.accept()
            if self.refuse:
                client.close()
                return
            if self.tcp:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server())
            except OSError:  # there is no server: its client learns that as it would without a proxy
                client.close()
                server.close()
                return
            self.pairs |= {client: server, server: client}
            self.servers.add(server)
            for end in (client, server):
                self.selector.register(end, selectors.EVENT_READ)
            return
        if one not in self.pairs:
            return
        try:
            data = one.recv(65536)
        except OSError:
            data = b""
        if one in self.frozen:
            if not data:
                self.selector.unregister(one)
            elif one not in self.servers:
                self.withheld[one] = self.withheld.get(one, b"") + data
        elif not data:
            self._close(one)
        elif one in self.servers:
            if self.delay:
                threading.Event().wait(self.delay)
            if one in self.doomed:
                self._send(self.pairs[one], data[: self.doomed.pop(one)])
                self._close(one)
            elif self._drops:
                self._dropped.set()
            else:
                self._send(self.pairs[one], data)
        else:
            self.requests += 1
            self._request(one, data)

    @property
    def drop_replies(self) -> bool:
        return self._drops

    @drop_replies.setter
    def drop_replies(self, drops: bool) -> None:
        if drops:
            self._dropped.clear()
        else:  # the answer to a request whose effect the test has seen may still be on its way here
            self._dropped.wait(1.0 if self._drops else 0.0)
        self._drops = drops

    def _request(self, client, data) -> None:
        server = self.pairs[client]
        if self.marked in data:
            if self.cut_reply is not None:
                self.doomed[server], self.cut_reply = self.cut_reply, None
            if self.cut_request is not None:
                size, self.cut_request = self.cut_request, None
                self._send(server, data[:size])
                self._close(client)
                return
        self._send(server, data)

    def _send(self, end, data) -> None:
        try:
            end.sendall(data)
        except OSError:
            self._close(end)
