"""The keys of a latch, what it is asked, and what its server side tells people. latch.lua decides."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._core import GRANT_LIFE, GRANTED, Primitive, unobtainable
from interlock._names import duration, keys_of, positive_int
from interlock._scripts import load
from interlock.errors import AcquireTimeout

from .lock import COMPANIONS

if TYPE_CHECKING:
    from interlock._core import Attempt, Core

MOST: Final = 1_000_000_000  # that a latch counts
SHORTEST: Final = 10.0  # seconds that a latch lives at least: its waiters are heard of every second


def latch(name: object, prefix: str, count: object, ttl: object) -> Primitive:
    """The latch of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    number = positive_int(count, "its count", f"latch {name!r}", MOST)
    keep_ms = int(duration(ttl, "ttl", least=SHORTEST) * 1000)
    return Primitive("latch", checked, load("latch"), keys, (), (str(number), str(keep_ms)), phased=True)


async def count_down(core: Core, primitive: Primitive, by: object) -> int:
    """See Latch.count_down."""
    number = positive_int(by, "what it counts down", primitive, MOST)
    reply = await core.query(primitive, "count", f"count/{secrets.token_hex(16)}", str(number), *primitive.terms)
    if reply[0] != GRANTED:
        raise unobtainable(primitive, reply[0], reply)
    left: int = reply[1]
    return left


async def wait(core: Core, primitive: Primitive, timeout: float | None) -> None:
    """See Latch.wait."""

    def opened(attempt: Attempt, _reply: Any, _sent: float) -> bool:
        core.waiters.leave(attempt)
        return True

    await core.obtain(primitive, opened, GRANT_LIFE, timeout, _still_shut)


def _still_shut(primitive: Primitive, timeout: float, reply: Any) -> AcquireTimeout:
    return AcquireTimeout(f"{primitive} did not open within {timeout:g} s: {reply[1]} have yet to count down")


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


def state(name: str, reply: list[Any]) -> LatchState:
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
