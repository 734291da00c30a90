"""Each synchronizer alone, against the lock: semaphore, primitives (threads), primitive-tasks (asyncio)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from floor import Bare, Tapped, floor_pair
from goals import FLOOR, OURS
from interlock import Interlock
from interlock.aio import Interlock as AsyncInterlock
from measure import Bench, Check, Outcome
from operations import LOCK, OPERATIONS, Again
from rows.uncontended import TASKS, floor_loop, hundreds, sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PERMITS = 10


def semaphore(bench: Bench) -> Iterator[Outcome]:
    """One thread. redis-py has no semaphore, and its Lock does less, so the floor and our own lock are beside it."""
    waits: dict[str, list[float]] = {FLOOR: [], OURS: [], LOCK: []}
    bare = Bare(bench.path)
    pair = floor_pair(bench.path, lambda locks: locks.semaphore("floor permits", PERMITS))
    with Interlock(f"unix://{bench.path}") as locks:
        slices = {
            FLOOR: bench.rate(floor_loop(bare, pair, waits[FLOOR])),
            OURS: bench.rate(sections(locks.semaphore("alone permits", PERMITS), waits[OURS])),
            LOCK: bench.rate(sections(locks.lock("alone lock"), waits[LOCK])),
        }
        samples = bench.interleave("semaphore", 15, slices, waits)
    bare.close()
    yield Outcome(
        "semaphore", f"threads, a semaphore of {PERMITS}, nobody else: acquire + release", "pairs/s", OURS, samples,
        latencies=waits, latency="a pair", latency_unit="µs", not_peers=(FLOOR, LOCK),
    )  # fmt: skip


def primitives(bench: Bench) -> Iterator[Outcome]:
    """As uncontended, for every synchronizer."""
    with Interlock(f"unix://{bench.path}") as locks:
        loops = {what: operation.loop(locks, f"alone {what}") for what, operation in OPERATIONS.items()}
        samples = bench.interleave("primitives", 9, {what: bench.rate(loop) for what, loop in loops.items()})
        checks = _round_trips(bench.path, loops)
    yield _compared("primitives", "threads, each synchronizer alone", samples, checks)


def primitive_tasks(bench: Bench) -> Iterator[Outcome]:
    """As tasks, for every synchronizer."""
    with asyncio.Runner() as runner:

        async def setup() -> AsyncInterlock:
            return AsyncInterlock(f"unix://{bench.path}")

        locks = runner.run(setup())

        def all_tasks(what: str) -> Callable[[int], None]:
            tasks = [OPERATIONS[what].task(locks, f"task {what} {i}") for i in range(TASKS)]

            async def all_of_them(count: int) -> None:
                await asyncio.gather(*(task(count) for task in tasks))

            return lambda count: runner.run(all_of_them(max(1, count // TASKS)))

        loops = {what: all_tasks(what) for what in OPERATIONS}
        samples = bench.interleave("primitive-tasks", 9, {what: hundreds(bench, loop) for what, loop in loops.items()})
        checks = _round_trips(bench.path, loops)
        runner.run(locks.close())
    yield _compared("primitive-tasks", f"asyncio, {TASKS} tasks, each on one of its own", samples, checks)


def _round_trips(path: str, loops: dict[str, Callable[[int], None]]) -> list[Check]:
    """A holder that enters again asks no server: entered 1,000 times, one acquire for each thread or task."""
    checks = []
    for what, loop in loops.items():
        if isinstance(OPERATIONS[what], Again):
            tapped = Tapped(path, lambda loop=loop: loop(1000))  # type: ignore[misc]
            who, sent = set(tapped.tokens("acquire")), len(tapped.messages("acquire"))
            checks.append(Check("acquires when entered again", f"{sent}", f"{len(who)}", sent == len(who)))
    return checks


def _compared(row: str, what: str, samples: dict[str, list[float]], checks: list[Check]) -> Outcome:
    return Outcome(
        row, what, "per second", LOCK, samples, checks=checks, not_peers=(),
        note="What can be held is acquired and released, over and over. The ratio is the cost, in pairs of the lock.",
    )  # fmt: skip
