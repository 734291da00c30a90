"""Opens the server for a target that the user named: one server, a cluster, or a quorum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from interlock._connect.address import Quorum
from interlock._connect.clusters import Cluster
from interlock._servers.cluster import ClusterServer
from interlock._servers.quorum import QuorumServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._connect.address import Address
    from interlock._protocol.types import Runtime
    from interlock._quarantine.histories import Histories
    from interlock._quarantine.history import ServerHistory

R = TypeVar("R", bound="Runtime")


def open_server(
    target: Address | Cluster | Quorum,
    make: Callable[[Address, ServerHistory, R], Any],
    runtime: R,
    histories: Histories,
) -> Any:
    """The server for this target. `make` makes a single server, for threads or for asyncio."""

    def single(address: Address, history: ServerHistory) -> Any:
        return make(address, history, runtime)

    if isinstance(target, Cluster):
        return ClusterServer(target, single, runtime, histories)
    if isinstance(target, Quorum):
        members = [single(each, histories.of(each, mark="+")) for each in target.servers]
        return QuorumServer(members, runtime, target.display_url)
    return single(target, histories.of(target))
