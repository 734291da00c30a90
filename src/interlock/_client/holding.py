"""What a caller does with a lease that it holds: release it, leave its section, lengthen it, write under it.

Theory. A caller relies on its lease until `Hold.deadline`. Each operation looks first whether the lease has ended, and
refuses without I/O if it has. A release ends the lease here before it asks the server, so that no renewal follows it.

Rules.
 (a) The client takes the lease out of the book before it sends the release.
 (b) The first reply to a release counts: before the next one, another client may have released its own lease.
 (c) While a request of the user about a lease has no reply (`Hold.unanswered`), the lease passes to no other section.
 (d) The client sends an `execute` once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._client.error_texts import ENDED_BEFORE_RELEASE, execute_error, visible_cause
from interlock._client.grant import Grant, Hold, tombstone_ms
from interlock._client.retries import Question
from interlock._protocol.log import log
from interlock._protocol.names import checked_ttl, execute_word
from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.timing import FOREVER, capped_ttl
from interlock.errors import ConfigError, LeaseLost, LockError, Unavailable
from interlock.primitives.messages import (
    ExecuteCall,
    ExecuteReply,
    Failed,
    Gone,
    RenewCall,
    RenewReply,
    Revoked,
    encode_release,
    reason_lost,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._client.giving_back import GivingBack
    from interlock._client.retries import Requests
    from interlock._client.unread_releases import UnreadReleases


class Holding:
    """The leases of one client, as their holders use them."""

    def __init__(
        self, requests: Requests, giving_back: GivingBack, unread_releases: UnreadReleases, max_ttl: float
    ) -> None:
        self.requests = requests
        self.server = requests.server
        self.runtime = requests.runtime
        self.giving_back = giving_back
        self.unread_releases = unread_releases
        self.ends = giving_back.ends
        self.book = giving_back.ends.book
        self.cohorts = giving_back.ends.cohorts
        self.undo = giving_back.undo
        self.points = giving_back.points
        self.max_ttl = max_ttl  # seconds
        self.owed = giving_back.undo.owed

    async def release(self, grant: Grant) -> bool:
        """Release the lease. Returns whether this client still held the lease in the server.

        Raises Unavailable if no server answers.
        """
        try:
            now = self.runtime.now()
            if self._passes_on(grant, now):
                return True
            grant.reason_ended(now)  # it may belong to the parent process
        except BaseException:
            self.giving_back.in_background(grant)
            raise
        if grant.end_reason is not None:
            if grant.end_reason not in {Grant.RELEASED, Grant.FORKED}:
                # After a revocation the lock's key may still hold "!<token>": the undo hands the lock over at once.
                self.undo.add(grant.hold.claim)
            return False
        return await self._release_held(grant, now)

    def _passes_on(self, grant: Grant, now: float) -> bool:
        """Pass the lease to the next caller of its cohort. Returns False if the lease must be released."""
        if not (grant.attempt.options.joins and self.cohorts.pass_on(grant, now)):
            return False
        if (people := self.points.people) is not None:
            people.released(grant, now)
        return True

    async def _release_held(self, grant: Grant, now: float, *, waits: bool = True) -> bool:
        """Release a lease that had not ended at the time `now`. See release().

        Unless it `waits`, returns True as soon as the release is sent, if that is possible: see `UnreadReleases.leave`.
        """
        hold = grant.hold
        attempt = hold.claim
        releasing = Question(attempt.resource)
        try:
            with self.runtime.mutex:
                if grant.end_reason is not None or hold.grant is not grant:  # another thread was first
                    return grant.end_reason == Grant.RELEASED or grant.has_passed
                self.owed[attempt.token] = attempt  # first: see Owed
                grant.end_reason = Grant.RELEASED
                hold.grant = None
            grant.announce_release()
            self.ends.end(hold)
            args = encode_release(attempt.token, tombstone_ms(attempt), attempt.resource.release_args)
            if not waits and self.unread_releases.leave(grant, args):
                return True
            until = FOREVER
            if hold.deadline < now + self.requests.retry_for(FOREVER):  # after its ttl the server frees the lock
                until = max(hold.deadline, now + 0.5)
            was_held = False
            while True:
                reply, _ = await self.requests.ask_until_answered(releasing, args, until)
                held, again = reply  # a ReleaseReply, not built as one: each release would pay for that
                # The first reply counts: before the next, another client may release. After the deadline, no reply of a
                # quorum counts: a server that is away may have been one of those that granted the lock to another.
                was_held |= bool(held) and (now < hold.deadline or not self.server.is_quorum)
                if not again:
                    self.owed.pop(attempt.token, None)
                    # The server stores only the last releaser. If no reply says that the lease was held, and a copy of
                    # this release had no reply, that copy may have released the lease, and another client its own lease
                    # since then. Before the deadline nothing else ended the lease.
                    return was_held or (releasing.in_doubt and now < hold.deadline) or self._had_ended(grant, now)
        except BaseException as error:
            if self.requests.closed and isinstance(error, ConfigError):  # close() releases the lease, or the parent
                return not self.requests.is_of_parent
            self.giving_back.in_background(grant)
            raise
        finally:
            attempt.in_doubt |= releasing.in_doubt
            if (people := self.points.people) is not None:
                people.released(grant, now)

    def _had_ended(self, grant: Grant, now: float) -> bool:
        """Report that the server had the lease no more when the release arrived. Returns False."""
        if (people := self.points.people) is not None:
            people.lost(grant, ENDED_BEFORE_RELEASE, now)
        return False

    async def exit_section(self, grant: Grant, error: BaseException | None) -> None:
        """End a section. Raises LeaseLost if the lease ended before, unless the body raised an error already.

        With `confirm=False` the release may be on its way when this returns: see `UnreadReleases.leave`.
        If the server is away now, the body has still finished under a valid lease: no error is raised, the release
        goes on in the background, and the lease runs out by itself.
        """
        why = None
        try:
            now = self.runtime.now()
            why = grant.reason_ended(now)
            if why == Grant.RELEASED:
                return
            if why is not None:
                why = self.ends.why_lost(grant, why)
                self.ends.lose(grant, why)
                await self.release(grant)
            elif self._passes_on(grant, now) or await self._release_held(grant, now, waits=must_wait(grant, now)):
                return
        except LockError as failed:
            if error is None and not isinstance(failed, Unavailable):
                raise
            log.warning("%s The release goes on in the background", failed, extra=grant.log_fields)
            return
        except BaseException:
            self.giving_back.in_background(grant)
            raise
        raise_or_chain(grant.error(why or ENDED_BEFORE_RELEASE), error)

    async def extend(self, grant: Grant, ttl: float) -> None:
        """Lengthen the lease to `ttl` seconds from now. Raises LeaseLost, or Unavailable if that is not certain."""
        ttl = checked_ttl(ttl, self.max_ttl)
        hold = grant.hold
        self._begin_unanswered(grant)
        # Not beyond max_hold: the server must not keep others out after the client has stopped relying on the lease.
        ttl = max(0.001, capped_ttl(ttl, hold.max_hold_until - self.runtime.now(), self.server.drift))
        try:
            call = RenewCall([(hold.token, str(int(ttl * 1000)))])
            reply, sent = await self.requests.ask_until_answered(
                Question(hold.resource._replace(keys=hold.resource.renew_keys)),
                call.encode(),
                min(hold.deadline, self.runtime.now() + self.requests.retry_for(FOREVER)),
            )
        finally:  # also without a reply: the server may have extended the lease
            hold.claim.extended_until = max(hold.claim.extended_until, self.runtime.now() + ttl)
        (state,) = RenewReply.parse(reply).states
        if isinstance(state, Gone | Revoked):
            why = reason_lost(state)
            self.ends.lose(grant, why)
            raise grant.error(why)
        self._count_unanswered(hold, -1)  # only now: a lost lease must not pass on
        if isinstance(state, Failed):  # a failed renewal is not a loss
            why = state.cause.decode()
            raise Unavailable(f"{grant.resource} was not extended, and lasts as before: {why}. Try again")
        if ended := grant.reason_ended(self.runtime.now()):
            ended = self.ends.why_lost(grant, ended)
            self.ends.lose(grant, ended)
            raise grant.error(ended)
        hold.extend_deadline(sent, ttl, self.server.drift)
        self.book.reschedule(hold)

    async def execute(
        self, grant: Grant, command: str, words: Sequence[str | bytes | float], keys: Sequence[str | bytes] | None
    ) -> Any:
        """Run one command in the server, only if this client still holds the lease there. Never sent twice.

        Returns the reply to the command. Raises LeaseLost if the command was not run, Unavailable if no reply arrived.
        Without `keys`, first asks the server which of the words are keys.
        """
        if self.server.is_quorum:
            raise ConfigError(
                f"{grant.resource}: execute() needs one server that decides and does it in one step, and a quorum has "
                "none. Send the fence with what you write, or lock at that one server"
            )
        args = [execute_word(word, command) for word in words]
        if why := grant.reason_ended(self.runtime.now()):
            raise grant.error(self.ends.why_lost(grant, why))
        if keys is None:
            keys = list[bytes](await self.requests.query(grant.resource, "keys", command, *args))
        elif missing := [key for key in keys if key not in args]:
            raise ConfigError(f"execute({command!r}): {missing[0]!r} is in keys, but not among the arguments")
        # The lease stays with its section if there is no reply, since the command could run in a later one.
        self._begin_unanswered(grant)
        hold, resource = grant.hold, grant.resource
        message = ExecuteCall(hold.token, command, args).encode()
        try:
            reply = await self.server.call(resource.script, (*resource.keys, *keys), message, FOREVER)
        except Disconnected as error:
            done = "it may have run" if error.sent else "it was not sent"
            raise Unavailable(f"{resource}: no answer to {command} ({error}): {done}") from visible_cause(error)
        except ServerError as error:
            self._count_unanswered(hold, -1)
            raise execute_error(resource, self.server.display_url, command, str(error)) from None
        ran, value = ExecuteReply.parse(reply)
        if not ran:
            why = f"it had ended in the server, where {command} was not run"
            self.ends.lose(grant, why)
            raise grant.error(why)
        self._count_unanswered(hold, -1)
        return value

    def _begin_unanswered(self, grant: Grant) -> None:
        """Count a request about this lease that is about to be sent. Raises LeaseLost if the lease has ended."""
        hold = grant.hold
        self._count_unanswered(hold, 1)  # first: from here on no other thread passes the lease on
        if why := grant.reason_ended(self.runtime.now()):
            self._count_unanswered(hold, -1)  # nothing was sent, and the lease may belong to another section
            raise grant.error(self.ends.why_lost(grant, why))

    def _count_unanswered(self, hold: Hold, by: int) -> None:
        """Count the requests about this lease that have no reply yet, of any number of threads."""
        with self.runtime.mutex:
            hold.unanswered += by


def must_wait(grant: Grant, now: float) -> bool:
    """Whether the end of a `with` waits for the reply to its release, because of its option or of its lease."""
    hold = grant.hold
    return (
        grant.attempt.options.confirm
        or hold.claim.in_doubt
        or hold.renewal_failing
        or hold.deadline - now < hold.claim.options.ttl / 2
    )


def raise_or_chain(lost: LeaseLost, error: BaseException | None) -> None:
    """Raise this, unless the body raised an error already: then chain it to that."""
    if error is None:
        raise lost
    if isinstance(error, LeaseLost):
        return
    while error.__context__ is not None and error.__context__ is not lost:
        error = error.__context__
    error.__context__ = lost
