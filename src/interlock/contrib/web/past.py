"""What has happened under each name since the first viewer came: who held when, who waited, how long both lasted.

Theory. Nobody writes a history into the server: that would cost every section. So a watcher keeps what its looks see.
A look sees who holds now; between two looks of a busy name many may have held. Fences and the number of waiters that
have left the queue say how many, and for how long they held on average, so the histograms count them, too.

Rule. All pasts together keep `MAX_SPANS` holds and `MAX_NOTES` notes: the oldest of any name go first.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from interlock.contrib.web.rows import Moments, party_row

if TYPE_CHECKING:
    from interlock._people.views import Name
    from interlock.primitives.view import View

MAX_SPANS: Final = 20_000
MAX_NOTES: Final = 5_000
SPANS_OF_NAME: Final = 200
NOTES_OF_NAME: Final = 100
SAMPLES: Final = 300  # of how many waited
BUCKETS: Final = 20  # of a histogram: each twice as long as the one before
SHORTEST: Final = 0.001  # seconds: the upper end of the first bucket


@dataclass(slots=True)
class Span:
    """One hold, as looks have seen it."""

    who: str
    place: str
    start: float
    fence: str
    end: float | None = None
    how: str = ""

    def as_json(self) -> list[Any]:
        """Who, place, start, end, fence, how it ended."""
        return [self.who, self.place, self.start, self.end, self.fence, self.how]


@dataclass(slots=True)
class Past:
    """What has happened under one name."""

    moments: Moments = field(default_factory=Moments)
    spans: deque[Span] = field(default_factory=lambda: deque[Span](maxlen=SPANS_OF_NAME))
    notes: deque[list[Any]] = field(default_factory=lambda: deque[list[Any]](maxlen=NOTES_OF_NAME))
    samples: deque[list[Any]] = field(default_factory=lambda: deque[list[Any]](maxlen=SAMPLES))
    open: dict[tuple[str, int | None], Span] = field(default_factory=dict[tuple[str, "int | None"], Span])
    waited: dict[str, float] = field(default_factory=dict[str, float])
    """Since when each caller of the last look has waited, by token."""
    holds: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    waits: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    handovers: int = 0
    fence: int = 0
    departed: int = 0
    since: float = 0.0
    """When the first look was."""

    def as_json(self) -> dict[str, Any]:
        """The past for the page of one lock."""
        return {
            "since": self.since,
            "spans": [each.as_json() for each in self.spans],
            "notes": list(self.notes),
            "samples": list(self.samples),
            "holds": self.holds,
            "waits": self.waits,
            "handovers": self.handovers,
        }


def bucket_of(seconds: float) -> int:
    """The bucket of a histogram that counts this duration."""
    return min(BUCKETS - 1, max(0, math.ceil(math.log2(max(seconds, SHORTEST) / SHORTEST))))


class Pasts:
    """The pasts of all names."""

    def __init__(self) -> None:
        self.of: dict[Name, Past] = {}
        self._spans = deque[Past]()  # whose span each is, the oldest first
        self._notes = deque[Past]()

    def look(self, name: Name, view: View) -> Past:
        """Note what this view says that the one before did not."""
        now = view.now or 0.0
        past = self.of.get(name)
        if past is None:
            past = self.of[name] = Past(since=now, fence=view.fence or 0, departed=view.departed or 0)
        new = self._compare(name, past, view, now)
        self._count(past, view, new)
        for each in new:
            self._keep(self._spans, past, MAX_SPANS, past.spans)
            past.spans.append(each)
        if not past.samples or past.samples[-1][1] != view.waiting:
            past.samples.append([now, view.waiting])
        past.waited = {each.token: at for each in view.waiters if (at := past.moments.of(each, now)) is not None}
        past.moments.keep(view)
        return past

    def note(self, name: Name, at: float, what: str, words: str) -> None:
        """Note something that somebody did, such as a revocation."""
        past = self.of.setdefault(name, Past(since=at))
        self._keep(self._notes, past, MAX_NOTES, past.notes)
        past.notes.append([at, what, words])

    def forget(self, name: Name, at: float) -> None:
        """Note that nobody holds this name or waits for it any more: its holds end, and its past stays."""
        past = self.of.get(name)
        if past is None:
            return
        for span in past.open.values():
            span.end, span.how = at, span.how or "released"
        past.open.clear()
        past.waited.clear()
        if past.samples and past.samples[-1][1]:
            past.samples.append([at, 0])
        past.moments.known.clear()
        if not past.spans and not past.notes:
            del self.of[name]

    def prune(self) -> None:
        """Drop the pasts that say nothing any more."""
        self.of = {name: past for name, past in self.of.items() if past.spans or past.notes or past.open}

    def _compare(self, name: Name, past: Past, view: View, now: float) -> list[Span]:
        """End the holds that are over, and return those that have begun."""
        there = {(each.token, each.fence): each for each in view.holders}
        began = list[Span]()
        for key in [key for key in past.open if key not in there]:
            span = past.open.pop(key)
            # The next grant of a name with one holder says when the hold before has ended, at the latest.
            granted = (view.fence or 0) / 1e6 if view.limit is None else 0.0
            span.end = round(granted if span.start <= granted <= now else now, 3)
            span.how = span.how or "released"
            if view.limit is not None:  # each hold counts: several last at a time
                past.holds[bucket_of(span.end - span.start)] += 1
        for key, holder in there.items():
            current = past.open.get(key)
            if current is None:
                row = party_row(holder, past.moments, now)
                current = past.open[key] = Span(row["who"], row.get("place", ""), row.get("since") or now,
                                             str(holder.fence or ""))  # fmt: skip
                began.append(current)
            current.place = current.place or (holder.place or "")[:600]
            if holder.revoked is not None and not current.how:
                current.how = "revoked"
                self.note(name, now, "revoked", f"{current.who}: {holder.revoked}"[:600])
            elif holder.gone and not current.how:
                current.how = "its process ended"
                self.note(name, now, "dead", current.who)
        return began

    def _count(self, past: Past, view: View, began: list[Span]) -> None:
        """Count how long holds and waits lasted since the last look."""
        fence, departed = view.fence or 0, view.departed or 0
        if view.limit is None and past.fence and fence > past.fence:
            number = max(1, departed - past.departed if departed > past.departed else 1)
            past.holds[bucket_of((fence - past.fence) / 1e6 / number)] += number
            past.handovers += number
        elif view.limit is not None:
            past.handovers += len(began)
        for (token, _), span in past.open.items():
            if span in began and (since := past.waited.get(token)) is not None:
                past.waits[bucket_of(max(0.0, span.start - since))] += 1
        past.fence, past.departed = fence or past.fence, departed

    @staticmethod
    def _keep(order: deque[Past], past: Past, most: int, kept: deque[Any]) -> None:
        """Make room for one more, of whatever name has the oldest."""
        order.append(past)
        if len(order) > most:
            oldest = order.popleft()
            queue = oldest.spans if kept is past.spans else oldest.notes
            if queue:
                queue.popleft()
