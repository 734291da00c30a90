"""The algorithm of acquiring a lease, written once, over a small `Server`: ask, wait, give up.

Theory. The server decides; the client asks, relies on the reply for a bounded time, and asks again. Every request
but `execute` is a script call that the client may send twice: the token in an `acquire` names one attempt, so the same
request serves as the retry after a lost reply, as the poll of a waiter, and as the confirmation after a handover.

Rules.
(a) The client relies on a lease until `Hold.deadline`: the ttl by the client's own clock, counted from *before* the
    request was sent, less a margin.
(b) An attempt that fails keeps no grant and no place in a queue, after a timeout, a cancellation or Ctrl-C alike: the
    client undoes what the attempt may have left in the server, or the next caller of its cohort takes that over.
(c) An attempt is *in doubt* if one of its requests was sent and got no reply: a copy of the request may still reach
    the server. The release or undo of an attempt in doubt leaves a tombstone, so that the server refuses the copy.
(d) Nothing here knows threads, asyncio, sockets or wall clocks: the `Server` and its `Runtime` deal with these. Those
    for threads never suspend a coroutine, so `run()` drives this code with no event loop.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from typing import TYPE_CHECKING, Any, Final

from interlock._client.cohort import OTHERS_WAIT
from interlock._client.error_texts import (
    HEARTBEATS_UNANSWERED,
    BusyError,
    busy_error,
    outer_error,
    reply_error,
    visible_cause,
)
from interlock._client.giving_back import GivingBack
from interlock._client.grant import NO_PROOF, AcquireOptions, Attempt, Grant, Hold, last_answer_counts
from interlock._client.holding import Holding
from interlock._client.people import Points
from interlock._client.places import KEPT_PLACES, NOT_THE_USERS, keep_place
from interlock._client.retries import Requests, was_unanswered
from interlock._client.self_wait import LOOK_AFTER, SelfWaits, begins_alike, blocks_at_server
from interlock._client.turns import Turns
from interlock._protocol import forks
from interlock._protocol.forks import KNOWN
from interlock._protocol.server import Disconnected, Stopped, TokenSpent
from interlock._protocol.timing import (
    FOREVER,
    MAX_EXPIRED_GRANTS,
    PROOF_TIMEOUT,
    RETRY_FOR,
    SHORT_SILENCE,
    STOP_POLL_INTERVAL,
    TRY_FOR,
    TRY_PROOF_TIMEOUT,
    UNDO_GRACE,
    margin,
)
from interlock.errors import AcquireTimeout, Deadlock, LeaseLost, LockError, Unavailable
from interlock.primitives.messages import (
    NO_BOUND,
    NO_WAITING,
    Busy,
    Granted,
    Queued,
    Refused,
    Retry,
    encode_acquire,
    lost_identity,
    parse_acquire,
)

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Collection, Iterable
    from types import FrameType

    from interlock._client.book import Book
    from interlock._client.lease_ends import LeaseEnds
    from interlock._client.people import SayMore
    from interlock._client.places import Place
    from interlock._client.unread_releases import UnreadReleases
    from interlock._client.waiting import Waiters
    from interlock._protocol.resource import Resource

LONG_TIMEOUT: Final = 5.0  # seconds: a caller with this timeout or a longer one asks once more before its time is over
LAST_QUESTION: Final = 0.4  # seconds before the end of that time at which it asks


class Core:
    """One client of the protocol. It acquires; its parts send requests, wait for turns, hold and give back leases."""

    def __init__(
        self,
        requests: Requests,
        waiters: Waiters,
        ends: LeaseEnds,
        unread_releases: UnreadReleases,
        process_id: str,
        caller: Callable[[Resource], tuple[str, weakref.ref[Any] | None]],
        max_ttl: float,
        try_for: float = TRY_FOR,
        frames_to_user: int = 1,
        *,
        all_books: Callable[[], Iterable[Book]] = tuple,
        all_waits: Callable[[], Iterable[Attempt]] = tuple,
        say_more: SayMore | None = None,
    ) -> None:
        self.requests = requests
        self.server = server = requests.server
        self.runtime = server.runtime
        self.waiters = waiters
        self.ends = ends
        self.book = ends.book
        self.cohorts = ends.cohorts
        self.undo = ends.undo
        self.process_id = process_id  # the beginning of each token: label, host, process
        self.caller = caller  # the name of the thread or task that uses the resource, and itself if that is known
        self.try_for = try_for  # seconds that a call which does not wait may take
        self.frames_to_user = frames_to_user  # the least depth of the stack at which attempt() may find the user's code
        self.has_cohorts = not server.is_quorum  # all servers of a quorum would have to reserve the same fences
        self.points = Points()
        self.giving_back = GivingBack(ends, self.points)
        self.holding = Holding(self.requests, self.giving_back, unread_releases, max_ttl)
        self.self_waits = SelfWaits(self.book, all_books)
        self.turns = Turns(self.requests, self.cohorts, self.giving_back, self.self_waits, self._begin_section)
        self.say_more = say_more  # adds to the error of a timeout what people know of the holder
        self.all_waits = all_waits  # the attempts that wait, of all clients in this process

    def attempt(
        self,
        resource: Resource,
        options: AcquireOptions,
        timeout: float | None,
        make_lease: Callable[[Core, Grant], object] | None = None,
        busy: BusyError = busy_error,
        try_for: float | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Attempt:
        """A new attempt, with a token that no other attempt has.

        `timeout` is in seconds: None waits for ever, 0 does not wait. With 0, `try_for` seconds bound the call (by
        default the `try_for` of the Interlock, or `patient_timeout` if replicas or disks must acknowledge the grant).
        While the call waits, it calls `should_stop` several times a second. `busy` makes the error for a refusal.
        """
        until = FOREVER
        if options.max_hold is not None:
            options = options.capped(self.server.drift)
        if timeout is not None:
            if try_for is None:
                try_for = self.try_for if options.acks is None else self.patient_timeout
            until = self.runtime.now() + (timeout or try_for)
        name, caller = self.caller(resource)
        try:
            frame: FrameType | None = sys._getframe(self.frames_to_user)  # as calling_place() does
        except ValueError:  # the stack is not that deep: C code calls
            frame = None
        while frame is not None and NOT_THE_USERS[frame.f_code.co_filename]:
            frame = frame.f_back
        place: Place | None = None
        if frame is not None:
            code, offset = frame.f_code, frame.f_lasti
            place = KEPT_PLACES.get((id(code), offset)) or keep_place(code, offset)
        return Attempt(  # by position, which is faster
            resource,
            f"{resource.owner_prefix}{self.process_id}/{name}/{os.urandom(16).hex()}",
            options,
            timeout,
            until,
            self.runtime.event() if timeout is None or timeout > 0 else None,
            make_lease,
            busy,
            should_stop,
            caller,
            place,
        )

    def _abandon_token(self, attempt: Attempt) -> None:
        """Go on under another token, at the end of the queue. The undo of the former token runs in the background."""
        former = copy.copy(attempt)
        former.abandoned = former.in_doubt = True
        self.undo.add(former)
        self.waiters.unregister(attempt)  # second: close() in another thread finds the attempt here, or its undo
        holder, _, _ = former.token.rpartition("/")
        attempt.token = f"{holder}/{os.urandom(16).hex()}"
        attempt.is_queued = attempt.in_doubt = attempt.was_granted = False
        attempt.unanswered_since = FOREVER  # servers answered, even if the vote was split

    async def acquire(self, attempt: Attempt) -> Any:
        """Ask until the server grants the attempt, and return its lease.

        For an attempt that gets no lease (at a latch or a barrier), returns the number in the reply.

        Raises the error that `attempt.busy` makes of a refusal, or of the last reply when the time is over. Raises
        Unavailable if there was no reply, or if the server has been silent for so long that its last reply no longer
        counts; and Stopped once `attempt.should_stop` returns True.
        """
        server, resource, options = self.server, attempt.resource, attempt.options
        max_waiters = NO_WAITING if attempt.event is None else options.max_waiters
        if (people := self.points.people) is not None and attempt.make_lease is not None:
            people.begins(attempt, self.runtime.now())
        try:
            joins = self.has_cohorts and attempt.options.joins and attempt.timeout != 0
            if joins and not self.cohorts.join(attempt) and (lease := await self.turns.wait(attempt)) is not None:
                return lease
            # As Waiters.register() does (this is the hot path). Before the first request, so that no push can be early.
            self.waiters.registered[attempt.token] = attempt
            while True:
                subscribed, channel = server.subscription_of(resource.keys[0])
                own = resource.acquire_args
                own = (*own, attempt.generation) if resource.has_generation else own
                args = encode_acquire(
                    attempt.token, options.ttl_ms, options.handover_ttl_ms, subscribed, channel, max_waiters, own
                )
                try:
                    raw, sent = await self.requests.ask_until_answered(
                        attempt, args, attempt.until, attempt.should_stop, options.acks, options.ttl
                    )
                except TokenSpent:
                    self._abandon_token(attempt)
                    self.waiters.registered[attempt.token] = attempt
                    continue
                reply = parse_acquire(raw)
                if not isinstance(reply, Granted):
                    await self._before_next_request(attempt, reply)
                    if attempt.last_queued is not None:
                        max_waiters = NO_BOUND  # it has waited: no restart of the server may cost its place
                elif attempt.make_lease is None:
                    self.waiters.unregister(attempt)
                    return reply.number
                elif (lease := self.lease_from_grant(attempt, reply.number, sent)) is not None:
                    attempt.should_stop = attempt.event = None  # what follows the grant does not belong to the waiting
                    return lease
        except BaseException as error:
            # Set first: if KeyboardInterrupt arrives during the clean-up below, the heartbeat must already treat this
            # attempt as abandoned.
            attempt.abandoned = True
            await self._give_up(attempt, error)
            raise

    @property
    def patient_timeout(self) -> float:
        """Seconds for a call that does not wait, but has to do more than one plain try."""
        return max(RETRY_FOR, self.try_for)

    async def _before_next_request(self, attempt: Attempt, reply: Queued | Busy | Retry | Refused) -> None:
        """Do what the reply calls for before the next request: wait, search for a proof, or nothing.

        Raises the error of a final refusal, or when the time is over.
        """
        assert attempt.busy is not None
        last_queued = attempt.last_queued
        if isinstance(reply, Queued):  # first: meanwhile, callers behind this one in the cohort share the answer
            attempt.is_queued, attempt.last_queued, attempt.generation = True, reply, reply.generation
        identity = lost_identity(reply)
        if identity and attempt.proven_identity not in (identity, NO_PROOF):
            # One search for each lost identity: the script may keep the quarantine in spite of a proof, which may not
            # cover a ttl as short as that of the last lease. After a search without a proof the attempt searches no
            # more: its caller waits for the end of the quarantine.
            timeout = TRY_PROOF_TIMEOUT if attempt.event is None else PROOF_TIMEOUT
            is_proven = await self.server.prove_lossless(
                attempt.resource.keys, identity, min(attempt.until, self.runtime.now() + timeout)
            )
            attempt.proven_identity = identity if is_proven else NO_PROOF
            if self.runtime.now() < attempt.until:
                return  # to ask again at once
        if isinstance(reply, Queued):
            if last_queued is None or lost_identity(last_queued):
                self._begin_to_wait(attempt, reply)
            if not await self._wait(attempt, reply):
                raise self._timeout_error(attempt, self.self_waits.busy_error(attempt, reply))
        elif isinstance(reply, Busy):
            raise self.self_waits.busy_error(attempt, reply)
        elif isinstance(reply, Refused):
            raise reply_error(attempt.resource, reply)
        # After a Retry the next request is due at once.

    async def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        """Undo what an attempt that ends with this error may have left, and report it. May raise a better error."""
        last = error
        try:
            await self._undo_attempt(attempt, error)
        except BaseException as better:
            last = better
            raise
        finally:
            if (people := self.points.people) is not None:
                people.not_acquired(attempt, last, self.runtime.now())

    async def _undo_attempt(self, attempt: Attempt, error: BaseException) -> None:
        """Undo whatever an attempt that ends with this error may have left in the server. May raise a better error.

        The next caller of the cohort takes over what this one has asked for.
        """
        if attempt.options.joins and (passed := self.cohorts.leave(attempt)) is not None:
            self.giving_back.in_background(passed)
        may_have_left = attempt.is_queued or attempt.in_doubt or attempt.was_granted or self.server.is_quorum
        # An error from elsewhere (a cancellation, an interrupt) may have arrived before these flags were set.
        undone = self.undo.add(attempt) if may_have_left or not isinstance(error, LockError) else None
        self.waiters.unregister(attempt)  # second: close() in another thread finds the attempt here, or its undo
        grace_until = self.runtime.now() + UNDO_GRACE  # for both waits below, which the caller's timeout does not bound
        if isinstance(error, AcquireTimeout) and self.say_more is not None:
            await self.say_more(attempt, error, grace_until)
        if undone is not None and isinstance(error, AcquireTimeout | Deadlock):
            await undone.wait(grace_until)
        if was_unanswered(error) and (blocking := self._blocking(attempt, self.runtime.now())) is not None:
            raise self.self_waits.busy_error(attempt, blocking) from visible_cause(error)

    def _blocking(self, attempt: Attempt, now: float) -> Queued | None:
        """What kept a caller waiting whose time is over without an answer; None if nobody knows, or it is long ago.

        Either the server said just before why the caller has to wait. Or other callers of the process were before this
        one for most of its time, and the server has just answered this client: see ADR 43.
        """
        if not last_answer_counts(attempt, now):
            return None
        waited, unanswered = now - attempt.waits_since, now - attempt.unanswered_since
        is_short = unanswered < min(waited / 2, SHORT_SILENCE) and self.requests.has_answered(attempt.resource, now)
        return attempt.last_queued or (OTHERS_WAIT if is_short else None)

    def _timeout_error(self, attempt: Attempt, busy: LockError) -> LockError:
        """The error for a waiter whose time is over: `busy` if the last reply still counts, else Unavailable."""
        now = self.runtime.now()
        if last_answer_counts(attempt, now):
            return busy
        return self.requests.unavailable(attempt, now, Disconnected(HEARTBEATS_UNANSWERED, sent=True))

    def _begin_to_wait(self, attempt: Attempt, reply: Queued) -> None:
        """Note when the waiter looks whether it waits for itself. It looks now if the holder's token suggests that."""
        now = self.runtime.now()
        attempt.waits_since = min(attempt.waits_since, now)
        after = LOOK_AFTER * random.uniform(1.0, 1.5)  # so that not all waiters of a crowd look at one moment
        attempt.look_at = FOREVER if attempt.caller is None else now + after
        self.self_waits.look_for_interrupted(attempt, lambda below: blocks_at_server(attempt, reply, below, self.book))
        if begins_alike(attempt, reply):
            self.self_waits.look(attempt, reply, warn=False)

    async def _wait(self, attempt: Attempt, reply: Queued) -> bool:
        """Wait until there is a reason to ask again. Returns False if the time is over.

        Raises Stopped; Deadlock if the caller waits for itself; LeaseLost as `end_waits` says.
        """
        if attempt.outer_loss is not None:
            raise outer_error(attempt.resource, attempt.outer_loss)
        now, should_stop, polls = self.runtime.now(), attempt.should_stop, attempt.options.polls
        poll = FOREVER if should_stop is None else now + STOP_POLL_INTERVAL
        ask_at = now + reply.pttl_ms / 1000 if polls and reply.is_head else FOREVER
        if (attempt.timeout or 0) >= LONG_TIMEOUT and now < attempt.until - LAST_QUESTION:
            ask_at = min(ask_at, attempt.until - LAST_QUESTION)  # so that the error names the holder of then
        until = min(attempt.until, attempt.look_at, poll, ask_at)
        woken = await self.waiters.wait(attempt, reply.pttl_ms, reply.is_head and not polls, until)
        while not woken and (now := self.runtime.now()) < attempt.until:
            if now >= ask_at:
                return True
            if should_stop is not None and should_stop():
                raise Stopped
            if now >= attempt.look_at:
                attempt.look_at = FOREVER
                self.self_waits.look(attempt, reply, warn=True)
            poll = FOREVER if should_stop is None else now + STOP_POLL_INTERVAL
            assert attempt.event is not None  # the attempt waits
            woken = await attempt.event.wait(min(attempt.until, attempt.look_at, poll, ask_at))
        if attempt.outer_loss is not None:
            raise outer_error(attempt.resource, attempt.outer_loss)
        return woken

    def end_waits(self, callers: Collection[object], lost: LeaseLost) -> None:
        """End all waits of these threads, each of which is inside of a `with` whose lease somebody has revoked.

        Else two processes that wait for each other would do so until the revoked lease has run out. Calls that a thread
        begins later wait as ever.
        """
        for attempt in self.all_waits():
            if (event := attempt.event) is not None and attempt.live_caller in callers:
                attempt.outer_loss = lost
                event.set()

    def _begin_section(self, grant: Grant) -> Any:
        """Make the lease of a caller to which a hold has passed. Returns None if the hold has ended before."""
        attempt = grant.attempt
        assert attempt.make_lease is not None
        lease = attempt.make_lease(self, grant)
        if self.requests.closed or not KNOWN[0]:
            raise self.requests.over_error(attempt.resource)
        if grant.reason_ended(self.runtime.now()) is not None:
            return None
        attempt.event = None
        if (people := self.points.people) is not None:
            people.acquired(grant, self.runtime.now())
        return lease

    def lease_from_grant(self, attempt: Attempt, fence: int, sent: float) -> Any:
        """Make the lease of a grant, start its renewal, and unregister its waiter.

        Returns None if the grant expired before its reply arrived. Raises Unavailable after too many of these.
        """
        assert attempt.make_lease is not None
        attempt.was_granted = True
        ttl, max_hold = attempt.options.ttl, attempt.options.max_hold
        max_hold_until = FOREVER if max_hold is None else sent + max_hold
        deadline = min(max_hold_until, sent + ttl - margin(ttl, self.server.drift))
        if self.runtime.now() >= deadline:
            attempt.expired_grants += 1
            if attempt.expired_grants == MAX_EXPIRED_GRANTS:
                url = self.server.display_url
                raise Unavailable(f"{attempt.resource}: {url} answers too late for a lease of {ttl:g} s")
            return None
        hold = Hold(attempt, attempt.token, sent, deadline, max_hold_until, forks.count)
        grant = hold.grant = Grant(hold, attempt, fence, sent)
        try:
            lease = attempt.make_lease(self, grant)
            self.book.add(hold)
            if attempt.options.joins:
                cohort = self.cohorts.by_key.get(attempt.resource.keys[0])
                if cohort is not None and cohort.driver is attempt:
                    cohort.begin(hold)
            # The push of a revocation may have arrived before the reply that grants the lease.
            if why := self.book.early_revocations.get(attempt.token):
                raise grant.error(f"it was revoked: {why}")
            # close() may not have seen this lease: the caller undoes the attempt.
            if self.requests.closed or not KNOWN[0]:
                raise self.requests.over_error(attempt.resource)
            if attempt.is_queued:
                self.waiters.unregister(attempt)
            else:
                self.waiters.registered.pop(attempt.token, None)  # as unregister() does
            if (people := self.points.people) is not None:
                people.acquired(grant, self.runtime.now())
        except BaseException:
            grant.end(Grant.RELEASED)
            self.book.remove(hold)
            raise
        return lease
