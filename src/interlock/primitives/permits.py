"""The keys of a semaphore or a read-write lock, its calls, and its state for users. permits.lua decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._protocol.names import checked_name, keys_of, positive_int
from interlock._protocol.resource import Resource
from interlock.errors import ConfigError
from interlock.primitives.kind_record import Kind
from interlock.primitives.plain import Answer
from interlock.primitives.scripts import load

from .lock import RECORD_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.primitives.messages import Raw, Words
    from interlock.primitives.view import View

PERMIT_COMPANIONS = ("record", "queue", "waiters", "gone", "shares")
ALL_PERMITS: Final = 1_000_000_000  # of a read-write lock: a writer takes all, a reader takes one
MAX_PERMITS: Final = 1_000_000  # the highest limit of a semaphore
PERMIT_RECORD_KINDS: Final = ("semaphore", "rwlock", "unknown")  # the kinds in the records of permits.lua


def permits_resource(
    kind: str, name: object, prefix: str, limit: int, permits: int = 1, own_lease: str = ""
) -> Resource:
    """Make the resource of so many permits of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, PERMIT_COMPANIONS)
    return Resource(
        kind,
        checked,
        load("permits"),
        keys,
        PermitArgs(kind, str(permits), str(limit), own_lease),
        renewed_key=5,
    )


def semaphore_resource(name: object, prefix: str, limit: object) -> Resource:
    """Make the resource of one permit of this semaphore. Raises ConfigError."""
    return permits_resource("semaphore", name, prefix, _checked_limit(checked_name(name), limit))


def with_permits(resource: Resource, number: object) -> Resource:
    """Return the resource of so many permits of this semaphore. Raises ConfigError."""
    args = permit_args(resource)
    permits = positive_int(number, "permits", resource, int(args.limit))
    return resource._replace(acquire_args=args._replace(permits=str(permits)))


def read_resource(name: object, prefix: str) -> Resource:
    """Make the resource of one reader of a read-write lock. Raises ConfigError."""
    return permits_resource("rwlock", name, prefix, ALL_PERMITS)


def write_resource(name: object, prefix: str) -> Resource:
    """Make the resource of the writer of a read-write lock: the writer takes all permits. Raises ConfigError."""
    return permits_resource("rwlock", name, prefix, ALL_PERMITS, ALL_PERMITS)


def beside_own_leases(resource: Resource, leases: list[Any]) -> Resource:
    """Return the resource for a caller that has these leases on the same read-write lock.

    Raises ConfigError if the caller wants to write: it would wait for itself.
    """
    held = [lease for lease in leases if lease._grant.end_reason is None]
    if not held:
        return resource
    args = permit_args(resource)
    if args.permits != "1":
        writes = any(permit_args(lease._grant.resource).permits != "1" for lease in held)
        raise ConfigError(
            f"{resource}: this thread or task writes already, and would wait for itself for ever. A write lease is not "
            "reentrant: use the lease that you have, or release it first"
            if writes
            else f"{resource}: this thread or task reads, and can't begin to write: two readers that tried "
            "would wait for each other for ever. Release the read lease first, and read again under the write lease"
        )
    return resource._replace(acquire_args=args._replace(own_lease=held[-1].token))


def permit_args(resource: Resource) -> PermitArgs:
    """Return the own arguments of an acquire of this resource."""
    args = resource.acquire_args
    assert isinstance(args, PermitArgs)
    return args


def _checked_limit(name: object, limit: object) -> int:
    return positive_int(limit, "its limit", f"semaphore {name!r}", MAX_PERMITS)


class PermitArgs(NamedTuple):
    """The own arguments of an acquire: the kind, the permits that the caller wants, and the limit."""

    kind: str
    permits: str
    limit: str
    own_lease: str = ""
    """Token of a lease beside which the caller may read; "" is none."""


class LimitCall(NamedTuple):
    """Sets the limit of a semaphore."""

    operation: str
    kind: str
    limit: str

    def encode(self) -> Words:
        """See Call."""
        return ("limit", *self)


class HoldersCall(NamedTuple):
    """Asks for holders whose leases end at a time of the server's clock, in ms, or later."""

    from_ms: str
    most: str

    def encode(self) -> Words:
        """See Call."""
        return ("holders", *self)


class HoldersReply(NamedTuple):
    """The holders in the order in which their leases end, and when the last of these leases ends."""

    tokens: Sequence[bytes]
    last_end_ms: int

    @classmethod
    def parse(cls, reply: Raw) -> HoldersReply:
        """Parse the reply that the script returned."""
        return cls(reply[::2], int(reply[-1]) if reply else 0)


class PermitInspect(NamedTuple):
    """The reply to `inspect` of a semaphore or a read-write lock."""

    record: bytes
    used: int
    holding: int
    waiting: int
    holders: Sequence[Any]
    """Token, ms left, share, and whether it is handed over (0 or 1), of each of the first holders."""
    waiters: Sequence[bytes]
    """Token and permits of each of the first waiters."""
    quarantine_ms: int
    marker: bytes
    """The marker of the quarantine; b"" if there is no quarantine."""
    departed: int
    """How many waiters have left the queue since it was last empty."""

    @classmethod
    def parse(cls, reply: Raw) -> PermitInspect:
        """Parse the reply that the script returned."""
        return cls(*reply)


