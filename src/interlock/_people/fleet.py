"""Looks at all names of a server again and again, for a person who watches for long, with a small part of a core.

Theory. `ls()` asks the server about each name, which costs a tenth of a millisecond for each. A watcher asks every
second, so it asks first about what may have changed, and about the rest in turn. What it shows of a name was true at
one moment, and it says how long a turn takes.

Rules. (a) A look asks first about the names that somebody has opened, those for which callers wait, and those that a
process has begun to name, has ceased to name, or reports with another holder. (b) Reading what the processes say and
asking about names cost no more than `SHARE` of a core, as measured: the reports of a large fleet are read less often,
and each look asks about as many names as fit, `LEAST` at least. A quarter of them are names that seem calm. (c) A name
is forgotten once the server knows neither holder nor waiter, unless it has something else to say (`outlasts`). (d) If
the server refuses to read the registry, the looks go on with the names that are known.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._people.views import Name, Reports, by_name, listed
from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.timing import RETRY_FOR
from interlock.errors import ConfigError, LockError
from interlock.primitives.deadlocks import Deadlocked, find
from interlock.primitives.view import Holder, View, Waiter, of_token, with_fields

if TYPE_CHECKING:
    from collections.abc import Collection

    from interlock._client.acquiring import Core
    from interlock._people.views import Views
    from interlock.primitives.registry import Entry, Listed, Party

SHARE: Final = 0.05  # of a core
INTERVAL: Final = 0.7  # seconds between two looks, at least: a lock is seen two seconds after its acquire at the latest
LEAST: Final = 100  # names that one look asks about, whatever that costs
FIRST_GUESS: Final = 150e-6  # seconds that a name costs, before anybody has measured it
SMOOTH: Final = 0.3  # how much the newest measurement counts


@dataclass
class Sight:
    """The last look at one name."""

    view: View
    asked_at: float
    """By the clock of the runtime."""


class Unread(NamedTuple):
    """What the registry did not tell."""

    error: str = ""
    """Why nobody could read it; "" if somebody could."""
    entries: int = 0
    """How many entries this version can't read."""


@dataclass
class Said:
    """What the processes said, when somebody last read it."""

    at: float
    """By the clock of the runtime."""
    reports: dict[Name, Reports] = field(default_factory=dict[Name, Reports])
    parties: list[tuple[Name, Party, bool]] = field(default_factory=list[tuple[Name, "Party", bool]])
    unread: Unread = field(default_factory=Unread)


@dataclass
class Look:
    """What one look has seen."""

    now: float
    """The server's clock: seconds since 1970."""
    seen: dict[Name, View]
    """The names that it asked about."""
    gone: list[Name]
    """The names that are forgotten."""
    deadlocks: list[Deadlocked]
    parties: list[tuple[Name, Party, bool]]
    """Each lease and wait that a process has reported, with its name; the last item is True for a lease."""
    said_at: float
    """When somebody last read these reports, by the server's clock."""
    unread: Unread
    asked: int
    """How many names it asked about."""
    began: float
    """When it began, on the clock of this thread's processor time."""
    read: float
    """When it had read what the processes say, on the same clock."""
    cost: float = 0.0
    """Seconds of a core that it took."""
    rest: float = INTERVAL
    """Seconds from the beginning of this look to the beginning of the next one, at least."""
    turn: float = INTERVAL
    """Seconds after which each name has been asked about again."""


