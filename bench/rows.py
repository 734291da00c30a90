"""The rows that one process can measure: 1, 2 and 8 of DESIGN section 5, and 9 and 10, one for each synchronizer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from contenders import (
    BLPOP,
    FIFO,
    FLOOR,
    OURS,
    REDIS_PY,
    AsyncClients,
    Bare,
    Clients,
    Tapped,
    floor_pair,
    floor_pairs,
)  # fmt: skip
from interlock import Interlock
from interlock.aio import Interlock as AsyncInterlock
from measure import Bench, Check, Goal, Outcome, rate
from operations import LOCK, OPERATIONS, Again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TASKS = 100
SLICE = 0.2  # seconds


def alone(bench: Bench) -> Iterator[Outcome]:
    """Row 1. Proves that each release found the lock still ours: `with` raises otherwise."""
    clients, bare = Clients(bench.path), Bare(bench.path)
    acquire, release = floor_pair(bench.path)

    def floor(count: int) -> None:
        ask = bare.ask
        for _ in range(count):
            ask(acquire)
            ask(release)

    def sections(contender: str) -> Callable[[int], None]:
        lock = clients.sync_lock(contender, f"alone {contender}")

        def loop(count: int) -> None:
            for _ in range(count):
                with lock:
                    pass

        return loop

    assert bare.ask(acquire)[0] == 1  # GRANTED
    assert bare.ask(release)[0] == 1  # it was ours
    slices = {FLOOR: rate(floor, SLICE)}
    slices |= {name: rate(sections(name), SLICE) for name in (OURS, REDIS_PY, BLPOP)}
    samples = bench.interleave("row 1", 15, slices)
    clients.close()
    bare.close()
    yield Outcome(
        1, "threads, one lock, nobody else: acquire + release", "pairs/s", OURS, samples,
        [Goal(FLOOR, least=0.85), Goal(REDIS_PY, least=2)],
    )  # fmt: skip


def tasks(bench: Bench) -> Iterator[Outcome]:
    """Row 2."""
    pairs = floor_pairs(bench.path, TASKS)
    acquires, releases = (b"".join(messages) for messages in zip(*pairs, strict=True))
    bare = Bare(bench.path)

    def floor(count: int) -> None:
        for _ in range(max(1, count // TASKS)):
            for messages in (acquires, releases):
                bare.socket.sendall(messages)
                for _ in range(TASKS):
                    bare.receive()

    with asyncio.Runner() as runner:

        async def setup() -> AsyncClients:
            return AsyncClients(bench.path)

        clients = runner.run(setup())

        def sections(contender: str) -> Callable[[int], None]:
            makers = [clients.async_lock(contender, f"task {contender} {i}") for i in range(TASKS)]

            async def task(make: Callable[[], Any], count: int) -> None:
                for _ in range(count):
                    async with make():
                        pass

            async def all_tasks(count: int) -> None:
                await asyncio.gather(*(task(make, count) for make in makers))

            return lambda count: runner.run(all_tasks(max(1, count // TASKS)))

        slices = {FLOOR: _hundreds(floor)}
        slices |= {name: _hundreds(sections(name)) for name in (OURS, REDIS_PY, FIFO)}
        samples = bench.interleave("row 2", 15, slices)
        runner.run(clients.close())
    bare.close()
    yield Outcome(
        2, f"asyncio, {TASKS} tasks on {TASKS} locks: acquire + release", "pairs/s", OURS, samples,
        [Goal(REDIS_PY, least=8)],
        note=f"redis-py's Lock is that of redis.asyncio. The floor: {TASKS} acquires in one write, then {TASKS} "
        "releases; client and server take turns in it, so who sends in smaller portions can be faster",
    )  # fmt: skip


def synchronizers(bench: Bench) -> Iterator[Outcome]:
    """Row 9: as row 1, for everything that there is."""
    with Interlock(f"unix://{bench.path}") as locks:
        loops = {what: operation.loop(locks, f"alone {what}") for what, operation in OPERATIONS.items()}
        samples = bench.interleave("row 9", 9, {what: rate(loop, SLICE) for what, loop in loops.items()})
        checks = _round_trips(bench.path, loops)
    yield _compared(9, "threads, each primitive alone", "per second", samples, checks)


def synchronizer_tasks(bench: Bench) -> Iterator[Outcome]:
    """Row 10: as row 2, for everything that there is."""
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
        samples = bench.interleave("row 10", 9, {what: _hundreds(loop) for what, loop in loops.items()})
        checks = _round_trips(bench.path, loops)
        runner.run(locks.close())
    yield _compared(10, f"asyncio, {TASKS} tasks, each on one of its own", "per second", samples, checks)


def _round_trips(path: str, loops: dict[str, Callable[[int], None]]) -> list[Check]:
    """Who is inside asks nobody: entered 1,000 times, one acquire for each thread or task that went in first."""
    checks = []
    for what, loop in loops.items():
        if isinstance(OPERATIONS[what], Again):
            tapped = Tapped(path, lambda loop=loop: loop(1000))  # type: ignore[misc]
            who, sent = set(tapped.tokens("acquire")), len(tapped.messages("acquire"))
            checks.append(Check("acquires when entered again", f"{sent}", f"{len(who)}", sent == len(who)))
    return checks


def _compared(number: int, what: str, unit: str, samples: dict[str, list[float]], checks: list[Check]) -> Outcome:
    return Outcome(
        number, what, unit, LOCK, samples, checks=checks, floor="",
        note="What can be held is acquired and released, over and over. The ratio is the cost, in pairs of the lock.",
    )  # fmt: skip


def _hundreds(loop: Callable[[int], object]) -> Callable[[], float]:
    inner = rate(lambda count: loop(count * TASKS), SLICE)
    return lambda: inner() * TASKS


def imports(bench: Bench) -> Iterator[Outcome]:
    """Row 8. Each in a fresh interpreter, whose own start is not counted; compiled files are found by all."""
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def of(module: str) -> Callable[[], float]:
            code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"

            def slice_() -> float:
                command = [sys.executable, "-c", code]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                return float(done.stdout) * 1000

            return slice_

        modules = ("interlock", "interlock.aio", "redis")
        samples = bench.interleave("row 8", 15, {f"import {module}": of(module) for module in modules})
    yield Outcome(
        8, "import interlock", "ms", "import interlock", samples, [Goal("import redis", most=1.2)],
        less_is_better=True,
    )  # fmt: skip
