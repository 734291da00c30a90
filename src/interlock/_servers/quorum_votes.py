"""What the replies of several servers to one call mean together: a small function for each verb, without any I/O.

Theory. Every server decides by itself, with the same script, and the votes of a majority of all servers count. Each
function gets the call and the parsed replies so far. The function returns the one reply that the client reads, or None
while a server that has not answered yet could change that reply. The quorum calls these functions only after a majority
has answered. Rules for one kind stand in its record: see `primitives/kind_record.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._transports.resp import unstamped
from interlock.primitives import registry
from interlock.primitives.audit import NoteCall, NotedCall, NotedReply, merge_note, merge_noted
from interlock.primitives.codes import (
    CROWDED,
    GRANTED,
    NO_EXPIRY,
    NOT_FOUND,
    QUARANTINE,
    QUEUED,
    RETRY,
    REVOKED,
    WRONG_KIND,
)
from interlock.primitives.election import Leading, WatchCall, merge_watch, parse_watch
from interlock.primitives.kind import KindCall, KindReply, merge_kind
from interlock.primitives.kinds import rules_of
from interlock.primitives.lock import FenceCall, FenceReply, LockInspect, RegrantCall, VoterCall, VoterReply
from interlock.primitives.messages import (
    GONE,
    MORE_DEAD_WAITERS,
    NO_KEY,
    RENEWED,
    Abstains,
    AcquireCall,
    AcquireReply,
    Busy,
    Call,
    DoneReply,
    Failed,
    Gone,
    Granted,
    HeartbeatCall,
    HeartbeatReply,
    InspectCall,
    Queued,
    Refused,
    ReleaseCall,
    ReleaseReply,
    RenewCall,
    Renewed,
    RenewReply,
    RenewState,
    Retry,
    RevokeCall,
    Revoked,
    parse_acquire,
)
from interlock.primitives.once import ForgetCall
from interlock.primitives.votes import Votes, holder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.resource import Script
    from interlock._protocol.server import Message
    from interlock.primitives.quorum_rules import QuorumRules

# acquire


class Unagreed(NamedTuple):
    """A majority granted, but with different fences: a majority must store this one."""

    fence: int


class Split(NamedTuple):
    """A split vote: no attempt has a majority, and the caller's attempt has some votes."""

    reply: Queued | Busy
    """The reply for the client if the attempt releases its votes."""
    goes_first: bool
    """Whether the attempt keeps its votes, since all other attempts release theirs."""


class Undecided:
    """A server that has not answered yet could change the outcome."""


Merged = AcquireReply | Unagreed | Split
UNDECIDED: Final = Undecided()


class _Ballot:
    """The votes on one acquire, sorted by what they say."""

    def __init__(self, votes: Votes[AcquireCall, AcquireReply], fences: Sequence[int]) -> None:
        self.votes = votes
        self.fences = fences
        self.blocked = [vote for vote in votes.replies if isinstance(vote, Queued | Busy)]
        self.in_quarantine = [vote for vote in self.blocked if vote.holder.startswith(QUARANTINE)]
        holders = Counter(vote.holder.removeprefix(b"!") for vote in self.blocked if vote not in self.in_quarantine)
        self.leader, self.share = min(holders.items(), key=_rank) if holders else (b"", 0)

    def blocked_reply(self, among: Sequence[Queued | Busy]) -> Queued | Busy:
        """The first of these replies, with the time (pttl) after which a majority of the servers may be free."""
        pttls = [*(0 for _ in self.fences), *(vote.pttl_ms for vote in self.blocked)]
        head = bool(self.fences) or any(vote.is_head for vote in self.blocked)
        return among[0]._replace(pttl_ms=self.votes.majority_pttl(pttls), is_head=head)

    def blocked_by_leader(self) -> Queued | Busy:
        """The reply that names the holder of most servers."""
        return self.blocked_reply([vote for vote in self.blocked if vote.holder.removeprefix(b"!") == self.leader])


def _rank(share: tuple[bytes, int]) -> tuple[int, bytes]:
    """The sort key of a split vote: the attempt with the most votes goes first, and all clients compute the same."""
    return -share[1], share[0]


def _open(ballot: _Ballot) -> Undecided | None:
    return UNDECIDED if ballot.votes.pending and ballot.share < ballot.votes.majority else None


def _held_by_another(ballot: _Ballot) -> Queued | Busy | None:
    return ballot.blocked_by_leader() if ballot.share >= ballot.votes.majority else None


