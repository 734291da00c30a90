"""Saying in the log that callers wait for long: for what, who holds it, and where in its code the holder is.

The log gets a line for a resource once the oldest caller has waited for `FIRST`, and again each time its wait has
doubled. Shortly before, that caller asks the server again, so that the line names the holder of now. Of many resources
the lines come one after another, a few at a time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from interlock._client.places import line_of
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock._protocol.names import printable
from interlock._protocol.timing import UNDO_GRACE
from interlock.primitives.messages import lost_identity

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from interlock._client.grant import Attempt
    from interlock._protocol.runtime import Runtime
    from interlock.primitives.messages import Queued
    from interlock.primitives.registry import Holding

FIRST: Final = 30.0  # seconds of waiting after which the log says so for the first time
MAX_LINES: Final = 10  # of one look: each may ask the server, and the reports of the registry have to wait for that


class LongWaits:
    """The waits of one session of which the log has spoken, or soon will."""

    def __init__(
        self,
        runtime: Runtime,
        holding: Callable[[str, float], Awaitable[Holding | None]],
        blocking: Callable[[Attempt, float], Queued | None],
        deadlock: Callable[[Attempt, str, float], Awaitable[tuple[tuple[str, ...], str] | None]],
    ) -> None:
        self.runtime = runtime
        self.holding = holding  # what is known of the holder with this token: see Registry
        self.blocking = blocking  # see Cohorts
        self.deadlock = deadlock  # see DeadlockSearch.say
        self.next_line: dict[str, float] = {}  # by the key of a resource: after how many seconds of waiting it is due

    async def look(self, waiting: Iterable[Attempt], interval: float) -> None:
        """Log a line for each resource whose line is due. `Looks` calls this every `interval` seconds."""
        if not log.isEnabledFor(logging.INFO):  # then nobody asks the server for a line that nobody reads
            return
        now = self.runtime.now()
        by_key: dict[str, list[Attempt]] = {}
        for attempt in waiting:
            by_key.setdefault(attempt.resource.keys[0], []).append(attempt)
        self.next_line = {key: due for key, due in self.next_line.items() if key in by_key}
        lines = 0
        for key, attempts in by_key.items():
            oldest = min(attempts, key=lambda attempt: attempt.waits_since)
            waited, due = now - oldest.waits_since, self.next_line.get(key, FIRST)
            if waited >= due and lines < MAX_LINES:
                while due <= waited:
                    due *= 2
                self.next_line[key] = due
                lines += 1
                await self._log(oldest, attempts, waited)
            elif waited >= due - interval:
                _ask_again(attempts)

    async def _log(self, oldest: Attempt, attempts: list[Attempt], waited: float) -> None:
        others = f", as {len(attempts) - 1} more callers of this process do" if len(attempts) > 1 else ""
        log.info(
            "%s: waiting for %.0f s at %s%s; %s",
            oldest.resource, waited, line_of(oldest.place), others, await self._cause(oldest, attempts),
            extra=lock_fields(oldest.resource, None, oldest.token),
        )  # fmt: skip

    async def _cause(self, oldest: Attempt, attempts: list[Attempt]) -> str:
        reply = next((attempt.last_queued for attempt in attempts if attempt.last_queued is not None), None)
        if reply is None and oldest.options.joins:  # it waits for a caller of this process
            reply = self.blocking(oldest, oldest.waits_since)
        if reply is not None and lost_identity(reply) is not None:
            return "it is in quarantine after a restart or failover of its server"
        holder = reply.holder.decode(errors="replace").removeprefix("!") if reply is not None else ""
        if not holder:
            return "other callers are before it in the queue"
        until = self.runtime.now() + UNDO_GRACE
        found = await self.holding(holder, until)
        known = await self.deadlock(oldest, holder, until)
        return (
            f"held by {printable(holder)}"
            + (f", for {found.seconds:.0f} s, since {found.place}" if found else "")
            + (f". {known[1]}" if known else "")
        )


def _ask_again(attempts: list[Attempt]) -> None:
    """Let the caller ask that stands in the server's queue: of a cohort, only its driver does."""
    for attempt in attempts:
        if attempt.is_queued and attempt.event is not None:
            attempt.event.set()
            return
