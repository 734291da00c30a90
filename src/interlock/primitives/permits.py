"""The keys of a semaphore or a read-write lock, and what its server side tells people. permits.lua decides."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._core import GRANTED, Primitive, unobtainable
from interlock._names import keys_of, positive_int
from interlock._scripts import load
from interlock.errors import ConfigError

from .lock import WIRE

if TYPE_CHECKING:
    from interlock._core import Core

COMPANIONS = ("record", "queue", "waiters", "gone", "shares")
EVERYTHING: Final = 1_000_000_000  # permits of a read-write lock: what a writer takes; a reader takes one
MOST: Final = 1_000_000  # permits of a semaphore
KINDS: Final = ("semaphore", "rwlock", "unknown")  # in the records of permits.lua


def permits(kind: str, name: object, prefix: str, limit: int, wanted: int = 1, under: str = "") -> Primitive:
    """So many of the permits of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    return Primitive(
        kind, checked, load("permits"), keys, (keys[0], keys[1], keys[5]), (kind, str(wanted), str(limit), under)
    )


def semaphore(name: object, prefix: str, limit: object) -> Primitive:
    """One permit of this semaphore. Raises ConfigError."""
    return permits("semaphore", name, prefix, _checked_limit(name, limit))


def wanted(primitive: Primitive, number: object) -> Primitive:
    """So many of a semaphore's permits. Raises ConfigError."""
    kind, _, limit, under = primitive.terms
    permits = positive_int(number, "permits", primitive, int(limit))
    return primitive._replace(terms=(kind, str(permits), limit, under))


def reading(name: object, prefix: str) -> Primitive:
    """One reader's part of a read-write lock."""
    return permits("rwlock", name, prefix, EVERYTHING)


def writing(name: object, prefix: str) -> Primitive:
    """The writer's part of it: all of it."""
    return permits("rwlock", name, prefix, EVERYTHING, EVERYTHING)


def beside(primitive: Primitive, leases: list[Any]) -> Primitive:
    """What a thread or task that has these leases on a read-write lock asks for. Raises ConfigError."""
    held = [lease for lease in leases if lease._grant.ended is None]
    if not held:
        return primitive
    kind, number, limit, _ = primitive.terms
    if number != "1":
        writes = any(lease._grant.primitive.terms[1] != "1" for lease in held)
        raise ConfigError(
            f"{primitive}: this thread or task writes already and would wait for itself for ever; it is not reentrant"
            if writes
            else f"{primitive}: this thread or task reads, and can't begin to write: two that did would wait for each "
            "other for ever. Release the read lease first, and read anew under the write lease"
        )
    return primitive._replace(terms=(kind, number, limit, held[-1].token))


async def available(core: Core, primitive: Primitive) -> int:
    """See Semaphore.available."""
    now = state(primitive.name, await core.query(primitive, "inspect", "1"))
    return max(0, (now.limit or int(primitive.terms[2])) - now.used)


async def set_limit(core: Core, primitive: Primitive, limit: object) -> Primitive:
    """See Semaphore.set_limit."""
    number = _checked_limit(primitive.name, limit)
    kind, wants, _, under = primitive.terms
    reply = await core.query(primitive, "limit", f"limit/{secrets.token_hex(16)}", kind, str(number))
    if reply[0] != GRANTED:
        raise unobtainable(primitive, reply[0], reply)
    return primitive._replace(terms=(kind, wants, str(number), under))


def _checked_limit(name: object, limit: object) -> int:
    return positive_int(limit, "its limit", f"semaphore {name!r}", MOST)


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


def state(name: str, reply: list[Any]) -> SemaphoreState:
    """The reply of `inspect`, for people."""
    record, used, holding, waiting, holders, waiters, quarantine_ms, _ = reply
    fields = record.decode(errors="replace").split(" ")
    known = fields[0] == WIRE and len(fields) > 6 and fields[1] in KINDS and fields[6].isdigit()
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
