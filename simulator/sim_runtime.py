"""How the coroutines of a simulated process wait: see `Runtime`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from interlock._protocol.timing import FOREVER

from .coroutines import Future, Process, Task, Timer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from .scheduler import World

T = TypeVar("T")


class SimEvent:
    """See AutoResetEvent. Every wait passes the point `before_send` first."""

    __slots__ = ("is_set", "process", "waiter")

    def __init__(self, process: Process) -> None:
        self.process = process
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
        task = current(self.process.world)
        task.sends = False
        if task.traps:
            await task.before_send()
        if self.is_set:
            self.is_set = False
            return True
        future = self.waiter = Future()
        if until != FOREVER:
            self.process.world.at(self.process.when(until), Timer(future, False), self.process)
        try:
            raised: bool = await future
        finally:
            self.waiter = None
        return raised


class SimRuntime:
    """See Runtime: a process of a simulated world, with its own clock."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.now = process.clock
        self.mutex = contextlib.nullcontext()

    def event(self) -> SimEvent:
        """See Runtime."""
        return SimEvent(self.process)

    def holds_mutex(self) -> bool:
        """See Runtime."""
        return False

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await SimEvent(self.process).wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, on_end: Callable[[], None]) -> None:
        """See Runtime."""

        async def work_then_end() -> None:
            try:
                await work()
            finally:
                on_end()

        self.process.spawn(work_then_end(), name)

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""

        def call() -> None:
            callback(subject)

        self.process.world.soon(call, self.process)

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime. Nothing blocks here."""
        return work()

    def reset_after_fork(self) -> bool:
        """See Runtime. Nothing forks here."""
        return True

    async def close(self) -> None:
        """See Runtime. Background work ends with its process."""


def current(world: World) -> Task:
    """The coroutine that runs now."""
    assert world.current is not None
    return world.current
