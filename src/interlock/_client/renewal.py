"""Keeping many leases alive: every lease is renewed at ttl/3, many in one call, and every end is told.

Theory. Grants stand in buckets of time, by when they are due: for their renewal, or (not renewed, or the server is
away) for their end. A bucket is a dict, so that taking a grant out on release is one step, without search and without a
wake-up; only buckets whose time has come are looked at. One loop (`LeaseEnds`) does that, without any I/O: it tells the
ends that have come, and sets aside what is to be renewed for another loop, which asks the server.

Rules.
 1. A failed renewal is not a loss: the lease is in jeopardy, and tried again, until its deadline.
 2. The fixed rate is ttl/3, counted from when the last renewal was sent.
 3. One bad key never delays another (the script answers each by itself), and no call may take so long that the others
    are renewed late (`RENEWAL_TIMEOUT`). No call delays the word that a lease has ended.
 4. A grant that ended is out of its bucket before its release is sent; an answer that comes later changes nothing.
 5. A revocation is known within a second. A short section needs no subscription; so a lease that was granted while its
    channel was not heard is asked about when it is `SUBSCRIBE_AFTER` old. After each new subscription every lease on
    that channel is asked about at once. A push that comes before its grant is known here is remembered
    (`early_revocations`).
 6. Timers stand still while the machine sleeps and our clock does not: so nobody naps longer than ttl/10 or 1 s.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.error_texts import OLD_PRIMARY_MAY_GRANT
from interlock._client.grant import Grant
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER, margin
from interlock._protocol.types import Disconnected, Message, Port, Route, Script, ServerError
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
    from interlock._client.undo import Undo

RENEWAL_BATCH: Final = 500  # leases in one script call: two keys each
RENEWAL_TIMEOUT: Final = 1.0  # seconds that one renewal call may take
RENEWAL_RETRY_DELAY: Final = 0.1  # seconds after which the worker sees again to what it could not finish
# Seconds after which a lease is worth a subscription, so that a revocation is pushed to it, and a question whether it
# was revoked before. Shorter leases cost neither. A holder is to learn of a revocation within a second: it is less.
SUBSCRIBE_AFTER: Final = 0.8
QUESTION_GRAIN: Final = 0.1  # seconds: leases whose first question is due so near to each other are asked about at once
MAX_SLEEP: Final = 1.0  # seconds that the worker of ends may sleep while there is any lease
MAX_EARLY_REVOCATIONS: Final = 1000  # revocations that are remembered of leases that are not known here


class Bucket(dict[str, Grant]):
    """The leases that are due at one time, by token; and the shortest ttl that any of them had."""

    shortest_ttl = FOREVER


class Renewal:
    """The leases of one client, by when each is due."""

    def __init__(
        self,
        port: Port,
        wake_ends_at: Callable[[float], None],
        wake_renewal_at: Callable[[float], None],
        undo: Undo,
    ) -> None:
        self.port = port
        self.runtime = port.runtime
        self.wake_ends_at = wake_ends_at  # tells the worker of ends of a time until which it must not sleep on
        self.wake_renewal_at = wake_renewal_at  # the same for the worker that renews
        self.ends = LeaseEnds(self, undo)
        self.buckets: dict[float, Bucket] = {}
        self.in_flight: dict[str, Grant] = {}  # those that are renewed now or next; each is here or in a slot, always
        self.dropped: deque[tuple[float, Attempt]] = deque(maxlen=1000)  # until when, what
        self.subscribed_since: dict[str | None, float] = {}  # when each channel (None: any) was subscribed last
        self.resubscribed: set[str | None] = set()  # those for which the leases have not been asked about since
        self.early_revocations: dict[str, str] = {}  # why a token was revoked that no lease here had at that moment

    def due(self) -> float:
        """When something must be renewed: at once, if it is set aside for that."""
        return self.runtime.now() if self.in_flight else FOREVER

    def held(self) -> list[Grant]:
        """All leases that have not ended."""
        return [grant for grant in self._all() if grant.end_reason is None]

    def _all(self) -> Iterator[Grant]:
        for slot in list(self.buckets.values()):
            yield from list(slot.values())
        yield from list(self.in_flight.values())

    def add(self, grant: Grant) -> None:
        """Keep this lease alive from now on."""
        due = _next_due(grant)
        if not self._is_subscribed(grant):  # nobody would push a revocation: the first question
            due = min(due, (grant.answered_since + SUBSCRIBE_AFTER) // QUESTION_GRAIN * QUESTION_GRAIN)
        self._schedule(grant, due)

    def _is_subscribed(self, grant: Grant) -> bool:
        """Whether a revocation was or will be pushed, since a request about this lease was sent that it answers."""
        return -1 < self._subscribed_at(grant) < grant.answered_since

    def _may_have_missed_revocation(self, grant: Grant) -> bool:
        """Whether a revocation may have been pushed between the last request that was answered and the subscription."""
        return self._subscribed_at(grant) >= grant.answered_since

    def _subscribed_at(self, grant: Grant) -> float:
        """Since when a revocation of this lease is pushed to us; -1 if it would not be pushed now."""
        heard, channel = self.port.subscription_of(grant.attempt.resource.keys[0])
        return max(self.subscribed_since.get(None, -1), self.subscribed_since.get(channel, -1)) if heard == "1" else -1

    def subscribed(self, channel: str | None) -> None:
        """This channel is heard from now on, or not any more: a revocation may have been missed before."""
        with self.runtime.mutex:
            now = self.subscribed_since[channel] = self.runtime.now()
            self.resubscribed.add(channel)
        if self.buckets:  # else there is nothing to ask about, or it is being asked, and the worker comes again
            self.wake_ends_at(now)

    def _schedule(self, grant: Grant, due: float) -> None:
        with self.runtime.mutex:
            slot = self.buckets.get(due)
            if slot is None:
                slot = self.buckets[due] = Bucket()
            ttl = grant.attempt.ttl
            slot.shortest_ttl = min(slot.shortest_ttl, ttl)
            slot[grant.attempt.token] = grant
            grant.bucket = slot
            self.in_flight.pop(grant.attempt.token, None)
        nap = grant.answered_since + _max_sleep(ttl)
        self.wake_ends_at(min(due, nap))

    def remove(self, grant: Grant) -> None:
        """Renew it no more. No I/O and no lock: also called while it is garbage collected."""
        slot = grant.bucket
        if slot is not None:
            slot.pop(grant.attempt.token, None)
        self.in_flight.pop(grant.attempt.token, None)

    def drop(self, grant: Grant) -> None:
        """Nobody has it any more. Somebody may still work under it: so it runs out, unless the process ends."""
        self.remove(grant)
        grant.end_reason = "it was dropped without release"
        self._remember_for_close(grant)

    def _remember_for_close(self, grant: Grant) -> None:
        """Closing takes it back, as long as something of it may be left."""
        now = self.runtime.now()
        with contextlib.suppress(IndexError):  # empty, or another thread was at it
            while self.dropped[0][0] < now:
                self.dropped.popleft()
        self.dropped.append((grant.attempt.lasts_until(now), grant.attempt))

    def reschedule(self, grant: Grant) -> None:
        """Its deadline has been extended."""
        if not grant.renews:
            before = grant.bucket
            self.add(grant)  # first into the new place, then out of the old one
            if before is not None and before is not grant.bucket:
                before.pop(grant.attempt.token, None)

    def lose(self, grant: Grant, why: str) -> None:
        """It is lost: tell its holder, once."""
        self.remove(grant)
        with self.runtime.mutex:  # an answer may come in the moment in which the time is up
            told, lease = grant.end_reason is not None, grant.lose(why)
        if not told:
            log.warning("%s", grant.error(why))
            self._remember_for_close(grant)
        if lease:
            try:
                lease._on_lost()
            except Exception:  # noqa: BLE001 (one that can't be told must not keep the others from it)
                log.exception("interlock: the loss of %s could not be told", grant.resource)

    def revoked(self, token: str, why: str) -> None:
        """The server's word that this lease was taken away."""
        with self.runtime.mutex:
            self.early_revocations[token] = (
                why  # before the look at those that are here: Core.lease_from_grant does it the other way round
            )
            if len(self.early_revocations) > MAX_EARLY_REVOCATIONS:
                del self.early_revocations[next(iter(self.early_revocations))]
        for grant in self._all():
            if grant.token == token:
                self.lose(grant, f"it was revoked: {why}")
                return

    def take_due(self) -> None:
        """Set aside what the server is to be asked about now: to renew it, or whether it was revoked."""
        now, due = self.runtime.now(), list[Grant]()
        self._ask_about_resubscribed()
        with self.runtime.mutex:
            for time in sorted(time for time in self.buckets if time <= now):
                due += self.buckets[time].values()
                self.in_flight.update(self.buckets[time])  # first in the one place, then out of the other
                del self.buckets[time]
        for grant in due:
            lengthens = grant.renews and grant.deadline < grant.max_hold_until
            if not lengthens and self._is_subscribed(grant) and grant.reason_ended(now) is None:
                self._schedule(grant, _end_due(grant))
        if self.in_flight:
            self.wake_renewal_at(now)

    def _ask_about_resubscribed(self) -> None:
        """Ask about every lease whose revocation may have been pushed while its channel was not heard."""
        if not self.resubscribed:
            return
        with self.runtime.mutex:
            channels, self.resubscribed = self.resubscribed, set()
        for slot in list(self.buckets.values()):
            for token, grant in list(slot.items()):
                whose = None if None in channels else self.port.subscription_of(grant.resource.keys[0])[1]
                if whose in channels and not self._is_subscribed(grant):
                    self.in_flight[token] = grant  # first in the one place, then out of the other
                    slot.pop(token, None)

    def report_ends(self) -> float:
        """Tell those whose end has come, of those that are set aside: when the next one comes."""
        now, first = self.runtime.now(), FOREVER
        for grant in list(self.in_flight.values()):
            if grant.end_reason is not None:
                self.remove(grant)
            elif why := grant.reason_ended(now):
                self.lose(grant, why)
            else:
                first = min(first, grant.deadline)
        return first

    async def tick(self) -> None:
        """Renew what is set aside, or ask whether it was revoked."""
        due, silent = list(self.in_flight.values()), dict[object, bytes]()
        try:
            for i in range(0, len(due), RENEWAL_BATCH):
                await self._renew(due[i : i + RENEWAL_BATCH], silent)
        finally:  # whatever went wrong, nobody is forgotten
            for grant in due:
                if self.in_flight.get(grant.token) is grant:
                    self._schedule(grant, self.runtime.now() + RENEWAL_RETRY_DELAY)

    async def _renew(self, grants: list[Grant], silent: dict[object, bytes]) -> None:
        """Renew these at once. `silent` has the nodes that did not answer: to ask for more would tell ends late."""
        work = [grants]
        while work:
            work += await self._renew_once(work.pop(0), silent)

    async def _renew_once(self, grants: list[Grant], silent: dict[object, bytes]) -> list[list[Grant]]:
        """Send one message to each route. Returns the leases to send anew at once: those of a list together."""
        sent, alive = self.runtime.now(), [grant for grant in grants if grant.end_reason is None]
        for grant in alive:
            if not grant.renews or grant.attempt.ttl / 3 > SUBSCRIBE_AFTER:  # else it is asked about so often anyway
                self.port.ensure_subscribed(grant.resource.keys[0])
        batches = _plan(alive, self.port.route)
        skipped = [batch for batch in batches if batch.node in silent]
        asked = [batch for batch in batches if batch.node not in silent]
        replies: list[Any] = []
        if asked:
            shortest = min(grant.attempt.ttl for batch in asked for grant in batch.grants)
            patience = min(RENEWAL_TIMEOUT, max(0.05, shortest / 3))
            replies = await self.port.calls([_renew_message(batch.grants, sent) for batch in asked], sent + patience)
        together: list[Grant] = []
        apart: list[list[Grant]] = []
        for batch, reply in zip(asked, replies, strict=True):
            match _classify(reply, len(batch.grants)):
                case Resend.TOGETHER:
                    together += batch.grants
                case Resend.APART:
                    apart += [[grant] for grant in batch.grants]
                case states:
                    if isinstance(reply, Exception) and not isinstance(reply, ServerError):
                        silent[batch.node] = _cause(reply)
                    self._on_states(batch.grants, self._states_that_count(batch, states), sent)
        for batch in skipped:
            self._on_states(batch.grants, [Failed(silent[batch.node])] * len(batch.grants), sent)
        return [together, *apart] if together else apart

    def _states_that_count(self, batch: Batch, states: Sequence[RenewState]) -> Sequence[RenewState]:
        """The states; but no renewal by a server beside which the old primary may still grant."""
        if RENEWED not in states or not self.port.old_primary_may_still_grant(batch.grants[0].resource.keys[0]):
            return states
        return [Failed(OLD_PRIMARY_MAY_GRANT.encode()) if state == RENEWED else state for state in states]

    def _on_states(self, grants: list[Grant], states: Sequence[RenewState], sent: float) -> None:
        now = self.runtime.now()
        for grant, state in zip(grants, states, strict=False):
            if grant.end_reason is not None:
                self.remove(grant)
            elif why := grant.reason_ended(now):  # what was lost stays lost
                self.lose(grant, why)
            elif isinstance(state, Failed):
                self._on_failure(grant, state.cause)
            elif isinstance(state, Gone | Revoked):
                self.lose(grant, reason_lost(state))
            else:
                grant.extend_deadline(sent, _ttl_ms(grant, sent) / 1000)
                # Subscribed while the question was under way, and found the lease in no bucket: ask again.
                self._schedule(grant, now if self._may_have_missed_revocation(grant) else _next_due(grant))

    def _on_failure(self, grant: Grant, cause: bytes) -> None:
        if grant.renews and not grant.renewal_failing:
            log.info("%s: a renewal failed and is tried again: %s", grant.resource, cause.decode(errors="replace"))
        grant.renewal_failing = grant.renews
        self._schedule(grant, min(self.runtime.now() + min(1.0, grant.attempt.ttl / 12), grant.deadline))


