"""The searches: combinations of faults, with bounds that fit into seconds (`SUITE`) or into an hour (`FULL`).

These two search the quorum's protocol. `RESTARTS` and `COHORT` search orders of real processes, and so do their
`FULL_` forms.
"""

from __future__ import annotations

from typing import Final

from . import world
from .clients import Bounds
from .column import COPIES, EMPTY, KEEPS, LAGS
from .process import RELEASES, Shape

SUITE: Final = {
    "late messages and copies": Bounds(ticks=3, faults=1),
    "clocks far apart": Bounds(ticks=4, skews=(0, -5, 5)),
    "three attempts": Bounds(ticks=3, starts=3),
    "renewals": Bounds(ticks=4, renewals=1),
    "asks again": Bounds(ticks=3, asks=1),
    "restart without data": Bounds(ticks=3, restarts=1, skews=(0, 0, 2)),
    "restart without the last write": Bounds(ticks=3, restarts=1, ways=(LAGS,), tail=1),
    "restart with its data": Bounds(ticks=3, restarts=1, ways=(KEEPS,)),
    "re-seeded from another": Bounds(ticks=3, restarts=1, ways=(COPIES,)),
    "re-seeded from another, asks again": Bounds(ticks=1, restarts=1, ways=(COPIES,), asks=1),
    "restart without data, re-grants": Bounds(ticks=3, restarts=1, renewals=1),
    "a re-grant that comes late": Bounds(ticks=1, starts=1, restarts=2, renewals=1, faults=1),
}
FULL: Final = {
    "late messages and copies": Bounds(ticks=5, faults=2),
    "late messages, clocks far apart": Bounds(ticks=5, faults=1, skews=(0, -5, 5)),
    "three attempts": Bounds(ticks=4, starts=3, skews=(0, 0, 2)),
    "three attempts, late messages": Bounds(ticks=3, starts=3, faults=1),
    "renewals": Bounds(ticks=6, renewals=2, faults=1),
    "asks again": Bounds(ticks=4, asks=2),
    "asks again, late messages": Bounds(ticks=3, asks=1, faults=1),
    "restart without data": Bounds(ticks=5, restarts=1, faults=1, skews=(0, 0, 2)),
    "restart without data, three attempts": Bounds(ticks=4, starts=3, restarts=1),
    "two restarts without data": Bounds(ticks=5, restarts=2),
    "restart without the last writes": Bounds(ticks=5, restarts=1, ways=(LAGS,), tail=2, skews=(0, 0, 2)),
    "restart without data, re-grants": Bounds(ticks=5, restarts=1, renewals=1),
    "restart without data, re-grants, late messages": Bounds(ticks=3, restarts=1, renewals=1, faults=1),
    "two restarts without data, re-grants": Bounds(ticks=3, restarts=2, renewals=1, faults=1),
    "restart with its data, renewals": Bounds(ticks=4, restarts=1, ways=(KEEPS,), renewals=1),
    "re-seeded from another, renewals": Bounds(ticks=4, restarts=1, ways=(COPIES,), renewals=1, skews=(0, 0, 2)),
    "re-seeded from another, asks again": Bounds(ticks=3, restarts=1, ways=(COPIES,), asks=1),
    "anything twice": Bounds(ticks=4, restarts=2, ways=(EMPTY, LAGS, KEEPS, COPIES), tail=1),
}

_TRIES: Final = Shape()
_WAITS: Final = Shape(timeout=None)
_FIXED: Final = Shape(renews=False)
_COHORT: Final = Shape(threads=2, timeout=None, joins=True)
_LISTENS: Final = _COHORT._replace(listens=True)
_ORDERS: Final = world.Bounds

