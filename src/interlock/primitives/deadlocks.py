"""Deadlocks among callers of all processes, found in the entries of the registry. For people: no decision reads them.

Theory. Each caller (a thread or a task) waits for one thing at most. A waiter is *stuck* if the permits that stuck
callers hold leave too few for it, or if it stands in a queue behind a stuck waiter: no release by a caller that can go
on lets a stuck waiter go on. The stuck callers are the greatest set of which that is true. `_stuck` begins with all
waiters, and takes out those that the server may still grant, until nothing changes (the reduction of a resource graph:
Holt, Some Deadlock Properties of Computer Systems, 1972). A lock is a thing with one permit; a writer takes all permits
of an rwlock. So one rule covers waits for all holders and waits for any of them. Holders without an entry count as
callers that can go on. The stuck callers that wait for each other are the strongly connected components of the graph
from each stuck waiter to the callers that block it (by two searches in depth, after Kosaraju and Sharir: Sharir, A
Strong-Connectivity Algorithm, 1981). Other stuck callers wait behind them.

Rules. (a) What an entry says was true from the beginning of the lease or wait until the process wrote the entry. A
deadlock counts only if at one moment all of it was true: so a wait that is over never meets a lease that began later.
(b) A process that is late with its report may be dead, and the lease of a dead process runs out: its callers are in no
deadlock. (c) A deadlock is certain if only the holders' own code, below the lines that wait, would release the leases.
Else another thread may have a lease by now, or a lease may end by itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.names import printable
from interlock.primitives.registry import REPEAT_INTERVAL, REPORT_INTERVAL, Party

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock.primitives.registry import Listed

LATE: Final = REPEAT_INTERVAL + 2 * REPORT_INTERVAL  # seconds without a report after which an entry no longer counts
MIN_TOGETHER: Final = 0.2  # seconds for which all of a deadlock must have been true: a report may travel for so long
MIN_WAIT: Final = 2 * REPORT_INTERVAL  # seconds: find() leaves out shorter waits, which may end by themselves
WAY_OUT: Final = "Acquire them in the same order everywhere, or all at once: multi()"


class ThingName(NamedTuple):
    """Something that can be held."""

    kind: str
    name: str
    prefix: str

    def __str__(self) -> str:
        return f"{printable(self.kind)} {self.name!r}"


def name_of(listed: Listed) -> ThingName:
    """What tells a thing from all others."""
    return ThingName(listed.kind, listed.name, listed.prefix)


class Held(NamedTuple):
    """A lease in a deadlock."""

    thing: ThingName
    party: Party
    """Its holder, and the line of code that has acquired it."""


@dataclass(frozen=True)
class Member:
    """A caller in a deadlock: what it waits for, and what it holds that others in the deadlock wait for."""

    thing: ThingName
    """What it waits for."""
    waiter: Party
    """Itself, and the line of code that waits."""
    holds: tuple[Held, ...]

    @property
    def who(self) -> str:
        """Label, host, process, and thread or task."""
        return printable(self.waiter.who)

    def sentence(self, who: str = "") -> str:
        """For messages."""
        held = " and ".join(f"{held.thing} since {printable(held.party.place)}" for held in self.holds)
        holds = f"holds {held} and " if held else ""
        return f"{who or self.who} {holds}waits for {self.thing} at {printable(self.waiter.place)}"


@dataclass(frozen=True)
class Deadlocked:
    """Callers that wait for each other."""

    members: tuple[Member, ...]
    """In a plain circle each waits for what the next one holds, and the last one for what the first one holds."""
    certain: bool
    """Whether only the code of the members could end it. Else a lease may end by itself or be released elsewhere."""
    behind: int
    """How many other callers wait for the things that the members wait for."""

    @property
    def seconds(self) -> float:
        """For how long all members have waited."""
        return min(member.waiter.seconds for member in self.members)

    @property
    def held(self) -> tuple[Held, ...]:
        """What the members hold that others wait for."""
        return tuple(held for member in self.members for held in member.holds)

    @property
    def title(self) -> str:
        """For people."""
        sure = "A deadlock" if self.certain else "Probably a deadlock"
        return (
            f"{sure} of {len(self.members)} callers" if len(self.members) > 1 else f"{sure} of one caller with itself"
        )

    def member(self, caller_id: str) -> Member | None:
        """The member that is this caller, or None."""
        return next((each for each in self.members if each.waiter.caller_id == caller_id), None)

    def beginning_with(self, caller_id: str) -> tuple[Member, ...]:
        """The members, this caller first if it is one of them."""
        start = next((i for i, each in enumerate(self.members) if each.waiter.caller_id == caller_id), 0)
        return (*self.members[start:], *self.members[:start])


@dataclass
class _Thing:
    """Something that is held or awaited, and its parties. The waiters stand in their order, the oldest first."""

    name: ThingName
    limit: int
    holders: dict[str, Party] = field(default_factory=dict[str, Party])
    permits: dict[str, int] = field(default_factory=dict[str, int])  # of each holder, who may have several leases
    waiters: list[Party] = field(default_factory=list[Party])


def find(things: Iterable[Listed], min_wait: float = MIN_WAIT) -> list[Deadlocked]:
    """The deadlocks among the callers that hold these or wait for them, the oldest first.

    Leaves out waits of less than `min_wait` seconds.
    """
    known = _known(things, min_wait)
    stuck = _stuck(known)
    blockers = _blockers(known, stuck)
    found = [_deadlock(component, stuck) for component in _components(blockers)]
    return sorted((each for each in found if each is not None), key=lambda each: -each.seconds)


def _known(things: Iterable[Listed], min_wait: float) -> list[_Thing]:
    """The things that callers wait for, with those callers that count. Each caller waits for one of them at most."""
    known = list[_Thing]()
    waits = dict[str, tuple[Party, _Thing]]()
    for listed in things:
        if not listed.waiters:
            continue
        parties = [*listed.holders, *listed.waiters]
        thing = _Thing(name_of(listed), max((p.limit for p in parties), default=0))
        known.append(thing)
        for party in filter(_counts, listed.holders):
            thing.holders.setdefault(party.caller_id, party)
            thing.permits[party.caller_id] = thing.permits.get(party.caller_id, 0) + party.permits
        for party in filter(_counts, listed.waiters):
            former = waits.get(party.caller_id)
            if party.seconds >= min_wait and (former is None or party.reported_ago < former[0].reported_ago):
                waits[party.caller_id] = party, thing
    for party, thing in sorted(waits.values(), key=lambda wait: -wait[0].seconds):
        thing.waiters.append(party)
    return known


def _counts(party: Party) -> bool:
    return bool(party.caller_id) and party.reported_ago <= LATE


def _stuck(known: Sequence[_Thing]) -> dict[str, _Thing]:
    """The callers that can't go on, whatever all other callers release; and the thing that each of them waits for."""
    stuck = {party.caller_id: thing for thing in known for party in thing.waiters}
    held_by = defaultdict[str, list[_Thing]](list)
    for thing in known:
        for caller in thing.holders:
            held_by[caller].append(thing)
    pending = deque(thing for thing in known if thing.waiters)
    while pending:
        thing = pending.popleft()
        taken = sum(number for caller, number in thing.permits.items() if caller in stuck)
        for party in thing.waiters:
            if party.caller_id not in stuck:
                continue
            if taken + party.permits > thing.limit > 0:
                break  # it is stuck, and so are the waiters behind it
            del stuck[party.caller_id]
            pending += held_by[party.caller_id]
    return stuck


