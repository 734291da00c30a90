"""An attempt, a hold and a grant: what this client knows of a token, of a lease, and of the section of one caller.

Theory. An *attempt* lives from its first request until it is granted or undone. What the client knows of a granted
token lives as long as the server keeps it, and is its *hold*: the deadline, when the last request was answered, which
requests are unanswered. The book keeps holds. A *grant* is what one caller has of a hold, for one section: its fence,
and why it ended. A cohort passes a hold on: the same hold carries the grant of the next caller from then on, and its
place in the book stays the same.

Rules.
(a) `Hold.grant` alone says whose section it is. The assignment of the next grant is the one step from which on a lease
    has passed.
(b) A grant ends once: the first reason stays. Only if no `with` waits for the reply to its release, a reply that the
    lease had ended replaces that reason (`LeaseEnds.lose_late`). Unless the hold has passed on, it ends with its grant,
    and carries none from then on. So no cycle of references waits for the garbage collector.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from interlock._client.retries import Question
from interlock._protocol import forks
from interlock._protocol.forks import KNOWN
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.timing import ANSWER_COUNTS_FOR, FOREVER, HANDOVER_TTL, TOMBSTONE_TTL, capped_ttl, margin
from interlock.errors import LeaseLost, LockError
from interlock.primitives.messages import NO_BOUND

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from interlock._client.places import Place
    from interlock._protocol.acks import Acks
    from interlock._protocol.resource import Resource
    from interlock._protocol.runtime import AutoResetEvent
    from interlock.primitives.messages import Queued

MIN_COHORT_TTL: Final = 1.0  # seconds: below, a lease has too little time left to pass on
NO_PROOF: Final = "no proof"  # no identity: a search failed, and the attempt waits for the quarantine to end
MAX_SHARED: Final = 256  # different options that are kept for later locks


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to make, for each lock
class AcquireOptions:
    """How a resource is acquired and held: the options of Interlock.lock, checked. Times are in seconds."""

    ttl: float
    acks: Acks | None = None
    timeout: float | None = None
    renew: bool = True
    max_hold: float | None = None
    fair: bool = False
    max_waiters: str = NO_BOUND  # as an acquire says it
    on_lost: Callable[[Any], object] | None = None
    confirm: bool = True  # whether the end of a `with` waits for the reply to its release
    joins: bool = False  # whether callers with these options join a cohort
    polls: bool = False  # whether the head of the queue asks by itself when the holder's pttl is over
    # The ttl in the words of an acquire, made once for all attempts
    ttl_ms: str = field(init=False)
    handover_ttl_ms: str = field(init=False)

    def __post_init__(self) -> None:
        self.ttl_ms, self.handover_ttl_ms = words_of_ttl(self.ttl)

    def capped(self, drift: float) -> AcquireOptions:
        """These options with a ttl that ends with max_hold at the latest. `drift` is that of the server."""
        assert self.max_hold is not None
        return replace(self, ttl=capped_ttl(self.ttl, self.max_hold, drift))

    @property
    def may_join(self) -> bool:
        """Whether a lease with these options may pass from caller to caller: see `cohort.py`."""
        return (
            self.renew and not self.fair and self.max_hold is None and self.acks is None
            and self.max_waiters == NO_BOUND and self.ttl >= MIN_COHORT_TTL
        )  # fmt: skip


@lru_cache(maxsize=256)  # many locks have the same ttl, and keep these words while they are held
def words_of_ttl(ttl: float) -> tuple[str, str]:
    """A ttl and the handover ttl for it, in ms, as an acquire says them."""
    return str(int(ttl * 1000)), str(int(min(HANDOVER_TTL, ttl) * 1000))


_fields = attrgetter(*AcquireOptions.__slots__)
_shared: dict[object, AcquireOptions] = {}


def shared(options: AcquireOptions, *, joins: bool) -> AcquireOptions:
    """These options of a lock, or equal ones that another lock has: they take memory, and many locks have the same.

    `joins`: whether callers join a cohort if the options allow that. Nothing changes options after this call.
    """
    options.joins = joins and options.may_join
    if options.on_lost is not None or options.acks is not None:
        return options
    fields = _fields(options)
    return _shared.setdefault(fields, options) if len(_shared) < MAX_SHARED else _shared.get(fields, options)


NO_LEASE: Final = AcquireOptions(HANDOVER_TTL)  # of an attempt that gets no lease: at a latch, or a mere question


@dataclass(slots=True, eq=False)
class Attempt(Question):
    """What one call does to acquire a resource, from its first request to its grant or undo: see Core.attempt."""

    # What the caller wants, of the resource of the question
    token: str
    options: AcquireOptions = NO_LEASE  # max_hold may end the lease before the ttl: see AcquireOptions.capped
    timeout: float | None = None  # seconds that the caller waits: None is for ever
    until: float = FOREVER  # when the caller's time is over
    event: AutoResetEvent | None = None  # wakes the caller; None if the caller does not wait
    make_lease: Callable[[Any, Grant], Any] | None = None  # of the Core and the grant; None: it gets no lease
    busy: Callable[[Resource, float, Any], LockError] | None = None  # makes the error for a refusal
    should_stop: Callable[[], bool] | None = None  # whether the caller gave up waiting
    caller: weakref.ref[Any] | None = None  # the thread or task that acquires; None if nobody knows
    place: Place | None = None  # where the user's code acquires
    generation: str = ""  # in which the attempt waits, if its resource has generations
    # What became of it
    abandoned: bool = False  # no caller waits for this attempt any more
    is_queued: bool = False  # the attempt stands in the queue
    was_granted: bool = False  # also if the grant expired on its way
    expired_grants: int = 0  # grants that expired on their way
    last_queued: Queued | None = None  # the last reply that the caller has to wait
    look_at: float = FOREVER  # once it has waited: when it looks whether it waits for itself
    proven_identity: str = ""  # the lost identity about which a search found that no lease was lost; or NO_PROOF
    extended_until: float = 0.0  # until when the server may keep the lease after extend()
    waits_since: float = FOREVER  # since when the caller waits; FOREVER if it never had to
    outer_loss: LeaseLost | None = None  # somebody revoked the lease of a `with` inside of which the thread waits
    observation: Any = None  # what observers keep about it: nothing here reads it

    @property
    def ttl(self) -> float:
        """The ttl of the lease, in seconds."""
        return self.options.ttl

    @property
    def ttl_ms(self) -> str:
        """The ttl in the words of an acquire."""
        return self.options.ttl_ms

    @property
    def handover_ttl_ms(self) -> str:
        """The handover ttl in the words of an acquire."""
        return self.options.handover_ttl_ms

    @property
    def live_caller(self) -> Any:
        """The thread or task that acquires; None if it is gone, or if nobody knows it."""
        return self.caller() if self.caller is not None else None

    @property
    def counts_once(self) -> bool:
        """Whether this is an arrival that knows no generation yet."""
        return self.resource.counts_arrivals and not self.generation

    def go_on_for(self, former: Attempt) -> None:
        """Go on with what another caller of the same lock has left: its token, and its place in the server's queue.

        The former attempt gets the token of this one, about which the server has never been asked.
        """
        self.is_queued, self.was_granted = former.is_queued, former.was_granted
        self.in_doubt, self.unanswered_since = former.in_doubt, former.unanswered_since
        self.last_queued, self.generation = former.last_queued, former.generation
        self.proven_identity = former.proven_identity
        unused = self.token
        self.token = former.token
        former.token = unused
        former.is_queued = former.was_granted = former.in_doubt = False

    def claim(self, token: str) -> Attempt:
        """A new attempt in doubt, whose release gives back what this one may have in the server under this token."""
        claim = Attempt(self.resource, token, self.options)
        claim.in_doubt = True
        return claim

    def lasts_until(self, now: float) -> float:
        """The latest time at which the server forgets this attempt, if no further request about the attempt arrives."""
        return max(now + max(self.ttl, HANDOVER_TTL), self.extended_until)


@dataclass(slots=True, eq=False)
class Hold:
    """One token that the server has granted, until it is released or lost."""

    claim: Attempt  # the attempt that was granted, and what its release says
    token: str  # of the claim when the server granted it
    last_answered_sent: float  # the lease was not revoked before this time, at which the last answered request was sent
    deadline: float  # until when the holder may rely on the lease
    max_hold_until: float = FOREVER  # when max_hold ends the lease
    fork_count: int = 0  # of the process in which the lease was granted: see `forks`
    renewal_failing: bool = False
    unanswered: int = 0  # requests of the lease's user, to extend or to execute, that have no reply
    due: float = FOREVER  # the key of its bucket in the book, which alone knows whether it is there
    grant: Grant | None = None  # what it carries now; None: it has ended

    @property
    def resource(self) -> Resource:
        """What is held."""
        return self.claim.resource

    @property
    def ttl(self) -> float:
        """For how long the server grants it at a time, in seconds."""
        return self.claim.options.ttl

    @property
    def renews(self) -> bool:
        """Whether the client renews it."""
        return self.claim.options.renew

    @property
    def live_grant(self) -> Grant | None:
        """The grant that it carries; None if the client has released it, or has noticed that it is lost."""
        grant = self.grant
        return grant if grant is not None and grant.end_reason is None else None

    @property
    def jeopardy_after(self) -> float:
        """When the lease is in jeopardy, unless a renewal succeeds before: at ttl/2. The renewal is due at ttl/3."""
        return self.last_answered_sent + self.claim.options.ttl / 2

    @property
    def may_get_into_jeopardy(self) -> bool:
        """Whether a late renewal would be news: it is renewed, and no failure was reported."""
        return self.claim.options.renew and not self.renewal_failing and self.deadline < self.max_hold_until

    def extend_deadline(self, sent: float, ttl: float, drift: float) -> None:
        """Move the deadline: a request sent at `sent` was granted, or lengthened the lease. Never shortens.

        `drift` is that of the server.
        """
        self.renewal_failing = False
        self.last_answered_sent = sent
        deadline = sent + ttl - margin(ttl, drift)
        if deadline > self.deadline:
            self.deadline = min(self.max_hold_until, deadline)


@dataclass(slots=True, eq=False)
class Grant:
    """What one caller has of a hold, for its section: until when the caller may rely on it, and why it ended."""

    RELEASED: ClassVar[str] = "it was released"
    EXPIRED: ClassVar[str] = "its ttl passed without a renewal"
    FORKED: ClassVar[str] = "it belongs to the parent process, and a child holds nothing after a fork"

    hold: Hold
    attempt: Attempt  # of the caller whose section it is
    fence: int  # 0 until the server has reserved one for it
    since: float = 0.0  # `now()` of the client when its caller acquired it
    end_reason: str | None = None  # why it ended; None before
    held_by: weakref.ref[Any] | None = None  # the Section of the `with` or of the decorated call that acquired it
    in_with: bool = False  # a `with` of its lockable acquired it, and so gives it back
    lease: weakref.ref[Any] | None = None  # the Lease that is notified of its end; None before the section begins

    @property
    def resource(self) -> Resource:
        """What is held."""
        return self.attempt.resource

    @property
    def token(self) -> str:
        """Who holds it, as the server knows it."""
        return self.hold.token

    @property
    def has_passed(self) -> bool:
        """Whether its hold carries a later grant by now."""
        current = self.hold.grant
        return current is not self and (current is not None or self.end_reason is None)

    @property
    def is_orphan(self) -> bool:
        """Whether nobody can release the lease: its Lease is garbage, or the caller to which it passed has given up."""
        return self.attempt.abandoned if self.lease is None else self.lease() is None

    @property
    def log_fields(self) -> dict[str, object]:
        """The attributes of a log record about this lease."""
        return lock_fields(self.attempt.resource, self.fence, self.token)

    @property
    def why_ended(self) -> str | None:
        """Why it ended; None if it did not, or if nobody has noticed yet that its time is over."""
        is_own = KNOWN[0] and self.hold.fork_count == forks.count
        return self.end_reason if is_own else self.FORKED

    def reason_ended(self, now: float) -> str | None:
        """Why its caller can't rely on the lease at this time, or None if it can."""
        hold = self.hold
        if not KNOWN[0] or hold.fork_count != forks.count:
            self.end_reason = self.FORKED
        if self.end_reason is not None:
            return self.end_reason
        if hold.grant is not self:
            return self.RELEASED
        if now < hold.deadline:
            return None
        if hold.deadline == hold.max_hold_until:
            return "its max_hold is over"
        return self.EXPIRED if hold.renews else "its ttl passed"

    def end(self, why: str) -> None:
        """Note why it ended, unless it had ended before; and that its hold has ended with it, unless that has passed.

        Does no I/O and takes no lock, since a finalizer may call this.
        """
        self.end_reason = self.end_reason or why
        if self.hold.grant is self:
            self.hold.grant = None

    def mark_released(self) -> None:
        """End it by the client's own decision, and notify the Lease."""
        if self.end_reason is None:
            self.end(self.RELEASED)
            self.announce_release()

    def announce_release(self) -> None:
        """Notify the Lease that the client has released it."""
        if (lease := self.lease() if self.lease else None) is not None:
            lease._on_end()

    def error(self, why: str) -> LeaseLost:
        """The error for the holder of a lease that ended for this reason."""
        error = LeaseLost(
            f"the lease on {self.resource} has ended: {why}. Acquire it again"
            if why == self.RELEASED
            else f"the lease on {self.resource} (fence {self.fence}) is lost: {why}. "
            + (
                "Stop writing, and acquire it in the child"
                if why == self.FORKED
                else "Stop writing: another holder may be at work"
            )
        )
        error.token, error.name = self.token, self.resource.name
        return error


def last_answer_counts(attempt: Attempt, now: float) -> bool:
    """Whether the last reply about this attempt still counts: no later request has waited for its own for too long."""
    return now - attempt.unanswered_since < ANSWER_COUNTS_FOR


def tombstone_ms(attempt: Attempt) -> str:
    """How long a tombstone of this attempt must last, in ms. Only an attempt in doubt needs a tombstone."""
    return str(int(TOMBSTONE_TTL * 1000)) if attempt.in_doubt else "0"
