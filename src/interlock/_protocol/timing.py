"""The times of the protocol, in seconds, and the clock for all of them."""

from __future__ import annotations

import math
import time
from functools import lru_cache, partial
from typing import Final

# now(): seconds on a clock that nobody can set and that runs on while the machine sleeps.
CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
now: Final = partial(time.clock_gettime, CLOCK)

RETRY_FOR: Final = 5.0  # seconds that a server may stay away before a call raises Unavailable
DEFAULT_TTL: Final = 30.0  # seconds: the ttl of a lease, unless its lock or its Interlock's max_ttl says otherwise
MAX_TTL: Final = 30.0  # seconds: the longest ttl of a lease, unless the Interlock says otherwise
TRY_FOR: Final = 1.0  # seconds that a call which does not wait may take, unless the Interlock says otherwise
ANSWER_COUNTS_FOR: Final = 1.5  # seconds of a server's silence after which its last reply no longer counts
SHORT_SILENCE: Final = 0.1  # seconds without an answer that say nothing of a server which has answered lately
HANDOVER_TTL: Final = 3.0  # seconds that a handover lasts without its confirmation, at most (less with a short ttl)
# Seconds for which a client sends again what the server counts once, and remembers for 60 s (an arrival at a barrier):
# the kernel may deliver a copy for 45 s (`_transports.idle`).
COUNTS_ONCE_FOR: Final = 15.0
TOMBSTONE_TTL: Final = 60.0  # seconds after which no late copy of a request is expected
MAX_EXPIRED_GRANTS: Final = 8  # replies in a row whose lease expired on the way, before the client gives up
MIN_RETRY_DELAY: Final = 0.02  # seconds between two tries of one request
MAX_RETRY_DELAY: Final = 0.6  # seconds: the longest pause between two tries of one request
DRIFT: Final = 0.001  # part of a ttl: see margin()
# Seconds that a caller in a quarantine waits for a proof that no lease was lost. Meanwhile the client sends no
# heartbeat for that caller.
PROOF_TIMEOUT: Final = 2.0
TRY_PROOF_TIMEOUT: Final = 0.2  # the same for a caller that does not wait
UNDO_GRACE: Final = 0.2  # seconds that a timed-out caller waits for its undo, so that the caller finds nothing left
STOP_POLL_INTERVAL: Final = 0.2  # seconds between two calls of the `should_stop` of a waiting caller
FOREVER: Final = math.inf


def capped_ttl(ttl: float, max_hold: float, drift: float = DRIFT) -> float:
    """The ttl, in seconds, of a lease that ends with max_hold at the latest."""
    # Two margins: with one, the deadline, which is a margin before the end of the ttl, could be rounded to a time
    # before the end of max_hold.
    return min(ttl, max_hold + 2 * margin(ttl, drift))


@lru_cache(maxsize=256)  # a client asks about the same few ttls all the time
def margin(ttl: float, drift: float = DRIFT) -> float:
    """Seconds by which the deadline is earlier than the end in the server, since clocks run at different speeds.

    The margin is a thousandth of the ttl and at least 1 ms; in a quorum, as in Redlock, a hundredth and 2 ms.
    """
    return max(drift * ttl, 0.001) if drift == DRIFT else drift * ttl + 0.002
