"""The keys of an election, and its current leader. election.lua decides, over lock.lua."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock.primitives.codes import GRANTED, QUARANTINE
from interlock.primitives.kind_record import Kind
from interlock.primitives.messages import NO_KEY, Raw, Refused, Words
from interlock.primitives.plain import Answer
from interlock.primitives.votes import Votes, holder_of

from .lock import LOCK_RULES, add_to_view, lock_based_resource, marker_in, record_in

if TYPE_CHECKING:
    from interlock._protocol.resource import Resource


def election_resource(name: object, prefix: str) -> Resource:
    """Make the resource of the election of this name. Raises ConfigError."""
    return lock_based_resource("election", name, prefix, "watchers")


@dataclass(frozen=True)
class Leader(Answer):
    """The leader of an election, at one moment."""

    token: str
    """The leader's token: host/pid/thread or task/random, with the label before the host."""
    term: int
    """The number of this leadership, which only grows: the fence of the leader's lease."""
    remaining: float = field(compare=False)
    """Seconds until the leadership ends, unless the leader renews its lease."""


def is_leader(token: bytes) -> bool:
    """Whether this value of the lock names a leader: the marker of a quarantine does not."""
    return bool(token) and not token.startswith(QUARANTINE)


class WatchCall(NamedTuple):
    """Asks for the current leader, and for a push on this channel when the leader changes."""

    token: str
    channel: str

    def encode(self) -> Words:
        """See Call."""
        return ("watch", self.token, self.channel)

    @classmethod
    def parse(cls, args: Raw) -> WatchCall:
        """Parse an encoded call."""
        return cls(*args[1:])


class Leading(NamedTuple):
    """The leader: the value of the lock (b"" if nobody leads), the ms until the lease ends, and the term."""

    value: bytes
    pttl_ms: int
    term: int

    def encode(self) -> Raw:
        """See Reply."""
        return [GRANTED, *self]


def parse_watch(reply: Raw) -> Leading | Refused:
    """Parse the reply to a watch."""
    return Leading(*reply[1:]) if reply[0] == GRANTED else Refused(*reply)


def merge_watch(votes: Votes[WatchCall, Leading | Refused]) -> Leading | Refused | None:
    """Merge the votes of a quorum: the leader whom a majority names, with the term on which a majority agreed."""
    if votes.pending:
        return None
    answers = [vote for vote in votes.replies if isinstance(vote, Leading)]
    if len(answers) < votes.majority:
        return next(vote for vote in votes.replies if isinstance(vote, Refused))
    leader, number = Counter(holder_of(vote.value) for vote in answers).most_common(1)[0]
    leading = [vote for vote in answers if holder_of(vote.value) == leader]
    term = votes.agreed_fence([vote.term for vote in leading])
    if number < votes.majority or not leader or term is None:
        return Leading(b"", NO_KEY, max(vote.term for vote in answers))
    return Leading(leading[0].value, votes.majority_pttl([vote.pttl_ms for vote in leading]), term)


ELECTION: Final = Kind(
    "election",
    "an election",
    "election",
    election_resource,
    add_to_view,
    "Use the lease that you have, or resign first",
    record_in,
    marker_in,
    LOCK_RULES,
    holds_end=False,
    short="elect",
)
