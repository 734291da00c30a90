"""An attempt, from its first request to its end; and a grant: until when its holder may rely on the lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import ANSWER_COUNTS_FOR, DRIFT, FOREVER, HANDOVER_TTL, TOMBSTONE_TTL, margin
from interlock.errors import LeaseLost

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from interlock._protocol.acks import Acks, Assurance
    from interlock._protocol.types import AutoResetEvent, Resource

fork_count = 0  # forks between the first process and this one: a grant of the parent does not count in a child


def count_fork() -> None:
    """Count a fork, in the child: none of the grants copied from the parent belongs to the child."""
    global fork_count  # noqa: PLW0603 (there is one process)
    fork_count += 1


class Attempt:
    """One try to acquire a resource, from its first request until it is granted or undone."""

    __slots__ = (
        "abandoned",
        "acks",
        "assurance",
        "drift",
        "event",
        "extended_until",
        "generation",
        "handover_ttl_ms",
        "in_doubt",
        "is_queued",
        "release_args",
        "resource",
        "should_stop",
        "token",
        "ttl",
        "unanswered_since",
    )  # fmt: skip

    def __init__(self, resource: Resource, token: str, ttl: float, signal: AutoResetEvent | None) -> None:
        self.resource = resource
        self.token = token
        self.ttl = ttl
        self.extended_until = 0.0  # until when the server may keep the lease after extend()
        self.handover_ttl_ms = str(int(min(HANDOVER_TTL, ttl) * 1000))
        self.event = signal
        self.abandoned = False  # no caller waits for this attempt any more
        self.in_doubt = False  # a copy of a request may still be on its way
        self.is_queued = False  # the attempt stands in the queue
        self.unanswered_since = FOREVER  # when the oldest request or heartbeat without a reply was sent
        self.generation = ""  # in which the attempt waits, if its resource has generations
        self.release_args = resource.release_args
        self.drift = DRIFT
        self.acks: Acks | None = None  # how many replicas and disks must have the grant so that it counts
        self.assurance: Assurance | None = None  # which replicas and disks had the grant, if acks asked for any
        self.should_stop: Callable[[], bool] | None = None  # whether the caller gave up waiting

    def lasts_until(self, now: float) -> float:
        """The latest time at which the server forgets this attempt, if no further request about the attempt arrives."""
        return max(now + max(self.ttl, HANDOVER_TTL), self.extended_until)


class Grant:
    """What this process knows of one lease: until when its holder may rely on the lease, and why the lease ended."""

    __slots__ = (
        "answered_since",
        "attempt",
        "bucket",
        "deadline",
        "end_reason",
        "fence",
        "fork_count",
        "lease",
        "max_hold_until",
        "renewal_failing",
        "renews",
    )  # fmt: skip
    RELEASED: Final = "it was released"
    FORKED: Final = "it belongs to the parent process; a child holds nothing after fork"

    def __init__(self, attempt: Attempt, fence: int, sent: float, *, renews: bool, ends: float) -> None:
        self.attempt = attempt
        self.fence = fence
        self.renews = renews
        self.max_hold_until = ends  # when max_hold ends the lease
        self.deadline = 0.0
        self.end_reason: str | None = None  # why the lease ended; None before
        self.fork_count = fork_count
        self.lease: weakref.ref[Any] | None = None  # the Lease that is notified of its end
        self.bucket: dict[str, Grant] | None = None  # the bucket of the renewal that has this grant
        self.extend_deadline(sent, attempt.ttl)

    @property
    def resource(self) -> Resource:
        return self.attempt.resource

    @property
    def token(self) -> str:
        return self.attempt.token

    @property
    def jeopardy_after(self) -> float:
        """When the lease is in jeopardy, unless a renewal succeeds before: at ttl/2. The renewal is due at ttl/3."""
        return self.answered_since + self.attempt.ttl / 2

    def extend_deadline(self, sent: float, ttl: float) -> None:
        """Move the deadline: a request sent at `sent` was granted, or lengthened the lease. Never shortens."""
        self.renewal_failing = False
        self.answered_since = sent  # the lease was not revoked before this request was sent
        deadline = sent + ttl - margin(ttl, self.attempt.drift)
        if deadline > self.deadline:
            self.deadline = min(self.max_hold_until, deadline)

    def reason_ended(self, now: float) -> str | None:
        """Why the holder can't rely on the lease at this time, or None if it can."""
        if self.fork_count != fork_count:
            self.end_reason = self.FORKED
        if self.end_reason is not None or now < self.deadline:
            return self.end_reason
        if self.deadline == self.max_hold_until:
            return "its max_hold is over"
        return "its ttl passed without a renewal" if self.renews else "its ttl passed"

    def lose(self, why: str) -> Any:
        """Mark the lease as lost. Returns the Lease to notify, or None if it was collected or had ended before."""
        if self.end_reason is not None:
            return None
        self.end_reason = why
        return self.lease() if self.lease else None

    def mark_released(self) -> None:
        """End the lease by the client's own decision, and notify the Lease."""
        if lease := self.lose(self.RELEASED):
            lease._on_end()

    def error(self, why: str) -> LeaseLost:
        """The error for the holder of a lease that ended for this reason."""
        error = LeaseLost(
            f"the lease on {self.resource} has ended: {why}. Acquire it again"
            if why == self.RELEASED
            else f"the lease on {self.resource} (fence {self.fence}) is lost: {why}. "
            "Stop writing: another holder may be at work"
        )
        error.token = self.token
        return error


def last_answer_counts(attempt: Attempt, now: float) -> bool:
    """Whether the last reply about this attempt still counts: no request has been unanswered for long."""
    return now - attempt.unanswered_since < ANSWER_COUNTS_FOR


def tombstone_ms(attempt: Attempt) -> str:
    """How long a tombstone of this attempt must last, in ms. Only an attempt in doubt needs a tombstone."""
    return str(int(TOMBSTONE_TTL * 1000)) if attempt.in_doubt else "0"
