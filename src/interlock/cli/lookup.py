"""What the server has under a name, whatever kind uses it, as one `View`: for `show`, `wait` and `revoke`.

Theory. A person on call knows the name. The first question finds the kind (`kind_of`), the second one is `inspect` of
that kind. The two answers may differ, since the server works on between them: then a View shows what `inspect` said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._client.kinds import inspect, kind_of
from interlock._protocol.run import run
from interlock._protocol.tokens import Token
from interlock._protocol.types import Disconnected, ServerError
from interlock.errors import LockError
from interlock.primitives.codes import NEWER, OTHER
from interlock.primitives.kind import resource_of
from interlock.primitives.kinds import kind_named
from interlock.primitives.view import Holder, Party, View, Waiter, of_token

if TYPE_CHECKING:
    from interlock.primitives.kind import KindReply
    from interlock.primitives.registry import Party as Said
    from interlock.threads import Interlock

__all__ = ["MOST", "Holder", "Party", "View", "Waiter", "glance", "look", "with_places"]

MOST: Final = 5000  # entries of one list: a script can return no more
FIRST: Final = 100  # of them, unless all are wanted
MIN_SINCE: Final = -1.0  # seconds: a fence is so much ahead of the clock that it says nothing about a time
PartyT = TypeVar("PartyT", Holder, Waiter)


def look(locks: Interlock, name: str, most: int = FIRST) -> View:
    """What the server has under this name, and what the processes say of it. Raises Unavailable or ConfigError.

    At most so many holders and waiters; `most` of more than MOST counts as MOST.
    """
    return with_places(locks, glance(locks, name, most))


def glance(locks: Interlock, name: str, most: int = FIRST) -> View:
    """As `look`, without what the processes say of themselves: to look again and again."""
    core = locks._session.core
    found = run(kind_of(core, name, locks.prefix))
    kind, key = found.kind, locks.prefix + name
    if kind in {None, OTHER, NEWER}:
        return View(name, key, kind, "unknown" if kind else "free")
    assert kind is not None
    resource = resource_of(kind, name, locks.prefix)
    reply = run(inspect(core, resource, str(min(most, MOST))))
    view = kind_named(kind).add_to_view(View(name, key, kind, "free"), reply)
    return replace(view, holders=[_as_found(holder, found) for holder in view.holders])


def with_places(locks: Interlock, view: View) -> View:
    """Add what the processes of the holders and waiters say themselves, if they say anything."""
    tokens = (Token.parse(party.token) for party in (*view.holders, *view.waiters))
    processes = {token.process for token in tokens if token is not None}
    registry = locks._session.registry
    try:
        until = registry.runtime.now() + locks.try_for
        entries = run(registry.entries_of(sorted(processes), until)) if processes else []
    except (Disconnected, ServerError, LockError):  # the right to read it may be missing
        return view
    held = {party.token: party for entry in entries for _, party in entry.holds}
    awaited = {party.token: party for entry in entries for _, party in entry.waits}
    holders = list[Holder]()
    for holder in view.holders:
        said = _as_said(holder, held.get(holder.token) or awaited.get(holder.token))
        # Who has just waited has not yet said that it holds, and how long it waited is not for how long it has held.
        holders.append(said if holder.token in held else replace(said, since=holder.since))
    waiters = [_as_said(waiter, awaited.get(waiter.token)) for waiter in view.waiters]
    return replace(view, holders=holders, waiters=waiters)


def _as_found(holder: Holder, found: KindReply) -> Holder:
    """Add for how long it has held; and of a plain key, which attempt of ours wrote the value."""
    attempt = found.plain_holder if found.value else None
    fields = of_token(holder.token, attempt) if attempt else dict[str, Any]()
    return replace(holder, **fields | {"since": _since(holder.fence, found)})


def _as_said(party: PartyT, said: Said | None) -> PartyT:
    if said is None:
        return party
    return replace(
        party,
        since=said.seconds,
        place=said.place or None,
        trace_id=said.trace_id or None,
        reported_ago=said.reported_ago,
    )


def _since(fence: int | None, found: KindReply) -> float | None:
    """For how many seconds this grant has lasted: a fence is the server's time, unless its clock was set back."""
    seconds = (int(found.now_us) - fence) / 1e6 if fence else MIN_SINCE
    return max(0.0, seconds) if seconds > MIN_SINCE else None
