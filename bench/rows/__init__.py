"""The rows, by name: what each measures, and the function that measures it. To add one: a line in ROWS.

A function may measure two rows together; then it stands at both, and yields the outcomes of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goals import GOALS
from rows import contended, costs, crowds, engines, imports, primitives, server, uncontended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measure import Bench, Outcome


@dataclass(frozen=True)
class Row:
    """A row of the benchmarks."""

    measures: str
    run: Callable[[Bench], Iterator[Outcome]]
    usual: bool = True  # a row of the README's table: runs if nobody names rows
    bounds: str = ""  # goals that are no ratios

    def goal(self, name: str) -> str:
        """All goals of this row, in words."""
        return "; ".join([*(goal.text for goal in GOALS.get(name, ())), *([self.bounds] if self.bounds else [])])


ROWS: dict[str, Row] = {
    "uncontended": Row("one thread: acquire and release, over and over", uncontended.uncontended),
    "tasks": Row("the same by 100 asyncio tasks, each on a lock of its own, one connection", uncontended.tasks),
    "contended": Row(
        "4 processes x 8 threads, one lock, no work inside or outside the sections",
        contended.contended,
        bounds="p99 and longest wait below that peer's",
    ),
    "fair": Row(
        "the same with fair=True (measured together with contended)",
        contended.contended,
        bounds="no arrival is overtaken",
    ),
    "contended-tasks": Row("4 processes x 8 asyncio tasks, one lock", contended.contended_tasks),
    "handover": Row("two processes take turns: from a release to the other's acquired", contended.handover),
    "slow-link": Row("one thread, each way of the connection takes 1 ms more", uncontended.slow_link),
    "client-cpu": Row("processor time of the client for a pair, threads and asyncio", uncontended.client_cpu),
    "server-time": Row("processor time of the server for an acquire and a release, hot", server.server_time),
    "server-handover": Row("processor time of the server for a handover, 10 waiters, hot", server.server_handover),
    "waiters": Row("server's time for a handover with 10,000 waiters, beside 10", crowds.waiters),
    "leases": Row(
        "100,000 leases of one process, renewed every 10 s",
        crowds.leases,
        bounds="none lost, ≤ 15 % of one core, ≤ 1,536 bytes each",
    ),
    "import": Row("import in a fresh interpreter that finds compiled files", imports.imports),
    "semaphore": Row(
        "one thread: acquire and release a permit, over and over, beside the floor", primitives.semaphore, usual=False
    ),
    "primitives": Row("uncontended, for each synchronizer, beside the lock", primitives.primitives, usual=False),
    "primitive-tasks": Row("tasks, for each synchronizer, beside the lock", primitives.primitive_tasks, usual=False),
    "crowds": Row("waiters, of a semaphore, a read-write lock and an election", crowds.crowds, usual=False),
    "holders": Row("an acquire and a release beside 10,000 holders, and beside 10", crowds.holders, usual=False),
    "arrivals": Row("one more arrival at a latch or barrier where 10,000 wait, or 10", crowds.arrivals, usual=False),
    "registry": Row(
        "pairs with and without reports to the registry, threads and asyncio; processor time of a report",
        costs.registry,
        usual=False,
        bounds="a report in two seconds ≤ 2 % of a core",
    ),
    "observers": Row("uncontended, while OpenTelemetry measures and traces", costs.observers, usual=False),
    "cluster": Row("uncontended and tasks on a cluster of 3 shards", engines.cluster, usual=False),
    "shards": Row("100 tasks on locks of one, two and three shards", engines.scaling, usual=False),
    "quorum": Row("uncontended and tasks on quorums of 3 and 5", engines.quorums, usual=False),
    "quorum-contended": Row(
        "contended on a quorum of 3, against one of its servers", contended.quorum_contended, usual=False
    ),
    "quorum-handover": Row(
        "handover on a quorum of 3, against one of its servers", contended.quorum_handover, usual=False
    ),
    "failover": Row("the primary of a Sentinel group is killed: until the next grant", engines.failover, usual=False),
}
