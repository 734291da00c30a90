"""Checks whether a server can keep locks safely, by its replies to HELLO and INFO."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log
from interlock._protocol.types import Disconnected
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
    # The reply to HELLO is a map in RESP3, a flat list in RESP2.
    facts: dict[bytes, Any] = dict(
        hello.items() if hasattr(hello, "items") else zip(hello[::2], hello[1::2], strict=False)
    )
    version = facts.get(b"version", b"").decode()
    numbers = version.split(".")[:2]
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < OLDEST_VERSION:
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
        _warn_of_eviction(memory_info.decode(errors="replace"), display_url)


@lru_cache(maxsize=256)  # one warning for each server and policy
def _warn_of_policy(display_url: str, policy: str) -> None:
    log.warning(
        "interlock: %s may evict locks that are held, since its maxmemory-policy is %s. Set it to noeviction",
        display_url,
        policy,
    )


def _warn_of_eviction(memory_info: str, display_url: str) -> None:
    facts = dict(line.split(":", 1) for line in memory_info.splitlines() if ":" in line)
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        _warn_of_policy(display_url, policy)


def version_error(display_url: str, version: str) -> ConfigError:
    """The error for a server before 6.2."""
    return ConfigError(f"{display_url} runs version {version}, but interlock needs Redis 6.2, Valkey 7.2, or later")
