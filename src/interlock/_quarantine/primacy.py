"""Whether a server is still the primary, by the word of others: the sentinels, or the other nodes of its cluster.

Theory. While the machine of a primary is paused, a replica takes over. When the old primary goes on, nothing shows it
the failover: it reports that it is the primary, its history of writes is the old one, and its links to the replicas
seem to be alive. For some moments, the old primary grants locks beside the new primary, over each connection that is
still open. So the reply of the server itself is no evidence.

Rules.
(a) The client sends a request over a connection only if the server has answered a request that was sent within the
    last `TRUSTED_FOR` seconds, or if others have named the server as the primary since then. The time of *sending*
    counts: a reply may arrive after a pause that began before the server wrote the reply. So a busy connection costs
    nothing, and a pause that the client does not notice is shorter than a failover.
(b) If the others are silent or disagree, they have named no primary. Then the client does not send the request.
(c) A request that was sent before the server was paused may be answered when the server goes on. That is harmless: a
    lease lasts from before its request was sent, and the new primary grants only after a quarantine of that length.
(d) No rule helps a client whose clock stands still while its machine is paused (docs/failover.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._protocol.timing import now

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._connect.address import Address, NamedPrimary

# Seconds after the sending of a request that was answered, after which the client asks others for the primary.
TRUSTED_FOR: Final = 1.0
NOT_NAMED: Final = "others name another server as the primary"


class Primacy:
    """Whether others name one server as the primary."""

    def __init__(self, address: Address) -> None:
        self.sentinels = address.sentinels
        self.timeout = address.timeout
        # For a node of a cluster: asks other nodes for so many seconds, and returns whether they name it as a primary.
        self.other_nodes: Callable[[float], bool] | None = None
        self._named_primary: NamedPrimary | None = None  # the primary that the sentinels named last
        self._asked_at = 0.0  # when the client asked the sentinels for `_named_primary`

    def is_confirmed(self, named: NamedPrimary, until: float) -> bool:
        """Whether others still name this primary, under the same epoch. Blocks, until `until` at most.

        Another epoch means that another server was the primary in between: then the stamp of the connection is stale.

        All connections to one server share the answer of the sentinels, for `TRUSTED_FOR` seconds. Raises Disconnected
        if the others name no primary.
        """
        started = now()
        timeout = max(0.001, min(self.timeout, until - started))
        if self.other_nodes is not None:
            return self.other_nodes(timeout)
        if self.sentinels is None:
            return True
        if started - self._asked_at > TRUSTED_FOR:
            self._named_primary = self.sentinels.primary(timeout)
            self._asked_at = started
        return self._named_primary == named
