"""Virtual time: coroutines, processes and a heap of what happens next. No asyncio, no threads, no real clock.

Theory. All that happens is an event: (when, who, what). The world takes the earliest, moves its clock there and
runs it. A coroutine runs until it parks on a `Future`; whoever resolves that schedules its next step. So every
run of one seed is the same run, and a minute costs what happens in it.

Rules.
 1. An event that belongs to a process waits while that process is paused, and is dropped when it has crashed.
    What piled up during a pause happens after it in any order: a timer may come before the reply it waited for.
 2. A step comes a moment after what caused it, as it does with threads and loops, and who is first is chance.
 3. A cancellation is an exception thrown in where a coroutine is parked, even if its reply is already there.
 4. An *ambush* happens right after a coroutine's next parking: in the moment after a request was sent.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

LATENCY: Final = 50e-6  # seconds from a cause to the step of a coroutine, on average


class Cancelled(BaseException):
    """Thrown into a coroutine: what a cancelled task or Ctrl-C is in the real world."""


class Process:
    """A client's process: it has a clock, may be paused, and may crash."""

    def __init__(self, world: World, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self.world = world
        self.name = name
        self.offset = offset
        self.rate = rate
        self.alive = True
        self.paused_until = 0.0
        self.pauses = 0
        self.tasks: list[Task] = []

    def clock(self) -> float:
        """Its own clock now: it started anywhere and runs a little fast or slow."""
        return self.offset + self.world.now * self.rate

    def when(self, clock: float) -> float:
        """The world's time at which its clock will show this."""
        return (clock - self.offset) / self.rate

    def pause(self, seconds: float) -> None:
        """Stand still, as with SIGSTOP; its clock goes on."""
        self.paused_until = max(self.paused_until, self.world.now + seconds)
        self.pauses += 1

    @property
    def awake(self) -> bool:
        """Whether its code can run now."""
        return self.alive and self.paused_until <= self.world.now

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Task:
        """Run a coroutine in this process."""
        task = Task(self, work, name)
        self.tasks.append(task)
        self.world.soon(task.step, self)
        return task


class Future:
    """A value to come, for one coroutine that awaits it. An exception as its value is raised there."""

    __slots__ = ("done", "task", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.task: Task | None = None

    def resolve(self, value: Any) -> None:
        """The first one counts."""
        if not self.done:
            self.done, self.value = True, value
            if self.task is not None:
                self.task.process.world.soon(self.task.step, self.task.process)

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.done:
            yield self
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Task:
    """A coroutine at work in a process."""

    __slots__ = ("ambush", "doom", "ended", "name", "parked", "process", "subject", "work")

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> None:
        self.process = process
        self.work = work
        self.name = name
        self.parked: Future | None = None
        self.doom: BaseException | None = None
        self.ambush: Callable[[], None] | None = None
        self.ended = False
        self.subject: Any = None  # what its owner wants to remember of it

    def step(self) -> None:
        """Run until the next parking."""
        world = self.process.world
        world.current = self
        doom, self.doom = self.doom, None
        try:
            future: Future = self.work.throw(doom) if doom is not None else self.work.send(None)
            future.task, self.parked = self, future
        except (StopIteration, Cancelled):
            self.ended = True
        except Exception as error:  # noqa: BLE001 (a bug of the code under test, or of the scenario)
            self.ended = True
            world.failed(self, error)
        finally:
            world.current = None
        ambush, self.ambush = self.ambush, None
        if ambush is not None and not self.ended:
            ambush()

    def cancel(self) -> None:
        """Throw Cancelled in, where it is parked now."""
        future = self.parked
        if self.ended or future is None or self.doom is not None:
            return
        self.doom = Cancelled()
        if not future.done:  # else its step is scheduled already
            future.done = True
            self.process.world.soon(self.step, self.process)


class World:
    """Time, chance, and what happens next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.current: Task | None = None
        self.failed: Callable[[Task, Exception], None] = _raise
        self.after_event: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, float, int, Callable[[], None], Process | None]] = []
        self._pushed = 0

    def at(self, when: float, action: Callable[[], None], process: Process | None = None) -> None:
        """Do this then, in this process or, with None, in the world outside."""
        self._pushed += 1
        heapq.heappush(self._heap, (max(when, self.now), 0.0, self._pushed, action, process))

    def soon(self, action: Callable[[], None], process: Process) -> None:
        """Do this in a moment."""
        self.at(self.now + self.random.random() * 2 * LATENCY, action, process)

    def run(self, until: float) -> None:
        """Let everything happen that happens before this time."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, number, action, process = heapq.heappop(heap)
            self.now = when
            if process is not None:
                if not process.alive:
                    continue
                if process.paused_until > when:
                    heapq.heappush(heap, (process.paused_until, self.random.random(), number, action, process))
                    continue
            self.events += 1
            action()
            self.after_event()
        self.now = max(self.now, until)


def _raise(_: Task, error: Exception) -> None:
    raise error
