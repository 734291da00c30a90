"""Opens the server for a target that the user named: one server, a cluster, or a quorum."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from interlock._connect.address import Quorum
from interlock._connect.clusters import Cluster
from interlock._quarantine.voter import voter_key
from interlock._servers.single import SingleServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._connect.address import Address
    from interlock._protocol.runtime import Runtime
    from interlock._protocol.server import Server
    from interlock._quarantine.primacy import Primacy
    from interlock._quarantine.server_histories import Histories
    from interlock._quarantine.server_history import ServerHistory
    from interlock._transports.connections import ConnectionPool

R = TypeVar("R", bound="Runtime")


def open_server(
    target: Address | Cluster | Quorum,
    make_pool: Callable[[Address, ServerHistory, Primacy, R], ConnectionPool],
    runtime: R,
    histories: Histories,
    prefix: str,
) -> Server:
    """The server for this target. `make_pool` makes the connections to one server, for threads or for asyncio."""

    def single(address: Address, history: ServerHistory) -> SingleServer:
        return SingleServer(
            address, history, runtime, lambda address, history, primacy: make_pool(address, history, primacy, runtime)
        )

    if isinstance(target, Cluster):
        from interlock._servers.cluster import ClusterServer  # noqa: PLC0415 (most users need neither)

        return ClusterServer(target, single, runtime, histories)
    if isinstance(target, Quorum):
        from interlock._servers.quorum import QuorumServer  # noqa: PLC0415

        members = [single(each, histories.of(each)) for each in target.servers]
        return QuorumServer(members, runtime, target.display_url, voter_key(prefix))
    return single(target, histories.of(target))
