"""A lease that passes from one caller of a process to the next, without a message. S14.

Theory. The server does not see a section that began because a lease passed on, so no state of the server shows a wrong
one. These checks compare each such step with what the process has sent and received until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interlock._client.cohort import BUDGET, RESERVED_FOR
from interlock.primitives.codes import GRANTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._client.grant import Grant
    from simulator.coroutines import Process
    from simulator.plan import Record

    from .attempts import Attempts
    from .beliefs import Beliefs
    from .trace import Trace

ROUNDING: Final = 1e-6  # seconds


class Passing:
    """The cohorts of all processes."""

    def __init__(self, trace: Trace, attempts: Attempts, beliefs: Beliefs, record: Record) -> None:
        self.trace = trace
        self.attempts = attempts
        self.beliefs = beliefs
        self.record = record
        self._sections: dict[Process, dict[str, Grant]] = {}  # of each cohort, by the key of its lock
        self._asked_at: dict[bytes, float] = {}  # when the newest answered question about waiters was sent, by token
        self._others_wait_since: dict[bytes, float] = {}  # since when the holder knows of waiters elsewhere, by token
        # When a reply arrived that others wait, by its token and fence; None if nobody waits.
        self._said: dict[tuple[bytes, int], float | None] = {}

    def note_reply(self, sent: float, args: Sequence[bytes], reply: Any) -> None:
        """Note a reply that has reached its process, to a message that was sent at this time."""
        if args[0] != b"reserve" or not isinstance(reply, list) or reply[0] != GRANTED:
            return
        token = args[1]
        self._asked_at[token] = max(sent, self._asked_at.get(token, 0.0))
        self._said[token, reply[1]] = self.trace.world.now if reply[2] else None

    def after_step(self, process: Process) -> None:
        """Check whether this step of the process has passed a lease on, and whether it may."""
        known, cohorts = self._sections.get(process), self.attempts.sessions[process].core.cohorts.by_key
        if not cohorts:
            if known:
                known.clear()
            return
        if known is None:
            known = self._sections[process] = {}
        for key, cohort in cohorts.items():
            section, before = cohort.section, known.get(key)
            if section is before:
                continue
            if section is None:
                del known[key]
            else:
                known[key] = section
                if before is not None and before.token == section.token:
                    self.record.counts["lease passed on"] += 1
                    self.record.meets("lease passed on", process)
                    self._check(process, before, section)

    def _check(self, process: Process, before: Grant, section: Grant) -> None:
        """Check that the lease of a section may have passed to the next one just now."""
        token, now = before.token.encode(), process.clock()
        for is_wrong, why in (
            (now >= before.hold.deadline, "though its deadline is over"),
            (before.hold.deadline - now < before.attempt.ttl / 2 - ROUNDING, "with less than half of its ttl left"),
            (before.hold.renewal_failing, "though its last renewal has failed"),
            (self.attempts.unanswered[token] > 0, "while a request of its user has no reply"),
            (self._is_renewed_now(process, before), "while a renewal of it is due or under way"),
            (self.beliefs.has_heard_of_revocation(process, token), "though it was revoked"),
            (self._is_over_budget(process, before), f"more than {BUDGET} s after the server has said that others wait"),
            (
                section.fence and self._reservation_is_old(token),
                f"without a reply of the server for {RESERVED_FOR} s",
            ),
        ):
            if is_wrong:
                self.trace.violated(14, f"{before.token} passes on {why}")

    def _is_renewed_now(self, process: Process, grant: Grant) -> bool:
        return grant.token in self.attempts.sessions[process].book.set_aside

    def _is_over_budget(self, process: Process, before: Grant) -> bool:
        token = before.token.encode()
        if (token, before.fence) in self._said:  # else its client has heeded no reply, as after a change of servers
            arrived = self._said.pop((token, before.fence))
            if arrived is None:
                self._others_wait_since.pop(token, None)
            else:
                self._others_wait_since.setdefault(token, arrived)
        since = self._others_wait_since.get(token)
        if since is None:
            return False
        # A process reads a reply some time after its machine has received it, and may be paused in between.
        since = max(since, process.paused_until)
        return self.trace.world.now > since + BUDGET * (1 + 1e-3) + 1e-4

    def _reservation_is_old(self, token: bytes) -> bool:
        asked = self._asked_at.get(token)
        return asked is None or self.trace.world.now - asked > RESERVED_FOR * (1 + 1e-3)
