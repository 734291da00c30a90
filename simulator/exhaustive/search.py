"""The search itself: breadth first over all states, and the shortest story of a broken promise."""

from __future__ import annotations

import gc
import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from simulator.server import CLOCK_START

from .clients import TICKS, Bounds, Design, State, World
from .column import NEVER, TICK_US

if TYPE_CHECKING:
    from collections.abc import Generator

    from .clients import Next
    from .column import Event

STUCK = "a new client would never get the lock"
STALE = "a majority would grant a new client a fence that is no higher"


class Found(NamedTuple):
    """The result of a search."""

    broken: str
    """The first promise that was broken; "" if none was."""
    story: list[str]
    """The shortest sequence of events that breaks it."""
    states: int
    transitions: int
    runs: int
    """How often the Lua ran."""
    seconds: float
    complete: bool
    """Whether the search has visited all states."""


def search(bounds: Bounds, design: Design | None = None, *, most: int = 10**9) -> Found:
    """Visit every state within these bounds, or up to `most` states."""
    started = time.process_time()
    with _without_garbage_collection():
        return _Search(World(bounds, design or Design())).run(most, started)


@contextmanager
def _without_garbage_collection() -> Generator[None, None, None]:
    """Stop the garbage collector: it would take longer than the search, and millions of tuples have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Search:
    def __init__(self, world: World) -> None:
        self.world = world
        first = world.canonical(world.first_state())
        self.states = [first]
        self.numbers = {first: 0}
        self.parents = array("l", [-1])
        self.checked: set[tuple[tuple[int, ...], int]] = set()

    def run(self, most: int, started: float) -> Found:
        broken, story, transitions, at = "", list[str](), 0, 0
        while at < len(self.states) < most and not broken:
            state = self.states[at]
            if broken := self._broken_after_quiet(state):
                story = self._story(at, None, broken)
            for each in () if broken else self.world.next_states(state):
                transitions += 1
                _, _, after, broken = each
                if broken:
                    story = self._story(at, each, broken)
                    break
                after, new = self.world.canonical(after), len(self.states)
                if self.numbers.setdefault(after, new) == new:
                    self.states.append(after)
                    self.parents.append(at)
            at += 1
        took, runs = time.process_time() - started, self.world.columns.lua.runs
        return Found(broken, story, len(self.states), transitions, runs, took, at == len(self.states))

    def _broken_after_quiet(self, state: State) -> str:
        """Return the promise that will be broken if nothing happens for longer than a ttl; "" if none."""
        key = state.nodes, state.last
        if key in self.checked:
            return ""
        self.checked.add(key)
        lowest, second, _ = sorted(map(self.world.columns.fence_after_quiet, state.nodes))
        return STUCK if lowest == NEVER else STALE if second <= state.last else ""

    # For people

    def _story(self, at: int, last: Next | None, broken: str) -> list[str]:
        """Repeat the events that led to this state, now with the same names of clients and servers throughout."""
        path = list[State]()
        while at > 0:
            path.append(self.states[at])
            at = self.parents[at]
        state, ticks, lines = self.world.first_state(), 0, list[str]()
        for wanted in reversed(path):
            next_states = self.world.next_states(state)
            who, event, state, _ = next(each for each in next_states if self.world.canonical(each[2]) == wanted)
            ticks += event is TICKS
            lines.append(_line(who, event, ticks))
        if last is not None:
            who, event = next((who, event) for who, event, _, broken in self.world.next_states(state) if broken)
            lines.append(_line(who, event, ticks))
        return [*lines, f"broken: {broken}"]


def _line(who: str, event: Event, ticks: int) -> str:
    """Return one event as text, such as `X gets A1's vote: [1, 3000001]`, with fences in µs since the first state."""
    what, reply = event
    shift = ticks * TICK_US
    if not who:
        return f"tick {ticks}"
    if what == "holds":
        return f"  {who} holds the lock, fence {reply + shift}"
    if reply is None:
        return f"  {who} {what}"
    words = ", ".join(
        str(each - CLOCK_START + shift if isinstance(each, int) and each > CLOCK_START // 2 else each) for each in reply
    )
    return f"  {who} gets {what}: [{words}]"
