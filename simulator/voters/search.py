"""The search: breadth first over all states, and the shortest story of a broken promise."""

from __future__ import annotations

import gc
import re
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

from .member import FENCES_PER_TICK
from .world import State, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rules import Bounds, Rule
    from .world import Next


class Found(NamedTuple):
    """The result of a search."""

    broken: str
    """The first promise that was broken; "" if none was."""
    story: list[str]
    """The shortest sequence of events that breaks it."""
    states: int
    transitions: int
    steps: int
    """The number of events up to which the search has seen every state."""
    seconds: float
    complete: bool
    """Whether the search has visited all states within the bounds, however many steps they need."""


def search(
    rule: Rule,
    bounds: Bounds,
    *,
    steps: int = 10**9,
    seconds: float = 1e9,
    most: int = 10**9,
    prefix: tuple[str, ...] = (),
    say: Callable[[str], object] = str,
) -> Found:
    """Visit every state within the bounds that so many steps reach, for so many seconds of the processor at most.

    `prefix` are the first events, by the beginnings of their texts: the steps count from the state after them.
    """
    enabled = gc.isenabled()
    gc.disable()  # it would take longer than the search, and tuples have no cycles
    try:
        return _Search(World(rule, bounds), prefix).run(steps, seconds, most, say)
    finally:
        if enabled:
            gc.enable()


class _Search:
    def __init__(self, world: World, prefix: tuple[str, ...]) -> None:
        self.world = world
        self.first, self.told = world.first_state(), list[str]()
        for text in prefix:
            step = next(each for each in world.next_states(self.first) if each.text.startswith(text))
            self.first = step.after
            self.told.append(step.text)
        first = world.canonical(self.first)
        self.states = [first]
        self.numbers = {first: 0}
        self.parents = array("l", [-1])

    def run(self, steps: int, seconds: float, most: int, say: Callable[[str], object]) -> Found:
        """Search, level by level."""
        started = said = time.process_time()
        transitions = at = depth = 0
        broken, story, ended = "", list[str](), False
        while depth < steps and at < len(self.states) and not broken and not ended:
            level_end = len(self.states)
            while at < level_end and not broken and not ended:
                for each in self.world.next_states(self.states[at]):
                    transitions += 1
                    if each.broken:
                        broken, story = each.broken, self._story(at, each)
                        break
                    self._note(each.after, at)
                at += 1
                if not at & 1023:
                    now = time.process_time()
                    ended = now - started > seconds or len(self.states) > most
                    if now > said + 2:
                        said = now
                        say(f"{depth} steps, {len(self.states):,} states, {level_end - at:,} to do in this step")
            depth += not broken and not ended
        took = time.process_time() - started
        return Found(broken, story, len(self.states), transitions, depth, took, at == len(self.states))

    def _note(self, after: State, at: int) -> None:
        after, new = self.world.canonical(after), len(self.states)
        if self.numbers.setdefault(after, new) == new:
            self.states.append(after)
            self.parents.append(at)

    def _story(self, at: int, last: Next) -> list[str]:
        """Repeat the events that led here, with the same names of clients and members throughout."""
        path = list[State]()
        while at > 0:
            path.append(self.states[at])
            at = self.parents[at]
        step, state, lines, ticks = last, self.first, list(self.told), self.told.count("tick")
        for wanted in (*reversed(path), None):
            step = next(
                each
                for each in self.world.next_states(state)
                if (each.broken == last.broken if wanted is None else self.world.canonical(each.after) == wanted)
            )
            state = step.after
            ticks += step.text == "tick"
            lines.append(_with_fences_since_first(step.text, ticks))
        return [*lines, f"broken: {step.broken}"]


def _with_fences_since_first(text: str, ticks: int) -> str:
    """Return the text of an event, with fences relative to the first state in place of now."""
    return re.sub(r"(?<=fence )-?\d+", lambda found: str(int(found[0]) + ticks * FENCES_PER_TICK), text)
