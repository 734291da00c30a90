"""Crowds at one thing: what they cost the server, beside a few (waiters, crowds, holders, arrivals), and leases."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from goals import FEW, OURS
from measure import Bench, Check, Outcome
from operations import CROWDS, HELD, LOCK, WAITED
from worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANY = "10,000 of them"


def _sizes(bench: Bench) -> dict[str, int]:
    return {FEW: 10, MANY: int(bench.size(10_000, 100))}


def waiters(bench: Bench) -> Iterator[Outcome]:
    """Waiters of a lock."""
    yield from _waiting(bench, "waiters", LOCK, ", fair=True", 5)


def crowds(bench: Bench) -> Iterator[Outcome]:
    """The same for everything else that is waited for."""
    for what in CROWDS:
        if what != LOCK:
            yield from _waiting(bench, "crowds", what, f", {what}", 3)


def _waiting(bench: Bench, row: str, what: str, named: str, rounds: int) -> Iterator[Outcome]:
    with_all: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    handovers, sizes = int(bench.size(5000, 50)), _sizes(bench)

    def of(name: str) -> Callable[[], float]:
        def slice_() -> float:
            with Worker(bench.path) as worker:
                worker.tell("crowd", what=what, waiters=sizes[name], handovers=handovers)
                answer = worker.answer()
            micros: dict[str, int] = answer["micros"]
            done = max(1, answer["handovers"])
            heartbeats = micros.pop("heartbeat", 0)
            handing = sum(micros.values()) / done
            with_all.setdefault(name, []).append(handing + heartbeats / done)
            rates.setdefault(name, []).append(done / answer["took"])
            return handing

        return slice_

    samples = bench.interleave(f"{row}{named}", rounds, {name: of(name) for name in sizes})
    yield Outcome(
        row, f"server time per handover with so many waiters{named}, asyncio", "µs", MANY, samples,
        less_is_better=True, remarks={name: f"{statistics.median(rates[name]):,.0f} handovers/s" for name in sizes},
        note="All script calls but the heartbeats: release, confirming acquire, and the acquire of the next in line.",
    )  # fmt: skip
    rounds = len(samples[MANY])
    yield Outcome(
        row, f"the same with the heartbeats of all waiters{named}", "µs", MANY,
        {name: values[-rounds:] for name, values in with_all.items()},  # without the warm-up
        less_is_better=True, note="Heartbeats go out about once a second, whether or not there are handovers.",
    )  # fmt: skip


def holders(bench: Bench) -> Iterator[Outcome]:
    """One task that comes and goes, beside others that stay."""
    pairs, sizes = int(bench.size(2000, 50)), _sizes(bench)
    for what in HELD:

        def of(name: str, what: str = what) -> Callable[[], float]:
            def slice_() -> float:
                with Worker(bench.path) as worker:
                    worker.tell("beside", what=what, holders=sizes[name], pairs=pairs)
                    return sum(worker.answer()["micros"].values()) / pairs

            return slice_

        samples = bench.interleave(f"holders, {what}", 5, {name: of(name) for name in sizes})
        yield Outcome(
            "holders", f"server time of acquire + release beside so many holders, {what}", "µs", MANY, samples,
            less_is_better=True, note="One task comes and goes, beside others that stay.",
        )  # fmt: skip


def arrivals(bench: Bench) -> Iterator[Outcome]:
    """One more arrival where many wait."""
    calls, sizes = int(bench.size(1000, 20)), _sizes(bench)
    for what in WAITED:

        def of(name: str, what: str = what) -> Callable[[], float]:
            def slice_() -> float:
                with Worker(bench.path) as worker:
                    worker.tell("waited", what=what, waiters=sizes[name], calls=calls)
                    return float(worker.answer()["micros"])

            return slice_

        samples = bench.interleave(f"arrivals, {what}", 5, {name: of(name) for name in sizes})
        title = f"server time of a call where so many wait, {what}"
        yield Outcome("arrivals", title, "µs", MANY, samples, less_is_better=True)


def leases(bench: Bench) -> Iterator[Outcome]:
    """Many leases in one process."""
    count, seconds = int(bench.size(100_000, 500)), bench.size(30.0, 1.0)
    bench.tell(f"leases: {count:,} of them for {seconds:g} s", 0, 1)
    with Worker(bench.path) as worker:
        worker.tell("hold", leases=count, seconds=seconds, settle=bench.size(5.0, 0.0))
        answer = worker.answer()
    share, size, lost = answer["share"] * 100, answer["bytes"], answer["lost"]
    yield Outcome(
        "leases", f"{count:,} leases held by one process, ttl 30 s", "% of one core", OURS, {OURS: [share]},
        checks=[
            Check("of one core, %", f"{share:.1f}", "≤ 15", share <= 15),
            Check("bytes each (RSS)", f"{size:,.0f}", "≤ 1,536", size <= 1536),
            Check("lost", f"{lost}", "0", lost == 0),
            Check("in jeopardy at the end", str(answer["jeopardy"])),
        ],
        less_is_better=True, broken=lost > 0,
        note=f"asyncio. Processor time of the process over {seconds:g} s, in which each lease is renewed "
        "every 10 s. Lost: not held at the end, or not ours to release.",
    )  # fmt: skip