def _blockers(known: Sequence[_Thing], stuck: dict[str, _Thing]) -> dict[str, list[str]]:
    """For each stuck caller, the stuck callers that block it: the holders, or else the first stuck waiter before it."""
    found = dict[str, list[str]]()
    for thing in known:
        waiting = [party for party in thing.waiters if stuck.get(party.caller_id) is thing]
        holders = [caller for caller in thing.holders if caller in stuck]
        taken = sum(thing.permits[caller] for caller in holders)
        for party in waiting:
            is_behind = taken + party.permits <= thing.limit
            found[party.caller_id] = [waiting[0].caller_id] if is_behind else holders
    return found


def _components(graph: dict[str, list[str]]) -> list[list[str]]:
    """The strongly connected components that have a cycle. In a plain circle each caller waits for the next one."""
    backwards: dict[str, list[str]] = {caller: [] for caller in graph}
    for caller, others in graph.items():
        for other in others:
            backwards[other].append(caller)
    found, seen = list[list[str]](), set[str]()
    for root in reversed(_postorder(graph, graph, set())):
        inside = set(_postorder(backwards, [root], seen))
        if len(inside) > 1 or (inside and root in graph[root]):
            within = {caller: [other for other in graph[caller] if other in inside] for caller in inside}
            found.append(_postorder(within, [root], set())[::-1])
    return found


def _postorder(graph: dict[str, list[str]], roots: Iterable[str], seen: set[str]) -> list[str]:
    """The callers that a search in depth finds from these roots, in the order of its returns. Adds to `seen`."""
    found = list[str]()
    for root in roots:
        path = [(root, iter(graph[root]))] if root not in seen else []
        seen.add(root)
        while path:
            caller, others = path[-1]
            other = next((other for other in others if other not in seen), None)
            if other is None:
                found.append(caller)
                path.pop()
            else:
                seen.add(other)
                path.append((other, iter(graph[other])))
    return found


def _deadlock(component: list[str], stuck: dict[str, _Thing]) -> Deadlocked | None:
    """The deadlock of these callers; None if perhaps at no moment all of it was true."""
    inside = set(component)
    awaited = {id(stuck[caller]): stuck[caller] for caller in component}.values()
    waiters = {party.caller_id: party for thing in awaited for party in thing.waiters if party.caller_id in inside}
    holds = {
        caller: tuple(Held(thing.name, thing.holders[caller]) for thing in awaited if caller in thing.holders)
        for caller in component
    }
    facts = [*waiters.values(), *(held.party for each in holds.values() for held in each)]
    together = min(fact.seconds for fact in facts) - max(fact.reported_ago for fact in facts)
    if together < MIN_TOGETHER:
        return None
    behind = sum(party.caller_id not in inside for thing in awaited for party in thing.waiters)
    return Deadlocked(
        tuple(Member(stuck[caller].name, waiters[caller], holds[caller]) for caller in component),
        all(held.party.lasting for each in holds.values() for held in each),
        behind,
    )
