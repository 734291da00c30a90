"""A loop that does one task whenever it is due. Each task has its own, so a silent server holds up nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.types import AutoResetEvent, Runtime


class PeriodicTask(Protocol):
    """Something that is due from time to time."""

    def due(self) -> float: ...
    async def tick(self) -> None: ...


class Worker:
    """One loop, which does one task whenever that is due, until its session is closed."""

    def __init__(
        self, runtime: Runtime, name: str, is_closed: Callable[[], bool], start_others: Callable[[], None]
    ) -> None:
        self.runtime = runtime
        self.name = name  # of its thread or task
        self.is_closed = is_closed  # whether the session is
        self.start_others = start_others  # the other workers of the session, as far as they have something to do
        self.task: PeriodicTask
        self.wakeup: AutoResetEvent = runtime.event()
        self.asleep_until = FOREVER
        self.started = False  # no other one is to be started
        self.running = False

    def wake_at(self, due: float) -> None:
        """Be awake at this time: start the loop, or wake it."""
        if due < self.asleep_until:
            if not self.started:
                with self.runtime.mutex:
                    if not self.started:
                        self.started = True
                        try:
                            self.runtime.spawn(self.run, self.name, self._on_ended)
                        except BaseException:  # an interrupt: it may have begun, or not
                            self.started = False
                            raise
                self.start_others()
            self.wakeup.set()

    def _on_ended(self) -> None:
        """The loop has ended, by itself or since somebody cancelled all tasks. The next `wake_at` starts it."""
        if not self.running:
            self.started, self.asleep_until = False, FOREVER

    async def run(self) -> None:
        """Do the task whenever it is due, until the session is closed. A second loop ends at once."""
        with self.runtime.mutex:
            if self.running:
                return
            self.running = True
        try:
            await self._run()
        finally:
            self.running = False

    async def _run(self) -> None:
        while not self.is_closed():
            try:
                self.asleep_until = FOREVER  # awake: whoever calls `wake_at` now sets the event
                self.asleep_until = due = self.task.due()
                await self.runtime.wait(self.wakeup, due)
                await self.task.tick()
            except Exception:  # noqa: BLE001 (logged) a bug of ours must not end the renewal of leases
                log.exception("interlock: %s failed and goes on", self.name)
                await self.runtime.wait(self.runtime.event(), self.runtime.now() + 0.1)
