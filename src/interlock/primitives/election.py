"""The keys of an election, and who leads. election.lua decides, over lock.lua."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from interlock._core import GRANT_LIFE, GRANTED, QUARANTINE, WRONG_KIND, Primitive, unobtainable

from .lock import WIRE, over_lock

if TYPE_CHECKING:
    from interlock._core import Core

LOOK: Final = 1.0  # seconds after which a watcher looks by itself, at the latest
EPSILON: Final = 0.005  # seconds after the end of a lease at which the server agrees


def election(name: object, prefix: str) -> Primitive:
    """The election of this name. Raises ConfigError."""
    return over_lock("election", name, prefix, "watchers")


@dataclass(frozen=True)
class Leader:
    """Who leads, at one moment."""

    token: str
    """Who: host/pid/thread or task/random, with the label before the host."""
    term: int
    """Which reign it is: a number that only grows, the fence of the leader's lease."""
    remaining: float = field(compare=False)
    """Seconds after which it leads no more, unless it renews."""


class Watch:
    """One who looks who leads."""

    def __init__(self, core: Core, primitive: Primitive) -> None:
        self.core = core
        self.attempt = core.attempt(primitive, GRANT_LIFE, wait=True)
        core.waiters.expect(self.attempt)
        self.seen: object = self  # nothing yet

    async def look(self) -> Leader | None:
        """Who leads now. When that changes, the server tells."""
        attempt, core = self.attempt, self.core
        _, channel = core.port.ear(attempt.primitive.keys[0])
        reply = await core.query(attempt.primitive, "watch", attempt.token, channel)
        if reply[0] != GRANTED:
            raise unobtainable(attempt.primitive, reply[0], reply)
        core.port.listen(attempt.primitive.keys[0])  # where it is by now
        _, token, pttl, term = reply
        return (
            Leader(token.decode(errors="replace").removeprefix("!"), term, max(0, pttl) / 1000) if led(token) else None
        )

    async def change(self) -> Leader | None:
        """Wait until it is another one than was told last: who leads then, or None if nobody does."""
        port = self.core.port
        while True:
            leader = await self.look()
            if leader != self.seen:
                self.seen = leader
                return leader
            # None is left of one who holds it for ever: of a foreigner.
            pause = min(LOOK, leader.remaining + EPSILON) if leader and leader.remaining else LOOK
            await port.wait(self.attempt.signal, port.now() + pause)

    def close(self) -> None:
        """Look no more."""
        self.core.waiters.leave(self.attempt)


def led(token: bytes) -> bool:
    """Whether somebody leads: a quarantine is nobody."""
    return bool(token) and not token.startswith(QUARANTINE)


async def leader(core: Core, primitive: Primitive) -> Leader | None:
    """See Election.leader."""
    value, pttl, record, *_ = await core.query(primitive, "inspect", "1")
    if record and not record.startswith((f"{WIRE} election ".encode(), f"{WIRE} unknown ".encode())):
        raise unobtainable(primitive, WRONG_KIND, (WRONG_KIND, record))
    term = int(record.split(b" ")[2]) if record else 0
    if not led(value) or (record and not term):  # in a quorum they agree on the term just now
        return None
    return Leader(value.decode(errors="replace").removeprefix("!"), term, max(0, pttl) / 1000)
