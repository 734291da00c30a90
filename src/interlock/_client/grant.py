"""An attempt, from its first request to its end; and a grant: until when its holder may believe in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import ANSWER_COUNTS_FOR, DRIFT, FOREVER, HANDOVER_TTL, TOMBSTONE_TTL, margin
from interlock.errors import LeaseLost

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from interlock._protocol.acks import Acks, Assurance
    from interlock._protocol.types import AutoResetEvent, Resource

fork_count = 0  # of this process: a child of a fork is another one, in which no grant of its parent counts


def count_fork() -> None:
    """This process is the child of a fork: no grant that it has copied is its own."""
    global fork_count  # noqa: PLW0603 (there is one process)
    fork_count += 1


class Attempt:
    """One try to get a primitive, from its first request until it is granted or undone."""

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
        self.extended_until = 0.0  # until when the server may keep it, if somebody asked for more than the ttl
        self.handover_ttl_ms = str(int(min(HANDOVER_TTL, ttl) * 1000))
        self.event = signal
        self.abandoned = False  # nobody waits for it any more
        self.in_doubt = False  # a copy of a request may still be on its way
        self.is_queued = False  # it stands in the queue
        self.unanswered_since = (
            FOREVER  # when the first of its requests and heartbeats was sent that have no answer yet
        )
        self.generation = ""  # the generation in which it waits, if its primitive has such
        self.release_args = resource.release_args
        self.drift = DRIFT
        self.acks: Acks | None = None  # what must have the grant, so that it counts
        self.assurance: Assurance | None = None  # what had it, if more than its server
        self.should_stop: Callable[[], bool] | None = None  # whether its caller wants it no more

    def lasts_until(self, now: float) -> float:
        """When the server has forgotten it at the latest, if it gets no further request about it."""
        return max(now + max(self.ttl, HANDOVER_TTL), self.extended_until)


class Grant:
    """What this process knows of one lease: until when it may believe in it, and why it ended."""

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
        self.max_hold_until = ends  # when max_hold is over
        self.deadline = 0.0
        self.end_reason: str | None = None  # why, once it has
        self.fork_count = fork_count
        self.lease: weakref.ref[Any] | None = None  # the Lease to tell
        self.bucket: dict[str, Grant] | None = None  # where renewal keeps it
        self.extend_deadline(sent, attempt.ttl)

    @property
    def resource(self) -> Resource:
        return self.attempt.resource

    @property
    def token(self) -> str:
        return self.attempt.token

    @property
    def jeopardy_after(self) -> float:
        """When the lease is in jeopardy, unless it is renewed before: its renewal is due at ttl/3, ttl/6 before."""
        return self.answered_since + self.attempt.ttl / 2

    def extend_deadline(self, sent: float, ttl: float) -> None:
        """The server granted or lengthened it, in answer to a request sent at `sent`. Never shortens."""
        self.renewal_failing = False
        self.answered_since = sent  # the lease was not revoked before this request was sent
        deadline = sent + ttl - margin(ttl, self.attempt.drift)
        if deadline > self.deadline:
            self.deadline = min(self.max_hold_until, deadline)

    def reason_ended(self, now: float) -> str | None:
        """Why the lease can't be relied on at this time, or None if it can."""
        if self.fork_count != fork_count:
            self.end_reason = self.FORKED
        if self.end_reason is not None or now < self.deadline:
            return self.end_reason
        if self.deadline == self.max_hold_until:
            return "its max_hold is over"
        return "its ttl passed without a renewal" if self.renews else "its ttl passed"

    def lose(self, why: str) -> Any:
        """End it as lost; returns the Lease to tell, if somebody still has it."""
        if self.end_reason is not None:
            return None
        self.end_reason = why
        return self.lease() if self.lease else None

    def mark_released(self) -> None:
        """We end it ourselves: whoever watches for its end is told."""
        if lease := self.lose(self.RELEASED):
            lease._on_end()

    def error(self, why: str) -> LeaseLost:
        """What its holder is told."""
        error = LeaseLost(
            f"the lease on {self.resource} has ended: {why}. Acquire it again"
            if why == self.RELEASED
            else f"the lease on {self.resource} (fence {self.fence}) is lost: {why}. "
            "Stop writing: another holder may be at work"
        )
        error.token = self.token
        return error


def last_answer_counts(attempt: Attempt, now: float) -> bool:
    """Whether the last answer about this attempt still tells something: no request has been unanswered for long."""
    return now - attempt.unanswered_since < ANSWER_COUNTS_FOR


def tombstone_ms(attempt: Attempt) -> str:
    """How long a tombstone of this attempt must stand, in ms: only one in doubt needs one."""
    return str(int(TOMBSTONE_TTL * 1000)) if attempt.in_doubt else "0"
