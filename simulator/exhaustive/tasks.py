"""The coroutines of one process: they run until they wait for a reply, an action of a user, an event or a timer.

Theory. A process does nothing by itself. An input (a reply, an action, the moment in which it runs) resolves a future,
and then every coroutine that can go on goes on, in the order in which it became able to, until each of them waits.
So what a process does is a function of its inputs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

T = TypeVar("T")
MAX_STEPS: Final = 2000  # of one input: more are a loop without an end


class Future:
    """A later value, which one coroutine awaits. An exception as the value is raised in that coroutine."""

    __slots__ = ("done", "task", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.task: Task | None = None

    def resolve(self, value: Any) -> None:
        """Set the value, unless the future has one, and let its coroutine go on."""
        if not self.done:
            self.done, self.value = True, value
            if self.task is not None:
                self.task.tasks.ready.append(self.task)

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.done:
            yield self
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Cancelled(BaseException):
    """Thrown into a coroutine that waits: stands for a cancelled task or Ctrl-C of the real world."""


class Task:
    """A coroutine at work."""

    __slots__ = ("ended", "future", "name", "tasks", "work")

    def __init__(self, tasks: Tasks, work: Coroutine[Any, Any, Any], name: str) -> None:
        self.tasks, self.work, self.name = tasks, work, name
        self.ended = False
        self.future: Future | None = None  # for which it waits


class Tasks:
    """All coroutines of a process, and their timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.all: list[Task] = []
        self.ready: deque[Task] = deque()
        self.timers: list[tuple[float, Future, Any]] = []
        self.current: Task | None = None
        self.failed = ""  # the error that ended a coroutine

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Let one more coroutine run."""
        task = Task(self, work, name)
        self.all.append(task)
        self.ready.append(task)

    def cancel(self, name: str) -> None:
        """Cancel what the coroutine of this name waits for."""
        (future,) = (task.future for task in self.all if task.name == name)
        assert future is not None
        future.resolve(Cancelled())

    def at(self, when: float, future: Future, value: Any) -> None:
        """Resolve the future with this value once the process runs at this time or later."""
        if when != FOREVER:
            self.timers.append((when, future, value))

    @property
    def next_timer(self) -> float:
        """The time of the first timer that still matters."""
        self.timers = [each for each in self.timers if not each[1].done]
        return min((when for when, _, _ in self.timers), default=FOREVER)

    def run(self) -> None:
        """Let every coroutine run until it waits. A reply that has arrived goes before a timer that is due."""
        for _ in range(MAX_STEPS):
            while self.ready:
                self._step(self.ready.popleft())
            if self.next_timer > self.now:
                return
            _, future, value = min(self.timers, key=lambda each: each[0])
            future.resolve(value)
        self.failed = self.failed or "a process runs without an end"

    def _step(self, task: Task) -> None:
        self.current = task
        try:
            future: Future = task.work.send(None)
            if future.done:
                self.ready.append(task)
            else:
                future.task, task.future = task, future
        except StopIteration:
            self._end(task)
        except Exception as error:  # noqa: BLE001 (a bug of the code under test: the search reports it)
            self._end(task)
            self.failed = self.failed or f"{task.name} ended with {error!r}"
        finally:
            self.current = None

    def _end(self, task: Task) -> None:
        task.ended = True
        self.all.remove(task)

    def close(self) -> None:
        """Drop all coroutines."""
        for task in self.all:
            with contextlib.suppress(BaseException):
                task.work.close()
        self.all.clear()
        self.ready.clear()
        self.timers.clear()


class Event:
    """See AutoResetEvent."""

    __slots__ = ("is_set", "tasks", "waiter")

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.is_set = False
        self.waiter: Future | None = None

    def set(self) -> None:
        """See AutoResetEvent."""
        if self.waiter is not None and not self.waiter.done:
            self.waiter.resolve(True)
        else:
            self.is_set = True

    async def wait(self, until: float) -> bool:
        """See AutoResetEvent."""
        if self.is_set:
            self.is_set = False
            return True
        future = self.waiter = Future()
        self.tasks.at(until, future, False)
        try:
            was_set: bool = await future
        finally:
            self.waiter = None
        return was_set


class Runtime:
    """See Runtime: of a process whose time stands still while it runs."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.mutex = contextlib.nullcontext()

    def now(self) -> float:
        """See Runtime."""
        return self.tasks.now

    def event(self) -> Event:
        """See Runtime."""
        return Event(self.tasks)

    def holds_mutex(self) -> bool:
        """See Runtime."""
        return False

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await Event(self.tasks).wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, on_end: Callable[[], None]) -> None:
        """See Runtime."""

        async def work_then_end() -> None:
            try:
                await work()
            finally:
                on_end()

        self.tasks.spawn(work_then_end(), name.removeprefix("interlock-"))

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""
        callback(subject)

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime. Nothing blocks here."""
        return work()

    def reset_after_fork(self) -> bool:
        """See Runtime. Nothing forks here."""
        return True

    async def close(self) -> None:
        """See Runtime. The coroutines end with their process."""
