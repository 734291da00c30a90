"""What the replies of several servers to one message mean together: a small function for each verb, without any I/O.

Theory. Every server decides by itself, with the same script; what a majority of all servers says holds. Each function
gets the message's arguments and the replies so far, and returns the one reply that the core reads, in the form of the
script; or None, as long as a server that has not answered yet could turn it. It is only asked when a majority has
answered.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._client.waiting import MORE_DEAD_WAITERS
from interlock.primitives.codes import (
    BUSY,
    GRANTED,
    NO_EXPIRY,
    NOT_FOUND,
    QUARANTINE,
    QUEUED,
    RETRY,
    REVOKED,
    WRONG_KIND,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Codes that only the quorum's port sees: the fence is to be agreed on; and nobody has a majority, and we a share of it.
UNAGREED, SPLIT = -1, -2


class Votes(NamedTuple):
    """The replies to one message, so far."""

    args: Sequence[Any]
    replies: list[Any]
    pending: int
    """How many servers may still answer."""
    total: int

    @property
    def majority(self) -> int:
        """Of all servers, answering or not."""
        return self.total // 2 + 1

    def majority_pttl(self, pttls: list[int]) -> int:
        """When a majority is over this, if these servers are so after so many ms and the others never."""
        bounded = sorted(pttl for pttl in pttls if pttl >= 0)
        return bounded[min(self.majority, len(bounded)) - 1] if bounded else -1


def _acquire(said: Votes) -> Any:  # noqa: PLR0911 (it is a table of cases)
    majority, votes = said.majority, said.replies
    noted = [vote for vote in votes if vote[0] == BUSY and len(vote) > 5 and vote[5] != b"0"]
    if noted:  # once: it has been run, whatever the others say
        return max(noted, key=lambda vote: vote[2])
    fences = [vote[1] for vote in votes if vote[0] == GRANTED]
    if len(fences) >= majority:
        fence = max(fences)
        if fences.count(fence) >= majority:
            return [GRANTED, fence]
        return None if fences.count(fence) + said.pending >= majority else [UNAGREED, fence]
    others = [vote for vote in votes if vote[0] in {QUEUED, BUSY}]
    barred = [vote for vote in others if vote[1].startswith(QUARANTINE)]
    holders = Counter(vote[1].removeprefix(b"!") for vote in others if vote not in barred)
    first, most = min(holders.items(), key=_rank) if holders else (b"", 0)
    if said.pending and most < majority:
        return None
    pttl = said.majority_pttl([*(0 for _ in fences), *(vote[2] for vote in others)])
    head = int(bool(fences) or any(vote[3] for vote in others))

    def held(among: list[Any]) -> list[Any]:
        code, holder, _, _, *more = among[0]
        return [code, holder, pttl, head, *more]

    if most >= majority:
        return held([vote for vote in others if vote[1].removeprefix(b"!") == first])
    for code in (WRONG_KIND, NO_EXPIRY, NOT_FOUND, REVOKED, RETRY):
        for vote in votes:
            if vote[0] == code:
                return list(vote)
    if len(votes) - len(barred) < majority:
        return held(barred)
    reply = held([vote for vote in others if vote[1].removeprefix(b"!") == first])
    if not fences:
        return reply
    mine = said.args[1].encode() if isinstance(said.args[1], str) else said.args[1]
    return [SPLIT, reply, _rank((mine, len(fences))) < _rank((first, most))]


def _rank(share: tuple[bytes, int]) -> tuple[int, bytes]:
    """Who of those that split the servers among them goes first: who has most of them; all agree on that."""
    return -share[1], share[0]


def _fence(said: Votes) -> list[Any] | None:
    accepted = sum(vote[0] == GRANTED for vote in said.replies)
    if accepted >= said.majority:
        return [GRANTED]
    return None if accepted + said.pending >= said.majority else [NOT_FOUND]


def _release(said: Votes) -> list[Any] | None:
    """It was ours unless a majority says no: a server that lost it, or that was asked twice, does not end a lease."""
    ours = sum(vote[0] for vote in said.replies)
    spare = said.total - said.majority
    if said.pending and ours < said.majority and len(said.replies) - ours <= spare:
        return None
    return [int(ours > 0 and len(said.replies) - ours <= spare), int(any(vote[1] for vote in said.replies))]


def _renew(said: Votes) -> list[Any] | None:
    states = [_renewed_state(column, said) for column in zip(*said.replies, strict=False)]
    return None if None in states else states


def _renewed_state(column: tuple[Any, ...], said: Votes) -> int | bytes | list[Any] | None:
    revoked = [state for state in column if not isinstance(state, int | bytes)]
    lost = column.count(NOT_FOUND) + len(revoked)
    held = column.count(GRANTED)
    if held >= said.majority:
        return GRANTED
    if lost > said.total - said.majority:
        return revoked[0] if revoked else NOT_FOUND
    return None if said.pending else b"only %d of %d servers of the quorum renewed it" % (held, said.total)


def _heartbeat(said: Votes) -> list[Any] | None:
    if said.pending:
        return None
    pttls, heads, *columns = zip(*said.replies, strict=False)
    ours = [head for head in heads if head.decode() in said.args]
    states = [
        GRANTED if GRANTED in column else NOT_FOUND if column.count(NOT_FOUND) >= said.majority else QUEUED
        for column in columns
    ]
    pttl = next((each for each in (MORE_DEAD_WAITERS, -2) if each in pttls), None)
    return [said.majority_pttl(list(pttls)) if pttl is None else pttl, (ours or heads)[0], *states]


def _inspect(said: Votes) -> list[Any] | None:
    if said.pending:
        return None
    if isinstance(said.replies[0][0], list):  # once: the lock's, and the note of the last run
        inner = _inspect(said._replace(replies=[vote[0] for vote in said.replies]))
        return [inner, *max((vote[1:] for vote in said.replies), key=lambda note: note[1])]
    value, number = Counter(_holder_of(vote[0]) for vote in said.replies).most_common(1)[0]
    holding = (
        [vote for vote in said.replies if _holder_of(vote[0]) == value] if value and number >= said.majority else []
    )
    waiting = _longest_queue(said, value if holding else b"")
    if not holding:
        return [b"", -2, max((vote[2] for vote in said.replies), key=_fence_of), *waiting]
    fence = _agreed_fence(said, [_fence_of(vote[2]) for vote in holding])
    record = next(vote[2] for vote in holding if fence is None or _fence_of(vote[2]) == fence)
    if fence is None:
        record = re.sub(rb"^(\S+ \S+) \d+", rb"\1 0", record)
    shown = Counter(vote[0] for vote in holding).most_common(1)[0][0]
    return [shown, said.majority_pttl([vote[1] for vote in holding]), record, *waiting]


def _longest_queue(said: Votes, holder: bytes) -> list[Any]:
    """The longest queue: how many, and who. Where a server is in quarantine the holder still stands in its queue."""
    queues = [[each for each in vote[4:] if each != holder] for vote in said.replies]
    numbers = [vote[3] - (len(vote) - 4 - len(queue)) for vote, queue in zip(said.replies, queues, strict=True)]
    longest = numbers.index(max(numbers))
    return [numbers[longest], *queues[longest]]


def _agreed_fence(said: Votes, fences: list[int]) -> int | None:
    """The fence that a majority has of this holder; None if they have not agreed yet, or who did is not among these."""
    fence, number = Counter(fences).most_common(1)[0]
    return fence if number >= said.majority else None


def _holder_of(value: bytes) -> bytes:
    """Whose it is: one that is revoked at some servers is the same at the others, and so is a quarantine."""
    return QUARANTINE if value.startswith(QUARANTINE) else value.removeprefix(b"!")


def _fence_of(record: bytes) -> int:
    fields = record.split(b" ", 3)
    return int(fields[2]) if len(fields) > 3 and fields[2].isdigit() else -1


def _revoke(said: Votes) -> list[Any] | None:
    if said.pending:
        return None
    done = sum(vote[0] for vote in said.replies)
    return [int(done >= said.majority), said.majority_pttl([vote[1] for vote in said.replies])]


def _watch(said: Votes) -> list[Any] | None:
    if said.pending:
        return None
    seen = [vote for vote in said.replies if vote[0] == GRANTED]
    if len(seen) < said.majority:
        return list(next(vote for vote in said.replies if vote[0] != GRANTED))
    leader, number = Counter(_holder_of(vote[1]) for vote in seen).most_common(1)[0]
    leading = [vote for vote in seen if _holder_of(vote[1]) == leader]
    term = _agreed_fence(said, [vote[3] for vote in leading])
    if number < said.majority or not leader or term is None:
        return [GRANTED, b"", -2, max(vote[3] for vote in seen)]
    return [GRANTED, leading[0][1], said.majority_pttl([vote[2] for vote in leading]), term]


MERGED: Final[dict[str, Callable[[Votes], Any]]] = {
    "acquire": _acquire,
    "fence": _fence,
    "release": _release,
    "renew": _renew,
    "vouch": _heartbeat,
    "inspect": _inspect,
    "revoke": _revoke,
    "watch": _watch,
}
