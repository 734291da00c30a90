"""Waiting: push, timer and poll. Who waits is woken by a message, by the holder's end, or by a vouch.

Theory. A waiter only waits for its signal, and then asks again: asking is the truth, every signal a mere hint.
So a message that comes late, twice or from elsewhere grants nothing, and one that never comes costs a poll.
Signals come from three sources: the server's push; the vouch, which goes out about every second for all waiters
of this client on a lock and says that they live (it is also the poll, and finds a lock that nobody holds); and
every new subscription, since a push may have been missed before it.

Rules. (1) A waiter is known here before its request is sent, so that no push can be early. (2) Only the client
whose waiter is the head of the queue comes back at the holder's expiry: no herd. (3) Vouching is one call per
lock and client, of at most `CROWD` waiters.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from ._core import FOREVER, QUEUED, Attempt, Message, Port, Primitive, log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOUCH: Final = 1.0  # seconds between two vouches, at most; the server counts a waiter dead after 3
PATIENCE: Final = 1.0  # seconds that one round of vouches may take
SILENCE: Final = 1.5  # seconds without an answer to any vouch after which the waiters ask by themselves
CROWD: Final = 1000  # waiters in one script call
MORE: Final = -3  # in place of a pttl: the server has dropped some dead waiters, and there are more before ours
EPSILON: Final = 0.005  # seconds after a holder's pttl at which its key is gone for certain


class Room:
    """The waiters of this client on one lock."""

    __slots__ = ("attempts", "due", "patience", "primitive", "silent")

    def __init__(self, primitive: Primitive) -> None:
        self.primitive = primitive
        self.attempts: dict[str, Attempt] = {}
        self.due = FOREVER
        self.silent = FOREVER  # since when no vouch was answered
        self.patience = SILENCE  # seconds of that after which its waiters ask by themselves


class Waiters:
    """Everybody who waits in this client."""

    def __init__(self, port: Port, nudge: Callable[[float], None]) -> None:
        self.port = port
        self.nudge = nudge
        self.expected: dict[str, Attempt] = {}  # by token: whom a push may concern
        self.rooms: dict[str, Room] = {}  # by the lock's key

    def expect(self, attempt: Attempt) -> None:
        """From now on a push for this attempt is heard."""
        self.expected[attempt.token] = attempt

    def leave(self, attempt: Attempt) -> None:
        """It waits no more."""
        self.expected.pop(attempt.token, None)
        if attempt.entered:
            key = attempt.primitive.keys[0]
            with self.port.mutex:
                room = self.rooms.get(key)
                if room and room.attempts.pop(attempt.token, None) and not room.attempts:
                    del self.rooms[key]

    async def wait(self, attempt: Attempt, pttl_ms: int, head: bool, until: float) -> bool:
        """Wait until there is a reason to ask again. False: the time is over."""
        assert attempt.signal is not None
        key = attempt.primitive.keys[0]
        with self.port.mutex:
            room = self.rooms.get(key)
            if room is None:
                room = self.rooms[key] = Room(attempt.primitive)
            room.attempts[attempt.token] = attempt
        self.port.listen(key)
        due = self.port.now() + (min(VOUCH, pttl_ms / 1000 + EPSILON) if head and pttl_ms > 0 else _jittered())
        if due < room.due:
            room.due = due
            self.nudge(due)
        return await self.port.wait(attempt.signal, until)

    def wake_all(self, channel: str | None = None) -> None:
        """A message may have been missed, on this channel if there are several: let everybody ask again."""
        attempts = list(self.expected.values())
        if channel is not None:
            attempts = [each for each in attempts if self.port.ear(each.primitive.keys[0])[1] == channel]
        self._wake(attempts)

    @staticmethod
    def _wake(attempts: list[Attempt]) -> None:
        for attempt in attempts:
            if attempt.signal is not None:
                attempt.signal.set()

    def granted(self, token: str) -> None:
        """The server's word that this waiter was handed the lock. It asks, and so confirms."""
        if attempt := self.expected.get(token):
            self._wake([attempt])

    def due(self) -> float:
        """When the keeper must come at the latest."""
        return min((room.due for room in list(self.rooms.values())), default=FOREVER)

    async def tick(self) -> None:
        """Vouch for everybody whose time has come."""
        now = self.port.now()
        crowds: list[tuple[Room, list[Attempt]]] = []
        for room in list(self.rooms.values()):
            if room.due <= now:
                room.due = now + _jittered()
                attempts = [attempt for attempt in list(room.attempts.values()) if not self._over(attempt)]
                crowds += [(room, attempts[i : i + CROWD]) for i in range(0, len(attempts), CROWD)]
        if not crowds:
            return
        replies = await self.port.calls(list(self._vouches(crowds)), now + PATIENCE)
        asking: set[Room] = set()
        for (room, crowd), reply in zip(crowds, replies, strict=True):
            if isinstance(reply, Exception):  # whatever it is, it is no answer
                log.debug("%s: no vouch got through: %s", room.primitive, reply)
                room.silent = min(room.silent, now)
                for attempt in crowd:
                    attempt.silent = min(attempt.silent, now)
                if now - room.silent >= room.patience:  # let them ask by themselves: they retry, and know what to say
                    self._wake(crowd)
                    asking.add(room)
            else:
                room.silent, room.patience = FOREVER, SILENCE
                self._heard(room, crowd, reply)
        for room in asking:  # the questions of a crowd may be what takes the server so long
            room.patience *= 2

    def _over(self, attempt: Attempt) -> bool:
        """Whether nobody waits for it any more. An interrupt may have kept it from leaving."""
        if attempt.over:
            self.leave(attempt)
        return attempt.over

    def _vouches(self, crowds: list[tuple[Room, list[Attempt]]]) -> Iterator[Message]:
        for room, crowd in crowds:
            self.port.listen(room.primitive.keys[0])  # it may be elsewhere by now
            heard, channel = self.port.ear(room.primitive.keys[0])
            args: list[Any] = ["vouch", channel, heard]
            for attempt in crowd:
                args += (attempt.token, attempt.life_ms)
            yield room.primitive.script, room.primitive.keys, args

    def _heard(self, room: Room, crowd: list[Attempt], reply: list[Any]) -> None:
        pttl_ms, head, *states = reply
        for attempt, state in zip(crowd, states, strict=True):
            attempt.silent = FOREVER
            # Granted: confirm. Gone: enter again. Held for ever by a foreigner: be told so.
            if (state != QUEUED or pttl_ms == -1) and attempt.signal is not None:
                attempt.signal.set()
        now = self.port.now()
        if pttl_ms == MORE:  # each vouch makes room, so that this has an end
            room.due = now
        elif pttl_ms == -2:  # no memory for a grant
            room.due = min(room.due, now + 0.05)
        elif pttl_ms >= 0 and head.decode() in room.attempts:
            room.due = min(room.due, now + pttl_ms / 1000 + EPSILON)


def _jittered() -> float:
    return VOUCH * random.uniform(0.7, 1.0)