class LeaseEnds:
    """The task that reports the ends of leases, and sets aside what is to be renewed or taken back. It does no I/O."""

    def __init__(self, renewal: Renewal, undo: Undo) -> None:
        self.renewal = renewal
        self.undo = undo  # has the leases that finalizers have left, which wake nobody
        self.next_end = FOREVER  # when the first of those ends that are set aside

    def due(self) -> float:
        """When its worker must come at the latest."""
        renewal = self.renewal
        now = renewal.runtime.now()
        slots = list(renewal.buckets.items())  # in one step: other threads add to it
        if slots and renewal.resubscribed:
            return now
        # A lease that is asked about now may be left by a finalizer meanwhile, as any other.
        naps: list[float] = [
            *(_max_sleep(slot.shortest_ttl) for _, slot in slots),
            *((MAX_SLEEP,) if renewal.in_flight else ()),
        ]
        if self.undo.from_finalizers:  # looked at last: what was left before is no lease any more
            return now
        return min([self.next_end, *(now + nap for nap in naps), *(due for due, _ in slots)])

    async def tick(self) -> None:
        """Look at those whose time has come."""
        renewal = self.renewal
        now, oldest = renewal.runtime.now(), next(renewal._all(), None)
        if oldest is not None and now > oldest.answered_since + SUBSCRIBE_AFTER:
            renewal.port.ensure_subscribed(oldest.resource.keys[0])
        self.undo.adopt_from_finalizers()
        renewal.take_due()
        self.next_end = renewal.report_ends()


