"""The rows beyond one server: cluster, shards, quorum, failover (of Sentinel).

Servers and clients share the cores of this machine. More servers for the same work cost here what they would not cost
on machines of their own: read the ratios as upper bounds, and the projection with its assumption.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import redis

from floor import Majority, Tapped
from goals import ONE_SERVER as ONE
from goals import POTTERY, THREE
from harness.topology import Cluster, Independents, Sentinels
from interlock import Interlock
from interlock._servers.slots import slot_of
from interlock.aio import Interlock as AsyncInterlock
from measure import Bench, Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from floor import Pair

TASKS = 100
CLUSTER, FIVE = "cluster of 3 shards", "quorum of 5"
FLOORS = {"floor of one": 1, "floor of 3": 3, "floor of 5": 5}


def cluster(bench: Bench) -> Iterator[Outcome]:
    """A cluster against one server."""
    with Cluster(replicas=0) as shards:
        for tasks in (1, TASKS):
            loops = {ONE: lambda: AsyncInterlock(f"unix://{bench.path}"), CLUSTER: lambda: AsyncInterlock(shards.url)}
            samples = _pairs(bench, f"cluster, {tasks} tasks", loops, tasks)
            yield Outcome(
                "cluster", f"cluster, asyncio, {_tasks(tasks)}: acquire + release", "pairs/s", CLUSTER, samples,
                note="≥ 0.83 is a cost of ≤ 1.2. One lock of its own for each task.",
            )  # fmt: skip
        with Interlock(f"unix://{bench.path}") as one, Interlock(shards.url) as several:
            slices = {name: bench.rate(_loop(locks)) for name, locks in ((ONE, one), (CLUSTER, several))}
            samples = bench.interleave("cluster, threads", 15, slices)
        yield Outcome(
            "cluster",
            "cluster, threads, one lock, nobody else",
            "pairs/s",
            CLUSTER,
            samples,
        )


def scaling(bench: Bench) -> Iterator[Outcome]:
    """The same tasks on locks of one, two and three shards; and what each shard spends on a pair."""
    with Cluster(replicas=0) as shards, asyncio.Runner() as runner:
        by_shard: list[list[str]] = [[], [], []]
        number = 0
        while any(len(names) < TASKS for names in by_shard):
            name, number = f"scaled {number}", number + 1
            by_shard[shards.nodes.index(shards.primary_of(slot_of(f"lock:{name}")))].append(name)

        async def setup() -> AsyncInterlock:
            return AsyncInterlock(shards.url)

        locks = runner.run(setup())

        def on(count: int) -> Callable[[], float]:
            names = [by_shard[i % count][i // count] for i in range(TASKS)]
            return _hundreds(bench, runner, locks, names)

        samples = bench.interleave("shards", 9, {f"{count} of 3 shards": on(count) for count in (1, 2, 3)})
        before = _busy(shards)
        slice_ = on(1)
        pairs = 0.0
        for _ in range(5):
            began = time.perf_counter()
            pairs += slice_() * (time.perf_counter() - began)
        spent = (_busy(shards) - before) / max(1.0, pairs)
        runner.run(locks.close())
    one = 1_000_000 / spent
    yield Outcome(
        "shards", f"cluster, {TASKS} tasks on locks of so many shards", "pairs/s", "3 of 3 shards", samples,
        checks=[
            Check("a shard's time for a pair", f"{spent:.1f} µs"),
            *(Check(f"projection: {count} of 3 shards", f"{one * count:,.0f}") for count in (1, 2, 3)),
        ],
        note="All shards and the client share the cores here, so more shards can't be faster. The projection assumes "
        "a core for each shard, enough clients, and the CPU that servers really spent for a pair, with system calls.",
    )  # fmt: skip


def quorums(bench: Bench) -> Iterator[Outcome]:
    """Quorums against one server."""
    with Independents(number=5) as nodes, ExitStack() as stack:
        urls = nodes.urls
        for tasks in (1, TASKS):
            loops: dict[str, Callable[[], Any]] = {
                ONE: lambda: AsyncInterlock(urls[0]),
                THREE: lambda: AsyncInterlock.quorum(urls[:3]),
                FIVE: lambda: AsyncInterlock.quorum(urls),
            }
            floors = {floor: _floor([node.socket for node in nodes.nodes[:n]], tasks) for floor, n in FLOORS.items()}
            slices = {floor: bench.rate(loop) for floor, loop in floors.items()}
            samples = _pairs(bench, f"quorum, {tasks} tasks", loops, tasks, slices)
            for ours, floor in zip((THREE, FIVE), list(FLOORS)[1:], strict=True):
                yield Outcome(
                    "quorum", f"{ours}, asyncio, {_tasks(tasks)}: acquire + release", "pairs/s", ours,
                    {name: samples[name] for name in (ours, floor, ONE, next(iter(FLOORS)))},
                    not_peers=(floor,),
                    note="≥ 0.62 is a cost of ≤ 1.6. A floor: the same messages, packed before, over bare sockets, to "
                    "all servers, until a majority has answered.",
                )  # fmt: skip
        for ours, number in ((THREE, 3), (FIVE, 5)):
            locks = stack.enter_context(Interlock.quorum(urls[:number]))
            slices = {ours: bench.rate(_loop(locks))}
            if find_spec("pottery"):
                slices[POTTERY] = bench.rate(_pottery(urls[:number]))
            samples = bench.interleave(f"quorum, {ours}, threads", 9, slices)
            yield Outcome("quorum", f"{ours}, threads, one lock, nobody else", "pairs/s", ours, samples)


def failover(bench: Bench) -> Iterator[Outcome]:
    """From the kill of the primary to the next grant, against the time that Sentinel itself takes."""
    samples: dict[str, list[float]] = {"the next grant": [], "Sentinel itself": []}
    logging.getLogger("interlock").setLevel(logging.ERROR)
    for turn in range(bench.rounds(5)):
        bench.tell("failover", turn, bench.rounds(5))
        with Sentinels() as group, Interlock(group.url, max_ttl=30) as locks:
            locks.lock("a").acquire().release()
            old = group.primary
            began = time.perf_counter()
            old.kill()
            group.wait_for_primary(old)
            samples["Sentinel itself"].append(time.perf_counter() - began)
            with Interlock(group.url, max_ttl=30, quarantine=False) as fresh:  # or it is the quarantine that is timed
                fresh.lock("b").acquire(timeout=60).release()
            samples["the next grant"].append(time.perf_counter() - began)
    yield Outcome(
        "failover", "Sentinel failover: from the kill of the primary", "s", "the next grant", samples,
        less_is_better=True,
        note="down-after-milliseconds is 500 here. A lock that was held before waits for the quarantine, max_ttl, too.",
    )  # fmt: skip


def _tasks(number: int) -> str:
    return f"{number} tasks on {number} locks" if number > 1 else "one task"


def _record_pairs(paths: list[Path], tasks: int) -> list[list[Pair]]:
    """The messages of a pair, or of many at once, that each of the servers gets."""
    tapped: list[list[Pair]] = []

    async def pairs() -> None:
        locks = AsyncInterlock.quorum([f"unix://{path}" for path in paths])
        for _ in range(2):  # the first may have to teach the servers the script
            await asyncio.gather(*(_pair(locks.lock(f"floor {i}")) for i in range(tasks)))
        await locks.close()

    def tap(left: list[Path]) -> None:
        if not left:
            asyncio.run(pairs())
            return
        tapped.append(Tapped(str(left[0]), lambda: tap(left[1:])).pairs())

    for _ in range(10):
        tapped.clear()
        tap(paths[::-1])
        if all(len(each) == tasks for each in tapped):
            return tapped
    raise RuntimeError("a server of the quorum was too busy for a release, ten times")


def _floor(paths: list[Path], tasks: int) -> Callable[[int], None]:
    """The messages of a pair, or of many at once, to servers of which a majority must answer."""
    tapped = _record_pairs(paths, tasks)
    servers = Majority([str(path) for path in paths])
    halves = [[b"".join(pair[half] for pair in of) for of in tapped] for half in (0, 1)]

    def loop(count: int) -> None:
        for turn in range(max(1, count // tasks) * 2):
            servers.ask(halves[turn % 2], tasks)

    return loop


async def _pair(lock: Any) -> None:
    async with lock:
        pass


def _pairs(
    bench: Bench,
    what: str,
    makers: dict[str, Callable[[], Any]],
    tasks: int,
    others: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, list[float]]:
    with asyncio.Runner() as runner:

        async def setup() -> dict[str, Any]:
            return {name: make() for name, make in makers.items()}

        made = runner.run(setup())
        slices = {
            name: _hundreds(bench, runner, locks, [f"pair {i}" for i in range(tasks)]) for name, locks in made.items()
        }
        samples = bench.interleave(what, 15, {**slices, **(others or {})})

        async def close() -> None:
            for locks in made.values():
                await locks.close()

        runner.run(close())
    return samples


def _hundreds(bench: Bench, runner: asyncio.Runner, locks: Any, names: list[str]) -> Callable[[], float]:
    made = [locks.lock(name) for name in names]

    async def task(lock: Any, count: int) -> None:
        for _ in range(count):
            async with lock:
                pass

    async def all_tasks(count: int) -> None:
        await asyncio.gather(*(task(lock, count) for lock in made))

    inner = bench.rate(lambda count: runner.run(all_tasks(max(1, count))))
    return lambda: inner() * len(names)


def _loop(locks: Any) -> Callable[[int], None]:
    lock = locks.lock("alone")

    def loop(count: int) -> None:
        for _ in range(count):
            with lock:
                pass

    return loop


def _pottery(urls: list[str]) -> Callable[[int], None]:
    from pottery import Redlock

    lock = Redlock(key="pottery", masters={redis.Redis.from_url(url) for url in urls}, auto_release_time=10)

    def loop(count: int) -> None:
        for _ in range(count):
            with lock:
                pass

    return loop


def _busy(shards: Cluster) -> float:
    """Microseconds of CPU that the servers have spent."""
    spent = 0.0
    for node in shards.nodes:
        with redis.Redis.from_url(node.url) as client:
            cpu = client.info("cpu")
            spent += cpu["used_cpu_sys"] + cpu["used_cpu_user"]
    return spent * 1e6
