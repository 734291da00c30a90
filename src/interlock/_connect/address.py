"""The address of a server: how to reach it, as data. `urls` and `clients` make one from what the user gives.

interlock opens connections of its own to that address (PROTOCOL, "In doubt"). It cannot control a client's pool,
retries and health checks, and a client that silently sends a request again changes the meaning of the request. redis-py
parses the URL and handles TLS and authentication. On the open connection, interlock speaks the protocol itself.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

import hiredis
import redis.asyncio.connection
import redis.asyncio.retry
import redis.connection
import redis.retry
from redis.backoff import NoBackoff

from interlock._connect.tls import shared_context
from interlock._protocol.log import log
from interlock._protocol.retry_for import BY_TIMEOUT, RetryFor
from interlock._protocol.timing import RETRY_FOR
from interlock.errors import ConfigError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping


IO_TIMEOUT: Final = 5.0  # seconds without an answer, after which interlock gives up a connection
_SYNC: Final[Any] = redis.connection
_ASYNC: Final[Any] = redis.asyncio.connection
_HIREDIS: Final[Any] = hiredis
# The parameters of a connection that does not name its driver. For any other connection, redis-py looks up its own
# version, which takes milliseconds.
_NAMELESS: Final[dict[str, Any]] = (
    {"driver_info": None} if "driver_info" in signature(_SYNC.AbstractConnection).parameters else {}
)

# The parameters of a client that say where the server is and how to log in; the others are about that client only.
_KEPT_PARAMETERS: Final = ("host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
                "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options")  # fmt: skip
FAILOVER_TIME: Final = 60.0  # seconds that a failover may take, from the failure of the primary on
# Seconds for which an isolated primary may accept writes beyond min-replicas-max-lag: it compares whole seconds, once
# a second.
LAG_GRACE: Final = 2.0
# A node of a cluster pings a silent link after half a cluster-node-timeout, waits a whole one for the answer, and
# checks every 0.1 s. NODE_GRACE allows for ten such checks, since the machine may be busy.
NODE_TIMEOUTS: Final = 1.5
NODE_GRACE: Final = 1.0  # seconds
DEFAULT_NODE_TIMEOUT: Final = 15.0  # seconds: the default of cluster-node-timeout
DEFAULT_MAX_LAG: Final = 10  # seconds: the default of min-replicas-max-lag


class NamedPrimary(NamedTuple):
    """The primary that the sentinels name."""

    host: str
    port: int
    epoch: int | None
    """The configuration epoch, which grows with each failover; None if the sentinels refuse to tell it."""


NO_PRIMARY: Final = NamedPrimary("", 0, None)  # of a server that no sentinel names


class PrimaryFinder(Protocol):
    """The sentinels that name the primary of a service."""

    @property
    def service(self) -> str: ...

    def primary(self, timeout: float) -> NamedPrimary:
        """Ask the sentinels for the primary. Takes about `timeout` seconds at most."""
        ...


@dataclass(frozen=True)
class Address:
    """One server: how to reach it, and the URL that messages display (without the password)."""

    kind: str  # tcp, tls, unix, or embedded (located anew for each connection)
    display_url: str
    parameters: Mapping[str, Any] = field(repr=False)
    sentinels: PrimaryFinder | None = None  # the client asks them for the primary before each new connection
    clustered: bool = False  # a node of a cluster
    votes: bool = False  # a server of a quorum
    given_retry_for: RetryFor = BY_TIMEOUT  # as the URL says it

    @property
    def retry_for(self) -> float:
        """Seconds that the server may be away before a call without a timeout raises Unavailable, by default."""
        return FAILOVER_TIME if self.sentinels or self.clustered else RETRY_FOR

    @property
    def can_fail_over(self) -> bool:
        """Whether the server may be demoted and promoted again, which an open connection to it does not show."""
        return self.sentinels is not None or self.clustered

    @property
    def timeout(self) -> float:
        """Seconds that an answer may take: the client's socket_timeout, but at most `IO_TIMEOUT`."""
        return min(self.parameters.get("socket_timeout") or IO_TIMEOUT, IO_TIMEOUT)

    @property
    def setup_commands(self) -> list[tuple[str, ...]]:
        """The commands that set up a connection, for one write: redis-py would wait for the reply to each."""
        commands: list[tuple[str, ...]] = []
        if self.parameters.get("db"):
            commands.append(("SELECT", str(self.parameters["db"])))
        if self.parameters.get("client_name"):
            commands.append(("CLIENT", "SETNAME", self.parameters["client_name"]))
        return commands

    @property
    def previous_identity(self) -> str:
        """What this machine knows of an earlier server at this address: "crashed", of an embedded one; else "-"."""
        if self.kind == "embedded":
            from interlock import embedded  # noqa: PLC0415 (an extra)

            return "crashed" if embedded.shared_has_crashed() else "-"
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
        """Seconds for which an isolated primary may go on to accept writes, by the replies to `isolation_commands`.

        A quarantine lasts longer by these seconds.
        """
        if not replies:
            return 0.0
        if refusals := [reply for reply in replies if isinstance(reply, Exception)]:
            _warn_of_defaults(self.display_url, str(refusals[0]))
        if self.clustered:
            (node_timeout,) = map(config_value, replies)
            return (DEFAULT_NODE_TIMEOUT if node_timeout is None else node_timeout / 1000) * NODE_TIMEOUTS + NODE_GRACE
        replicas_needed, lag = map(config_value, replies)
        if replicas_needed == 0 or lag == 0:  # the isolated primary never stops: no quarantine is long enough
            _warn_of_isolation(self.display_url)
            return 0.0
        return (DEFAULT_MAX_LAG if lag is None else lag) + LAG_GRACE

    def at(self, host: str, port: int) -> Address:
        """The address of another server, with the credentials and options of this one."""
        kind = "tls" if self.kind == "tls" or any(key.startswith("ssl_") for key in self.parameters) else "tcp"
        return make_address(kind, {**self.parameters, "host": host, "port": port})

    def connection(self, timeout: float) -> Any:  # a redis.Connection, which only carries bytes after the handshake
        """An unconnected redis-py connection for threads; connecting takes at most `timeout` seconds."""
        return self._make_connection(_SYNC, timeout, redis.retry.Retry(NoBackoff(), 0), command_packer=_Packer())

    def async_connection(self, timeout: float) -> Any:
        """An unconnected redis-py connection for asyncio; connecting takes at most `timeout` seconds."""
        return self._make_connection(_ASYNC, timeout, redis.asyncio.retry.Retry(NoBackoff(), 0))

    def _make_connection(self, module: Any, timeout: float, retry: Any, **more: Any) -> Any:
        kind, parameters, named = self.kind, dict(self.parameters), NO_PRIMARY
        for name in ("db", "client_name"):  # `setup_commands` sends them
            parameters.pop(name, None)
        if self.sentinels is not None:
            started = time.monotonic()
            named = self.sentinels.primary(min(timeout, self.timeout))
            parameters["host"], parameters["port"] = named.host, named.port
            timeout = max(0.002, timeout - (time.monotonic() - started))  # the time that is left after the question
        if kind == "embedded":
            from interlock import embedded  # noqa: PLC0415 (an extra)

            kind, parameters["path"] = (
                "unix",
                unquote(embedded.shared_url(timeout=min(timeout, self.timeout)).removeprefix("unix://")),
            )
        # redis-py takes two steps, connecting and HELLO, and with TLS a third one: each may take its share of the time.
        step_timeout = min(
            parameters.get("socket_connect_timeout") or self.timeout, timeout / (3 if kind == "tls" else 2)
        )
        parameters |= {"protocol": 3, "socket_timeout": step_timeout, "socket_connect_timeout": step_timeout}
        connection = _CLASSES[module, kind](**parameters, **_NAMELESS, retry=retry, **more)
        connection.socket_timeout = step_timeout  # redis-py 5 forgets it for the unix socket of a blocking connection
        connection.named = named
        if kind == "tls":
            connection.tls_options = {name: value for name, value in parameters.items() if name.startswith("ssl_")}
        connection.driver_info = connection.lib_name = connection.lib_version = None  # saves two round trips
        return connection


