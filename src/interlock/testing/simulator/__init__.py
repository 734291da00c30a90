"""The simulator: the real core and the real Lua on a virtual clock and a virtual network, all from one seed.

Theory. What a lock promises, it promises for every order in which messages, timers, pauses, crashes and
cancellations can come. Tests over real sockets see a few of these orders. Here nothing is real but the code under
test: `Session`, `Core`, `Renewal`, `Waiters` and `Undo` run over a port whose clock, network and background work
are events of a scheduler; `lock.lua` runs in a real Lua over a small Redis in memory. A second costs milliseconds,
and a seed is one run, to the byte: what it found can be looked at again, with the trace, as often as one likes.

    scheduler   time, coroutines, processes, pauses and cancellations
    server      Redis' commands under the virtual clock, and the Lua
    network     delays, losses, copies; the port
    profiles    which faults, how often
    clients     what workers do with locks
    scenario    the course of a run: storm, calm, ashes; striking faults
    invariants  what must hold at every instant

Rules. (1) Nothing is patched but chance: random numbers and tokens come from the seed. (2) The scenario calls only
what the threads' and asyncio's APIs call. (3) A rule that a profile can't keep is relaxed by name, never by luck.

    simulate(seed)                          one run, its profile chosen by the seed
    simulate(seed, "chaos")                 the same with this profile
    simulate(seed, lua=lambda source: ...)  with another lock.lua, to see that a planted bug is caught

Not modelled: several servers, failover, fork, garbage collection in the middle, a suspended machine whose timers
stand still, threads that run at once (a step of a coroutine is atomic, as under asyncio).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import random
import sys
import types
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from .profiles import PROFILES, RELAXED, Profile
from .scenario import Run

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Generator

    from .invariants import Monitor

__all__ = ["PROFILES", "RELAXED", "Profile", "Report", "simulate"]


@dataclass(frozen=True)
class Report:
    """What a run saw."""

    seed: int
    profile: str
    events: int
    scripts: int
    grants: int
    slowest: float
    interleaving: str
    fingerprint: str
    counts: Counter[str]
    violations: list[str]
    trace: list[str]


def simulate(seed: int, profile: str | None = None, *, lua: Callable[[str], str] = str) -> Report:
    """Run one simulation."""
    every = PROFILES | RELAXED
    chosen = every[profile] if profile else list(PROFILES.values())[seed % len(PROFILES)]
    with _apart(seed), contextlib.ExitStack() as stack:
        run = Run(seed, chosen, lua)
        stack.enter_context(_listening(run.monitor))
        stack.callback(_burn, run)
        run.go()
        lines = [f"{when:12.6f}  {text}" for when, text in run.monitor.trace]
        return Report(
            seed, chosen.name, run.world.events, run.server.scripts, run.monitor.grants, run.monitor.slowest,
            run.monitor.order.hexdigest(), hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            run.counts, run.monitor.violations, lines,
        )  # fmt: skip


@contextlib.contextmanager
def _apart(seed: int) -> Generator[None]:
    """No chance but the seed's, and no garbage collection in the middle, which might drop leases at any time."""
    chance = random.Random(f"{seed} of the core")

    def token_hex(size: int) -> str:
        return chance.randbytes(size).hex()

    collecting = gc.isenabled()
    gc.disable()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("interlock._"):
                replaced: dict[str, Any] = {
                    "random": chance,
                    "secrets": types.SimpleNamespace(token_hex=token_hex),
                    "os": types.SimpleNamespace(**(vars(os) | {"urandom": chance.randbytes})),
                }
                for attribute, substitute in replaced.items():
                    if hasattr(module, attribute):
                        stack.enter_context(mock.patch.object(module, attribute, substitute))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class _Ear(logging.Handler):
    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.ERROR)
        self.monitor = monitor

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.monitor.violated(10, f"logged: {record.getMessage()}{cause}")


@contextlib.contextmanager
def _listening(monitor: Monitor) -> Generator[None]:
    log = logging.getLogger("interlock")
    with mock.patch.multiple(log, propagate=False, handlers=[_Ear(monitor)]):
        yield


def _burn(run: Run) -> None:
    """Nothing of it lives on."""
    run.monitor.over = True
    for holds in run.monitor.held.values():
        for held in holds:
            held.grant.ended = held.grant.ended or "the simulation is over"
    for client in [*run.clients, *run.graves]:
        client.process.alive = False
        for grant in client.session.renewal.held():
            grant.ended = "the simulation is over"
        for task in client.process.tasks:
            with contextlib.suppress(BaseException):
                task.work.close()
