"""Keeping many leases alive: the client renews each lease at ttl/3, many in one call.

Theory. The worker of ends sets aside the leases in the book that need an answer: a longer ttl, or whether they were
revoked. The worker of renewals asks the server, and does with each lease what its state calls for: it puts the lease
into the bucket of its next time, or ends it.

Rules.
(a) A failed renewal is not a loss: the lease is in jeopardy, and the client tries again until the deadline.
(b) One bad key never delays another key: the script answers for each key separately. `RENEWAL_TIMEOUT` bounds each
    call, so that a slow call does not make the other renewals late. No call delays the report that a lease has ended.
(c) No reply revives a lease that this client has ended.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.book import SUBSCRIBE_AFTER, next_due
from interlock._client.error_texts import OLD_PRIMARY_MAY_GRANT
from interlock._protocol.resource import Script
from interlock._protocol.server import Disconnected, Message, Route, Server, ServerError
from interlock._protocol.timing import FOREVER, capped_ttl
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
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from interlock._client.book import Book
    from interlock._client.grant import Hold
    from interlock._client.lease_ends import LeaseEnds

# leases in one script call: a call then takes less than 2 ms of the server, which other programs use, too
RENEWAL_BATCH: Final = 200
RENEWAL_TIMEOUT: Final = 1.0  # seconds that one renewal call may take
RENEWAL_RETRY_DELAY: Final = 0.1  # seconds after which the worker tries unfinished renewals again


class Renewer:
    """The task that renews the leases which are set aside, or asks whether they were revoked."""

    def __init__(self, server: Server, book: Book, ends: LeaseEnds) -> None:
        self.server = server
        self.runtime = server.runtime
        self.book = book
        self.ends = ends
        self.points = ends.points
        self.send_renewals: SendRenewals = send_renewals  # `interlock.testing` puts a pause in its place

    def due(self) -> float:
        """When the worker must renew leases: at once if any are set aside for renewal."""
        return self.runtime.now() if self.book.set_aside else FOREVER

    async def tick(self) -> None:
        """Renew the leases that are set aside, or ask whether they were revoked."""
        due, silent_nodes = list(self.book.set_aside.values()), dict[object, bytes]()
        try:
            for i in range(0, len(due), RENEWAL_BATCH):
                await self._renew(due[i : i + RENEWAL_BATCH], silent_nodes)
        finally:  # after any error: no lease may stay without a next time
            for hold in due:
                if self.book.set_aside.get(hold.token) is hold:
                    self.book.schedule(hold, self.runtime.now() + RENEWAL_RETRY_DELAY)

    async def _renew(self, holds: list[Hold], silent_nodes: dict[object, bytes]) -> None:
        """Renew these leases at once. The `silent_nodes` did not answer: more requests would delay other renewals."""
        work = [holds]
        while work:
            work += await self._renew_once(work.pop(0), silent_nodes)

    async def _renew_once(self, holds: list[Hold], silent_nodes: dict[object, bytes]) -> list[list[Hold]]:
        """Ask about these leases. Returns those to ask about again at once; each list goes out together."""
        alive = [hold for hold in holds if hold.live_grant is not None]
        sent, states, again = await self.send_renewals(self.server, alive, silent_nodes)
        for hold, state in states:
            self._on_state(hold, state, sent)
        return again

    def _on_state(self, hold: Hold, state: RenewState, sent: float) -> None:
        now, drift, grant = self.runtime.now(), self.server.drift, hold.live_grant
        if grant is None:
            self.book.remove(hold)
        elif why := grant.reason_ended(now):  # a reply does not revive a lost lease
            self.ends.lose(grant, why)
        elif isinstance(state, Failed):
            self._on_failure(hold, state.cause, now)
        elif isinstance(state, Gone | Revoked):
            self.ends.lose_hold(hold, reason_lost(state))
        else:
            slack = hold.deadline - now
            hold.extend_deadline(sent, _ttl_ms(hold, sent, drift) / 1000, drift)
            # Asked again at once if the channel was subscribed during this request: the lease was in no bucket.
            missed = hold.last_answered_sent <= self.book.pushed_since(hold) < FOREVER
            self.book.schedule(hold, now if missed else next_due(hold, renews=hold.renews))
            if (people := self.points.people) is not None and hold.renews:
                people.renewed(grant, slack)

    def _on_failure(self, hold: Hold, cause: bytes, now: float) -> None:
        self.book.schedule(hold, min(now + min(1.0, hold.ttl / 12), hold.deadline))
        if hold.renews:
            self.ends.note_jeopardy(hold, f"a renewal failed and is tried again: {cause.decode(errors='replace')}", now)


# Asking


class Answers(NamedTuple):
    """What the server said of some leases."""

    sent: float
    """When the requests were sent."""
    states: list[tuple[Hold, RenewState]]
    again: list[list[Hold]]
    """The leases about which nothing is known yet: each list is to be sent again at once."""


if TYPE_CHECKING:
    SendRenewals = Callable[[Server, list[Hold], dict[object, bytes]], Awaitable[Answers]]


async def send_renewals(server: Server, holds: list[Hold], silent_nodes: dict[object, bytes]) -> Answers:
    """Renew these leases by one message for each script and route. Adds silent nodes to `silent_nodes`."""
    sent = server.runtime.now()
    for hold in holds:
        if not hold.renews or hold.ttl / 3 > SUBSCRIBE_AFTER:  # else renewals ask often enough
            server.ensure_subscribed(hold.resource.keys[0])
    batches = _plan(holds, server.route)
    skipped = [batch for batch in batches if batch.node in silent_nodes]
    sent_batches = [batch for batch in batches if batch.node not in silent_nodes]
    replies: list[Any] = []
    if sent_batches:
        shortest = min(hold.ttl for batch in sent_batches for hold in batch.holds)
        timeout = min(RENEWAL_TIMEOUT, max(0.05, shortest / 3))
        replies = await server.call_many(
            [_renew_message(batch.holds, sent, server.drift) for batch in sent_batches], sent + timeout
        )
    found: list[tuple[Hold, RenewState]] = []
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
                found += zip(batch.holds, _states_that_count(server, batch, states), strict=False)
    for batch in skipped:
        found += [(hold, Failed(silent_nodes[batch.node])) for hold in batch.holds]
    return Answers(sent, found, [together, *apart] if together else apart)


def _states_that_count(server: Server, batch: Batch, states: Sequence[RenewState]) -> Sequence[RenewState]:
    """The states, with Failed for each renewal while the old primary may still grant beside this server."""
    if RENEWED not in states or not server.old_primary_may_still_grant(batch.holds[0].resource.keys[0]):
        return states
    return [Failed(OLD_PRIMARY_MAY_GRANT.encode()) if state == RENEWED else state for state in states]


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
    try:
        return RenewReply.parse(reply).states
    except (TypeError, IndexError) as error:  # a later version of the script says what this one does not know
        return [Failed(_cause(error))] * size


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
