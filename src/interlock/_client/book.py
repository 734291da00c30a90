"""The book of holds: which leases this client watches, and when each of them is due.

Theory. Each hold is in the bucket of the time at which the hold is due: for its renewal, or for its end if the lease
is not renewed or the server is away. A bucket is a dict, so a release takes its hold out of the bucket in one step,
without a search and without a wake-up. The worker of ends (`LeaseEnds`) looks only at buckets that are due. It sets
aside the leases that need an answer of the server, for the `Renewer`, which asks.

Rules.
(a) A hold that has not ended is in a bucket, or set aside, or in both. A hold that ended is in neither: the client
    takes it out before it sends the release.
(b) A renewal is due ttl/3 after the client sent the acquire or the last renewal that succeeded.
(c) The client learns of a revocation within a second. A short section needs no subscription, so the client asks about
    a lease that was granted without a subscribed channel once that lease is `SUBSCRIBE_AFTER` old. After each new
    subscription the client asks at once about every lease on that channel. If the push of a revocation arrives before
    the reply that grants the lease, `early_revocations` keeps the revocation.
(d) Timers stand still while the machine sleeps, and the clock does not: while there is a lease, the worker of ends
    sleeps for ttl/10 at most, and for 1 s at most.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from interlock._client.grant import Hold
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from interlock._client.grant import Grant
    from interlock._client.worker import Worker
    from interlock._protocol.server import Server

# Seconds after which a lease is worth a subscription, so that the server can push a revocation, and a question whether
# the lease was revoked before. A lease that ends sooner costs neither. A holder must learn of a revocation within a
# second, so the number is below 1.
SUBSCRIBE_AFTER: Final = 0.8
# seconds: the least ttl with which the first renewal, after 0.3 of the ttl at the earliest, is later than that question
QUESTION_BEFORE_RENEWAL: Final = 4 * SUBSCRIBE_AFTER
QUESTION_GRAIN: Final = 0.1  # seconds: leases whose first questions are due this close together share one call
MAX_SLEEP: Final = 1.0  # seconds that the worker of ends may sleep while there is any lease
MAX_EARLY_REVOCATIONS: Final = 1000  # how many of the latest revocations the client keeps


class Bucket(dict[str, Hold]):
    """The leases that are due at one time, by token; and how many seconds the worker may sleep because of them."""

    max_sleep = MAX_SLEEP
    due = FOREVER


class Book:
    """The leases of one client, by when each is due."""

    def __init__(self, server: Server, worker: Worker) -> None:
        self.server = server
        self.runtime = server.runtime
        self.worker = worker  # of ends
        self.buckets: dict[float, Bucket] = {}
        self.set_aside: dict[str, Hold] = {}  # leases to renew or ask about now
        self.subscribed_since: dict[str | None, float] = {}  # when each channel (None: all) was last subscribed
        self.resubscribed: set[str | None] = set()  # channels whose leases nobody has set aside since
        self.early_revocations: dict[str, str] = {}  # reasons, by token: a push may arrive before the grant

    # What it has

    def all(self) -> Iterator[Hold]:
        """Every hold; yields a hold that moves meanwhile once or twice."""
        for bucket in list(self.buckets.values()):
            yield from list(bucket.values())
        yield from list(self.set_aside.values())

    def held(self) -> list[Grant]:
        """The grants of all leases that have not ended."""
        return [grant for hold in self.all() if (grant := hold.live_grant) is not None]

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

    def bucket_of(self, hold: Hold) -> Bucket | None:
        """The bucket that has this hold; None if it is set aside, or has ended."""
        bucket = self.buckets.get(hold.due)
        return bucket if bucket is not None and bucket.get(hold.token) is hold else None

    def may_pass(self, hold: Hold) -> bool:
        """Whether no renewal or question about this lease is due or under way, and no push has revoked it."""
        is_due_later = self.bucket_of(hold) is not None
        return is_due_later and not self.resubscribed and hold.token not in self.early_revocations

    # In and out

    def add(self, hold: Hold) -> None:
        """Watch this lease until it ends, and keep it alive if it renews."""
        sent, options = hold.last_answered_sent, hold.claim.options
        # may_have_missed_revocation(), inlined: each acquire runs this line. If so, the client asks.
        asks = self.pushed_since(hold) >= sent
        due = (sent + SUBSCRIBE_AFTER) // QUESTION_GRAIN * QUESTION_GRAIN if asks else FOREVER
        if options.ttl < QUESTION_BEFORE_RENEWAL or due > hold.deadline:
            due = min(due, next_due(hold, renews=options.renew))
        self.schedule(hold, due)

    def schedule(self, hold: Hold, due: float) -> None:
        """Put the lease into the bucket of this time."""
        token, sleep = hold.token, hold.claim.options.ttl / 10  # see rule (d)
        with self.runtime.mutex:
            bucket = self.buckets.get(due)
            if bucket is None:
                bucket = Bucket()
                bucket.due = due
                self.buckets[due] = bucket
            bucket.max_sleep = min(bucket.max_sleep, sleep)
            bucket[token] = hold
            hold.due = bucket.due  # one number in memory for all holds of the bucket
            if self.set_aside:
                self.set_aside.pop(token, None)
        # At once if a channel was subscribed while all leases were set aside: the client then asks about its leases.
        asked = hold.last_answered_sent
        wake = asked if self.resubscribed else min(due, asked + min(MAX_SLEEP, sleep))
        if wake < self.worker.asleep_until:
            self.worker.wake_at(wake)

    def reschedule(self, hold: Hold) -> None:
        """Put the lease into the bucket of its next time, after the deadline was extended."""
        if not hold.renews:  # a lease that renews stays in its bucket: its next renewal is due as before
            before = hold.due
            self.add(hold)  # first into the new bucket, then out of the old one
            if before != hold.due and (bucket := self.buckets.get(before)) is not None:
                bucket.pop(hold.token, None)

    def remove(self, hold: Hold) -> None:
        """Watch this lease no more. Does no I/O and takes no lock, since a finalizer of the lease may call this."""
        bucket, token = self.bucket_of(hold), hold.token
        if bucket is not None:  # else it is set aside
            bucket.pop(token, None)
        if self.set_aside and self.set_aside.get(token) is hold:
            self.set_aside.pop(token, None)

    # What is due

    def due(self, now: float) -> float:
        """The latest time at which the worker of ends must look into the book."""
        buckets = list(self.buckets.items())  # in one step: other threads add buckets
        if buckets and self.resubscribed:
            return now
        due = min((min(due, now + bucket.max_sleep) for due, bucket in buckets), default=FOREVER)
        # A finalizer may also orphan a lease that is set aside, so these leases limit the sleep, too.
        return min(due, now + MAX_SLEEP) if self.set_aside else due

    def put_aside(self, hold: Hold) -> None:
        """Take the lease out of its bucket, for the renewer; not if the lease has ended."""
        with self.runtime.mutex:
            if (bucket := self.bucket_of(hold)) is not None:
                self.set_aside[hold.token] = hold  # first in here, then out of the bucket
                bucket.pop(hold.token, None)

    def put_due_aside(self, now: float) -> list[Hold]:
        """Set aside all leases that are due, and those on a channel that was subscribed. Returns those that are due."""
        self._put_resubscribed_aside()
        due = list[Hold]()
        with self.runtime.mutex:
            for time in sorted(time for time in self.buckets if time <= now):
                due += self.buckets[time].values()
                self.set_aside.update(self.buckets[time])  # first in here, then out of the bucket
                del self.buckets[time]
        return due

    # Revocations, and the subscriptions over which the server pushes them

    def note_revocation(self, token: str, why: str) -> Hold | None:
        """Note the push that this lease was revoked, for this reason. Returns the lease, if it is known by now."""
        with self.runtime.mutex:
            # Noted before the search below: Core.lease_from_grant adds its lease first and then reads the note.
            self.early_revocations[token] = why
            if len(self.early_revocations) > MAX_EARLY_REVOCATIONS:
                self.early_revocations.pop(next(iter([*self.early_revocations])), None)  # other threads pop, too
        return next((hold for hold in self.all() if hold.token == token), None)

    def pushed_since(self, hold: Hold) -> float:
        """Since when the server pushes a revocation of this lease to this client; FOREVER if it does not push now.

        If that is before the last answered request was sent, then no revocation can be missed.
        """
        if not self.subscribed_since:
            return FOREVER
        subscribed, channel = self.server.subscription_of(hold.claim.resource.keys[0])
        since = max(self.subscribed_since.get(None, -1), self.subscribed_since.get(channel, -1))
        return since if subscribed == "1" and since > -1 else FOREVER

    def may_have_missed_revocation(self, hold: Hold) -> bool:
        """Whether the server may have revoked this lease since its last answered request, and pushed nothing."""
        return self.pushed_since(hold) >= hold.last_answered_sent

    def subscription_changed(self, channel: str | None) -> None:
        """The subscription of this channel (None: of all) began or ended: the client may have missed a revocation."""
        with self.runtime.mutex:
            now = self.subscribed_since[channel] = self.runtime.now()
            self.resubscribed.add(channel)
        if self.buckets:  # else no lease is held, or all are set aside, and the worker looks again after the reply
            self.worker.wake_at(now)

    def subscribe_for_oldest(self, now: float) -> bool:
        """Let the server subscribe, if a lease is old enough to be worth it. Returns whether there is any lease."""
        oldest = next(self.all(), None)
        if oldest is not None and now > oldest.last_answered_sent + SUBSCRIBE_AFTER:
            self.server.ensure_subscribed(oldest.resource.keys[0])
        return oldest is not None

    def _put_resubscribed_aside(self) -> None:
        """Set aside every lease whose revocation the client may have missed while the channel was not subscribed."""
        if not self.resubscribed:
            return
        with self.runtime.mutex:
            channels, self.resubscribed = self.resubscribed, set()
        for bucket in list(self.buckets.values()):
            for hold in list(bucket.values()):
                is_on_channel = None in channels or self.server.subscription_of(hold.resource.keys[0])[1] in channels
                if is_on_channel and self.may_have_missed_revocation(hold):
                    self.put_aside(hold)


def next_due(hold: Hold, *, renews: bool) -> float:
    """When the lease is due for its renewal, if it is renewed, or when it ends: the earlier of the two."""
    ttl = hold.claim.options.ttl
    # Both times are rounded, so that many leases share a bucket: a renewal to an earlier time, an end to a later one.
    grain = ttl / 30
    renewal = (hold.last_answered_sent + ttl / 3) // grain * grain if renews else FOREVER
    if renewal <= hold.deadline:
        return renewal
    end_grain = min(0.05, grain)
    return min(renewal, math.ceil(hold.deadline / end_grain) * end_grain)
