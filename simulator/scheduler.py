"""Virtual time: a heap of later events. No asyncio, no threads, no real clock.

Theory. Each happening is an event: (time, actor, action). The world takes the earliest event, sets its clock to the
time of the event, and runs the action. A coroutine runs until it parks on a `Future`; the code that resolves the future
schedules the coroutine's next step. So every run of one seed is the same run, and the cost of a virtual minute is the
cost of its events.

Rule. An event of a process waits while the process is paused, and is dropped once the process has crashed. The events
that piled up during a pause happen after the pause in any order: a timer may fire before the reply of its wait.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from .chance import STEP, TIE, Actor, Chance
from .coroutines import Process, Task, Timer

if TYPE_CHECKING:
    from collections.abc import Callable

LATENCY: Final = 50e-6  # seconds from a cause to the step of a coroutine, on average


class World:
    """The time, the chance and the later events of a run."""

    def __init__(self, seed: int) -> None:
        self.chance = Chance(seed)
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self.outside = Actor(self, "the world")
        self.acting: Actor = self.outside  # whose numbers the core draws
        self.current: Task | None = None
        self.failed: Callable[[Task, Exception], None] = _raise
        self.after_step: Callable[[Process], None] = lambda _process: None  # after each event in a process
        self._heap: list[tuple[float, float, int, Callable[[], None], Process | None]] = []
        self._pushed = 0

    def at(self, when: float, action: Callable[[], None], process: Process | None = None) -> None:
        """Run this at that time, in this process or, with None, in the world outside."""
        self._pushed += 1
        heapq.heappush(self._heap, (max(self.now, when), 0.0, self._pushed, action, process))

    def soon(self, action: Callable[[], None], actor: Task | Process) -> None:
        """Run this in a moment, in the actor's process."""
        process = actor.process if isinstance(actor, Task) else actor
        self.at(self.now + actor.draw(STEP) * 2 * LATENCY, action, process)

    def run(self, until: float) -> None:
        """Run all events up to this time."""
        heap, pop, events = self._heap, heapq.heappop, self.events
        while heap and heap[0][0] <= until and not self.stopped:
            when, _, number, action, process = pop(heap)
            if isinstance(action, Timer) and action.future.done:
                continue
            self.now = when
            if process is None:
                self.acting = self.outside
                action()
            elif process.paused_until > when and process.alive:
                heapq.heappush(heap, (process.paused_until, process.draw(TIE), number, action, process))
                continue
            elif process.alive:
                self.acting = process
                action()
                self.after_step(process)
            else:
                continue
            events += 1
        self.events = events
        if not self.stopped:
            self.now = max(self.now, until)

    def clear(self) -> None:
        """Drop all events."""
        self._heap.clear()
        self.after_step, self.failed = (lambda _process: None), _raise


def _raise(_: Task, error: Exception) -> None:
    raise error
