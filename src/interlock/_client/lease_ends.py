"""The ends of leases: the client ends each lease once, and tells its holder, the log and the observers why.

Theory. A lease ends because its holder lets go of it, or because it is lost: its time is over, or the server says that
it is not ours any more. Whoever learns of a loss first calls `lose`: a caller, the renewer, the listener of pushes, or
the worker of ends, which looks at the clock. This worker does no I/O and runs no code of a user (see `Reports`), so
neither a silent server nor a slow handler delays it.

Rules.
(a) A failed renewal is not a loss: the lease is in jeopardy, and the client tries again until the deadline.
(b) A hold that ended is out of the book before its release is sent; a reply that arrives later changes nothing.
(c) Somebody owns each lease that the client renews: its Lease is alive, or a caller of the cohort wakes for it. Python
    drops an exception that a signal handler raises in a finalizer, and does not call that finalizer again; so when a
    lease is due, the worker of ends looks whether its Lease is garbage, and ends the lease in the finalizer's stead.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from interlock._client.book import next_due
from interlock._client.error_texts import ENDED_BEFORE_RELEASE, seconds_text
from interlock._client.grant import Grant, Hold
from interlock._client.people import Points
from interlock._client.places import line_of
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock._client.book import Book
    from interlock._client.cohorts import Cohorts
    from interlock._client.grant import Attempt
    from interlock._client.reports import Reports
    from interlock._client.undo import Undo
    from interlock._client.waiting import Waiters

DROPPED: Final = "it was dropped without release"  # why such a lease ended


class LeaseEnds:
    """What ends the leases of one client. As a task, it finds those whose time is over and those that are due."""

    def __init__(
        self,
        book: Book,
        cohorts: Cohorts,
        undo: Undo,
        waiters: Waiters,
        reports: Reports,
        wake_renewer_at: Callable[[float], None],
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.book = book
        self.runtime = book.runtime
        self.cohorts = cohorts
        self.undo = undo
        self.waiters = waiters  # this worker wakes them after a subscription, since no silent server delays it
        self.reports = reports  # what a user's code learns: nothing here calls it
        self.points = Points()  # what observers learn of workers, which leave it to `reports`; the renewer shares it
        self.wake_renewer_at = wake_renewer_at
        self.on_tick = on_tick  # called at least once a second while a lease is held
        self.orphans: deque[tuple[Grant, str]] = deque()  # leases that nobody can release, and why they end
        self.dropped: deque[tuple[float, Attempt]] = deque(maxlen=1000)  # see _remember_for_close()
        self.next_end = FOREVER  # the first deadline of the leases that are set aside
        self._late_at: dict[Hold, float] = {}  # when the renewal of each lease that is set aside will be late

    # What ends a lease

    def end(self, hold: Hold) -> None:
        """Renew this lease no more, since it ends here. The next caller of its cohort asks the server."""
        self.book.remove(hold)
        if hold.claim.options.joins:
            self.cohorts.end(hold)

    def lose(self, grant: Grant, why: str) -> None:
        """Mark the lease of this grant as lost, and report the loss once. Does nothing if it has passed on."""
        hold, why = grant.hold, self.why_lost(grant, why)
        with self.runtime.mutex:  # a reply may arrive at the moment of the deadline
            if grant.has_passed:
                return
            had_ended = grant.end_reason is not None
            lease = grant.lease() if grant.lease is not None and not had_ended else None
            if not had_ended:
                self._remember_for_close(hold)  # first: close() finds it here or among the held
            grant.end(why)
        self.end(hold)
        if grant.lease is None:  # its turn has come, and nobody has looked: so nobody will release it
            self.undo.add(hold.claim)
        self._report_to_holder(grant, lease)
        if not had_ended:  # after the holder has learned of it
            self._log_loss(grant, why, str(grant.error(why)))

    def why_lost(self, grant: Grant, why: str) -> str:
        """This reason; and for how long the process stood still, if that kept the client from renewing the lease.

        It stood still if the worker of ends was to run before the last third of the ttl, and had not run at its end.
        """
        hold, now, since = grant.hold, self.runtime.now(), self.book.worker.late_since
        if why != Grant.EXPIRED or hold.renewal_failing or not since + hold.ttl / 3 <= hold.deadline <= now:
            return why
        return f"{why}, since this process (or its event loop) stood still for {seconds_text(now - since)}"

    def lose_hold(self, hold: Hold, why: str) -> None:
        """Mark this lease as lost, whichever grant it carries."""
        if (grant := hold.grant) is not None:
            self.lose(grant, why)
        self.book.remove(hold)

    def lose_late(self, grant: Grant, lease: Any) -> None:
        """Report a loss that the reply to a release has shown, for which the end of the `with` did not wait."""
        grant.end_reason = ENDED_BEFORE_RELEASE
        self._report_to_holder(grant, lease)
        self._log_loss(grant, ENDED_BEFORE_RELEASE, str(grant.error(ENDED_BEFORE_RELEASE)))

    def revoked(self, token: str, why: str) -> None:
        """Handle the push that this lease was revoked, with the reason that the revoker gave."""
        if (hold := self.book.note_revocation(token, why)) is not None:
            self.lose_hold(hold, f"it was revoked: {why}")

    def orphaned(self, grant: Grant, why: str) -> None:
        """End a lease that nobody can release any more. A finalizer calls this: it does no I/O, and takes no lock.

        If `why` is DROPPED, its caller may still work, so the lease runs out by itself, unless the session closes
        before. Else the worker releases it.
        """
        # First, since an interrupt may end the finalizer at any later step: the worker of ends then does the rest.
        self.orphans.append((grant, why))
        grant.end_reason = grant.end_reason or why

    def end_orphans(self) -> Iterator[tuple[Hold, str]]:
        """End what finalizers have left. Yields each hold and why it ended; the log names each that was dropped.

        A hold stays among the orphans until the next one is asked for: close() finds it there, or where it went.
        """
        with contextlib.suppress(IndexError):  # empty, or another thread has just emptied it
            while self.orphans:
                orphan = grant, why = self.orphans[0]
                now, has_passed = self.runtime.now(), grant.has_passed  # an interrupt may have come after that
                try:
                    if not has_passed:
                        grant.end(why)
                        self.book.remove(grant.hold)
                        if why == DROPPED:
                            self._remember_for_close(grant.hold)
                        yield grant.hold, why
                finally:  # after an error, too: it must not keep the worker from the other leases
                    is_first = self._forget(orphan)
                if is_first and not has_passed:
                    self._report_orphan(grant, why, now)

    def _forget(self, orphan: tuple[Grant, str]) -> bool:
        """Keep this orphan no more. Returns False if another thread has forgotten it: then that one reports."""
        try:
            self.orphans.remove(orphan)
        except (ValueError, IndexError):
            return False
        return True

    def _report_orphan(self, grant: Grant, why: str, now: float) -> None:
        if why == DROPPED:
            self._log_loss(grant, DROPPED, dropped_text(grant, now))
        elif (people := self.points.people) is not None:
            people.released(grant, now)

    def _remember_for_close(self, hold: Hold) -> None:
        """Keep the claim, so that `close()` undoes it while the server may still know the lease."""
        now = self.runtime.now()
        with contextlib.suppress(IndexError):  # empty, or another thread has just emptied it
            while self.dropped[0][0] < now:
                self.dropped.popleft()
        self.dropped.append((hold.claim.lasts_until(now), hold.claim))

    # What people learn

    def note_jeopardy(self, hold: Hold, what: str, now: float) -> None:
        """Log once that the lease is in jeopardy, until a renewal succeeds."""
        grant = hold.grant
        if not hold.renewal_failing and grant is not None:
            hold.renewal_failing = True
            left = f"lost in {hold.deadline - now:.3g} s unless a renewal succeeds"
            self._log(grant, f"{hold.resource}: {what}. The lease (fence {grant.fence}) is in jeopardy, and {left}")
            if (people := self.points.people) is not None:
                people.renewal_failed(grant)

    def _report_to_holder(self, grant: Grant, lease: Any) -> None:
        """Report the loss to the Lease, if there is one."""
        if lease is not None:
            try:
                lease._on_lost()
            except Exception as error:  # noqa: BLE001 (one failed report must not stop the reports of other losses)
                self._log(grant, f"interlock: the loss of {grant.resource} could not be reported", error)

    def _log_loss(self, grant: Grant, why: str, text: str) -> None:
        self._log(grant, text)
        if (people := self.points.people) is not None:
            people.lost(grant, why, self.runtime.now())

    def _log(self, grant: Grant, text: str, error: Exception | None = None) -> None:
        """Let the worker of reports log this about a lease."""
        self.reports.add(lambda: log.warning("%s", text, exc_info=error, extra=grant.log_fields))

    # The task of the worker of ends

    def due(self) -> float:
        """The latest time at which the worker must run this task."""
        now = self.runtime.now()
        due = min(self.next_end, self.cohorts.next_look, self.book.due(now))
        # Read last: a finalizer adds here first, then takes its lease out of the book.
        return now if self.orphans or self.waiters.resubscribed else due

    async def tick(self) -> None:
        """Report the leases that have ended, and set aside those that are due."""
        now = self.runtime.now()
        has_leases = self.book.subscribe_for_oldest(now)
        for hold, why in self.end_orphans():
            self.end(hold)
            if why != DROPPED:
                self.undo.add(hold.claim)
        self.waiters.wake_resubscribed()
        if now >= self.cohorts.next_look:
            self.cohorts.look()
        self.take_due()
        self.next_end = self.report_ends()
        if self.on_tick is not None and has_leases:
            self.on_tick()

    def take_due(self) -> None:
        """Set aside the leases that are due for a renewal, or for the question whether they were revoked."""
        now, book = self.runtime.now(), self.book
        # A lease stays set aside if the renewer is to lengthen the lease, or to ask whether it was revoked.
        for hold in book.put_due_aside(now):
            grant = hold.live_grant
            if grant is None:
                continue
            if grant.is_orphan:  # see rule (c)
                self.orphaned(grant, Grant.RELEASED if grant.in_with or grant.lease is None else DROPPED)
                continue
            lengthens = hold.renews and hold.deadline < hold.max_hold_until
            if not lengthens and not book.may_have_missed_revocation(hold) and grant.reason_ended(now) is None:
                book.schedule(hold, next_due(hold, renews=False))
        if book.set_aside:
            self.wake_renewer_at(now)

    def report_ends(self) -> float:
        """Report each lease that has ended among those set aside. Returns the next deadline among the rest."""
        now, first, late_at = self.runtime.now(), FOREVER, dict[Hold, float]()
        for hold in list(self.book.set_aside.values()):
            grant = hold.live_grant
            if grant is None:
                self.book.remove(hold)
            elif why := grant.reason_ended(now):
                self.lose(grant, why)
            else:
                first = min(first, hold.deadline)
                if hold.may_get_into_jeopardy:
                    first = min(first, self._look_for_jeopardy(hold, now, late_at))
        self._late_at = late_at
        return first

    def _look_for_jeopardy(self, hold: Hold, now: float, late_at: dict[Hold, float]) -> float:
        """Log that the renewal of this lease is late, if it is. Returns when it will be, and notes that in `late_at`.

        That is a sixth of the ttl after it was set aside: a process that was stopped may have to catch up first.
        """
        late = max(hold.jeopardy_after, self._late_at.get(hold, now + hold.ttl / 6))
        late_at[hold] = late
        if late <= now:
            self.note_jeopardy(hold, "its renewal is late", now)
            return FOREVER
        return late


def dropped_text(grant: Grant, now: float) -> str:
    """What people learn of a lease that was dropped without a release."""
    claim = grant.hold.claim
    left = max(claim.ttl, round(claim.extended_until - now, 3))
    return (
        f"{grant.resource}: a lease was dropped without release; it was acquired at {line_of(grant.attempt.place)}. It "
        f"is renewed no more, and keeps others out for up to {left:g} s. Use `with`, or call release()"
    )
