"""Finds the Interlock, and the key in the server, for the client or Django cache that a drop-in was given.

Each call looks at the target anew, as Django does: Django makes a cache for each thread, and replaces caches when the
settings change. All targets of one server share the connections of one Interlock, so a client for each request, or a
cache for each thread, opens none.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

from interlock._connect.target import address_of
from interlock._protocol.names import checked_name
from interlock.errors import ConfigError, Unavailable
from interlock.threads import Interlock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from interlock._api.interlock import InterlockCore
    from interlock._session.session import Session

InterlockT = TypeVar("InterlockT", bound="InterlockCore")
MAX_TTL: Final = 60.0  # seconds: more than an Interlock, since users of the originals write timeout=60


class Client(Protocol):
    """A client of redis-py or valkey-py, for one server."""

    @property
    def connection_pool(self) -> object:
        """The pool whose connection parameters interlock reads."""
        ...


class Cache(Protocol):
    """A Django cache on Redis, of Django or of django-redis. The type of Django's proxy `cache` is `object`."""

    def make_key(self, key: str, version: int | None = None) -> str:
        """The key in the server: with the cache's prefix and version."""
        ...


class Interlocks(Generic[InterlockT]):
    """The Interlocks behind the drop-ins of one mode: one for each server and set of options."""

    def __init__(self, make: Callable[..., InterlockT], *, for_asyncio: bool) -> None:
        self._make = make
        self._for_asyncio = for_asyncio
        self.made: list[tuple[object, InterlockT]] = []
        self._of_pools: weakref.WeakKeyDictionary[Any, InterlockT] = weakref.WeakKeyDictionary()

    def of(self, client: object, **options: object) -> InterlockT:
        """The Interlock for this client's server. Raises ConfigError."""
        wanted = (address_of(client, for_asyncio=self._for_asyncio), options)
        for made_for, existing in self.made:
            if made_for == wanted and not existing._closed:
                return existing
        self.made.append((wanted, self._make(client, **options)))
        return self.of(client, **options)  # another thread may have been faster: all use the first in the list

    def plain(self, client: object) -> Session:
        """The session for plain keys at this client's server. Raises ConfigError."""
        pool = getattr(client, "connection_pool", client)  # a client of a cluster has none, and is as good here
        try:
            locks = self._of_pools.get(pool)
        except TypeError:  # that is no client: an error below says so
            locks = None
        if locks is None or locks._closed:
            # The originals' promises: also no quarantine, which would keep only the processes with interlock waiting.
            locks = self._of_pools[pool] = self.of(client, prefix="", quarantine=False)
        session: Session = cast("Any", locks)._session
        return session


for_threads: Final = Interlocks(Interlock, for_asyncio=False)


def interlock_for(client: object, prefix: str = "", max_ttl: float = MAX_TTL) -> Interlock:
    """The Interlock for this client's server. Raises ConfigError."""
    return for_threads.of(client, prefix=prefix, max_ttl=max_ttl)


def close() -> None:
    """Close the connections and end the threads behind the drop-ins; the next call of a drop-in makes new ones.

    Locks and permits held by a value stay held. Functions that run under `redis_lock` lose their lease.
    """
    while for_threads.made:
        for_threads.made.pop()[1].close()


def resolve(target: object, key: object, max_ttl: float) -> tuple[Interlock, str]:
    """The Interlock for this target, and the key in its server. Raises ConfigError."""
    name, client = checked_name(key), target
    make_key = getattr(target, "make_key", None)
    if make_key is not None:
        cache = getattr(make_key, "__self__", target)  # the cache behind Django's proxy
        name, client = make_key(name), _client_of(cache)
    return interlock_for(client, max_ttl=max_ttl), name


@contextlib.contextmanager
def unavailable_as(error_class: type[Exception]) -> Generator[None, None, None]:
    """Raise this error where interlock raises Unavailable."""
    try:
        yield
    except Unavailable as error:
        raise error_class(str(error)) from error


def _client_of(cache: Any) -> object:
    """The client with which a Django cache writes. Raises ConfigError."""
    for part in (getattr(cache, "client", None), getattr(cache, "_cache", None)):  # of django-redis; of Django itself
        get_client = getattr(part, "get_client", None)
        if get_client is not None:
            try:
                client: object = get_client(write=True)
            except NotImplementedError:
                raise ConfigError(
                    f"{_class_name(part)} spreads keys over several servers, but a lock needs one: give a client of one"
                ) from None
            return client
    raise ConfigError(
        f"{_class_name(cache)} does not keep its keys on Redis or Valkey, so other machines would not see its locks. "
        "Give a cache of django.core.cache.backends.redis or django_redis (caches['locks'], say), or a client"
    )


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
