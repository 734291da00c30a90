"""What a run tells: its trace, the rules that it broke, and in which order the server did its work."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from simulator.plan import Plan
    from simulator.scheduler import World

ENOUGH: Final = 20  # violations after which a run ends


class Violation(NamedTuple):
    """A rule is broken."""

    when: float
    rule: int
    text: str

    def __str__(self) -> str:
        return f"[{self.when:.6f}] rule {self.rule}: {self.text}"


class Trace:
    """Lines are kept as they come, and made into text when somebody asks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan: Plan | None = None
        self.over = False
        self.violations: list[Violation] = []
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []
        self._order = hashlib.blake2b(digest_size=8)

    def note(self, text: str, *parts: object) -> None:
        """A line of the trace. The parts must not change any more."""
        if not self.over:  # what is left of a run when it is taken apart is no part of it
            self._lines.append((self.world.now, text, parts))

    def violated(self, rule: int, text: str) -> None:
        """A rule is broken."""
        if self.over:
            return
        self.note("VIOLATION of rule %d: %s", rule, text)
        self.violations.append(Violation(self.world.now, rule, text))
        if len(self.violations) == ENOUGH or (self.plan is not None and rule == self.plan.rule):
            self.world.stopped = self.over = True

    def served(self, *what: object) -> None:
        """The server did this next: the interleaving is their order, whenever it was."""
        self._order.update(repr(what).encode())

    def interleaving(self) -> str:
        """A hash of it."""
        return self._order.hexdigest()

    def lines(self) -> list[str]:
        """The trace as text."""
        return [f"{when:12.6f}  {text % parts if parts else text}" for when, text, parts in self._lines]
