"""Finds the Interlock, and the key in the server, for the client or Django cache that a drop-in was given.

Each call looks at the target anew, as Django does: Django makes a cache for each thread, and replaces caches when the
settings change. All targets of one server share the connections of one Interlock, so a client for each request, or a
cache for each thread, opens none.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

from interlock._connect.caches import client_of_cache
from interlock._connect.target import address_of
from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.names import checked_name
from interlock.errors import Unavailable
from interlock.threads import Interlock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from interlock._api.interlock import InterlockCore
    from interlock._session.session import Session

InterlockT = TypeVar("InterlockT", bound="InterlockCore")
MAX_TTL: Final = 60.0  # seconds: more than that of an Interlock, since users of the originals write timeout=60


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
        except TypeError:  # a target that is no client: an error below says so
            locks = None
        if locks is None or locks._closed:
            # The promises are those of the originals, so no quarantine: only processes with interlock would wait. And
            # their callers expect an error of an outage, whatever the timeout.
            retry_for = address_of(client, for_asyncio=self._for_asyncio).retry_for
            locks = self._of_pools[pool] = self.of(client, prefix="", quarantine=False, retry_for=retry_for)
        if not KNOWN[0]:
            notice()
        session: Session = cast("Any", locks)._session
        return session


for_threads: Final = Interlocks(Interlock, for_asyncio=False)


def interlock_for(client: object, prefix: str = "", max_ttl: float = MAX_TTL) -> Interlock:
    """The Interlock for this client's server. Raises ConfigError."""
    return for_threads.of(client, prefix=prefix, max_ttl=max_ttl)


def close() -> None:
    """Close the connections and end the threads behind the drop-ins; the next call of a drop-in makes new ones.

    Locks and permits held by a value stay held. Functions that run under `RedisLock.redis_lock` lose their lease.
    """
    while for_threads.made:
        for_threads.made.pop()[1].close()


def resolve(target: object, key: object, max_ttl: float) -> tuple[Interlock, str]:
    """The Interlock for this target, and the key in its server. Raises ConfigError."""
    name, client = checked_name(key), client_of_cache(target)
    if client is not None:
        return interlock_for(client, max_ttl=max_ttl), cast("Cache", target).make_key(name)
    return interlock_for(target, max_ttl=max_ttl), name


@contextlib.contextmanager
def unavailable_as(error_class: type[Exception]) -> Generator[None, None, None]:
    """Raise this error where interlock raises Unavailable."""
    try:
        yield
    except Unavailable as error:
        raise error_class(str(error)) from error
