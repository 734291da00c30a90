"""The decisions of a run, and the decisions that a repetition keeps.

Theory. A run consists of its *sections* (a worker acquires a lock, at a time of its process's clock) and its *faults*.
Both have names that stay the same in a repetition: `c1/w0#5` is the fifth section of a worker,
`request lost: c1/w0#5.2` the fault of the second message in that section, `cancel: strike 12` a fault from outside. A
`Record` lists the decisions. When the seed runs again, only the decisions that a `Plan` names happen. No random number
depends on the numbers of other actors (see chance.py), so the rest of the run stays the same, as far as possible.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .coroutines import Process


class Fault(NamedTuple):
    """A fault that the simulator decided on."""

    when: float
    name: str
    about: str = ""

    def __str__(self) -> str:
        """For people."""
        return f"{self.name}: {self.about}" if self.about else self.name


class Section(NamedTuple):
    """One use of a lock by a worker."""

    when: float  # the world's time at its start
    worker: str
    number: int
    clock: float  # the same by its process's clock
    text: str  # for people: the plan of the worker

    @property
    def name(self) -> str:
        """The name of the section in the trace."""
        return f"{self.worker}#{self.number}"


@dataclass(frozen=True)
class Plan:
    """A repetition with these sections and faults only, up to the first break of this rule."""

    sections: tuple[Section, ...]
    faults: frozenset[str]
    rule: int | None = None

    def of(self, worker: str) -> list[Section]:
        """Return the sections of this worker, in order."""
        return [section for section in self.sections if section.worker == worker]


def _ignore(_event: str, _process: Process | None) -> None:
    pass


@dataclass
class Record:
    """The decisions of a run, counted and listed."""

    plan: Plan | None
    note: Callable[..., None]
    counts: Counter[str] = field(default_factory=Counter[str])
    faults: list[Fault] = field(default_factory=list[Fault])
    sections: list[Section] = field(default_factory=list[Section])
    meets: Callable[[str, Process | None], None] = _ignore
    """Called with each event, and with the process whose claims it concerns; None: all processes."""

    def happens(self, when: float, kind: str, name: str, about: str = "") -> bool:
        """Whether the plan has this fault; if so, record the fault."""
        if self.plan is not None and name not in self.plan.faults:
            return False
        self.counts[kind] += 1
        self.faults.append(Fault(when, name, about))
        self.note("FAULT %s", self.faults[-1])
        return True

    def begins(self, section: Section) -> None:
        """Record the start of a section."""
        self.sections.append(section)
        self.note("%s begins: %s", section.name, section.text)

    def planned(self, worker: str) -> Iterator[Section] | None:
        """Return the sections of this worker in the plan; None if there is no plan, so that the worker decides."""
        return None if self.plan is None else iter(self.plan.of(worker))
