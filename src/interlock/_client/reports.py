"""What a session has to tell a user's code: its observers, and through the log the handlers of that.

Theory. Such code may take as long as it likes: a handler writes into a pipe that nobody reads, an exporter waits for
its network. So the workers and the listener, which keep leases alive and tell their holders of losses, call none of it.
They leave a report here, in no time, and a worker of its own makes the reports, one after the other.

Rules.
(a) Whoever finds that leases have ended marks them, sets their events and cancels their tasks first.
(b) In asyncio the loop turns between two reports. A report that blocks stops the loop, as any code does that blocks.
(c) At most `MAX_WAITING` reports wait. The log says how many more were left out.
(d) A caller's own thread or task still reports what it does itself: an acquire, a release.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Final

from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.runtime import Runtime

MAX_WAITING: Final = 10_000  # reports


class Reports:
    """The reports of one session that nobody has made yet."""

    def __init__(self, runtime: Runtime, wake_at: Callable[[float], None]) -> None:
        self.runtime = runtime
        self.wake_at = wake_at
        self.waiting: deque[Callable[[], object]] = deque()
        self.left_out = 0  # reports for which there was no room, and of which the log has said nothing yet
        self.ended = False  # the session is closed, and has no worker any more

    def due(self) -> float:
        """When the worker must run this task."""
        return self.runtime.now() if self.waiting else FOREVER

    def add(self, report: Callable[[], object]) -> None:
        """Let the worker call this soon. Any thread may call this; not under the mutex."""
        if self.ended:
            report()
        elif len(self.waiting) >= MAX_WAITING:
            self.left_out += 1
        else:
            self.waiting.append(report)
            with contextlib.suppress(RuntimeError):  # no thread can be started now: the report waits for the next one
                self.wake_at(self.runtime.now())

    async def tick(self) -> None:
        """Make the oldest report."""
        self._make_oldest()
        if self.left_out and not self.waiting:
            number, self.left_out = self.left_out, 0
            log.warning(
                "interlock: %d reports of losses and renewals were left out, since the observers or the handlers of "
                "the log take too long. Let them work in the background",
                number,
            )

    def end(self) -> None:
        """Make all reports now, and from now on each report at once: the session is closed."""
        self.ended = True
        self.make_all()

    def make_all(self) -> None:
        """Make all reports now."""
        while self.waiting:
            self._make_oldest()

    def _make_oldest(self) -> None:
        try:
            report = self.waiting.popleft()
        except IndexError:  # another thread was faster
            return
        report()
