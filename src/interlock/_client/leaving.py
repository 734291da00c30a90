"""Leaving a `with` without waiting for the reply to its release: `confirm=False` (ADR 19).

Theory. The client sends the release, and the connection then owes the reply. Whoever reads that reply, in whichever
thread or task, hands it to the `Departure`. The lease has ended for its holder before that: a reply can only say that
it had ended in the server even earlier.

Rules.
 1. A holder leaves so only while the lease is certainly alive, with half of its ttl left, and no request of it is in
    doubt. Else the holder waits for the reply, as with `confirm=True`.
 2. If there is no reply (the connection broke, or the server is silent for `LOST_AFTER`), the release is in doubt: the
    client undoes the attempt in the background.
 3. A reply that the lease was lost is reported as any loss is: a log line, `lease.lost`, `on_lost`. Only the `with` can
    raise nothing any more.
 4. Nobody need use the connection again: a worker reads each reply within twice `READ_INTERVAL`, and other replies that
    nobody waits for after their own time (`Owed.read_after`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from interlock._client import grant as grant_module
from interlock._client.error_texts import ENDED_BEFORE_RELEASE
from interlock._client.grant import tombstone_ms
from interlock._client.observer import report_lost
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER, HANDOVER_TTL
from interlock._protocol.types import Disconnected, Unawaited
from interlock.primitives.messages import encode_release

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.grant import Attempt, Grant
    from interlock._client.renewal import Renewal
    from interlock._client.undo import Undo
    from interlock._protocol.types import Reply, Server

READ_INTERVAL: Final = 0.025  # seconds: the worker reads replies that are owed for longer, and as often
LOST_AFTER: Final = 1.0  # seconds after which a reply that is owed counts as lost


class Owed(Unawaited, Protocol):
    """Another message of this client whose reply nobody waits for, and which the same worker reads."""

    sent_at: float
    read_after: float
    """Seconds after which the worker reads the reply."""


class Departure:
    """One release whose reply nobody waits for. It is the `Unawaited` of its message."""

    keeps_order = True
    read_after = READ_INTERVAL
    __slots__ = ("_grant", "_is_over", "_lease", "_leaving", "attempt", "sent_at")

    def __init__(self, leaving: Leaving, grant: Grant, now: float) -> None:
        self.attempt = grant.attempt
        self.sent_at = now
        self._leaving = leaving
        self._grant = grant
        self._lease: Any = grant.lease() if grant.lease is not None else None  # kept, since it may have to be notified
        self._is_over = False

    def before_sending(self) -> None:
        """See Unawaited."""
        self._grant.announce_release()
        self._leaving.renewal.end(self._grant)

    def answered(self, reply: Reply) -> None:
        """See Unawaited."""
        if self._is_over or self._is_of_parent:
            return
        ours, ask_again = reply  # a ReleaseReply, not built as one
        if ask_again:
            self._leaving.undo.add(self.attempt)
        if not ours and not self._leaving.is_closed():  # else close() may have sent a release of its own
            self._report_loss()
        self.end()

    def failed(self, error: Exception) -> None:
        """See Unawaited."""
        if self._is_over or self._is_of_parent:
            return
        if not self._leaving.is_closed():  # else close() has released the lease, or may do so
            self.attempt.in_doubt = True
            self._leaving.undo.add(self.attempt)
            log.warning(
                "%s: no reply to its release (%s). The release goes on in the background",
                self.attempt.resource,
                error,
                extra=self._grant.log_fields,
            )
        self.end()

    def end(self) -> None:
        """Expect no reply any more."""
        self._is_over = True
        self._lease = None
        self._leaving.owed.pop(self, None)

    @property
    def _is_of_parent(self) -> bool:
        return self._grant.fork_count != grant_module.fork_count

    def _report_loss(self) -> None:
        grant = self._grant
        grant.end_reason = ENDED_BEFORE_RELEASE
        log.warning("%s", grant.error(grant.end_reason), extra=grant.log_fields)
        if self._lease is not None:
            try:
                self._lease._on_lost()
            except Exception:  # noqa: BLE001 (whoever reads the reply wants another one)
                log.exception("interlock: the loss of %s could not be reported", grant.resource, extra=grant.log_fields)
        report_lost(grant, ENDED_BEFORE_RELEASE, self._leaving.runtime.now())


class Leaving:
    """The releases of one client whose replies are owed."""

    def __init__(
        self,
        server: Server,
        wake_at: Callable[[float], None],
        renewal: Renewal,
        undo: Undo,
        is_closed: Callable[[], bool],
    ) -> None:
        self.server = server
        self.runtime = server.runtime
        self.wake_at = wake_at
        self.renewal = renewal
        self.undo = undo
        self.is_closed = is_closed
        self.owed: dict[Departure | Owed, None] = {}  # in the order in which they were sent
        self._next_read = FOREVER

    def leave(self, grant: Grant, now: float) -> bool:
        """Release this lease without waiting for the reply. Returns False, having done nothing, if rule 1 forbids it.

        So does a server that can't do it now: see `Server.send_unawaited`.
        """
        attempt = grant.attempt
        ttl = min(HANDOVER_TTL, attempt.ttl) if grant.unconfirmed else attempt.ttl
        if attempt.in_doubt or grant.renewal_failing or grant.deadline - now < ttl / 2:
            return False
        departure, resource = Departure(self, grant, now), attempt.resource
        message = (
            resource.script,
            resource.keys,
            encode_release(attempt.token, tombstone_ms(attempt), attempt.release_args),
        )
        self.owed[departure] = None  # first: close() in another thread finds it here or among the held
        if not self.renewal.claim_end(grant):  # another thread has ended it, or has passed it on
            departure.end()
            return grant.end_reason == grant.RELEASED
        try:
            if not self.server.send_unawaited(message, now, departure):
                departure.end()
                grant.end_reason = None  # the caller releases it and waits
                return False
        except Disconnected as error:
            departure.failed(error)
            return True
        self.watch(departure)
        return True

    def watch(self, sent: Departure | Owed) -> None:
        """Let the worker read the reply to this message, unless somebody else has read it by then."""
        due = sent.sent_at + sent.read_after
        if due < self._next_read:
            self._next_read = due
            self.wake_at(due)

    def attempts(self) -> list[Attempt]:
        """The attempts whose releases have no reply yet."""
        return [each.attempt for each in list(self.owed) if isinstance(each, Departure)]

    def due(self) -> float:
        """When the worker must read replies."""
        return self._next_read

    async def tick(self) -> None:
        """Read the replies that nobody has read, and give up those that do not come."""
        now, self._next_read = self.runtime.now(), FOREVER  # first: leave() in another thread sets it again
        try:
            await self.server.read_owed(now - READ_INTERVAL, now + LOST_AFTER)
        finally:
            now = self.runtime.now()
            for each in list(self.owed):
                if now - each.sent_at > LOST_AFTER:
                    each.failed(Disconnected("no answer in time", sent=True, timed_out=True))
            if owed := list(self.owed):
                first = min(each.sent_at + each.read_after for each in owed)
                self._next_read = min(self._next_read, max(first, now + READ_INTERVAL))

    async def read_all(self, until: float) -> None:
        """Read all replies that are there by this time."""
        if self.owed:
            await self.server.read_owed(FOREVER, until)
