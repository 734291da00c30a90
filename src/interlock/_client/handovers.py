"""Sections that start from the push of a handover, while the confirmation is on its way (ADR 21).

Theory. The push names a stamp: a time of this client's own clock, which a message brought to the server before the
server granted. So the grant is no older than the stamp, and the lock is ours at least until the stamp + the handover
ttl, less a margin. That is the deadline of the lease until the server has answered the confirmation, or a renewal. A
push that arrives late has an old stamp, and starts nothing.

Rules.
 1. The confirmation is sent before the section starts. It never grants, so it may arrive late, twice, or after the
    release, and leaves no attempt in doubt.
 2. The section starts so only if a third of the handover ttl is left. Else, and in each other state that the proof
    above does not cover (`Handovers._may_start`), the waiter asks first.
 3. A confirmation without a reply is no loss: the lease is renewed at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._client.grant import Grant
from interlock._protocol.timing import HANDOVER_TTL
from interlock._protocol.types import Disconnected
from interlock.primitives.messages import ConfirmCall, HandoverPush

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.grant import Attempt
    from interlock._client.leaving import Leaving
    from interlock._client.renewal import Renewal
    from interlock._protocol.types import Reply, Server


class Confirmation:
    """The confirmation of one handover. It is the `Unawaited` of its message."""

    keeps_order = False
    read_after = 0.25  # seconds; most sections are over by then, and their release has read the reply

    def __init__(self, handovers: Handovers, grant: tuple[Attempt, int, float, float], now: float) -> None:
        self.sent_at = now
        self.lease: Any = None
        self._handovers = handovers
        self._grant = grant  # what lease_from_grant() makes a lease of

    def before_sending(self) -> None:
        """See Unawaited."""
        self.lease = self._handovers.lease_from_grant(*self._grant)
        self._handovers.leaving.owed[self] = None

    def answered(self, reply: Reply) -> None:
        """See Unawaited."""
        self._end(reply)

    def failed(self, error: Exception) -> None:
        """See Unawaited."""
        self._end(error)

    def _end(self, reply: Reply | Exception) -> None:
        if self._handovers.leaving.owed.pop(self, self) is None:  # else it has had a reply already
            self._handovers.renewal.on_confirmation(self._grant[0].token, reply, self.sent_at)


class Handovers:
    """Starts sections from the pushes of one client."""

    def __init__(
        self,
        server: Server,
        renewal: Renewal,
        leaving: Leaving,
        lease_from_grant: Callable[[Attempt, int, float, float], Any],
    ) -> None:
        self.server = server
        self.runtime = server.runtime
        self.renewal = renewal
        self.leaving = leaving
        self.lease_from_grant = lease_from_grant

    def start(self, attempt: Attempt) -> Any:
        """Return the lease of the handover that the server has pushed to this attempt; None if the waiter must ask."""
        words, attempt.push = attempt.push, ""
        push = HandoverPush.parse(words)
        if push is None or not self._may_start(attempt):
            return None
        now, handover_ttl = self.runtime.now(), min(HANDOVER_TTL, attempt.ttl)
        stamp = push.stamp_ms / 1000 or attempt.first_sent or 0.0
        # A stamp ahead of the clock is not from this process, but from another copy of its machine.
        if not stamp <= now <= stamp + handover_ttl * 2 / 3:
            return None
        confirmation = Confirmation(self, (attempt, push.fence, stamp, handover_ttl), now)
        message = attempt.resource.script, attempt.resource.keys, ConfirmCall(attempt.token, attempt.ttl_ms).encode()
        try:
            if not self.server.send_unawaited(message, now, confirmation):
                return None
        except Disconnected as error:
            confirmation.failed(error)
        except BaseException:  # such as KeyboardInterrupt: the caller undoes the attempt
            if (grant := self.renewal.find(attempt.token)) is not None:
                grant.end_reason = Grant.RELEASED
                self.renewal.remove(grant)
            raise
        else:
            self.leaving.watch(confirmation)
        lease, confirmation.lease = confirmation.lease, None
        return lease

    def _may_start(self, attempt: Attempt) -> bool:
        options, resource = attempt.options, attempt.resource
        return (
            self.runtime.runs_beside_caller
            and resource.kind == "lock"
            and options.renew
            and options.max_hold is None
            and options.acks is None
            and not attempt.asks_first
            and not (attempt.should_stop is not None and attempt.should_stop())
            and not self.server.old_primary_may_still_grant(resource.keys[0])
        )
