"""A loop that runs one task whenever the task is due. Each task has its own loop, so no slow task delays another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.retries import Requests
    from interlock._protocol.runtime import AutoResetEvent, Runtime


class PeriodicTask(Protocol):
    """A task that is due from time to time: `due()` says when, and a worker then calls `tick()`."""

    def due(self) -> float: ...
    async def tick(self) -> None: ...


class Worker:
    """One loop, which runs one task whenever the task is due, until the session is closed."""

    def __init__(self, runtime: Runtime, name: str, requests: Requests, start_others: Callable[[], None]) -> None:
        self.runtime = runtime
        self.name = name  # of its thread or task
        self.requests = requests  # of its client: once that is over, the loop ends
        self.start_others = start_others  # starts the other workers of the session whose tasks are due at some time
        self.task: PeriodicTask
        self.wakeup: AutoResetEvent = runtime.event()
        self.asleep_until = FOREVER
        self.called_for = FOREVER  # when the loop was to be awake, by the calls of `wake_at` since it last was
        self.started = False  # a loop is starting or running: start no other
        self.running = False

    def _is_over(self) -> bool:
        """Whether the client is closed, or began in a parent process."""
        if not KNOWN[0]:
            notice()
        return self.requests.closed

    def wake_at(self, due: float) -> None:
        """Make the loop be awake at this time: start the loop, or wake it."""
        if due < self.asleep_until:
            if not self.started:
                if self._is_over():  # a loop would end at once
                    return
                with self.runtime.mutex:
                    if not self.started:
                        self.started = True
                        try:
                            self.runtime.spawn(self.run, self.name, self._on_ended)
                        except BaseException:  # an interrupt: the loop may have begun, or not
                            self.started = False
                            raise
                self.start_others()
            self.called_for = min(self.called_for, due)
            self.wakeup.set()

    @property
    def late_since(self) -> float:
        """When the loop was to be awake, if that is over: it has not run since then. Only for messages."""
        return min(self.asleep_until, self.called_for)

    def _on_ended(self) -> None:
        """Note that the loop ended, or was cancelled with all tasks. The next `wake_at` starts a new loop."""
        if not self.running:
            self.started, self.asleep_until, self.called_for = False, FOREVER, FOREVER

    async def run(self) -> None:
        """Run the task whenever the task is due, until the session is closed. A second loop ends at once."""
        with self.runtime.mutex:
            if self.running:
                return
            self.running = True
        try:
            await self._run()
        finally:
            self.running = False

    async def _run(self) -> None:
        while not self._is_over():
            try:
                self.asleep_until = self.called_for = FOREVER  # awake: each call of `wake_at` now sets the event
                self.asleep_until = due = self.task.due()
                await self.wakeup.wait(due)
                if not self._is_over():  # a fork may have come meanwhile
                    await self.task.tick()
            except Exception:  # noqa: BLE001 (logged) a bug in interlock must not end the renewal of leases
                log.exception("interlock: %s failed and goes on", self.name)
                await self.runtime.sleep_until(self.runtime.now() + 0.1)
