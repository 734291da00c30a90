"""Turns a user's target into an address: a URL, a client, a cache, $INTERLOCK_URL, or the servers of a quorum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from interlock._connect.address import Address, Quorum
from interlock._connect.caches import client_of_cache
from interlock._connect.clients import address_of_client
from interlock._connect.clusters import Cluster, cluster_of
from interlock._connect.urls import address_of_url
from interlock._protocol.log import log
from interlock.errors import ConfigError


def quorum_of(servers: object, *, for_asyncio: bool) -> Quorum:
    """The quorum of these URLs and clients. Raises ConfigError."""
    if isinstance(servers, str | bytes | Mapping) or not isinstance(servers, Iterable):
        raise ConfigError("a quorum needs a list of servers: Interlock.quorum([url, url, url])")
    addresses: list[Address] = []
    for server in cast("Iterable[object]", servers):
        server_address = None if server is None else address_of(server, for_asyncio=for_asyncio)
        if not isinstance(server_address, Address) or server_address.sentinels is not None:
            rejected = server_address.display_url if server_address else repr(server)
            raise ConfigError(f"a quorum needs single servers, each named by a URL or a client, not {rejected}")
        if any(server_address.display_url == earlier.display_url for earlier in addresses):
            raise ConfigError(
                f"{server_address.display_url} is in the quorum twice, but a server has one vote. Name it once"
            )
        addresses.append(replace(server_address, votes=True))
    if not addresses:
        raise ConfigError("a quorum needs servers. Name 3 or 5 that are independent of each other")
    if len(addresses) % 2 == 0:
        log.warning(
            "interlock: a quorum of %d servers survives no more failures than one of %d. Remove one server or add one",
            len(addresses),
            len(addresses) - 1,
        )
    return Quorum(tuple(addresses))


def address_of(target: object, *, for_asyncio: bool) -> Address | Cluster:
    """The server or cluster that a URL, a client, a cache, or (for None) $INTERLOCK_URL names. Raises ConfigError.

    Returns an address or a cluster unchanged.
    """
    if isinstance(target, Address | Cluster):
        return target
    if target is None:
        target = os.environ.get("INTERLOCK_URL")
        if not target:
            raise ConfigError(
                'no server is named: call Interlock("redis://host:6379/0"), or set INTERLOCK_URL. '
                'Interlock("embedded://") starts one for this user on this machine'
            )
    if (client := client_of_cache(target)) is not None:  # made for threads; the cache itself is for both modes
        target, for_asyncio = client, False
    if (cluster := cluster_of(target, for_asyncio=for_asyncio)) is not None:
        return cluster
    return address_of_url(target) if isinstance(target, str) else address_of_client(target, for_asyncio=for_asyncio)