def _max_sleep(ttl: float) -> float:
    """How long the worker may sleep while such a lease is held: timers stand still when the machine sleeps."""
    return min(MAX_SLEEP, ttl / 10)


def _next_due(grant: Grant) -> float:
    """When it is to be renewed, or ends: whichever comes first."""
    ttl = grant.attempt.ttl
    grain = ttl / 30
    renewal = (grant.answered_since + ttl / 3) // grain * grain if grant.renews else FOREVER
    return min(renewal, _end_due(grant))


def _end_due(grant: Grant) -> float:
    grain = min(0.05, grant.attempt.ttl / 30)
    return math.ceil(grant.deadline / grain) * grain


class Batch(NamedTuple):
    """Leases that one message renews, and the node that gets the message."""

    node: object
    grants: list[Grant]


def _plan(grants: Iterable[Grant], route: Callable[[str], Route]) -> list[Batch]:
    """One batch for each script and route."""
    batches = dict[tuple[Script, Route], Batch]()
    for grant in grants:
        to = route(grant.resource.keys[0])
        batches.setdefault((grant.resource.script, to), Batch(to.node, [])).grants.append(grant)
    return list(batches.values())


class Resend(Enum):
    """Why a batch is sent anew at once."""

    TOGETHER = "the connection had died while it was idle: that says nothing of the server"
    APART = "the slot is on its way to another node, and some of the keys have arrived there"


