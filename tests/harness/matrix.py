"""The matrix: on which servers, by which ways, and in which modes a test runs.

Each test module of conformance, faults, topologies and integrations says that at its top (`RunsOn` has the words):

    pytestmark = pytest.mark.runs_on("each server", full="every combination", quorum=True)

A test that asks for `mode` runs once for each cell of these servers, so in both modes. A test that asks for `server`
and not for `mode` runs once for each kind of server, in the modes that its body calls. Where one test differs from its
module, the test says so by a mark of its own. With `quorum=True` a test also runs over a quorum: in asyncio, and with
`--full` in threads too. `RunsOn.cells` leaves out the cells on which a test can't run, by the marks `not_on_a_quorum`,
`not_on_a_cluster` and `asyncio_only`, and by the fixtures that the test asks for. A server that this machine does not
have skips its tests, with the reason; under CI=true it fails them. The conftest holds what a module says against the
servers and modes that its tests really use.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio

from harness.servers import KINDS, Missing, Node
from harness.topology import Cluster, Independents, Sentinels
from harness.topology.group import ask

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

ROOT = Path(__file__).parents[2]
USER, PASSWORD = "locks", "password"  # as in docs/acl.md
MODES = ("threads", "asyncio")
NOTHING: frozenset[str] = frozenset()


def required(reason: str) -> None:
    """Skip the test for this reason; under CI=true fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing, and CI=true: {reason}")
    pytest.skip(reason)


# Ways: what is given to Interlock(...)


def least_rights() -> str:
    """The rules that docs/acl.md has after ACL SETUSER."""
    text = (ROOT / "docs/acl.md").read_text()
    (rules,) = re.findall(r"^ACL SETUSER (.*)$", text, re.MULTILINE)
    return rules


def cluster_rights(kind: str) -> str:
    """The rules that a user needs besides on a cluster of this kind, by docs/acl.md."""
    text = (ROOT / "docs/acl.md").read_text()
    first, sharded = re.findall(r"On a cluster.*?\n\n    (.*?)\n    (.*?)\n\n", text, re.DOTALL)[0]
    return first if kind == "redis-6.2" else f"{first} {sharded}"


def acl_user(node: Node) -> str:
    """Make the user of docs/acl.md, with rights for the commands of execute() besides. Returns the user's URL."""
    _, *rules = least_rights().split()
    with redis.Redis.from_url(node.url) as client:
        client.execute_command(
            "ACL", "SETUSER", USER, "reset", *rules, "~users:*", "+command|getkeys", "+incrby", "+mget"
        )
    return f"redis://{USER}:{PASSWORD}@127.0.0.1:{node.port}/0"


def valkey_client(node: Node, mode: str):
    valkey = pytest.importorskip("valkey")
    return (valkey if mode == "threads" else valkey.asyncio).Valkey.from_url(node.tcp_url)


NO_CERTIFICATES = "trustme could not be installed: it needs a build of cryptography for this Python"


def has_certificates() -> bool:
    """Whether tests can make certificates."""
    return importlib.util.find_spec("trustme") is not None


def tls_url(node: Node, _mode: str) -> str:
    if not has_certificates():
        required(NO_CERTIFICATES)
    return node.tls_url


def client_of(**options):
    """A client of redis-py with these options."""

    def make(node: Node, mode: str):
        return (redis if mode == "threads" else redis.asyncio).Redis.from_url(node.url, **options)

    return make


