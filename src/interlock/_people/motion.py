"""Whether a name for which callers wait passes from holder to holder, or is stuck. ADR 42.

Theory. Each grant raises the fence of a name, and a fence is the server's time of its grant. So one look says for how
long nobody was granted anything, and two looks say whether somebody was in between. How long the holds of a name
usually last, its readers learn from their own looks: nobody who acquires or releases counts anything.

Rules. (a) A name is stuck if callers wait, and nobody was granted it for `STUCK_TIMES` as long as its holds usually
last, and for `MIN_STUCK` at least. (b) Where no reader has seen a hold end, it is stuck after `UNKNOWN_STUCK`. (c) It
moves if it was granted to somebody since the last look, or still within the time of (a). (d) Else nobody can tell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.timing import DEFAULT_TTL
from interlock.primitives.kinds import kind_named

if TYPE_CHECKING:
    from interlock.primitives.view import View

MOVES: Final = "moves"
STUCK: Final = "stuck"
STUCK_TIMES: Final = 10
MIN_STUCK: Final = 5.0  # seconds
UNKNOWN_STUCK: Final = DEFAULT_TTL  # seconds: a dead holder would have lost its lease by then, if that had the default
MIN_APART: Final = 0.1  # seconds between two looks that count
MAX_NAMES: Final = 10_000  # that are remembered
HOLDS_KEPT: Final = 8  # of a name


class Motion(NamedTuple):
    """What two looks say of a name."""

    motion: str = ""
    handovers: float | None = None
    """A second."""
    unchanged: float | None = None
    """Seconds since the newest grant."""


@dataclass
class _Seen:
    """What the last look at a name saw, and what the looks before it have learned."""

    at: float
    newest: int
    """The fence of the newest grant."""
    departed: int
    holds: deque[float] = field(default_factory=lambda: deque[float](maxlen=HOLDS_KEPT))
    """Seconds that holds lasted, on average between two looks."""
    handovers: float | None = None
    changed: bool = False


class Motions:
    """What one session has seen of the names at which it has looked."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}  # by key

    def needs_another_look(self, view: View) -> bool:
        """Whether only a second look could say whether this name moves."""
        seen = self._seen.get(view.key)
        return seen is not None and not seen.changed and not seen.holds and bool(view.waiting) and not view.motion

    def note(self, view: View) -> Motion:
        """Note a look at a name, and say what this look and those before it say together."""
        now, departed = view.now, view.departed or 0
        if now is None or view.fence is None or view.kind is None or not view.holding:
            return Motion()
        seen = self._seen.get(view.key)
        unchanged = max(0.0, now - view.fence / 1e6)
        if seen is None:
            if len(self._seen) >= MAX_NAMES:
                self._seen.clear()
            seen = self._seen[view.key] = _Seen(now, view.fence, departed)
        elif now - seen.at >= MIN_APART:
            _compare(seen, now, view.fence, departed)
        if not (view.waiting and kind_named(view.kind).holds_end):
            return Motion(unchanged=unchanged)
        patience = max(MIN_STUCK, STUCK_TIMES * max(seen.holds)) if seen.holds else UNKNOWN_STUCK
        if unchanged >= patience:
            return Motion(STUCK, None, unchanged)
        if seen.changed or seen.holds:
            return Motion(MOVES, seen.handovers, unchanged)
        return Motion(unchanged=unchanged)


def _compare(seen: _Seen, now: float, fence: int, departed: int) -> None:
    """Learn from this look and the one before it."""
    apart, left = now - seen.at, departed - seen.departed
    seen.changed = fence > seen.newest
    seen.handovers = left / apart if seen.changed and left > 0 else None
    if seen.changed:
        seen.holds.append((fence - seen.newest) / 1e6 / max(1, left))
    seen.at, seen.newest, seen.departed = now, fence, departed
