"""Taking back what an attempt left in the server, when it ended without a lease, or in doubt.

Theory. An undo is a `release` of the attempt's token: it leaves the queue, frees or hands over what was granted,
and, if a copy of the acquire may still be on its way, leaves a tombstone on which that copy fails. It may be sent
any number of times.

Rules. (1) It never runs in the caller, who may have been cancelled or out of time: the keeper sends it. (2) It is
repeated until it is answered, or until nothing of it can be left: the ttl of the lock is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._core import FOREVER, GRANT_LIFE, Attempt, Message, Port, Signal, gone_ms

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE: Final = 1.0  # seconds that one call may take
PAUSE: Final = 0.25  # seconds between two tries


class Undo:
    """The attempts of one client that are being taken back."""

    def __init__(self, port: Port, nudge: Callable[[float], None]) -> None:
        self.port = port
        self.nudge = nudge
        self.jobs: dict[str, tuple[Attempt, float, Signal]] = {}  # by token: attempt, until when, done
        self.next = FOREVER

    def due(self) -> float:
        """When the keeper must come at the latest."""
        return self.next if self.jobs else FOREVER

    def add(self, attempt: Attempt) -> Signal:
        """Take it back in the background. The signal tells when that is done."""
        now, done = self.port.now(), self.port.signal()
        self.jobs[attempt.token] = (attempt, now + max(attempt.ttl, GRANT_LIFE), done)
        self.next = now
        self.nudge(now)
        return done

    async def tick(self) -> None:
        """Try what is not done yet."""
        if not self.jobs or self.next > self.port.now():
            return
        jobs, now = list(self.jobs.values()), self.port.now()
        self.next = now + PAUSE
        replies = await self.port.calls([message(attempt) for attempt, _, _ in jobs], now + PATIENCE)
        for (attempt, until, done), reply in zip(jobs, replies, strict=True):
            answered = not isinstance(reply, Exception) and not reply[1]
            if answered or now > until:
                self.jobs.pop(attempt.token, None)
                done.set()


def message(attempt: Attempt) -> Message:
    """The undo of an attempt, which is also its release."""
    primitive = attempt.primitive
    return primitive.script, primitive.keys, ("release", attempt.token, gone_ms(attempt), *attempt.parting)
