"""The client behind a cache of Django, known by its shape: Django itself, django-redis or django-valkey.

A cache keeps a pool for each of its servers. Of several servers, the first one is the primary, to which the cache
writes, and the others are replicas. `KEY_PREFIX` and `VERSION` of a cache are about its values: locks have a prefix of
their own.
"""

from __future__ import annotations

import inspect
from typing import Any

from interlock.errors import ConfigError


def client_of_cache(target: Any) -> object | None:
    """The client with which this cache writes; None if `target` is no cache. Raises ConfigError. No I/O."""
    make_key = getattr(target, "make_key", None)
    if make_key is None or inspect.isclass(target):
        return None
    cache = getattr(make_key, "__self__", target)  # the cache behind Django's proxy
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
