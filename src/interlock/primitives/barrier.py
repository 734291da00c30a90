"""The keys of a barrier, what it is asked, and what its server side tells people. barrier.lua decides."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._core import COURTESY, GRANT_LIFE, GRANTED, MISUSED, Attempt, Primitive, unobtainable
from interlock._names import keys_of, positive_int
from interlock._scripts import load
from interlock.errors import AcquireTimeout, BrokenBarrier, LockError

from .lock import COMPANIONS

if TYPE_CHECKING:
    from interlock._core import Core

MOST: Final = 100_000  # parties


def barrier(name: object, prefix: str, parties: object) -> Primitive:
    """The barrier of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, (*COMPANIONS, "present"))
    number = positive_int(parties, "its parties", f"barrier {name!r}", MOST)
    return Primitive("barrier", checked, load("barrier"), keys, (), (str(number),), phased=True)


async def wait(core: Core, primitive: Primitive, timeout: float | None) -> int:
    """See Barrier.wait."""
    attempt = core.attempt(primitive, GRANT_LIFE, wait=timeout is None or timeout > 0)
    attempt.entered = attempt.signal is None  # it arrives even if it can't wait, and then has to leave

    def index(attempt: Attempt, reply: Any, _sent: float) -> int:
        core.waiters.leave(attempt)
        return int(reply[1])

    try:
        return await core.obtain(primitive, index, GRANT_LIFE, timeout, _alone, attempt)
    except AcquireTimeout as error:
        passed = await _passed(core, attempt)
        if passed is None:
            raise BrokenBarrier(str(error)) from error.__cause__
        return passed


async def _passed(core: Core, attempt: Attempt) -> int | None:
    """The index of one that has passed though its time is over: the others had gone on with it, unheard. Else None."""
    primitive, phase = attempt.primitive, attempt.phase or "-"  # not an arrival in any case
    _, channel = core.port.ear(primitive.keys[0])
    args = ("acquire", attempt.token, "0", attempt.life_ms, "0", channel, "0", *primitive.terms, phase)
    with contextlib.suppress(LockError):
        reply, _ = await core.ask(Attempt(primitive, "-", 0, None), args, core.port.now() + COURTESY)
        if reply[0] == GRANTED:
            return int(reply[1])
    return None


def _alone(primitive: Primitive, timeout: float, reply: Any) -> AcquireTimeout:
    parties = str(primitive.terms[0])
    return AcquireTimeout(
        f"{primitive}: the others did not come within {timeout:g} s, and so it is broken for all until reset(). "
        f"Of {parties} parties {reply[1]} had come when last asked"
    )


async def reset(core: Core, primitive: Primitive) -> None:
    """See Barrier.reset."""
    reply = await core.query(primitive, "reset", f"reset/{secrets.token_hex(16)}")
    if reply[0] == MISUSED:
        raise unobtainable(primitive, MISUSED, reply)


@dataclass(frozen=True)
class BarrierState:
    """What the server says of a barrier, at one moment."""

    name: str
    parties: int | None
    """How many have to come; None if the server knows no such barrier."""
    arrived: int
    """How many wait there for the others."""
    waiters: tuple[str, ...]
    """The tokens of those who wait, in order of arrival: the first hundred."""
    broken: str | None
    """Why it is broken, if it is."""
    generation: int | None
    """A number that changes with each reset."""

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self.arrived


def state(name: str, reply: list[Any]) -> BarrierState:
    """The reply of `inspect`, for people."""
    generation, parties, arrived, why, *waiters = reply
    return BarrierState(
        name=name,
        parties=parties or None,
        arrived=arrived,
        waiters=tuple(waiter.decode(errors="replace") for waiter in waiters),
        broken=why.decode(errors="replace") or None,
        generation=int(generation) if generation else None,
    )
