"""The keys of a semaphore or a read-write lock, and what its server side tells people. permits.lua decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._protocol.names import keys_of, positive_int
from interlock._protocol.types import Resource
from interlock.errors import ConfigError
from interlock.primitives.scripts import load

from .lock import RECORD_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.primitives.messages import Raw, Words

COMPANIONS = ("record", "queue", "waiters", "gone", "shares")
ALL_PERMITS: Final = 1_000_000_000  # permits of a read-write lock: what a writer takes; a reader takes one
MAX_PERMITS: Final = 1_000_000  # permits of a semaphore
KINDS: Final = ("semaphore", "rwlock", "unknown")  # in the records of permits.lua


def permits_resource(kind: str, name: object, prefix: str, limit: int, wanted: int = 1, under: str = "") -> Resource:
    """So many of the permits of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    return Resource(
        kind,
        checked,
        load("permits"),
        keys,
        (keys[0], keys[1], keys[5]),
        PermitArgs(kind, str(wanted), str(limit), under),
    )


def semaphore_resource(name: object, prefix: str, limit: object) -> Resource:
    """One permit of this semaphore. Raises ConfigError."""
    return permits_resource("semaphore", name, prefix, _checked_limit(name, limit))


def with_permits(resource: Resource, number: object) -> Resource:
    """So many of a semaphore's permits. Raises ConfigError."""
    wanted = permit_args(resource)
    permits = positive_int(number, "permits", resource, int(wanted.limit))
    return resource._replace(acquire_args=wanted._replace(permits=str(permits)))


def read_resource(name: object, prefix: str) -> Resource:
    """One reader's part of a read-write lock."""
    return permits_resource("rwlock", name, prefix, ALL_PERMITS)


def write_resource(name: object, prefix: str) -> Resource:
    """The writer's part of it: all of it."""
    return permits_resource("rwlock", name, prefix, ALL_PERMITS, ALL_PERMITS)


def beside_own_leases(resource: Resource, leases: list[Any]) -> Resource:
    """What a thread or task that has these leases on a read-write lock asks for. Raises ConfigError."""
    held = [lease for lease in leases if lease._grant.end_reason is None]
    if not held:
        return resource
    wanted = permit_args(resource)
    if wanted.permits != "1":
        writes = any(permit_args(lease._grant.resource).permits != "1" for lease in held)
        raise ConfigError(
            f"{resource}: this thread or task writes already and would wait for itself for ever; it is not reentrant"
            if writes
            else f"{resource}: this thread or task reads, and can't begin to write: two that did would wait for each "
            "other for ever. Release the read lease first, and read anew under the write lease"
        )
    return resource._replace(acquire_args=wanted._replace(own_lease=held[-1].token))


def permit_args(resource: Resource) -> PermitArgs:
    """The own arguments of this one's acquire."""
    args = resource.acquire_args
    assert isinstance(args, PermitArgs)
    return args


def _checked_limit(name: object, limit: object) -> int:
    return positive_int(limit, "its limit", f"semaphore {name!r}", MAX_PERMITS)


class PermitArgs(NamedTuple):
    """The own arguments of an acquire: what the caller wants, and of what."""

    kind: str
    permits: str
    limit: str
    own_lease: str = ""
    """Token of a lease beside which the caller may read; "" is none."""


class LimitCall(NamedTuple):
    """Sets how many permits there are."""

    operation: str
    kind: str
    limit: str

    def encode(self) -> Words:
        """See Call."""
        return ("limit", *self)


class PermitInspect(NamedTuple):
    """What the server knows of a semaphore or a read-write lock."""

    record: bytes
    used: int
    holding: int
    waiting: int
    holders: Sequence[Any]
    """Token, ms left and share of each of the first holders."""
    waiters: Sequence[bytes]
    """Token and permits of each of the first waiters."""
    quarantine_ms: int
    marker: bytes
    """Of the quarantine; b"" is none."""

    @classmethod
    def parse(cls, reply: Raw) -> PermitInspect:
        """The reply that the script returned."""
        return cls(*reply)


@dataclass(frozen=True)
class Holder:
    """One who has permits."""

    token: str
    """Who: host/pid/thread or task/random."""
    permits: int
    fence: int
    remaining: float
    """Seconds until the lease ends by itself."""
    revoked: str | None
    """Why it was revoked, if it was and has not ended yet."""


@dataclass(frozen=True)
class SemaphoreState:
    """What the server says of a semaphore or a read-write lock, at one moment."""

    name: str
    limit: int | None
    """How many permits there are; None if the server remembers nothing of it."""
    used: int
    holders: tuple[Holder, ...]
    """The first hundred, by when their leases end."""
    waiters: tuple[tuple[str, int], ...]
    """Token and permits of those who wait, in order: the first hundred."""
    holding: int
    """How many hold."""
    waiting: int
    """How many wait."""
    fence: int | None
    """The newest fence that was given."""
    quarantine: float = 0.0
    """Seconds for which nobody gets any, since the server may have lost leases that are alive."""

    @property
    def held(self) -> bool:
        """Whether anybody has a permit now."""
        return bool(self.holders)


def parse_state(name: str, reply: Raw) -> SemaphoreState:
    """The reply of `inspect`, for people."""
    record, used, holding, waiting, holders, waiters, quarantine_ms, _ = PermitInspect.parse(reply)
    fields = record.decode(errors="replace").split(" ")
    known = fields[0] == RECORD_VERSION and len(fields) > 6 and fields[1] in KINDS and fields[6].isdigit()
    return SemaphoreState(
        name=name,
        limit=(int(fields[6]) or None) if known else None,
        used=used,
        holders=tuple(_holder(*holders[i : i + 3]) for i in range(0, len(holders), 3)),
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
