"""Wakes waiters that block in BLPOP on a signal list, where the release of the lock has not woken one of them.

Theory. A release pushes one element into the signal list, and the server gives it to the client that has blocked for
longest. If that client dies before it acquires the lock, or if the holder died and its key expired, the lock is free,
and everybody sleeps. A waiter that woke by itself from time to time would see that, but each BLPOP begins at the end of
the server's queue: beside waiters that block for long it would never be the first. So the waiters block for long, too,
and a worker looks at the locks for which callers of this process wait. If it finds a lock free, and the list empty,
twice in a row, the worker pushes the element that is missing. That also wakes waiters of python-redis-lock. Twice,
because a waiter that has taken its element may be about to acquire the lock: then another element would wake another
waiter in vain, which would lose its place.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource
    from interlock._session.session import Session

FIRST_LOOK: Final = 0.1  # seconds after the first waiter came: most waits are over by then
LOOK_INTERVAL: Final = 1.0  # seconds between two looks at a lock, at most
MAX_JITTER: Final = 0.02  # seconds: not all processes look at a lock at the moment when its key expires
SECOND_LOOK: Final = 0.02  # seconds after a look that found the lock free
LOOK_TIMEOUT: Final = 1.0  # seconds that one call may take

_watches: weakref.WeakKeyDictionary[Core, SignalWatch] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class Watched:
    """A lock for which callers of this process wait."""

    resource: Resource
    look_at: float
    callers: int = 0
    was_free: bool = False  # at the last look


class SignalWatch:
    """The task of the worker that looks at the locks for which callers of this process wait."""

    def __init__(self, session: Session) -> None:
        self.server = session.server
        self.runtime = session.runtime
        self.watched: dict[str, Watched] = {}  # by key
        self.worker = session.add_worker("signals", self)

    @classmethod
    def of(cls, session: Session) -> SignalWatch:
        """The watch of this session. After a fork the session has a new one, with no waiters."""
        with session.runtime.mutex:
            watch = _watches.get(session.core)
            if watch is None:
                watch = _watches[session.core] = cls(session)
            return watch

    def add(self, resource: Resource) -> None:
        """Note that a caller begins to wait for this lock."""
        look_at = self.runtime.now() + FIRST_LOOK
        with self.runtime.mutex:
            watched = self.watched.setdefault(resource.keys[0], Watched(resource, look_at))
            watched.callers += 1
        self.worker.wake_at(watched.look_at)

    def remove(self, resource: Resource) -> None:
        """Note that a caller no longer waits."""
        with self.runtime.mutex:
            watched = self.watched[resource.keys[0]]
            watched.callers -= 1
            if not watched.callers:
                del self.watched[resource.keys[0]]

    def due(self) -> float:
        """The latest time at which the worker must run this task."""
        with self.runtime.mutex:
            return min((each.look_at for each in self.watched.values()), default=FOREVER)

    async def tick(self) -> None:
        """Look at each lock that is due."""
        now = self.runtime.now()
        with self.runtime.mutex:
            due = [each for each in self.watched.values() if each.look_at <= now]
        if not due:
            return
        messages = [
            (each.resource.script, each.resource.keys, ("signal", *each.resource.release_args, str(int(each.was_free))))
            for each in due
        ]
        replies = await self.server.call_many(messages, now + LOOK_TIMEOUT)
        now = self.runtime.now()
        for each, reply in zip(due, replies, strict=True):
            left_ms: Any = LOOK_INTERVAL * 1000 if isinstance(reply, Exception) else reply[0]
            if left_ms == 0 and not each.was_free:
                each.was_free, each.look_at = True, now + SECOND_LOOK * random.uniform(0.5, 1.5)
            else:
                left_ms = left_ms or LOOK_INTERVAL * 1000
                each.was_free, each.look_at = False, now + left_ms / 1000 + random.uniform(MAX_JITTER / 10, MAX_JITTER)
