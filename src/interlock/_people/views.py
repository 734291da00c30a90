"""What people see of a name. Each command, `ls()` and each page for people reads it here.

Theory. Two sources know something. The server knows who holds a name and who stands in its queue: one script call reads
the keys of the name, so its answer was true at one moment. The processes know the rest, and have said it some seconds
before: the lines of their code, and which callers wait behind others of their process (a cohort), of which the server
has never heard.

Rules. (a) Only the server says who holds, and who stands in the queue. (b) What a process has said of a token counts
for the caller with that token and for no other. (c) A caller that waits behind another one of its process counts while
the server knows a holder or waiter, unless its process is gone or silent. If its process neither holds nor queues, as
between two turns, its report must not be older than `JUST_NOW`, unless the list of waiters is cut off. (d) If the
server refuses to answer about a name, the view says what the processes say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from interlock._client.cohort import RESERVED
from interlock._client.error_texts import is_of_another_kind
from interlock._client.inspecting import inspect, kind_of
from interlock._people.motion import Motions
from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.timing import RETRY_FOR
from interlock._protocol.tokens import Process, Token
from interlock.errors import ConfigError, LockError, Unavailable
from interlock.primitives.codes import NEWER, OTHER
from interlock.primitives.kind import resource_of
from interlock.primitives.kinds import KINDS, kind_named
from interlock.primitives.messages import InspectCall
from interlock.primitives.registry import REGISTRY, REPORT_INTERVAL, Listed, group_by_name
from interlock.primitives.registry import Party as Said
from interlock.primitives.view import Holder, View, Waiter, of_token, with_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock._client.acquiring import Core
    from interlock._people.registry import Registry
    from interlock._protocol.resource import Resource
    from interlock.primitives.deadlocks import Deadlocked
    from interlock.primitives.registry import Entry

MOST: Final = 5000  # entries of one list: a script can return no more
FIRST: Final = 100  # of them, unless all are wanted
LISTED: Final = 1000  # holders and waiters of each name in a list of names
BATCH: Final = 100  # names that one write asks about
JUST_NOW: Final = 2 * REPORT_INTERVAL  # seconds since a report whose waiters need no other sign of life
SECOND_LOOK: Final = 0.25  # seconds after the first look at a name, which alone does not say whether it moves
LEAST_SINCE: Final = -1.0  # seconds: a fence that is further ahead of the server's clock is not the time of its grant
PartyT = TypeVar("PartyT", Holder, Waiter)


class Name(NamedTuple):
    """What tells a synchronizer from all others."""

    kind: str
    name: str
    prefix: str


@dataclass
class Reports:
    """What processes have said of one name, by token."""

    held: dict[str, Said] = field(default_factory=dict[str, Said])
    awaited: dict[str, Said] = field(default_factory=dict[str, Said])


class Views:
    """What one session shows to people."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.server = registry.server
        self.runtime = registry.runtime
        self.motions = Motions()

    # All names

    async def ls(self, core: Core, pattern: str = "*", *, twice: bool = False) -> list[Listed]:
        """What all processes hold and wait for. Raises Unavailable or ConfigError.

        `twice`: look a second time at names that may move or be stuck, which one look can't tell apart.
        """
        entries, server_is_ahead = await self.registry.all_entries(core.requests.query)
        said = {Name(each.kind, each.name, each.prefix): each for each in group_by_name(entries, pattern)}
        reports = by_name(entries)
        views = await self.at(list(said), reports, server_is_ahead)
        unclear = [name for name, view in views.items() if view is not None and self.motions.needs_another_look(view)]
        if twice and unclear:
            await self.runtime.sleep_until(self.runtime.now() + SECOND_LOOK)
            views |= await self.at(unclear, reports, server_is_ahead)
        found = [said[name] if view is None else listed(name, view) for name, view in views.items()]
        return [each for each in found if each.holders or each.waiters]

    async def at(
        self, names: Sequence[Name], reports: dict[Name, Reports], server_is_ahead: float
    ) -> dict[Name, View | None]:
        """What the server has under these names, joined with these reports; None for one of which it refuses to tell.

        `server_is_ahead`: seconds by which the server's clock is ahead of the clock of this runtime. Raises
        Unavailable.
        """
        replies = await self._inspect_all(names)
        now = self.runtime.now() + server_is_ahead
        return {
            name: None if reply is None else self._made(name, reply, reports.get(name, Reports()), now)
            for name, reply in replies.items()
        }

    async def _inspect_all(self, names: Sequence[Name], until: float | None = None) -> dict[Name, Any]:
        """The reply to `inspect` of each name; None if the server refuses it. Omits names of another kind by now."""
        found = dict[Name, Any]()
        resources = {name: resource for name in names if (resource := _resource(name)) is not None}
        found |= {name: None for name in names if name not in resources}
        asked = list(resources.items())
        for i in range(0, len(asked), BATCH):
            batch = asked[i : i + BATCH]
            messages = [(each.script, each.keys, InspectCall(str(LISTED)).encode()) for _, each in batch]
            replies = await self.server.call_many(messages, until or self.runtime.now() + RETRY_FOR)
            for (name, resource), reply in zip(batch, replies, strict=True):
                if isinstance(reply, Disconnected):
                    text = f"{REGISTRY}: no answer from {self.server.display_url} ({reply})"
                    raise Unavailable(text) from reply
                if isinstance(reply, Exception):
                    if "WRONGTYPE" not in str(reply):
                        found[name] = None
                    continue
                record = kind_named(name.kind).record_in(reply)
                if not (record and is_of_another_kind(resource, record)):
                    found[name] = reply
        return found

    # One name

    async def look(self, core: Core, name: str, prefix: str, most: int = FIRST, *, twice: bool = False) -> View:
        """What the server has under this name, and what processes say of it. Raises Unavailable or ConfigError.

        At most so many holders and waiters; `most` of more than MOST counts as MOST. `twice`: as in ls().
        """
        view = await self.with_reports(await self.glance(core, name, prefix, most))
        if twice and self.motions.needs_another_look(view):
            await self.runtime.sleep_until(self.runtime.now() + SECOND_LOOK)
            view = await self.with_reports(await self.glance(core, name, prefix, most))
        return view

    async def glance(self, core: Core, name: str, prefix: str, most: int = FIRST) -> View:
        """As `look`, without what the processes say of themselves: to look again and again."""
        found = await kind_of(core, name, prefix)
        kind, key = found.kind, prefix + name
        if kind in {None, OTHER, NEWER}:
            return View(name, key, kind, "unknown" if kind else "free")
        assert kind is not None
        reply = await inspect(core, resource_of(kind, name, prefix), str(min(most, MOST)))
        view = self._made(Name(kind, name, prefix), reply, Reports(), int(found.now_us) / 1e6)
        attempt = found.plain_holder if found.value else None
        return with_fields(view, holders=[_of_plain(each, attempt) for each in view.holders]) if attempt else view

    async def with_reports(self, view: View) -> View:
        """Add what the processes of the holders and waiters say themselves, if they say anything."""
        processes = sorted(_processes(view))
        try:
            until = self.runtime.now() + RETRY_FOR
            entries = await self.registry.entries_of(processes, until) if processes else []
        except (Disconnected, ServerError, LockError):  # the right to read it may be missing
            return view
        reports, prefix = Reports(), view.key.removesuffix(view.name)
        for name, each in by_name(entries).items():
            if (name.name, name.prefix) == (view.name, prefix):
                reports.held |= each.held
                reports.awaited |= each.awaited
        return self._joined(view, reports)

    def _made(self, name: Name, reply: Any, reports: Reports, now: float) -> View:
        view = View(name.name, name.prefix + name.name, name.kind, "free", now=now)
        view = kind_named(name.kind).add_to_view(view, reply)
        return self._joined(with_fields(view, holders=[_since_grant(each, now) for each in view.holders]), reports)

    def _joined(self, view: View, reports: Reports) -> View:
        joined = _join(view, reports)
        return with_fields(joined, **self.motions.note(joined)._asdict())

    # Deadlocks

    async def confirms(self, found: Deadlocked, until: float) -> bool:
        """Whether the server says, by the time `until`, that each holder of this deadlock still holds.

        Raises Disconnected, ServerError or LockError.
        """
        held = {Name(*each.thing): list[str]() for each in found.held}
        for each in found.held:
            held[Name(*each.thing)].append(each.party.token)
        for name, reply in (await self._inspect_all(list(held), until)).items():
            if reply is not None:
                view = kind_named(name.kind).add_to_view(View(name.name, "", name.kind, "free"), reply)
                holders = {holder.token for holder in view.holders if holder.confirmed}
                if view.holding <= len(view.holders) and not holders.issuperset(held[name]):
                    return False
        return True


