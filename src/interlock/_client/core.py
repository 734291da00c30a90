"""What acquiring, holding, renewing and releasing mean: the algorithm, once, over a small `Port`.

Theory. The server decides; this side asks, believes for a bounded time, and asks again. Every question is a
script call that may be sent twice: `acquire` is keyed by a token that names one attempt, so asking again is at
once the retry of a lost reply, a waiter's poll, and the confirmation of a lock that was handed over.

Rules.
 1. Belief ends by our own clock, counted from *before* the request was sent (`Grant.deadline`).
 2. An attempt that does not end in a `Grant` is undone, whatever ended it: a timeout, a cancellation, Ctrl-C.
 3. If a request of an attempt was sent and its reply did not come, the attempt is *in doubt*: a copy of the
    request may still reach the server. Whatever ends it then leaves a tombstone, so that the copy takes nothing.
 4. Renewal ends before the release is sent; a lease that has ended refuses everything without I/O.
 5. Nothing here knows threads, asyncio, sockets or wall clocks: that is the port's business. The port for
    threads never suspends a coroutine, so `run()` drives this code with no event loop.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, TypeVar

from interlock._client.error_texts import (
    HEARTBEATS_UNANSWERED,
    OLD_PRIMARY_MAY_GRANT,
    BusyError,
    busy_error,
    reply_error,
    server_error,
    unavailable_error,
)
from interlock._client.grant import Attempt, Grant, last_answer_counts, tombstone_ms
from interlock._protocol.log import log
from interlock._protocol.timing import (
    FOREVER,
    MAX_EXPIRED_GRANTS,
    MAX_RETRY_DELAY,
    MIN_RETRY_DELAY,
    PROOF_TIMEOUT,
    RETRY_FOR,
    STOP_POLL_INTERVAL,
    TRY_FOR,
    UNDO_GRACE,
    capped_ttl,
    margin,
)
from interlock._protocol.types import (
    Argument,
    AutoResetEvent,
    Disconnected,
    Port,
    Resource,
    ServerError,
    Stopped,
    is_transient,
)
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, LockError, Unavailable
from interlock.primitives.messages import (
    Busy,
    ExecuteCall,
    ExecuteReply,
    Failed,
    Gone,
    Granted,
    Queued,
    RenewCall,
    RenewReply,
    Retry,
    Revoked,
    encode_acquire,
    encode_release,
    is_acquire,
    lengthens_lease,
    parse_acquire,
    quarantine_evidence,
    reason_lost,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._client.renewal import Renewal
    from interlock._client.undo import Undo
    from interlock._client.waiting import Waiters
    from interlock._protocol.acks import Acks

L = TypeVar("L")


class Core:
    """One client of the protocol: it asks for locks, holds, renews and gives back."""

    def __init__(
        self,
        port: Port,
        waiters: Waiters,
        renewal: Renewal,
        undo: Undo,
        holder_id: Callable[[], str],
        try_for: float = TRY_FOR,
    ) -> None:
        self.port = port
        self.runtime = port.runtime
        self.waiters = waiters
        self.renewal = renewal
        self.undo = undo
        self.holder_id = holder_id
        self.try_for = try_for  # seconds that a call which does not wait may take
        self.releasing: dict[str, Attempt] = {}  # what is being given back now
        self.closed = False

    async def acquire(
        self,
        resource: Resource,
        make_lease: Callable[[Grant], L],
        ttl: float,
        timeout: float | None,
        renews: bool = True,
        max_hold: float | None = None,
        busy: BusyError | None = None,
        acks: Acks | None = None,
        try_for: float | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> L:
        """A lease, made by `make_lease`. Raises AcquireTimeout if somebody else has it, Unavailable if no server tells.

        `timeout` is in seconds: None waits for ever, 0 not at all; then `try_for` bounds the call, by default that of
        the Interlock. A grant that replicas or disks must acknowledge may take as long as ever. `should_stop` is asked
        several times a second while it waits; once it is true, Stopped is raised.
        """

        def held(attempt: Attempt, granted: Granted, sent: float) -> L | None:
            return self.lease_from_grant(attempt, granted.number, sent, make_lease, renews=renews, max_hold=max_hold)

        ttl = self._capped_ttl(ttl, max_hold)
        attempt = self.attempt(resource, ttl, wait=timeout is None or timeout > 0)
        attempt.acks, attempt.should_stop = acks, should_stop
        if acks is not None and try_for is None:
            try_for = self.patient_timeout
        return await self.wait_until_granted(resource, held, ttl, timeout, busy, attempt, try_for)

    @property
    def patient_timeout(self) -> float:
        """Seconds that a call may take which does not wait, but has more to do than one try."""
        return max(RETRY_FOR, self.try_for)

    def _capped_ttl(self, ttl: float, max_hold: float | None) -> float:
        return ttl if max_hold is None else capped_ttl(ttl, max_hold, self.port.drift)

    def attempt(self, resource: Resource, ttl: float, *, wait: bool) -> Attempt:
        """A new one, with a token that nobody ever had."""
        token = f"{resource.owner_prefix}{self.holder_id()}/{os.urandom(16).hex()}"
        attempt = Attempt(resource, token, ttl, self.runtime.event() if wait else None)
        attempt.drift = self.port.drift
        return attempt

    async def wait_until_granted(
        self,
        resource: Resource,
        accept: Callable[[Attempt, Granted, float], L | None],
        ttl: float,
        timeout: float | None,
        busy: BusyError | None = None,
        attempt: Attempt | None = None,
        try_for: float | None = None,
    ) -> L:
        """Ask until it is granted: what `accept` makes of that, and leaves the waiters; or again, if that is None.

        Raises what `busy` makes of a refusal, or of the last answer when the time is over; Unavailable if there was
        none, or if the server has been silent since for so long that its answer tells nothing any more.
        """
        port, busy = self.port, busy or busy_error
        started = self.runtime.now()
        wait = timeout is None or timeout > 0
        until = FOREVER if timeout is None else started + (timeout or (self.try_for if try_for is None else try_for))
        attempt = attempt or self.attempt(resource, ttl, wait=wait)
        token, ttl_ms, waits = attempt.token, str(int(ttl * 1000)), "1" if wait else "0"
        late, doubted, proven = 0, True, ""
        refused: Queued | None = None  # the last answer that somebody else has it
        try:
            self.waiters.register(attempt)
            while True:
                heard, channel = port.subscription_of(resource.keys[0])
                own = resource.acquire_args
                own = (*own, attempt.generation) if resource.has_generation else own
                args = encode_acquire(token, ttl_ms, attempt.handover_ttl_ms, heard, channel, waits, own)
                raw, sent = await self.request(attempt, args, until)
                reply = parse_acquire(raw)
                if isinstance(reply, Granted):
                    accepted = accept(attempt, reply, sent)
                    if accepted is not None:
                        attempt.should_stop = None  # what is asked of it from now on is no part of the waiting
                        return accepted
                    late = self._count_late(attempt, late)
                    continue
                attempt.is_queued |= isinstance(reply, Queued)
                if (evidence := quarantine_evidence(reply)) and doubted and evidence != proven:
                    proven = evidence  # once for each: not every client can make use of what it has proven
                    doubted = await port.prove_lossless(
                        resource.keys, evidence, min(until, self.runtime.now() + PROOF_TIMEOUT * wait)
                    )
                    continue
                if isinstance(reply, Queued):
                    refused, attempt.generation = reply, reply.generation
                    if not await self._wait(attempt, reply, until):
                        raise self._timeout_error(attempt, busy(resource, timeout or 0, reply))
                elif not isinstance(reply, Retry):
                    raise busy(resource, 0, reply) if isinstance(reply, Busy) else reply_error(resource, reply)
        except BaseException as error:
            # Set first: if KeyboardInterrupt arrives during the clean-up below, the heartbeat must already treat this
            # attempt as abandoned.
            attempt.abandoned = True
            self.waiters.unregister(attempt)
            await self._undo(attempt, error, was_granted=late > 0)
            if refused is not None and was_unanswered(error) and last_answer_counts(attempt, self.runtime.now()):
                # The caller's time is over, and the server said just before that somebody else has it.
                raise busy(resource, timeout or 0, refused) from error
            raise

    def _count_late(self, attempt: Attempt, late: int) -> int:
        """One more grant had expired when its reply came. Raises Unavailable if there are too many in a row."""
        if late + 1 == MAX_EXPIRED_GRANTS:
            shown = self.port.display_url
            raise Unavailable(f"{attempt.resource}: {shown} answers too late for a lease of {attempt.ttl:g} s")
        return late + 1

    async def _undo(self, attempt: Attempt, error: BaseException, *, was_granted: bool) -> None:
        """Take back what an attempt that ends with this error may have left in the server."""
        may_have_left = attempt.is_queued or attempt.in_doubt or was_granted or self.port.is_quorum
        if may_have_left or not isinstance(error, LockError):
            undone = self.undo.add(attempt)
            if isinstance(error, AcquireTimeout):
                await self.runtime.wait(undone, self.runtime.now() + UNDO_GRACE)

    def _timeout_error(self, attempt: Attempt, refusal: LockError) -> LockError:
        """What to raise for a waiter whose time is over: the refusal that came last, if it still counts."""
        now = self.runtime.now()
        if last_answer_counts(attempt, now):
            return refusal
        return unavailable_error(attempt, self.port.display_url, now, Disconnected(HEARTBEATS_UNANSWERED, sent=True))

    async def _wait(self, attempt: Attempt, reply: Queued, until: float) -> bool:
        """Wait until there is a reason to ask again. False: the time is over. Raises Stopped."""
        stopped = attempt.should_stop
        if stopped is None:
            return await self.waiters.wait(attempt, reply.pttl_ms, reply.is_head, until)
        woken = await self.waiters.wait(
            attempt, reply.pttl_ms, reply.is_head, min(until, self.runtime.now() + STOP_POLL_INTERVAL)
        )
        while not woken and self.runtime.now() < until:
            if stopped():
                raise Stopped
            woken = await self.runtime.wait(attempt.event, min(until, self.runtime.now() + STOP_POLL_INTERVAL))
        return woken

    def lease_from_grant(
        self,
        attempt: Attempt,
        fence: int,
        sent: float,
        make_lease: Callable[[Grant], L],
        *,
        renews: bool,
        max_hold: float | None,
    ) -> L | None:
        """The lease of a grant, which waits no more; None if its answer took longer than it lasts."""
        grant = Grant(attempt, fence, sent, renews=renews, ends=FOREVER if max_hold is None else sent + max_hold)
        if grant.reason_ended(self.runtime.now()):
            return None
        try:
            lease = make_lease(grant)
            self.renewal.add(grant)
            if why := self.renewal.early_revocations.get(
                attempt.token
            ):  # its push was faster than the reply that granted it
                self.undo.add(attempt)
                raise grant.error(f"it was revoked: {why}")
            if self.closed:  # closing gives it back, whether it has seen it or not
                raise self.closed_error(attempt.resource)
            self.waiters.unregister(attempt)
        except BaseException:
            grant.end_reason = Grant.RELEASED
            self.renewal.remove(grant)
            raise
        return lease

    def release_in_background(self, grant: Grant) -> AutoResetEvent:
        """Give it back in the background, for nobody will use it. The signal tells when that is done."""
        grant.mark_released()
        self.renewal.remove(grant)
        return self.undo.add(grant.attempt)

    def release_later(self, grant: Grant) -> None:
        """The same without I/O and locks: also called while it is garbage collected, in whichever thread."""
        grant.end_reason = grant.end_reason or Grant.RELEASED
        self.undo.from_finalizers.append(grant.attempt)  # first here, then out of the other: see Ends.due
        self.renewal.remove(grant)

    async def request(self, attempt: Attempt, args: Sequence[Argument], until: float) -> tuple[Any, float]:
        """One question of an attempt, retried while the server is away: the reply, and when it was sent."""
        port, resource = self.port, attempt.resource
        give_up, pause = until, 0.0
        cause: Exception | None = None
        while True:
            if self.closed:
                raise self.closed_error(resource)
            if attempt.should_stop is not None and attempt.should_stop():
                raise Stopped
            sent = self.runtime.now()
            try:
                if attempt.acks is None or not is_acquire(args):
                    reply = await port.call(resource.script, resource.keys, args, give_up)
                else:
                    reply = await self._request_with_acks(attempt, args, give_up)
                if not lengthens_lease(args, reply) or not port.old_primary_may_still_grant(resource.keys[0]):
                    attempt.unanswered_since = FOREVER
                    return reply, sent
                attempt.in_doubt, cause, stale = True, ServerError(OLD_PRIMARY_MAY_GRANT), False
            except Disconnected as error:
                attempt.in_doubt |= error.sent
                stale = error.stale
                # A request with so little time left that its silence says less than the error before does not count.
                counts = cause is None or not error.timed_out or give_up - sent > MAX_RETRY_DELAY
                cause = error if counts else cause
            except ServerError as error:
                attempt.in_doubt |= attempt.acks is not None  # it may be what waits for replicas that was refused
                if not is_transient(str(error)):
                    raise server_error(resource, port.display_url, str(error)) from None
                cause, stale = error, False
            except BaseException:
                attempt.in_doubt = True  # cancelled or interrupted while the request was on its way
                raise
            attempt.unanswered_since = min(attempt.unanswered_since, sent)
            give_up = min(give_up, sent + port.retry_for)
            pause = pause if stale else _longer(pause)
            await self._pause_before_retry(attempt, cause, pause, give_up)

    async def _pause_before_retry(
        self, attempt: Attempt, cause: Exception | None, pause: float, give_up: float
    ) -> None:
        """Wait before the next try of a request. Raises Unavailable if no time is left for one."""
        now = self.runtime.now()
        if now + 2 * MIN_RETRY_DELAY >= give_up:
            assert cause is not None
            raise unavailable_error(attempt, self.port.display_url, now, cause) from cause
        # Half of the rest at most: the last try comes at the end of the caller's time, not long before.
        await self.runtime.wait(self.runtime.event(), now + min(pause, max(MIN_RETRY_DELAY, (give_up - now) / 2)))

    async def _request_with_acks(self, attempt: Attempt, args: Sequence[Argument], until: float) -> Any:
        """The reply, of a grant once enough have it. Raises Unavailable if they don't in time."""
        resource, acks = attempt.resource, attempt.acks
        assert acks is not None
        patience = min(acks.timeout(attempt.ttl), 0.9 * (until - self.runtime.now()))  # so that its answer is in time
        reply, known, got = await self.port.call_with_acks(resource.script, resource.keys, args, until, acks, patience)
        if lengthens_lease(args, reply):
            attempt.in_doubt = True  # until it is clear that it counts: what ends here is undone
            attempt.assurance = acks.checked(resource, known, got, acks.timeout(attempt.ttl))
        return reply

    @staticmethod
    def closed_error(resource: Resource) -> ConfigError:
        return ConfigError(f"{resource}: this Interlock is closed. Make a new one")

    async def release(self, grant: Grant) -> bool:
        """Give it back: whether it was still ours. Raises Unavailable if nobody can tell."""
        attempt = grant.attempt
        try:
            now = self.runtime.now()
            grant.reason_ended(now)
        except BaseException:
            self.release_in_background(grant)
            raise
        if grant.end_reason is not None:
            if grant.end_reason not in {Grant.RELEASED, Grant.FORKED}:
                self.undo.add(attempt)  # what a revocation left is for the next one
            return False
        doubt = attempt.in_doubt
        try:
            grant.mark_released()
            self.renewal.remove(grant)
            self.releasing[attempt.token] = attempt
            args = encode_release(attempt.token, tombstone_ms(attempt), attempt.release_args)
            attempt.in_doubt = False  # from here on it tells whether a release was sent twice
            until = FOREVER
            if grant.deadline < now + RETRY_FOR:  # after its ttl it is free by itself
                until = max(grant.deadline, now + 0.5)
            was_ours = False
            while True:
                reply, _ = await self.request(attempt, args, until)
                ours, again = reply  # a ReleaseReply, not built: every release pays for what happens here
                was_ours |= bool(ours)  # the first answer tells; while we come again, others release, too
                if not again:
                    # The server remembers one releaser. If it was asked twice and knows of another by now, then
                    # the first release was run: nothing says that the lease had ended before.
                    return was_ours or (attempt.in_doubt and now < grant.deadline)
        except BaseException as error:
            if self.closed and isinstance(error, ConfigError):  # closing releases it
                return True
            self.undo.add(attempt)
            raise
        finally:
            attempt.in_doubt |= doubt
            self.releasing.pop(attempt.token, None)

    async def exit_section(self, grant: Grant, error: BaseException | None) -> None:
        """End a section: raises LeaseLost if the lease did not last, unless the body raised already.

        A server that is away then is no reason to fail work that was done under a lease that held: the
        release goes on in the background, and the lease runs out by itself.
        """
        why = None
        try:
            why = grant.reason_ended(self.runtime.now())
            if why == Grant.RELEASED:
                return
            if why is not None:
                self.renewal.lose(grant, why)
            if await self.release(grant):
                return
        except LockError as failed:
            if error is None and not isinstance(failed, Unavailable):
                raise
            log.warning("%s The release goes on in the background", failed)
            return
        except BaseException:
            self.release_in_background(grant)
            raise
        lost = grant.error(why or "it had ended in the server before it was released")
        if error is None:
            raise lost
        if isinstance(error, LeaseLost):
            return
        while error.__context__ is not None and error.__context__ is not lost:
            error = error.__context__
        error.__context__ = lost

    async def extend(self, grant: Grant, ttl: float) -> None:
        """Lengthen the lease to `ttl` seconds from now. Raises LeaseLost."""
        if why := grant.reason_ended(self.runtime.now()):
            raise grant.error(why)
        # Not beyond max_hold: what is not believed here must not keep others out there.
        ttl = min(ttl, max(0.001, grant.max_hold_until - self.runtime.now() + 2 * margin(ttl, self.port.drift)))
        try:
            call = RenewCall([(grant.token, str(int(ttl * 1000)))])
            reply, sent = await self.request_for_grant(grant, grant.resource.renew_keys, call.encode())
        finally:  # also if no reply came: the server may have done it
            grant.attempt.extended_until = max(grant.attempt.extended_until, self.runtime.now() + ttl)
        (state,) = RenewReply.parse(reply).states
        if isinstance(state, Failed):  # a failed renewal is no loss
            why = state.cause.decode()
            raise Unavailable(f"{grant.resource} was not extended, and lasts as before: {why}. Try again")
        if isinstance(state, Gone | Revoked):
            why = reason_lost(state)
            self.renewal.lose(grant, why)
            raise grant.error(why)
        if why := grant.reason_ended(self.runtime.now()):
            self.renewal.lose(grant, why)
            raise grant.error(why)
        grant.extend_deadline(sent, ttl)
        self.renewal.reschedule(grant)

    async def execute(self, grant: Grant, command: str, args: Sequence[Argument], keys: Sequence[str | bytes]) -> Any:
        """Run one command in the server, only if the lease is still ours there. Never sent twice."""
        if why := grant.reason_ended(self.runtime.now()):
            raise grant.error(why)
        resource = grant.resource
        message = ExecuteCall(grant.token, command, args).encode()
        try:
            reply = await self.port.call(resource.script, (*resource.keys, *keys), message, FOREVER)
        except Disconnected as error:
            done = "it may have run" if error.sent else "it was not sent"
            raise Unavailable(f"{resource}: no answer to {command} ({error}): {done}") from error
        except ServerError as error:
            raise server_error(resource, self.port.display_url, str(error)) from None
        ran, value = ExecuteReply.parse(reply)
        if not ran:
            why = f"it had ended in the server, where {command} was not run"
            self.renewal.lose(grant, why)
            raise grant.error(why)
        return value

    async def request_for_grant(self, grant: Grant, keys: Sequence[str], args: Sequence[Argument]) -> tuple[Any, float]:
        narrowed = Attempt(grant.resource._replace(keys=tuple(keys)), grant.token, grant.attempt.ttl, None)
        return await self.request(narrowed, args, min(grant.deadline, self.runtime.now() + self.port.retry_for))

    async def query(self, resource: Resource, *args: Argument) -> Any:
        """A question that belongs to no attempt: inspect, revoke."""
        reply, _ = await self.request(Attempt(resource, "-", 0, None), args, self.runtime.now() + RETRY_FOR)
        return reply


def _longer(pause: float) -> float:
    return min(MAX_RETRY_DELAY, (pause * 2 or MIN_RETRY_DELAY) * random.uniform(0.75, 1.25))


def was_unanswered(error: BaseException) -> bool:
    """Whether `ask` raised this since no try of it was answered in time."""
    return isinstance(error, Unavailable) and isinstance(error.__cause__, Disconnected | ServerError)
