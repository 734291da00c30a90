"""Finds the deadlock of which a caller whose time is over was a part, or behind which that caller has waited.

Theory. Only a caller that has waited for long asks, and first only for the process of its holder: a holder that does
not wait is in no deadlock. Else the caller reads what all processes say, once in `REPORT_INTERVAL` for all
callers of a session, and adds what it knows better: what it holds itself, and that it has waited until now.

Rules. (a) Nothing here delays a caller beyond the time that it gives. (b) A search reads `MAX_SEARCHED` entries at
most, and of the callers of a session one reads: many may time out together, and the server has other work. (c) The own
searches of a crowd of callers take about a twentieth of a processor: a search stops all tasks of a loop, and leases
have to be renewed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._client.self_wait import kind_of_caller
from interlock._people.answers import Answers
from interlock._people.registry import caller_of
from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.timing import FOREVER
from interlock.errors import LockError
from interlock.primitives.deadlocks import WAY_OUT, ThingName, find
from interlock.primitives.permits import PermitArgs
from interlock.primitives.registry import Entry, group_by_name, party_of

if TYPE_CHECKING:
    from interlock._client.grant import Attempt, Grant
    from interlock._people.answers import Answer
    from interlock._people.registry import Registry
    from interlock._people.views import Views
    from interlock.primitives.deadlocks import Deadlocked

MAX_SEARCHED: Final = 200  # sessions: to read so many full entries takes 0.1 s of a processor, and may hold up a loop
REST: Final = 20  # after its own search, a session starts no other one for so many times as long as the search took
MAX_LEASES: Final = 1000  # of this process: with more, nobody looks which of them the caller holds


class Snapshot(NamedTuple):
    """What all processes said."""

    entries: list[Entry]
    deadlocks: list[Deadlocked]


class DeadlockSearch:
    """Looks for deadlocks, for the callers of one session."""

    def __init__(self, registry: Registry, views: Views) -> None:
        self.registry = registry
        self.views = views
        self.runtime = registry.runtime
        self._snapshots = Answers[Snapshot](registry.runtime)
        self._rest_until = 0.0

    async def say(self, attempt: Attempt, holder: str, until: float) -> tuple[tuple[str, ...], str] | None:
        """The deadlock of find(): a line for each of its callers, and what an error says."""
        found = await self.find(attempt, holder, until)
        if found is None or not await self._is_true_now(found, attempt, holder, until):
            return None
        caller, kind = self.registry.caller_id(attempt), kind_of_caller(caller_of(attempt))
        members = found.beginning_with(caller)
        lines = tuple(each.sentence() for each in members)
        is_in_it = members[0].waiter.caller_id == caller
        said = "; ".join((members[0].sentence(f"this {kind}"), *lines[1:]) if is_in_it else lines)
        title = found.title if is_in_it else f"It waits behind {found.title[0].lower()}{found.title[1:]}"
        return lines, f"{title}: {said}. {WAY_OUT}"

    async def find(self, attempt: Attempt, holder: str, until: float) -> Deadlocked | None:
        """The deadlock that keeps this attempt waiting, if one is known by the time `until`.

        `holder` is the token of the holder for which the attempt waits, or of one of them.
        """
        held = self._held_by_caller(attempt)
        # The holder of a permit that is named may be one that goes on, beside others that do not.
        asks_all = bool(held) and isinstance(attempt.resource.acquire_args, PermitArgs)
        if not asks_all and not await self.registry.holder_waits(holder, until):
            return None
        read = await self._snapshots.get("all processes", lambda: self._read(until), until)
        if read is None:
            return None
        caller = self.registry.caller_id(attempt)
        known = read.value.deadlocks
        if held and all(each.member(caller) is None for each in known) and self.runtime.now() >= self._rest_until:
            known = self._search_with_own(attempt, held, caller, read)
        for each in known:
            if each.member(caller) is not None:
                return each
        resource = attempt.resource
        thing = ThingName(resource.kind, resource.name, resource.prefix)
        return next((each for each in known if any(held.thing == thing for held in each.held)), None)

    async def _is_true_now(self, found: Deadlocked, attempt: Attempt, holder: str, until: float) -> bool:
        """Whether the server agrees, and the reply that named this holder: the processes reported some time ago."""
        resource = attempt.resource
        thing = ThingName(resource.kind, resource.name, resource.prefix)
        tokens = [held.party.token for held in found.held if held.thing == thing]
        if tokens and holder not in tokens and not isinstance(resource.acquire_args, PermitArgs):
            return False
        try:
            return await self.views.confirms(found, until)
        except (Disconnected, ServerError, LockError):  # report no deadlock that the server has not confirmed
            return False

    async def _read(self, until: float) -> Snapshot:
        entries = await self.registry.some_entries(MAX_SEARCHED, until) or []
        return Snapshot(entries, find(group_by_name(entries), 0.0))

    def _held_by_caller(self, attempt: Attempt) -> list[Grant]:
        """The leases that the caller of this attempt has acquired in this process."""
        caller = caller_of(attempt)
        books = list(self.registry.all_books())
        if caller is None or sum(book.count() for book in books) > MAX_LEASES:
            return []
        grants = (grant for book in books for grant in book.held())
        return [grant for grant in grants if caller_of(grant.attempt) is caller]

    def _search_with_own(
        self, attempt: Attempt, held: list[Grant], caller: str, read: Answer[Snapshot]
    ) -> list[Deadlocked]:
        """Search again, with what this caller knows of itself in place of what its process has said."""
        now = self.runtime.now()
        others = [
            Entry(*([(item, party) for item, party in part if party.caller_id != caller] for part in entry))
            for entry in read.value.entries
        ]
        ago, process = read.asked_at - now, self.registry.process  # below 0: this is newer than the snapshot
        holds, wait = [self.registry.held_item(grant, now) for grant in held], self.registry.waiting_item(attempt, now)
        own = [(item, party_of(process, item, ago)) for item in holds]
        self._rest_until = FOREVER
        try:
            return find(group_by_name([*others, Entry(own, [(wait, party_of(process, wait, ago))])]), 0.0)
        finally:
            ended = self.runtime.now()
            self._rest_until = ended + REST * (ended - now)