def _refused(ballot: _Ballot) -> Refused | Retry | None:
    by_code = {vote.code: vote for vote in reversed(ballot.votes.replies) if isinstance(vote, Refused)}
    for code in (WRONG_KIND, NO_EXPIRY, NOT_FOUND, REVOKED):
        if code in by_code:
            return by_code[code]
    return next((vote for vote in ballot.votes.replies if isinstance(vote, Retry)), None)


def _in_quarantine(ballot: _Ballot) -> Queued | Busy | None:
    voters = len(ballot.votes.replies) - len(ballot.in_quarantine)
    return ballot.blocked_reply(ballot.in_quarantine) if voters < ballot.votes.majority else None


def _crowded(ballot: _Ballot) -> Refused | None:
    """The refusal of a majority, or of any server if no server names a holder to wait for."""
    crowded = [vote for vote in ballot.votes.replies if isinstance(vote, Refused) and vote.code == CROWDED]
    if len(crowded) >= ballot.votes.majority or (crowded and not ballot.share):
        return max(crowded, key=lambda vote: vote.detail)
    return None


def _without_share(ballot: _Ballot) -> Queued | Busy | None:
    return None if ballot.fences else ballot.blocked_by_leader()


def _split(ballot: _Ballot) -> Split:
    own = ballot.votes.call.token.encode(), len(ballot.fences)
    return Split(ballot.blocked_by_leader(), _rank(own) < _rank((ballot.leader, ballot.share)))


# In this order, unless a majority grants: the first rule that does not return None decides.
_ACQUIRE_RULES: Final[tuple[Callable[[_Ballot], Merged | Undecided | None], ...]] = (
    _open,
    _held_by_another,
    _refused,
    _in_quarantine,
    _crowded,
    _without_share,
    _split,
)


def merge_acquire(votes: Votes[AcquireCall, AcquireReply], rules: QuorumRules) -> Merged | None:
    """The outcome of an acquire."""
    if decisive := rules.decisive_vote(votes.replies):
        return decisive
    fences, majority = [vote.number for vote in votes.replies if isinstance(vote, Granted)], votes.majority
    if len(fences) >= majority:
        fence = max(fences)
        agreed = fences.count(fence)
        if agreed >= majority:
            return Granted(fence)
        return None if agreed + votes.pending >= majority else Unagreed(fence)
    ballot = _Ballot(votes, fences)
    outcome = next(found for rule in _ACQUIRE_RULES if (found := rule(ballot)) is not None)
    return None if isinstance(outcome, Undecided) else outcome


# The other verbs


def _fence(votes: Votes[FenceCall, FenceReply], _rules: QuorumRules) -> FenceReply | None:
    stored = sum(vote.stored for vote in votes.replies)
    if stored >= votes.majority:
        return FenceReply(True)
    return None if stored + votes.pending >= votes.majority else FenceReply(False)


def _release(votes: Votes[ReleaseCall, ReleaseReply], _rules: QuorumRules) -> ReleaseReply | None:
    """The lease was this client's unless a majority says no.

    A minority may say no although the lease was alive: a server lost the lease, or received the release twice.
    """
    ours = sum(vote.was_ours for vote in votes.replies)
    spare = votes.total - votes.majority
    others = len(votes.replies) - ours
    if votes.pending and ours < votes.majority and others <= spare:
        return None
    return ReleaseReply(int(ours > 0 and others <= spare), int(any(vote.ask_again for vote in votes.replies)))


def _renew(votes: Votes[RenewCall, RenewReply], _rules: QuorumRules) -> RenewReply | None:
    states: list[RenewState] = []
    for column in zip(*(vote.states for vote in votes.replies), strict=False):
        state = _renewed_state(votes._replace(replies=column))
        if state is None:
            return None
        states.append(state)
    return RenewReply(states)


def _renewed_state(votes: Votes[RenewCall, Any]) -> RenewState | None:
    revoked = [state for state in votes.replies if isinstance(state, Revoked)]
    lost = sum(isinstance(state, Gone) for state in votes.replies) + len(revoked)
    held = sum(isinstance(state, Renewed) for state in votes.replies)
    if held >= votes.majority:
        return RENEWED
    if lost > votes.total - votes.majority:
        return revoked[0] if revoked else GONE
    if votes.pending:
        return None
    abstaining = sum(isinstance(state, Abstains) for state in votes.replies)
    said = b", and %d abstained" % abstaining if abstaining else b""
    return Failed(b"only %d of %d servers of the quorum renewed it%s" % (held, votes.total, said))


