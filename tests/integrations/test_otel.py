"""Metrics and traces by the SDK of OpenTelemetry: names, units, attributes, spans and their parents.

Not here: when the client reports what (conformance/test_observers.py); dashboard and alerts (test_prometheus.py).
"""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from harness.matrix import required
from harness.modes import outcome, queued, real, until
from interlock import LeaseLost
from interlock._people.observation import trace_id_of
from interlock._people.observer import Loss

try:
    from opentelemetry import trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from interlock.contrib import otel
    from interlock.contrib.otel import DURATIONS, SLACKS
except ModuleNotFoundError as missing:
    MISSING = str(missing)
else:
    MISSING = ""

pytestmark = pytest.mark.runs_on("valkey-9.1")


@pytest.fixture(scope="module", autouse=True)
def libraries():
    if MISSING:
        required(f"{MISSING}; scripts/test installs it")


class Telemetry:
    """What a program has exported so far."""

    def __init__(self) -> None:
        self.reader, self.exporter = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters, self.tracers = MeterProvider([self.reader]), TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.tracers.get_tracer("program")

    def instrument(self, **options):
        otel.instrument(self.meters, self.tracers, **options)

    def metrics(self):
        """Each metric by its name."""
        data = self.reader.get_metrics_data()
        found = [metric for resource in data.resource_metrics if data for scope in resource.scope_metrics
                 if scope.scope.name == "interlock" for metric in scope.metrics] if data else []  # fmt: skip
        return {metric.name: metric for metric in found}

    def points(self, name, **attributes):
        """The points of a metric that have these attributes; `_` in place of a dot."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        metric = self.metrics().get(name)
        points = metric.data.data_points if metric else ()
        return [point for point in points if wanted.items() <= dict(point.attributes).items()]

    def number(self, name, **attributes):
        """The sum of a counter, or of the counts of a histogram."""
        return sum(
            getattr(point, "value", None) or getattr(point, "count", 0) for point in self.points(name, **attributes)
        )

    def spans(self):
        """The finished spans, each once."""
        spans = self.exporter.get_finished_spans()
        self.exporter.clear()
        return [*spans]


@pytest.fixture
def telemetry():
    telemetry = Telemetry()
    telemetry.instrument()
    try:
        yield telemetry
    finally:
        otel.uninstrument()
        telemetry.meters.shutdown()
        telemetry.tracers.shutdown()


async def test_metrics_have_the_names_units_and_attributes_of_the_page(mode, clean, telemetry):
    locks, other = mode.interlock(), mode.interlock()
    lease = await locks.lock("a", ttl=6).acquire()
    assert await other.lock("a").try_acquire() is None
    waiting = asyncio.ensure_future(other.lock("a").acquire(30))
    await until(lambda: telemetry.number("interlock.waiters", interlock_kind="lock") == 1)
    await until(lambda: telemetry.number("interlock.renewal.slack"))
    await locks.lock("a").revoke("enough")
    await until(lambda: telemetry.number("interlock.lost"))
    await (await waiting).release()
    metrics = telemetry.metrics()
    assert {name: metric.unit for name, metric in metrics.items()} == {
        "interlock.wait.duration": "s", "interlock.hold.duration": "s", "interlock.renewal.slack": "s",
        "interlock.acquisitions": "{acquisition}", "interlock.lost": "{lease}", "interlock.waiters": "{caller}",
    }  # fmt: skip
    for name, metric in metrics.items():
        for point in metric.data.data_points:
            more = {
                "interlock.acquisitions": {"outcome"},
                "interlock.wait.duration": {"outcome"},
                "interlock.lost": {"reason"},
            }
            assert {*point.attributes} == {"interlock.kind"} | more.get(name, set())
    assert telemetry.number("interlock.acquisitions", outcome="acquired", interlock_kind="lock") == 2
    assert telemetry.number("interlock.acquisitions", outcome="busy") == 1
    assert telemetry.number("interlock.lost", reason="revoked") == 1
    assert telemetry.number("interlock.hold.duration") == 2
    assert telemetry.number("interlock.wait.duration", outcome="acquired") == 2
    assert telemetry.number("interlock.waiters") == 0
    (held,) = telemetry.points("interlock.hold.duration")
    (slack,) = telemetry.points("interlock.renewal.slack")
    assert held.explicit_bounds == DURATIONS
    assert slack.explicit_bounds == SLACKS
    assert 0 < slack.sum < 6 * slack.count
    assert await lease.release() is False


async def test_names_are_an_attribute_only_if_the_user_asks(mode, clean, telemetry):
    locks = mode.interlock()
    async with locks.lock("a"):
        pass
    telemetry.instrument(lock_names=True)
    async with locks.lock("b"):
        pass
    assert telemetry.number("interlock.acquisitions") == 2
    assert telemetry.number("interlock.acquisitions", interlock_lock="b") == 1
    assert not telemetry.points("interlock.acquisitions", interlock_lock="a")
    assert telemetry.number("interlock.hold.duration", interlock_lock="b") == 1


async def test_a_wait_and_a_hold_are_children_of_the_callers_span(mode, clean, telemetry):
    locks = mode.interlock()
    session = mode.session(locks)

    def work():
        with telemetry.tracer.start_as_current_span("order") as order, real(locks).lock("a") as lease:
            seen.extend((order.get_span_context(), lease.fence, trace_id_of(session.book.held()[0].attempt)))

    async def work_in_task():
        with telemetry.tracer.start_as_current_span("order") as order:
            async with locks.lock("a") as lease:
                seen.extend((order.get_span_context(), lease.fence, trace_id_of(session.book.held()[0].attempt)))

    seen = []
    await (asyncio.to_thread(work) if mode.name == "threads" else work_in_task())
    order, fence, trace_id = seen
    wait, hold, whole = telemetry.spans()
    assert [span.name for span in (wait, hold, whole)] == ["interlock acquire", "interlock hold", "order"]
    assert trace_id == trace.format_trace_id(order.trace_id)
    for span in (wait, hold):
        assert span.parent.span_id == order.span_id
        assert (
            dict(span.attributes).items()
            >= {"interlock.lock": "a", "interlock.kind": "lock", "interlock.fence": fence}.items()
        )
        assert span.status.status_code is StatusCode.UNSET
    assert wait.attributes["interlock.outcome"] == "acquired"
    assert wait.start_time <= wait.end_time <= hold.end_time


async def test_without_a_span_of_the_caller_the_hold_is_in_the_trace_of_the_wait(mode, clean, telemetry):
    async with mode.interlock().lock("a"):
        pass
    wait, hold = telemetry.spans()
    assert hold.parent.span_id == wait.context.span_id


async def test_a_loss_is_an_error_of_the_hold_and_a_timeout_an_outcome_of_the_wait(mode, clean, telemetry):
    locks, other = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    await other.ping()  # connecting counts as a part of the timeout
    await outcome(other.lock("a").acquire(0.1))
    await locks.lock("a").revoke("enough <b>\n")
    await until(lambda: lease.state == "lost")
    await until(lambda: telemetry.number("interlock.lost") == 1)
    acquired, late, hold = telemetry.spans()
    assert (late.attributes["interlock.outcome"], late.status.status_code) == ("timeout", StatusCode.UNSET)
    assert "interlock.fence" not in late.attributes
    assert hold.status.status_code is StatusCode.ERROR
    assert "enough" in hold.status.description
    assert hold.attributes["interlock.lost"] == "revoked"
    assert acquired.status.status_code is StatusCode.UNSET


async def test_a_with_whose_lease_was_gone_ends_its_span_with_an_error(mode, clean, telemetry):
    with pytest.raises(LeaseLost):
        async with mode.interlock().lock("a"):
            clean.delete("lock:a")
    _, hold = telemetry.spans()
    assert hold.attributes["interlock.lost"] == "gone"
    assert hold.status.status_code is StatusCode.ERROR


@pytest.mark.runs_on("valkey-9.1", modes="threads")
def test_a_lease_that_another_thread_releases_ends_its_span_there(server, clean, telemetry):
    import interlock

    with interlock.Interlock(server.url) as locks:
        lease = locks.lock("a").acquire()
        thread = threading.Thread(target=lease.release)
        thread.start()
        thread.join()
        assert [span.name for span in telemetry.spans()] == ["interlock acquire", "interlock hold"]
        lease = locks.lock("b", renew=False, ttl=0.2).acquire()
        assert lease.lost.wait(30)
        with pytest.warns(ResourceWarning):
            locks.lock("c").acquire()
            gc.collect()
        locks.lock("d").acquire(timeout=0).release()


async def test_several_locks_in_one_step_have_a_wait_each_that_begins_with_the_request(mode, clean, telemetry):
    locks = mode.interlock()
    session = mode.session(locks)
    call = session.server.call

    async def slow(*args):
        reply = await call(*args)
        await session.runtime.sleep_until(session.runtime.now() + 0.05)
        return reply

    session.server.call = slow
    try:
        lease = await locks.multi(locks.lock("a"), locks.lock("b")).acquire()
    finally:
        session.server.call = call
    await lease.release()
    spans = telemetry.spans()
    waits = [span for span in spans if span.name == "interlock acquire"]
    assert sorted(span.attributes["interlock.lock"] for span in waits) == ["a", "b"]
    assert telemetry.number("interlock.wait.duration") == 2
    assert len(spans) == 4
    assert all(span.end_time - span.start_time >= 0.04e9 for span in waits)
    assert telemetry.points("interlock.wait.duration")[0].min >= 0.04


async def test_a_lease_that_passes_on_is_traced_for_both_callers(mode, clean, telemetry):
    locks = mode.interlock()
    first = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(locks.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    assert telemetry.number("interlock.waiters") == 1
    await first.release()
    await (await waiting).release()
    assert [span.name for span in telemetry.spans()].count("interlock hold") == 2
    assert telemetry.number("interlock.waiters") == 0


async def test_losses_are_counted_from_0_and_after_the_end_of_the_hold(mode, clean, telemetry, caplog):
    locks = mode.interlock()
    async with locks.lock("a", confirm=False):
        points = telemetry.points("interlock.lost", interlock_kind="lock")
        assert {point.attributes["reason"]: point.value for point in points} == {each.value: 0 for each in Loss}
        clean.delete("lock:a")
    await until(lambda: telemetry.number("interlock.lost", reason="gone") == 1)
    assert telemetry.number("interlock.hold.duration") == 1
    assert [record.message for record in caplog.records if "observer" in record.message] == []


async def test_uninstrumented_again_it_measures_nothing_and_a_second_time_all(mode, clean, telemetry, caplog):
    locks = mode.interlock()
    otel.uninstrument()
    async with locks.lock("a"):
        pass
    assert not telemetry.spans()
    assert not telemetry.number("interlock.acquisitions")
    telemetry.instrument()
    telemetry.instrument()
    async with locks.lock("a"):
        pass
    assert telemetry.number("interlock.acquisitions") == 1
    assert [point.value for point in telemetry.points("interlock.waiters")] == [0]
    assert len(telemetry.spans()) == 2
    assert not caplog.records


async def test_without_an_sdk_it_costs_little_and_breaks_nothing(mode, clean):
    otel.instrument()
    try:
        async with mode.interlock().lock("a"):
            pass
    finally:
        otel.uninstrument()
