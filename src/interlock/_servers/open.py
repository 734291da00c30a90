"""From what a user named to the port that leads there: one server, or several as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._connect.address import Quorum
from interlock._connect.clusters import Cluster
from interlock._servers.cluster import ClusterPort
from interlock._servers.quorum import QuorumPort

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._connect.address import Address
    from interlock._quarantine.histories import Histories
    from interlock._quarantine.history import ServerHistory


def open_port(
    target: Address | Cluster | Quorum, make: Callable[[Address, ServerHistory], Any], memories: Histories
) -> Any:
    """The port for this target; `make` makes one for a single server, of threads or of asyncio."""
    if isinstance(target, Cluster):
        return ClusterPort(target, make, memories)
    if isinstance(target, Quorum):
        members = [(each, memories.of(each, mark="+")) for each in target.members]
        return QuorumPort([make(each, memory) for each, memory in members], target.display_url)
    return make(target, memories.of(target))
