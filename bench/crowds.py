"""The rows that need processes of their own: 3 to 7 of DESIGN section 5, and 11 and 12, crowds at other primitives."""

from __future__ import annotations

import socket
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contenders import BLPOP, EAGER, FAIR, FLOOR, OURS, REDIS_PY, Tapped, floor_messages, now
from measure import FASTEST, Bench, Check, Goal, Outcome
from operations import CROWDS, HELD, LOCK, WAITED
from worker import SLOT, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROCESSES, THREADS = 4, 8
HOLD = 0.002  # seconds in which the other one begins to wait
HANDOVERS = {REDIS_PY: 6}  # in a slice, of each of the two; it waits 100 ms for each
MOST, FEW = 10_000, 10
PEERS = (REDIS_PY, EAGER, BLPOP)


def handover(bench: Bench) -> Iterator[Outcome]:
    """Row 5."""
    pooled: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ends = socket.socketpair()
        fds = [end.fileno() for end in ends]
        workers = [stack.enter_context(Worker(bench.path, inherits=(fd,))) for fd in fds]
        for end in ends:
            end.close()
        floor = floor_messages(bench.path)

        def of(contender: str) -> Callable[[], float]:
            def slice_() -> float:
                for i, worker in enumerate(workers):
                    worker.tell(
                        "handover", contender=contender, name=f"handover {contender}", floor=floor,
                        count=HANDOVERS.get(contender, 40), hold=HOLD, first=i == 0, fd=fds[i],
                    )  # fmt: skip
                (got, left), (others_got, others_left) = (worker.answer() for worker in workers)
                passed = [b - a for a, b in zip(left, others_got, strict=True)]
                passed += [b - a for a, b in zip(others_left, got[1:], strict=False)]
                passed = [each * 1e6 for each in passed]
                pooled.setdefault(contender, []).extend(passed)
                return statistics.median(passed)

            return slice_

        samples = bench.interleave("row 5", 15, {name: of(name) for name in (FLOOR, OURS, *PEERS)})
    yield Outcome(
        5, "handover between 2 processes: p50 from release to acquired", "µs", OURS, samples,
        [Goal(FLOOR, most=1.4)], less_is_better=True,
        remarks={name: f"p99 {_shown(_percentile(pooled[name], 99))} µs" for name in (FLOOR, OURS, *PEERS)},
        note="The one who has it is waited for, by exactly one, and gives it back after 2 ms. The floor: release, "
        "push, confirming acquire, over bare connections.",
    )  # fmt: skip


def crowded(bench: Bench) -> Iterator[Outcome]:
    """Rows 3 and 4, which are measured together: they have the same peers."""
    seconds = 0.3 if bench.quick else 1.0
    waits: dict[str, list[float]] = {}
    sections: dict[str, int] = {}
    overlaps: dict[str, int] = {}
    with ExitStack() as stack:
        board = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-"))) / "board"
        workers = [stack.enter_context(Worker(bench.path)) for _ in range(PROCESSES)]

        def contend(contender: str, seconds: float) -> list[dict[str, Any]]:
            board.write_bytes(bytes(2 * SLOT))
            start = now() + 0.1
            for i, worker in enumerate(workers):
                worker.tell(
                    "contend", contender=contender, name=f"crowded {contender}", threads=THREADS,
                    start=start, end=start + seconds, board=str(board), number=i,
                )  # fmt: skip
            answers = [worker.answer() for worker in workers]
            count = sum(len(answer["waits"]) for answer in answers)
            counted = int.from_bytes(board.read_bytes()[:SLOT], "little")
            lost = count - counted + sum(answer["overlaps"] for answer in answers)
            overlaps[contender] = overlaps.get(contender, 0) + lost
            sections[contender] = sections.get(contender, 0) + count
            return answers

        def of(contender: str) -> Callable[[], float]:
            def slice_() -> float:
                answers = contend(contender, seconds)
                for answer in answers:
                    waits.setdefault(contender, []).extend(wait * 1000 for wait in answer["waits"])
                return sum(answer["in_time"] for answer in answers) / seconds

            return slice_

        samples = bench.interleave("rows 3 and 4", 9, {name: of(name) for name in (OURS, FAIR, *PEERS)})
        overtaken, grants = _overtaken(bench.path, lambda: contend(FAIR, seconds / 2))

    for number, ours, goal in ((3, OURS, 8.0), (4, FAIR, 1.3)):
        shown = {name: samples[name] for name in (ours, *PEERS)}
        outcome = Outcome(
            number, f"{PROCESSES} processes × {THREADS} threads on one lock{ours.removeprefix(OURS)}", "sections/s",
            ours, shown, [Goal(FASTEST, least=goal)], broken=overlaps[ours] > 0,
            remarks={name: _waits(waits[name], overlaps[name]) for name in shown},
        )  # fmt: skip
        peer = outcome.fastest_peer()
        if number == 3:
            for what, of_peer, of_ours in (
                ("wait p99, ms", _percentile(waits[peer], 99), _percentile(waits[ours], 99)),
                ("longest wait, ms", max(waits[peer]), max(waits[ours])),
            ):
                outcome.checks.append(Check(what, _shown(of_ours), f"< {_shown(of_peer)}", of_ours < of_peer))
            outcome.note = (
                "Cohorts (handing over inside a process) come later; without them this row does what the next one "
                "does. redis-py's default is fast as who gave the lock back takes it again, time after time, while "
                "the others sleep for 100 ms: see the longest wait."
            )
        else:
            outcome.checks.append(Check("arrivals overtaken", str(overtaken), "0", overtaken == 0))
            outcome.note = (
                f"Overtaken: of {grants:,} grants, those that came (by fence) after one whose request had reached the "
                "server later (by MONITOR, in a slice of its own)."
            )
        what = f"overlaps in {sections[ours]:,} sections"
        outcome.checks.append(Check(what, str(overlaps[ours]), "0", overlaps[ours] == 0))
        yield outcome


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


