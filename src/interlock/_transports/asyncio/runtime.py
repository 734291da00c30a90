"""How tasks wait, and how they run work in the background: see `Runtime`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from interlock._protocol.log import log
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER, now
from interlock.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class NullMutex:
    """A mutex that does nothing: one thread runs all tasks of a loop, so there is no other thread to exclude."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class AutoResetEvent:
    """A flag that one task waits for. The end of the wait resets the flag.

    The loop ends the wait in a callback of its own. `Future.set_result` has two steps: it stores the result, then it
    schedules the waiting task. A signal handler that raises between the two steps makes asyncio forget that task for
    ever: not even `cancel` ends it. So the task that calls `set` schedules only a callback, which may run twice.
    """

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Set the flag, and wake the task that waits for it."""
        self._is_set = True
        try:
            self._wake()
        except BaseException:  # a signal handler raised: the callback is scheduled, or not
            self._wake()
            raise

    def _wake(self) -> None:
        waiter = self._waiter
        # A loop may be closed while tasks wait there. Nobody can wake these, and the exit of the process must go on.
        if waiter is not None and not waiter.done() and not (loop := waiter.get_loop()).is_closed():
            loop.call_soon(end_wait, waiter)

    async def wait(self, until: float) -> bool:
        """Wait for the flag until this time at the latest, and reset it. Returns False if it was not set in time."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None
            if until != FOREVER:
                timer = loop.call_later(max(0.0, until - now()), end_wait, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        was_set, self._is_set = self._is_set, False
        return was_set


def end_wait(waiter: asyncio.Future[None]) -> None:
    """Wake the task that waits for this future, unless it is awake."""
    if not waiter.done():
        waiter.set_result(None)


class AsyncioRuntime:
    """See Runtime: tasks wait on the running loop, and background work runs in tasks."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = now
        self.event = AutoResetEvent
        self.mutex = NullMutex()
        self._tasks: set[asyncio.Future[Any]] = set()

    def holds_mutex(self) -> bool:
        """See Runtime."""
        return False

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await AutoResetEvent().wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, on_end: Callable[[], None]) -> None:
        """See Runtime."""
        self.task(work(), name).add_done_callback(lambda _: on_end())

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""

        async def run_and_log() -> None:
            try:
                result = callback(subject)
                if asyncio.iscoroutine(result):
                    await result
            except Exception:  # noqa: BLE001 (logged)
                log.exception(
                    "interlock: the callback %r failed", callback, extra=getattr(subject, "_log_fields", None)
                )

        # Not by the loop's own factory: an eager task would call it here and now, before other losses are reported.
        self._keep(asyncio.Task(run_and_log(), loop=self.loop, name="interlock-callback"))

    def task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a background task, and keep a reference to the task until its end."""
        try:
            return self._keep(self.loop.create_task(work, name=name))
        except BaseException:  # the loop is closed; without this line, Python would warn of a coroutine nobody awaited
            work.close()
            raise

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a loop may end without close()
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, Disconnected | LockError):  # a pool raises these in its callers
            log.error("interlock: a background task failed", exc_info=error)

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime."""
        return await asyncio.to_thread(work)

    def reset_after_fork(self) -> bool:
        """See Runtime. The loop and all its tasks belong to the parent."""
        return False

    async def close(self) -> None:
        """See Runtime."""
        await cancel(self._tasks)


async def cancel(running: set[asyncio.Future[Any]]) -> None:
    """Cancel these tasks, except the one that calls, and wait until they have ended."""
    tasks = [task for task in running if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
