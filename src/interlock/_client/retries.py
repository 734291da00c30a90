"""Asking a server: one request, sent again until a reply counts or no time is left.

Theory. Each request but `execute` may be sent twice (see `acquiring.py`). So the client answers a lost reply by sending
the request again. The caller must know what its requests may have left in the server, even if `ask_until_answered` ends
by an error, a cancellation or Ctrl-C. So `ask_until_answered` notes that in the `Question`, which the caller keeps.

Rules.
 (a) A request that was sent and has no reply leaves its question in doubt, and a later reply does not end that doubt:
     the earlier copy may still arrive. Only the release or the undo of its token deals with that copy.
 (b) A question is unanswered from its first request without a reply that counts, and from the moment in which the
     client sends that request: others read `unanswered_since` while the request is on its way.
 (c) The time for all tries of one request runs from the first try without a reply that counts: see `retry_for`.
 (d) A reply that lengthens a lease does not count while an old primary may still grant.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from interlock._client.error_texts import (
    OLD_PRIMARY_MAY_GRANT,
    about,
    name_lock,
    server_error,
    unavailable_error,
    visible_cause,
)
from interlock._client.outages import Outages
from interlock._protocol import forks
from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.retry_for import BY_TIMEOUT
from interlock._protocol.server import ONLY_ROUTE, Disconnected, ServerError, Stopped, is_transient, may_have_written
from interlock._protocol.timing import (
    ANSWER_COUNTS_FOR,
    COUNTS_ONCE_FOR,
    FOREVER,
    MAX_RETRY_DELAY,
    MIN_RETRY_DELAY,
    RETRY_FOR,
)
from interlock.errors import ConfigError, Unavailable
from interlock.primitives.messages import lengthens_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.acks import Acks, Assurance
    from interlock._protocol.resource import Argument, Resource
    from interlock._protocol.retry_for import RetryFor
    from interlock._protocol.server import Server


@dataclass(slots=True, eq=False)
class Question:
    """What requests ask about, and what became of them."""

    resource: Resource
    in_doubt: bool = field(default=False, init=False)
    """A copy of a request may still be on its way."""
    unanswered_since: float = field(default=FOREVER, init=False)
    """When the oldest request or heartbeat without a reply was sent."""
    assurance: Assurance | None = field(default=None, init=False)
    """Which replicas and disks had the grant, if acks asked for any."""

    @property
    def counts_once(self) -> bool:
        """Whether the server would count a copy that arrives late once more: see `COUNTS_ONCE_FOR`."""
        return False


class Requests:
    """The requests of one client."""

    def __init__(self, server: Server, given_retry_for: RetryFor = BY_TIMEOUT) -> None:
        self.server = server
        self.given_retry_for = given_retry_for
        self.runtime = server.runtime
        self.closed = False  # it sends nothing any more; also in a child, if it began in a parent process
        self.fork_count = forks.count  # of the process in which this client began
        self.outages = Outages(server)
        self.answered: dict[object, float] = {}  # when the last request with a reply was sent, by node

    async def ask_until_answered(
        self,
        question: Question,
        args: Sequence[Argument],
        until: float,
        should_stop: Callable[[], bool] | None = None,
        acks: Acks | None = None,
        ttl: float = 0.0,
    ) -> tuple[Any, float]:
        """Send one request about this question, and retry while the server is away.

        `acks`: replicas or disks that must have the grant, whose ttl in seconds is `ttl`. Returns the reply, and when
        the answered request was sent. Raises Unavailable if no reply counts in time, Stopped as soon as `should_stop`
        returns True, ConfigError if the client is closed, or the error that the server replied with.
        """
        server, resource = self.server, question.resource
        given, pause = self.given_retry_for, 0.0
        # From the first try on: a server may accept it, and not answer.
        retry_until = min(until, self.runtime.now() + given) if isinstance(given, float) and acks is None else until
        cause: Exception | None = None
        silent_node: object = None  # which did not answer the last try
        while True:
            if self.closed or not KNOWN[0]:
                raise self.over_error(resource)
            if should_stop is not None and should_stop():
                raise Stopped
            sent = self.runtime.now()
            question.unanswered_since = min(question.unanswered_since, sent)
            try:
                if acks is None:
                    reply = await server.call(resource.script, resource.keys, args, retry_until)
                else:
                    reply = await self._call_with_acks(question, args, retry_until, acks, ttl)
                if not (
                    server.can_fail_over
                    and lengthens_lease(args, reply)
                    and server.old_primary_may_still_grant(resource.keys[0])
                ):
                    question.unanswered_since = FOREVER
                    node = server.route(resource.keys[0]).node if server.can_fail_over else ONLY_ROUTE.node
                    self.answered[node] = sent
                    if self.outages.since:
                        self.outages.end({node, silent_node}, self.runtime.now())
                    return reply, sent
                question.in_doubt, cause, stale = True, ServerError(OLD_PRIMARY_MAY_GRANT), False
            except Disconnected as error:
                question.in_doubt |= error.sent
                stale = error.stale
                # The earlier cause stays if this request only timed out, and was sent so late that it had little time.
                counts = cause is None or not error.timed_out or retry_until - sent > MAX_RETRY_DELAY
                cause = error if counts else cause
            except ServerError as error:
                self._raise_if_final(question, error, has_acks=acks is not None)
                cause, stale = error, False
            except BaseException as error:
                question.in_doubt = True  # cancelled or interrupted while the request was on its way
                name_lock(error, resource)
                raise
            # Once more: a reply to a heartbeat, which arrived meanwhile, does not answer this request.
            question.unanswered_since = min(question.unanswered_since, sent)
            assert cause is not None  # the last try, or one before it, has set the cause
            silent_node = self._note_silence(question, cause)
            counts_for = COUNTS_ONCE_FOR if question.in_doubt and question.counts_once else FOREVER
            retry_until = min(retry_until, sent + min(self.retry_for(until), counts_for))
            pause = pause if stale else _next_pause(pause)
            await self._pause_before_retry(question, cause, pause, retry_until)

    def _raise_if_final(self, question: Question, error: ServerError, *, has_acks: bool) -> None:
        """Raise the error for the user, unless the server may serve in a moment."""
        # With acks, the error may answer WAIT or WAITAOF, after the grant.
        question.in_doubt |= has_acks or may_have_written(str(error))
        if not is_transient(str(error)):
            question.unanswered_since = FOREVER  # an error is an answer
            raise server_error(question.resource, self.server.display_url, str(error)) from None

    def _note_silence(self, question: Question, cause: Exception) -> object:
        """Note for the log that a request of this question has no reply. Returns the node that was asked."""
        node = self._node_of(question.resource)
        since = max(question.unanswered_since, self.answered.get(node, -FOREVER))
        self.outages.note(node, since, self.runtime.now(), cause, (self.retry_for(0.0), self.retry_for(FOREVER)))
        return node

    def _node_of(self, resource: Resource) -> object:
        return self.server.route(resource.keys[0]).node if self.server.can_fail_over else ONLY_ROUTE.node

    def retry_for(self, until: float) -> float:
        """Seconds that the server may be away before a call raises Unavailable which has time until then (ADR 57).

        A caller with a timeout has said how long the call may take. But a server that has never answered this client
        may be one that does not exist.
        """
        given = self.given_retry_for
        if isinstance(given, float):
            return given
        is_for_the_timeout = given is None or until != FOREVER
        return FOREVER if is_for_the_timeout and self.server.has_answered else self.server.retry_for

    async def _pause_before_retry(self, question: Question, cause: Exception, pause: float, retry_until: float) -> None:
        """Wait before the next try of a request. Raises Unavailable if no time is left for another try."""
        now = self.runtime.now()
        if not has_time_for_another_try(now, retry_until):
            raise self.unavailable(question, now, cause) from visible_cause(cause)
        # At most half of the time that is left, so that the last try is sent close to the end of the caller's time.
        await self.runtime.sleep_until(now + min(pause, max(MIN_RETRY_DELAY, (retry_until - now) / 2)))

    async def _call_with_acks(
        self, question: Question, args: Sequence[Argument], until: float, acks: Acks, ttl: float
    ) -> Any:
        """The reply to an acquire, once enough replicas have the grant. Raises Unavailable if too few have it."""
        resource, wanted = question.resource, acks.timeout(ttl)
        timeout = min(wanted, 0.9 * (until - self.runtime.now()))  # so that the reply is in time
        reply, known, acknowledged = await self.server.call_with_acks(
            (resource.script, resource.keys, args), until, acks, timeout
        )
        if lengthens_lease(args, reply):
            question.in_doubt = True  # the grant may not count: an error below must leave a tombstone
            question.assurance = acks.assurance(resource, known, acknowledged, wanted)
        return reply

    @property
    def is_of_parent(self) -> bool:
        """Whether this client began in a parent process, before a fork."""
        if not KNOWN[0]:
            notice()
        return self.fork_count != forks.count

    def over_error(self, resource: Resource) -> ConfigError:
        """The error for a caller of this client, which is closed, or began in a parent process."""
        if self.is_of_parent:
            return about(
                resource,
                ConfigError(
                    f"{resource}: this call began in the parent process, before a fork, and goes on there. In a child "
                    "call it anew; in asyncio, in an event loop of the child: asyncio.run()"
                ),
            )
        return about(resource, ConfigError(f"{resource}: this Interlock is closed. Make a new one"))

    def has_answered(self, resource: Resource, now: float) -> bool:
        """Whether the server of this resource has lately answered some request of this client."""
        return now - self.answered.get(self._node_of(resource), -FOREVER) < ANSWER_COUNTS_FOR

    def unavailable(self, question: Question, now: float, cause: Exception) -> Unavailable:
        """The error for a question that has been without an answer for too long. `cause`: why the last try failed."""
        return unavailable_error(question.resource, question.unanswered_since, self.server.display_url, now, cause)

    async def query(self, resource: Resource, *args: Argument) -> Any:
        """The reply to a request after which nothing has to be undone: an inspect, a revoke."""
        reply, _ = await self.ask_until_answered(Question(resource), args, self.runtime.now() + RETRY_FOR)
        return reply


def has_time_for_another_try(now: float, until: float) -> bool:
    """Whether a caller tries once more that has time until then."""
    return now + 2 * MIN_RETRY_DELAY < until


def was_unanswered(error: BaseException) -> bool:
    """Whether `ask_until_answered` raised this error because no try was answered in time."""
    return isinstance(error, Unavailable) and error._unanswered


def _next_pause(pause: float) -> float:
    return min(MAX_RETRY_DELAY, (pause * 2 or MIN_RETRY_DELAY) * random.uniform(0.75, 1.25))
