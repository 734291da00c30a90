"""The servers of a history: what they are, where workers connect, and how all of them get well again."""

from __future__ import annotations

import contextlib
import socket
import warnings
from typing import TYPE_CHECKING, Any, Final

import trustme

from harness.proxy import Proxy
from harness.servers import Node
from harness.topology import Cluster, Independents, Sentinels
from harness.topology.group import ask, info

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from model.histories.settings import Settings

TLS_SERVER: Final = "redis-7.0"  # the only binary that was built with TLS
LINES: Final = ("line-cut", "line-held", "line-frozen", "line-refused", "replies-lost")  # faults of a Line
HEALING: Final = 40.0  # seconds that servers may take to agree again


def certificate(directory: Path) -> tuple[str, str, str]:
    """A certificate for this machine, its key, and the authority that made it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
    paths = [str(directory / name) for name in ("certificate.pem", "key.pem", "authority.pem")]
    issued.cert_chain_pems[0].write_to_path(paths[0])
    issued.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return paths[0], paths[1], paths[2]


class Line(Proxy):
    """A bad network in front of a server, which may be down."""

    def _ready(self, one: Any) -> None:
        with contextlib.suppress(OSError):
            if one is self.listener and not self._is_up():
                self.listener.accept()[0].close()
            else:
                super()._ready(one)

    def _is_up(self) -> bool:
        with socket.socket(socket.AF_UNIX) as tried:
            return tried.connect_ex(self.target) == 0


class Rig:
    """Servers of some topology."""

    helpers: Sequence[str] = ("queue", "waiters")  # the companions of a lock that a fault may delete
    patience = 5.0  # seconds that a server may be away before a release says Unavailable
    grace = 0.0  # seconds by which a quarantine may be longer than max_ttl
    lacks: Sequence[str] = ()  # faults that can't be had here
    stepped = False  # whether the clock of a server is stepped in this history

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.settings = settings
        random = settings.random("rig")
        tls = random.random() < 0.25 if settings.tls is None else settings.tls
        self.tls = certificate(directory) if tls and settings.topology != "quorum" else None
        self.kind = TLS_SERVER if self.tls else settings.server
        self.about = "TLS" if self.tls else ""
        self.group: Any = None
        self.lines: list[Line] = []  # between the workers and the servers, if there are any

    @property
    def target(self) -> str | list[str]:
        """What is given to Interlock(...) or Interlock.quorum(...)."""
        return str(self.group.url)

    @property
    def nodes(self) -> list[Node]:
        """All servers that keep data, dead or alive."""
        nodes: list[Node] = self.group.nodes
        return nodes

    def start(self) -> None:
        self.group.start()

    def stop(self) -> None:
        for line in self.lines:
            line.__exit__()
        if self.group is not None:
            self.group.stop()

    def primaries(self) -> list[Node]:
        """Those that clients use."""
        return [node for node in self.nodes if node.running and info(node)["role"] == "master"]

    def holder_of(self, key: str) -> Node:
        """The server that has this key. Raises LookupError or TimeoutError."""
        return next(iter(self.primaries()))

    def _through_lines(self, nodes: Sequence[Node]) -> None:
        """Put a line in front of each."""
        self.lines = [Line(str(node.socket)).__enter__() for node in nodes]
        self.about = f"{self.about} proxies".strip()

    def heal(self) -> None:
        """All servers run, and all agree."""
        for line in self.lines:
            line.hold = line.refuse = line.drop_replies = False
            line.cut()  # those that are frozen, too
        everything = [*self.nodes, *getattr(self.group, "sentinels", ())]
        for node in everything:
            if not node.running:
                node.restart()
            with contextlib.suppress(ProcessLookupError):
                node.resume()
        for node in self.nodes:
            ask(node, "CLIENT", "UNPAUSE")
        if hasattr(self.group, "heal"):
            self.group.heal()
        if hasattr(self.group, "wait_ok"):
            self.group.wait_ok(timeout=HEALING)


class Single(Rig):
    """One server with an append-only file; in some histories its clock is stepped."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, directory)
        random = settings.random("single")
        fsync = random.choice(("always", "everysec"))
        wanted = settings.faults is None or "clock" in settings.faults
        only = settings.faults is not None and set(settings.faults) <= {"clock"}
        self.stepped = not self.tls and wanted and (only or random.random() < 0.2)
        # A record that is deleted takes its fence along, which only the clock can make up for.
        self.helpers = ("queue", "waiters", "gone") if self.stepped else ("record", "queue", "waiters", "gone")
        self.about = f"{self.about} appendfsync {fsync}{', its clock is stepped' * self.stepped}".strip()
        config = {"appendonly": "yes", "appendfsync": fsync}
        self.node = Node(self.kind, config=config, tls=self.tls, clock=self.stepped)
        self.way = "tls_url" if self.tls else random.choice(("url", "tcp_url", "line", "line"))
        self.lacks = () if self.way == "line" else LINES

    @property
    def target(self) -> str:
        return self.lines[0].url if self.lines else str(getattr(self.node, self.way))

    @property
    def nodes(self) -> list[Node]:
        return [self.node]

    def start(self) -> None:
        self.node.start()
        if self.way == "line":
            self._through_lines(self.nodes)

    def stop(self) -> None:
        super().stop()
        self.node.stop()

    def heal(self) -> None:
        if self.stepped:
            self.node.shift(0.0)
        super().heal()


class WithSentinels(Rig):
    """A primary, two replicas, three sentinels, set up as docs/failover.md says."""

    patience = 60.0
    grace = 4.0

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, directory)
        config = {"min-replicas-to-write": "1", "min-replicas-max-lag": "1"}
        self.group = Sentinels(self.kind, replicas=2, sentinels=3, config=config, tls=self.tls)

    def holder_of(self, key: str) -> Node:
        node: Node = self.group.primary
        return node


class Sharded(Rig):
    """Three shards of a primary and a replica."""

    patience = 30.0
    grace = 3.0

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, directory)
        wired = not self.tls  # the wires between nodes carry no TLS
        self.group = Cluster(self.kind, shards=3, replicas=1, wired=wired, tls=self.tls)
        self.lacks = () if wired else ("partition",)

    def holder_of(self, key: str) -> Node:
        node: Node = self.group.primary_of(key)
        return node


class Quorum(Rig):
    """Three servers that know nothing of each other, without anything on disk."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, directory)
        self.group = Independents(self.kind, number=3)
        self._lined = settings.random("quorum").random() < 0.5
        self.lacks = () if self._lined else LINES

    @property
    def target(self) -> list[str]:
        return [line.url for line in self.lines] or list(self.group.urls)

    def start(self) -> None:
        super().start()
        if self._lined:
            self._through_lines(self.nodes)

    def holder_of(self, key: str) -> Node:
        return self.settings.random("holder", key).choice([node for node in self.nodes if node.running])


RIGS: Final[dict[str, type[Rig]]] = {
    "single": Single, "sentinel": WithSentinels, "cluster": Sharded, "quorum": Quorum,
}  # fmt: skip
