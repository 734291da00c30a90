"""How code waits and runs in the background: the protocol `Runtime`, which each mode implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager

T = TypeVar("T")


class AutoResetEvent(Protocol):
    """A flag that one thread or task waits for. Setting a set flag changes nothing."""

    def set(self) -> None:
        """Set the flag, and wake the thread or task that waits for the flag."""
        ...

    async def wait(self, until: float) -> bool:
        """Wait for the flag until this time at the latest, and reset it. Returns False if it was not set in time."""
        ...


class Runtime(Protocol):
    """How code waits and runs in the background: with threads, in an asyncio loop, or in a simulation."""

    @property
    def mutex(self) -> AbstractContextManager[object]:
        """A lock for compound steps on data that several threads share; never held during I/O."""
        ...

    def holds_mutex(self) -> bool:
        """Whether the current thread holds the mutex: then this code runs in a signal handler or in a finalizer."""
        ...

    def now(self) -> float:
        """Seconds on a clock that nobody can set and that runs on while the machine sleeps."""
        ...

    def event(self) -> AutoResetEvent:
        """A new event, not set."""
        ...

    async def sleep_until(self, until: float) -> None:
        """Wait until the clock of `now` shows this time."""
        ...

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, on_end: Callable[[], None]) -> None:
        """Run `work` in the background, and call `on_end` when the work ends for any reason."""
        ...

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """Call a user's callback where the callback can neither delay nor break interlock."""
        ...

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Run a function that blocks, and return its result."""
        ...

    def reset_after_fork(self) -> bool:
        """In a child after a fork: drop everything of the parent. Returns whether the runtime works in the child."""
        ...

    async def close(self) -> None:
        """End the work in the background, within about a second."""
        ...
