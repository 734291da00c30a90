"""The keys of a latch, what it is asked, and what its server side tells people. latch.lua decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.names import duration, keys_of, positive_int
from interlock._protocol.types import Resource
from interlock.primitives.scripts import load

from .lock import COMPANIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.types import Argument
    from interlock.primitives.messages import Raw, Words

MAX_COUNT: Final = 1_000_000_000  # that a latch counts
MIN_LATCH_TTL: Final = 10.0  # seconds that a latch lives at least: its waiters are heard of every second


def latch_resource(name: object, prefix: str, count: object, ttl: object) -> Resource:
    """The latch of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    number = positive_int(count, "its count", f"latch {name!r}", MAX_COUNT)
    keep_ms = int(duration(ttl, "ttl", least=MIN_LATCH_TTL) * 1000)
    return Resource("latch", checked, load("latch"), keys, (), (str(number), str(keep_ms)), has_generation=True)


class CountCall(NamedTuple):
    """Counts down by this number; creates the latch if there is none."""

    operation: str
    by: str
    latch: tuple[Argument, ...]
    """The count and the time for which the latch is kept, as in an acquire."""

    def encode(self) -> Words:
        """See Call."""
        return ("count", self.operation, self.by, *self.latch)


class LatchInspect(NamedTuple):
    """What the server knows of a latch."""

    generation: bytes
    """b"" if there is no latch."""
    counts_from: int
    left: int
    pttl_ms: int
    why: bytes
    """Why it was revoked; b"" if it was not."""
    waiting: int
    waiters: Sequence[bytes]

    @classmethod
    def parse(cls, reply: Raw) -> LatchInspect:
        """The reply that the script returned."""
        generation, count, left, pttl_ms, why, waiting, *waiters = reply
        return cls(generation, count, left, pttl_ms, why, waiting, waiters)


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


def parse_state(name: str, reply: Raw) -> LatchState:
    """The reply of `inspect`, for people."""
    generation, count, left, pttl, why, waiting, waiters = LatchInspect.parse(reply)
    return LatchState(
        name=name,
        count=count if generation else None,
        left=left if generation else None,
        remaining=pttl / 1000 if pttl >= 0 else None,
        waiters=tuple(waiter.decode(errors="replace") for waiter in waiters),
        waiting=waiting,
        revoked=why.decode(errors="replace") or None,
    )
