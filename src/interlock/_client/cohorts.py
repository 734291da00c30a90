"""All cohorts of one client, by the key of their lock: the steps of `cohort.py`, in the threads that take them.

Theory. A step takes place under the mutex, and wakes at most one caller afterwards; a caller that is alone needs none
(see `join`). A caller that wakes calls `turn`, which says what the caller may do: ask the server, begin a section, or
wait on. So an event is only a hint, here as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._client.cohort import OTHERS_WAIT, Cohort, Turn
from interlock._client.grant import Grant
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.book import Book
    from interlock._client.grant import Attempt, Hold
    from interlock._protocol.runtime import Runtime
    from interlock.primitives.messages import Queued


LOOK_INTERVAL: Final = 2.0  # seconds between two looks of the worker


class Cohorts:
    """The cohorts of one client."""

    def __init__(self, runtime: Runtime, book: Book, wake_at: Callable[[float], None]) -> None:
        self.runtime = runtime
        self.book = book
        self.wake_at = wake_at
        self.next_look = FOREVER  # when the worker of ends looks; FOREVER if nobody waits
        self.by_key: dict[str, Cohort] = {}

    # Callers

    def join(self, attempt: Attempt) -> bool:
        """Let this caller enter the cohort of its lock. Returns whether it asks the server; else it waits its turn."""
        key = attempt.resource.keys[0]
        # Nearly always the caller is alone, and then this one step without the mutex is enough.
        if (self.by_key.get(key) or self.by_key.setdefault(key, Cohort(attempt))).driver is attempt:
            return True
        with self.runtime.mutex:
            cohort = self.by_key.get(key) or self.by_key.setdefault(key, Cohort(attempt))
            # With another ttl it asks by itself, since a lease that passes on keeps its ttl.
            if cohort.driver is attempt or cohort.ttl_ms != attempt.options.ttl_ms:
                return True
            attempt.event = attempt.event or self.runtime.event()
            now = self.runtime.now()
            driver = cohort.arrive(attempt, now)
        _wake(driver)
        if self.next_look == FOREVER:
            self.wake_at(now + LOOK_INTERVAL)  # first: an interrupt may come between the two
            self.next_look = now + LOOK_INTERVAL
        return driver is attempt

    def turn(self, attempt: Attempt) -> Turn | Grant:
        """What this caller may do: ask the server, wait, or begin its section, under this grant."""
        key = attempt.resource.keys[0]
        with self.runtime.mutex:
            cohort = self.by_key.get(key) or self.by_key.setdefault(key, Cohort(attempt))
            if (turn := cohort.turn(attempt)) is not Turn.WAIT:
                return turn
            if cohort.ttl_ms != attempt.options.ttl_ms:  # its own cohort has ended, and this is another one: see join()
                return Turn.ASK
            driver = cohort.arrive(attempt, self.runtime.now())
        _wake(driver)
        return Turn.ASK if driver is attempt else Turn.WAIT

    def leave(self, attempt: Attempt) -> Grant | None:
        """Forget this caller, which is abandoned. Returns the grant that had passed to it, and that nobody will use."""
        key = attempt.resource.keys[0]
        with self.runtime.mutex:
            cohort = self.by_key.get(key)
            if cohort is None:
                return None
            grant, driver = cohort.section, cohort.leave(attempt, self.runtime.now())
            if cohort.is_idle:
                del self.by_key[key]
        _wake(driver)
        return grant if grant is not None and grant.attempt is attempt else None

    def drive_instead(self, grant: Grant) -> None:
        """Let the caller of this grant ask the server, since its turn came with a lease that has ended."""
        with self.runtime.mutex:
            cohort = self.by_key.get(grant.resource.keys[0])
            if cohort is not None and cohort.section is grant:
                cohort.drive_instead()

    # Sections

    def end(self, hold: Hold) -> None:
        """Note that this hold ends here, and let the next caller ask the server."""
        key = hold.claim.resource.keys[0]
        with self.runtime.mutex:
            cohort = self.by_key.get(key)
            if cohort is None or cohort.hold is not hold:
                return
            if not cohort.waiting:  # nearly always
                del self.by_key[key]
                return
            driver = cohort.end(self.runtime.now())
            if cohort.is_idle:  # else begin() may just be at work in another thread
                del self.by_key[key]
        _wake(driver)

    def pass_on(self, grant: Grant, now: float) -> bool:
        """Pass the lease to the first that waits, and so end this section. Returns False if it must be released."""
        hold = grant.hold
        cohort = self.by_key.get(hold.claim.resource.keys[0])
        if cohort is None or not cohort.waiting:
            return False
        with self.runtime.mutex:
            first = cohort.first()
            if first is None or not cohort.may_pass(grant, now) or not self.book.may_pass(hold):
                return False
            hold.grant = Grant(hold, first, cohort.take_reserved_fence(now), now)  # from here on it has passed
            grant.mark_released()
        _wake(first)
        return True

    def note_reserved_fences(self, grant: Grant, fence: int, *, sent: float, others_wait: bool) -> None:
        """Note the reply to a reservation: the fence of this section, and that the cohort has the fences after it."""
        with self.runtime.mutex:
            cohort = self.by_key.get(grant.resource.keys[0])
            if cohort is not None and cohort.section is grant:
                cohort.note_reserved_fences(fence, self.runtime.now(), sent=sent, others_wait=others_wait)
            grant.fence = fence

    def blocking(self, attempt: Attempt, arrived: float, *, answered: bool = False) -> Queued | None:
        """What keeps this caller waiting, as a reply of the server says it. None if the server is silent.

        `answered`: the server has lately answered other requests.
        """
        with self.runtime.mutex:
            cohort = self.by_key.get(attempt.resource.keys[0])
            now = self.runtime.now()
            return cohort.blocking(now, arrived, answered=answered) if cohort is not None else OTHERS_WAIT

    def is_inside(self, attempt: Attempt) -> bool:
        """Whether the caller of this attempt is in the section for which it waits."""
        cohort = self.by_key.get(attempt.resource.keys[0])
        grant = cohort.section if cohort is not None else None
        return grant is not None and grant.attempt.caller is attempt.caller is not None

    def is_before(self, other: Attempt, attempt: Attempt) -> bool:
        """Whether the caller of this attempt waits behind the other one: the driver, the section, or one that waits."""
        with self.runtime.mutex:
            cohort = self.by_key.get(attempt.resource.keys[0])
            if cohort is None:
                return False
            inside = grant.attempt if (grant := cohort.section) is not None else None
            return other is cohort.driver or other is inside or other in cohort.waiting

    def look(self) -> None:
        """Wake those whose turn it is, in case an interrupt has cost a wake-up; and those that look for a self-wait."""
        now = self.runtime.now()
        self.next_look = FOREVER  # first: join() sets it for a caller that arrives after this look
        with self.runtime.mutex:
            every = list(self.by_key.values())  # in one step, since join() adds without the mutex
            crowded = [cohort for cohort in every if cohort.waiting]
            due = [cohort.whose_turn(now) for cohort in crowded]
            due += [attempt for cohort in crowded for attempt in cohort.waiting if attempt.look_at <= now]
        if crowded:
            self.next_look = now + LOOK_INTERVAL
        for attempt in due:
            _wake(attempt)

    def waiting(self) -> list[Attempt]:
        """The callers that wait in this process, and ask no server."""
        with self.runtime.mutex:
            return [attempt for cohort in list(self.by_key.values()) for attempt in cohort.waiting]

    def wake_all(self) -> None:
        """Let each caller that waits look again: the client is closed."""
        for attempt in self.waiting():
            _wake(attempt)


def _wake(attempt: Attempt | None) -> None:
    if attempt is not None and attempt.event is not None:
        attempt.event.set()
