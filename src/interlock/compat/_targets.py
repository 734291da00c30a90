"""From what a recipe was given, a client or a Django cache, to the Interlock of its server and the key there.

A target is looked at anew for each call, as Django does: its caches belong to threads, and change with the settings.
Connections belong to the server, so a client for each request, or a cache for each thread, costs none.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from interlock._connect.address import address
from interlock._protocol.names import checked_name
from interlock.errors import ConfigError
from interlock.threads import Interlock

MAX_TTL: Final = 60.0  # seconds, as Interlock's


class Client(Protocol):
    """A client of redis-py or valkey-py, for one server."""

    @property
    def connection_pool(self) -> object:
        """From this its parameters are taken."""
        ...


class Cache(Protocol):
    """A cache of Django on Redis: its own RedisCache, or that of django-redis. Django's proxy `cache` is an object."""

    def make_key(self, key: str, version: int | None = None) -> str:
        """How the cache spells a key: with prefix and version."""
        ...


_made: list[Interlock] = []  # one for each server, prefix and max_ttl


def interlock(client: object, prefix: str = "", max_ttl: float = MAX_TTL) -> Interlock:
    """The one for this client's server. Raises ConfigError."""
    where = address(client, for_asyncio=False)
    for made in _made:
        if (made._address, made.prefix, made.max_ttl) == (where, prefix, max_ttl) and not made._closed:
            return made
    _made.append(Interlock(client, prefix=prefix, max_ttl=max_ttl))
    return interlock(client, prefix, max_ttl)  # the one of another thread, if that was first: all have the same


def close() -> None:
    """End the connections and threads behind the recipes; the next call makes new ones.

    What was got by a value stays so. Functions that run under `redis_lock` lose it.
    """
    while _made:
        _made.pop().close()


def found(target: object, key: object, max_ttl: float) -> tuple[Interlock, str]:
    """Where this key is, and how it is spelled there. Raises ConfigError."""
    name, client = checked_name(key), target
    make_key = getattr(target, "make_key", None)
    if make_key is not None:
        name, client = make_key(name), _client_of(getattr(make_key, "__self__", target))  # behind Django's proxy
    return interlock(client, max_ttl=max_ttl), name


def _client_of(cache: Any) -> object:
    """The client by which a Django cache writes. Raises ConfigError."""
    for part in (getattr(cache, "client", None), getattr(cache, "_cache", None)):  # django-redis's; Django's own
        get_client = getattr(part, "get_client", None)
        if get_client is not None:
            try:
                client: object = get_client(write=True)
            except NotImplementedError:
                raise ConfigError(
                    f"{_class(part)} spreads keys over several servers, and a lock is on one: give a client of that one"
                ) from None
            return client
    raise ConfigError(
        f"{_class(cache)} does not keep its keys on Redis or Valkey, so other machines would not see a lock in it. "
        "Give a cache of django.core.cache.backends.redis or django_redis (caches['locks'], say), or a client"
    )


def _class(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
