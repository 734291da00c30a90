"""What a caller does that waits in its cohort: wait for its turn, and begin its section or ask the server.

Theory (ADR 20). `cohort.py` says whose turn it is; a caller waits for its event, and then looks. Its turn comes in one
of two ways. Either a lease has passed to it: its section begins, as soon as the server has reserved fences for this
hold. Or nobody asks the server any more: it becomes the driver, and asks.

Rules.
 (a) A lease that has passed to a caller belongs to nobody else. So whatever ends its turn gives the lease back.
 (b) The error of a caller whose time is over says what the server said last to the driver, unless the server has been
     silent.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from interlock._client.cohort import RESERVED, Turn
from interlock._client.error_texts import DRIVER_UNANSWERED, outer_error
from interlock._client.retries import Question, has_time_for_another_try
from interlock._client.self_wait import LOOK_AFTER
from interlock._protocol.forks import KNOWN
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import FOREVER
from interlock.errors import Unavailable
from interlock.primitives.lock import ReserveCall, ReserveReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.cohorts import Cohorts
    from interlock._client.giving_back import GivingBack
    from interlock._client.grant import Attempt, Grant
    from interlock._client.retries import Requests
    from interlock._client.self_wait import SelfWaits
    from interlock.errors import LockError


class Turns:
    """The callers of one client that wait for each other."""

    def __init__(
        self,
        requests: Requests,
        cohorts: Cohorts,
        giving_back: GivingBack,
        self_waits: SelfWaits,
        begin_section: Callable[[Grant], Any],
    ) -> None:
        """`begin_section` makes the lease of a grant; None if its hold has ended."""
        self.requests = requests
        self.server = requests.server
        self.runtime = requests.runtime
        self.cohorts = cohorts
        self.giving_back = giving_back
        self.self_waits = self_waits
        self.begin_section = begin_section

    async def wait(self, attempt: Attempt) -> Any:
        """Wait in the cohort. Returns the lease that passed to this caller, or None if the caller is to ask the server.

        Raises AcquireTimeout, Unavailable or Deadlock.
        """
        attempt.waits_since = arrived = now = self.runtime.now()
        attempt.look_at = arrived + LOOK_AFTER if attempt.caller is not None else FOREVER
        self.self_waits.look_for_interrupted(attempt, lambda below: self.cohorts.is_before(below, attempt))
        is_inside = self.cohorts.is_inside(attempt)
        if is_inside:
            self._look_for_own_section(attempt, arrived, warn=False)
        while True:
            if self.requests.closed or not KNOWN[0]:
                raise self.requests.over_error(attempt.resource)
            if attempt.outer_loss is not None:
                raise outer_error(attempt.resource, attempt.outer_loss)
            if now >= attempt.until:
                raise self._turn_timeout(attempt, arrived)
            if now >= attempt.look_at:
                attempt.look_at = FOREVER
                self._look_for_own_section(attempt, arrived, warn=True)
            assert attempt.event is not None
            # Else it looks when the worker wakes it, after LOOK_AFTER: a timer of its own would cost each caller more.
            await attempt.event.wait(min(attempt.until, attempt.look_at) if is_inside else attempt.until)
            turn, now = self.cohorts.turn(attempt), self.runtime.now()
            if turn is Turn.ASK:
                break
            if turn is not Turn.WAIT:
                if (lease := await self._take_turn(turn)) is not None:
                    return lease
                attempt.event.set()  # to look at once
        self._begin_to_drive(attempt, arrived, now)
        return None

    def _begin_to_drive(self, attempt: Attempt, arrived: float, now: float) -> None:
        """Prepare a caller that has waited in its cohort to ask the server.

        Raises Unavailable if the caller that drove before has just given up, after as long a silence as this one would
        wait for.
        """
        if attempt.caller is not None:
            attempt.look_at = now + LOOK_AFTER * random.uniform(1.0, 1.5)
        until = max(arrived, attempt.unanswered_since) + self.requests.retry_for(attempt.until)
        if not has_time_for_another_try(now, until):
            cause = Disconnected(DRIVER_UNANSWERED, sent=True, timed_out=True)
            raise self.requests.unavailable(attempt, now, cause)

    async def _take_turn(self, grant: Grant) -> Any:
        """Begin the section of a lease that has passed to this caller, or give it back: nobody else would.

        Returns the lease; None if it has ended, and then this caller asks the server.
        """
        try:
            has_fence = grant.fence != 0 or await self._reserve_fences(grant)
            if has_fence and (lease := self.begin_section(grant)) is not None:
                return lease
            self.cohorts.drive_instead(grant)
            grant.hold.claim.in_doubt = True  # a request of it may be on its way
            self.giving_back.in_background(grant)
        except BaseException:
            self.giving_back.in_background(grant)
            raise
        return None

    async def _reserve_fences(self, grant: Grant) -> bool:
        """Ask the server for fences, and whether others wait. Returns False if it does not confirm the hold."""
        hold, who = grant.hold, grant.attempt
        message = ReserveCall(hold.token, who.ttl_ms, str(RESERVED)).encode()
        asking = Question(hold.resource)
        retry_until = self.runtime.now() + self.requests.retry_for(who.until)
        try:
            raw, sent = await self.requests.ask_until_answered(
                asking, message, min(who.until, hold.deadline, retry_until)
            )
        except Unavailable:
            who.unanswered_since = min(who.unanswered_since, asking.unanswered_since)
            return False
        reply = ReserveReply.parse(raw)
        if reply.fence:
            hold.extend_deadline(sent, hold.ttl, self.server.drift)
            self.cohorts.note_reserved_fences(grant, reply.fence, sent=sent, others_wait=reply.others_wait)
        return reply.fence > 0

    def _look_for_own_section(self, attempt: Attempt, arrived: float, *, warn: bool) -> None:
        """Raise Deadlock, or log, if the caller of this attempt itself is in the section for which it waits."""
        reply = self.cohorts.blocking(attempt, arrived)
        if reply is not None:
            self.self_waits.look(attempt, reply, warn=warn)

    def _turn_timeout(self, attempt: Attempt, arrived: float) -> LockError:
        """The error for a caller that waited in its cohort until its time was over."""
        answered = self.requests.has_answered(attempt.resource, self.runtime.now())
        reply = self.cohorts.blocking(attempt, arrived, answered=answered)
        if reply is not None:
            return self.self_waits.busy_error(attempt, reply)
        attempt.unanswered_since = min(attempt.unanswered_since, arrived)
        cause = Disconnected(DRIVER_UNANSWERED, sent=True, timed_out=True)
        return self.requests.unavailable(attempt, self.runtime.now(), cause)
