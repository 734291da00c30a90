"""The arithmetic for many clients on a cluster: what they send, what that costs a node, and what gives way first.

docs/growth.md lists the assumptions. The number of names on the fullest of S nodes is the expectation of the largest of
S such counts: about N/S + sqrt(2 N/S ln S).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from growth import clients as real
from growth import server
from interlock._client.waiting import HEARTBEAT_GRAIN, HEARTBEAT_INTERVAL
from measure import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from growth.curves import Curve

# Seconds from one heartbeat of a waiter to the next, on average: 0.7 to 1.0 of the interval, rounded down to the grain.
BEAT_EVERY = 0.85 * HEARTBEAT_INTERVAL - HEARTBEAT_GRAIN / 2
FIRST_BEAT = BEAT_EVERY / 2  # of a wait, this much is after its last heartbeat, on average
RENEWALS_PER_TTL = 3
MAXCLIENTS = 10_000  # a server's default
FULL = 0.8  # of a core: above that, queues at the server's socket grow long
CALLS_PER_HANDOVER = 3


@dataclass(frozen=True)
class Load:
    """What clients send to all nodes together, a second."""

    clients: int
    names: int
    hold: float
    ttl: float = 30.0

    @property
    def waiters(self) -> int:
        return max(0, self.clients - self.names)

    @property
    def handovers(self) -> float:
        return min(self.names, self.clients) / self.hold

    @property
    def heartbeats(self) -> float:
        if not self.waiters:
            return 0.0
        wait = self.waiters / self.handovers
        return self.handovers * max(0.0, wait - FIRST_BEAT) / BEAT_EVERY

    @property
    def renewals(self) -> float:
        """Of a lease, every third of its ttl, if it lasts so long."""
        return self.handovers * math.floor(self.hold * RENEWALS_PER_TTL / self.ttl)

    @property
    def calls(self) -> float:
        """Script calls."""
        return self.heartbeats + CALLS_PER_HANDOVER * self.handovers + self.renewals

    @property
    def pushes(self) -> float:
        """Each goes to one client: the next of its queue."""
        return self.handovers


@dataclass(frozen=True)
class Costs:
    """What this machine measured."""

    beat: float  # µs of a core, system calls included: a heartbeat of one waiter, or another call on its own
    handover: float  # µs of a core: three calls and a push
    client: float  # bytes of the server for a client: connection, subscription, place in a queue
    new_client: float  # the same just after it has connected
    name: float  # bytes of a held lock and its record

    @classmethod
    def of(cls, curves: Mapping[str, Curve]) -> Costs:
        return cls(
            curves["connections"].last(server.BEAT_CORE), curves["connections"].last(server.HANDOVER_CORE),
            curves["clients"].values(real.BYTES_CLIENT)[-1] or 0.0, curves["connections"].last(server.BYTES_NEW),
            curves["names"].last(server.BYTES_HELD),
        )  # fmt: skip

    def markdown(self) -> str:
        """The costs as a table, with the curves they come from."""
        return (
            "| cost | from | |\n|---|---|---|\n"
            f"| a heartbeat, or a renewal | `connections` | {shown(self.beat)} µs of a core |\n"
            f"| a handover: three calls and a push | `connections` | {shown(self.handover)} µs of a core |\n"
            f"| a client: connection, subscription, place in a queue | `clients` | {self.client:,.0f} bytes |\n"
            f"| the same just after it has connected | `connections` | {self.new_client:,.0f} bytes |\n"
            f"| a held lock with its record | `names` | {self.name:,.0f} bytes |"
        )


@dataclass(frozen=True)
class Node:
    """The fullest node of a cluster under this load."""

    load: Load
    costs: Costs
    nodes: int

    @property
    def share(self) -> float:
        """Of all names, and so of everything."""
        mean = self.load.names / self.nodes
        return min(1.0, (mean + math.sqrt(2 * mean * math.log(self.nodes))) / self.load.names)

    @property
    def core(self) -> float:
        """How much of its core it uses; above 1 it can't."""
        load, costs = self.load, self.costs
        micros = (load.heartbeats + load.renewals) * costs.beat + load.handovers * costs.handover
        return micros / 1e6 * self.share

    @property
    def connections(self) -> float:
        return self.load.clients * self.share

    def memory(self, of_client: float) -> float:
        """Bytes, if a client takes so many."""
        return self.share * (self.load.clients * of_client + self.load.names * self.costs.name)

    @property
    def breaks(self) -> str:
        """What gives way, if anything does."""
        return ", ".join(
            ([f"core ({FULL:.0%})"] if self.core > FULL else [])
            + ([f"maxclients ({MAXCLIENTS:,})"] if self.connections > MAXCLIENTS else [])
        )


def most_clients(costs: Costs, nodes: int, names_per_client: float, hold: float) -> int:
    """How many clients of this sort fill the core of the fullest node."""
    low, high = 1, 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        fits = Node(Load(middle, max(1, int(middle * names_per_client)), hold), costs, nodes).core <= FULL
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def limits(costs: Costs) -> str:
    """How many clients fill a core, by how they use it."""
    lines = ["| clients that one node serves | at most |", "|---|---|"]
    for what, names_per_client, hold in (
        ("they wait, ten for each lock, held for 1 s", 0.1, 1.0),
        ("they wait, ten for each lock, held for 10 s", 0.1, 10.0),
        ("they wait, a hundred for each lock, held for 0.1 s", 0.01, 0.1),
        ("they all wait for one lock, held for 1 s", 0.0, 1.0),
    ):
        lines.append(f"| {what} | {most_clients(costs, 1, names_per_client, hold):,} |")
    return "\n".join(lines)


CLIENTS, NAMES, HOLD = 100_000, 10_000, 1.0
NODES = (1, 3, 6, 12, 24)


def table(costs: Costs) -> str:
    """The numbers for the fullest node of clusters of several sizes."""
    load = Load(CLIENTS, NAMES, HOLD)
    lines = [
        "| nodes | script calls/s | pushes/s | of its core | connections | memory; at first | gives way |",
        "|---|---|---|---|---|---|---|",
    ]
    for nodes in NODES:
        node = Node(load, costs, nodes)
        lines.append(
            f"| {nodes} | {load.calls * node.share:,.0f} | {load.pushes * node.share:,.0f} | {node.core:.0%} | "
            f"{node.connections:,.0f} | {node.memory(costs.client) / 1e6:,.0f}; "
            f"{node.memory(costs.new_client) / 1e6:,.0f} MB | {node.breaks or 'nothing'} |"
        )
    return "\n".join(lines)
