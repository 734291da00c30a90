"""The record of a run: its trace, the rules that it broke, and the order in which the server ran scripts."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from simulator.plan import Plan
    from simulator.scheduler import World

MAX_VIOLATIONS: Final = 20  # violations after which a run ends


class Violation(NamedTuple):
    """One break of a rule."""

    when: float
    rule: int
    """Its number: 14 is S14 of `invariants/__init__.py`."""
    text: str

    def __str__(self) -> str:
        return f"[{self.when:.6f}] rule S{self.rule}: {self.text}"


class Trace:
    """The lines of a run: kept in parts, and formatted only when read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan: Plan | None = None
        self.over = False
        self.violations: list[Violation] = []
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []
        self._order = hashlib.blake2b(digest_size=8)

    def note(self, text: str, *parts: object) -> None:
        """Add a line to the trace. The caller must not change its parts later."""
        if not self.over:  # the clean-up of a run is no part of its trace
            self._lines.append((self.world.now, text, parts))

    def violated(self, rule: int, text: str) -> None:
        """Report the break of a rule."""
        if self.over:
            return
        self.note("VIOLATION of rule S%d: %s", rule, text)
        self.violations.append(Violation(self.world.now, rule, text))
        if len(self.violations) == MAX_VIOLATIONS or (self.plan is not None and rule == self.plan.rule):
            self.world.stopped = self.over = True

    def served(self, *what: object) -> None:
        """Note the next work of the server. The interleaving is the order of all work, whatever the times."""
        self._order.update(repr(what).encode())

    def interleaving(self) -> str:
        """Return a hash of the interleaving."""
        return self._order.hexdigest()

    def lines(self) -> list[str]:
        """Return the trace as text."""
        return [f"{when:12.6f}  {text % parts if parts else text}" for when, text, parts in self._lines]