@dataclass(frozen=True)
class Quorum:
    """Several servers that are independent of each other."""

    servers: tuple[Address, ...]

    @property
    def given_retry_for(self) -> RetryFor:
        """As those URLs say it that do. Raises ConfigError if they differ."""
        given = [server.given_retry_for for server in self.servers if server.given_retry_for is not BY_TIMEOUT]
        if len({*given}) > 1:
            raise ConfigError(
                "the URLs of a quorum differ in retry_for. Give one: Interlock.quorum(urls, retry_for=10)"
            )
        return given[0] if given else BY_TIMEOUT

    @property
    def display_url(self) -> str:
        """The name of the quorum in messages."""
        return f"the quorum of {', '.join(server.display_url for server in self.servers)}"


class _Packer:
    """Packs the commands of redis-py's handshake with hiredis: as text only, see `pack` in `_transports/resp.py`."""

    @staticmethod
    def pack(*args: object) -> list[bytes]:
        """Pack one command."""
        first, *rest = [arg if isinstance(arg, str | bytes) else str(arg) for arg in args]
        packed: bytes = _HIREDIS.pack_command((*first.split(), *rest))
        return [packed]


class _TLS(redis.connection.SSLConnection):
    """TLS for threads."""

    tls_options: Mapping[str, Any]

    def _connect(self) -> Any:
        return _connect_or_close(_SYNC.SSLConnection._connect, self)

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:  # of redis-py 5.1; before that, each connection has a context
        context = shared_context("threads", self.tls_options, lambda: self._make_context(sock.family))
        if context is None:
            return _SYNC.SSLConnection._wrap_socket_with_ssl(self, sock)
        return context.wrap_socket(sock, server_hostname=self.host)  # as redis-py does, without OCSP

    def _make_context(self, family: int) -> ssl.SSLContext:
        """Have redis-py make a context. It does so only to wrap a socket."""
        with socket.socket(family) as unconnected:
            wrapped = _SYNC.SSLConnection._wrap_socket_with_ssl(self, unconnected)
        context: ssl.SSLContext = wrapped.context
        wrapped.close()
        return context


