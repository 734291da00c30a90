"""The keys of an election, and who leads. election.lua decides, over lock.lua."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interlock.primitives.codes import QUARANTINE

from .lock import over_lock

if TYPE_CHECKING:
    from interlock._protocol.types import Resource


def election_resource(name: object, prefix: str) -> Resource:
    """The election of this name. Raises ConfigError."""
    return over_lock("election", name, prefix, "watchers")


@dataclass(frozen=True)
class Leader:
    """Who leads, at one moment."""

    token: str
    """Who: host/pid/thread or task/random, with the label before the host."""
    term: int
    """Which reign it is: a number that only grows, the fence of the leader's lease."""
    remaining: float = field(compare=False)
    """Seconds after which it leads no more, unless it renews."""


def is_leader(token: bytes) -> bool:
    """Whether somebody leads: a quarantine is nobody."""
    return bool(token) and not token.startswith(QUARANTINE)
