"""The options behind the question mark of a URL: those that exist, and the error for any other one.

redis-py knows the options: `redis.Redis.from_url(url)` raises TypeError for an option that no connection takes.
interlock opens connections of its own with a part of the options, so interlock has to refuse the unknown ones itself.
"""

from __future__ import annotations

import difflib
import inspect
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl

from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel, SentinelConnectionPool

from interlock._connect.address import _ASYNC, _SYNC
from interlock._protocol.retry_for import retry_for_in_url
from interlock.errors import ConfigError

# The options of an Interlock that a URL may say, for those who name their server by nothing else; no connection takes
# them.
INTERLOCK_OPTIONS: Final = frozenset({"retry_for"})
# What only a URL of sentinels may say; no connection takes it.
SENTINEL_OPTIONS: Final = frozenset({"service", "sentinel_username", "sentinel_password", "min_other_sentinels"})


def check_options(url: str, scheme: str, display_url: str, engine: str = "") -> None:
    """Raise ConfigError for an option that there is not, for one of TLS without TLS, or for a bad value of our own."""
    query = url.partition("?")[2]
    kind = {"rediss": "tls", "valkeys": "tls", "unix": "unix"}.get(scheme, "tcp")
    known, suffix = known_options(kind, engine), engine and f"+{engine}"
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option in INTERLOCK_OPTIONS:
            _check_own(value, display_url)
        if option in known:
            continue
        if "@" in query:  # what looks like an option may be a part of a password
            raise ConfigError(
                f"{display_url!r} has an unknown option behind '?'. Percent-encode the special characters of a user "
                "name or password, or correct the option"
            )
        if kind != "tls" and (option == "ssl" or option in _tls_options()):
            raise ConfigError(
                f"{display_url!r}: {option!r} is an option for TLS, but this scheme connects without TLS. "
                + ("Remove it: a unix socket has no TLS" if kind == "unix" else f"Use {scheme}s{suffix}://")
            )
        if option.startswith("ssl_"):
            raise ConfigError(
                f"{display_url!r}: {option!r} is no option for TLS. The options are {', '.join(sorted(_tls_options()))}"
            )
        likely = difflib.get_close_matches(option, known, 1)
        advice = f"Did you mean {likely[0]!r}?" if likely else "Remove it, or correct its name"
        raise ConfigError(f"{display_url!r}: {option!r} is no option of a redis-py URL. {advice}")


def _check_own(value: str, display_url: str) -> None:
    try:
        retry_for_in_url(value)
    except ConfigError as error:
        raise ConfigError(f"{display_url!r}: {error}") from None


@lru_cache
def known_options(kind: str, engine: str) -> frozenset[str]:
    """The options of a URL: ours, and those of redis-py for a connection, for its pool, and for several servers."""
    name = {"tls": "SSLConnection", "unix": "UnixDomainSocketConnection"}.get(kind, "Connection")
    classes = [getattr(module, each) for module in (_SYNC, _ASYNC) for each in (name, *_POOLS)]
    known = _parameters(*classes) | set(_SYNC.URL_QUERY_ARGUMENT_PARSERS) | INTERLOCK_OPTIONS
    if engine == "cluster":
        known |= _parameters(RedisCluster, AsyncRedisCluster)
    elif engine == "sentinel":
        known |= _parameters(Sentinel, SentinelConnectionPool) | SENTINEL_OPTIONS
    known = {each for each in known if not each.startswith("ssl_") and each != "ssl"}
    return frozenset(known | _tls_options() if kind == "tls" else known)


_POOLS: Final = ("ConnectionPool", "BlockingConnectionPool")


@lru_cache
def _tls_options() -> frozenset[str]:
    """The options for TLS that both kinds of connections of redis-py accept."""
    both = [inspect.signature(module.SSLConnection).parameters for module in (_SYNC, _ASYNC)]
    return frozenset(name for name in both[0] if name.startswith("ssl_") and name in both[1])


def _parameters(*classes: Any) -> set[str]:
    """The names of the arguments with which objects of these classes, and of their bases, can be made."""
    return {
        name
        for each in classes
        for base in each.__mro__
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }
