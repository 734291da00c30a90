"""The cohort: the callers of one process that want one lock. One of them asks the server, the others wait behind it.

Theory (ADR 20). Either one caller of a cohort is its *driver*, whose requests ask the server; or the cohort holds the
lock, and one caller is in its *section*. All others wait here, in their order of arrival. When a section ends, its
lease may pass to the first that waits, under the same token and with the next fence: no request, no reply. The source
of the idea is lock cohorting: Dice, Marathe and Shavit, 2012.

Rules.
(a) While a caller waits, a driver or a section is before it. So a step that leaves neither makes the first caller that
    waits the driver.
(b) A driver that leaves hands its token on to the next one, and with the token its place in the server's queue. Nothing
    is undone while others wait.
(c) A lease passes only if it is certainly alive: see `may_pass`. Else the section releases it, and the next caller asks
    the server.
(d) No caller gets a fence that the server has not reserved in the lock's record.
(e) While others wait in the server's queue, a hold passes on for `BUDGET` at most, and `RESERVED` times at most. So no
    process starves another.
(f) An interrupt may come between any two lines. So each step has one line from which on it counts, and a caller stays
    in the queue until it has looked: the worker of ends wakes again those whose turn it is (`Cohorts.look`).

Nothing here knows threads, a clock or I/O. `Cohorts` calls these methods under the mutex; only `begin` needs none.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from interlock._client.grant import last_answer_counts
from interlock._protocol.timing import FOREVER, SHORT_SILENCE
from interlock.primitives.messages import Queued

if TYPE_CHECKING:
    from interlock._client.grant import Attempt, Grant, Hold

RESERVED: Final = 64  # fences that one request reserves: after so many sections the client asks the server again
BUDGET: Final = 0.010  # seconds for which a hold still passes on once the server has said that others wait
RESERVED_FOR: Final = 0.1  # seconds: if the last answer is older, the client asks before the next section begins
OTHERS_WAIT: Final = Queued(b"", 0, is_head=False)
NOBODY: Final[dict[Attempt, None]] = {}  # the `waiting` of every lock without contention: one dict for all of them


class Turn(Enum):
    """What a caller may do, if no lease has passed to it."""

    ASK = "the server"
    WAIT = "behind the others"


class Cohort:
    """The callers of one process on one lock."""

    __slots__ = ("_driver_since", "driver", "hold", "reservation", "ttl_ms", "waiting")

    def __init__(self, driver: Attempt) -> None:
        self.ttl_ms = driver.options.ttl_ms  # of each of its leases
        self.driver: Attempt | None = driver
        self.hold: Hold | None = None  # whose section a caller is in, or just wakes for
        self.waiting = NOBODY  # in order of arrival; those, too, whose turn has come and who have not looked yet
        self.reservation: Reservation | None = None  # of this hold; None before its lease has passed on
        self._driver_since = FOREVER  # since when drivers have asked while others wait; FOREVER: nobody has noticed

    @property
    def section(self) -> Grant | None:
        """The grant of the caller that is in its section, or just wakes for it."""
        return self.hold.grant if self.hold is not None else None

    # Callers

    def arrive(self, attempt: Attempt, now: float) -> Attempt | None:
        """Let this caller wait behind all others. Returns the caller that is the driver by now, if that is news."""
        if self.waiting is NOBODY:
            self.waiting = {}
        self.waiting[attempt] = None
        self._driver_since = min(self._driver_since, now)
        driver = self.promote(now)
        if driver is attempt:
            del self.waiting[attempt]
        return driver

    def turn(self, attempt: Attempt) -> Turn | Grant:
        """What this caller may do: ask the server, wait, or begin its section, under this grant."""
        grant = self.section
        if self.driver is attempt:
            turn: Turn | Grant = Turn.ASK
        elif grant is not None and grant.attempt is attempt:
            turn = grant
        else:
            return Turn.WAIT
        self.waiting.pop(attempt, None)
        return turn

    def whose_turn(self, now: float) -> Attempt | None:
        """The caller before all others, if it has not looked yet."""
        turn = self.promote(now) or self.driver or (grant.attempt if (grant := self.section) is not None else None)
        return turn if turn in self.waiting else None

    def leave(self, attempt: Attempt, now: float) -> Attempt | None:
        """Forget this caller, which is abandoned. Returns the caller that is the driver by now, if that is news."""
        self.waiting.pop(attempt, None)
        if (grant := self.section) is not None and grant.attempt is attempt:
            self.hold = None
        driver = self.promote(now)
        if self.driver is attempt:
            self.driver = None
        return driver

    def drive_instead(self) -> None:
        """Let the caller of the section drive, since its turn came with a lease that has ended."""
        grant = self.section
        assert grant is not None
        self.driver, self._driver_since = grant.attempt, FOREVER
        self.hold = None

    def promote(self, now: float) -> Attempt | None:
        """Make the first that waits the driver, if nobody is before it. Returns the new driver, which must be woken."""
        former, grant = self.driver, self.section
        if former is not None and not former.abandoned:
            return None
        if grant is not None and not grant.attempt.abandoned and grant.reason_ended(now) is None:
            return None
        for first in list(self.waiting):
            if not first.abandoned:
                if former is not None:
                    first.go_on_for(former)
                else:
                    self._driver_since = now
                self.hold = None
                self.driver = first
                return first
        return None

    def blocking(self, now: float, arrived: float, *, answered: bool = False) -> Queued | None:
        """What keeps a caller waiting that arrived then, as a reply of the server says it.

        None if the server is silent: it has not answered the driver for half of the time that this caller has waited.
        A short time without an answer is no silence if the server has lately `answered` other requests.
        """
        driver, grant = self.driver, self.section
        if grant is not None:
            left = max(0.0, grant.hold.deadline - now)
            return Queued(grant.token.encode(), int(left * 1000), is_head=False)
        if driver is None:
            return OTHERS_WAIT
        if not last_answer_counts(driver, now):
            return None
        # A driver that has asked nothing yet may be unable to: a signal handler runs in its thread, say.
        silent_since = self._driver_since if driver.unanswered_since == FOREVER else driver.unanswered_since
        is_short = answered and now - silent_since < SHORT_SILENCE
        is_silent = not is_short and now - self._driver_since >= (now - arrived) / 2
        return driver.last_queued or (None if is_silent else OTHERS_WAIT)

    @property
    def is_idle(self) -> bool:
        """Whether it has no caller."""
        return self.driver is None and self.section is None and not self.waiting

    # Sections

    def begin(self, hold: Hold) -> None:
        """Note that the server granted the lock to the driver. The driver needs no mutex for that."""
        self.reservation, self._driver_since = None, FOREVER
        self.hold = hold
        self.driver = None

    def end(self, now: float) -> Attempt | None:
        """Note that the hold ends here. Returns the new driver, which must be woken."""
        self.hold = None
        return self.promote(now)

    def first(self) -> Attempt | None:
        """The caller to which a lease would pass."""
        return next((attempt for attempt in self.waiting if not attempt.abandoned), None)

    def may_pass(self, grant: Grant, now: float) -> bool:
        """Whether the lease of this grant may pass to the first that waits."""
        hold = grant.hold
        return (
            self.hold is hold
            and grant.reason_ended(now) is None
            and hold.deadline - now >= hold.ttl / 2
            and not hold.renewal_failing
            and hold.unanswered == 0
            and hold.claim.extended_until <= now + hold.ttl
            and not hold.claim.in_doubt
            and (self.reservation is None or self.reservation.may_pass(now))
        )

    def take_reserved_fence(self, now: float) -> int:
        """The fence of the next section; 0 if the server must be asked first, for fences or for a fresh reply."""
        return self.reservation.take(now) if self.reservation is not None else 0

    def note_reserved_fences(self, fence: int, now: float, *, sent: float, others_wait: bool) -> None:
        """Note the reply to a reservation: the section's fence, before the reserved ones, and whether others wait."""
        if self.reservation is None:
            self.reservation = Reservation()
        self.reservation.renew(fence + 1, now, sent=sent, others_wait=others_wait)


class Reservation:
    """The fences that a hold has reserved, and whether others waited when the server was last asked."""

    __slots__ = ("_asked_at", "_left", "_next", "_passes_until")

    def __init__(self) -> None:
        self._next = 0
        self._left = 0  # how many fences are left, from `_next` on
        self._asked_at = 0.0  # when the server was asked
        self._passes_until = FOREVER  # when the hold must be released, since others wait

    def may_pass(self, now: float) -> bool:
        """Whether the budget is left, if others wait."""
        return self._passes_until == FOREVER or (now < self._passes_until and self._left > 0)

    def take(self, now: float) -> int:
        """The next fence; 0 if none is left, or the server's reply is too old."""
        if self._left == 0 or now - self._asked_at > RESERVED_FOR:
            return 0
        fence = self._next
        self._left, self._next = self._left - 1, fence + 1
        return fence

    def renew(self, following: int, now: float, *, sent: float, others_wait: bool) -> None:
        """Note that the server has reserved the fences from this one on, and whether others wait."""
        self._next, self._left, self._asked_at = following, RESERVED - 1, sent
        if not others_wait:
            self._passes_until = FOREVER
        elif self._passes_until == FOREVER:
            self._passes_until = now + BUDGET
