"""Taking back whatever an attempt left in the server: what a worker does when no caller waits for it any more.

Theory. An undo is a `release` of the attempt's token: the script takes the attempt out of the queue, and frees or hands
over its grant. If a copy of the acquire may still be on its way, the script also adds a tombstone, and refuses that
copy. An undo may be sent any number of times.

Rules.
(a) An undo never runs in the caller, which may be cancelled or out of time: the worker sends the undo.
(b) The worker repeats an undo until a reply arrives, or until nothing of the attempt can be left: the ttl of the lock,
    or the time that `extend` asked for, is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._client.grant import Attempt, tombstone_ms
from interlock._protocol.timing import FOREVER
from interlock.primitives.messages import ReleaseCall, ReleaseReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.owed import Owed
    from interlock._protocol.runtime import AutoResetEvent
    from interlock._protocol.server import Message, Server

UNDO_TIMEOUT: Final = 1.0  # seconds that one call may take
UNDO_INTERVAL: Final = 0.25  # seconds between two tries


class Undo:
    """The attempts of one client that are being undone."""

    def __init__(self, server: Server, owed: Owed, wake_at: Callable[[float], None]) -> None:
        self.server = server
        self.runtime = server.runtime
        self.owed = owed
        self.wake_at = wake_at
        # By token: the attempt, until when the undo is repeated, and the events of the callers that wait for the undo.
        self.jobs: dict[str, tuple[Attempt, float, tuple[AutoResetEvent, ...]]] = {}
        self.next_try = FOREVER

    def due(self) -> float:
        """When the worker must run tick()."""
        return self.next_try if self.jobs else FOREVER

    def add(self, attempt: Attempt) -> AutoResetEvent:
        """Undo the attempt in the background. The returned event is set when the undo is done."""
        now, done = self.runtime.now(), self.runtime.event()
        with self.runtime.mutex:
            self.owed[attempt.token] = attempt
            before = self.jobs.get(attempt.token)
            waiting = before[2] if before is not None else ()
            self.jobs[attempt.token] = (attempt, attempt.lasts_until(now), (*waiting, done))
        self.next_try = now
        self.wake_at(now)
        return done

    async def tick(self) -> None:
        """Send every undo that is not done yet, if a try is due."""
        now = self.runtime.now()
        if not self.jobs or self.next_try > now:
            return
        jobs = list(self.jobs.items())
        self.next_try = now + UNDO_INTERVAL
        replies = await self.server.call_many(
            [release_message(attempt) for _, (attempt, _, _) in jobs], now + UNDO_TIMEOUT
        )
        for (token, job), reply in zip(jobs, replies, strict=True):
            _, until, waiting = job
            answered = None if isinstance(reply, Exception) else ReleaseReply.parse(reply)
            if answered is not None and answered.ask_again and now <= until:
                # One call did not drop all dead waiters, and a live waiter may stand behind the rest: try again now.
                self.next_try = now
            elif answered is not None or now > until:
                with self.runtime.mutex:
                    if self.jobs.get(token) is not job:
                        continue  # added again meanwhile: this reply answers the earlier undo only
                    del self.jobs[token]
                    self.owed.pop(token, None)
                for done in waiting:
                    done.set()


def release_message(attempt: Attempt) -> Message:
    """The message that undoes an attempt; a release is the same message."""
    resource = attempt.resource
    call = ReleaseCall(attempt.token, tombstone_ms(attempt), resource.release_args)
    return resource.script, resource.keys, call.encode()
