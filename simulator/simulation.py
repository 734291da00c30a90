"""One run of a seed, isolated from the real clock and from real chance, and its report."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from .chance import CoreChance
from .loop import asyncio_of
from .scenario import Run
from .subjects import SUBJECTS, choices_of
from .substitutes import substituted

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Generator

    from .coverage import Pair
    from .invariants import Trace, Violation
    from .invariants.claims import Transition
    from .plan import Fault, Plan, Section
    from .scheduler import World


@dataclass(frozen=True)
class Report:
    """The results of a run."""

    seed: int
    profile: str
    subject: str
    end: float
    """The virtual second at which the run ended."""
    events: int
    scripts: int
    grants: int
    slowest: float
    """The longest time in the quiet phase, in seconds, from the first room for a live waiter to its grant."""
    interleaving: str
    """A hash of the order in which clients used the server, without the times."""
    counts: Counter[str]
    """How often each kind of event happened."""
    pairs: Counter[Pair]
    """How often each event met a claim in each state."""
    transitions: Counter[Transition]
    """How often claims took each transition of their table."""
    violations: list[Violation]
    faults: list[Fault]
    sections: list[Section]
    trace: Trace = field(repr=False, compare=False)

    @property
    def lines(self) -> list[str]:
        """The events of the run, one line each."""
        return self.trace.lines()

    @property
    def fingerprint(self) -> str:
        """A hash of the trace: two runs with the same hash are the same run."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def simulate(
    seed: int,
    profile: str | None = None,
    *,
    subject: str | None = None,
    world: str | None = None,
    lua: Callable[[str], str] = str,
    plan: Plan | None = None,
) -> Report:
    """Run one simulation.

    The seed chooses the profile and the subject among those of the `world`, unless the caller gives these. The default
    is the world of the profile, or "one". `lua` may change the text of each script before it is sent, to plant a bug.
    With a plan, the run of this seed is repeated with only those sections and faults that the plan names.
    """
    chosen, kind = choices_of(seed, profile, subject, world)
    with _isolated() as begin, contextlib.ExitStack() as stack:
        run = Run(seed, chosen, SUBJECTS[kind], lua, plan, begin)
        stack.enter_context(_log_watched(run.trace))
        stack.callback(_tear_down, run)
        run.go()
        run.record.counts["lost leases that nobody knew of"] += run.monitor.server_state.excused
        record, state = run.record, run.monitor.server_state
        scripts = sum(group.scripts for group in run.groups)
        return Report(
            seed, chosen.name, kind, run.world.now, run.world.events, scripts, state.grants, state.slowest,
            run.trace.interleaving(), record.counts, run.monitor.coverage.pairs, run.monitor.claims.seen,
            run.trace.violations, record.faults, record.sections, run.trace,
        )  # fmt: skip


def _substitutes(world: Callable[[], World], chance: Callable[[], CoreChance]) -> dict[str, Any]:
    """Return substitutes for the modules and functions that interlock imports for time, tasks and chance, by name."""

    def urandom(size: int) -> bytes:
        return chance().randbytes(size)

    def token_hex(size: int) -> str:
        return urandom(size).hex()

    def now() -> float:
        return world().now

    def uniform(low: float, high: float) -> float:
        return chance().uniform(low, high)

    return {
        "now": now,
        "asyncio": asyncio_of(world),
        "random": types.SimpleNamespace(uniform=uniform),
        "secrets": types.SimpleNamespace(token_hex=token_hex),
        "os": types.SimpleNamespace(**(vars(os) | {"urandom": urandom})),
    }


@contextlib.contextmanager
def _isolated() -> Generator[Callable[[World], None]]:
    """Patch time, tasks and chance with those of the world. Stop the garbage collector, which might drop leases."""
    worlds: list[World] = []
    chances: list[CoreChance] = []

    def begin(world: World) -> None:
        worlds.append(world)
        chances.append(CoreChance(world))

    with substituted(_substitutes(lambda: worlds[0], lambda: chances[0])):
        yield begin


class _ErrorLog(logging.Handler):
    def __init__(self, trace: Trace) -> None:
        super().__init__(logging.ERROR)
        self.trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.trace.violated(10, f"logged: {record.getMessage()}{cause}")


@contextlib.contextmanager
def _log_watched(trace: Trace) -> Generator[None]:
    log = logging.getLogger("interlock")
    with mock.patch.multiple(log, propagate=False, handlers=[_ErrorLog(trace)]):
        yield


def _tear_down(run: Run) -> None:
    """End all leases and coroutines of the run, so that nothing of it lives on."""
    run.trace.over = True
    for holds in run.monitor.leases.held.values():
        for held in holds:
            held.grant.end_reason = held.grant.end_reason or "the simulation is over"
    for client in [*run.clients, *run.dead_clients]:
        client.process.alive = False
        for grant in client.session.book.held():
            grant.end_reason = "the simulation is over"
        for task in client.process.tasks:
            with contextlib.suppress(BaseException):
                task.work.close()
    run.world.clear()
    monitor = run.monitor
    parts = monitor.leases, monitor.beliefs, monitor.passing, monitor.server_state, monitor.attempts, monitor.claims
    for part in (run, *run.networks, monitor, *parts):
        vars(part).clear()  # so that its cycles end here, and not in the garbage collector
