"""Pairs of acquire and release that nobody else disturbs: uncontended, tasks, slow-link, client-cpu."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from checkouts import Client, fresh_token, record
from contenders import AsyncClients, Clients, present
from floor import Bare, floor_pair, floor_pairs
from goals import (
    AIOREDLOCK,
    BARE,
    BEFORE,
    BLPOP,
    FIFO,
    FLOOR,
    FLOOR_BEFORE,
    OURS,
    POTTERY,
    REDIS_ASYNCIO,
    REDIS_PY,
    UNCONFIRMED,
)
from link import SlowLink
from measure import Bench, Outcome, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

TASKS = 100
DELAY = 0.001  # seconds, each way, of the slow link

NOT_PEERS = (FLOOR, FLOOR_BEFORE, BEFORE, BARE, OURS, UNCONFIRMED)

Latencies = dict[str, list[float]]


def _sections(clients: Clients, contender: str, waits: list[float]) -> Callable[[int], None]:
    return sections(clients.lock(contender, f"alone {contender}"), waits)


def sections(lock: AbstractContextManager[Any], waits: list[float]) -> Callable[[int], None]:
    """So many times in and out; the µs of each."""

    def loop(count: int) -> None:
        for _ in range(count):
            began = now()
            with lock:
                pass
            waits.append((now() - began) * 1e6)

    return loop


def _ours_and(outcome: Callable[[str, dict[str, list[float]]], Outcome], samples: Latencies) -> Iterator[Outcome]:
    """The table of interlock with all contenders, and that of confirm=False with the most important ones."""
    yield outcome(OURS, {name: values for name, values in samples.items() if name != UNCONFIRMED})
    if UNCONFIRMED in samples:
        beside = (UNCONFIRMED, OURS, BARE, FLOOR, REDIS_PY, REDIS_ASYNCIO)
        yield outcome(UNCONFIRMED, {name: values for name, values in samples.items() if name in beside})


def uncontended(bench: Bench) -> Iterator[Outcome]:
    """One thread. A release that found the lock lost raises, so each release found the lock still ours."""
    clients, bare = Clients(bench.path), Bare(bench.path)
    names = present(OURS, UNCONFIRMED, REDIS_PY, BLPOP, POTTERY)
    waits: Latencies = {name: [] for name in names}
    with ExitStack() as stack:
        slices = {FLOOR: bench.rate(floor_loop(bare, floor_pair(bench.path), waits.setdefault(FLOOR, [])))}
        if bench.before is not None:
            messages, token = record(bench.path, bench.before.src), fresh_token()
            pair = (messages.acquire.packed(token), messages.release.packed(token))
            slices[FLOOR_BEFORE] = bench.rate(floor_loop(bare, pair, waits.setdefault(FLOOR_BEFORE, [])))
            before = stack.enter_context(Client(bench.path, bench.before.src, 1))
            slices[BEFORE] = bench.rate(before.timed(waits.setdefault(BEFORE, [])))
        slices |= {name: bench.rate(_sections(clients, name, waits[name])) for name in names}
        samples = bench.interleave("uncontended", 15, slices, waits)
    clients.close()
    bare.close()
    yield from _ours_and(
        lambda ours, of: Outcome(
            "uncontended", f"threads, one lock, nobody else: acquire + release{ours.removeprefix(OURS)}", "pairs/s",
            ours, of, latencies=waits, latency="a pair", latency_unit="µs", remarks=_remarks(bench),
            not_peers=NOT_PEERS,
        ),
        samples,
    )  # fmt: skip


def floor_loop(bare: Bare, pair: tuple[bytes, bytes], waits: list[float]) -> Callable[[int], None]:
    """So many of these pairs over a bare connection."""
    acquire, release = pair
    assert bare.ask(acquire)[0] == 1  # GRANTED
    assert bare.ask(release)[0] == 1  # it was ours

    def loop(count: int) -> None:
        ask = bare.ask
        for _ in range(count):
            began = now()
            ask(acquire)
            ask(release)
            waits.append((now() - began) * 1e6)

    return loop


def _remarks(bench: Bench) -> dict[str, str]:
    return {} if bench.before is None else {BEFORE: bench.before.name}


def tasks(bench: Bench) -> Iterator[Outcome]:
    """Many tasks, each on a lock of its own."""
    pairs = floor_pairs(bench.path, TASKS)
    acquires, releases = (b"".join(messages) for messages in zip(*pairs, strict=True))
    bare = Bare(bench.path)
    names = present(OURS, UNCONFIRMED, REDIS_ASYNCIO, FIFO, AIOREDLOCK)
    waits: Latencies = {name: [] for name in names}

    def floor(count: int) -> None:
        for _ in range(max(1, count // TASKS)):
            for messages in (acquires, releases):
                bare.socket.sendall(messages)
                for _ in range(TASKS):
                    bare.receive()

    with asyncio.Runner() as runner, ExitStack() as stack:
        clients = runner.run(_async_clients(bench.path))
        slices = {FLOOR: hundreds(bench, floor)}
        if bench.before is not None:
            before = stack.enter_context(Client(bench.path, bench.before.src, TASKS))
            slices[BEFORE] = hundreds(bench, before.timed(waits.setdefault(BEFORE, [])))
        slices |= {name: hundreds(bench, _tasks(runner, clients, name, waits[name])) for name in names}
        samples = bench.interleave("tasks", 15, slices, waits)
        runner.run(clients.close())
    bare.close()
    yield from _ours_and(
        lambda ours, of: Outcome(
            "tasks", f"asyncio, {TASKS} tasks on {TASKS} locks: acquire + release{ours.removeprefix(OURS)}", "pairs/s",
            ours, of, latencies=waits, latency="a pair", latency_unit="µs", remarks=_remarks(bench),
            not_peers=NOT_PEERS,
            note=f"The floor: {TASKS} acquires in one write, then {TASKS} releases. Client and server take turns in "
            "it, so a client that sends in smaller portions can be faster.",
        ),
        samples,
    )  # fmt: skip


async def _async_clients(path: str) -> AsyncClients:
    return AsyncClients(path)


def _tasks(runner: asyncio.Runner, clients: AsyncClients, contender: str, waits: list[float]) -> Callable[[int], None]:
    makers = [clients.lock(contender, f"task {contender} {i}") for i in range(TASKS)]

    async def task(make: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            began = now()
            async with make():
                pass
            waits.append((now() - began) * 1e6)

    async def all_tasks(count: int) -> None:
        await asyncio.gather(*(task(make, count) for make in makers))

    return lambda count: runner.run(all_tasks(max(1, count // TASKS)))


def hundreds(bench: Bench, loop: Callable[[int], object]) -> Callable[[], float]:
    """A slice of a loop that does a hundred things at once."""
    inner = bench.rate(lambda count: loop(count * TASKS))
    return lambda: inner() * TASKS


def slow_link(bench: Bench) -> Iterator[Outcome]:
    """A pair over a link that holds every byte for a while: what counts is the number of round trips."""
    names = present(OURS, UNCONFIRMED, REDIS_PY, BLPOP, POTTERY)
    waits: Latencies = {name: [] for name in (BARE, *names)}
    with SlowLink(bench.path, DELAY) as link:
        clients, bare = Clients(link.path), Bare(link.path)

        def ping(count: int) -> None:
            for _ in range(count):
                began = now()
                bare.call("PING")
                waits[BARE].append((now() - began) * 1e6)

        def median(name: str, loop: Callable[[int], None]) -> Callable[[], float]:
            slice_ = bench.rate(loop)

            def milliseconds() -> float:
                already = len(waits[name])
                slice_()
                return _middle(waits[name][already:]) / 1000

            return milliseconds

        slices = {BARE: median(BARE, ping)}
        slices |= {name: median(name, _sections(clients, name, waits[name])) for name in names}
        samples = bench.interleave("slow-link", 9, slices, waits)
        clients.close()
        bare.close()
    yield from _ours_and(
        lambda ours, of: Outcome(
            "slow-link", f"threads, slow link: acquire + release{ours.removeprefix(OURS)}", "ms a pair", ours, of,
            latencies=waits, latency="a pair", latency_unit="µs",
            less_is_better=True, not_peers=NOT_PEERS,
            note=f"A process on this machine forwards the connection and holds every byte for {DELAY * 1000:g} ms, "
            "both ways. A slice counts by its median pair, since a stall of the forwarder is nobody's round trip.",
        ),
        samples,
    )  # fmt: skip


def client_cpu(bench: Bench) -> Iterator[Outcome]:
    """The processor time of the calling thread; that of the whole process stands beside it."""
    names = present(OURS, UNCONFIRMED, REDIS_PY, BLPOP)
    clients = Clients(bench.path)
    loops = {name: _sections(clients, name, []) for name in names}
    samples, remarks = _processor_times(bench, "client-cpu, threads", loops, 1)
    clients.close()
    yield from _ours_and(
        lambda ours, of: Outcome(
            "client-cpu", f"client's processor time, threads{ours.removeprefix(OURS)}", "µs a pair", ours, of,
            remarks={name: remarks[name] for name in of}, less_is_better=True, not_peers=NOT_PEERS,
            note="The calling thread's time (time.thread_time).",
        ),
        samples,
    )  # fmt: skip
    names = present(OURS, UNCONFIRMED, REDIS_ASYNCIO, FIFO, AIOREDLOCK)
    with asyncio.Runner() as runner:
        async_clients = runner.run(_async_clients(bench.path))
        loops = {name: _tasks(runner, async_clients, name, []) for name in names}
        samples, remarks = _processor_times(bench, "client-cpu, asyncio", loops, TASKS)
        runner.run(async_clients.close())
    yield Outcome(
        "client-cpu", f"client's processor time, asyncio, {TASKS} tasks", "µs a pair", OURS, samples, remarks=remarks,
        less_is_better=True, not_peers=NOT_PEERS, note="The loop's thread (time.thread_time).",
    )  # fmt: skip


def _processor_times(
    bench: Bench, what: str, loops: dict[str, Callable[[int], None]], tasks: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """µs of the calling thread for a pair, by contender; and those of all threads, as remarks."""
    pairs = int(bench.size(2000, 100))
    whole: dict[str, list[float]] = {name: [] for name in loops}

    def of(name: str, loop: Callable[[int], None]) -> Callable[[], float]:
        def slice_() -> float:
            thread, process = time.thread_time(), time.process_time()
            loop(pairs)
            spent = time.thread_time() - thread
            whole[name].append((time.process_time() - process) / pairs * 1e6)
            return spent / pairs * 1e6

        return slice_

    with ExitStack() as stack:
        slices = {name: of(name, loop) for name, loop in loops.items()}
        if bench.before is not None:
            client = stack.enter_context(Client(bench.path, bench.before.src, tasks))

            def before() -> float:
                _, thread, process, _ = client.pairs(pairs)
                whole[BEFORE].append(process / pairs * 1e6)
                return thread / pairs * 1e6

            slices[BEFORE], whole[BEFORE] = before, []
        samples = bench.interleave(what, 9, slices, whole)
    remarks = {name: f"{_middle(values):.0f} µs in all threads of the process" for name, values in whole.items()}
    return samples, remarks | {name: f"{text}; {remarks[name]}" for name, text in _remarks(bench).items()}


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
