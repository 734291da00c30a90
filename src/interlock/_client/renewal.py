"""Keeping many leases alive: the client renews each lease at ttl/3, many in one call, and reports each end.

Theory. Each hold is in the bucket of the time at which the hold is due: for its renewal, or for its end if the lease
is not renewed or the server is away. A bucket is a dict, so a release takes its hold out of the bucket in one step,
without a search and without a wake-up. The worker of ends (`LeaseEnds`) looks only at buckets that are due, and does no
I/O: it reports each lease that has ended, and sets aside the leases to renew for the worker of renewals, which asks the
server.

Rules.
(a) A failed renewal is not a loss: the lease is in jeopardy, and the client tries again until the deadline.
(b) The fixed rate is ttl/3, counted from the moment at which the last renewal was sent.
(c) One bad key never delays another key: the script answers for each key separately. `RENEWAL_TIMEOUT` bounds each
    call, so that a slow call does not make the other renewals late. No call delays the report that a lease has ended.
(d) A hold that ended is out of its bucket before its release is sent; a reply that arrives later changes nothing.
(e) The client learns of a revocation within a second. A short section needs no subscription, so the client asks about
    a lease that was granted without a subscribed channel once that lease is `SUBSCRIBE_AFTER` old. After each new
    subscription the client asks at once about every lease on that channel. If the push of a revocation arrives before
    the reply that grants the lease, `early_revocations` keeps the revocation.
(f) Timers stand still while the machine sleeps, and the clock does not: no worker sleeps longer than ttl/10 or 1 s.
(g) Somebody owns each lease that the client renews: its Lease is alive, or a caller of the cohort wakes for it. Python
    drops an exception that a signal handler raises in a finalizer, and does not call that finalizer again; so when a
    lease is due, the worker of ends looks whether its Lease is garbage, and ends the lease in the finalizer's stead.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.cohorts import Cohorts
from interlock._client.error_texts import ENDED_BEFORE_RELEASE, OLD_PRIMARY_MAY_GRANT
from interlock._client.grant import Grant, Hold
from interlock._client.places import line_of
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER, capped_ttl
from interlock._protocol.types import Disconnected, Message, Route, Script, Server, ServerError
from interlock.primitives.messages import (
    RENEWED,
    Failed,
    Gone,
    RenewCall,
    RenewReply,
    RenewState,
    Revoked,
    reason_lost,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from interlock._client.grant import Attempt
    from interlock._client.people import People
    from interlock._client.reports import Reports
    from interlock._client.undo import Undo
    from interlock._client.waiting import Waiters
    from interlock._client.worker import Worker

# leases in one script call: a call then takes less than 2 ms of the server, which other programs use, too
RENEWAL_BATCH: Final = 200
RENEWAL_TIMEOUT: Final = 1.0  # seconds that one renewal call may take
RENEWAL_RETRY_DELAY: Final = 0.1  # seconds after which the worker tries unfinished renewals again
# Seconds after which a lease is worth a subscription, so that the server can push a revocation, and a question whether
# the lease was revoked before. A lease that ends sooner costs neither. A holder must learn of a revocation within a
# second, so the number is below 1.
SUBSCRIBE_AFTER: Final = 0.8
# seconds: the least ttl with which the first renewal, after 0.3 of the ttl at the earliest, is later than that question
QUESTION_BEFORE_RENEWAL: Final = 4 * SUBSCRIBE_AFTER
QUESTION_GRAIN: Final = 0.1  # seconds: leases whose first questions are due this close together share one call
DROPPED: Final = "it was dropped without release"  # why such a lease ended
MAX_SLEEP: Final = 1.0  # seconds that the worker of ends may sleep while there is any lease
RENEWAL_PAUSED: Final = b"a test has paused the renewals of this lease"
MAX_EARLY_REVOCATIONS: Final = 1000  # how many revocations of leases unknown here the client keeps


class Bucket(dict[str, Hold]):
    """The leases that are due at one time, by token; and how many seconds the worker may sleep because of them."""

    max_sleep = MAX_SLEEP


class Renewal:
    """The leases of one client, by when each is due."""

    def __init__(
        self,
        server: Server,
        ends_worker: Worker,
        renewal_worker: Worker,
        undo: Undo,
        waiters: Waiters,
        reports: Reports,
    ) -> None:
        self.server = server
        self.runtime = server.runtime
        self.ends_worker = ends_worker  # runs `ends`
        self.renewal_worker = renewal_worker  # runs tick()
        self.ends = LeaseEnds(self, undo, waiters)
        self.reports = reports  # what a user's code learns: nothing here calls it
        self.people: People | None = None  # leaves what observers learn to `reports`: None while nobody observes
        self.cohorts = Cohorts(self.runtime, self, ends_worker.wake_at)
        undo.on_adopted, undo.on_late_loss = self._on_adopted, self._on_late_loss
        self.buckets: dict[float, Bucket] = {}
        self.set_aside: dict[str, Hold] = {}  # leases to renew or ask about now; a lease is always here or in a bucket
        self.dropped: deque[tuple[float, Attempt]] = deque(maxlen=1000)  # see _remember_for_close()
        self.unreported_drops: deque[Grant] = deque(
            maxlen=1000
        )  # leases that finalizers have dropped: see report_drops()
        self.subscribed_since: dict[str | None, float] = {}  # when each channel (None: all) was last subscribed
        self.resubscribed: set[str | None] = set()  # channels whose leases the worker has not asked about since
        self.early_revocations: dict[str, str] = {}  # reasons, by token, for leases unknown at that moment
        self._late_at: dict[Hold, float] = {}  # when the renewal of each lease that is set aside will be late
        self.paused: frozenset[Hold] = frozenset()  # leases whose renewals fail, since a test says so

    def due(self) -> float:
        """When the worker must renew leases: at once if any are set aside for renewal."""
        return self.runtime.now() if self.set_aside else FOREVER

    def held(self) -> list[Grant]:
        """The grants of all leases that have not ended."""
        return [grant for hold in self._all() if (grant := hold.live_grant) is not None]

    def count(self) -> int:
        """How many leases this client watches. Any thread may call this."""
        return sum(map(len, list(self.buckets.values()))) + len(self.set_aside)

    def find(self, token: str) -> Grant | None:
        """The grant of the lease with this token, if this client holds it. Any thread may call this."""
        hold = self.set_aside.get(token)
        for bucket in list(self.buckets.values()):
            hold = hold or bucket.get(token)
        hold = hold or self.set_aside.get(token)  # it may have been on its way there
        return hold.live_grant if hold is not None else None

    def _all(self) -> Iterator[Hold]:
        for bucket in list(self.buckets.values()):
            yield from list(bucket.values())
        yield from list(self.set_aside.values())

    def add(self, hold: Hold) -> None:
        """Watch this lease until it ends, and keep it alive if it renews."""
        sent, options = hold.last_answered_sent, hold.claim.options
        # _may_have_missed_revocation(), inlined: each acquire runs this line. If so, the client asks.
        asks = self._subscribed_at(hold) >= sent
        due = (sent + SUBSCRIBE_AFTER) // QUESTION_GRAIN * QUESTION_GRAIN if asks else FOREVER
        if options.ttl < QUESTION_BEFORE_RENEWAL or due > hold.deadline:
            due = min(due, _next_due(hold, renews=options.renew))
        self._schedule(hold, due)

    def _subscribed_at(self, hold: Hold) -> float:
        """Since when the server pushes a revocation of this lease to this client; FOREVER if it does not push now.

        If that is before the last answered request was sent, then no revocation can be missed.
        """
        if not self.subscribed_since:
            return FOREVER
        subscribed, channel = self.server.subscription_of(hold.claim.resource.keys[0])
        since = max(self.subscribed_since.get(None, -1), self.subscribed_since.get(channel, -1))
        return since if subscribed == "1" and since > -1 else FOREVER

    def _may_have_missed_revocation(self, hold: Hold) -> bool:
        """Whether the server may have revoked this lease since its last answered request, and pushed nothing."""
        return self._subscribed_at(hold) >= hold.last_answered_sent

    def subscription_changed(self, channel: str | None) -> None:
        """The subscription of this channel (None: of all) began or ended: the client may have missed a revocation."""
        with self.runtime.mutex:
            now = self.subscribed_since[channel] = self.runtime.now()
            self.resubscribed.add(channel)
        if self.buckets:  # else no lease is held, or all are set aside, and the worker looks again after the reply
            self.ends_worker.wake_at(now)

    def _schedule(self, hold: Hold, due: float) -> None:
        token, sleep = hold.token, hold.claim.options.ttl / 10  # timers stand still in a machine's sleep
        with self.runtime.mutex:
            bucket = self.buckets.get(due)
            if bucket is None:
                bucket = self.buckets[due] = Bucket()
            bucket.max_sleep = min(bucket.max_sleep, sleep)
            bucket[token] = hold
            hold.due = due
            if self.set_aside:
                self.set_aside.pop(token, None)
        # It asks at once if the channel was subscribed while all leases were set aside.
        wake = 0.0 if self.resubscribed else min(due, hold.last_answered_sent + min(MAX_SLEEP, sleep))
        if wake < self.ends_worker.asleep_until:
            self.ends_worker.wake_at(wake)

    def remove(self, hold: Hold) -> None:
        """Renew this lease no more. Does no I/O and takes no lock, since a finalizer of the lease may call this."""
        bucket, token = self._bucket_of(hold), hold.token
        if bucket is not None:  # else it is set aside
            bucket.pop(token, None)
        if self.set_aside and self.set_aside.get(token) is hold:
            self.set_aside.pop(token, None)

    def _bucket_of(self, hold: Hold) -> Bucket | None:
        """The bucket that has this hold; None if it is set aside, or has ended."""
        bucket = self.buckets.get(hold.due)
        return bucket if bucket is not None and bucket.get(hold.token) is hold else None

    def end(self, hold: Hold) -> None:
        """Renew this lease no more, since it ends here. The next caller of its cohort asks the server."""
        self.remove(hold)
        if hold.claim.options.joins:
            self.cohorts.end(hold)

    def may_pass(self, hold: Hold) -> bool:
        """Whether no renewal or question about this lease is due or under way, and no revocation has come."""
        is_due_later = self._bucket_of(hold) is not None
        return is_due_later and not self.resubscribed and hold.token not in self.early_revocations

    def drop(self, grant: Grant) -> None:
        """End a lease that was dropped without a release. Its caller may still work, so the lease runs out by itself.

        If the session closes before that, the session undoes the attempt. A finalizer calls this, so it logs nothing.
        """
        # First, since an interrupt may end the finalizer at any later step: the worker of ends then does the rest.
        self.unreported_drops.append(grant)
        grant.end_reason = DROPPED

    def report_drops(self) -> None:
        """Log the leases that finalizers have dropped, and let the callers that wait for them ask the server."""
        with contextlib.suppress(IndexError):  # empty, or another thread has just emptied it
            while self.unreported_drops:
                grant = self.unreported_drops.popleft()
                if grant.has_passed:  # an interrupt came after that
                    continue
                now, grant.end_reason = self.runtime.now(), DROPPED
                self.end(grant.hold)
                grant.end(DROPPED)
                self._remember_for_close(grant.hold)
                self._log(grant, dropped_text(grant, now))
                if (people := self.people) is not None:
                    people.lost(grant, DROPPED, now)

    def _log(self, grant: Grant, text: str, error: Exception | None = None) -> None:
        """Let the worker of reports log this about a lease."""
        self.reports.add(lambda: log.warning("%s", text, exc_info=error, extra=grant.log_fields))

    def _on_adopted(self, grant: Grant) -> bool:
        """End a lease that is left to be released. Returns False if it belongs to another caller by now."""
        if grant.has_passed:  # an interrupt came after that
            return False
        grant.end(Grant.RELEASED)
        self.end(grant.hold)
        if (people := self.people) is not None:
            people.released(grant, self.runtime.now())
        return True

    def _give_back_orphan(self, grant: Grant) -> None:
        """End a lease that nobody can release any more, as its finalizer would have done: see rule (g)."""
        if grant.in_with or grant.lease is None:
            grant.end_reason = Grant.RELEASED
            self.ends.undo.from_finalizers.append(grant)
        else:
            self.drop(grant)

    def _remember_for_close(self, hold: Hold) -> None:
        """Keep the claim, so that `close()` undoes it while the server may still know the lease."""
        now = self.runtime.now()
        with contextlib.suppress(IndexError):  # empty, or another thread has just emptied it
            while self.dropped[0][0] < now:
                self.dropped.popleft()
        self.dropped.append((hold.claim.lasts_until(now), hold.claim))

    def reschedule(self, hold: Hold) -> None:
        """Put the lease into the bucket of its next time, after the deadline was extended."""
        if not hold.renews:  # a lease that renews stays in its bucket: its next renewal is due as before
            before = hold.due
            self.add(hold)  # first into the new bucket, then out of the old one
            if before != hold.due and (bucket := self.buckets.get(before)) is not None:
                bucket.pop(hold.token, None)

    def lose(self, grant: Grant, why: str) -> None:
        """Mark the lease of this grant as lost, and report the loss once. Does nothing if it has passed on."""
        hold = grant.hold
        with self.runtime.mutex:  # a reply may arrive at the moment of the deadline
            if grant.has_passed:
                return
            had_ended = grant.end_reason is not None
            lease = grant.lease() if grant.lease is not None and not had_ended else None
            grant.end(why)
        self.end(hold)
        if not had_ended:
            self._remember_for_close(hold)
        if grant.lease is None:  # its turn has come, and nobody has looked: so nobody will release it
            self.ends.undo.add(hold.claim)
        self._notify(grant, lease)
        if not had_ended:  # after the holder has learned of it
            self._log(grant, str(grant.error(why)))
            if (people := self.people) is not None:
                people.lost(grant, why, self.runtime.now())

    def _lose(self, hold: Hold, why: str) -> None:
        """Mark this lease as lost, whichever grant it carries."""
        if (grant := hold.grant) is not None:
            self.lose(grant, why)
        self.remove(hold)

    def _on_late_loss(self, grant: Grant, lease: Any) -> None:
        """Report a loss that only the reply to the release tells, for which the end of the `with` did not wait."""
        grant.end_reason = ENDED_BEFORE_RELEASE
        self._notify(grant, lease)
        self._log(grant, str(grant.error(ENDED_BEFORE_RELEASE)))
        if (people := self.people) is not None:
            people.lost(grant, ENDED_BEFORE_RELEASE, self.runtime.now())

    def _notify(self, grant: Grant, lease: Any) -> None:
        """Report the loss to the Lease, if there is one."""
        if lease is not None:
            try:
                lease._on_lost()
            except Exception as error:  # noqa: BLE001 (one failed report must not stop the reports of other losses)
                self._log(grant, f"interlock: the loss of {grant.resource} could not be reported", error)

    def revoked(self, token: str, why: str) -> None:
        """Handle the push that this lease was revoked, with the reason that the revoker gave."""
        with self.runtime.mutex:
            # Noted before the search below: Core.lease_from_grant adds its lease first and then reads the note.
            self.early_revocations[token] = why
            if len(self.early_revocations) > MAX_EARLY_REVOCATIONS:
                self.early_revocations.pop(next(iter([*self.early_revocations])), None)  # other threads take some, too
        for hold in self._all():
            if hold.token == token:
                self._lose(hold, f"it was revoked: {why}")
                return

    def _renew_now(self, hold: Hold) -> None:
        self._set_aside(hold)
        self.renewal_worker.wake_at(self.runtime.now())

    def _set_aside(self, hold: Hold) -> None:
        """Take the lease out of its bucket, for the worker of renewals; not if it has ended, or has passed on."""
        with self.runtime.mutex:
            if (bucket := self._bucket_of(hold)) is not None:
                self.set_aside[hold.token] = hold  # first in here, then out of the bucket
                bucket.pop(hold.token, None)

    def take_due(self) -> None:
        """Set aside the leases that are due for a renewal, or for the question whether they were revoked."""
        now, due = self.runtime.now(), list[Hold]()
        self._ask_about_resubscribed()
        with self.runtime.mutex:
            for time in sorted(time for time in self.buckets if time <= now):
                due += self.buckets[time].values()
                self.set_aside.update(self.buckets[time])  # first in here, then out of the bucket
                del self.buckets[time]
        # A lease stays set aside if tick() is to lengthen the lease, or to ask whether it was revoked.
        for hold in due:
            grant = hold.live_grant
            if grant is None:
                continue
            if grant.is_orphan:
                self._give_back_orphan(grant)
                continue
            lengthens = hold.renews and hold.deadline < hold.max_hold_until
            if not lengthens and not self._may_have_missed_revocation(hold) and grant.reason_ended(now) is None:
                self._schedule(hold, _next_due(hold, renews=False))
        if self.set_aside:
            self.renewal_worker.wake_at(now)

    def _ask_about_resubscribed(self) -> None:
        """Set aside every lease whose revocation the client may have missed while the channel was not subscribed."""
        if not self.resubscribed:
            return
        with self.runtime.mutex:
            channels, self.resubscribed = self.resubscribed, set()
        for bucket in list(self.buckets.values()):
            for hold in list(bucket.values()):
                is_on_channel = None in channels or self.server.subscription_of(hold.resource.keys[0])[1] in channels
                if is_on_channel and self._may_have_missed_revocation(hold):
                    self._set_aside(hold)

    def report_ends(self) -> float:
        """Report each lease that has ended among those set aside. Returns the next deadline among the rest."""
        now, first, late_at = self.runtime.now(), FOREVER, dict[Hold, float]()
        for hold in list(self.set_aside.values()):
            grant = hold.live_grant
            if grant is None:
                self.remove(hold)
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
            self._note_jeopardy(hold, "its renewal is late", now)
            return FOREVER
        return late

    def _note_jeopardy(self, hold: Hold, what: str, now: float) -> None:
        """Log once that the lease is in jeopardy, until a renewal succeeds."""
        grant = hold.grant
        if not hold.renewal_failing and grant is not None:
            hold.renewal_failing = True
            left = f"lost in {hold.deadline - now:.3g} s unless a renewal succeeds"
            self._log(grant, f"{hold.resource}: {what}. The lease (fence {grant.fence}) is in jeopardy, and {left}")
            if (people := self.people) is not None:
                people.renewal_failed(grant)

    async def tick(self) -> None:
        """Renew the leases that are set aside, or ask whether they were revoked."""
        due, silent_nodes = list(self.set_aside.values()), dict[object, bytes]()
        try:
            for i in range(0, len(due), RENEWAL_BATCH):
                await self._renew(due[i : i + RENEWAL_BATCH], silent_nodes)
        finally:  # after any error: no lease may stay without a next time
            for hold in due:
                if self.set_aside.get(hold.token) is hold:
                    self._schedule(hold, self.runtime.now() + RENEWAL_RETRY_DELAY)

    async def _renew(self, holds: list[Hold], silent_nodes: dict[object, bytes]) -> None:
        """Renew these leases at once. The `silent_nodes` did not answer: more requests would delay other renewals."""
        work = [holds]
        while work:
            work += await self._renew_once(work.pop(0), silent_nodes)

    async def _renew_once(self, holds: list[Hold], silent_nodes: dict[object, bytes]) -> list[list[Hold]]:
        """Send one message to each route. Returns the leases to send again at once; each list goes out together."""
        sent, alive = self.runtime.now(), [hold for hold in holds if hold.live_grant is not None]
        if self.paused:
            alive = self._without_paused(alive, sent)
        for hold in alive:
            if not hold.renews or hold.ttl / 3 > SUBSCRIBE_AFTER:  # else renewals ask often enough
                self.server.ensure_subscribed(hold.resource.keys[0])
        batches = _plan(alive, self.server.route)
        skipped = [batch for batch in batches if batch.node in silent_nodes]
        sent_batches = [batch for batch in batches if batch.node not in silent_nodes]
        replies: list[Any] = []
        if sent_batches:
            shortest = min(hold.ttl for batch in sent_batches for hold in batch.holds)
            timeout = min(RENEWAL_TIMEOUT, max(0.05, shortest / 3))
            replies = await self.server.call_many(
                [_renew_message(batch.holds, sent, self.server.drift) for batch in sent_batches], sent + timeout
            )
        together: list[Hold] = []
        apart: list[list[Hold]] = []
        for batch, reply in zip(sent_batches, replies, strict=True):
            match _classify(reply, len(batch.holds)):
                case Resend.TOGETHER:
                    together += batch.holds
                case Resend.APART:
                    apart += [[hold] for hold in batch.holds]
                case states:
                    if isinstance(reply, Exception) and not isinstance(reply, ServerError):
                        silent_nodes[batch.node] = _cause(reply)
                    self._on_states(batch.holds, self._states_that_count(batch, states), sent)
        for batch in skipped:
            self._on_states(batch.holds, [Failed(silent_nodes[batch.node])] * len(batch.holds), sent)
        return [together, *apart] if together else apart

    def _without_paused(self, holds: list[Hold], sent: float) -> list[Hold]:
        """Let the renewals of paused leases fail, and return the other leases: see `interlock.testing`."""
        paused = [hold for hold in holds if hold in self.paused]
        self._on_states(paused, [Failed(RENEWAL_PAUSED)] * len(paused), sent)
        return [hold for hold in holds if hold not in self.paused]

    def _states_that_count(self, batch: Batch, states: Sequence[RenewState]) -> Sequence[RenewState]:
        """The states, with Failed for each renewal while the old primary may still grant beside this server."""
        if RENEWED not in states or not self.server.old_primary_may_still_grant(batch.holds[0].resource.keys[0]):
            return states
        return [Failed(OLD_PRIMARY_MAY_GRANT.encode()) if state == RENEWED else state for state in states]

    def _on_states(self, holds: list[Hold], states: Sequence[RenewState], sent: float) -> None:
        now, drift = self.runtime.now(), self.server.drift
        for hold, state in zip(holds, states, strict=False):
            grant = hold.live_grant
            if grant is None:
                self.remove(hold)
            elif why := grant.reason_ended(now):  # a reply does not revive a lost lease
                self.lose(grant, why)
            elif isinstance(state, Failed):
                self._on_failure(hold, state.cause)
            elif hold in self.paused:  # the request was under way when the test paused the lease
                self._on_failure(hold, RENEWAL_PAUSED)
            elif isinstance(state, Gone | Revoked):
                self._lose(hold, reason_lost(state))
            else:
                slack = hold.deadline - now
                hold.extend_deadline(sent, _ttl_ms(hold, sent, drift) / 1000, drift)
                # Asked again at once if the channel was subscribed during this request: the lease was in no bucket.
                missed = hold.last_answered_sent <= self._subscribed_at(hold) < FOREVER
                self._schedule(hold, now if missed else _next_due(hold, renews=hold.renews))
                if (people := self.people) is not None and hold.renews:
                    people.renewed(grant, slack)

    def _on_failure(self, hold: Hold, cause: bytes) -> None:
        now = self.runtime.now()
        self._schedule(hold, min(now + min(1.0, hold.ttl / 12), hold.deadline))
        if hold.renews:
            self._note_jeopardy(hold, f"a renewal failed and is tried again: {cause.decode(errors='replace')}", now)


class LeaseEnds:
    """The task that reports ends of leases, sets aside leases to renew and attempts to undo, and wakes waiters.

    It does no I/O and runs no code of a user (see `Reports`), so neither a silent server nor a slow handler delays it.
    """

    def __init__(self, renewal: Renewal, undo: Undo, waiters: Waiters) -> None:
        self.renewal = renewal
        self.waiters = waiters  # may have to ask again, which no silent server may delay
        self.undo = undo  # keeps attempts left by finalizers, which wake no worker
        self.next_end = FOREVER  # the first deadline of the leases that are set aside
        self.on_tick: Callable[[], None] | None = None  # is called, within a second, whenever a lease is held

    def due(self) -> float:
        """The latest time at which the worker must run this task."""
        renewal = self.renewal
        now = renewal.runtime.now()
        buckets = list(renewal.buckets.items())  # in one step: other threads add buckets
        if (buckets and renewal.resubscribed) or self.waiters.resubscribed:
            return now
        # A finalizer may also leave a lease that is set aside, so these leases limit the sleep, too.
        sleeps: list[float] = [
            *(bucket.max_sleep for _, bucket in buckets),
            *((MAX_SLEEP,) if renewal.set_aside else ()),
        ]
        # Read last: a finalizer adds here first, then takes its lease out of the buckets.
        if self.undo.from_finalizers or renewal.unreported_drops:
            return now
        return min(
            [self.next_end, renewal.cohorts.next_look, *(now + sleep for sleep in sleeps), *(due for due, _ in buckets)]
        )

    async def tick(self) -> None:
        """Report the leases that have ended, and set aside those that are due."""
        renewal = self.renewal
        now, oldest = renewal.runtime.now(), next(renewal._all(), None)
        if oldest is not None and now > oldest.last_answered_sent + SUBSCRIBE_AFTER:
            renewal.server.ensure_subscribed(oldest.resource.keys[0])
        self.undo.adopt_from_finalizers()
        self.waiters.wake_resubscribed()
        renewal.report_drops()
        if now >= renewal.cohorts.next_look:
            renewal.cohorts.look()
        renewal.take_due()
        self.next_end = renewal.report_ends()
        if self.on_tick is not None and oldest is not None:
            self.on_tick()


def dropped_text(grant: Grant, now: float) -> str:
    """What people learn of a lease that was dropped without a release."""
    claim = grant.hold.claim
    left = max(claim.ttl, round(claim.extended_until - now, 3))
    return (
        f"{grant.resource}: a lease was dropped without release; it was acquired at {line_of(grant.attempt.place)}. It "
        f"is renewed no more, and keeps others out for up to {left:g} s. Use `with`, or call release()"
    )


def _next_due(hold: Hold, *, renews: bool) -> float:
    """When the lease is due for its renewal, if it is renewed, or when it ends: the earlier of the two."""
    ttl = hold.claim.options.ttl
    # Both times are rounded, so that many leases share a bucket: a renewal to an earlier time, an end to a later one.
    grain = ttl / 30
    renewal = (hold.last_answered_sent + ttl / 3) // grain * grain if renews else FOREVER
    if renewal <= hold.deadline:
        return renewal
    end_grain = min(0.05, grain)
    return min(renewal, math.ceil(hold.deadline / end_grain) * end_grain)


class Batch(NamedTuple):
    """The leases that one message renews, and the node that gets the message."""

    node: object
    holds: list[Hold]


def _plan(holds: Iterable[Hold], route: Callable[[str], Route]) -> list[Batch]:
    """One batch for each script and route."""
    batches = dict[tuple[Script, Route], Batch]()
    for hold in holds:
        to = route(hold.resource.keys[0])
        batches.setdefault((hold.resource.script, to), Batch(to.node, [])).holds.append(hold)
    return list(batches.values())


class Resend(Enum):
    """How to send a batch again at once, and why."""

    TOGETHER = "the connection had died while it was idle: that says nothing of the server"
    APART = "the slot is on its way to another node, and some of the keys have arrived there"


def _classify(reply: Any, size: int) -> Sequence[RenewState] | Resend:
    """The state of each lease, from the reply to a batch of this size; or how to send the batch again."""
    if isinstance(reply, Disconnected) and reply.stale:
        return Resend.TOGETHER
    if size > 1 and isinstance(reply, ServerError) and str(reply).startswith("TRYAGAIN"):
        return Resend.APART
    if isinstance(reply, Exception):
        return [Failed(_cause(reply))] * size
    return RenewReply.parse(reply).states


def _renew_message(holds: list[Hold], sent: float, drift: float) -> Message:
    """The message that renews leases of one script and one route."""
    keys = [key for hold in holds for key in hold.resource.renew_keys]
    call = RenewCall([(hold.token, str(_ttl_ms(hold, sent, drift))) for hold in holds])
    return holds[0].resource.script, keys, call.encode()


def _cause(error: Exception) -> bytes:
    return (str(error) or type(error).__name__).encode()


def _ttl_ms(hold: Hold, now: float, drift: float) -> int:
    """The ttl to ask for, in ms: not beyond max_hold. For a lease without renewal: the time to its deadline."""
    ttl = hold.ttl if hold.renews else hold.deadline - now
    return max(1, int(capped_ttl(ttl, hold.max_hold_until - now, drift) * 1000))
