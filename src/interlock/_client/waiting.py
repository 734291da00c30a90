"""Waiting: push, timer and poll. Who waits is woken by a message, by the holder's end, or by a heartbeat.

Theory. A waiter only waits for its signal, and then asks again: asking is the truth, every signal a mere hint.
So a message that comes late, twice or from elsewhere grants nothing, and one that never comes costs a poll.
Signals come from three sources: the server's push; the heartbeat, which goes out about every second for all
waiters of this client on a lock and says that they live (it is also the poll, and finds a lock that nobody holds); and
every new subscription, since a push may have been missed before it.

Rules. (1) A waiter is known here before its request is sent, so that no push can be early. (2) Only the client
whose waiter is the head of the queue comes back at the holder's expiry: no herd. (3) A heartbeat is one call per
lock and client, of at most `HEARTBEAT_BATCH` waiters.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER
from interlock.primitives.codes import QUEUED
from interlock.primitives.messages import MORE_DEAD_WAITERS, NO_EXPIRY_PTTL, NO_KEY, HeartbeatCall, HeartbeatReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock._client.grant import Attempt
    from interlock._protocol.types import Message, Port, Resource

HEARTBEAT_INTERVAL: Final = 1.0  # seconds between two heartbeats, at most; the server counts a waiter dead after 3
HEARTBEAT_TIMEOUT: Final = 1.0  # seconds that one round of heartbeats may take
HEARTBEAT_SILENCE: Final = 1.5  # seconds without an answer to any heartbeat after which the waiters ask by themselves
HEARTBEAT_BATCH: Final = 1000  # waiters in one script call
EXPIRY_SLACK: Final = 0.005  # seconds after a holder's pttl at which its key is gone for certain


class LocalQueue:
    """The waiters of this client on one lock."""

    __slots__ = ("attempts", "due", "resource", "silence_limit", "unanswered_since")

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.attempts: dict[str, Attempt] = {}
        self.due = FOREVER
        self.unanswered_since = FOREVER  # since when no heartbeat was answered
        self.silence_limit = HEARTBEAT_SILENCE  # seconds of that after which its waiters ask by themselves


class Waiters:
    """Everybody who waits in this client."""

    def __init__(self, port: Port, wake_at: Callable[[float], None]) -> None:
        self.port = port
        self.runtime = port.runtime
        self.wake_at = wake_at
        self.registered: dict[str, Attempt] = {}  # by token: whom a push may concern
        self.queues: dict[str, LocalQueue] = {}  # by the lock's key

    def register(self, attempt: Attempt) -> None:
        """From now on a push for this attempt is heard."""
        self.registered[attempt.token] = attempt

    def unregister(self, attempt: Attempt) -> None:
        """It waits no more."""
        self.registered.pop(attempt.token, None)
        if attempt.is_queued:
            key = attempt.resource.keys[0]
            with self.runtime.mutex:
                queue = self.queues.get(key)
                if queue and queue.attempts.pop(attempt.token, None) and not queue.attempts:
                    del self.queues[key]

    async def wait(self, attempt: Attempt, pttl_ms: int, head: bool, until: float) -> bool:
        """Wait until there is a reason to ask again. False: the time is over."""
        assert attempt.event is not None
        key = attempt.resource.keys[0]
        with self.runtime.mutex:
            queue = self.queues.get(key)
            if queue is None:
                queue = self.queues[key] = LocalQueue(attempt.resource)
            queue.attempts[attempt.token] = attempt
        self.port.ensure_subscribed(key)
        due = self.runtime.now() + (
            min(HEARTBEAT_INTERVAL, pttl_ms / 1000 + EXPIRY_SLACK) if head and pttl_ms > 0 else _next_heartbeat()
        )
        if due < queue.due:
            queue.due = due
            self.wake_at(due)
        return await self.runtime.wait(attempt.event, until)

    def wake_all(self, channel: str | None = None) -> None:
        """A message may have been missed, on this channel if there are several: let everybody ask again."""
        attempts = list(self.registered.values())
        if channel is not None:
            attempts = [each for each in attempts if self.port.subscription_of(each.resource.keys[0])[1] == channel]
        self._wake(attempts)

    @staticmethod
    def _wake(attempts: list[Attempt]) -> None:
        for attempt in attempts:
            if attempt.event is not None:
                attempt.event.set()

    def on_granted(self, token: str) -> None:
        """The server's word that this waiter was handed the lock. It asks, and so confirms."""
        if attempt := self.registered.get(token):
            self._wake([attempt])

    def due(self) -> float:
        """When the worker must come at the latest."""
        return min((room.due for room in list(self.queues.values())), default=FOREVER)

    async def tick(self) -> None:
        """Send the heartbeats of everybody whose time has come."""
        now = self.runtime.now()
        batches: list[tuple[LocalQueue, list[Attempt]]] = []
        for queue in list(self.queues.values()):
            if queue.due <= now:
                queue.due = now + _next_heartbeat()
                attempts = [attempt for attempt in list(queue.attempts.values()) if not self._is_abandoned(attempt)]
                batches += [
                    (queue, attempts[i : i + HEARTBEAT_BATCH]) for i in range(0, len(attempts), HEARTBEAT_BATCH)
                ]
        if not batches:
            return
        replies = await self.port.calls(list(self._heartbeats(batches)), now + HEARTBEAT_TIMEOUT)
        asking: set[LocalQueue] = set()
        for (queue, batch), reply in zip(batches, replies, strict=True):
            if isinstance(reply, Exception):  # whatever it is, it is no answer
                log.debug("%s: no heartbeat got through: %s", queue.resource, reply)
                queue.unanswered_since = min(queue.unanswered_since, now)
                for attempt in batch:
                    attempt.unanswered_since = min(attempt.unanswered_since, now)
                if (
                    now - queue.unanswered_since >= queue.silence_limit
                ):  # let them ask by themselves: they retry, and know what to say
                    self._wake(batch)
                    asking.add(queue)
            else:
                queue.unanswered_since, queue.silence_limit = FOREVER, HEARTBEAT_SILENCE
                self._on_heartbeat_reply(queue, batch, HeartbeatReply.parse(reply))
        for queue in asking:  # the questions of a crowd may be what takes the server so long
            queue.silence_limit *= 2

    def _is_abandoned(self, attempt: Attempt) -> bool:
        """Whether nobody waits for it any more. An interrupt may have kept it from leaving."""
        if attempt.abandoned:
            self.unregister(attempt)
        return attempt.abandoned

    def _heartbeats(self, batches: list[tuple[LocalQueue, list[Attempt]]]) -> Iterator[Message]:
        for queue, batch in batches:
            self.port.ensure_subscribed(queue.resource.keys[0])  # it may be elsewhere by now
            heard, channel = self.port.subscription_of(queue.resource.keys[0])
            call = HeartbeatCall(channel, heard, [(each.token, each.handover_ttl_ms) for each in batch])
            yield queue.resource.script, queue.resource.keys, call.encode()

    def _on_heartbeat_reply(self, queue: LocalQueue, batch: list[Attempt], reply: HeartbeatReply) -> None:
        pttl_ms, head, states = reply
        for attempt, state in zip(batch, states, strict=True):
            attempt.unanswered_since = FOREVER
            # Granted: confirm. Gone: enter again. Held for ever by a foreigner: be told so.
            if (state != QUEUED or pttl_ms == NO_EXPIRY_PTTL) and attempt.event is not None:
                attempt.event.set()
        now = self.runtime.now()
        if pttl_ms == MORE_DEAD_WAITERS:  # each heartbeat makes room, so that this has an end
            queue.due = now
        elif pttl_ms == NO_KEY:  # no memory for a grant
            queue.due = min(queue.due, now + 0.05)
        elif pttl_ms >= 0 and head.decode() in queue.attempts:
            queue.due = min(queue.due, now + pttl_ms / 1000 + EXPIRY_SLACK)


def _next_heartbeat() -> float:
    return HEARTBEAT_INTERVAL * random.uniform(0.7, 1.0)
