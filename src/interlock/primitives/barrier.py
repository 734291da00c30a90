"""The keys of a barrier, what it is asked, and what its server side tells people. barrier.lua decides."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._core import GRANTED, HANDOVER_TTL, UNDO_GRACE, WRONG_KIND, Attempt, Resource, reply_error
from interlock._names import keys_of, positive_int
from interlock._scripts import load
from interlock.errors import AcquireTimeout, BrokenBarrier, LockError

from .lock import COMPANIONS

if TYPE_CHECKING:
    from interlock._core import Core

MAX_PARTIES: Final = 100_000  # parties


def barrier_resource(name: object, prefix: str, parties: object) -> Resource:
    """The barrier of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, (*COMPANIONS, "present"))
    number = positive_int(parties, "its parties", f"barrier {name!r}", MAX_PARTIES)
    return Resource("barrier", checked, load("barrier"), keys, (), (str(number),), has_generation=True)


async def wait(core: Core, resource: Resource, timeout: float | None) -> int:
    """See Barrier.wait."""
    attempt = core.attempt(resource, HANDOVER_TTL, wait=timeout is None or timeout > 0)
    attempt.is_queued = attempt.event is None  # it arrives even if it can't wait, and then has to leave

    def index(attempt: Attempt, reply: Any, _sent: float) -> int:
        core.waiters.unregister(attempt)
        return int(reply[1])

    try:
        return await core.wait_until_granted(resource, index, HANDOVER_TTL, timeout, _timeout_error, attempt)
    except AcquireTimeout as error:
        passed = await _passed_unheard(core, attempt)
        if passed is None:
            raise BrokenBarrier(str(error)) from error.__cause__
        return passed


async def _passed_unheard(core: Core, attempt: Attempt) -> int | None:
    """The index of one that has passed though its time is over: the others had gone on with it, unheard. Else None."""
    resource, phase = attempt.resource, attempt.generation or "-"  # not an arrival in any case
    _, channel = core.port.subscription_of(resource.keys[0])
    args = ("acquire", attempt.token, "0", attempt.handover_ttl_ms, "0", channel, "0", *resource.acquire_args, phase)
    with contextlib.suppress(LockError):
        reply, _ = await core.request(Attempt(resource, "-", 0, None), args, core.port.now() + UNDO_GRACE)
        if reply[0] == GRANTED:
            return int(reply[1])
    return None


def _timeout_error(resource: Resource, timeout: float, reply: Any) -> AcquireTimeout:
    parties = str(resource.acquire_args[0])
    return AcquireTimeout(
        f"{resource}: the others did not come within {timeout:g} s, and so it is broken for all until reset(). "
        f"Of {parties} parties {reply[1]} had come when last asked"
    )


async def reset(core: Core, resource: Resource) -> None:
    """See Barrier.reset."""
    reply = await core.query(resource, "reset", f"reset/{secrets.token_hex(16)}")
    if reply[0] == WRONG_KIND:
        raise reply_error(resource, WRONG_KIND, reply)


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


def parse_state(name: str, reply: list[Any]) -> BarrierState:
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
