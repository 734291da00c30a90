"""Leaving a `with` without waiting for the reply to its release (`confirm=False`, ADR 31).

Theory. The end of such a `with` sends the release itself. A worker looks at the reply later, and has the release sent
again if there is none.

Rules.
(a) A `with` leaves without waiting only while its lease is certainly alive, with half of its ttl left, and no request
    of it is in doubt (`must_wait` in `holding.py`): so only a revocation or a failing server can have ended it before.
(b) A reply that the lease had ended is a loss, and the client reports it as any other; only the `with` raises nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.undo import UNDO_TIMEOUT
from interlock._protocol.log import log
from interlock._protocol.snapshot import snapshot
from interlock._protocol.timing import FOREVER
from interlock.primitives.messages import ReleaseReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._client.grant import Grant
    from interlock._client.lease_ends import LeaseEnds
    from interlock._client.undo import Undo
    from interlock._protocol.resource import Argument
    from interlock._protocol.server import Reply, SentCall, Server

LOOK_AFTER: Final = 0.05  # seconds after which the worker looks at the reply to a release that nobody waited for
LOST_AFTER: Final = 1.0  # seconds after which such a reply counts as lost, unless a thread uses the connection


class Left(NamedTuple):
    """A lease whose `with` has left without waiting for the reply to its release."""

    grant: Grant
    lease: Any
    """The Lease of the section, kept because a loss must still be reported to it."""
    sent: SentCall
    sent_at: float


class UnreadReleases:
    """The releases of one client that nobody waits for. Its worker runs the undos, too."""

    def __init__(self, server: Server, undo: Undo, ends: LeaseEnds, wake_at: Callable[[float], None]) -> None:
        self.server = server
        self.runtime = server.runtime
        self.undo = undo
        self.owed = undo.owed
        self.ends = ends  # reports a loss
        self.wake_at = wake_at
        self.left: deque[Left] = deque()  # in the order of their releases
        self.next_look = 0.0  # the worker looks once every LOOK_AFTER, however many leave

    def due(self) -> float:
        """The latest time at which the worker must run this task."""
        first = self._first()
        look = FOREVER if first is None else max(self.next_look, first.sent_at + LOOK_AFTER)
        return min(self.undo.due(), look)

    async def tick(self) -> None:
        """Send every undo that is not done yet, if a try is due; then look at the releases that nobody waited for."""
        await self.undo.tick()
        now = self.runtime.now()
        if self.left and now >= self.next_look:
            await self.settle(now - LOOK_AFTER, now + UNDO_TIMEOUT)
            self.next_look = now + LOOK_AFTER

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
            self.owed.pop(first.grant.token, None)
        self.left.append(Left(grant, grant.lease() if grant.lease is not None else None, sent, now))
        self.wake_at(now + LOOK_AFTER)
        return True

    def forget_all(self) -> None:
        """Look at no reply any more: the client closes, and sends a second release of each, whose reply counts."""
        self.left.clear()

    async def settle(self, sent_before: float, until: float) -> None:
        """Look at the replies to the releases that were sent before `sent_before`. Read missing ones, until `until`.

        Reports each loss. Lets the worker of undos send a release again if its reply was an error or is lost.
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
                self.undo.add(left.grant.hold.claim)
            else:
                self.owed.pop(left.grant.token, None)
            if not self._forget(left):
                continue
            if answered is None:
                log.warning(
                    "%s: no reply to its release (%s). The release goes on in the background",
                    left.grant.resource,
                    reply,
                    extra=left.grant.log_fields,
                )
            elif not answered.was_ours:
                self.ends.lose_late(left.grant, left.lease)

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


def _says_ours(reply: Reply | Exception | None) -> bool:
    """Whether this is the usual reply to a release: the lease was ours, and there is nothing left to do."""
    return reply is not None and not isinstance(reply, Exception) and bool(reply[0]) and not reply[1]
