"""The keys of a lock, its calls, and its state for users. lock.lua decides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.names import keys_of, token_part
from interlock._protocol.resource import Resource
from interlock.errors import ConfigError
from interlock.primitives.codes import GRANTED, NOT_FOUND, QUARANTINE, free_text
from interlock.primitives.kind_record import Kind
from interlock.primitives.plain import Answer
from interlock.primitives.quorum_rules import QuorumRules
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.primitives.messages import AcquireReply, Raw, Words
    from interlock.primitives.view import View

LOCK_COMPANIONS = ("record", "queue", "waiters", "gone")
NO_OWNER = ("", "lock")  # the arguments of an acquire of a lock without an owner: one tuple for all locks
RECORD_VERSION = "1"  # the version with which each record begins


def lock_resource(name: object, prefix: str, owner: str = "") -> Resource:
    """Make the resource of the lock of this name; its keys have the order of KEYS in lock.lua. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, LOCK_COMPANIONS)
    return Resource("lock", checked, load("lock"), keys, (owner, "lock") if owner else NO_OWNER, owner)


def lock_based_resource(kind: str, name: object, prefix: str, companion: str) -> Resource:
    """Make a resource whose script runs lock.lua over the keys of a lock, and has one key more. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, (*LOCK_COMPANIONS, companion))
    return Resource(kind, checked, load(kind), keys, ("", kind))


def owner_prefix(owner: object) -> str:
    """Return the beginning of each token of this owner: readable, and different for each owner. Raises ConfigError."""
    if owner is None:
        return ""
    if not isinstance(owner, str) or not owner:
        raise ConfigError(f"owner must be a str that names one holder in all its processes, not {owner!r}")
    return f"{token_part(owner)}~{hashlib.sha256(owner.encode()).hexdigest()[:16]}/"


class FenceCall(NamedTuple):
    """Stores the fence on which a quorum has agreed, if the sender holds the lock."""

    token: str
    fence: str

    def encode(self) -> Words:
        """See Call."""
        return ("fence", self.token, self.fence)

    @classmethod
    def parse(cls, args: Raw) -> FenceCall:
        """Parse an encoded call."""
        return cls(*args[1:])


class FenceReply(NamedTuple):
    """Whether the server stored the fence."""

    stored: bool

    def encode(self) -> Raw:
        """See Reply."""
        return [GRANTED if self.stored else NOT_FOUND]

    @classmethod
    def parse(cls, reply: Raw) -> FenceReply:
        """Parse the reply that a script returned."""
        return cls(reply[0] == GRANTED)


class RegrantCall(NamedTuple):
    """Puts a lease that a majority has just confirmed back into a server of a quorum that has lost it."""

    token: str
    ttl_ms: str
    fence: str
    abstention: str
    """The abstention that the server named when it reported the loss: the call is void in any other one."""
    kind: str
    channel: str

    def encode(self) -> Words:
        """See Call."""
        return ("regrant", *self)

    @classmethod
    def parse(cls, args: Raw) -> RegrantCall:
        """Parse an encoded call."""
        return cls(*args[1:])


class VoterCall(NamedTuple):
    """Lets a server of a quorum judge itself, so that an abstention begins with the first connection."""

    def encode(self) -> Words:
        """See Call."""
        return ("voter",)

    @classmethod
    def parse(cls, _args: Raw) -> VoterCall:
        """Parse an encoded call."""
        return cls()


class VoterReply(NamedTuple):
    """For how many ms a server of a quorum abstains; 0 if it counts."""

    abstains_ms: int

    @classmethod
    def parse(cls, reply: Raw) -> VoterReply:
        """Parse the reply that a script returned."""
        return cls(reply[0])


class ReserveCall(NamedTuple):
    """Lengthens the sender's lease, and reserves fences for those to which the lease passes."""

    token: str
    ttl_ms: str
    number: str
    """How many fences."""

    def encode(self) -> Words:
        """See Call."""
        return ("reserve", self.token, self.ttl_ms, self.number)

    @classmethod
    def parse(cls, args: Raw) -> ReserveCall:
        """Parse an encoded call."""
        return cls(*args[1:])


class ReserveReply(NamedTuple):
    """Whether the server lengthened the lease and reserved the fences."""

    fence: int
    """The first fence; 0 if the lease has ended there."""
    others_wait: bool
    """Whether anybody stands in the server's queue."""

    def encode(self) -> Raw:
        """See Reply."""
        return [GRANTED, self.fence, int(self.others_wait)] if self.fence else [NOT_FOUND]

    @classmethod
    def parse(cls, reply: Raw) -> ReserveReply:
        """Parse the reply that a script returned."""
        return cls(reply[1], bool(reply[2])) if reply[0] == GRANTED else cls(0, others_wait=False)


