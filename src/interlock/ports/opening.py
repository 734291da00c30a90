"""From what a user named to the port that leads there: one server, or several as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._clusters import Cluster

from .cluster import ClusterPort

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.connect import Address

    from ._memory import Memories, Memory


def opened(target: Address | Cluster, make: Callable[[Address, Memory], Any], memories: Memories) -> Any:
    """The port for this target; `make` makes one for a single server, of threads or of asyncio."""
    if isinstance(target, Cluster):
        return ClusterPort(target, make, memories)
    return make(target, memories.of(target))
