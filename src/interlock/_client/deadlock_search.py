"""The deadlock of which a caller was a part whose time is over, or behind which it has waited.

Theory. Only a caller that has waited for long asks, and first only for the process of its holder: a holder that does
not wait is in no deadlock. Else it reads what all processes say, once in `REPORT_INTERVAL` for all callers of a
session, and adds what it knows better: what it holds itself, and that it has waited until now.

Rules. (1) Nothing here delays a caller beyond the time that it gives. (2) A search reads `MAX_SEARCHED_PROCESSES` at
most, and a session has a few searches under way at most: many callers may time out together, and the server has other
work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._client.self_wait import kind_of_caller
from interlock._protocol.log import log
from interlock._protocol.types import Disconnected, ServerError
from interlock.errors import LockError
from interlock.primitives.deadlocks import WAY_OUT, ThingName, find
from interlock.primitives.permits import PermitArgs
from interlock.primitives.registry import REPORT_INTERVAL, Entry, listed, party_of

if TYPE_CHECKING:
    from interlock._client.grant import Attempt, Grant
    from interlock._client.registry import Registry
    from interlock.primitives.deadlocks import Deadlocked

MAX_SEARCHED_PROCESSES: Final = 200
MAX_LEASES: Final = 1000  # of this process: with more, nobody looks which of them the caller holds
MAX_READERS: Final = 4  # callers of a session that read at the same time


class Snapshot(NamedTuple):
    """What all processes said."""

    read_at: float
    entries: list[Entry]
    deadlocks: list[Deadlocked]


class DeadlockSearch:
    """Looks for deadlocks, for the callers of one session."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.runtime = registry.runtime
        self._snapshot: Snapshot | None = None
        self._readers = 0

    async def say(self, attempt: Attempt, holder: str, until: float) -> tuple[tuple[str, ...], str] | None:
        """The deadlock of find(): a line for each of its callers, and what an error says."""
        found = await self.find(attempt, holder, until)
        if found is None:
            return None
        caller, kind = self._caller_id(attempt), kind_of_caller(attempt.live_caller)
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
        snapshot = await self._read(until)
        if snapshot is None:
            return None
        caller = self._caller_id(attempt)
        known = snapshot.deadlocks
        if held and all(each.member(caller) is None for each in known):
            known = find(listed(self._with_own(attempt, held, caller, snapshot)), 0.0)
        for each in known:
            if each.member(caller) is not None:
                return each
        resource = attempt.resource
        thing = ThingName(resource.kind, resource.name, resource.prefix)
        return next((each for each in known if any(held.thing == thing for held in each.held)), None)

    async def _read(self, until: float) -> Snapshot | None:
        """What all processes say, not long ago. None if nobody knows that in time."""
        now, snapshot = self.runtime.now(), self._snapshot
        if snapshot is not None and now < snapshot.read_at + REPORT_INTERVAL:
            return snapshot
        if self._readers >= MAX_READERS:
            return None
        self._readers += 1
        try:
            entries = await self.registry.some_entries(MAX_SEARCHED_PROCESSES, until)
        except (Disconnected, ServerError, LockError) as error:
            log.debug("the registry at %s: no answer: %s", self.registry.server.display_url, error)
            return None
        finally:
            self._readers -= 1
        entries = entries or []
        snapshot = self._snapshot = Snapshot(self.runtime.now(), entries, find(listed(entries), 0.0))
        return snapshot

    def _held_by_caller(self, attempt: Attempt) -> list[Grant]:
        """The leases that the caller of this attempt has acquired in this process."""
        caller = attempt.live_caller
        renewals = list(self.registry.all_renewals())
        if caller is None or sum(renewal.count() for renewal in renewals) > MAX_LEASES:
            return []
        grants = (grant for renewal in renewals for grant in renewal.held())
        return [grant for grant in grants if grant.attempt.live_caller is caller]

    def _caller_id(self, attempt: Attempt) -> str:
        caller = attempt.live_caller
        return f"{self.registry.process_id}/{id(caller):x}" if caller is not None else ""

    def _with_own(self, attempt: Attempt, held: list[Grant], caller: str, snapshot: Snapshot) -> list[Entry]:
        """The entries, with what this caller knows of itself in place of what its process has said."""
        now = self.runtime.now()
        others = [
            Entry(*([(item, party) for item, party in part if party.caller_id != caller] for part in entry))
            for entry in snapshot.entries
        ]
        ago, process = snapshot.read_at - now, self.registry.process_id  # below 0: it was said after the snapshot
        holds, wait = [self.registry.held_item(grant, now) for grant in held], self.registry.waiting_item(attempt, now)
        own = [(item, party_of(process, item, ago)) for item in holds]
        return [*others, Entry(own, [(wait, party_of(process, wait, ago))])]
