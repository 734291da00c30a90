"""Waiting: push, timer and poll. A push, the end of the holder's lease, or a heartbeat wakes a waiter.

Theory. A waiter waits only for its event, and then asks again: the reply counts, and an event is only a hint.
So a push that arrives late, twice or from elsewhere grants nothing, and a lost push costs a poll.
Three sources set the event: the server's push; the heartbeat; and each new subscription, since the client may have
missed a push before. The client sends a heartbeat about every second for all its waiters on a lock. The heartbeat
tells the server that these waiters live; it is also the poll, and finds a lock that nobody holds.

Rules. (a) The client registers a waiter before it sends the request, so that no push can be too early. (b) When the
holder's lease expires, only the client with the head of the queue asks: no herd. (c) A heartbeat is one call per lock
and client, of at most `HEARTBEAT_BATCH` waiters. (d) The work for one wake-up of a worker grows with the number of
waiters, so the number of wake-ups must not: heartbeats are due at multiples of `HEARTBEAT_GRAIN`, and the new
subscriptions of many channels wake their waiters together.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER
from interlock.primitives.codes import QUEUED
from interlock.primitives.messages import MORE_DEAD_WAITERS, NO_EXPIRY_PTTL, NO_KEY, HeartbeatCall, HeartbeatReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock._client.grant import Attempt
    from interlock._protocol.resource import Resource
    from interlock._protocol.server import Message, Server

HEARTBEAT_INTERVAL: Final = 1.0  # seconds between two heartbeats, at most; a waiter is dead after 3 s without one
HEARTBEAT_GRAIN: Final = 0.02  # seconds: heartbeats that are due this close together go out together
HEARTBEAT_TIMEOUT: Final = 1.0  # seconds that one round of heartbeats may take
HEARTBEAT_SILENCE: Final = 1.5  # seconds without a heartbeat reply after which each waiter asks for itself
# waiters in one script call: a call then takes less than 2 ms of the server, which other programs use, too
HEARTBEAT_BATCH: Final = 150
EXPIRY_SLACK: Final = 0.005  # seconds after the end of a holder's pttl by which its key has certainly expired


class LocalQueue:
    """The waiters of this client on one lock."""

    __slots__ = ("attempts", "due", "resource", "silence_limit", "unanswered_since")

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.attempts: dict[str, Attempt] = {}
        self.due = FOREVER
        self.unanswered_since = FOREVER  # since when no heartbeat has had a reply
        self.silence_limit = HEARTBEAT_SILENCE  # seconds of that after which each waiter asks for itself


class Waiters:
    """All waiters of this client."""

    def __init__(
        self,
        server: Server,
        wake_at: Callable[[float], None],
        wake_ends_at: Callable[[float], None],
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.server = server
        self.runtime = server.runtime
        self.wake_at = wake_at  # wakes the worker that runs tick()
        self.wake_ends_at = wake_ends_at  # wakes the worker of ends, which runs wake_resubscribed()
        self.registered: dict[str, Attempt] = {}  # by token: the attempts that a push can wake
        self.queues: dict[str, LocalQueue] = {}  # by the lock's key
        self.on_tick = on_tick  # is called with each round of heartbeats
        self.resubscribed: set[str] = set()  # channels whose waiters the worker of ends has not woken since
        self.pushes = 0  # handovers that a push has announced to a waiter

    def register(self, attempt: Attempt) -> None:
        """Make the attempt known, so that a push can wake this attempt from now on."""
        self.registered[attempt.token] = attempt

    def unregister(self, attempt: Attempt) -> None:
        """Forget the attempt, which no longer waits."""
        self.registered.pop(attempt.token, None)
        if attempt.is_queued:
            key = attempt.resource.keys[0]
            with self.runtime.mutex:
                queue = self.queues.get(key)
                if queue and queue.attempts.pop(attempt.token, None) and not queue.attempts:
                    del self.queues[key]

    def claims(self) -> list[Attempt]:
        """What has to be released of the attempts that are registered, if the client ends.

        Each is a new attempt, in doubt, since a request may be on its way; and under the token that was registered,
        since a driver that leaves its cohort hands its token on, at any moment (`Attempt.go_on_for`).
        """
        return [attempt.claim(token) for token, attempt in list(self.registered.items())]

    async def wait(self, attempt: Attempt, pttl_ms: int, head: bool, until: float) -> bool:
        """Wait until there is a reason to ask again. Returns False if the time is over.

        `pttl_ms` is the time that the holder's lease has left; `head`: this attempt is the head of the queue.
        """
        assert attempt.event is not None
        key = attempt.resource.keys[0]
        with self.runtime.mutex:
            queue = self.queues.get(key)
            if queue is None:
                queue = self.queues[key] = LocalQueue(attempt.resource)
            queue.attempts[attempt.token] = attempt
        self.server.ensure_subscribed(key)
        due = self.runtime.now() + (
            min(HEARTBEAT_INTERVAL, pttl_ms / 1000 + EXPIRY_SLACK) if head and pttl_ms > 0 else _next_heartbeat()
        )
        if due < queue.due:
            queue.due = due
            self.wake_at(due)
        return await attempt.event.wait(until)

    def wake_all(self) -> None:
        """Let each waiter ask again, even if the server has pushed a handover to it."""
        self._wake(list(self.registered.values()))

    def subscription_changed(self, channel: str | None) -> None:
        """The client may have missed a push on this channel (None: on any): let each of its waiters ask again."""
        if channel is None:
            self.wake_all()
        elif self.registered:
            with self.runtime.mutex:
                self.resubscribed.add(channel)
            self.wake_ends_at(self.runtime.now())

    def wake_resubscribed(self) -> None:
        """Let each waiter whose channel is among `resubscribed` ask again: one search for all these channels."""
        if not self.resubscribed:
            return
        with self.runtime.mutex:
            channels, self.resubscribed = self.resubscribed, set()
        channel_of = self.server.subscription_of
        self._wake(
            [each for each in list(self.registered.values()) if channel_of(each.resource.keys[0])[1] in channels]
        )

    @staticmethod
    def _wake(attempts: list[Attempt]) -> None:
        for attempt in attempts:
            if attempt.event is not None:
                attempt.event.set()

    def on_granted(self, token: str) -> None:
        """Wake the waiter to which the server handed the lock, by a push. The waiter asks, which confirms that."""
        if attempt := self.registered.get(token):
            self.pushes += 1
            self._wake([attempt])

    def due(self) -> float:
        """The latest time at which the worker must run this task."""
        return min((queue.due for queue in list(self.queues.values())), default=FOREVER)

    async def tick(self) -> None:
        """Send the heartbeats that are due."""
        now = self.runtime.now()
        batches: list[tuple[LocalQueue, list[Attempt]]] = []
        for queue in list(self.queues.values()):
            if queue.due <= now:
                queue.due = (now + _next_heartbeat()) // HEARTBEAT_GRAIN * HEARTBEAT_GRAIN
                attempts = [attempt for attempt in list(queue.attempts.values()) if not self._is_abandoned(attempt)]
                batches += [
                    (queue, attempts[i : i + HEARTBEAT_BATCH]) for i in range(0, len(attempts), HEARTBEAT_BATCH)
                ]
        if not batches:
            return
        if self.on_tick is not None:
            self.on_tick()
        replies = await self.server.call_many(list(self._heartbeats(batches)), now + HEARTBEAT_TIMEOUT)
        unanswered_queues: set[LocalQueue] = set()
        for (queue, batch), reply in zip(batches, replies, strict=True):
            if isinstance(reply, Exception):  # any error means that the heartbeat has no reply
                log.debug("%s: no heartbeat got through: %s", queue.resource, reply, extra=lock_fields(queue.resource))
                queue.unanswered_since = min(queue.unanswered_since, now)
                for attempt in batch:
                    attempt.unanswered_since = min(attempt.unanswered_since, now)
                # Each waiter now asks for itself: its request is retried, and raises the right error.
                if now - queue.unanswered_since >= queue.silence_limit:
                    self._wake(batch)
                    unanswered_queues.add(queue)
            else:
                queue.unanswered_since, queue.silence_limit = FOREVER, HEARTBEAT_SILENCE
                self._on_heartbeat_reply(queue, batch, HeartbeatReply.parse(reply))
        # The next requests of their waiters begin later: many requests may themselves slow the server down.
        for queue in unanswered_queues:
            queue.silence_limit *= 2

    def _is_abandoned(self, attempt: Attempt) -> bool:
        """Whether no caller waits for this attempt. Unregisters it then, since an interrupt may have prevented that."""
        if attempt.abandoned:
            self.unregister(attempt)
        return attempt.abandoned

    def _heartbeats(self, batches: list[tuple[LocalQueue, list[Attempt]]]) -> Iterator[Message]:
        for queue, batch in batches:
            self.server.ensure_subscribed(queue.resource.keys[0])  # the key may be at another node by now
            subscribed, channel = self.server.subscription_of(queue.resource.keys[0])
            call = HeartbeatCall(channel, subscribed, [(each.token, each.handover_ttl_ms) for each in batch])
            yield queue.resource.script, queue.resource.keys, call.encode()

    def _on_heartbeat_reply(self, queue: LocalQueue, batch: list[Attempt], reply: HeartbeatReply) -> None:
        pttl_ms, head, states = reply
        for attempt, state in zip(batch, states, strict=True):
            attempt.unanswered_since = FOREVER
            # Each state calls for an acquire. Granted: it confirms. Not found: it enters the queue again. Retry: it may
            # find what the heartbeat can't decide. Held by a foreign key without expiry: it gets the error.
            if (state != QUEUED or pttl_ms == NO_EXPIRY_PTTL) and attempt.event is not None:
                attempt.event.set()
        now = self.runtime.now()
        if pttl_ms == MORE_DEAD_WAITERS:  # each heartbeat drops dead waiters, so this repetition ends
            queue.due = now
        elif pttl_ms == NO_KEY:  # no holder, and yet the script granted nothing: the server has no memory for a grant
            queue.due = min(queue.due, now + 0.05)
        elif pttl_ms >= 0 and head.decode() in queue.attempts:
            queue.due = min(queue.due, now + pttl_ms / 1000 + EXPIRY_SLACK)


def _next_heartbeat() -> float:
    return HEARTBEAT_INTERVAL * random.uniform(0.7, 1.0)
