"""The searches: the right rule within bounds, wrong rules that must be found, and what the rule does not promise."""

from __future__ import annotations

from typing import Final

from .member import GHOST
from .rules import (
    ALL_EMPTY,
    ATTACH,
    CLOCK,
    EMPTY,
    END,
    EVICT,
    FAULTS,
    FOLLOW,
    LAGGING,
    LOWER,
    MEMORY,
    MOVE,
    NOTHING,
    OLDER,
    OWN,
    RESEED,
    RESUME,
    SPARE,
    SPLIT,
    STAMP,
    UPTIME,
    Bounds,
    Rule,
)
from .world import STALE, TWO

RIGHT: Final = Rule(regrants=True)
_WITHOUT: Final = Rule()  # of re-grants, where a search is not about them
_KEPT: Final = (OLDER, RESEED, LAGGING, ATTACH)  # faults that keep the longest max_ttl seen
_LOSSES: Final = (EMPTY, OLDER, RESEED)

World = tuple[Rule, Bounds]

# Each takes seconds.
SUITE: Final[dict[str, World]] = {
    "each fault": (_WITHOUT, Bounds(kinds=FAULTS, renewals=1, tail=2)),
    "two faults": (_WITHOUT, Bounds(kinds=_LOSSES, faults=2)),
    "copies and late messages": (_WITHOUT, Bounds(kinds=FAULTS, late=1)),
    "waiters": (_WITHOUT, Bounds(kinds=FAULTS, waits=True)),
    "two max_ttl": (_WITHOUT, Bounds(ttls=(3, 2), kinds=_KEPT)),
    "clocks apart": (_WITHOUT, Bounds(kinds=_LOSSES, renewals=1, skews=(0, 1, 2))),
    "re-grants": (RIGHT, Bounds(kinds=(EMPTY, RESEED), renewals=1)),
    "late re-grants": (RIGHT, Bounds(kinds=(EMPTY, RESEED), starts=1, renewals=2, late=1, faults=2)),
    "fences": (_WITHOUT, Bounds(kinds=(LAGGING,), fences=True, used=True, ticks=2)),
}

# Each takes minutes.
FULL: Final[dict[str, World]] = {
    "each fault, three attempts": (_WITHOUT, Bounds(kinds=FAULTS, starts=3, renewals=1, tail=2)),
    "two faults, three attempts": (_WITHOUT, Bounds(kinds=FAULTS, faults=2, starts=3)),
    "two faults, renewals": (_WITHOUT, Bounds(kinds=FAULTS, faults=2, renewals=2, tail=2)),
    "three faults": (_WITHOUT, Bounds(kinds=_LOSSES, faults=3, renewals=1)),
    "copies and late messages": (_WITHOUT, Bounds(kinds=FAULTS, late=2)),
    "copies and late messages, three attempts": (_WITHOUT, Bounds(kinds=_LOSSES, starts=3, renewals=1, late=1)),
    "waiters": (_WITHOUT, Bounds(kinds=FAULTS, starts=3, waits=True)),
    "two max_ttl": (_WITHOUT, Bounds(ttls=(3, 2), kinds=_KEPT, starts=3, renewals=1, faults=2)),
    "clocks apart": (_WITHOUT, Bounds(kinds=FAULTS, starts=3, renewals=1, skews=(0, 1, 2))),
    "a ttl of three ticks": (_WITHOUT, Bounds(ttls=(3, 3), kinds=FAULTS, renewals=2, starts=2)),
    "three clients": (_WITHOUT, Bounds(ttls=(2, 2, 2), kinds=FAULTS, starts=3)),
    "five members": (_WITHOUT, Bounds(members=5, kinds=_LOSSES, faults=2)),
    "re-grants": (RIGHT, Bounds(kinds=_LOSSES, renewals=1, late=1)),
    "re-grants, each fault": (RIGHT, Bounds(kinds=FAULTS, renewals=2, late=1)),
    "re-grants, two faults": (RIGHT, Bounds(kinds=_LOSSES, renewals=2, faults=2)),
    "re-grants, three attempts": (RIGHT, Bounds(kinds=_LOSSES, starts=3, renewals=1, faults=2)),
    "fences, two attempts": (_WITHOUT, Bounds(kinds=FAULTS, fences=True, used=True, ticks=3)),
    "fences": (_WITHOUT, Bounds(kinds=FAULTS, starts=3, fences=True, used=True, ticks=3)),
    "fences, clocks apart": (
        _WITHOUT,
        Bounds(kinds=_LOSSES, starts=3, fences=True, used=True, ticks=3, skews=(0, 0, 1)),
    ),
    "fences, re-grants": (RIGHT, Bounds(kinds=(EMPTY, OLDER), fences=True, used=True, ticks=3, renewals=2, faults=2)),
}

