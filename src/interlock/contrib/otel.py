"""Metrics and traces for OpenTelemetry: `instrument()` and `uninstrument()`. Needs `interlock[otel]`.

Theory. `Telemetry` is the observer of `interlock._people.observer`: it counts, measures, and keeps one span at a time
with each attempt: the wait, then the hold. While nothing is instrumented, the client does not know this module.

Rules. (a) The attributes of metrics are of small closed sets, but for the lock's name, which the user asks for. (b) A
span may end in another thread than it began in: no span is made the current one. (c) Only the API is imported; what is
exported, and where to, the program's SDK says.
"""

from __future__ import annotations

import time
import weakref
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import Observation
    from opentelemetry.trace import Status, StatusCode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.otel needs opentelemetry-api: "
        "pip install opentelemetry-api, or '.[otel]' in a checkout of interlock",
        name=error.name,
    ) from error

from interlock._people import observer
from interlock._people.observation import observation_of
from interlock._people.observer import Loss, Observer, Outcome, observe, stop_observing
from interlock._protocol.snapshot import snapshot
from interlock._protocol.timing import now
from interlock._session.open_sessions import waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from interlock._client.grant import Attempt, Grant
    from interlock._protocol.resource import Resource

__all__ = ["instrument", "uninstrument"]

# Seconds: from a pair on a unix socket to a lease that is held for hours
DURATIONS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14_400,
)  # fmt: skip
SLACKS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 45, 60, 300)  # seconds
LATE: Final = 0.001  # seconds after which a span that is reported late gets the time at which it began

_current: Telemetry | None = None


def instrument(
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    lock_names: bool = False,
) -> None:
    """Measure and trace all locks of this process from now on, whenever their Interlock was made.

    The providers are those of the program by default. With `lock_names` each metric has the attribute `interlock.lock`:
    a time series for each name, so only where names are few. Spans always have it. A second call replaces the first.
    """
    global _current
    provider = meter_provider or metrics.get_meter_provider()
    tracer = trace.get_tracer("interlock", version("interlock"), tracer_provider)
    with observer.switching:
        instruments = _instruments.get(provider)
        if instruments is None:  # an SDK warns of instruments that are made twice
            instruments = _instruments[provider] = Instruments(provider.get_meter("interlock", version("interlock")))
        former, _current = _current, Telemetry(instruments, tracer, lock_names=lock_names)
        observe(_current)
        if former is not None:
            stop_observing(former)


def uninstrument() -> None:
    """Measure and trace nothing any more. The spans of leases that are held now never end."""
    global _current
    with observer.switching:
        former, _current = _current, None
        if former is not None:
            stop_observing(former)


class Instruments:
    """The instruments of one provider."""

    def __init__(self, meter: Meter) -> None:
        self.wait = _histogram(meter, "interlock.wait.duration", "Time from asking for a lock to its outcome")
        self.hold = _histogram(meter, "interlock.hold.duration", "Time for which a lease was held")
        self.slack = _histogram(
            meter, "interlock.renewal.slack", "Time that a lease had left when its renewal succeeded", SLACKS
        )
        self.acquisitions = meter.create_counter(
            "interlock.acquisitions", "{acquisition}", "Attempts to acquire, by their outcome"
        )
        self.lost = meter.create_counter("interlock.lost", "{lease}", "Leases lost before their release, by the reason")
        meter.create_observable_up_down_counter(
            "interlock.waiters", [self._waiters], "{caller}", "Callers of this process that wait now"
        )

    def _waiters(self, _: CallbackOptions) -> Iterable[Observation]:
        telemetry = _current
        return telemetry.waiters() if telemetry is not None and telemetry.instruments is self else ()


def _histogram(meter: Meter, name: str, description: str, boundaries: tuple[float, ...] = DURATIONS) -> Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=boundaries)


_instruments: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=1024)
def _attributes(kind: str, name: str | None, key: str = "", value: str = "") -> Mapping[str, str]:
    attributes = {"interlock.kind": kind}
    if name is not None:
        attributes["interlock.lock"] = name
    if key:
        attributes[key] = value
    return attributes


