"""The keys of a lock, and what its server side tells people. lock.lua decides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from interlock._protocol.names import keys_of, token_part
from interlock._protocol.types import Resource
from interlock.errors import ConfigError
from interlock.primitives.codes import QUARANTINE, free_text
from interlock.primitives.scripts import load

COMPANIONS = ("record", "queue", "waiters", "gone")
RECORD_VERSION = "1"  # the version that records begin with
RECORD_KINDS = ("lock", "election", "once", "unknown")  # in the records of lock.lua


def lock_resource(name: object, prefix: str, owner: str = "") -> Resource:
    """The lock of this name: its keys, in the order of KEYS in lock.lua. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    return Resource("lock", checked, load("lock"), keys, keys[:2], (owner, "lock"), owner)


def over_lock(kind: str, name: object, prefix: str, companion: str) -> Resource:
    """A kind of lock whose script runs lock.lua over the same keys, and has one more. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, (*COMPANIONS, companion))
    return Resource(kind, checked, load(kind), keys, keys[:2], ("", kind))


def owner_prefix(owner: object) -> str:
    """With what the tokens of this owner begin: readable, and no other owner's. Raises ConfigError."""
    if owner is None:
        return ""
    if not isinstance(owner, str) or not owner:
        raise ConfigError(f"owner must be a word that names the holder in all processes, not {owner!r}")
    return f"{token_part(owner)}~{hashlib.sha256(owner.encode()).hexdigest()[:16]}/"


@dataclass(frozen=True)
class LockState:
    """What the server says of a lock, at one moment."""

    name: str
    holder: str | None
    """The holder's token (host/pid/thread or task/random), or a foreign value; None if the lock is free."""
    fence: int | None
    """The newest fence that was given; None if the server remembers none."""
    remaining: float | None
    """Seconds until the holder's lease, or the quarantine, ends by itself; None if it is free, or held for ever by a
    foreigner."""
    waiters: tuple[str, ...]
    """The tokens of those who wait, in order: the first hundred."""
    waiting: int
    """How many wait."""
    revoked: str | None
    """Why the holder's lease was revoked, if it was and has not ended yet."""
    quarantined: bool = False
    """Whether nobody gets it for `remaining` seconds, since the server may have lost a lease that is alive."""

    @property
    def held(self) -> bool:
        """Whether somebody has it now."""
        return self.holder is not None


def parse_state(name: str, reply: list[Any]) -> LockState:
    """The reply of `inspect`, for people."""
    value, pttl, record, waiting, *waiters = reply
    holder = value.decode(errors="replace")
    fields = record.decode(errors="replace").split(" ", 8)
    quarantined = holder.startswith(QUARANTINE.decode())
    known = fields[0] == RECORD_VERSION and len(fields) > 7 and fields[1] in RECORD_KINDS
    return LockState(
        name=name,
        holder=None if quarantined else holder.removeprefix("!") or None,
        fence=(int(fields[2]) or None) if known else None,
        remaining=pttl / 1000 if pttl >= 0 else None,
        waiters=tuple(waiter.decode(errors="replace") for waiter in waiters),
        waiting=waiting,
        revoked=free_text("".join(fields[8:])) if holder.startswith("!") and not quarantined else None,
        quarantined=quarantined,
    )
