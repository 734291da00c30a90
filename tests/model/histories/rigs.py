"""The servers of a history: what they are, where workers connect, and how all of them get well again."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
import warnings
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import trustme

from harness.proxy import Proxy
from harness.servers import Node
from harness.topology import Cluster, Independents, Sentinels
from harness.topology.group import QUICK, ask, info

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from model.histories.settings import Settings

TLS_SERVER: Final = "redis-7.0"  # the only binary that was built with TLS
LINES: Final = ("line-cut", "line-held", "line-frozen", "line-refused", "replies-lost", "silence")  # faults
LOSSES: Final = (  # faults by which a server of a quorum loses what it has, or takes another one's place
    "re-seeded", "re-seeded-old", "flushed", "all-flushed", "all-emptied", "set-back", "spare", "address-moved",
    "replica-attached", "rolling-restart",
)  # fmt: skip
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
    """A bad network in front of a server, which may be down; it may be worse for one process than for the others.

    A process is known by its id, which stands in each of its tokens.
    """

    def __init__(self, target: str | Callable[[], Path], *, tcp: bool = False) -> None:
        super().__init__(target, tcp=tcp)
        self.caught = threading.Event()  # whether a request was seen whose reply is wanted late
        self.late = 0.0  # the most seconds that a client waited for such a reply, and got it
        self._process_of: dict[socket.socket, bytes] = {}
        self._wanted: tuple[bytes, tuple[bytes, bytes]] | None = None  # requests of this process, with verb and name
        self._wanted_at: dict[socket.socket, float] = {}  # client -> when such a request came, until its reply goes on
        self._hold_back = 0.0  # seconds for which the replies to them are held back
        self._slow = 0.0  # seconds that each reply to that process takes at most
        self._random = Random(self.path)
        self._muted = b""  # this process
        self._requests: list[tuple[socket.socket, bytes]] = []  # of the muted process
        self._late: dict[socket.socket, float] = {}  # client -> when its replies go on
        self._replies: dict[socket.socket, list[tuple[float, bytes]]] = {}  # client -> due replies, in order

    # What a phase may say

    def hold_back(self, pid: int, verb: str, name: str, seconds: float) -> None:
        """Hold each reply to this verb of this process, about this name, back for so long, until `let_go()`."""
        self._want(pid, verb, name)
        self._hold_back = seconds

    def slow_down(self, pid: int, seconds: float, *, verb: str, name: str) -> None:
        """Let each reply to this process take up to so long, until `let_go()`; `late` counts replies to this verb."""
        self._want(pid, verb, name)
        self._slow = seconds

    def _want(self, pid: int, verb: str, name: str) -> None:
        self.caught.clear()
        self.late = 0.0
        self._wanted = _mark(pid), (verb.encode(), f"lock:{name}".encode())

    def mute(self, pid: int) -> None:
        """Let no request of this process through, until `let_go()`: then they arrive, late."""
        self._muted = _mark(pid)

    def let_go(self) -> None:
        """End what the methods above have begun."""
        with self.lock:
            self._wanted, self._hold_back, self._slow = None, 0.0, 0.0
            self._wanted_at.clear()
            self._muted, late = b"", self._requests
            self._requests = []
            for client, data in late:
                if client in self.pairs:
                    self._request(client, data)

    # How it is done

    def _run(self) -> None:
        while not self.done:
            for key, _ in self.selector.select(0.001 if self._replies else 0.02):
                with self.lock:
                    self._ready(key.fileobj)
            with self.lock:
                self._deliver()
            while self.hold and not self.done:
                time.sleep(0.005)

    def _ready(self, one: Any) -> None:
        with contextlib.suppress(OSError):
            super()._ready(one)

    def _request(self, client: socket.socket, data: bytes) -> None:
        if (found := _PROCESS.search(data)) is not None:
            self._process_of[client] = found[0]
        process = self._process_of.get(client, b"")
        if process and process == self._muted:
            self._requests.append((client, data))
            return
        if self._wanted is not None:
            whose, words = self._wanted
            if process == whose and all(word in data for word in words):
                now = time.monotonic()
                self._wanted_at.setdefault(client, now)
                self._late[client] = now + self._hold_back
                self.caught.set()
        super()._request(client, data)

    def _send(self, end: socket.socket, data: bytes) -> None:
        if end in self.servers:
            super()._send(end, data)
            return
        now, waiting = time.monotonic(), self._replies.get(end)
        due = max(self._late.get(end, 0.0), waiting[-1][0] if waiting else 0.0)
        if self._slow and self._wanted is not None and self._process_of.get(end) == self._wanted[0]:
            due = max(due, now + self._slow * self._random.random())
        if due > now or waiting:  # else it would overtake a reply that is due, and that _deliver() has not sent yet
            self._replies.setdefault(end, []).append((due, data))
        else:
            super()._send(end, data)

    def _deliver(self) -> None:
        """Send the replies whose time has come."""
        now = time.monotonic()
        for client in list(self._replies):
            waiting = self._replies[client]
            while waiting and waiting[0][0] <= now:
                _, data = waiting.pop(0)
                if client in self.pairs:
                    if client in self._wanted_at:
                        self.late = max(self.late, now - self._wanted_at.pop(client))
                    super()._send(client, data)
            if not waiting or client not in self.pairs:
                del self._replies[client]

    def _close(self, one: socket.socket) -> None:
        for end in (one, self.pairs.get(one)):
            if end is not None:
                self._process_of.pop(end, None)
                self._late.pop(end, None)
                self._wanted_at.pop(end, None)
        super()._close(one)


_PROCESS: Final = re.compile(rb"/\d+/")  # in a token: host/pid/...


def _mark(pid: int) -> bytes:
    return b"/%d/" % pid


class Rig:
    """Servers of some topology."""

    helpers: Sequence[str] = ("queue", "waiters")  # the companions of a lock that a fault may delete
    patience = 5.0  # seconds that a server may be away before a release raises Unavailable
    grace = 0.0  # seconds by which a quarantine may be longer than max_ttl
    lacks: Sequence[str]  # faults that can't strike here
    rest = (0.5, 2.0)  # in longest ttls, at least and at most: for so long after a fault of servers only others strike
    stepped = False  # whether the clock of a server is stepped in this history

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.settings = settings
        random = settings.random("rig")
        tls = random.random() < 0.25 and not settings.needs_lines if settings.tls is None else settings.tls
        self.tls = certificate(directory) if tls and settings.topology != "quorum" else None
        self.kind = TLS_SERVER if self.tls else settings.server
        self.about = "TLS" if self.tls else ""
        self.group: Any = None
        self.lined = settings.needs_lines and self.tls is None
        self.lines: list[Line] = []  # one in front of each of `nodes`, or none
        self.lacks = () if self.lined else LINES

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
        """Start the servers, maybe behind lines: then they announce no other addresses than those of the lines."""
        if self.lined:
            self.about = f"{self.about} proxies".strip()
            for node in self.nodes:
                self.lines.append(Line(partial(getattr, node, "socket"), tcp=True).__enter__())
                node.door = self.lines[-1].port
        self.group.start()

    def stop(self) -> None:
        for line in self.lines:
            line.__exit__()
        if self.group is not None:
            self.group.stop()

    def lines_to(self, key: str) -> list[Line]:
        """The lines through which requests for this key go now."""
        holder = self.holder_of(key)
        return [line for node, line in zip(self.nodes, self.lines, strict=False) if node is holder]

    def primaries(self) -> list[Node]:
        """The running servers that clients use."""
        return [node for node in self.nodes if node.running and info(node)["role"] == "master"]

    def holder_of(self, key: str) -> Node:
        """The server that has this key. Raises LookupError or TimeoutError."""
        return next(iter(self.primaries()))

    def heal(self) -> None:
        """Let all servers run, and wait until they agree."""
        for line in self.lines:
            line.hold = line.refuse = line.drop_replies = False
            line.let_go()
            if line.frozen:
                line.cut()
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
        self.stepped = not self.tls and wanted and (only or random.random() < 0.1)
        # A record that is deleted takes its fence along, which only the clock can make up for.
        self.helpers = ("queue", "waiters", "gone") if self.stepped else ("record", "queue", "waiters", "gone")
        self.about = f"{self.about} appendfsync {fsync}{', its clock is stepped' * self.stepped}".strip()
        config = {"appendonly": "yes", "appendfsync": fsync}
        self.node = Node(self.kind, config=config, tls=self.tls, clock=self.stepped)
        self.group = self.node
        self.way = "tls_url" if self.tls else random.choice(("url", "tcp_url", "line", "line"))
        self.lined |= self.way == "line"
        self.lacks = () if self.lined else LINES

    @property
    def target(self) -> str:
        return self.lines[0].url if self.lines else str(getattr(self.node, self.way))

    @property
    def nodes(self) -> list[Node]:
        return [self.node]

    def heal(self) -> None:
        if self.stepped:
            self.node.shift(0.0)
        super().heal()

    def keep_copy(self) -> None:
        """Copy what the server has on its disk now."""
        home = self.node.socket.parent
        shutil.rmtree(home / "kept", ignore_errors=True)
        (home / "kept").mkdir()
        for each in home.glob("appendonly*"):
            (shutil.copytree if each.is_dir() else shutil.copy)(each, home / "kept" / each.name)

    def restart_without(self, *, copied: bool) -> None:
        """Kill the server, and start it again as a server that has lost all, or all since `keep_copy()`."""
        home = self.node.socket.parent
        self.node.kill()
        for each in home.glob("appendonly*"):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        if copied:
            for each in (home / "kept").iterdir():
                each.rename(home / each.name)
        self.node.restart()


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

    def await_primary(self, old: Node, _key: str, timeout: float) -> Node:
        """Wait until another server than `old` is the primary for this key; that server."""
        node: Node = self.group.wait_for_primary(old, timeout=timeout)
        return node


class Sharded(Rig):
    """Three shards of a primary and a replica."""

    patience = 30.0
    grace = 3.0

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, directory)
        wired = not self.tls  # the wires between nodes carry no TLS
        self.group = Cluster(self.kind, shards=3, replicas=1, wired=wired, tls=self.tls)
        self.lacks = (*self.lacks, *(() if wired else ("partition",)))

    def await_primary(self, old: Node, key: str, timeout: float) -> Node:
        """See WithSentinels."""
        node: Node = self.group.wait_for_primary(key, old, timeout=timeout)
        return node

    def holder_of(self, key: str) -> Node:
        node: Node = self.group.primary_of(key)
        return node


class Quorum(Rig):
    """Three servers that know nothing of each other, without anything on disk, and a spare, to which no client goes.

    A fault may let the address of a member lead to the spare, which is then the member.
    """

    rest = (0.0, 1.0)  # its promise holds for any number of faults

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, directory)
        random = settings.random("quorum")
        # A replica that has left changes the replid of its source when the backlog is freed: soon, or never.
        self.group = Independents(self.kind, number=4, config=QUICK | {"repl-backlog-ttl": random.choice(("1", "0"))})
        *self.members, self.spare = self.group.nodes
        self.lined |= random.random() < 0.75
        self.lacks = () if self.lined else (*LINES, "spare", "address-moved")
        if settings.shorter:
            # The servers know the longest ttl from their clients. Where they forget it, nothing is promised to a client
            # whose longest ttl is longer than that of the one that asks first.
            self.lacks = (*self.lacks, "member-killed", "flushed", "all-flushed", "all-emptied", "spare")
            self.about = f"{settings.max_ttl:g} s and {settings.shorter:g} s"
        if settings.older:  # an earlier version judges by its memory which server may vote, and so does not keep to it
            self.lacks = (*self.lacks, *LOSSES)

    @property
    def nodes(self) -> list[Node]:
        return self.members

    @property
    def target(self) -> list[str]:
        return [line.url for line in self.lines] or [node.url for node in self.members]

    def start(self) -> None:
        super().start()
        ask(self.spare, "FLUSHALL")  # no client has reached it: it has served this quorum for no time

    def lead(self, number: int, node: Node) -> None:
        """Let the address with this number lead to this server, from the next connection on."""
        self.lines[number].target = node.socket

    def take_over(self, number: int) -> Node:
        """Let the spare take over this address, at which no connection to its member goes on. Returns that member."""
        line, old = self.lines[number], self.members[number]
        with line.lock:  # else a connection to the old member could be made meanwhile
            self.lead(number, self.spare)
            line.cut()
        self.members[number], self.spare = self.spare, old
        return old

    def heal(self) -> None:
        if not self.spare.running:
            self.spare.restart()
        super().heal()
        for number, node in enumerate(self.members):
            if self.lines:
                self.lead(number, node)
                self.lines[number].cut()
            ask(node, "REPLICAOF", "NO", "ONE")

    def holder_of(self, key: str) -> Node:
        return self.settings.random("holder", key).choice([node for node in self.nodes if node.running])

    def lines_to(self, key: str) -> list[Line]:
        return self.lines


RIGS: Final[dict[str, type[Rig]]] = {
    "single": Single, "sentinel": WithSentinels, "cluster": Sharded, "quorum": Quorum,
}  # fmt: skip