def _resource(name: Name) -> Resource | None:
    """The resource of a name that processes have reported. None if this version knows no such kind, or no such name."""
    try:
        return resource_of(name.kind, name.name, name.prefix) if name.kind in KINDS else None
    except ConfigError:
        return None


def by_name(entries: Iterable[Entry]) -> dict[Name, Reports]:
    """What these entries say of each name."""
    found = dict[Name, Reports]()
    for entry in entries:
        for item, party in entry.holds:
            found.setdefault(Name(item.kind, item.name, item.prefix), Reports()).held[party.token] = party
        for item, party in entry.waits:
            found.setdefault(Name(item.kind, item.name, item.prefix), Reports()).awaited[party.token] = party
    return found


def _processes(view: View) -> set[Process]:
    """The processes that hold it or stand in its queue, as far as tokens say."""
    tokens = (Token.parse(party.token) for party in (*view.holders, *view.waiters))
    return {token.process for token in tokens if token is not None}


def _since_grant(holder: Holder, now: float) -> Holder:
    """Add for how long it has held: a fence is the server's time of the grant, unless its clock was set back."""
    seconds = now - holder.fence / 1e6 if holder.fence else LEAST_SINCE
    return with_fields(holder, since=max(0.0, seconds) if seconds > LEAST_SINCE else None)