_FENCES: Final = Bounds(kinds=(LAGGING,), fences=True, used=True, starts=3, ticks=3)
_DOUBT: Final = Bounds(kinds=(EMPTY,), starts=1, renewals=1, late=1)

# Wrong rules, and the promise that each of them breaks.
PLANTS: Final[dict[str, tuple[str, Rule, Bounds]]] = {
    "the replid is not compared": (TWO, Rule(decides=NOTHING), Bounds(kinds=(LAGGING,))),
    "the stamp in place of the replid that the script reads": (TWO, Rule(decides=STAMP), Bounds(kinds=(LAGGING,))),
    "the uptime decides": (TWO, Rule(decides=UPTIME), Bounds(kinds=(SPARE,))),
    "the memory of clients decides": (TWO, Rule(decides=MEMORY), Bounds(kinds=(RESEED,))),
    "members that are all new vote at once": (TWO, Rule(all_missing_is_new=True), Bounds(kinds=(ALL_EMPTY,))),
    "the record is written after the vote": (TWO, Rule(missing_waits=False), Bounds(kinds=(EMPTY,))),
    "a record of another replid is replaced, and the member votes": (
        TWO,
        Rule(other_waits=False),
        Bounds(kinds=(OLDER,)),
    ),
    "a fast path by the record of the lock": (TWO, Rule(fast_path=True), Bounds(kinds=(LAGGING,), used=True)),
    "an end in place of since": (TWO, Rule(waits=END), Bounds(ttls=(3, 2), kinds=(OLDER,), starts=3)),
    "a longer max_ttl is ignored": (TWO, Rule(waits=OWN), Bounds(ttls=(3, 2), kinds=(OLDER,), starts=3)),
    "a replica votes": (TWO, Rule(reads_role=False), Bounds(kinds=(FOLLOW,))),
    "an acquire that finds its own token asks nothing": (TWO, Rule(checks_own_token=False), Bounds(kinds=(RESEED,))),
    "duplicates are looked at once only": (TWO, Rule(counts_once=False), Bounds(kinds=(MOVE,))),
    "a renewal counts where the member abstains": (
        TWO,
        Rule(renewals_need_a_vote=False),
        Bounds(kinds=(RESEED,), renewals=1),
    ),
    "a re-grant counts where the member abstains": (
        TWO,
        Rule(regrants=True, renewals_need_a_vote=False),
        Bounds(kinds=(EMPTY,), renewals=2),
    ),
    "a lease comes back after its loss": (TWO, Rule(lost_comes_back=True), Bounds(kinds=(EMPTY,), renewals=1)),
    "a lease comes back after its loss, without a fault": (
        STALE,
        Rule(lost_comes_back=True),
        Bounds(faults=0, renewals=1, fences=True, ticks=3),
    ),
    "a re-grant asks for no tombstone": (GHOST, Rule(regrants=True, regrant_asks_gone=False), _DOUBT),
    "a release leaves no tombstone for a re-grant": (GHOST, Rule(regrants=True, doubtful_regrant=False), _DOUBT),
    "a re-grant names no abstention": (
        GHOST,
        Rule(regrants=True, regrant_is_bound=False),
        Bounds(kinds=(EMPTY,), starts=1, renewals=1, late=1, faults=2),
    ),
    "the stamp says whether fences are forgotten": (STALE, Rule(fences_by=STAMP), _FENCES),
}

# Found by the scripted rolling restart: it takes three faults and sixty events.
LOWER_FENCE: Final = Rule(regrants=True, regrant_fence=LOWER)

# What the rule does not promise: so these assumptions are needed, and the search would tell.
OUTSIDE: Final[dict[str, World]] = {
    "a clock that is set forward": (RIGHT, Bounds(kinds=(CLOCK,))),
    "a machine that is resumed from a snapshot": (RIGHT, Bounds(kinds=(RESUME,))),
    "the lock's key is evicted, or deleted by hand": (RIGHT, Bounds(kinds=(EVICT,))),
    "an address leads elsewhere, and some clients still reach the member": (RIGHT, Bounds(kinds=(SPLIT,), starts=3)),
    "two max_ttl, and the longer one is lost with the record": (
        RIGHT,
        Bounds(ttls=(3, 2), kinds=(EMPTY,), starts=3),
    ),
}