@dataclass(frozen=True)
class Holder(Answer):
    """One holder of permits."""

    token: str
    """The token of the lease: host/pid/thread or task/random."""
    permits: int
    fence: int
    remaining: float
    """Seconds until the lease ends by itself."""
    revoked: str | None
    """Why the lease was revoked; None if it was not revoked."""


@dataclass(frozen=True)
class SemaphoreState(Answer):
    """The state of a semaphore or a read-write lock in the server, at one moment."""

    name: str
    limit: int | None
    """How many permits there are; None if the server has no record of the resource."""
    used: int
    """How many permits are held."""
    holders: tuple[Holder, ...]
    """The first hundred holders, in the order in which their leases end."""
    waiters: tuple[tuple[str, int], ...]
    """Token and permits of each of the first hundred waiters, in order."""
    holding: int
    """How many holders there are."""
    waiting: int
    """How many callers wait."""
    fence: int | None
    """The fence of the newest grant; None if the server has no record of one."""
    quarantine: float = 0.0
    """Seconds for which the server grants nothing, since it may have lost leases that are alive."""

    @property
    def held(self) -> bool:
        """Whether anybody holds a permit now."""
        return bool(self.holders)


def parse_state(name: str, reply: Raw) -> SemaphoreState:
    """Parse the reply to `inspect` into the state for users."""
    record, used, holding, waiting, holders, waiters, quarantine_ms, *_ = PermitInspect.parse(reply)
    fields = record.decode(errors="replace").split(" ")
    known = fields[0] == RECORD_VERSION and len(fields) > 6 and fields[1] in PERMIT_RECORD_KINDS and fields[6].isdigit()
    return SemaphoreState(
        name=name,
        limit=(int(fields[6]) or None) if known else None,
        used=used,
        holders=tuple(_holder(*holders[i : i + 3]) for i in range(0, len(holders), 4)),
        waiters=tuple(
            (waiters[i].decode(errors="replace"), int(waiters[i + 1] or 0)) for i in range(0, len(waiters), 2)
        ),
        holding=holding,
        waiting=waiting,
        fence=(int(fields[2]) or None) if known else None,
        quarantine=quarantine_ms / 1000,
    )


def _holder(token: bytes, left_ms: int, share: bytes) -> Holder:
    known, revoked, why = share.decode(errors="replace").partition(" !")
    words = known.split(" ")
    return Holder(
        token=token.decode(errors="replace"),
        permits=int(words[0] or 0),
        fence=int(words[1]) if len(words) > 1 else 0,
        remaining=left_ms / 1000,
        revoked=why if revoked else None,
    )


def _add_to_view(view: View, reply: Raw) -> View:
    from interlock.primitives.view import HANDING_OVER, Holder, Waiter, of_token, with_fields  # noqa: PLC0415 (see view.py)

    state, is_rwlock, inspected = parse_state(view.name, reply), view.kind == RWLOCK.name, PermitInspect.parse(reply)

    def shares(number: int) -> dict[str, Any]:
        return {"side": "write" if number == ALL_PERMITS else "read"} if is_rwlock else {"permits": number}

    holders = [
        Holder(
            **of_token(each.token),
            **shares(each.permits),
            fence=each.fence,
            remaining=each.remaining,
            revoked=each.revoked,
            confirmed=not handed_over,
        )
        for each, handed_over in zip(state.holders, inspected.holders[3::4], strict=True)
    ]
    is_held = any(holder.confirmed for holder in holders)
    view = with_fields(
        view,
        state="held" if is_held else HANDING_OVER if holders else "free",
        holders=holders,
        holding=state.holding,
        waiters=[Waiter(**of_token(token), **shares(number)) for token, number in state.waiters],
        waiting=state.waiting,
        fence=state.fence,
        limit=None if is_rwlock else state.limit,
        used=None if is_rwlock else state.used,
        departed=inspected.departed,
    )
    if state.quarantine:
        return with_fields(view, state="quarantine", quarantine=state.quarantine)
    return view


def _record_in(reply: Raw) -> bytes:
    return PermitInspect.parse(reply).record


def _marker_in(reply: Raw) -> bytes:
    return PermitInspect.parse(reply).marker


def _made_to_ask(name: str, prefix: str) -> Resource:
    return semaphore_resource(name, prefix, 1)


SEMAPHORE: Final = Kind(
    "semaphore",
    "a semaphore",
    "permits",
    _made_to_ask,
    _add_to_view,
    "Release those permits first, or acquire all in one call: acquire(permits=...)",
    _record_in,
    _marker_in,
    value_is_holder=False,
    may_join_multi=True,
    mismatch=("limit", "Give the same limit, or change it for all with set_limit()"),
    short="sem",
)
RWLOCK: Final = Kind(
    "rwlock",
    "a read-write lock",
    "permits",
    read_resource,
    _add_to_view,
    "Release that lease first",
    _record_in,
    _marker_in,
    value_is_holder=False,
    may_join_multi=True,
    mismatch=SEMAPHORE.mismatch,
)
