"""Whether a server is still the primary, by the word of others: the sentinels, or the other nodes of its cluster.

Theory. A primary whose machine was paused is replaced meanwhile. When it goes on, it knows nothing of that: it says
that it is the primary, its history is the old one, its links to the replicas seem to be alive. For some moments it
grants, beside the new primary, to whoever still has a connection to it. So the server itself is no witness.

Rules.
 1. A request goes out over a connection only if its server has answered a request that was sent within the last
    `TRUSTED_FOR` seconds, or if others have named the server as the primary since then. The time of *sending* counts:
    an answer may come after a pause that began before it. So a busy connection costs nothing, and the pause that it
    misses is shorter than a failover.
 2. Others that are silent, or disagree, have named nobody. Then the request is not sent.
 3. A request that was sent before the server was paused may be answered when the server goes on. That is harmless: a
    lease lasts from before its request was sent, and the new primary grants only after a quarantine as long as that.
 4. No rule helps a client whose clock stands still while its machine is paused (docs/failover.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._protocol.timing import now

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._connect.address import Address

TRUSTED_FOR: Final = 1.0  # seconds since a request that was answered, after which others are asked who the primary is
NOT_NAMED: Final = "others name another server as the primary"

HostPort = tuple[str, int]  # host and port


class Primacy:
    """What others say of the servers to which one port leads."""

    def __init__(self, address: Address) -> None:
        self.sentinels = address.sentinels
        self.timeout = address.timeout
        self.other_nodes: Callable[[float], bool] | None = None  # of a node of a cluster: whether they name it
        self._named: HostPort = ("", 0)
        self._asked = 0.0  # when the sentinels were, before they named it

    def is_confirmed(self, where: HostPort, until: float) -> bool:
        """Whether others name the server there as the primary. Blocks. Raises Disconnected if they name nobody.

        All connections of a port share what the sentinels say, for `TRUSTED_FOR` seconds.
        """
        asked = now()
        within = max(0.001, min(self.timeout, until - asked))
        if self.other_nodes is not None:
            return self.other_nodes(within)
        if self.sentinels is None:
            return True
        if asked - self._asked > TRUSTED_FOR:
            self._named = self.sentinels.primary(within)
            self._asked = asked
        return self._named == where
