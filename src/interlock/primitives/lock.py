"""The keys of a lock, and what its server side tells people. lock.lua decides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from interlock._core import QUARANTINE, Primitive, free_text
from interlock._names import keys_of, token_part
from interlock._scripts import load
from interlock.errors import ConfigError

COMPANIONS = ("record", "queue", "waiters", "gone")
WIRE = "1"  # the version that records begin with
KINDS = ("lock", "election", "once", "unknown")  # in the records of lock.lua


def lock(name: object, prefix: str, owner: str = "") -> Primitive:
    """The lock of this name: its keys, in the order of KEYS in lock.lua. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    return Primitive("lock", checked, load("lock"), keys, keys[:2], (owner, "lock"), owner)


def over_lock(kind: str, name: object, prefix: str, companion: str) -> Primitive:
    """A kind of lock whose script runs lock.lua over the same keys, and has one more. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, (*COMPANIONS, companion))
    return Primitive(kind, checked, load(kind), keys, keys[:2], ("", kind))


def owned_by(owner: object) -> str:
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


def state(name: str, reply: list[Any]) -> LockState:
    """The reply of `inspect`, for people."""
    value, pttl, record, waiting, *waiters = reply
    holder = value.decode(errors="replace")
    fields = record.decode(errors="replace").split(" ", 8)
    quarantined = holder.startswith(QUARANTINE.decode())
    known = fields[0] == WIRE and len(fields) > 7 and fields[1] in KINDS
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