class _AsyncTLS(redis.asyncio.connection.SSLConnection):
    """TLS for asyncio."""

    tls_options: Mapping[str, Any]
    ssl_context: Any

    def _connection_arguments(self) -> Any:
        self.ssl_context.context = None  # else a second connection of this object would share the context of the first
        self.ssl_context.context = shared_context("asyncio", self.tls_options, self.ssl_context.get)
        return _ASYNC.SSLConnection._connection_arguments(self)


class _Unix(redis.connection.UnixDomainSocketConnection):
    """A unix socket for threads."""

    def _connect(self) -> Any:
        return _connect_or_close(_SYNC.UnixDomainSocketConnection._connect, self)


def _connect_or_close(connect: Callable[[Any], Any], connection: Any) -> Any:
    """Connect. If that fails, close the sockets that redis-py or Python leaves open, found in the traceback's frames.

    redis-py 5 closes neither a unix socket nor the socket below TLS. Python 3.11.7 does not close the half-made
    `SSLSocket` if the server resets the connection before the handshake.
    """
    try:
        return connect(connection)
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        while trace is not None:
            for local in trace.tb_frame.f_locals.values():
                if isinstance(local, socket.socket):
                    local.close()
            trace = trace.tb_next
        raise


_CLASSES: Final[dict[tuple[Any, str], Any]] = {
    (_SYNC, "tcp"): _SYNC.Connection,
    (_SYNC, "tls"): _TLS,
    (_SYNC, "unix"): _Unix,
    (_ASYNC, "tcp"): _ASYNC.Connection,
    (_ASYNC, "tls"): _AsyncTLS,
    (_ASYNC, "unix"): _ASYNC.UnixDomainSocketConnection,
}


def make_address(kind: str, given: Mapping[str, Any]) -> Address:
    """Make the address of a tcp, tls or unix server from the parameters of a client of redis-py."""
    parameters = {key: given[key] for key in _KEPT_PARAMETERS if given.get(key) is not None}
    if kind == "tls":
        parameters |= {
            key: value
            for key, value in given.items()
            # Leave out None: it is the default, and an older redis-py may not know the option. But ssl_cert_reqs=None
            # turns the verification off.
            if key.startswith("ssl_") and (value is not None or key == "ssl_cert_reqs")
        }
    db = parameters.get("db", 0)
    if kind == "unix":
        for key in ("host", "port", "socket_keepalive", "socket_keepalive_options"):
            parameters.pop(key, None)
        display_url = f"unix://{parameters['path']}" + (f"?db={db}" if db else "")
    else:
        parameters.pop("path", None)
        host = str(parameters.get("host", "localhost"))
        bracketed = f"[{host}]" if ":" in host else host
        display_url = f"redi{'ss' if kind == 'tls' else 's'}://{bracketed}:{parameters.get('port', 6379)}/{db}"
    return Address(kind, display_url, parameters)


def config_value(reply: Any) -> int | None:
    """The number in a reply to CONFIG GET; None if the server refused, or has no such setting."""
    if hasattr(reply, "values"):
        return next(map(int, reply.values()), None)
    return None if isinstance(reply, Exception) or not reply else int(reply[1])


@lru_cache(maxsize=256)
def _warn_of_isolation(display_url: str) -> None:
    log.warning(
        "interlock: %s: a primary that is cut off from its replicas and sentinels would go on to grant and renew "
        "leases after the sentinels have named another primary. Set min-replicas-to-write to 1 on each server, and "
        "min-replicas-max-lag to a few seconds",
        display_url,
    )


@lru_cache(maxsize=256)
def _warn_of_defaults(display_url: str, refusal: str) -> None:
    log.warning(
        "interlock: %s does not say how long a primary that is cut off may accept writes [%s], so interlock assumes "
        "the server's default. If your setting is shorter, a quarantine after a failover is longer than it must be: "
        "give this user the right +config|get",
        display_url,
        refusal,
    )
