"""Many processes on one lock: contended and fair (threads, measured together), contended-tasks, handover.

Two of the rows are there on a quorum, too, against one of its servers. All three servers share the machine's cores.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contenders import CONTENDED_ASYNC_PEERS, CONTENDED_PEERS, present
from floor import Tapped, floor_messages, quorum_messages
from goals import FAIR, FLOOR, ONE_SERVER, OURS, POTTERY, REDIS_PY, THREE
from harness.topology import Independents
from measure import Bench, Check, Outcome, now, percentile, shown
from worker import SLOT, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROCESSES, CROWD = 4, 8
STARVED = 0.1  # of an equal share of the sections: a thread that gets less is starved
HOLD = 0.002  # seconds in which the other process begins to wait
HANDOVERS = {REDIS_PY: 6, POTTERY: 6}  # in a slice, of each of the two; these wait about 100 ms for each


@dataclass
class Contention:
    """Slices in which 32 threads or tasks of 4 processes want one lock; what came of them, by contender."""

    bench: Bench
    job: str
    workers: list[Worker]
    board: Path
    waits: dict[str, list[float]] = field(default_factory=dict)  # ms
    shares: dict[str, list[float]] = field(default_factory=dict)
    sections: dict[str, int] = field(default_factory=dict)
    overlaps: dict[str, int] = field(default_factory=dict)

    def contend(self, contender: str, seconds: float) -> list[dict[str, Any]]:
        self.board.write_bytes(bytes(2 * SLOT))
        start = now() + 0.1
        for i, worker in enumerate(self.workers):
            worker.tell(
                self.job, contender=contender, name=f"{self.job} {contender}", crowd=CROWD,
                start=start, end=start + seconds, board=str(self.board), number=i,
            )  # fmt: skip
        answers = [worker.answer() for worker in self.workers]
        count = sum(len(answer["waits"]) for answer in answers)
        counted = int.from_bytes(self.board.read_bytes()[:SLOT], "little")
        lost = count - counted + sum(answer["overlaps"] for answer in answers)
        self.overlaps[contender] = self.overlaps.get(contender, 0) + lost
        self.sections[contender] = self.sections.get(contender, 0) + count
        return answers

    def slice_of(self, contender: str, seconds: float) -> Callable[[], float]:
        self.waits[contender], self.shares[contender] = [], []

        def slice_() -> float:
            answers = self.contend(contender, seconds)
            for answer in answers:
                self.waits[contender].extend(wait * 1000 for wait in answer["waits"])
            each = [number for answer in answers for number in answer["in_time"]]
            self.shares[contender].append(min(each) * len(each) / max(1, sum(each)))
            return sum(each) / seconds

        return slice_

    def starving(self) -> dict[str, float]:
        """Who lets some threads starve, with the share that the least of them had in the median slice."""
        least = {name: statistics.median(shares) for name, shares in self.shares.items() if shares}
        return {name: share for name, share in least.items() if share < STARVED}

    def outcome(self, row: str, what: str, ours: str, samples: dict[str, list[float]]) -> Outcome:
        starving = {name: share for name, share in self.starving().items() if name in samples}
        outcome = Outcome(
            row, what, "sections/s", ours, samples, broken=self.overlaps[ours] > 0, starving=starving,
            latencies={name: self.waits[name] for name in samples}, latency="a wait", latency_unit="ms",
            not_peers=(OURS, FAIR, ONE_SERVER),
            remarks={
                name: f"starves: the thread or task that it serves least gets {share:.0%} of an equal share"
                for name, share in starving.items()
            }
            | {name: f"OVERLAPS {self.overlaps[name]}" for name in samples if self.overlaps[name]},
        )  # fmt: skip
        what = f"overlaps in {self.sections[ours]:,} sections"
        outcome.checks.append(Check(what, str(self.overlaps[ours]), "0", self.overlaps[ours] == 0))
        return outcome


def contended(bench: Bench) -> Iterator[Outcome]:
    """Threads, with and without fair=True, which are measured together: they have the same peers."""
    seconds, peers = bench.size(1.0, 0.1), present(*CONTENDED_PEERS)
    with ExitStack() as stack:
        contention = _contention(stack, bench, "contend")
        slices = {name: contention.slice_of(name, seconds) for name in (OURS, FAIR, *peers)}
        samples = bench.interleave("contended, fair", 7, slices, contention.waits)
        overtaken, grants = _overtaken(bench.path, lambda: contention.contend(FAIR, seconds / 2))
    what = f"{PROCESSES} processes x {CROWD} threads on one lock"
    outcome = contention.outcome("contended", what, OURS, {name: samples[name] for name in (OURS, *peers)})
    peer = outcome.steady_peer()
    for name, of_peer, of_ours in (
        ("wait p99, ms", *(percentile(contention.waits[each], 99) for each in (peer, OURS))),
        ("longest wait, ms", *(max(contention.waits[each]) for each in (peer, OURS))),
    ):
        outcome.checks.append(Check(name, shown(of_ours), f"< {shown(of_peer)}", of_ours < of_peer))
    outcome.note = f"The bounds are those of {peer}. It is the fastest peer that starves nobody."
    yield outcome
    outcome = contention.outcome("fair", f"{what}, fair=True", FAIR, {name: samples[name] for name in (FAIR, *peers)})
    outcome.checks.append(Check("arrivals overtaken", str(overtaken), "0", overtaken == 0))
    outcome.note = (
        f"Overtaken: of {grants:,} grants, those that came (by fence) after the grant of a request that had reached "
        "the server later (by MONITOR, in a slice of its own)."
    )
    yield outcome


def contended_tasks(bench: Bench) -> Iterator[Outcome]:
    """The same with asyncio."""
    peers = present(*CONTENDED_ASYNC_PEERS)
    with ExitStack() as stack:
        contention = _contention(stack, bench, "contend_tasks")
        slices = {name: contention.slice_of(name, bench.size(1.0, 0.1)) for name in (OURS, FAIR, *peers)}
        samples = bench.interleave("contended-tasks", 5, slices, contention.waits)
    yield contention.outcome(
        "contended-tasks", f"{PROCESSES} processes x {CROWD} asyncio tasks on one lock", OURS, samples
    )


def quorum_contended(bench: Bench) -> Iterator[Outcome]:
    """Threads, with one server and with a quorum: where each section is a handover, since a quorum has no cohorts."""
    names = (THREE, ONE_SERVER, *present(POTTERY))
    with ExitStack() as stack:
        paths = _quorum(stack)
        contention = _contention(stack, bench, "contend", paths)
        slices = {name: contention.slice_of(name, bench.size(1.0, 0.1)) for name in names}
        samples = bench.interleave("quorum-contended", 7, slices, contention.waits)
    what = f"quorum of 3: {PROCESSES} processes x {CROWD} threads on one lock"
    yield contention.outcome("quorum-contended", what, THREE, samples)


def _quorum(stack: ExitStack) -> list[str]:
    """The sockets of three servers that know nothing of each other, as long as the stack is open."""
    return [str(node.socket) for node in stack.enter_context(Independents(number=3)).nodes]


def _contention(stack: ExitStack, bench: Bench, job: str, paths: Sequence[str] = ()) -> Contention:
    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-"))
    workers = [stack.enter_context(Worker(*(paths or [bench.path]))) for _ in range(PROCESSES)]
    for worker in workers:
        worker.tell("ready")
    for worker in workers:
        worker.answer()
    return Contention(bench, job, workers, Path(home, "board"))


def _overtaken(path: str, contend: Callable[[], list[dict[str, Any]]]) -> tuple[int, int]:
    """How many grants came after the grant of a later arrival, and of how many."""
    answers: list[dict[str, Any]] = []
    tapped = Tapped(path, lambda: answers.extend(contend()))
    arrival: dict[str, int] = {}
    for i, token in enumerate(tapped.tokens("acquire")):
        arrival.setdefault(token, i)
    grants = sorted((fence, token) for answer in answers for fence, token in answer["grants"])
    newest, overtaken = -1, 0
    for _, token in grants:
        overtaken += arrival[token] < newest
        newest = max(newest, arrival[token])
    return overtaken, len(grants)


def handover(bench: Bench) -> Iterator[Outcome]:
    """From one process to another."""
    names = (FLOOR, OURS, *present(*CONTENDED_PEERS))
    passed, samples = _hand_over(bench, "handover", [bench.path], names, [floor_messages(bench.path)])
    yield Outcome(
        "handover", "handover between 2 processes: p50 from release to acquired", "µs", OURS, samples,
        latencies=passed, latency="a handover", latency_unit="µs", less_is_better=True,
        note="Exactly one process waits for the holder, which releases after 2 ms. The floor: release, push, "
        "confirming acquire, over bare connections.",
    )  # fmt: skip


def quorum_handover(bench: Bench) -> Iterator[Outcome]:
    """The same on a quorum."""
    names = (FLOOR, THREE, ONE_SERVER, *present(POTTERY))
    with ExitStack() as stack:
        paths = _quorum(stack)
        passed, samples = _hand_over(bench, "quorum-handover", paths, names, quorum_messages(paths))
    yield Outcome(
        "quorum-handover", "quorum of 3: handover between 2 processes: p50 from release to acquired", "µs", THREE,
        samples, latencies=passed, latency="a handover", latency_unit="µs", less_is_better=True,
        note="As in handover. The floor: release to all, pushes of a majority, confirming acquire to all, over bare "
        "connections.",
    )  # fmt: skip


def _hand_over(
    bench: Bench, row: str, paths: Sequence[str], names: Sequence[str], floor: Sequence[object]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The µs of each handover, and the median of each slice, by contender."""
    passed: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        ends = socket.socketpair()
        fds = [end.fileno() for end in ends]
        workers = [stack.enter_context(Worker(*paths, inherits=(fd,))) for fd in fds]
        for end in ends:
            end.close()

        def of(contender: str) -> Callable[[], float]:
            def slice_() -> float:
                count = HANDOVERS.get(contender, 40)
                for i, worker in enumerate(workers):
                    worker.tell(
                        "handover", contender=contender, name=f"{row} {contender}", floor=floor,
                        count=min(count, int(bench.size(count, 3))), hold=HOLD, first=i == 0, fd=fds[i],
                    )  # fmt: skip
                (got, left), (others_got, others_left) = (worker.answer() for worker in workers)
                times = [b - a for a, b in zip(left, others_got, strict=True)]
                times += [b - a for a, b in zip(others_left, got[1:], strict=False)]
                times = [each * 1e6 for each in times]
                passed[contender].extend(times)
                return statistics.median(times)

            return slice_

        return passed, bench.interleave(row, 15, {name: of(name) for name in names}, passed)