RESTARTS: Final = {
    "a slow message": _ORDERS(_TRIES, ticks=2, starts=2, slow=1),
    "a stopped process": _ORDERS(_TRIES, ticks=4, starts=2, stops=1),
    "a cancellation": _ORDERS(_TRIES, ticks=2, starts=2, slow=1, cancels=1),
    "a waiter": _ORDERS(_WAITS, ticks=3, starts=2, cancels=1),
    "a restart": _ORDERS(_TRIES, ticks=2, starts=2, restarts=1, stops=1),
}
FULL_RESTARTS: Final = {
    "two slow messages": _ORDERS(_TRIES, ticks=4, starts=2, slow=2),
    "three acquires, a slow message": _ORDERS(_TRIES, ticks=4, starts=3, slow=1, stops=1),
    "three fixed leases, two slow messages": _ORDERS(_FIXED, ticks=4, starts=3, slow=2),
    "a cancellation, a slow message": _ORDERS(_TRIES, ticks=3, starts=3, slow=1, cancels=1),
    "a waiter, a cancellation, a slow message": _ORDERS(_WAITS, ticks=3, starts=2, slow=1, cancels=1),
    "waiters whose time ends": _ORDERS(_WAITS._replace(timeout=1.5), ticks=4, starts=3, stops=1),
    "a waiter, a slow message": _ORDERS(_WAITS, ticks=4, starts=2, slow=1, stops=1),
    "a restart, leases that are renewed": _ORDERS(_TRIES, ticks=4, starts=2, restarts=1),
    "a restart, a slow message, a stop": _ORDERS(_TRIES, ticks=4, starts=2, restarts=1, slow=1, stops=1),
    "a restart, a stop, another try": _ORDERS(_TRIES, ticks=3, starts=3, restarts=1, stops=1),
    "two restarts": _ORDERS(_TRIES, ticks=4, starts=2, restarts=2),
    "a restart, a waiter": _ORDERS(_WAITS, ticks=4, starts=2, restarts=1, stops=1),
    "a failover": _ORDERS(_TRIES, ticks=4, starts=3, restarts=1, ways=world.FAILOVERS),
    "a failover, a waiter": _ORDERS(_WAITS, ticks=4, starts=2, restarts=1, stops=1, ways=world.FAILOVERS),
    "a failover, a slow message": _ORDERS(_TRIES, ticks=4, starts=2, restarts=1, slow=1, ways=world.FAILOVERS),
    "a restart, three processes": _ORDERS(_TRIES, processes=3, ticks=4, starts=3, restarts=1),
}
COHORT: Final = {
    "a slow message": _ORDERS(_COHORT, processes=1, ticks=2, starts=2, slow=1),
    "a command without a reply": _ORDERS(_COHORT, processes=1, ticks=2, starts=2, slow=1, executes=1),
    "a stopped process, release()": _ORDERS(_COHORT, processes=1, ticks=4, starts=2, stops=1, end=RELEASES),
    "a cancellation": _ORDERS(_COHORT, processes=1, ticks=2, starts=3, cancels=1),
    "a revocation": _ORDERS(_LISTENS, processes=1, ticks=3, starts=3, revocations=1),
}
FULL_COHORT: Final = {
    "a lease passes": _ORDERS(_COHORT, processes=1, ticks=4, starts=4),
    "two slow messages": _ORDERS(_COHORT, processes=1, ticks=3, starts=3, slow=2),
    "a cancellation, a slow message": _ORDERS(_COHORT, processes=1, ticks=3, starts=3, cancels=1, slow=1),
    "waiters whose time ends": _ORDERS(_COHORT._replace(timeout=1.5), processes=1, ticks=3, starts=3, slow=1),
    "three threads": _ORDERS(_COHORT._replace(threads=3), processes=1, ticks=3, starts=4, slow=1),
    "a command and an extension": _ORDERS(_COHORT, processes=1, ticks=3, starts=3, slow=1, executes=1, extends=1),
    "stops, release()": _ORDERS(_COHORT, processes=1, ticks=5, starts=3, stops=2, slow=1, end=RELEASES),
    "a revocation": _ORDERS(_LISTENS, processes=1, ticks=3, starts=3, revocations=1, slow=1, stops=1),
    "another process": _ORDERS(_LISTENS, processes=2, ticks=3, starts=3, slow=1),
    "a restart": _ORDERS(_COHORT, processes=2, ticks=4, starts=3, restarts=1),
}
