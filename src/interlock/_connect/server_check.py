"""Checks whether a server can keep locks safely, by its replies to HELLO and INFO."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.info import parse_info
from interlock._protocol.log import log
from interlock._protocol.server import Disconnected
from interlock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from interlock._connect.address import Address

OLDEST_VERSION: Final = (6, 2)
_NOT_SINGLE: Final = {b"sentinel": "a sentinel", b"cluster": "a node of a cluster"}


def check_server(hello: Any, memory_info: Any, address: Address) -> None:
    """Raise for a server that cannot keep locks safely: one before 6.2, a sentinel, a replica, or another topology.

    Log a warning if the server may evict locks. `hello` is the reply to HELLO. `memory_info` is the reply to INFO
    memory; if that is an error, the eviction policy is unknown.
    """
    display_url = address.display_url
    facts: dict[bytes, Any] = pairs_of(hello)
    version = facts.get(b"version", b"").decode()
    if (numbers := parse_version(version)) is not None and numbers < OLDEST_VERSION:
        raise version_error(display_url, version)
    mode = facts.get(b"mode")
    replica = facts.get(b"role") in (b"replica", b"slave")
    if address.votes and (role_text := "a replica" if replica else _NOT_SINGLE.get(mode or b"")):
        raise ConfigError(
            f"{display_url} is {role_text}, but a quorum needs single servers that are independent of each other"
        )
    if mode == b"sentinel":
        raise ConfigError(
            f"{display_url} is a sentinel, which stores no locks. Give a URL that lets it name the server: "
            "redis+sentinel://h1:26379,h2:26379/0?service=mymaster"
        )
    if mode == b"cluster" and not address.clustered:
        raise ConfigError(f"{display_url} is one node of a cluster. Use a URL redis+cluster://, or a cluster client")
    if mode == b"standalone" and address.clustered:
        raise ConfigError(f"{display_url} is no node of a cluster. Use a URL redis://, or a client of one server")
    if replica:
        if address.sentinels is not None:  # the sentinels have not agreed on another primary yet
            raise Disconnected(
                f"the server that the sentinels name for {address.sentinels.service!r} is a replica", sent=False
            )
        if address.clustered:  # another node serves its slots now
            raise Disconnected(f"{display_url} has become a replica", sent=False)
        raise Unavailable(f"{display_url} is a read-only replica. Connect to its primary")
    if isinstance(memory_info, bytes):
        _warn_of_eviction(parse_info(memory_info), display_url)


@lru_cache(maxsize=256)  # one warning for each server and policy
def _warn_of_policy(display_url: str, policy: str) -> None:
    log.warning(
        "interlock: %s may evict locks that are held, since its maxmemory-policy is %s. Set it to noeviction",
        display_url,
        policy,
    )


def _warn_of_eviction(facts: dict[str, str], display_url: str) -> None:
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        _warn_of_policy(display_url, policy)


def pairs_of(reply: Any) -> dict[Any, Any]:
    """The names and values of a reply that is a map in RESP3 and a flat list in RESP2, as that to HELLO."""
    return dict(reply.items() if hasattr(reply, "items") else zip(reply[::2], reply[1::2], strict=False))


def parse_version(version: str) -> tuple[int, ...] | None:
    """The first two numbers of a version; None if these are no numbers."""
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else None


def version_error(display_url: str, version: str) -> ConfigError:
    """The error for a server before 6.2."""
    return ConfigError(f"{display_url} runs version {version}, but interlock needs Redis 6.2, Valkey 7.2, or later")
