"""Taking back whatever an attempt left in the server: what a worker does when no caller waits for it any more.

Theory. An undo is a `release` of the attempt's token: the script takes the attempt out of the queue, and frees or hands
over its grant. If a copy of the acquire may still be on its way, the script also adds a tombstone, and refuses that
copy. An undo may be sent any number of times. A `with` that leaves without waiting (`confirm=False`, ADR 31) has sent
its release itself; the worker looks at the reply later, and sends the release again if there is none.

Rules.
(a) An undo never runs in the caller, which may be cancelled or out of time: the worker sends the undo.
(b) The worker repeats an undo until a reply arrives, or until nothing of the attempt can be left: the ttl of the lock,
    or the time that `extend` asked for, is over.
(c) A `with` leaves without waiting only while its lease is certainly alive, with half of its ttl left, and no request
    of it is in doubt (`must_wait` in `holding.py`): so only a revocation or a failing server can have ended it before.
(d) A reply that the lease had ended is a loss, and the client reports it as any other; only the `with` raises nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.grant import Attempt, tombstone_ms
from interlock._protocol.log import log
from interlock._protocol.snapshot import snapshot
from interlock._protocol.timing import FOREVER
from interlock.primitives.messages import ReleaseCall, ReleaseReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._client.grant import Grant
    from interlock._protocol.types import Argument, AutoResetEvent, Message, Reply, SentCall, Server

UNDO_TIMEOUT: Final = 1.0  # seconds that one call may take
UNDO_INTERVAL: Final = 0.25  # seconds between two tries
LOOK_AFTER: Final = 0.05  # seconds after which the worker looks at the reply to a release that nobody waited for
LOST_AFTER: Final = 1.0  # seconds after which such a reply counts as lost, unless a thread uses the connection


class Left(NamedTuple):
    """A lease whose `with` has left without waiting for the reply to its release."""

    grant: Grant
    lease: Any
    """The Lease of the section, kept because a loss must still be reported to it."""
    sent: SentCall
    sent_at: float


class Undo:
    """The attempts of one client that are being undone."""

    def __init__(self, server: Server, wake_at: Callable[[float], None]) -> None:
        self.server = server
        self.runtime = server.runtime
        self.wake_at = wake_at
        # By token: the attempt, until when the undo is repeated, and the events of the callers that wait for the undo.
        self.jobs: dict[str, tuple[Attempt, float, tuple[AutoResetEvent, ...]]] = {}
        self.next_try = FOREVER
        self.from_finalizers: deque[Grant] = deque()  # see adopt_from_finalizers()
        self.on_adopted: Callable[[Grant], bool] = lambda _: True  # ends the lease; False: it is another caller's
        self.left: deque[Left] = deque()  # in the order of their releases
        self.next_look = 0.0  # the worker looks once every LOOK_AFTER, however many leave
        self.on_late_loss: Callable[[Grant, Any], None] | None = None  # reports the loss of a lease that was left

    def due(self) -> float:
        """The latest time at which the worker must run this task."""
        if self.from_finalizers:
            return self.runtime.now()
        due = self.next_try if self.jobs else FOREVER
        if (first := self._first()) is not None:
            due = min(due, max(self.next_look, first.sent_at + LOOK_AFTER))
        return due

    def add(self, attempt: Attempt) -> AutoResetEvent:
        """Undo the attempt in the background. The returned event is set when the undo is done."""
        now, done = self.runtime.now(), self.runtime.event()
        with self.runtime.mutex:
            before = self.jobs.get(attempt.token)
            waiting = before[2] if before is not None else ()
            self.jobs[attempt.token] = (attempt, attempt.lasts_until(now), (*waiting, done))
        self.next_try = now
        self.wake_at(now)
        return done

    def attempts(self) -> list[Attempt]:
        """All attempts that are not undone yet."""
        dropped = [grant.hold.claim for grant in snapshot(self.from_finalizers)]
        left = [each.grant.hold.claim for each in snapshot(self.left)]
        return [*(attempt for attempt, _, _ in list(self.jobs.values())), *dropped, *left]

    def leave(self, grant: Grant, args: Sequence[Argument]) -> bool:
        """Send the release of this lease, and let the worker look at the reply.

        Returns False, having sent nothing, if the server can't do that now: see `Server.send`.
        """
        resource, now = grant.hold.claim.resource, self.runtime.now()
        sent = self.server.send((resource.script, resource.keys, args))
        if sent is None:
            return False
        # Nearly always somebody has read the reply to the release before. So few leases are kept for their replies.
        while (first := self._first()) is not None and _says_ours(first.sent.reply):
            self._forget(first)
        self.left.append(Left(grant, grant.lease() if grant.lease is not None else None, sent, now))
        self.wake_at(now + LOOK_AFTER)
        return True

    async def settle(self, sent_before: float, until: float) -> None:
        """Look at the replies to the releases that were sent before then, and read by the time `until` what is missing.

        Reports each loss. Sends a release again if its reply was an error or is lost.
        """
        self.next_look = until  # on an asyncio connection two tasks can't wait for one reply: no worker beside close()
        for left in snapshot(self.left):  # those that leave meanwhile do not prolong it
            if left.sent_at >= sent_before:
                return
            if left.sent.reply is None:
                await left.sent.read(min(until, left.sent_at + LOST_AFTER))
            reply = left.sent.reply
            if reply is None:  # another thread uses the connection: it reads the reply, or breaks the connection
                continue
            answered = None if isinstance(reply, Exception) else ReleaseReply.parse(reply)
            if answered is None or answered.ask_again:
                self.add(left.grant.hold.claim)  # first: close() finds the attempt here or there
            if not self._forget(left):
                continue
            if answered is None:
                log.warning(
                    "%s: no reply to its release (%s). The release goes on in the background",
                    left.grant.resource,
                    reply,
                    extra=left.grant.log_fields,
                )
            elif not answered.was_ours and self.on_late_loss is not None:
                self.on_late_loss(left.grant, left.lease)

    def _first(self) -> Left | None:
        """The lease that was left first. Other threads forget leases meanwhile, so nobody looks twice."""
        try:
            return self.left[0]
        except IndexError:
            return None

    def _forget(self, left: Left) -> bool:
        """Keep this lease no more. Returns False if another thread has forgotten it: then that one reports."""
        try:
            self.left.remove(left)
        except (ValueError, IndexError):
            return False
        return True

    def adopt_from_finalizers(self) -> None:
        """Start the undo of attempts left by finalizers. The worker of ends calls this within a second of any lease."""
        while self.from_finalizers:
            grant = self.from_finalizers.popleft()
            if self.on_adopted(grant):
                self.add(grant.hold.claim)

    async def tick(self) -> None:
        """Send every undo that is not done yet, if a try is due; then look at the releases that nobody waited for."""
        self.adopt_from_finalizers()
        if self.jobs and self.next_try <= self.runtime.now():
            await self._undo()
        now = self.runtime.now()
        if self.left and now >= self.next_look:
            await self.settle(now - LOOK_AFTER, now + UNDO_TIMEOUT)
            self.next_look = now + LOOK_AFTER

    async def _undo(self) -> None:
        jobs, now = list(self.jobs.items()), self.runtime.now()
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
                for done in waiting:
                    done.set()


def _says_ours(reply: Reply | Exception | None) -> bool:
    """Whether this is the usual reply to a release: the lease was ours, and there is nothing left to do."""
    return reply is not None and not isinstance(reply, Exception) and bool(reply[0]) and not reply[1]


def release_message(attempt: Attempt) -> Message:
    """The message that undoes an attempt; a release is the same message."""
    resource = attempt.resource
    call = ReleaseCall(attempt.token, tombstone_ms(attempt), attempt.release_args)
    return resource.script, resource.keys, call.encode()