def _waits(waits: list[float], overlaps: int) -> str:
    p50, p99 = _percentile(waits, 50), _percentile(waits, 99)
    text = f"waits p50 {_shown(p50)}, p99 {_shown(p99)}, max {_shown(max(waits))} ms"
    return f"{text}; OVERLAPS {overlaps}" if overlaps else text


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def waiting(bench: Bench) -> Iterator[Outcome]:
    """Row 6."""
    yield from _waiting(bench, 6, LOCK, "", 5)


def waiting_elsewhere(bench: Bench) -> Iterator[Outcome]:
    """Row 11: the same for everything else that is waited for."""
    for what in CROWDS:
        if what != LOCK:
            yield from _waiting(bench, 11, what, f", {what}", 3)


def _waiting(bench: Bench, number: int, what: str, named: str, rounds: int) -> Iterator[Outcome]:
    with_all: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    handovers = 1500 if bench.quick else 5000
    names = {f"{MOST:,} waiters": MOST, f"{FEW} waiters": FEW}

    def of(name: str) -> Callable[[], float]:
        def slice_() -> float:
            with Worker(bench.path) as worker:
                worker.tell("crowd", what=what, waiters=names[name], handovers=handovers)
                answer = worker.answer()
            micros: dict[str, int] = answer["micros"]
            done = max(1, answer["handovers"])
            heartbeats = micros.pop("heartbeat", 0)
            handing = sum(micros.values()) / done
            with_all.setdefault(name, []).append(handing + heartbeats / done)
            rates.setdefault(name, []).append(done / answer["took"])
            return handing

        return slice_

    most, few = names
    samples = bench.interleave(f"row {number}{named}", rounds, {few: of(few), most: of(most)})
    yield Outcome(
        number, f"server time per handover{named}, asyncio", "µs", most, samples, [Goal(few, most=1.5)],
        less_is_better=True, remarks={name: f"{statistics.median(rates[name]):,.0f} handovers/s" for name in names},
        note="All script calls but the heartbeats: release, confirming acquire, and the acquire of the next in line.",
    )  # fmt: skip
    rounds = len(samples[most])
    with_heartbeats = {name: values[-rounds:] for name, values in with_all.items()}  # without the warm-up
    yield Outcome(
        number, "the same, with the heartbeats of all waiters", "µs", most, with_heartbeats, [Goal(few, most=1.5)],
        less_is_better=True,
        note="Heartbeats go out about once a second, whether or not there are handovers.",
    )  # fmt: skip


def beside(bench: Bench) -> Iterator[Outcome]:
    """Row 12."""
    pairs = 500 if bench.quick else 2000
    names = {f"{MOST:,} hold it": MOST, f"{FEW} hold it": FEW}
    for what in HELD:

        def of(name: str, what: str = what) -> Callable[[], float]:
            def slice_() -> float:
                with Worker(bench.path) as worker:
                    worker.tell("beside", what=what, holders=names[name], pairs=pairs)
                    return sum(worker.answer()["micros"].values()) / pairs

            return slice_

        most, few = names
        samples = bench.interleave(f"row 12, {what}", 5, {few: of(few), most: of(most)})
        yield Outcome(
            12, f"server time of acquire + release, {what}", "µs", most, samples, [Goal(few, most=1.5)],
            less_is_better=True, note="One task comes and goes, beside others that stay.",
        )  # fmt: skip


def arriving(bench: Bench) -> Iterator[Outcome]:
    """Row 13."""
    calls = 300 if bench.quick else 1000
    names = {f"{MOST:,} wait": MOST, f"{FEW} wait": FEW}
    for what in WAITED:

        def of(name: str, what: str = what) -> Callable[[], float]:
            def slice_() -> float:
                with Worker(bench.path) as worker:
                    worker.tell("waited", what=what, waiters=names[name], calls=calls)
                    return float(worker.answer()["micros"])

            return slice_

        most, few = names
        samples = bench.interleave(f"row 13, {what}", 5, {few: of(few), most: of(most)})
        yield Outcome(
            13, f"server time of a call, {what}", "µs", most, samples, [Goal(few, most=1.5)], less_is_better=True
        )


def holding(bench: Bench) -> Iterator[Outcome]:
    """Row 7: not in the default run, as it takes a minute and a half."""
    leases, seconds = (10_000, 25.0) if bench.quick else (100_000, 30.0)
    bench.tell(f"row 7: {leases:,} leases for {seconds:g} s", 0, 1)
    with Worker(bench.path) as worker:
        worker.tell("hold", leases=leases, seconds=seconds)
        answer = worker.answer()
    share, size, lost = answer["share"] * 100, answer["bytes"], answer["lost"]
    yield Outcome(
        7, f"{leases:,} leases held by one process, ttl 30 s", "% of one core", OURS, {OURS: [share]},
        checks=[
            Check("of one core, %", f"{share:.1f}", "≤ 15", share <= 15),
            Check("bytes each (RSS)", f"{size:,.0f}", "≤ 1,536", size <= 1536),
            Check("lost", f"{lost}", "0", lost == 0),
            Check("in jeopardy at the end", str(answer["jeopardy"])),
        ],
        less_is_better=True,
        broken=lost > 0,
        note=f"asyncio. Processor time of the process over {seconds:g} s, in which each lease is renewed "
        "every 10 s. Lost: not held at the end, or not ours to release.",
    )  # fmt: skip
