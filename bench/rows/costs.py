"""What people see of locks, and what a pair pays for it: registry, observers."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING

from contenders import TTL
from floor import Bare
from goals import OURS, UNREGISTERED
from interlock import Interlock
from interlock._people.observer import Observer, observe, stop_observing
from interlock._people.registry import MAX_ITEMS
from interlock._protocol.run_to_end import run
from interlock.aio import Interlock as AsyncInterlock
from interlock.primitives.registry import REPORT_INTERVAL
from measure import Bench, Check, Outcome, now
from rows.uncontended import TASKS, sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from interlock._people.registry import Registry

KEPT = 20  # leases that an Interlock holds while it makes pairs: its entry says something, as a real one does
SLICE = 2.2  # seconds: the first report comes within two seconds of a lease
REPORTS = 50  # in a slice
MOST_COST = 2.0  # % of a core
FULL_ENTRY = f"{MAX_ITEMS} leases, {MAX_ITEMS} waiters"

NOBODY, ONCE_OBSERVED, NOTHING = "nobody observes", "after uninstrument()", "an observer that does nothing"
METRICS, SOME_TRACES, ALL_TRACES = "metrics", "metrics, 1 % of the traces", "metrics, all traces"
COUNTS = 10_000  # additions to a counter of the SDK, one after another


# registry


@dataclass(frozen=True)
class Pairs:
    """What one Interlock did in a slice."""

    rate: float  # pairs a second
    micros: float  # of processor time in all threads, for a pair
    is_listed: bool  # whether the registry has what it holds


def registry(bench: Bench) -> Iterator[Outcome]:
    """Pairs of an Interlock that reports what it holds, and of one that does not; and what a report costs."""
    yield _with_and_without(bench, "threads, one lock", _pairs)
    yield _with_and_without(bench, f"asyncio, {TASKS} tasks on {TASKS} locks", _pairs_of_tasks)
    yield from _reports(bench)


def _with_and_without(bench: Bench, what: str, pairs: Callable[[str, float, bool], Pairs]) -> Outcome:
    found: dict[bool, list[Pairs]] = {True: [], False: []}

    def of(*, registry: bool) -> Callable[[], float]:
        def slice_() -> float:
            found[registry].append(pairs(f"unix://{bench.path}", bench.size(SLICE, 0.02), registry))
            return found[registry][-1].rate

        return slice_

    samples = bench.interleave("registry", 5, {OURS: of(registry=True), UNREGISTERED: of(registry=False)})
    reports = [each.is_listed for each in found[True]]
    every = None if bench.quick else all(reports)
    cpu = statistics.median(a.micros / b.micros for a, b in zip(found[True], found[False], strict=True))
    return Outcome(
        "registry", f"{what}, {KEPT} leases held: acquire + release", "pairs/s", OURS, samples,
        checks=[
            Check("slices with a report", f"{sum(reports)}/{len(reports)}", "all", every),
            Check("processor time of a pair, ×", f"{cpu:.3f}"),
        ],
        note=f"Each slice opens an Interlock and lasts {SLICE:g} s, so that its reports fall into its own slices. The "
        "processor time is that of all threads of the client, also beside registry=False.",
    )  # fmt: skip


def _pairs(url: str, seconds: float, registry: bool) -> Pairs:
    """Of one thread."""
    with Interlock(url, registry=registry) as locks:
        kept = [locks.lock(f"kept {i}", ttl=TTL).acquire() for i in range(KEPT)]
        lock, count = locks.lock("alone", ttl=TTL), 0
        began, before = now(), time.process_time()
        while (took := now() - began) < seconds:
            with lock:
                count += 1
        spent = time.process_time() - before
        return Pairs(count / took, spent / count * 1e6, len(locks.ls("kept *")) == len(kept))


def _pairs_of_tasks(url: str, seconds: float, registry: bool) -> Pairs:
    """Of many tasks."""

    async def pairs() -> Pairs:
        async with AsyncInterlock(url, registry=registry) as locks:
            kept = [await locks.lock(f"kept {i}", ttl=TTL).acquire() for i in range(KEPT)]
            began, before = now(), time.process_time()

            async def task(name: str) -> int:
                lock, count = locks.lock(name, ttl=TTL), 0
                while now() - began < seconds:
                    async with lock:
                        count += 1
                return count

            count = sum(await asyncio.gather(*(task(f"task {i}") for i in range(TASKS))))
            took, spent = now() - began, time.process_time() - before
            return Pairs(count / took, spent / count * 1e6, len(await locks.ls("kept *")) == len(kept))

    return asyncio.run(pairs())


def _reports(bench: Bench) -> Iterator[Outcome]:
    """Processor time of one report: of the calling thread, and of the server."""
    many = int(bench.size(10_000, 100))
    sizes = {FULL_ENTRY: (MAX_ITEMS, MAX_ITEMS), "1 lease": (1, 0), f"{many:,} leases": (many, 0)}
    server: dict[str, list[float]] = {name: [] for name in sizes}
    bare = Bare(bench.path)

    def of(name: str, registry: Registry) -> Callable[[], float]:
        def slice_() -> float:
            before, began = _server_seconds(bare), time.thread_time()
            for _ in range(REPORTS):
                registry.next_look, registry.is_repeated = 0.0, False  # as if something had changed
                run(registry.report())
            spent = time.thread_time() - began
            server[name].append((_server_seconds(bare) - before) / REPORTS * 1e6)
            return spent / REPORTS * 1e6

        return slice_

    with ExitStack() as stack:
        slices = {
            name: of(name, stack.enter_context(_registry_of(f"unix://{bench.path}", *size)))
            for name, size in sizes.items()
        }
        client = bench.interleave("registry: a report", 15, slices, server)
    bare.close()
    shares = {
        name: (statistics.median(client[name]) + statistics.median(server[name])) / REPORT_INTERVAL / 1e4
        for name in sizes
    }
    most = max(shares.values())
    yield Outcome(
        "registry", "client's processor time, threads", "µs a report", FULL_ENTRY, client, less_is_better=True,
        note="The calling thread's time (time.thread_time).",
    )  # fmt: skip
    yield Outcome(
        "registry", "server's processor time", "µs a report", FULL_ENTRY, server, less_is_better=True,
        checks=[
            Check("% of a core", f"{most:.2f}", f"≤ {MOST_COST:g}", None if bench.quick else most <= MOST_COST)
        ],
        remarks={name: f"{share:.3f} % of a core" for name, share in shares.items()},
        note=f"By INFO cpu. % of a core: client and server together, with a report each {REPORT_INTERVAL:g} s, the "
        "most that a session sends.",
    )  # fmt: skip


def _server_seconds(bare: Bare) -> float:
    return sum(float(each) for each in re.findall(rb"used_cpu_(?:sys|user):([\d.]+)", bare.call("INFO", "cpu")))


@contextmanager
def _registry_of(url: str, leases: int, waiters: int) -> Iterator[Registry]:
    """The registry of a session that has so many leases and waiting threads."""
    with Interlock(url) as others, Interlock(url) as locks, ThreadPoolExecutor(waiters or 1) as pool:
        names = [f"awaited {i}" for i in range(waiters)]
        awaited = [others.lock(name, ttl=TTL).acquire() for name in names]
        kept = [locks.lock(f"held {leases} {i}", ttl=TTL).acquire() for i in range(leases)]
        registry = locks._session.registry
        for name in names:
            pool.submit(sections(locks.lock(name, ttl=TTL), []), 1)
        while len(registry.waiters.registered) < waiters:
            time.sleep(0.01)
        try:
            yield registry
        finally:
            for lease in (*awaited, *kept):
                lease.release()


# observers


def observers(bench: Bench) -> Iterator[Outcome]:
    """Pairs that nobody observes, and those that OpenTelemetry's SDK measures and traces."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
    from opentelemetry.trace import NoOpTracerProvider

    exporter = InMemorySpanExporter()
    meters, some, every = (
        MeterProvider([InMemoryMetricReader()]),
        TracerProvider(TraceIdRatioBased(0.01)),
        TracerProvider(),
    )
    for traces in (some, every):
        traces.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1_000_000))

    def instrumented(traces: TracerProvider | NoOpTracerProvider) -> Callable[[], AbstractContextManager[None]]:
        return lambda: _instrumented(meters, traces, exporter.clear)

    states: dict[str, Callable[[], AbstractContextManager[None]]] = {
        NOBODY: nullcontext,
        ONCE_OBSERVED: lambda: _observed_before(instrumented(NoOpTracerProvider())),
        NOTHING: _observed_by_nothing,
        METRICS: instrumented(NoOpTracerProvider()),
        SOME_TRACES: instrumented(some),
        ALL_TRACES: instrumented(every),
    }
    spent: dict[str, list[float]] = {name: [] for name in states}
    slices = {name: _micros(bench, state, spent[name]) for name, state in states.items()}
    samples = bench.interleave("observers", 15, slices, spent)
    counter, began = meters.get_meter("bench").create_counter("additions"), time.thread_time()
    for _ in range(COUNTS):
        counter.add(1, {"interlock.kind": "lock"})
    of_the_sdk = (time.thread_time() - began) / COUNTS * 1e6
    for provider in (meters, some, every):
        provider.shutdown()
    yield Outcome(
        "observers", "threads, one lock, nobody else: acquire + release", "µs a pair", NOBODY, samples,
        checks=[Check("a count by the SDK, µs", f"{of_the_sdk:.1f}")], less_is_better=True,
        remarks={
            name: f"{statistics.median(map(sub, micros, spent[NOBODY])):+.1f} µs of processor time"
            for name, micros in spent.items()
            if name != NOBODY
        },
        note="The ratio is the throughput that is left. Each slice has an Interlock of its own. The readers and "
        "exporters of OpenTelemetry keep all in memory. The processor time is that of all threads of the client.",
    )  # fmt: skip


def _micros(bench: Bench, state: Callable[[], AbstractContextManager[None]], spent: list[float]) -> Callable[[], float]:
    """A slice: µs of a pair in this state. Those of processor time are added to `spent`."""

    def loop(count: int) -> float:
        with Interlock(f"unix://{bench.path}") as locks, state():
            pairs = sections(locks.lock("observed", ttl=TTL), [])
            pairs(20)
            began, before = now(), time.process_time()
            pairs(count)
            took = now() - began
            spent.append((time.process_time() - before) / count * 1e6)
            return took

    rate = bench.rate(loop)
    return lambda: 1e6 / rate()


@contextmanager
def _instrumented(meters: MeterProvider, traces: TracerProvider, forget: Callable[[], None]) -> Iterator[None]:
    from interlock.contrib import otel

    otel.instrument(meters, traces)
    try:
        yield
    finally:
        otel.uninstrument()
        forget()


@contextmanager
def _observed_before(state: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with state():
        pass
    yield


@contextmanager
def _observed_by_nothing() -> Iterator[None]:
    observer = Observer()
    observe(observer)
    try:
        yield
    finally:
        stop_observing(observer)
