"""From a failing seed to its smallest trace: which sections and which faults does it take to break the rule?

Theory. Delta debugging (Zeller and Hildebrandt, 2002). A run is the list of its sections and faults (see plan.py).
Leave out a half of the list, a quarter, ... one item, run the seed again, and keep the shorter list if the run still
breaks the same rule. Leave out whole clients first, since each has many sections; then sections, then faults, and so on
until every item is necessary. Every try ends at the first break of the rule, so shorter lists make shorter tries.

Rules. (a) A try has only faults of the first run. (b) Sections and strikes keep their times, so the remaining ones
overlap as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from .plan import Fault, Plan, Section
from .simulation import Report, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
TRIES: Final = 3000  # runs of one shrinking at most


@dataclass(frozen=True)
class Shrunk:
    """A failing seed, and the smallest part of its run that fails in the same way."""

    original: Report
    report: Report
    """The smallest run: its `violations`, its `trace`, and the `end` of it in virtual seconds."""
    rule: int
    tries: int
    """How many runs the shrinking took."""

    @property
    def faults(self) -> list[Fault]:
        """The faults that are necessary for the failure."""
        return self.report.faults

    @property
    def sections(self) -> list[Section]:
        """The sections that are necessary for the failure."""
        return self.report.sections

    @property
    def clients(self) -> list[str]:
        """The processes that work in the smallest run."""
        return sorted({section.worker.partition("/")[0] for section in self.sections})

    @property
    def story(self) -> list[str]:
        """Describe the smallest run for people."""
        events = [
            *((section.when, f"{section.name}: {section.text}") for section in self.sections),
            *((fault.when, str(fault)) for fault in self.faults),
            *((violation.when, f"rule S{violation.rule}: {violation.text}") for violation in self.report.violations),
        ]
        before, clients = self.original, ", ".join(self.clients) or "nobody"
        about = f"seed {before.seed} ({before.subject}, {before.profile})"
        workers = {section.worker for section in self.original.sections}
        return [
            f"{about} breaks rule S{self.rule}, shrunk in {self.tries} runs:",
            f"  before: {len(before.sections)} sections of {len(workers)} workers, {len(before.faults)} faults",
            f"  now: {len(self.sections)} sections of {clients}, {len(self.faults)} faults, {self.report.end:.3f} s",
            *(f"{when:12.6f}  {text}" for when, text in sorted(events, key=lambda event: event[0])),
        ]


def shrink(
    seed: int,
    profile: str | None = None,
    *,
    subject: str | None = None,
    world: str | None = None,
    rule: int | None = None,
    lua: Callable[[str], str] = str,
    tries: int = TRIES,
) -> Shrunk:
    """Find the smallest part of a failing run that breaks the same rule: `rule`, or the first broken rule.

    Raises ValueError if the run breaks no such rule.
    """
    original = simulate(seed, profile, subject=subject, world=world, lua=lua)
    broken = [violation for violation in original.violations if rule in {None, violation.rule}]
    if not broken:
        about = f"seed {seed} ({original.subject}, {original.profile})"
        raise ValueError(f"{about} breaks no rule" + (f" S{rule}" if rule else ""))
    search = _Search(original, broken[0].rule, lua, tries)
    sections = [section for section in original.sections if section.when <= broken[0].when]
    faults = [fault.name for fault in original.faults if fault.when <= broken[0].when]
    if not search.fails(sections, faults):  # then later decisions of the first run are needed, too
        sections, faults = original.sections, [fault.name for fault in original.faults]
        if not search.fails(sections, faults):
            raise AssertionError(f"seed {seed}: its repetition is another run; chance does not stay put")
    while True:
        before = len(sections), len(faults)
        for client in {section.worker.partition("/")[0] for section in sections}:
            others = [section for section in sections if section.worker.partition("/")[0] != client]
            if search.fails(others, faults):
                sections = others
        sections = smallest(sections, lambda fewer: search.fails(fewer, faults))  # noqa: B023 (called at once)
        faults = smallest(faults, lambda fewer: search.fails(sections, fewer))  # noqa: B023
        if before == (len(sections), len(faults)):
            assert search.best is not None
            return Shrunk(original, search.best, search.rule, search.tries)


def smallest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of the items that still fails: it leaves out halves, then quarters, and at last single items."""
    left = list(items)
    if left and fails([]):
        return []
    size = len(left)
    while size > 1:
        size = (size + 1) // 2
        start = 0
        while start < len(left):
            fewer = left[:start] + left[start + size :]
            if len(fewer) < len(left) and fails(fewer):
                left = fewer
            else:
                start += size
    return left


@dataclass
class _Search:
    """Tries, and the smallest run that failed."""

    original: Report
    rule: int
    lua: Callable[[str], str]
    most: int
    tries: int = 0
    best: Report | None = None
    _known: dict[tuple[frozenset[str], frozenset[str]], bool] = field(
        default_factory=dict[tuple[frozenset[str], frozenset[str]], bool]
    )

    def fails(self, sections: Sequence[Section], faults: Sequence[str]) -> bool:
        """Whether the run with only these breaks the rule."""
        key = frozenset(section.name for section in sections), frozenset(faults)
        if key not in self._known:
            if self.tries >= self.most:
                return False
            self.tries += 1
            plan = Plan(tuple(sections), key[1], self.rule)
            first = self.original
            report = simulate(first.seed, first.profile, subject=first.subject, lua=self.lua, plan=plan)
            self._known[key] = any(violation.rule == self.rule for violation in report.violations)
            if self._known[key]:
                self.best = report
        return self._known[key]
