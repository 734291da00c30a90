"""The keys of a lock, and what its server side tells people. lock.lua decides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from interlock._core import Primitive
from interlock._names import keys_of, word
from interlock._scripts import load
from interlock.errors import ConfigError

COMPANIONS = ("record", "queue", "waiters", "gone")
WIRE = "1"  # the version that records begin with


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
    return f"{word(owner)}~{hashlib.sha256(owner.encode()).hexdigest()[:16]}/"


@dataclass(frozen=True)
class State:
    """What the server says of a lock, at one moment."""

    name: str
    holder: str | None
    """The holder's token (host/pid/thread or task/random), or a foreign value; None if the lock is free."""
    fence: int | None
    """The newest fence that was given; None if the server remembers none."""
    remaining: float | None
    """Seconds until the holder's lease ends by itself; None if it is free, or held for ever by a foreigner."""
    waiters: tuple[str, ...]
    """The tokens of those who wait, in order: the first hundred."""
    waiting: int
    """How many wait."""
    revoked: str | None
    """Why the holder's lease was revoked, if it was and has not ended yet."""

    @property
    def held(self) -> bool:
        """Whether somebody has it now."""
        return self.holder is not None


def state(name: str, reply: list[Any]) -> State:
    """The reply of `inspect`, for people."""
    value, pttl, record, waiting, *waiters = reply
    holder = value.decode(errors="replace")
    fields = record.decode(errors="replace").split(" ", 6)
    known = fields[0] == WIRE and len(fields) > 5
    return State(
        name=name,
        holder=holder.removeprefix("!") or None,
        fence=int(fields[2]) if known else None,
        remaining=pttl / 1000 if pttl >= 0 else None,
        waiters=tuple(waiter.decode(errors="replace") for waiter in waiters),
        waiting=waiting,
        revoked=(fields[6] if len(fields) > 6 else "") if holder.startswith("!") else None,
    )
