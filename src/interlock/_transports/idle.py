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
    vote. A server whose connection is dead is absent for that round, and its idle connections are dropped then.
(d) The kernel delivers no request later than `DELIVER_WITHIN` after the client has sent it, even if the connection or
    the process has ended by then. A tombstone lasts longer.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import TOMBSTONE_TTL, now

if TYPE_CHECKING:
    from collections.abc import Mapping

IDLE_AFTER: Final = 10.0  # seconds without an answer after which a connection may be dead
FIRST_ANSWER_WITHIN: Final = (
    0.5  # seconds that the answer to a PING on an idle connection may take; less in a short call:
)
CALL_SHARE: Final = 0.25  # the part of the time of a call that it may take
MIN_FIRST_ANSWER: Final = 0.1  # seconds that it may take however short the call is: a shorter silence says nothing
PING_AFTER: Final = 5.0  # seconds without a message after which a connection that receives pushes sends PING
PING_ANSWER_WITHIN: Final = 1.0  # seconds that its answer may take: longer, as no call waits for it
DELIVER_WITHIN: Final = 0.75 * TOMBSTONE_TTL  # seconds for which the kernel tries to deliver what the client has sent

# The kernel asks an idle peer after 30 s, every 5 s, three times: as redis-py 8 does by itself. A NAT that is asked so
# often keeps the connection.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def answer_by(until: float) -> float:
    """By when a PING must be answered that is sent now, in a call that may last until `until`."""
    sent = now()
    return sent + min(FIRST_ANSWER_WITHIN, max(MIN_FIRST_ANSWER, CALL_SHARE * (until - sent)))


def set_socket_options(sock: Any, parameters: Mapping[str, Any]) -> None:
    """Have the kernel ask an idle peer whether it lives, and deliver no request late: rule (d).

    `parameters`: of the user's client, which may say how to ask, or that nobody asks. Does nothing to a unix socket,
    which nobody forgets; nor what a platform lacks.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    options = {"TCP_USER_TIMEOUT": int(DELIVER_WITHIN * 1000)}
    with contextlib.suppress(OSError):  # of a peer that has reset the connection: the next write raises it
        if parameters.get("socket_keepalive", True):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if not hasattr(parameters.get("socket_keepalive_options"), "items"):
                options |= _KEEPALIVE
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