@dataclass
class Fleet:
    """All names of one server, for one watcher."""

    views: Views
    core: Core
    sights: dict[Name, Sight] = field(default_factory=dict[Name, Sight])
    share: float = SHARE
    _of_name: float = FIRST_GUESS  # seconds of a core for one name
    _of_registry: float = 0.0  # the same for reading what the processes say
    _ahead: float = 0.0  # seconds by which the server's clock is ahead of the runtime's

    _read_again: float = 0.0  # when to read the reports again, by the clock of the runtime

    def __post_init__(self) -> None:
        self._said = Said(0.0)
        self._ahead = time.time() - self.views.runtime.now()  # until the server has said what its clock says

    async def look(self, opened: Collection[Name] = ()) -> Look:
        """Look at what may have changed, and at some of the rest. Raises Unavailable or ConfigError."""
        began, runtime = time.thread_time(), self.views.runtime
        if runtime.now() >= self._read_again:
            await self._read()
            self._of_registry += SMOOTH * (time.thread_time() - began - self._of_registry)
            self._read_again = self._said.at + self._of_registry / (self.share / 2) - INTERVAL / 2
        read, said = time.thread_time(), self._said
        due = self._due(said.reports, opened)
        reports = {name: said.reports[name] for name in due if name in said.reports}
        seen = await self.views.at(due, aged(reports, runtime.now() - said.at), self._ahead)
        now = runtime.now()
        views = {name: view or _as_said(name, reports.get(name, Reports())) for name, view in seen.items()}
        missing = (name for name in due if name not in seen)  # of another kind by now
        gone = [
            name for name in (*missing, *views) if not (name in views and (name in opened or outlasts(views[name])))
        ]
        for name in gone:
            views.pop(name, None)
            self.sights.pop(name, None)
        self.sights |= {name: Sight(view, now) for name, view in views.items()}
        contended = [listed(name, sight.view) for name, sight in self.sights.items() if sight.view.waiting]
        deadlocks = await self._confirmed(contended)
        said_at = said.at + self._ahead
        return Look(
            now + self._ahead, views, gone, deadlocks, said.parties, said_at, said.unread, len(due), began, read
        )

    def settle(self, look: Look) -> Look:
        """Learn what this look has cost, with all that its watcher did about it in this thread."""
        ended = time.thread_time()
        look.cost, of_names = ended - look.began, ended - look.read
        self._of_name += SMOOTH * (of_names / max(LEAST, look.asked) - self._of_name)
        look.rest = max(INTERVAL, of_names / self._share_of_names)
        look.turn = look.rest * max(1, -(-len(self.sights) // max(1, look.asked)))
        return look

    @property
    def _share_of_names(self) -> float:
        """The part of a core for asking about names: what reading the reports leaves, and half of all at least."""
        return self.share - min(self.share / 2, self._of_registry / INTERVAL)

    @property
    def room(self) -> int:
        """How many names the next look asks about, if there are so many."""
        return max(LEAST, int(self._share_of_names * INTERVAL / self._of_name))

    async def _read(self) -> None:
        """Read what all processes say. Raises Unavailable."""
        at = self.views.runtime.now()
        try:
            entries, self._ahead, unreadable = await self.views.registry.every_entry(self.core.requests.query)
        except ConfigError as error:  # the server refuses to tell; what is known of names goes on
            self._said = Said(at, unread=Unread(str(error)))
        else:
            self._said = Said(at, by_name(entries), _parties(entries), Unread(entries=unreadable))

    def _due(self, reports: dict[Name, Reports], opened: Collection[Name]) -> list[Name]:
        """The names to ask about, what may have changed first."""
        names = {*self.sights, *reports, *opened}
        urgent = [name for name in names if name in opened or self._may_have_changed(name, reports.get(name))]
        chosen = set(urgent)
        rest = sorted((name for name in names if name not in chosen), key=self._asked_at)
        urgent.sort(key=lambda name: (name not in opened, self._asked_at(name)))
        room = max(self.room, len(opened))
        share = max(len(opened), room - min(len(rest), room // 4))  # so that names that seem calm have their turn, too
        return [*urgent[:share], *rest, *urgent[share:]][:room]

    def _asked_at(self, name: Name) -> float:
        sight = self.sights.get(name)
        return sight.asked_at if sight is not None else 0.0

    def _may_have_changed(self, name: Name, said: Reports | None) -> bool:
        sight = self.sights.get(name)
        if sight is None or said is None:
            return True
        view = sight.view
        return bool(view.waiting or said.awaited) or not said.held.keys() <= {each.token for each in view.holders}

    async def _confirmed(self, contended: list[Listed]) -> list[Deadlocked]:
        """The deadlocks among these of which the server says that each holder still holds."""
        found = list[Deadlocked]()
        for each in find(contended):
            try:
                if await self.views.confirms(each, self.views.runtime.now() + RETRY_FOR):
                    found.append(each)
            except (Disconnected, ServerError, LockError):  # report no deadlock that the server has not confirmed
                continue
        return found


def aged(reports: dict[Name, Reports], seconds: float) -> dict[Name, Reports]:
    """These reports, which somebody read so many seconds ago, with ages as of now."""

    def older(parties: dict[str, Party]) -> dict[str, Party]:
        return {
            token: with_fields(each, seconds=each.seconds + seconds, reported_ago=each.reported_ago + seconds)
            for token, each in parties.items()
        }

    return {name: Reports(older(each.held), older(each.awaited)) for name, each in reports.items()}


def outlasts(view: View) -> bool:
    """Whether there is something to show under this name: a holder, a waiter, a quarantine, a count, a last run."""
    return bool(view.holders or view.waiting or view.quarantine is not None or view.last_run or view.count is not None)


def _as_said(name: Name, said: Reports) -> View:
    """The view of a name about which the server refuses to tell: what the processes say of it."""
    holders = [Holder(**of_token(each.token), since=each.seconds, place=each.place) for each in said.held.values()]
    waiters = [Waiter(**of_token(each.token), since=each.seconds, place=each.place) for each in said.awaited.values()]
    return View(name.name, name.prefix + name.name, name.kind, "unknown", holders, len(holders), waiters, len(waiters))


def _parties(entries: list[Entry]) -> list[tuple[Name, Party, bool]]:
    return [
        (Name(item.kind, item.name, item.prefix), party, is_lease)
        for entry in entries
        for part, is_lease in ((entry.holds, True), (entry.waits, False))
        for item, party in part
    ]
