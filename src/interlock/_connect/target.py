"""Turns a user's target into an address: a URL, a client, $INTERLOCK_URL, or the servers of a quorum."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from interlock._connect.address import Address, Quorum
from interlock._connect.clients import address_of_client
from interlock._connect.clusters import Cluster, cluster_of
from interlock._connect.urls import address_of_url
from interlock._protocol.log import log
from interlock.errors import ConfigError


def quorum(servers: object, *, for_asyncio: bool) -> Quorum:
    """The quorum of these URLs and clients. Raises ConfigError."""
    if isinstance(servers, str | bytes) or not isinstance(servers, Iterable):
        raise ConfigError("a quorum is a list of servers: Interlock.quorum([url, url, url])")
    members: list[Address] = []
    for server in cast("Iterable[object]", servers):
        found = None if server is None else address(server, for_asyncio=for_asyncio)
        if not isinstance(found, Address) or found.sentinels is not None:
            named = found.display_url if found else repr(server)
            raise ConfigError(f"a quorum is of single servers, each named by a URL or a client, not of {named}")
        if any(found.display_url == member.display_url for member in members):
            raise ConfigError(f"{found.display_url} is in the quorum twice, but must have one vote. Name it once")
        members.append(replace(found, votes=True))
    if not members:
        raise ConfigError("a quorum needs servers: name 3 or 5 that are independent of each other")
    if len(members) % 2 == 0:
        log.warning(
            "interlock: a quorum of %d servers tolerates no more failures than one of %d. Remove one server or add one",
            len(members),
            len(members) - 1,
        )
    return Quorum(tuple(members))


def address(target: object, *, for_asyncio: bool) -> Address | Cluster:
    """The server or cluster that a URL, a client, or (for None) $INTERLOCK_URL names. Raises ConfigError."""
    if target is None:
        target = os.environ.get("INTERLOCK_URL")
        if not target:
            raise ConfigError(
                'no server is named: call Interlock("redis://host:6379/0"), or set INTERLOCK_URL. '
                'Interlock("embedded://") starts one for this user on this machine'
            )
    if (found := cluster_of(target, for_asyncio=for_asyncio)) is not None:
        return found
    return address_of_url(target) if isinstance(target, str) else address_of_client(target, for_asyncio=for_asyncio)