def _heartbeat(votes: Votes[HeartbeatCall, HeartbeatReply], _rules: QuorumRules) -> HeartbeatReply | None:
    if votes.pending:
        return None
    tokens = {token for token, _ in votes.call.waiters}
    heads = [vote.head for vote in votes.replies]
    states = [
        GRANTED
        if GRANTED in column
        else next((state for state in (NOT_FOUND, RETRY) if column.count(state) >= votes.majority), QUEUED)
        for column in zip(*(vote.states for vote in votes.replies), strict=False)
    ]
    pttls = [vote.pttl_ms for vote in votes.replies]
    pttl = next((each for each in (MORE_DEAD_WAITERS, NO_KEY) if each in pttls), None)
    return HeartbeatReply(
        votes.majority_pttl(pttls) if pttl is None else pttl,
        next((head for head in heads if head.decode() in tokens), heads[0]),
        states,
    )


def _inspect(votes: Votes[InspectCall, Any], rules: QuorumRules) -> Any:
    if votes.pending:
        return None
    return rules.merge_inspect(votes.replies, lambda replies: _inspect_lock(votes._replace(replies=replies)))


def _inspect_lock(votes: Votes[InspectCall, LockInspect]) -> LockInspect:
    holder, number = Counter(holder_of(vote.value) for vote in votes.replies).most_common(1)[0]
    if not holder or number < votes.majority:
        newest = max(votes.replies, key=lambda vote: vote.fence)
        return LockInspect(b"", NO_KEY, newest.record, 0, *_longest_queue(votes.replies, b""))
    holding = [vote for vote in votes.replies if holder_of(vote.value) == holder]
    fence = votes.agreed_fence([vote.fence for vote in holding])
    record = next(vote.record for vote in holding if fence is None or vote.fence == fence)
    if fence is None:
        record = re.sub(rb"^(\S+ \S+) \d+", rb"\1 0", record)
    return LockInspect(
        Counter(vote.value for vote in holding).most_common(1)[0][0],
        votes.majority_pttl([vote.pttl_ms for vote in holding]),
        record,
        int(sum(not vote.handed_over for vote in holding) < votes.majority),
        *_longest_queue(votes.replies, holder),
    )


def _longest_queue(replies: Sequence[LockInspect], holder: bytes) -> tuple[int, int, list[bytes]]:
    """The longest queue: how many have left it, the number of its waiters, and their tokens.

    At a server in quarantine the holder itself stands in the queue, so the holder does not count.
    """
    queues = [[each for each in vote.waiters if each != holder] for vote in replies]
    numbers = [vote.waiting - (len(vote.waiters) - len(queue)) for vote, queue in zip(replies, queues, strict=True)]
    longest = numbers.index(max(numbers))
    return replies[longest].departed, numbers[longest], queues[longest]


def _revoke(votes: Votes[RevokeCall, DoneReply], _rules: QuorumRules) -> DoneReply | None:
    if votes.pending:
        return None
    done = sum(vote.done for vote in votes.replies)
    return DoneReply(int(done >= votes.majority), votes.majority_pttl([vote.pttl_ms for vote in votes.replies]))


def _watch(votes: Votes[WatchCall, Leading | Refused], _rules: QuorumRules) -> Leading | Refused | None:
    return merge_watch(votes)


def _kind(votes: Votes[KindCall, KindReply], _rules: QuorumRules) -> KindReply | None:
    return merge_kind(votes)


def _note(votes: Votes[NoteCall, DoneReply], _rules: QuorumRules) -> DoneReply | None:
    return merge_note(votes)


def _noted(votes: Votes[NotedCall, NotedReply], _rules: QuorumRules) -> NotedReply | None:
    return merge_noted(votes)


class Verb(NamedTuple):
    """The functions that parse the calls and replies of one verb, and merge its replies."""

    parse_call: Callable[[Sequence[Any]], Call]
    parse_reply: Callable[[Any], Any]
    merge: Callable[[Votes[Any, Any], QuorumRules], Any] | None
    """None: `QuorumServer` sends each server a call of its own."""
    has_voter_key: bool = False
    """Whether the key of the voter record stands behind the others: for each script that includes message.lua."""