class Telemetry(Observer):
    """Turns the reports of the client into measurements and spans."""

    def __init__(self, instruments: Instruments, tracer: trace.Tracer, *, lock_names: bool) -> None:
        self.instruments = instruments
        self.tracer = tracer
        self.lock_names = lock_names
        self._kinds: dict[str, None] = {}  # in use: each has a number of waiters, if only 0

    def _of(self, resource: Resource, key: str = "", value: str = "") -> Mapping[str, str]:
        return _attributes(resource.kind, resource.name if self.lock_names else None, key, value)

    # Attempts

    def begins(self, attempt: Attempt) -> None:
        """See Observer."""
        observation = observation_of(attempt)
        assert observation is not None
        late = now() - observation.began
        span = observation.state = self._start(
            "interlock acquire", attempt.resource, start_time=time.time_ns() - int(late * 1e9) if late > LATE else None
        )
        context = span.get_span_context()
        if context.is_valid:
            observation.trace_id = trace.format_trace_id(context.trace_id)

    def acquired(self, grant: Grant, waited: float) -> None:
        """See Observer."""
        attempt = grant.attempt
        self._count(attempt, Outcome.ACQUIRED, waited)
        observation = observation_of(attempt)
        if observation is None or (wait := observation.state) is None:
            return
        wait.set_attribute("interlock.fence", grant.fence)
        wait.set_attribute("interlock.outcome", Outcome.ACQUIRED.value)
        hold = observation.state = self._start("interlock hold", attempt.resource, wait)
        hold.set_attribute("interlock.fence", grant.fence)
        wait.end()

    def not_acquired(self, attempt: Attempt, outcome: Outcome, waited: float, error: BaseException) -> None:
        """See Observer."""
        self._count(attempt, outcome, waited)
        if (span := _take_span(attempt)) is not None:
            span.set_attribute("interlock.outcome", outcome.value)
            if outcome in {Outcome.UNAVAILABLE, Outcome.ERROR}:
                span.set_status(Status(StatusCode.ERROR, str(error)))
            span.end()

    def _count(self, attempt: Attempt, outcome: Outcome, waited: float) -> None:
        if (kind := attempt.resource.kind) not in self._kinds:
            self._kinds[kind] = None
            for loss in Loss if not self.lock_names else ():  # from 0 on, so that the first loss is an increase
                self.instruments.lost.add(0, _attributes(kind, None, "reason", loss.value))
        attributes = self._of(attempt.resource, "outcome", outcome.value)
        self.instruments.acquisitions.add(1, attributes)
        self.instruments.wait.record(waited, attributes)

    # Leases

    def released(self, grant: Grant, held: float) -> None:
        """See Observer."""
        self.instruments.hold.record(held, self._of(grant.resource))
        if (span := _take_span(grant.attempt)) is not None:
            span.end()

    def lost(self, grant: Grant, loss: Loss, why: str, held: float | None) -> None:
        """See Observer."""
        self.instruments.lost.add(1, self._of(grant.resource, "reason", loss.value))
        if held is None:
            return
        self.instruments.hold.record(held, self._of(grant.resource))
        if (span := _take_span(grant.attempt)) is not None:
            span.set_attribute("interlock.lost", loss.value)
            span.set_status(Status(StatusCode.ERROR, why))
            span.end()

    def renewed(self, grant: Grant, slack: float) -> None:
        """See Observer."""
        self.instruments.slack.record(slack, self._of(grant.resource))

    def renewal_failed(self, grant: Grant) -> None:
        """See Observer."""
        observation = observation_of(grant.attempt)
        if observation is not None and observation.state is not None:
            observation.state.add_event("renewal failed")

    def waiters(self) -> Iterable[Observation]:
        """How many callers wait now."""
        kinds = () if self.lock_names else snapshot(self._kinds)
        found: dict[tuple[str, str | None], int] = {(kind, None): 0 for kind in kinds}
        for resource, number in waiting().items():
            key = resource.kind, resource.name if self.lock_names else None
            found[key] = found.get(key, 0) + number
        return [Observation(number, _attributes(*key)) for key, number in found.items()]

    def _start(self, what: str, resource: Resource, wait: Span | None = None, start_time: int | None = None) -> Span:
        """Begin a span: a child of the caller's current span, or of the wait if the caller has none."""
        context = None
        if wait is not None and not trace.get_current_span().get_span_context().is_valid:
            context = trace.set_span_in_context(wait)
        attributes = _attributes(resource.kind, resource.name)
        return self.tracer.start_span(what, context, attributes=attributes, start_time=start_time)


def _take_span(attempt: Attempt) -> Span | None:
    """Take the span away from this attempt, to end it; None if it has none, or another report was faster."""
    observation = observation_of(attempt)
    if observation is None:
        return None
    span: Span | None = observation.state
    observation.state = None
    return span