def _of_plain(holder: Holder, attempt: str) -> Holder:
    """Add which attempt of ours wrote the value of a plain key."""
    return with_fields(holder, **of_token(holder.token, attempt))


# What the server says, and what processes say


def _join(view: View, reports: Reports) -> View:
    """Add what processes say of the same tokens, and the callers that wait behind others of their process."""
    holders = [_told_holder(each, reports) for each in view.holders]
    queued = {each.token for each in view.waiters}
    waiters = [_told(each, reports.awaited.get(each.token)) for each in view.waiters]
    alive = [each for each in waiters if not each.gone]
    at_server, holding = _processes(view), {each.token for each in holders}
    local = [
        _told(Waiter(**of_token(said.token)), said)
        for said in reports.awaited.values()
        if said.local
        and said.token not in queued
        and said.token not in holding
        and not said.is_silent
        and at_server
        and (_process_of(said) in at_server or said.reported_ago <= JUST_NOW or view.waiting > len(view.waiters))
    ]
    found = [*alive, *local]
    return with_fields(
        view,
        holders=holders,
        waiters=found,
        waiting=view.waiting - (len(waiters) - len(alive)) + len(local),
        processes=len({(each.host, each.pid) if each.host else each.token for each in found}),
    )


def _process_of(said: Said) -> Process:
    """The process that has said this."""
    return Process(said.label, said.host, said.pid)


def _told_holder(holder: Holder, reports: Reports) -> Holder:
    """Add what its process says of the holder with this token."""
    said = reports.held.get(holder.token)
    # While a lease passes from caller to caller, its token stays and its fence rises: a report of an earlier caller
    # says nothing of this one.
    if said is not None and holder.fence and said.fence and said.fence <= holder.fence - RESERVED:
        return holder
    if said is not None:
        return with_fields(_told(holder, said), fence=said.fence or holder.fence)
    # The last report of its process says that it waits: the seconds there are those of the wait, and not of the hold.
    waited = reports.awaited.get(holder.token)
    return holder if waited is None else with_fields(_told(holder, waited), since=holder.since)


def _told(party: PartyT, said: Said | None) -> PartyT:
    if said is None:
        return party
    return with_fields(
        party,
        caller=said.caller,
        since=said.seconds,
        place=said.place or None,
        trace_id=said.trace_id or None,
        reported_ago=said.reported_ago,
        gone=said.gone,
        said=said,
    )


# A view as one of many


def listed(name: Name, view: View) -> Listed:
    """This view, as one of a list."""
    holders, waiters = ([_party(each) for each in parties] for parties in (view.holders, view.waiters))
    return Listed(
        *name,
        _oldest_first(holders),
        _oldest_first(waiters),
        waiting=view.waiting,
        processes=view.processes,
        motion=view.motion,
        handovers=view.handovers,
        unchanged=view.unchanged,
    )


def _oldest_first(parties: list[Said]) -> tuple[Said, ...]:
    return tuple(sorted(parties, key=lambda party: -party.seconds))


def _party(party: Holder | Waiter) -> Said:
    fence = party.fence if isinstance(party, Holder) else None
    confirmed = party.confirmed if isinstance(party, Holder) else True
    seconds = round(party.since or 0.0, 3)
    if party.said is not None:
        return with_fields(party.said, fence=fence, seconds=seconds, confirmed=confirmed)
    return Said(
        token=party.token,
        fence=fence,
        host=party.host or "",
        pid=party.pid or 0,
        label=party.label or "",
        caller=party.caller or "",
        place="",
        seconds=seconds,
        reported_ago=0.0,
        trace_id="",
        caller_id="",
        permits=party.permits or 1,
        confirmed=confirmed,
    )
