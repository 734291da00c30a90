"""The searches: combinations of faults, with bounds that fit into seconds (`SUITE`) or into an hour (`FULL`)."""

from __future__ import annotations

from typing import Final

from .clients import Bounds

SUITE: Final = {
    "late messages and copies": Bounds(ticks=3, faults=1),
    "clocks far apart": Bounds(ticks=4, skews=(0, -5, 5)),
    "three attempts": Bounds(ticks=3, starts=3),
    "renewals": Bounds(ticks=4, renewals=1),
    "asks again": Bounds(ticks=3, asks=1),
    "restart without data": Bounds(ticks=3, restarts=1, skews=(0, 0, 2)),
    "restart without the last write": Bounds(ticks=3, restarts=1, tail=1),
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
    "restart without the last writes": Bounds(ticks=5, restarts=1, tail=2, skews=(0, 0, 2)),
    "restart, renewals": Bounds(ticks=5, restarts=1, renewals=1),
}