def _classify(reply: Any, size: int) -> Sequence[RenewState] | Resend:
    """What the reply to a batch of this size says of each lease, or that the batch must be sent anew."""
    if isinstance(reply, Disconnected) and reply.stale:
        return Resend.TOGETHER
    if size > 1 and isinstance(reply, ServerError) and str(reply).startswith("TRYAGAIN"):
        return Resend.APART
    if isinstance(reply, Exception):
        return [Failed(_cause(reply))] * size
    return RenewReply.parse(reply).states


def _renew_message(grants: list[Grant], sent: float) -> Message:
    """The renewal of leases that are in one place."""
    keys = [key for grant in grants for key in grant.resource.renew_keys]
    call = RenewCall([(grant.token, str(_ttl_ms(grant, sent))) for grant in grants])
    return grants[0].resource.script, keys, call.encode()


def _cause(error: Exception) -> bytes:
    return (str(error) or type(error).__name__).encode()


def _ttl_ms(grant: Grant, now: float) -> int:
    """The ttl to ask for, in ms: not beyond max_hold; and if it is not renewed, what is left."""
    ttl = grant.attempt.ttl if grant.renews else grant.deadline - now
    return max(1, int(min(ttl, grant.max_hold_until - now + 2 * margin(ttl, grant.attempt.drift)) * 1000))
