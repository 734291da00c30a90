"""From what a user named to the port that leads there: one server, or several as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._clusters import Cluster
from interlock.connect import Quorum

from .cluster import ClusterPort
from .quorum import QuorumPort

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.connect import Address

    from ._memory import Histories, ServerHistory


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
