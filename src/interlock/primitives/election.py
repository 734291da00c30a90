"""The keys of an election, and who leads. election.lua decides, over lock.lua."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from interlock.primitives.codes import GRANTED, QUARANTINE
from interlock.primitives.messages import NO_KEY, Raw, Refused, Words
from interlock.primitives.votes import Votes, holder_of

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


class WatchCall(NamedTuple):
    """Asks who leads, and to be notified on this channel when that changes."""

    token: str
    channel: str

    def encode(self) -> Words:
        """See Call."""
        return ("watch", self.token, self.channel)

    @classmethod
    def parse(cls, args: Raw) -> WatchCall:
        """The call that was encoded so."""
        return cls(*args[1:])


class Leading(NamedTuple):
    """Who leads: the value of the lock, b"" if nobody does; until when; and the term."""

    value: bytes
    pttl_ms: int
    term: int

    def encode(self) -> Raw:
        """See Reply."""
        return [GRANTED, *self]


def parse_watch(reply: Raw) -> Leading | Refused:
    """The reply to a watch."""
    return Leading(*reply[1:]) if reply[0] == GRANTED else Refused(*reply)


def merge_watch(votes: Votes[WatchCall, Leading | Refused]) -> Leading | Refused | None:
    """What a quorum says: only a leader whom a majority names, with a term that a majority has agreed on."""
    if votes.pending:
        return None
    seen = [vote for vote in votes.replies if isinstance(vote, Leading)]
    if len(seen) < votes.majority:
        return next(vote for vote in votes.replies if isinstance(vote, Refused))
    leader, number = Counter(holder_of(vote.value) for vote in seen).most_common(1)[0]
    leading = [vote for vote in seen if holder_of(vote.value) == leader]
    term = votes.agreed_fence([vote.term for vote in leading])
    if number < votes.majority or not leader or term is None:
        return Leading(b"", NO_KEY, max(vote.term for vote in seen))
    return Leading(leading[0].value, votes.majority_pttl([vote.pttl_ms for vote in leading]), term)
