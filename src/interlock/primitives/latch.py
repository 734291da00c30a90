"""The keys of a latch, its calls, and its state for users. latch.lua decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.names import duration, keys_of, positive_int
from interlock._protocol.resource import Resource
from interlock.primitives.kind_record import Kind
from interlock.primitives.plain import Answer
from interlock.primitives.scripts import load

from .lock import LOCK_COMPANIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.resource import Argument
    from interlock.primitives.messages import Raw, Words
    from interlock.primitives.view import View

MAX_COUNT: Final = 1_000_000_000  # the highest count of a latch
MIN_LATCH_TTL: Final = 10.0  # seconds, the shortest ttl of a latch: its waiters send a heartbeat every second


def latch_resource(name: object, prefix: str, count: object, ttl: object) -> Resource:
    """Make the resource of the latch of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, LOCK_COMPANIONS)
    number = positive_int(count, "its count", f"latch {name!r}", MAX_COUNT)
    keep_ms = int(duration(ttl, "ttl", minimum=MIN_LATCH_TTL) * 1000)
    return Resource("latch", checked, load("latch"), keys, (str(number), str(keep_ms)), has_generation=True)


class CountCall(NamedTuple):
    """Counts the latch down by this number; creates the latch if there is none."""

    operation: str
    by: str
    latch: tuple[Argument, ...]
    """The count, and the ms for which the server keeps the latch, as in an acquire."""

    def encode(self) -> Words:
        """See Call."""
        return ("count", self.operation, self.by, *self.latch)


class LatchInspect(NamedTuple):
    """The reply to `inspect` of a latch."""

    generation: bytes
    """b"" if there is no latch."""
    counts_from: int
    left: int
    pttl_ms: int
    why: bytes
    """Why the latch was revoked; b"" if it was not revoked."""
    waiting: int
    waiters: Sequence[bytes]

    @classmethod
    def parse(cls, reply: Raw) -> LatchInspect:
        """Parse the reply that the script returned."""
        generation, count, left, pttl_ms, why, waiting, *waiters = reply
        return cls(generation, count, left, pttl_ms, why, waiting, waiters)


@dataclass(frozen=True)
class LatchState(Answer):
    """The state of a latch in the server, at one moment."""

    name: str
    count: int | None
    """The number from which the latch counts down; None if the server knows no such latch."""
    left: int | None
    """How many counts are left until the latch opens; 0 once it is open."""
    remaining: float | None
    """Seconds until the server deletes the latch, unless a client waits or counts down before; None: no latch."""
    waiters: tuple[str, ...]
    """The tokens of the first hundred waiters, in order."""
    waiting: int
    """How many callers wait."""
    revoked: str | None
    """Why the latch was revoked; None if it was not revoked."""

    @property
    def open(self) -> bool:
        """Whether the latch is open, so that its waiters may go on."""
        return self.left == 0


def parse_state(name: str, reply: Raw) -> LatchState:
    """Parse the reply to `inspect` into the state for users."""
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


def _add_to_view(view: View, reply: Raw) -> View:
    from interlock.primitives.view import Waiter, of_token  # noqa: PLC0415 (see view.py)

    state = parse_state(view.name, reply)
    if state.count is None:
        return view
    return replace(
        view,
        state="revoked" if state.revoked else "open" if state.open else "counting",
        waiters=[Waiter(**of_token(token)) for token in state.waiters],
        waiting=state.waiting,
        count=state.count,
        left=state.left,
        broken=state.revoked,
        expires=state.remaining,
    )


def _made_to_ask(name: str, prefix: str) -> Resource:
    return latch_resource(name, prefix, 1, MIN_LATCH_TTL)


LATCH: Final = Kind(
    "latch",
    "a latch",
    "latch",
    _made_to_ask,
    _add_to_view,
    has_holders=False,
    value_is_holder=False,
    mismatch=("count", "Give the same count; or use another name, since this latch lasts until its ttl is over"),
    broken_advice="Use another name for another one",
)
