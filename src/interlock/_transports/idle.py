"""A connection that was idle may be dead without a sign: who asks whether it lives, when, and for how long.

Theory. A firewall, a NAT or a load balancer forgets a connection over which nothing has passed for a while, and neither
end learns of that. What the client then sends gets no reply, and a read that waits for one takes all the time that a
call has for its tries, while the server is well. So over a connection that was idle the client first sends a PING, and
waits for its answer for a moment only. A PING that is lost changes nothing, so nothing is in doubt. The request itself,
which may be one that is sent once, goes over a connection that has just answered.

Rules.
(a) A connection that was idle for `IDLE_AFTER` carries no request before the server has answered a PING there. If the
    server does not, the client drops all connections that were idle for as long, and opens a new one.
(b) A connection on which the client listens for pushes asks by itself: after `PING_AFTER` without a message it sends a
    PING, and ends if no answer arrives within `PING_ANSWER_WITHIN`. So most of its deaths cost no call anything.
(c) A vote of a quorum does not wait for a PING: the client would ask one server after another, in the time of one
    vote. A server whose connection is dead is absent for that round. The client then looks for it by rule (a).
"""

from __future__ import annotations

from typing import Final

from interlock._protocol.timing import now

IDLE_AFTER: Final = 10.0  # seconds without an answer after which a connection may be dead
FIRST_ANSWER_WITHIN: Final = (
    0.5  # seconds that the answer to a PING on an idle connection may take; less in a short call:
)
CALL_SHARE: Final = 0.25  # the part of the time of a call that it may take
MIN_FIRST_ANSWER: Final = 0.1  # seconds that it may take however short the call is: a shorter silence says nothing
PING_AFTER: Final = 5.0  # seconds without a message after which a connection that receives pushes sends PING
PING_ANSWER_WITHIN: Final = 1.0  # seconds that its answer may take: longer, as no call waits for it


def answer_by(until: float) -> float:
    """By when a PING must be answered that is sent now, in a call that may last until `until`."""
    sent = now()
    return sent + min(FIRST_ANSWER_WITHIN, max(MIN_FIRST_ANSWER, CALL_SHARE * (until - sent)))
