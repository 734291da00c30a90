"""The keys of a barrier, its calls, and its state for users. barrier.lua decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.names import keys_of, positive_int
from interlock._protocol.resource import Resource
from interlock.primitives.kind_record import Kind
from interlock.primitives.plain import Answer
from interlock.primitives.scripts import load

from .lock import LOCK_COMPANIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.primitives.messages import Raw, Words
    from interlock.primitives.view import View

MAX_PARTIES: Final = 100_000  # the highest number of parties of a barrier


def barrier_resource(name: object, prefix: str, parties: object) -> Resource:
    """Make the resource of the barrier of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, (*LOCK_COMPANIONS, "present"))
    number = positive_int(parties, "its parties", f"barrier {name!r}", MAX_PARTIES)
    return Resource(
        "barrier", checked, load("barrier"), keys, (str(number),), has_generation=True, counts_arrivals=True
    )


class ResetCall(NamedTuple):
    """Begins another generation of the barrier."""

    operation: str

    def encode(self) -> Words:
        """See Call."""
        return ("reset", self.operation)


class BarrierInspect(NamedTuple):
    """The reply to `inspect` of a barrier."""

    generation: bytes
    """b"" if there is no barrier."""
    parties: int
    arrived: int
    why: bytes
    """Why the barrier is broken; b"" if it is not broken."""
    waiters: Sequence[bytes]

    @classmethod
    def parse(cls, reply: Raw) -> BarrierInspect:
        """Parse the reply that the script returned."""
        generation, parties, arrived, why, *waiters = reply
        return cls(generation, parties, arrived, why, waiters)


@dataclass(frozen=True)
class BarrierState(Answer):
    """The state of a barrier in the server, at one moment."""

    name: str
    parties: int | None
    """How many parties the barrier needs to open; None if the server knows no such barrier."""
    arrived: int
    """How many parties have arrived and wait for the others."""
    waiters: tuple[str, ...]
    """The tokens of the first hundred waiters, in order of arrival."""
    broken: str | None
    """Why the barrier is broken; None if it is not broken."""
    generation: int | None
    """A number that changes with each reset; None if the server knows no such barrier."""

    @property
    def waiting(self) -> int:
        """How many parties wait: the same number as `arrived`."""
        return self.arrived


def parse_state(name: str, reply: Raw) -> BarrierState:
    """Parse the reply to `inspect` into the state for users."""
    generation, parties, arrived, why, waiters = BarrierInspect.parse(reply)
    return BarrierState(
        name=name,
        parties=parties or None,
        arrived=arrived,
        waiters=tuple(waiter.decode(errors="replace") for waiter in waiters),
        broken=why.decode(errors="replace") or None,
        generation=int(generation) if generation else None,
    )


def _add_to_view(view: View, reply: Raw) -> View:
    from interlock.primitives.view import Waiter, of_token  # noqa: PLC0415 (see view.py)

    state = parse_state(view.name, reply)
    if state.parties is None:
        return view
    return replace(
        view,
        state="broken" if state.broken else "waiting",
        waiters=[Waiter(**of_token(token)) for token in state.waiters],
        waiting=state.arrived,
        parties=state.parties,
        broken=state.broken,
        generation=state.generation,
    )


def _made_to_ask(name: str, prefix: str) -> Resource:
    return barrier_resource(name, prefix, 1)


BARRIER: Final = Kind(
    "barrier",
    "a barrier",
    "barrier",
    _made_to_ask,
    _add_to_view,
    has_holders=False,
    becomes_free=False,
    value_is_holder=False,
    mismatch=("parties", "Give the same number"),
    broken_advice="Call reset() before using it again",
)
