"""The matrix: on which servers, by which ways, and in which modes a test runs.

`scripts/test` runs every test on the base, and the conformance suite on a sample in which each server and each way
stands at least once; `scripts/test --full` runs the whole cross product. A server that this machine does not have
skips its tests, with the reason; under CI=true it fails them.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import redis
import redis.asyncio
import trustme

from harness.servers import KINDS, Missing, Node
from harness.topology import Cluster, Independents, Sentinels

ROOT = Path(__file__).parents[2]
USER, PASSWORD = "locks", "password"  # as in docs/acl.md
MODES = ("threads", "asyncio")


def required(reason: str) -> None:
    """What a developer may lack, continuous integration has to have."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"missing, and CI=true: {reason}")
    pytest.skip(reason)


# Ways: what is given to Interlock(...)


def least_rights() -> str:
    """What docs/acl.md says after ACL SETUSER."""
    text = (ROOT / "docs/acl.md").read_text()
    (rules,) = re.findall(r"ACL SETUSER (.*?)\n\n", text, re.DOTALL)
    return rules


def cluster_rights(kind: str) -> str:
    """What a user needs besides on a cluster of this kind."""
    text = (ROOT / "docs/acl.md").read_text()
    first, sharded = re.findall(r"On a cluster.*?\n\n    (.*?)\n    (.*?)\n\n", text, re.DOTALL)[0]
    return first if kind == "redis-6.2" else f"{first} {sharded}"


def acl_user(node: Node) -> str:
    """Make the user of docs/acl.md; its URL. For execute() it gets what the tests' commands need."""
    _, *rules = least_rights().split()
    with redis.Redis.from_url(node.url) as client:
        client.execute_command(
            "ACL", "SETUSER", USER, "reset", *rules, "~users:*", "+command|getkeys", "+incrby", "+mget"
        )
    return f"redis://{USER}:{PASSWORD}@127.0.0.1:{node.port}/0"


def valkey_client(node: Node, mode: str):
    valkey = pytest.importorskip("valkey")
    return (valkey if mode == "threads" else valkey.asyncio).Valkey.from_url(node.tcp_url)


def client_of(**options):
    """A client of redis-py with these options."""

    def make(node: Node, mode: str):
        return (redis if mode == "threads" else redis.asyncio).Redis.from_url(node.url, **options)

    return make


WAYS = {
    "unix": lambda node, _mode: node.url,
    "tcp": lambda node, _mode: node.tcp_url,
    "tls": lambda node, _mode: node.tls_url,
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
        """Whether this machine could have it: not every server speaks TLS, and threads have no loop."""
        return (self.way != "tls" or self.kind in TLS) and (self.way != "uvloop" or self.mode == "asyncio")


BASE = "valkey-9.1"
HOME = [Cell(BASE, "unix", mode) for mode in MODES]
EVERYWHERE = [
    cell
    for server in KINDS
    for way in WAYS
    if way != "quorum"
    for mode in MODES
    if (cell := Cell(server, way, mode)).possible
]
SAMPLE = [
    *HOME,
    *(
        cell
        for server, way, modes in (
            ("redis-7.0", "tls", MODES), (BASE, "valkey-py", MODES[1:]), ("redis-8.2", "client", MODES[:1]),
            # the rest is the same in both modes but for the bytes on the wire, and those two parsers are tested above
            ("valkey-8.1", "tcp", MODES[:1]), ("redis-8.2", "resp3", MODES[1:]), ("redis-6.2", "acl", MODES[:1]),
            ("valkey-8.1", "acl", MODES[1:]), ("redis-6.2", "resp2", MODES[1:]), ("redis-7.0", "decoding", MODES[:1]),
            (BASE, "uvloop", MODES[1:]), (BASE, "cluster", MODES[:1]),
            ("valkey-8.1", "sentinel", MODES[:1]),
        )
        for mode in modes
        if (cell := Cell(server, way, mode)).possible
    ),
]  # fmt: skip
SERVERS = [Cell(server, "unix", mode) for server in KINDS for mode in MODES]

VERSIONS = [*HOME, *(Cell(server, "unix", MODES[i % 2]) for i, server in enumerate(sorted({*KINDS} - {BASE})))]

# For modules marked `quorum`, but for those of their tests that look at one server (see conftest) or say `one_server`.
QUORUM = [Cell(BASE, "quorum", mode) for mode in MODES]

# What a test module asks for by `pytestmark = pytest.mark.matrix(...)`: by default, and with --full.
WIDTHS = {
    None: (HOME, HOME),
    "ways": (SAMPLE, EVERYWHERE),
    "kinds": (VERSIONS, EVERYWHERE),  # the same, for primitives that reach the server as the lock does
    "servers": (HOME, SERVERS),
    "versions": (SERVERS, SERVERS),  # what hinges on the version of the server
    "releases": (VERSIONS, SERVERS),  # the same, where the mode matters less
}


class ServerPool:
    """The servers of a session, each started when it is first asked for."""

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
        """One that has a replica, and is watched by a sentinel."""
        if kind not in self.watched:
            try:
                group = Sentinels(
                    kind, replicas=1, sentinels=1, down_after=60
                )  # no test of the matrix wants a failover
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

    @staticmethod
    def shards(kind: str, **options) -> Cluster:
        """A cluster of this kind that is not started yet."""
        try:
            return Cluster(kind, **options)
        except Missing as missing:
            required(f"no {kind} here: {missing}")
            raise

    def quorum(self, kind: str) -> Node:
        """The first of three that run for all tests; it knows the others."""
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
            node = self.spare(kind, tls=self.certificate if kind in TLS else None)
            node.start()
            self.nodes[kind] = node
        return self.nodes[kind]

    @staticmethod
    def spare(kind: str, **options) -> Node:
        """One of this kind that is not started yet, for a test that will harm it."""
        try:
            return Node(kind, **options)
        except Missing as missing:
            required(f"no {kind} here: {missing}")
            raise

    @cached_property
    def certificate(self) -> tuple[str, str, str]:
        """A certificate for this machine, its key, and the authority that made it."""
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
