"""Views of names as the page's browser gets them: plain values for JSON, with times of the server's clock.

Rule. While nothing happens to a name, each of its rows is equal to the one before, and nobody sends it again. So a row
has the moment at which a hold began, and neither its seconds nor anything that a renewal changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interlock.primitives.registry import SILENT_AFTER
from interlock.primitives.view import Holder

if TYPE_CHECKING:
    from interlock._people.views import Name
    from interlock.primitives.deadlocks import Deadlocked, Member
    from interlock.primitives.registry import Party as Said
    from interlock.primitives.view import Party, View

MAX_PARTIES: Final = 3  # holders in a row
MAX_TEXT: Final = 600  # characters of anything that somebody else wrote
JITTER: Final = 0.5  # seconds by which two reports of one moment may differ


class Moments:
    """Since when each party of one name holds or waits, by its token: always the same moment of the same party."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int | None], float] = {}

    def of(self, party: Party, now: float) -> float | None:
        """The moment, by the server's clock; None if nobody knows."""
        if party.since is None:
            return None
        key = party.token, party.fence if isinstance(party, Holder) else None
        moment = now - party.since
        if isinstance(party, Holder) and party.fence and abs(party.fence / 1e6 - moment) < JITTER:
            moment = party.fence / 1e6  # that of the grant, exactly
        known = self.known.get(key)
        if known is None or abs(known - moment) > JITTER:
            known = self.known[key] = round(moment, 3)
        return known

    def keep(self, view: View) -> None:
        """Forget whoever neither holds nor waits any more."""
        if len(self.known) > len(view.holders) + len(view.waiters):
            there = {each.token for each in (*view.holders, *view.waiters)}
            self.known = {key: moment for key, moment in self.known.items() if key[0] in there}


def text(value: str | None) -> str:
    """The words of somebody else, cut off after `MAX_TEXT` characters."""
    return (value or "")[:MAX_TEXT]


def party_row(party: Party, moments: Moments, now: float) -> dict[str, Any]:
    """One that holds or waits. Fields that say nothing are left out."""
    who = f"{party.label}@{party.host}/{party.pid}" if party.label else f"{party.host}/{party.pid}"
    fields: dict[str, Any] = {
        "who": text(who if party.host is not None else party.token),
        "caller": text(party.caller),
        "place": text(party.place),
        "since": moments.of(party, now),
        "owner": text(party.owner),
        "trace": text(party.trace_id),
        "foreign": party.host is None,
        "gone": party.gone,
        "silent": not party.gone and (party.reported_ago or 0.0) > SILENT_AFTER,
        "permits": getattr(party, "permits", None),
        "side": getattr(party, "side", None),
    }
    if isinstance(party, Holder):
        fields |= {"handing": not party.confirmed, "revoked": text(party.revoked), "fence": str(party.fence or "")}
    return {name: value for name, value in fields.items() if value}


def row_of(number: int, name: Name, view: View, moments: Moments) -> dict[str, Any]:
    """One name, in short."""
    now = view.now or 0.0
    moments.keep(view)
    oldest = min((at for each in view.waiters if (at := moments.of(each, now)) is not None), default=None)
    used = view.used if view.used is not None else sum(each.permits or 1 for each in view.holders)
    fields: dict[str, Any] = {
        "holders": [party_row(each, moments, now) for each in view.holders[:MAX_PARTIES]],
        "holding": view.holding,
        "waiting": view.waiting,
        "processes": view.processes,
        "oldest": oldest,
        "motion": view.motion,
        "rate": view.handovers and float(f"{view.handovers:.2g}"),
        "granted": view.fence and round(view.fence / 1e6, 3),
        "quarantine": view.quarantine and round(now + view.quarantine),
        "used": used if view.limit is not None else None,
        "limit": view.limit,
        "readers": sum(each.side == "read" for each in view.holders) or None,
        "writers": sum(each.side == "write" for each in view.holders) or None,
        "count": view.count,
        "left": view.left,
        "parties": view.parties,
        "generation": view.generation,
        "broken": text(view.broken),
        "ran": view.last_run,
        "next": view.next_run and round(now + view.next_run),
    }
    row: dict[str, Any] = {"id": number, "kind": name.kind, "name": name.name, "prefix": name.prefix,
                           "state": view.state}  # fmt: skip
    return row | {name: value for name, value in fields.items() if value is not None and value not in ("", [])}


def details_of(view: View, moments: Moments, most: int) -> dict[str, Any]:
    """One name at full length: each holder with its lease, and the queue in order."""
    now = view.now or 0.0
    holders = [
        party_row(each, moments, now)
        | {"token": each.token, "ends": None if each.remaining is None else round(now + each.remaining, 1)}
        for each in view.holders[:most]
    ]
    return {
        "holders": holders,
        "queue": [party_row(each, moments, now) for each in view.waiters[:most]],
        "fence": str(view.fence or ""),
        "key": text(view.key),
        "expires": view.expires and round(now + view.expires),
        "is_known": view.is_known,
    }


def deadlock_row(found: Deadlocked, now: float) -> dict[str, Any]:
    """Callers that wait for each other, each with both lines of its code."""
    return {
        "certain": found.certain,
        "behind": found.behind,
        "since": round(now - found.seconds),
        "title": found.title,
        "members": [_member(each, now) for each in found.members],
    }


def _member(member: Member, now: float) -> dict[str, Any]:
    return {
        "who": text(member.waiter.who),
        "waits": {
            **_thing(member.thing),
            "place": text(member.waiter.place),
            "since": round(now - member.waiter.seconds),
        },
        "holds": [{**_thing(each.thing), "place": text(each.party.place)} for each in member.holds],
    }


def _thing(thing: Any) -> dict[str, str]:
    return {"kind": thing.kind, "name": thing.name, "prefix": thing.prefix}


def process_rows(parties: list[tuple[Name, Said, bool]], now: float, most: int) -> list[dict[str, Any]]:
    """What each process has said of itself, silent ones first."""
    found: dict[str, dict[str, Any]] = {}
    for name, party, is_lease in parties:
        process = f"{party.label}@{party.process}".removeprefix("@")
        row = found.setdefault(
            process,
            {"who": text(process), "version": party.library, "reported": round(now - party.reported_ago),
             "gone": party.gone, "silent": party.is_silent, "holding": 0, "waiting": 0, "holds": [], "waits": []},
        )  # fmt: skip
        row["reported"] = max(row["reported"], round(now - party.reported_ago))
        row["silent"] = row["silent"] and party.is_silent
        row["holding" if is_lease else "waiting"] += 1
        items = row["holds" if is_lease else "waits"]
        if len(items) < most:
            items.append({**_thing(name), "place": text(party.place), "caller": text(party.caller),
                          "since": round(now - party.seconds)})  # fmt: skip
    return sorted(found.values(), key=lambda row: (not row["silent"], not row["waiting"], row["who"]))
