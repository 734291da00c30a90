"""How it is measured: short slices of all contenders in turn, round after round, and the ratios within a round.

Machines are noisy, and some change their speed by a factor of two from minute to minute. So no number stands
alone: in each round every contender has one slice, in alternating order, and a ratio compares what ran side by
side. Shown is the median of the rounds' own ratios, and their spread from the first quartile to the third. (The
ratio of the two medians would compare different minutes: it was seen far outside of those quartiles.)
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FASTEST = "the fastest peer"


@dataclass(frozen=True)
class Goal:
    """What DESIGN section 5 wants of ours / other."""

    against: str
    least: float | None = None
    most: float | None = None

    def met(self, ratio: float) -> bool:
        return (self.least is None or ratio >= self.least) and (self.most is None or ratio <= self.most)

    def __str__(self) -> str:
        return f"≥ {self.least:g} ×" if self.least is not None else f"≤ {self.most:g} ×"


@dataclass(frozen=True)
class Check:
    """Something that is counted, not compared."""

    what: str
    value: str
    goal: str = ""
    met: bool | None = None


@dataclass
class Outcome:
    """A row of the table: what every contender did in every round."""

    number: int
    what: str
    unit: str
    ours: str
    samples: dict[str, list[float]]
    goals: list[Goal] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)  # by contender
    note: str = ""
    less_is_better: bool = False
    floor: str = "floor"
    broken: bool = False  # something that no timing excuses: a lock that did not exclude, a lease that was lost

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
        return [a / b for a, b in zip(self.samples[self.ours], self.samples[contender], strict=True)]

    def fastest_peer(self) -> str:
        peers = [name for name in self.samples if name not in {self.ours, self.floor}]
        return (min if self.less_is_better else max)(peers, key=self.median)

    def goals_of(self, contender: str) -> list[Goal]:
        return [
            goal
            for goal in self.goals
            if goal.against == contender or (goal.against == FASTEST and contender == self.fastest_peer())
        ]

    def as_json(self) -> dict[str, object]:
        others = {
            name: {
                "median": self.median(name),
                "rounds": self.samples[name],
                "ours_over_this": self.ratio(name),
                "spread": self.spread(name),
                "goals": [{"goal": str(goal), "met": goal.met(self.ratio(name))} for goal in self.goals_of(name)],
                "remark": self.remarks.get(name, ""),
            }
            for name in self.samples
        }
        checks = [vars(check) for check in self.checks]
        return {
            "row": self.number, "what": self.what, "unit": self.unit, "ours": self.ours,
            "contenders": others, "checks": checks, "note": self.note,
        }  # fmt: skip


class Bench:
    """What a row needs: the server, how much to do, and whom to tell how far it is."""

    def __init__(self, path: str, *, rounds: int | None, quick: bool, tell: Callable[[str, int, int], None]) -> None:
        self.path = path
        self._rounds = rounds
        self.quick = quick
        self.tell = tell

    def rounds(self, usual: int) -> int:
        """How many rounds a row has that usually has so many."""
        return self._rounds or (max(3, usual // 4) if self.quick else usual)

    def interleave(
        self, what: str, usual: int, contenders: Mapping[str, Callable[[], float]]
    ) -> dict[str, list[float]]:
        """One slice of each, in turn, in alternating order. The first round warms up and is dropped."""
        rounds = self.rounds(usual)
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            order = list(contenders) if turn % 2 else list(reversed(contenders))
            for i, name in enumerate(order):
                self.tell(f"{what}: {name}", turn * len(order) + i, (rounds + 1) * len(order))
                gc.collect()
                sample = contenders[name]()
                if turn:
                    samples[name].append(sample)
        return samples


def rate(loop: Callable[[int], object], seconds: float) -> Callable[[], float]:
    """A slice of about so many seconds: how often a second `loop` does what it does."""
    state = {"count": 20}

    def slice_() -> float:
        count = state["count"]
        started = time.perf_counter()
        loop(count)
        took = time.perf_counter() - started
        state["count"] = max(10, int(count * min(20.0, seconds / took)))
        return count / took

    return slice_
