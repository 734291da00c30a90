"""What the server has under a name, whatever kind uses it, as one `View`: for `show`, `wait` and `revoke`.

Theory. A person on call knows the name. The first question finds the kind (`kind_of`), the second one is `inspect` of
that kind. The two answers may differ, since the server works on between them: then a View shows what `inspect` said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._client.kinds import inspect, kind_of
from interlock._protocol.run import run
from interlock._protocol.tokens import Token
from interlock._protocol.types import Disconnected, ServerError
from interlock.errors import LockError
from interlock.primitives import barrier, latch, lock, once, permits
from interlock.primitives.kind import NEWER, OTHER, resource_of
from interlock.primitives.permits import ALL_PERMITS

if TYPE_CHECKING:
    from interlock._protocol.types import Resource
    from interlock.primitives.kind import KindReply
    from interlock.primitives.lock import LockState
    from interlock.primitives.registry import Party as Said
    from interlock.threads import Interlock

__all__ = ["MOST", "Holder", "Party", "View", "Waiter", "glance", "look", "with_places"]

MOST: Final = 5000  # entries of one list: a script can return no more
FIRST: Final = 100  # of them, unless all are wanted
MIN_SINCE: Final = -1.0  # seconds: a fence is so much ahead of the clock that it says nothing about a time


@dataclass(frozen=True)
class Party:
    """One that holds or waits: what its token says, and what its process has told."""

    token: str
    """Of the lease, or of the attempt that waits; or what another library wrote."""
    host: str | None = None
    pid: int | None = None
    caller: str | None = None
    """The thread or task."""
    label: str | None = None
    """The `label` of its Interlock."""
    owner: str | None = None
    """The `owner` of an rlock."""
    since: float | None = None
    """For how many seconds it has held, or waited."""
    place: str | None = None
    """The line of the user's code, as file:line."""
    trace_id: str | None = None
    reported_ago: float | None = None
    """How many seconds ago its process last told what it holds and waits for."""


@dataclass(frozen=True)
class Holder(Party):
    """One that holds."""

    fence: int | None = None
    remaining: float | None = None
    """Seconds until the lease ends by itself; None: never."""
    permits: int | None = None
    """Of a semaphore."""
    side: str | None = None
    """Of a read-write lock: "read" or "write"."""
    revoked: str | None = None
    """Why the lease was revoked."""


@dataclass(frozen=True)
class Waiter(Party):
    """One that waits."""

    permits: int | None = None
    side: str | None = None


PartyT = TypeVar("PartyT", Holder, Waiter)


@dataclass(frozen=True)
class View:
    """What the server has under a name. Fields that the kind does not have are None."""

    name: str
    key: str
    kind: str | None
    """lock (also an rlock), rwlock, semaphore, election, once, latch, barrier; "plain key": of another library;
    "other data", "another version"; None: nothing."""
    state: str
    """free, held, quarantine; of a latch: counting, open, revoked; of a barrier: waiting, broken; else unknown."""
    holders: list[Holder] = field(default_factory=list[Holder])
    holding: int = 0
    """How many hold: `holders` has the first ones."""
    waiters: list[Waiter] = field(default_factory=list[Waiter])
    """In order."""
    waiting: int = 0
    fence: int | None = None
    """Of the newest grant."""
    quarantine: float | None = None
    """Seconds for which nothing is granted, since a lease may have been lost that is alive."""
    limit: int | None = None
    used: int | None = None
    count: int | None = None
    left: int | None = None
    parties: int | None = None
    generation: int | None = None
    broken: str | None = None
    """Why a barrier or latch is broken."""
    expires: float | None = None
    """Seconds after which the server forgets a latch that nobody uses."""
    last_run: dict[str, str | None] | None = None
    """Of a once: by, started, ended."""
    next_run: float | None = None
    """Of a once: seconds for which the last run keeps the next one from starting."""

    @property
    def is_known(self) -> bool:
        """Whether interlock can say who holds it."""
        return self.kind not in {None, OTHER, NEWER}

    @property
    def is_busy(self) -> bool:
        """Whether somebody who asks now has to wait: for a holder, a quarantine, or a latch."""
        if self.state == "held" and self.limit is not None and self.used is not None:
            return self.used >= self.limit or self.waiting > 0
        return self.state in {"held", "quarantine", "counting"}

    def as_json(self) -> dict[str, Any]:
        """The view for --json."""
        return asdict(self)


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
    return _VIEWS[resource.script.name](View(name, key, kind, "free"), resource, reply, found)


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


