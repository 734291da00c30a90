"""Turns a client of redis-py or valkey-py into an address, with the parameters of that client."""

from __future__ import annotations

from typing import Any, Final

from interlock._connect.address import Address, make_address
from interlock._connect.sentinels import watched_by
from interlock.errors import ConfigError

SEVERAL_SERVERS: Final = (
    "several servers are redis+sentinel://h1:26379,h2:26379/0?service=mymaster, redis+cluster://h1:7000,h2:7001, "
    "or Interlock.quorum([url, url, url])"
)


def address_of_client(client: Any, *, for_asyncio: bool) -> Address:
    name = f"{type(client).__module__}.{type(client).__qualname__}"
    pool: Any = getattr(client, "connection_pool", None)
    parameters: dict[str, Any] | None = getattr(pool, "connection_kwargs", None)
    if parameters is None:
        way = ""
        if isinstance(client, list | tuple):
            way = f"; {SEVERAL_SERVERS}"
        elif hasattr(client, "master_for"):
            way = ". Give what its master_for(service) returns"
        raise ConfigError(f"{name} is neither a URL nor a client of redis-py or valkey-py{way}")
    kinds = [cls.__name__ for cls in pool.connection_class.__mro__]
    check_mode(name, asynchronous=".asyncio." in pool.connection_class.__module__, for_asyncio=for_asyncio)
    kind = "tls" if "SSLConnection" in kinds else "unix" if "UnixDomainSocketConnection" in kinds else "tcp"
    found = make_address(kind, parameters)
    manager: Any = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return found
    if not pool.is_master:
        raise ConfigError(
            f"{name} reads from replicas, which learn late of each grant: give Sentinel.master_for(service)"
        )
    each = [{**one.connection_pool.connection_kwargs, "db": 0} for one in manager.sentinels]
    return watched_by(found, each, pool.service_name)


def check_mode(name: str, *, asynchronous: bool, for_asyncio: bool) -> None:
    """Raise ConfigError for a client of the other mode."""
    if asynchronous != for_asyncio:
        here, there = ("interlock.aio", "interlock") if for_asyncio else ("interlock", "interlock.aio")
        raise ConfigError(
            f"{name} is for {'asyncio' if asynchronous else 'threads'}: "
            f"use it with `from {there} import Interlock`, or give {here} its own URL"
        )
