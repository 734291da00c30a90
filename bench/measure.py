"""How a row is measured: short slices of all contenders in turn, round after round, and the ratios within a round.

Machines are noisy, and some change their speed by a factor of two from minute to minute. So no number stands alone:
in each round every contender has one slice, in alternating order, and a ratio compares slices that ran side by side.
The tables show the median of the rounds' own ratios, and their spread from the first quartile to the third. (The ratio
of the two medians would compare different minutes: it was seen far outside of those quartiles.)
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from goals import GOALS, STEADY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goals import Goal

now = time.monotonic  # CLOCK_MONOTONIC: the same for all processes of a machine


@dataclass(frozen=True)
class Check:
    """A number that has a bound of its own, instead of a ratio."""

    what: str
    value: str
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Verdict:
    """A goal, and what the run says of it."""

    goal: Goal
    against: str
    ratio: float

    @property
    def met(self) -> bool:
        return self.goal.met(self.ratio)


@dataclass
class Outcome:
    """One table of a row: what every contender did in every round."""

    row: str
    what: str
    unit: str
    ours: str
    samples: dict[str, list[float]]
    checks: list[Check] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)  # by contender
    latencies: dict[str, list[float]] = field(default_factory=dict)  # by contender, of all rounds
    latency: str = ""  # of what: "a pair"
    latency_unit: str = ""
    starving: dict[str, float] = field(default_factory=dict)  # by contender: the least share that a thread had
    note: str = ""
    less_is_better: bool = False
    not_peers: tuple[str, ...] = ("floor",)
    broken: bool = False  # what no timing excuses: a lock that did not exclude, a lease that was lost

    def median(self, contender: str) -> float:
        return statistics.median(self.samples[contender])

    def ratio(self, contender: str) -> float:
        """Ours / other: the median of the rounds' own ratios, as a round's slices met the same machine."""
        return statistics.median(self._ratios(contender))

    def spread(self, contender: str) -> tuple[float, float]:
        """The middle half of the rounds' own ratios."""
        ratios = sorted(self._ratios(contender))
        return ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]

    def _ratios(self, contender: str) -> list[float]:
        return [a / max(b, 1e-9) for a, b in zip(self.samples[self.ours], self.samples[contender], strict=True)]

    def steady_peer(self) -> str:
        """The fastest peer that starves nobody. Where every peer starves somebody, the fastest."""
        peers = [name for name in self.samples if name not in {self.ours, *self.not_peers}]
        steady = [name for name in peers if name not in self.starving] or peers
        return (min if self.less_is_better else max)(steady, key=self.median)

    def verdicts(self) -> list[Verdict]:
        """What this run says of the row's goals. A goal against a contender that did not run has no verdict."""
        found = []
        for goal in GOALS.get(self.row, ()):
            against = self.steady_peer() if goal.against == STEADY else goal.against
            if goal.of in {"", self.ours} and against in self.samples and against != self.ours:
                found.append(Verdict(goal, against, self.ratio(against)))
        return found

    def is_missed(self) -> bool:
        verdicts = [*(verdict.met for verdict in self.verdicts()), *(check.met for check in self.checks)]
        return False in verdicts

    def tail(self, contender: str) -> tuple[float, float, float] | None:
        """The p50, the p99 and the longest of a contender's latencies."""
        values = sorted(self.latencies.get(contender, ()))
        return (percentile(values, 50), percentile(values, 99), values[-1]) if values else None

    def as_json(self) -> dict[str, object]:
        contenders = {
            name: {
                "median": self.median(name),
                "rounds": self.samples[name],
                "ours_over_this": self.ratio(name),
                "spread": self.spread(name),
                "goals": [{"goal": str(v.goal), "met": v.met} for v in self.verdicts() if v.against == name],
                "remark": self.remarks.get(name, ""),
                "latency": dict(zip(("p50", "p99", "max"), self.tail(name) or (), strict=False)),
                "least_share_of_a_thread": self.starving.get(name),
            }
            for name in self.samples
        }
        checks = [vars(check) for check in self.checks]
        return {
            "row": self.row,
            "what": self.what, "unit": self.unit,
            "latency": self.latency, "latency_unit": self.latency_unit, "ours": self.ours,
            "less_is_better": self.less_is_better, "not_peers": self.not_peers,
            "contenders": contenders, "checks": checks, "note": self.note, "missed": self.is_missed(),
        }  # fmt: skip


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def shown(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Bench:
    """What a row needs: the server, how much to do, what to compare with, and whom to tell how far it is."""

    def __init__(
        self,
        path: str,
        *,
        rounds: int | None,
        quick: bool,
        before: Before | None,
        tell: Callable[[str, int, int], None],
    ) -> None:
        self.path = path
        self._rounds = rounds
        self.quick = quick
        self.before = before
        self.tell = tell

    def rounds(self, usual: int) -> int:
        """How many rounds a row has that usually has so many."""
        return self._rounds or (1 if self.quick else usual)

    def size(self, usual: float, quick: float) -> float:
        """A duration or a number of things: how much of it a row needs."""
        return quick if self.quick else usual

    def interleave(
        self,
        what: str,
        usual: int,
        contenders: Mapping[str, Callable[[], float]],
        latencies: dict[str, list[float]] | None = None,
    ) -> dict[str, list[float]]:
        """One slice of each, in turn, in alternating order. The first round warms up and is dropped (not if quick)."""
        rounds = self.rounds(usual)
        gc.collect()
        gc.freeze()  # what the imports made is no contender's garbage to search
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(int(self.quick), rounds + 1):
            order = list(contenders) if turn % 2 else list(reversed(contenders))
            for i, name in enumerate(order):
                self.tell(f"{what}: {name}", turn * len(order) + i, (rounds + 1) * len(order))
                gc.collect()
                sample = contenders[name]()
                if turn:
                    samples[name].append(sample)
            if not turn:
                for values in (latencies or {}).values():
                    values.clear()
        return samples

    def rate(self, loop: Callable[[int], object], seconds: float = 0.2) -> Callable[[], float]:
        """A slice of about so many seconds: how often a second `loop` does its work.

        A loop that runs in another process returns the seconds that it took.
        """
        state = {"count": int(self.size(20, 2))}
        wanted = self.size(seconds, 0.02)

        def slice_() -> float:
            count = state["count"]
            started = time.perf_counter()
            said = loop(count)
            took = said if isinstance(said, float) else time.perf_counter() - started
            state["count"] = max(2, int(count * min(20.0, wanted / took)))
            return count / took

        return slice_


@dataclass(frozen=True)
class Before:
    """Another checkout, with which rows compare this one."""

    name: str
    src: str