class LockInspect(NamedTuple):
    """The reply to `inspect` of a lock."""

    value: bytes
    """The holder's token, a marker or a foreign value; b"" if the lock is free."""
    pttl_ms: int
    record: bytes
    handed_over: int
    """1 if the holder has not confirmed the handover yet."""
    departed: int
    """How many waiters have left the queue since it was last empty."""
    waiting: int
    """How many callers wait."""
    waiters: Sequence[bytes]
    """The tokens of the first waiters."""

    @property
    def fence(self) -> int:
        """The fence in the record; -1 if there is none."""
        fields = self.record.split(b" ", 3)
        return int(fields[2]) if len(fields) > 3 and fields[2].isdigit() else -1

    def encode(self) -> Raw:
        """See Reply."""
        return [*self[:6], *self.waiters]

    @classmethod
    def parse(cls, reply: Raw) -> LockInspect:
        """Parse the reply that a script returned."""
        value, pttl_ms, record, handed_over, departed, waiting, *waiters = reply
        return cls(value, pttl_ms, record, handed_over, departed, waiting, waiters)


@dataclass(frozen=True)
class LockState(Answer):
    """The state of a lock in the server, at one moment."""

    name: str
    holder: str | None
    """The holder's token (host/pid/thread or task/random), or a foreign value; None if the lock is free."""
    fence: int | None
    """The fence of the newest grant; None if the server has no record of one."""
    remaining: float | None
    """Seconds until the holder's lease, or the quarantine, ends by itself; None if the lock is free, or if a foreign
    value without a TTL holds the lock."""
    waiters: tuple[str, ...]
    """The tokens of the first hundred waiters, in order."""
    waiting: int
    """How many callers wait."""
    revoked: str | None
    """Why the holder's lease was revoked, if that lease has not ended yet; None if there is no such lease."""
    quarantined: bool = False
    """Whether the server grants nothing for `remaining` seconds, since it may have lost a lease that is alive."""

    @property
    def held(self) -> bool:
        """Whether somebody holds the lock now."""
        return self.holder is not None


def parse_state(name: str, reply: Raw) -> LockState:
    """Parse the reply to `inspect` into the state for users."""
    return state_of(name, LockInspect.parse(reply))


def state_of(name: str, inspected: LockInspect) -> LockState:
    """Make the state for users from a parsed reply to `inspect`."""
    holder = inspected.value.decode(errors="replace")
    fields = inspected.record.decode(errors="replace").split(" ", 8)
    quarantined = holder.startswith(QUARANTINE.decode())
    # As lock.lua writes it. `inspect` has refused the other kinds that this version knows; a later one may know more.
    known = fields[0] == RECORD_VERSION and len(fields) > 7 and fields[2].isdigit() and fields[4].isdigit()
    return LockState(
        name=name,
        holder=None if quarantined else holder.removeprefix("!") or None,
        fence=(int(fields[2]) or None) if known else None,
        remaining=inspected.pttl_ms / 1000 if inspected.pttl_ms >= 0 else None,
        waiters=tuple(waiter.decode(errors="replace") for waiter in inspected.waiters),
        waiting=inspected.waiting,
        revoked=free_text("".join(fields[8:])) if holder.startswith("!") and not quarantined else None,
        quarantined=quarantined,
    )


def add_to_view(view: View, reply: Raw) -> View:
    """See Kind."""
    return add_lock_to_view(view, LockInspect.parse(reply))


def add_lock_to_view(view: View, inspected: LockInspect) -> View:
    """Add what the server says of the lock of this name."""
    from interlock.primitives.view import HANDING_OVER, Holder, Waiter, of_token, with_fields  # noqa: PLC0415 (see view.py)

    state = state_of(view.name, inspected)
    waiters = [Waiter(**of_token(token)) for token in state.waiters]
    view = with_fields(view, fence=state.fence, waiters=waiters, waiting=state.waiting, departed=inspected.departed)
    if state.quarantined:
        return with_fields(view, state="quarantine", quarantine=state.remaining)
    if state.holder is None:
        return view
    holder = Holder(
        **of_token(state.holder),
        fence=state.fence,
        remaining=state.remaining,
        revoked=state.revoked,
        confirmed=not inspected.handed_over,
    )
    return with_fields(view, state="held" if holder.confirmed else HANDING_OVER, holders=[holder], holding=1)


def marker_of(value: bytes) -> bytes:
    """Return this value of a lock's key if it is the marker of a quarantine, else b""."""
    return value if value.startswith(QUARANTINE) else b""


def record_in(reply: Raw) -> bytes:
    """See Kind."""
    return LockInspect.parse(reply).record


def marker_in(reply: Raw) -> bytes:
    """See Kind."""
    return marker_of(LockInspect.parse(reply).value)


def _no_decisive_vote(_votes: Sequence[AcquireReply]) -> None:
    return None


def _merge_lock(replies: Sequence[LockInspect], merge: Callable[[Sequence[LockInspect]], LockInspect]) -> LockInspect:
    return merge(replies)


LOCK_RULES: Final = QuorumRules((), _no_decisive_vote, LockInspect.parse, _merge_lock)
LOCK_ADVICE: Final = "Release it first; or use rlock() in both places, so that its holder may enter it again"
LOCK: Final = Kind(
    "lock",
    "a lock",
    "lock",
    lock_resource,
    add_to_view,
    LOCK_ADVICE,
    record_in,
    marker_in,
    LOCK_RULES,
    may_join_multi=True,
)
