"""Turns a client of redis-py or valkey-py into an address, with the parameters of that client."""

from __future__ import annotations

import inspect
import os
from typing import Any, Final, cast

from interlock._connect.address import Address, make_address
from interlock._connect.sentinels import sentinel_address
from interlock.errors import ConfigError

SEVERAL_SERVERS: Final = (
    "for several servers, give redis+sentinel://h1:26379,h2:26379/0?service=mymaster, redis+cluster://h1:7000,h2:7001, "
    "or Interlock.quorum([url, url, url])"
)


def address_of_client(client: Any, *, for_asyncio: bool) -> Address:
    """The address of the server that a client of redis-py or valkey-py uses. Raises ConfigError."""
    name = f"{type(client).__module__}.{type(client).__qualname__}"
    pool: Any = getattr(client, "connection_pool", None)
    parameters: dict[str, Any] | None = getattr(pool, "connection_kwargs", None)
    if parameters is None:
        raise no_client(client)
    if any(each.__module__.partition(".")[0] == "fakeredis" for each in pool.connection_class.__mro__):
        raise ConfigError(
            f"{name} has no server, and interlock opens connections of its own to a server. "
            'For tests use a real one: Interlock("embedded://"), or interlock.embedded.Server() for each test'
        )
    kinds = [cls.__name__ for cls in pool.connection_class.__mro__]
    check_mode(name, asynchronous=".asyncio." in pool.connection_class.__module__, for_asyncio=for_asyncio)
    kind = "tls" if "SSLConnection" in kinds else "unix" if "UnixDomainSocketConnection" in kinds else "tcp"
    node_address = make_address(kind, parameters)
    manager: Any = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return node_address
    if not pool.is_master:
        raise ConfigError(
            f"{name} reads from replicas, which get each grant late. Give what the Sentinel's master_for(service) "
            "returns"
        )
    sentinels = [{**sentinel.connection_pool.connection_kwargs, "db": 0} for sentinel in manager.sentinels]
    return sentinel_address(node_address, sentinels, pool.service_name)


def no_client(thing: Any) -> ConfigError:
    """The error for a target that is neither a URL nor a client."""
    kind = cast("type[object]", type(thing))
    if inspect.isclass(thing):
        called, advice = f"{thing.__module__}.{thing.__qualname__}", f"It is a class: give {thing.__name__}(...)"
    elif isinstance(thing, tuple) and [type(part) for part in cast("tuple[object, ...]", thing)] == [str, int]:
        called, advice = "a tuple", f"Give a URL: 'redis://{thing[0]}:{thing[1]}'"
    elif isinstance(thing, list | tuple):
        called, advice = f"a {kind.__name__}", f"F{SEVERAL_SERVERS[1:]}"
    elif hasattr(thing, "master_for"):
        called, advice = f"{kind.__module__}.{kind.__qualname__}", "Give what its master_for(service) returns"
    elif hasattr(thing, "connection_kwargs"):
        called, advice = f"{kind.__module__}.{kind.__qualname__}", "Give a client that uses it: connection_pool=..."
    elif isinstance(thing, bytes):
        called, advice = "bytes", "A URL is a str: decode it"
    elif isinstance(thing, os.PathLike):
        called, advice = kind.__name__, "For a socket give unix:///path.sock"
    else:
        called = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        advice = 'Give a URL, as in Interlock("redis://host:6379/0"), or redis.Redis(...)'
    return ConfigError(f"{called} is neither a URL nor a client of redis-py or valkey-py. {advice}")


def check_mode(name: str, *, asynchronous: bool, for_asyncio: bool) -> None:
    """Raise ConfigError if the client is for asyncio and the Interlock for threads, or the other way round."""
    if asynchronous != for_asyncio:
        this_module, other_module = ("interlock.aio", "interlock") if for_asyncio else ("interlock", "interlock.aio")
        raise ConfigError(
            f"{name} is for {'asyncio' if asynchronous else 'threads'}: "
            f"use it with `from {other_module} import Interlock`, or give {this_module} its own URL"
        )
