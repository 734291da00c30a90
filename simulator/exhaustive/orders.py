"""The search over all orders of events of processes and one server: the first story is the shortest.

The search is breadth first. From each state without a next event it also follows the way to the end: see `World.ends`.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

from .isolation import isolated
from .telling import tell
from .world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import Bounds, Event, State


class Found(NamedTuple):
    """The result of a search."""

    broken: str
    """The first rule that was broken; "" if none was."""
    story: list[str]
    """The shortest sequence of events that breaks it."""
    states: int
    transitions: int
    depth: int
    """The number of events of the longest of the shortest ways to a state."""
    ends: int
    """States from which the search followed the way to the end."""
    process_states: int
    process_steps: int
    runs: int
    """How often the Lua ran."""
    seconds: float
    complete: bool
    """Whether the search has visited all states."""


def search(
    bounds: Bounds,
    lua: Callable[[str], str] = str,
    *,
    most: int = 10**9,
    most_seconds: float = 1e9,
    say: Callable[[str], object] = str,
) -> Found:
    """Visit every state within these bounds, or up to `most` states, or for so many seconds of the processor.

    It calls `say` with its progress every two seconds.
    """
    with isolated():
        return _Search(World(bounds, lua)).run(most, most_seconds, say)


class _Search:
    def __init__(self, world: World) -> None:
        self.world = world
        self.states = [world.first_state()]
        self.numbers = {self.states[0]: 0}
        self.parents = [-1]
        self.events: list[Event | None] = [None]
        self.depths = [0]
        self.known: set[State] = set()  # from which everybody ends
        self.ends = 0

    def run(self, most: int, most_seconds: float, say: Callable[[str], object]) -> Found:
        started, said = time.process_time(), 0.0
        broken, story, transitions, at = "", list[str](), 0, 0
        world, states, numbers = self.world, self.states, self.numbers
        while at < len(states) < most and not broken:
            state, went_on = states[at], False
            for event, after, broken in world.next_states(state):
                transitions += 1
                if broken:
                    story = self._story(at, event, after, broken)
                    break
                new = len(states)
                went_on = True
                if numbers.setdefault(after, new) == new:
                    states.append(after)
                    self.parents.append(at)
                    self.events.append(event)
                    self.depths.append(self.depths[at] + 1)
            if not went_on and not broken and (broken := self._broken_at_end(state)):
                story = [*self._story(at, None, None, ""), f"broken, if everybody goes on from here: {broken}"]
            at += 1
            if at % 256 == 0:
                seconds = time.process_time() - started
                if seconds > most_seconds:
                    break
                if seconds > said + 2:
                    said = seconds
                    say(f"{len(states):,} states, {transitions:,} steps, {len(states) - at:,} to do")
        for each in world.automata:
            each.close()
        return Found(
            broken, story, len(states), transitions, self.depths[-1], self.ends,
            sum(len(each.views) for each in world.automata), sum(each.steps for each in world.automata),
            world.memory.runs, time.process_time() - started, at == len(states),
        )  # fmt: skip

    def _broken_at_end(self, state: State) -> str:
        """Return the rule that is broken on the way to the end from this state; "" if none is."""
        self.ends += 1
        return self.world.ends(state, self.known)

    # For people

    def _story(self, at: int, last: Event | None, after: State | None, broken: str) -> list[str]:
        path = list[int]()
        while at >= 0:
            path.append(at)
            at = self.parents[at]
        path.reverse()
        lines = list[str]()
        for before, number in itertools.pairwise(path):
            event = self.events[number]
            assert event is not None
            lines += tell(self.world, event, self.states[before], self.states[number])
        if last is not None and after is not None:
            lines += [*tell(self.world, last, self.states[path[-1]], after), f"broken: {broken}"]
        return lines
