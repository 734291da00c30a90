"""A cluster: shards of a primary and its replicas."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Final

from redis.crc import key_slot

from harness.servers import Node, free_ports

from .bus import Bus
from .group import OVER_TLS, PATIENCE, QUICK, TLS, Group, ask, fields, tls_query, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SLOTS: Final = 16384
BUS: Final = 10_000  # between a node's port and the one at which it hears other nodes


class _Member(Node):
    bus_port = 0  # where others reach it, once it is started
    bus: Bus | None = None
    number = 0

    def _ports(self) -> tuple[int, int]:
        """Two ports, for clients and for other nodes."""
        port, _ = free_ports(BUS)
        self.bus_port = port + BUS
        if self.bus is not None:
            self.bus_port = self.bus.lead(self.number, port + BUS)
            self._config |= {
                "cluster-announce-bus-port": str(self.bus_port), "bind-source-addr": self.bus.source(self.number),
                "cluster-announce-ip": "127.0.0.1", "replica-announce-ip": "127.0.0.1",
            }  # fmt: skip
        if self.door:
            self._config |= {"cluster-announce-ip": "127.0.0.1", "cluster-announce-port": str(self.door)}
        return (port, 0) if self._tls is None else (free_ports()[0], port)


@dataclass(frozen=True)
class _View:
    """What one node says of another: a line of CLUSTER NODES."""

    id: str
    flags: frozenset[str]
    follows: str
    epoch: int
    slots: frozenset[int]

    @classmethod
    def of(cls, line: str) -> _View:
        name, _, flags, follows, _, _, epoch, _, *ranges = line.split()
        slots: set[int] = set()
        for each in ranges:
            if not each.startswith("["):  # a slot that is moving
                first, _, last = each.partition("-")
                slots |= set(range(int(first), int(last or first) + 1))
        return cls(name, frozenset(flags.split(",")) - {"myself"}, follows, int(epoch), frozenset(slots))


class Cluster(Group):
    """Shards of one primary and its replicas, created without redis-cli.

        with Cluster(shards=3, replicas=1) as cluster:
            primary = cluster.primary_of("lock:a")
            replica = cluster.replica_of(primary)
            primary.kill()
            cluster.wait_ok()                          # the replica has taken over

    `nodes` are the primaries of the start, then their replicas. `node_timeout` is in seconds. A shard that is down
    does not keep the others from serving (`config={"cluster-require-full-coverage": "yes"}` does). With `wired=True`
    (not for 6.2) a node can be cut off:

        cluster.isolate(primary)                       # clients still reach it
        cluster.wait_for_primary("lock:a", primary)
        cluster.heal()

    With `tls` (see Node) clients, nodes and replicas speak TLS. With `clock` a test can set the clock of each node.
    """

    def __init__(
        self,
        kind: str = "valkey-9.1",
        *,
        shards: int = 3,
        replicas: int = 1,
        config: Mapping[str, str] | None = None,
        node_timeout: float = 1.0,
        wired: bool = False,
        tls: TLS | None = None,
        clock: bool = False,
    ) -> None:
        settings = {
            **QUICK, "cluster-enabled": "yes", "cluster-node-timeout": str(round(node_timeout * 1000)),
            "cluster-require-full-coverage": "no",
        }  # fmt: skip
        settings |= {**OVER_TLS, "tls-cluster": "yes"} if tls else {}
        number = shards * (1 + replicas)
        settings |= config or {}
        super().__init__(
            (_Member(kind, config=settings, tls=tls, clock=clock) for _ in range(number)), bus=Bus() if wired else None
        )
        self._tls = tls
        self.shards = shards
        self._ids: dict[Node, str] = {}
        for number, node in enumerate(self._members, 1):
            node.bus, node.number = self._bus, number

    @property
    def _members(self) -> list[_Member]:
        return [node for node in self.nodes if isinstance(node, _Member)]

    def _form(self) -> None:
        self._introduce()
        self._ids = {node: ask(node, "CLUSTER", "MYID") for node in self.nodes}
        primaries, replicas = self.nodes[: self.shards], self.nodes[self.shards :]
        bounds = [SLOTS * shard // self.shards for shard in range(self.shards + 1)]
        for number, node in enumerate(self.nodes):
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node, first, after in zip(primaries, bounds, bounds[1:], strict=False):
            ask(node, "CLUSTER", "ADDSLOTS", *range(first, after))
        for one, other in combinations(self._members, 2):  # all pairs: gossip would take its time
            ask(one, "CLUSTER", "MEET", "127.0.0.1", other.public, other.bus_port)
        wait(self._strangers)
        for number, node in enumerate(replicas):
            ask(node, "CLUSTER", "REPLICATE", self._ids[primaries[number % self.shards]])
        self.wait_ok()

    def _strangers(self) -> str:
        """Names a node that does not know all others yet; "" if each node does."""
        for node in self.nodes:
            known = {view.id for view in self._views(node) if "handshake" not in view.flags}
            if lack := len(self.nodes) - len(known):
                return f"the node at port {node.port} does not know {lack} of the others"
        return ""

    def _views(self, node: Node) -> list[_View]:
        return [_View.of(line) for line in ask(node, "CLUSTER", "NODES").splitlines()]

    @property
    def url(self) -> str:
        """Where to connect: the primaries of the start, any of which names the other nodes."""
        hosts = ",".join(f"127.0.0.1:{node.public}" for node in self.nodes[: self.shards])
        return f"redi{'ss' if self._tls else 's'}+cluster://{hosts}{tls_query(self._tls)}"

    def slot(self, key: str | bytes) -> int:
        """The slot of a key."""
        return key_slot(key.encode() if isinstance(key, str) else key)

    def primary_of(self, what: str | bytes | int) -> Node:
        """The node that serves a key or a slot. Raises LookupError if none that runs does."""
        slot = what if isinstance(what, int) else self.slot(what)
        claims = [(view.epoch, node) for node, view in self._selves().items() if slot in view.slots]
        if not claims:
            raise LookupError(f"no node that runs serves slot {slot}")
        return max(claims, key=lambda claim: claim[0])[1]

    def replica_of(self, node: Node) -> Node:
        """A replica of this node that runs. Raises LookupError if there is none."""
        for replica, view in self._selves().items():
            if view.follows == self._ids[node]:
                return replica
        raise LookupError(f"no replica of the node at port {node.port} runs")

    def _selves(self) -> dict[Node, _View]:
        """What each node says of itself, if it runs and is not paused: a paused node would not answer."""
        return {
            node: view
            for node in self.nodes if node.running and not node._is_paused
            for view in self._views(node) if view.id == self._ids[node]
        }  # fmt: skip

    def wait_ok(self, *, timeout: float = PATIENCE) -> None:
        """Wait until the running nodes agree on the map, serve all slots, and their replicas have all writes."""
        wait(self._wrong, timeout)

    def _wrong(self) -> str:
        running = [node for node in self.nodes if node.running]
        ids = {self._ids[node] for node in running}
        views = {node: {view for view in self._views(node) if view.id in ids} for node in running}
        for node, seen in views.items():
            if seen != views[running[0]]:
                return f"the nodes at ports {running[0].port} and {node.port} do not agree"
            if lack := SLOTS - sum(len(view.slots) for view in seen if "master" in view.flags):
                return f"{lack} slots are not served by a node that runs"
            if fields(ask(node, "CLUSTER", "INFO"))["cluster_state"] != "ok":
                return f"the node at port {node.port} says that the cluster is down"
        return self._behind(*running)

    def failover(
        self, replica: Node, *, force: bool = False, takeover: bool = False, timeout: float = PATIENCE
    ) -> None:
        """Let this replica take over its shard: without loss, or with `force` or `takeover` from a dead primary."""
        options = ["TAKEOVER"] if takeover else ["FORCE"] if force else []
        ask(replica, "CLUSTER", "FAILOVER", *options)
        self._when_primary(replica, timeout)

    def _when_primary(self, node: Node, timeout: float) -> None:
        wait(lambda: "" if "master" in self._selves()[node].flags else f"port {node.port} has not taken over", timeout)
        self.wait_ok(timeout=timeout)

    def isolate(self, node: Node, *together: Node, silent: bool = False) -> None:
        """Cut it off from the others; clients still reach it. Those in `together` are on its side.

        `silent`: what nodes say to each other of who is alive is lost, and no connection of theirs ends.
        """
        assert self._bus is not None, "Cluster(wired=True)"
        super().isolate(node, *together)
        side, others = self._sides(node, *together)
        for one, other in product(self._members, repeat=2):
            if one in side and other in others:
                (self._bus.mute if silent else self._bus.cut)(one.number, other.number)

    def wait_for_primary(self, what: str | bytes | int, other_than: Node, *, timeout: float = PATIENCE) -> Node:
        """Wait until another node serves a key or a slot, by the newest map of any node; that node."""
        found: list[Node] = []

        def missing() -> str:
            with contextlib.suppress(LookupError):  # nobody serves it
                found[:] = [self.primary_of(what)]
            return "" if found and found[0] is not other_than else "nobody else serves it yet"

        wait(missing, timeout)
        return found[0]

    def migrate(self, slot: int, *, to: Node, between: Callable[[str], None] | None = None) -> None:
        """Move a slot and its keys to another primary. `between` is called with each step of `migrating()`."""
        for step in self.migrating(slot, to=to):
            if between is not None:
                between(step)

    def migrating(self, slot: int, *, to: Node) -> Iterator[str]:
        """Move a slot step by step, so that a test can act in between (also with `await`).

            for step in cluster.migrating(cluster.slot("lock:a"), to=cluster.nodes[1]):
                ...    # "open": no key has moved; "half": half of them; "moved": all, but the old node has the slot

        Leaving the loop leaves the slot as it is then.
        """
        source = self.primary_of(slot)
        if source is to:
            raise ValueError(f"slot {slot} is at port {to.port} already")
        ask(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[source])
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[to])
        yield "open"
        keys = self._keys(source, slot)
        self._move(source, to, keys[: (len(keys) + 1) // 2])
        yield "half"
        while keys := self._keys(source, slot):
            self._move(source, to, keys)
        yield "moved"
        rest = [node for node, view in self._selves().items() if "master" in view.flags and node not in {source, to}]
        for node in (to, source, *rest):  # the new owner first: the slot is never nobody's
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self._ids[to])
        self.wait_ok()

    @staticmethod
    def _keys(node: Node, slot: int) -> list[str]:
        return list(ask(node, "CLUSTER", "GETKEYSINSLOT", slot, 1000))

    @staticmethod
    def _move(source: Node, to: Node, keys: list[str]) -> None:
        if keys:
            ask(source, "MIGRATE", "127.0.0.1", to.public, "", 0, 5000, "REPLACE", "KEYS", *keys, within=10)
