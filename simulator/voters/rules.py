"""The rule that the model searches, its wrong variants, and the bounds of a search."""

from __future__ import annotations

from typing import NamedTuple

# By what a member decides whether it may vote (`Rule.decides`)
REPLID, STAMP, NOTHING = "the replid that the script reads", "the stamp of the connection", "nothing"
MEMORY, UPTIME = "the memory of the client", "the uptime"
# For how long a member abstains (`Rule.waits`)
LONGEST, END, OWN = "the longest max_ttl seen", "an end, stored by the first request", "the max_ttl of the request"
# What the record of a lock says after a re-grant (`Rule.regrant_fence`)
UNKNOWN, CLAIMED, LOWER = "the fence, not as its own grant", "the fence, as its own grant", "a lower fence"


class Rule(NamedTuple):
    """Who votes. The defaults are the rule of ADR 60; each other value is a wrong rule, which a search must find."""

    decides: str = REPLID
    """What says whether the voter record is about the data of now."""
    missing_waits: bool = True
    """Whether a member without a voter record abstains. False: it votes, and writes the record after that."""
    all_missing_is_new: bool = False
    """Whether members vote at once if none of them has a voter record: that looks like a new quorum."""
    other_waits: bool = True
    """Whether a member abstains whose record names another replid. False: it writes the record anew and votes."""
    fast_path: bool = False
    """Whether a member votes at once if the lock's own record names the stamp, so that the script need not ask."""
    waits: str = LONGEST
    reads_role: bool = True
    """Whether a member that is a replica abstains (and writes nothing)."""
    checks_own_token: bool = True
    """Whether an acquire that finds its own token asks who votes, too: the token may be another member's copy."""
    checks_handover: bool = True
    """Whether a release or a heartbeat asks before it hands over."""
    counts_once: bool = True
    """Whether a client counts a server once for each attempt, under however many addresses it is reached."""
    renewals_need_a_vote: bool = True
    """Whether only a member that votes counts for a renewal. False: each member that has the token counts."""
    fences_by: str = REPLID
    """What says whether a member has forgotten fences: `REPLID` or `STAMP`."""
    regrants: bool = False
    """Whether a renewal gives the token back to an abstaining member that has lost it."""
    regrant_asks_gone: bool = True
    """Whether the script of a re-grant looks for a tombstone."""
    doubtful_regrant: bool = True
    """Whether a release leaves a tombstone for a re-grant that is unanswered."""
    regrant_is_bound: bool = True
    """Whether a re-grant names the abstention that the member reported, and is refused in any other."""
    regrant_fence: str = UNKNOWN
    lost_comes_back: bool = False
    """Whether renewals go on after the deadline, grant where they find nothing, and make the client hold again."""


class Bounds(NamedTuple):
    """The bounds of a search. Times are in ticks."""

    ttls: tuple[int, ...] = (2, 2)
    """For each client: its max_ttl, which is also the ttl of its leases."""
    members: int = 3
    starts: int = 2
    """Attempts of all clients together."""
    renewals: int = 0
    late: int = 0
    """Copies of messages, and messages that arrive after the end of their attempt."""
    faults: int = 1
    kinds: tuple[str, ...] = ()
    """The kinds of faults, see `FAULTS`."""
    tail: int = 1
    """How many of its last writes a member may lose."""
    waits: bool = False
    """Whether a client that finds the lock held waits in the queue."""
    fences: bool = False
    skews: tuple[int, ...] = (0, 0, 0)
    """Ticks by which each member's clock is ahead."""
    longest: int = 0
    """The longest max_ttl in the voter records at the beginning; 0: that of the clients."""
    ticks: int = -1
    """How many ticks pass; -1: any number. With fences it must be bounded, since their distance to the clock grows."""
    used: bool = False
    """Whether each member has a record of the lock at the beginning, of an earlier grant."""


# Faults of one member
EMPTY, OLDER, FLUSH = "restarts empty", "restarts without its last writes", "is emptied by FLUSHALL"
LAGGING, RESEED = "is re-seeded from its own lagging replica", "is re-seeded from"
FOLLOW, SPARE = "becomes a replica of", "is replaced by an empty server that has run for long"
ATTACH, MOVE = "gets its first replica", "is no longer reached: its address leads to"
# Faults of all members at once
ALL_EMPTY, ALL_FLUSH = "all members restart empty", "all members are emptied by FLUSHALL"
# Outside of the promise: see ADR 60
CLOCK, RESUME = "has its clock set forward by a tick", "is resumed from a snapshot"
SPLIT, EVICT = "lives on for A only: its address leads to an empty server for B", "loses the key of the lock"

FAULTS = (EMPTY, OLDER, FLUSH, LAGGING, RESEED, FOLLOW, SPARE, ATTACH, MOVE, ALL_EMPTY, ALL_FLUSH)
OUTSIDE = (CLOCK, RESUME, SPLIT, EVICT)
