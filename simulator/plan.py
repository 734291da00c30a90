"""What happened by decision in a run, and what of it shall happen again.

Theory. A run is made by its *sections* (a worker goes for a lock, at a time of its process's clock) and its *faults*.
Both have names that a repetition knows again: `c1/w0#5` is the fifth section of a worker, `request lost: c1/w0#5.2`
what befell the second message in it, `strike 12` the twelfth fault that struck from outside. A `Record` lists them;
a `Plan` says which of them happen when the seed is run again, and all others don't. Since no number depends on what
others drew (see chance.py), the rest stays as it was, as far as it can.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Fault(NamedTuple):
    """Something that went wrong, by decision."""

    when: float
    name: str
    about: str = ""

    def __str__(self) -> str:
        """For people."""
        return f"{self.name}: {self.about}" if self.about else self.name


class Section(NamedTuple):
    """One use of a lock by a worker."""

    when: float  # the world's time at which it begins
    worker: str
    number: int
    clock: float  # the same by its process's clock
    text: str  # for people: what it is about to do

    @property
    def name(self) -> str:
        """What the trace calls it."""
        return f"{self.worker}#{self.number}"


@dataclass(frozen=True)
class Plan:
    """A repetition with these sections and faults only, up to the first break of this rule."""

    sections: tuple[Section, ...]
    faults: frozenset[str]
    rule: int | None = None

    def of(self, worker: str) -> list[Section]:
        """The sections of this worker, in order."""
        return [section for section in self.sections if section.worker == worker]


@dataclass
class Record:
    """What a run decided, counted and listed."""

    plan: Plan | None
    note: Callable[..., None]
    counts: Counter[str] = field(default_factory=Counter[str])
    faults: list[Fault] = field(default_factory=list[Fault])
    sections: list[Section] = field(default_factory=list[Section])

    def happens(self, when: float, kind: str, name: str, about: str = "") -> bool:
        """Whether the plan has this fault; if so, it's recorded."""
        if self.plan is not None and name not in self.plan.faults:
            return False
        self.counts[kind] += 1
        self.faults.append(Fault(when, name, about))
        self.note("FAULT %s", self.faults[-1])
        return True

    def begins(self, section: Section) -> None:
        """A section begins."""
        self.sections.append(section)
        self.note("%s begins: %s", section.name, section.text)

    def planned(self, worker: str) -> Iterator[Section] | None:
        """The sections that this worker shall have; None if it decides itself."""
        return None if self.plan is None else iter(self.plan.of(worker))
