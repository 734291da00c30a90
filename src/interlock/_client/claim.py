"""The claim: what the server may know under one token of this client. Its states, and the events that change these.

Theory (ADR 61). A claim lives from the making of its token until the server knows nothing of that token any more. The
state of a claim says two things: what the server may have under the token, and who will give that back. Only an event
of the table changes the state: a reply, a push, a decision of the caller, the end of the client, or time. An event that
the table lacks in some state can't happen there.

The table is about claims alone. Beside it stand
  doubt          a copy of an acquire may be on its way. Doubt only grows, and changes no state; the release of a claim
                 in doubt leaves a tombstone.
  open requests  to extend, to execute, to reserve, of which some have no reply. A lease does not pass on meanwhile.
  certainty      whether a caller may rely on a lease now. The clock and the deadline say that at each look.
  callers        who waits, until when, and whose section a lease is in. One claim serves many callers of a cohort.

Rules.
(a) A message may come late, and then it changes nothing: see `LATE`. So no reply revives a lease that the client has
    ended.
(b) From QUEUED, OFFERED, HELD and PASSING each way leads through RETURNING or EXPIRING. A claim in ASKING needs no
    release if a reply says that the server has nothing, and no copy of a request is on its way.
(c) A finalizer steps a claim without a lock and without I/O. A worker carries out what follows.
(d) A caller steps a claim only while the claim carries the caller's grant.

No code writes a state yet. `states` reads where a claim stands today, and the simulator compares that with the events
(S15). Today's places do not tell all states apart: `states` names each state that a claim may be in.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from interlock._client.lease_ends import DROPPED
from interlock._protocol.snapshot import snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock._client.grant import Attempt
    from interlock._client.lease_ends import LeaseEnds


class State(Enum):
    """What the server may have under a token, and who gives that back."""

    NEW = "nothing: the server has never heard of the token"
    ASKING = "nothing, a place or a grant, as far as requests without a reply go; its caller asks"
    QUEUED = "its place in the queue, or its arrival at a barrier; its caller waits, or asks again"
    OFFERED = "a grant on which the client does not rely; its caller asks again, or gives up"
    WATCHING = "a note that an observer wants news, which runs out by itself; the observer looks again and again"
    HELD = "the lease; a caller is in its section, or has the Lease"
    PASSING = "the lease, which has passed to a caller whose section has not begun"
    RETURNING = "anything; a release is owed, and is sent until the server has answered"
    EXPIRING = "the rest of a lease, which nobody releases, since its caller may still be at work"
    GONE = "nothing any more"


class Event(Enum):
    """What may happen to a claim."""

    # Of its caller, who has no lease yet
    ASKS = "its caller is about to send an acquire, for the first time or again"
    ARRIVES = "the same at a barrier, of a caller that does not wait: the server counts it all the same"
    WATCHES = "an observer of an election begins to look"
    HANDS_ON = "its caller leaves, and the next caller of the cohort goes on with it"
    NOTHING_LEFT = "its caller ends without a lease, and the server has nothing of it"
    GIVES_UP = "its caller ends without a lease: out of time, refused, cancelled or interrupted"
    # Replies to an acquire
    SAYS_QUEUED = "reply: it stands in the queue"
    SAYS_BUSY = "reply: another one has the resource, and this caller may not wait"
    SAYS_RETRY = "reply: ask again at once"
    SAYS_REFUSED = "reply: this can never succeed"
    GRANTED = "reply: granted, and the client relies on the lease from now on"
    GRANTED_IN_VAIN = "reply: granted, and too late, revoked before, superseded by its owner, or the client is closed"
    PASSED = "reply: the latch is open, the barrier is full"
    IS_SPENT = "reply: its token is spent, as after a split vote; its caller goes on under another one"
    # Hints
    PUSH_GRANTED = "push: the server has handed over to it"
    HEARTBEAT = "reply: what became of a waiter"
    # Within its cohort
    PASSES_ON = "the section ends, and the lease passes to the next caller"
    RESERVED = "reply: fences for the sections to come"
    BEGINS = "the section of the caller begins to which the lease has passed"
    # While it is held
    RENEWED = "reply: the lease lasts longer, or as long as before"
    NOT_RENEWED = "a renewal failed, or its reply does not count"
    # How a lease ends
    DEADLINE = "the client's clock has reached the deadline, or max_hold"
    SAYS_GONE = "reply to any request about the lease: the server has no such lease"
    REVOKED = "push or reply: somebody has revoked it"
    TAKEN_OVER = "another attempt of the same owner has it by now"
    RELEASES = "the holder releases it, or leaves its section, waiting for the reply or not"
    GIVES_BACK = "nobody will use the lease: cancelled, interrupted, or what another client has left"
    LETS_GO = "the holder releases a lease that has ended, or leaves its section"
    COLLECTED = "a finalizer: its `with` is garbage, or nobody wakes for it"
    DROPPED = "a finalizer: its Lease is garbage, and the code that dropped it may still be at work"
    # Replies to a release
    NO_REPLY = "a request ended without a reply: an acquire is in doubt from now on, a release is sent again"
    ASK_AGAIN = "reply: released, and the server has more dead waiters to drop"
    ANSWERED = "reply: released"
    WAS_NOT_OURS = "reply to a release for which no `with` waited: the lease had ended before, which is a loss"
    # Of time, and of the client
    RUNS_OUT = "the server must have forgotten it: its ttl is over"
    CLOSES = "the client closes, or the process exits: one release of each claim is sent"
    LOOP_ENDS = "the event loop ended without a close: the next client gives back what no section holds"
    FORKS = "the process is a child now: all of it belongs to the parent"


S, E = State, Event

LATE: Final = frozenset({E.PUSH_GRANTED, E.HEARTBEAT, E.REVOKED, E.RENEWED, E.NOT_RENEWED, E.RESERVED, E.NO_REPLY})
"""These may come at any time, and so in any state: in a state whose row lacks them they change nothing."""

_ENDS_OF_ASKER: Final = {E.GIVES_UP: S.RETURNING, E.CLOSES: S.RETURNING, E.LOOP_ENDS: S.RETURNING, E.FORKS: S.GONE}
_REPLIES: Final = {
    E.SAYS_QUEUED: S.QUEUED,
    E.GRANTED: S.HELD,
    E.GRANTED_IN_VAIN: S.OFFERED,
    E.IS_SPENT: S.RETURNING,
}
_ENDS_OF_HELD: Final = {
    E.GIVES_BACK: S.RETURNING,
    E.COLLECTED: S.RETURNING,
    E.CLOSES: S.RETURNING,
    E.LOOP_ENDS: S.HELD,  # the exit of the process releases it
    E.FORKS: S.GONE,
}

TABLE: Final[Mapping[State, Mapping[Event, State]]] = {
    S.NEW: {
        E.ASKS: S.ASKING,
        E.ARRIVES: S.QUEUED,
        E.WATCHES: S.WATCHING,
        E.HANDS_ON: S.NEW,
        E.NOTHING_LEFT: S.GONE,
        E.GIVES_UP: S.RETURNING,  # a cancellation may come before anybody has noted that a request was sent
        E.GIVES_BACK: S.RETURNING,  # what another client has left: see LOOP_ENDS
        E.CLOSES: S.GONE,
        E.LOOP_ENDS: S.GONE,
        E.FORKS: S.GONE,
    },
    S.ASKING: {
        **_REPLIES,
        E.PASSED: S.GONE,
        E.ASKS: S.ASKING,
        E.SAYS_BUSY: S.ASKING,
        E.SAYS_RETRY: S.ASKING,
        E.SAYS_REFUSED: S.ASKING,
        E.HANDS_ON: S.ASKING,
        E.PUSH_GRANTED: S.ASKING,
        E.REVOKED: S.ASKING,  # noted, so that the grant will be in vain
        E.NO_REPLY: S.ASKING,
        E.NOTHING_LEFT: S.GONE,
        **_ENDS_OF_ASKER,
    },
    S.QUEUED: {
        **_REPLIES,
        E.PASSED: S.GONE,
        E.ASKS: S.QUEUED,
        E.SAYS_RETRY: S.QUEUED,
        E.SAYS_REFUSED: S.QUEUED,
        E.HANDS_ON: S.QUEUED,
        E.PUSH_GRANTED: S.QUEUED,
        E.HEARTBEAT: S.QUEUED,
        E.REVOKED: S.QUEUED,  # noted, so that the grant will be in vain
        E.NO_REPLY: S.QUEUED,
        **_ENDS_OF_ASKER,
    },
    S.OFFERED: {
        **_REPLIES,
        E.ASKS: S.OFFERED,
        E.SAYS_BUSY: S.OFFERED,
        E.SAYS_RETRY: S.OFFERED,
        E.SAYS_REFUSED: S.OFFERED,
        E.HANDS_ON: S.OFFERED,
        E.PUSH_GRANTED: S.OFFERED,
        E.HEARTBEAT: S.OFFERED,
        E.REVOKED: S.OFFERED,  # noted, so that the grant will be in vain
        E.NO_REPLY: S.OFFERED,
        **_ENDS_OF_ASKER,
    },
    S.WATCHING: {
        E.PUSH_GRANTED: S.WATCHING,
        E.NOTHING_LEFT: S.GONE,
        E.CLOSES: S.RETURNING,
        E.LOOP_ENDS: S.RETURNING,
        E.FORKS: S.GONE,
    },
    S.HELD: {
        E.PASSES_ON: S.PASSING,
        E.RENEWED: S.HELD,
        E.NOT_RENEWED: S.HELD,
        E.DEADLINE: S.EXPIRING,
        E.SAYS_GONE: S.EXPIRING,
        E.REVOKED: S.EXPIRING,
        E.TAKEN_OVER: S.EXPIRING,
        E.DROPPED: S.EXPIRING,
        E.RELEASES: S.RETURNING,
        **_ENDS_OF_HELD,
    },
    S.PASSING: {
        E.BEGINS: S.HELD,
        E.RESERVED: S.PASSING,
        E.NO_REPLY: S.PASSING,
        E.RENEWED: S.PASSING,
        E.NOT_RENEWED: S.PASSING,
        E.DEADLINE: S.RETURNING,  # nobody is at work under it
        E.SAYS_GONE: S.RETURNING,
        E.REVOKED: S.RETURNING,
        **_ENDS_OF_HELD,
        E.LOOP_ENDS: S.PASSING,
    },
    S.RETURNING: {
        E.GIVES_BACK: S.RETURNING,
        E.LETS_GO: S.RETURNING,
        E.COLLECTED: S.RETURNING,
        E.NO_REPLY: S.RETURNING,
        E.ASK_AGAIN: S.RETURNING,
        E.ANSWERED: S.GONE,
        E.WAS_NOT_OURS: S.GONE,
        E.RUNS_OUT: S.GONE,
        E.CLOSES: S.RETURNING,
        E.LOOP_ENDS: S.RETURNING,
        E.FORKS: S.GONE,
    },
    S.EXPIRING: {
        E.LETS_GO: S.RETURNING,  # after a revocation the lock's key still has "!<token>"
        E.COLLECTED: S.RETURNING,
        E.RUNS_OUT: S.GONE,
        E.CLOSES: S.RETURNING,
        E.LOOP_ENDS: S.EXPIRING,
        E.FORKS: S.GONE,
    },
    S.GONE: {
        E.LETS_GO: S.RETURNING,  # nothing can be left, and each release() of a lost lease is sent
        E.COLLECTED: S.RETURNING,
        E.CLOSES: S.GONE,
        E.LOOP_ENDS: S.GONE,
        E.FORKS: S.GONE,
    },
}


def state_after(state: State, event: Event) -> State | None:
    """The state that follows; None if the table lacks this event in this state."""
    return TABLE[state].get(event, state if event in LATE else None)


# What today's places say

_NEW: Final = frozenset({S.NEW})
_HELD: Final = frozenset({S.HELD})
_PASSING: Final = frozenset({S.PASSING})
_RETURNING: Final = frozenset({S.RETURNING})
_EXPIRING: Final = frozenset({S.EXPIRING})
_DROPPED: Final = frozenset({S.EXPIRING, S.GONE})  # a claim stays there when its release was answered, too


def states(ends: LeaseEnds, now: float) -> dict[str, frozenset[State]]:
    """The states in which each claim of a client may be, by token; a claim that stands nowhere is NEW or GONE.

    `ends` is that of the client. A claim that moves stands in two places meanwhile: the later one counts.
    """
    found = {attempt.token: _DROPPED for until, attempt in snapshot(ends.dropped) if until >= now}
    found.update(_asking(ends))
    for hold in ends.book.all():
        if (grant := hold.live_grant) is not None:
            found[hold.token] = _PASSING if grant.lease is None else _HELD
    for grant, why in snapshot(ends.orphans):
        if not grant.has_passed:
            found[grant.token] = _EXPIRING if why == DROPPED else _RETURNING
    found.update(dict.fromkeys(list(ends.undo.owed), _RETURNING))
    return found


def _asking(ends: LeaseEnds) -> dict[str, frozenset[State]]:
    """The states of the claims whose callers wait or ask."""
    drivers, found = dict[str, "Attempt"](), dict[str, frozenset[State]]()
    for cohort in list(ends.cohorts.by_key.values()):
        found.update((attempt.token, _NEW) for attempt in list(cohort.waiting))
        if (driver := cohort.driver) is not None:
            drivers[driver.token], found[driver.token] = driver, _NEW
    for token, attempt in list(ends.waiters.registered.items()):
        # It may be the attempt of a driver that has left: then the next driver has this token (`Attempt.go_on_for`).
        found[token] = _states_of(drivers.get(token, attempt))
    return found


def _states_of(attempt: Attempt) -> frozenset[State]:
    """The states of a claim for which this attempt has asked. The attempt takes neither flag back."""
    flags = ((attempt.is_queued, S.QUEUED), (attempt.was_granted, S.OFFERED))
    found = frozenset(state for is_true, state in flags if is_true)
    return found or frozenset({S.ASKING} if attempt.make_lease is not None else {S.ASKING, S.WATCHING})
