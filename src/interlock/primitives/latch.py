"""The keys of a latch, what it is asked, and what its server side tells people. latch.lua decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from interlock._protocol.names import duration, keys_of, positive_int
from interlock._protocol.types import Resource
from interlock.primitives.scripts import load

from .lock import COMPANIONS

MAX_COUNT: Final = 1_000_000_000  # that a latch counts
MIN_LATCH_TTL: Final = 10.0  # seconds that a latch lives at least: its waiters are heard of every second


def latch_resource(name: object, prefix: str, count: object, ttl: object) -> Resource:
    """The latch of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    number = positive_int(count, "its count", f"latch {name!r}", MAX_COUNT)
    keep_ms = int(duration(ttl, "ttl", least=MIN_LATCH_TTL) * 1000)
    return Resource("latch", checked, load("latch"), keys, (), (str(number), str(keep_ms)), has_generation=True)


@dataclass(frozen=True)
class LatchState:
    """What the server says of a latch, at one moment."""

    name: str
    count: int | None
    """From where it counts down; None if the server knows no such latch."""
    left: int | None
    """How many have yet to count down; 0 once it is open."""
    remaining: float | None
    """Seconds until it is forgotten, unless somebody comes."""
    waiters: tuple[str, ...]
    """The tokens of those who wait, in order: the first hundred."""
    waiting: int
    """How many wait."""
    revoked: str | None
    """Why it was revoked, if it was."""

    @property
    def open(self) -> bool:
        """Whether who waits may go on."""
        return self.left == 0


def parse_state(name: str, reply: list[Any]) -> LatchState:
    """The reply of `inspect`, for people."""
    generation, count, left, pttl, why, waiting, *waiters = reply
    return LatchState(
        name=name,
        count=count if generation else None,
        left=left if generation else None,
        remaining=pttl / 1000 if pttl >= 0 else None,
        waiters=tuple(waiter.decode(errors="replace") for waiter in waiters),
        waiting=waiting,
        revoked=why.decode(errors="replace") or None,
    )