def _of_lock(view: View, resource: Resource, reply: Any, found: KindReply) -> View:
    return _with_lock(view, lock.parse_state(resource.name, reply), found)


def _with_lock(view: View, state: LockState, found: KindReply) -> View:
    waiters = [Waiter(**_of_token(token)) for token in state.waiters]
    view = replace(view, fence=state.fence, waiters=waiters, waiting=state.waiting)
    if state.quarantined:
        return replace(view, state="quarantine", quarantine=state.remaining)
    if state.holder is None:
        return view
    holder = Holder(
        **_of_token(state.holder, found.plain_holder),
        fence=state.fence,
        remaining=state.remaining,
        revoked=state.revoked,
    )
    holder = replace(holder, since=_since(state.fence, found))
    return replace(view, state="held", holders=[holder], holding=1)


def _of_once(view: View, resource: Resource, reply: Any, found: KindReply) -> View:
    inspected, state = once.OnceInspect.parse(reply), once.parse_state(resource.name, reply)
    view = _with_lock(view, lock.state_of(resource.name, inspected.lock), found)
    last = state.last
    if last is None:
        return view
    times = {"started": last.started, "ended": last.ended}
    run_before = {"by": last.by, **{what: time.isoformat() if time else None for what, time in times.items()}}
    return replace(view, last_run=run_before, next_run=state.free_in)


def _of_permits(view: View, resource: Resource, reply: Any, found: KindReply) -> View:
    state, is_rwlock = permits.parse_state(resource.name, reply), view.kind == "rwlock"

    def shares(number: int) -> dict[str, Any]:
        return {"side": "write" if number == ALL_PERMITS else "read"} if is_rwlock else {"permits": number}

    holders = [
        Holder(
            **_of_token(each.token),
            **shares(each.permits),
            fence=each.fence,
            remaining=each.remaining,
            revoked=each.revoked,
        )
        for each in state.holders
    ]
    view = replace(
        view,
        state="held" if holders else "free",
        holders=[replace(each, since=_since(each.fence, found)) for each in holders],
        holding=state.holding,
        waiters=[Waiter(**_of_token(token), **shares(number)) for token, number in state.waiters],
        waiting=state.waiting,
        fence=state.fence,
        limit=None if is_rwlock else state.limit,
        used=None if is_rwlock else state.used,
    )
    if state.quarantine:
        return replace(view, state="quarantine", quarantine=state.quarantine)
    return view


def _of_latch(view: View, resource: Resource, reply: Any, found: KindReply) -> View:  # noqa: ARG001 (as the others)
    state = latch.parse_state(resource.name, reply)
    if state.count is None:
        return view
    return replace(
        view,
        state="revoked" if state.revoked else "open" if state.open else "counting",
        waiters=[Waiter(**_of_token(token)) for token in state.waiters],
        waiting=state.waiting,
        count=state.count,
        left=state.left,
        broken=state.revoked,
        expires=state.remaining,
    )


def _of_barrier(view: View, resource: Resource, reply: Any, found: KindReply) -> View:  # noqa: ARG001
    state = barrier.parse_state(resource.name, reply)
    if state.parties is None:
        return view
    return replace(
        view,
        state="broken" if state.broken else "waiting",
        waiters=[Waiter(**_of_token(token)) for token in state.waiters],
        waiting=state.arrived,
        parties=state.parties,
        broken=state.broken,
        generation=state.generation,
    )


_VIEWS: Final = {
    "lock": _of_lock, "election": _of_lock, "once": _of_once, "permits": _of_permits, "latch": _of_latch,
    "barrier": _of_barrier,
}  # fmt: skip


def _of_token(token: str, ours: str | None = None) -> dict[str, Any]:
    """What a token says, as the fields of a Party. `ours`: the token of the attempt that wrote a foreign value."""
    said = Token.parse(ours or token)
    if said is None:
        return {"token": token}
    process = said.process
    return {
        "token": token,
        "host": process.host,
        "pid": process.pid,
        "caller": said.caller,
        "label": process.label or None,
        "owner": said.owner or None,
    }


def _since(fence: int | None, found: KindReply) -> float | None:
    """For how many seconds this grant has lasted: a fence is the server's time, unless its clock was set back."""
    seconds = (int(found.now_us) - fence) / 1e6 if fence else MIN_SINCE
    return max(0.0, seconds) if seconds > MIN_SINCE else None
