"""Taking back what an attempt left in the server, when it ended without a lease, or in doubt.

Theory. An undo is a `release` of the attempt's token: it leaves the queue, frees or hands over what was granted,
and, if a copy of the acquire may still be on its way, leaves a tombstone on which that copy fails. It may be sent
any number of times.

Rules. (1) It never runs in the caller, who may have been cancelled or out of time: the worker sends it. (2) It is
repeated until it is answered, or until nothing of it can be left: the ttl of the lock, or what `extend` asked for, is
over.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from interlock._client.grant import Attempt, tombstone_ms
from interlock._protocol.timing import FOREVER
from interlock.primitives.messages import ReleaseCall, ReleaseReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.types import AutoResetEvent, Message, Port

UNDO_TIMEOUT: Final = 1.0  # seconds that one call may take
UNDO_INTERVAL: Final = 0.25  # seconds between two tries


class Undo:
    """The attempts of one client that are being taken back."""

    def __init__(self, port: Port, wake_at: Callable[[float], None]) -> None:
        self.port = port
        self.runtime = port.runtime
        self.wake_at = wake_at
        # By token: what is taken back, until when, and the signals of those who wait for that.
        self.jobs: dict[str, tuple[Attempt, float, tuple[AutoResetEvent, ...]]] = {}
        self.next_try = FOREVER
        self.from_finalizers: deque[Attempt] = deque()  # put here by finalizers: see take_up()

    def due(self) -> float:
        """When the worker must come at the latest."""
        if self.from_finalizers:
            return self.runtime.now()
        return self.next_try if self.jobs else FOREVER

    def add(self, attempt: Attempt) -> AutoResetEvent:
        """Take it back in the background. The signal tells when that is done."""
        now, done = self.runtime.now(), self.runtime.event()
        with self.runtime.mutex:
            before = self.jobs.get(attempt.token)
            waiting = before[2] if before is not None else ()
            self.jobs[attempt.token] = (attempt, attempt.lasts_until(now), (*waiting, done))
        self.next_try = now
        self.wake_at(now)
        return done

    def attempts(self) -> list[Attempt]:
        """All that is not taken back yet."""
        return [*(attempt for attempt, _, _ in list(self.jobs.values())), *self.from_finalizers]

    def adopt_from_finalizers(self) -> None:
        """Begin with what finalizers have left. The worker of ends calls this, within a second of any lease."""
        while self.from_finalizers:
            self.add(self.from_finalizers.popleft())

    async def tick(self) -> None:
        """Try what is not done yet."""
        self.adopt_from_finalizers()
        if not self.jobs or self.next_try > self.runtime.now():
            return
        jobs, now = list(self.jobs.items()), self.runtime.now()
        self.next_try = now + UNDO_INTERVAL
        replies = await self.port.calls([release_message(attempt) for _, (attempt, _, _) in jobs], now + UNDO_TIMEOUT)
        for (token, job), reply in zip(jobs, replies, strict=True):
            _, until, waiting = job
            answered = not isinstance(reply, Exception)
            if answered and ReleaseReply.parse(reply).ask_again and now <= until:
                self.next_try = (
                    now  # there are more dead waiters than one step drops: somebody who lives waits behind them
                )
            elif answered or now > until:
                with self.runtime.mutex:
                    if self.jobs.get(token) is not job:
                        continue  # it was added once more: this was no answer to that
                    del self.jobs[token]
                for done in waiting:
                    done.set()


def release_message(attempt: Attempt) -> Message:
    """The undo of an attempt, which is also its release."""
    resource = attempt.resource
    call = ReleaseCall(attempt.token, tombstone_ms(attempt), attempt.release_args)
    return resource.script, resource.keys, call.encode()
