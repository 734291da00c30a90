"""The kinds of outages, and how long each part of one may last."""

from __future__ import annotations

from typing import Final

MAX_LAG: Final = 1.0  # seconds by which a replica or a disk may lag
ISOLATION_GRACE: Final = MAX_LAG + 1.0  # seconds for which an isolated primary may still grant leases
MAX_DOWNTIME: Final = 1.0  # seconds without a server, at most
MAX_SKEW: Final = 0.8  # seconds by which two machines' clocks differ, at most
MAX_MOVE: Final = 2.0  # seconds for which an address leads to another server of its quorum, at most
OUTAGE_TIME: Final = 2 * MAX_LAG + MAX_DOWNTIME  # seconds: the longest time from a strike to its effect
MAX_PAUSE: Final = 7.0  # seconds for which a machine stands still, at most: longer than a failover and its quarantine
KINDS: Final = (
    "restart", "restart with old keys", "restart without keys", "failover", "planned failover", "primary isolated",
    "primary paused", "first replica", "spare",
    "emptied", "re-seeded by a member", "re-seeded by its replica", "address moved",  # only of a quorum
)  # fmt: skip
LOSSY: Final = {*KINDS} - {"restart", "first replica"}