VERBS: Final[dict[str, Verb]] = {
    "acquire": Verb(AcquireCall.parse, parse_acquire, merge_acquire, has_voter_key=True),
    "fence": Verb(FenceCall.parse, FenceReply.parse, _fence, has_voter_key=True),
    "release": Verb(ReleaseCall.parse, ReleaseReply.parse, _release, has_voter_key=True),
    "renew": Verb(RenewCall.parse, RenewReply.parse, _renew, has_voter_key=True),
    "heartbeat": Verb(HeartbeatCall.parse, HeartbeatReply.parse, _heartbeat, has_voter_key=True),
    "inspect": Verb(InspectCall.parse, LockInspect.parse, _inspect, has_voter_key=True),
    "revoke": Verb(RevokeCall.parse, DoneReply.parse, _revoke, has_voter_key=True),
    "watch": Verb(WatchCall.parse, parse_watch, _watch),
    "kind": Verb(KindCall.parse, KindReply.parse, _kind, has_voter_key=True),
    "note": Verb(NoteCall.parse, DoneReply.parse, _note),
    "noted": Verb(NotedCall.parse, NotedReply.parse, _noted),
    "forget": Verb(ForgetCall.parse, DoneReply.parse, None),
    "regrant": Verb(RegrantCall.parse, FenceReply.parse, None, has_voter_key=True),
    "voter": Verb(VoterCall.parse, VoterReply.parse, None, has_voter_key=True),
    "report": Verb(registry.ReportCall.parse, DoneReply.parse, registry.merge_done),
    "leave": Verb(registry.LeaveCall.parse, DoneReply.parse, registry.merge_done),
    "list": Verb(registry.ListCall.parse, registry.ListReply.parse, registry.merge_list),
    "read": Verb(registry.ReadCall.parse, registry.ReadReply.parse, registry.merge_read),
}


class Request:
    """A message, parsed. It is parsed and packed once, although several servers get it."""

    __slots__ = ("_packed", "_subscribed", "call", "message", "verb")

    def __init__(self, message: Message, verb: Verb, call: Any) -> None:
        self.message = message  # its KEYS end with that of the voter record, if the script includes message.lua
        self.verb = verb
        self.call = call  # one of the types that `VERBS` names
        self._packed = b""
        self._subscribed: Request | None = None  # the same request with another subscription

    @classmethod
    def parse(cls, message: Message, voter_key: str) -> Request:
        """The request that this message of the client carries."""
        script, keys, args = message
        verb = VERBS[args[0]]  # type: ignore[index]  # a verb is a str
        return cls((script, (*keys, voter_key), args) if verb.has_voter_key else message, verb, verb.parse_call(args))

    def instead(self, call: Call) -> Request:
        """The request with this call in place of its own. Both are for lock.lua, or neither is."""
        args = call.encode()
        return Request((self.script, self.keys, args), VERBS[args[0]], call)  # type: ignore[index]

    def with_subscription(self, subscribed: str, channel: str) -> Request:
        """The request with this subscription: the same object for all servers that have it."""
        for known in (self, self._subscribed):
            if known is not None and known.call.subscribed == subscribed and known.call.channel == channel:
                return known
        self._subscribed = self.instead(self.call._replace(subscribed=subscribed, channel=channel))
        return self._subscribed

    def drop_copies(self) -> None:
        """Keep no copy for servers: a lease keeps the request of its acquire (see `regrants`)."""
        self._packed, self._subscribed = b"", None

    @property
    def script(self) -> Script:
        """The script that runs it."""
        return self.message[0]

    @property
    def keys(self) -> Sequence[str | bytes]:
        """Its KEYS."""
        return self.message[1]

    @property
    def packed(self) -> bytes:
        """The message as a command that lacks the stamp."""
        if not self._packed:
            self._packed = unstamped(*self.message)
        return self._packed

    def parse_reply(self, reply: Any) -> Any:
        """The parsed reply of a server. An error is returned unchanged."""
        if isinstance(reply, Exception):
            return reply
        parse = rules_of(self.script).parse_inspect if isinstance(self.call, InspectCall) else self.verb.parse_reply
        return parse(reply)

    def merge(self, replies: Sequence[Any], pending: int, total: int) -> Any:
        """The one reply that these parsed replies mean together; None while a missing reply could change it."""
        assert self.verb.merge is not None
        return self.verb.merge(Votes(self.call, replies, pending, total), rules_of(self.script))