WAYS = {
    "unix": lambda node, _mode: node.url,
    "tcp": lambda node, _mode: node.tcp_url,
    "tls": tls_url,
    "acl": lambda node, _mode: acl_user(node),
    "client": client_of(),
    "decoding": client_of(decode_responses=True),
    "resp2": client_of(protocol=2),
    "resp3": client_of(protocol=3, decode_responses=True),
    "valkey-py": valkey_client,
    "uvloop": lambda node, _mode: node.url,
    "sentinel": lambda node, _mode: node.watched,
    "cluster": lambda cluster, _mode: cluster.url,  # of three shards
    "quorum": lambda node, _mode: [each.url for each in node.together],
}
TLS = {"redis-7.0"}  # the only binary that was built with it


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a kind of server, a way to reach it, a mode."""

    kind: str
    way: str
    mode: str

    def __str__(self) -> str:
        parts = [part for part, base in ((self.kind, BASE), (self.way, "unix")) if part != base]
        return "-".join([*parts, self.mode])

    @property
    def possible(self) -> bool:
        """Whether there can be such a cell: not every server speaks TLS, and threads have no event loop."""
        return (self.way != "tls" or self.kind in TLS) and (self.way != "uvloop" or self.mode == "asyncio")


BASE = "valkey-9.1"
BASE_CELLS = [Cell(BASE, "unix", mode) for mode in MODES]
QUORUM_CELLS = [Cell(BASE, "quorum", mode) for mode in MODES]

# What a test module may say in runs_on(...), and the cells in which its tests then run.
CELLS = {
    "its own servers": BASE_CELLS,  # in both modes; the base server runs, too, since `mode` wants one
    BASE: BASE_CELLS,
    # every kind, each but the base in one mode only
    "each server": [
        *BASE_CELLS,
        *(Cell(kind, "unix", MODES[i % 2]) for i, kind in enumerate(sorted({*KINDS} - {BASE}))),
    ],
    "each server in both modes": [Cell(kind, "unix", mode) for kind in KINDS for mode in MODES],
    # every kind and every way at least once; ways that differ in a few bytes are tested in one mode only
    "each server and way": [
        *BASE_CELLS,
        *(
            Cell(kind, way, mode)
            for kind, way, modes in (
                ("redis-7.0", "tls", MODES), (BASE, "valkey-py", MODES[1:]), ("redis-8.2", "client", MODES[:1]),
                ("valkey-8.1", "tcp", MODES[:1]), ("redis-8.2", "resp3", MODES[1:]), ("redis-6.2", "acl", MODES[:1]),
                ("valkey-8.1", "acl", MODES[1:]), ("redis-6.2", "resp2", MODES[1:]),
                ("redis-7.0", "decoding", MODES[:1]), (BASE, "uvloop", MODES[1:]), (BASE, "cluster", MODES[:1]),
                ("valkey-8.1", "sentinel", MODES[:1]),
            )
            for mode in modes
        ),
    ],
    "every combination": [
        cell
        for kind in KINDS
        for way in WAYS
        if way != "quorum"
        for mode in MODES
        if (cell := Cell(kind, way, mode)).possible
    ],
}  # fmt: skip


# How runs_on(starts=...) names a topology that tests start.
TOPOLOGIES = {
    "cluster": re.compile("cluster"), "quorum": re.compile("quorum"), "sentinel": re.compile("sentinel|replica"),
}  # fmt: skip

# A test with one of these among its arguments looks at one server: it does not run over a quorum.
LOOKS_AT_ONE_SERVER = {"clean", "redis_client", "server", "proxy", "node", "client"}
# A test that asks for one of these, itself or by a fixture, harms one server or its network: not on a cluster.
HARMS_ONE_SERVER = {"node", "client", "proxy"}


@dataclass(frozen=True)
class RunsOn:
    """What a test module, or one test, says by the mark `runs_on`.

    `servers` and `full` are keys of CELLS: where a test runs, and where it runs with `--full` (the same, if the module
    does not say). With `quorum`, tests also run over a quorum, but for those that look at one server. `modes` are the
    modes of tests that do not ask for `mode`. `starts` says in plain words which servers the tests start themselves: it
    names each topology, and each kind other than the base ("clusters of valkey-9.1 and redis-6.2, a quorum").
    """

    servers: str = BASE
    full: str | None = None
    quorum: bool = False
    modes: str = "threads, asyncio"
    starts: str = ""

    def __post_init__(self) -> None:
        assert self.servers in CELLS, f"runs_on({self.servers!r}): say one of {[*CELLS]}"
        assert self.starts or self.servers != "its own servers", "runs_on(starts=...): say which"
        assert self.full is None or self.full in CELLS, f"runs_on(full={self.full!r}): say one of {[*CELLS]}"
        assert {*self.modes.split(", ")} <= {*MODES}, f"runs_on(modes={self.modes!r}): say some of {MODES}"

    @classmethod
    def said_by(cls, marks: Iterable[pytest.Mark]) -> RunsOn:
        """What these marks say together, from the module's to the test's own; a later one prevails."""
        said: dict[str, Any] = {}
        for mark in marks:
            if mark.args:
                said |= {"servers": mark.args[0], "full": None}
            said |= mark.kwargs
        return cls(**said)

    def cells(
        self,
        *,
        full: bool,
        marks: AbstractSet[str] = NOTHING,
        arguments: AbstractSet[str] = NOTHING,
        fixtures: AbstractSet[str] = NOTHING,
    ) -> list[Cell]:
        """The cells on which a test runs that has these marks, these arguments, and in all asks for these fixtures."""
        cells = CELLS[self.full or self.servers if full else self.servers]
        if self.quorum and "not_on_a_quorum" not in marks and not LOOKS_AT_ONE_SERVER & arguments:
            cells = [*cells, *(QUORUM_CELLS if full else QUORUM_CELLS[1:])]
        if "asyncio_only" in marks:
            cells = [cell for cell in cells if cell.mode == "asyncio"]
        if "not_on_a_cluster" in marks or HARMS_ONE_SERVER & fixtures:
            cells = [cell for cell in cells if cell.way != "cluster"]
        return cells

    def allows(self, topology: str, kind: str, cell: Cell | None) -> bool:
        """Whether a test of this cell may use such a topology ("server", "cluster", ...) of such a kind."""
        is_kind_named = kind == BASE or kind in self.starts or "every kind" in self.starts
        is_topology_named = topology == "server" or TOPOLOGIES[topology].search(self.starts) is not None
        is_of_cell = cell is not None and kind == cell.kind and topology in {"server", cell.way}
        return is_of_cell or (is_kind_named and is_topology_named)


def uptime(node: Node) -> int:
    """The whole seconds since this server started."""
    return int(re.findall(r"uptime_in_seconds:(\d+)", ask(node, "INFO", "server"))[0])


class ServerPool:
    """The servers of a run of pytest; each starts when a test first asks for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, Node] = {}
        self.clusters: dict[str, Cluster] = {}
        self.quorums: dict[str, Independents] = {}
        self.watched: dict[str, Sentinels] = {}

    def at(self, cell: Cell) -> Node | Cluster:
        """The running server of a cell, which all of its tests use."""
        place = {"cluster": self.cluster, "quorum": self.quorum, "sentinel": self.primary}.get(cell.way, self.node)
        return place(cell.kind)

    def primary(self, kind: str) -> Node:
        """The running primary of this kind that a sentinel watches, with a replica, for all tests."""
        if kind not in self.watched:
            try:
                # No test of the matrix wants a failover.
                group = Sentinels(kind, replicas=1, sentinels=1, down_after=60)
            except Missing as missing:
                required(f"no {kind} here: {missing}")
                raise
            group.start()
            self.watched[kind] = group
            group.primary.watched = group.url
        return self.watched[kind].nodes[0]

    def cluster(self, kind: str) -> Cluster:
        """The running cluster of this kind, for all tests."""
        if kind not in self.clusters:
            cluster = self.shards(kind, replicas=0)
            cluster.start()
            self.clusters[kind] = cluster
        return self.clusters[kind]

    def clean_cluster(self, kind: str) -> Cluster:
        """The same, emptied: an earlier test may have left a name there as another kind of synchronizer."""
        cluster = self.cluster(kind)
        for node in cluster.nodes:  # it has no replicas
            ask(node, "FLUSHALL")
        return cluster

    @staticmethod
    def shards(kind: str, **options) -> Cluster:
        """A cluster of this kind that is not started yet."""
        try:
            return Cluster(kind, **options)
        except Missing as missing:
            required(f"no {kind} here: {missing}")
            raise

    def quorum(self, kind: str) -> Node:
        """The first of three running servers, for all tests; `together` has all three."""
        if kind not in self.quorums:
            try:
                three = Independents(kind, number=3)
            except Missing as missing:
                required(f"no {kind} here: {missing}")
                raise
            three.start()
            self.quorums[kind] = three
            for node in three.nodes:
                node.together = three.nodes
        return self.quorums[kind].nodes[0]

    def node(self, kind: str) -> Node:
        """The running server of this kind, for all tests."""
        if kind not in self.nodes:
            node = self.spare(kind, tls=self.certificate if kind in TLS and has_certificates() else None)
            node.start()
            self.nodes[kind] = node
        return self.nodes[kind]

    @staticmethod
    def spare(kind: str, **options) -> Node:
        """A server of this kind that is not started yet, for a test that will harm it."""
        try:
            return Node(kind, **options)
        except Missing as missing:
            required(f"no {kind} here: {missing}")
            raise

    @cached_property
    def certificate(self) -> tuple[str, str, str]:
        """A certificate for this machine, its key, and the authority that made it."""
        if not has_certificates():
            required(NO_CERTIFICATES)
        import trustme

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            authority = trustme.CA()
            issued = authority.issue_cert("127.0.0.1", "localhost")
        paths = [str(self.directory / name) for name in ("certificate.pem", "key.pem", "authority.pem")]
        issued.cert_chain_pems[0].write_to_path(paths[0])
        issued.private_key_pem.write_to_path(paths[1])
        authority.cert_pem.write_to_path(paths[2])
        return paths[0], paths[1], paths[2]

    def stop(self) -> None:
        for each in (*self.nodes.values(), *self.clusters.values(), *self.quorums.values(), *self.watched.values()):
            each.stop()
