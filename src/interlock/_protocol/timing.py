"""How long things take, in seconds: the numbers of the protocol, and the clock that all of them are read on."""

from __future__ import annotations

import math
import time
from typing import Final

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on the clock that nobody sets and that runs on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


RETRY_FOR: Final = 5.0  # seconds that a server may stay away before a call says Unavailable
TRY_FOR: Final = 1.0  # seconds that a call which does not wait may take, unless the Interlock says otherwise
ANSWER_COUNTS_FOR: Final = 1.5  # seconds of a server's silence after which its last answer tells nothing any more
HANDOVER_TTL: Final = 3.0  # seconds that a handover waits for its confirmation, at most (less with a short ttl)
TOMBSTONE_TTL: Final = 60.0  # seconds after which a late copy of a request is no longer expected
MAX_EXPIRED_GRANTS: Final = 8  # answers in a row that come after the lease they grant has lapsed
MIN_RETRY_DELAY: Final = 0.02  # seconds between two tries of one request
MAX_RETRY_DELAY: Final = 0.6
DRIFT: Final = 0.001  # of a ttl: see margin()
# seconds that a caller in a quarantine waits for a proof that nothing was lost; meanwhile no heartbeat is sent for it
PROOF_TIMEOUT: Final = 2.0
UNDO_GRACE: Final = 0.2  # seconds that a caller whose time is over waits for its undo, so that it finds nothing left
STOP_POLL_INTERVAL: Final = 0.2  # seconds between two looks whether a caller that waits has been told to stop
FOREVER: Final = math.inf


def capped_ttl(ttl: float, max_hold: float, drift: float = DRIFT) -> float:
    """The ttl of a lease that ends with max_hold, at the latest."""
    return min(ttl, max_hold + 2 * margin(ttl, drift))


def margin(ttl: float, drift: float = DRIFT) -> float:
    """Seconds by which we stop believing before the server does: clocks run at different speeds.

    With several servers, that is Redlock's: a hundredth and 2 ms.
    """
    return max(drift * ttl, 0.001) if drift == DRIFT else drift * ttl + 0.002
