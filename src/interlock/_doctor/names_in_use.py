"""Which names a server has, read off its keys: for people who have named another name, prefix or database.

Every synchronizer keeps a record, whose key says its name. Nothing else scans a server; here it is bounded by a time
and a number of keys, since a server may have millions of keys of other programs.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError, ResponseError

from interlock._connect.clusters import Cluster
from interlock._connect.target import address_of, quorum_of
from interlock._servers.slot_map import address_in_map

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from interlock._connect.address import Address

__all__ = ["addresses_of", "connected", "names_in", "primaries", "replies", "reply"]

TIMEOUT: Final = 3.0  # seconds that one server may take for a question
SCAN_FOR: Final = 0.5  # seconds
MAX_KEYS: Final = 100_000  # at which one scan looks
_STEP: Final = "1000"  # keys that one command looks at
_A_RECORD: Final = re.compile(r"(?:\{([^{}]+)\}|(.+):)\{(?:record|done|plain-record)\}", re.DOTALL)


def names_in(connection: Any, until: float) -> tuple[set[str], bool]:
    """The names, with their prefixes, of which the database of this connection has records; and whether these are all.

    Looks until this time of time.monotonic(). Raises RedisError if the server refuses.
    """
    found, cursor = set[str](), "0"
    for _ in range(MAX_KEYS // int(_STEP)):
        cursor, keys = reply(connection, "SCAN", cursor, "MATCH", "*{*}", "COUNT", _STEP)
        texts = (key.decode(errors="replace") if isinstance(key, bytes) else str(key) for key in keys)
        found |= {match[1] or match[2] for text in texts if (match := _A_RECORD.fullmatch(text)) is not None}
        cursor = cursor.decode() if isinstance(cursor, bytes) else str(cursor)
        if cursor == "0":
            return found, True
        if time.monotonic() >= until:
            break
    return found, False


def names_with(urls: Sequence[str] | None, prefix: str) -> set[str]:
    """The names with this prefix that the servers of these URLs know, as far as SCAN_FOR allows."""
    found, until = set[str](), time.monotonic() + SCAN_FOR
    with contextlib.suppress(RedisError, OSError):
        for address in addresses_of(urls):
            with connected(address) as connection:
                names, _ = names_in(connection, until)
                found |= {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return found


def addresses_of(urls: Sequence[str] | None) -> list[Address]:
    """The servers that these URLs name; of none, $INTERLOCK_URL. Raises ConfigError."""
    if urls and len(urls) > 1:
        return list(quorum_of(list(urls), for_asyncio=False).servers)
    address = address_of(urls[0] if urls else None, for_asyncio=False)
    return primaries(address) if isinstance(address, Cluster) else [address]


def primaries(cluster: Cluster) -> list[Address]:
    """The primaries of a cluster, by the first seed that answers; the seeds themselves if none does."""
    for seed in cluster.seeds:
        with contextlib.suppress(RedisError, OSError), connected(seed) as connection:
            slots = reply(connection, "CLUSTER", "SLOTS")
            nodes = {address.display_url: address for entry in slots for address in (address_in_map(seed, entry[2]),)}
            return list(nodes.values())
    return list(cluster.seeds)


@contextlib.contextmanager
def connected(address: Address) -> Generator[Any, None, None]:
    """A connection to this server, in the database of its address."""
    connection = address.connection(TIMEOUT)
    try:
        connection.connect()
        for command in address.setup_commands:
            with contextlib.suppress(RedisError):
                reply(connection, *command)
        yield connection
    finally:
        connection.disconnect()


def reply(connection: Any, *words: str) -> Any:
    """The reply to one command."""
    connection.send_command(*words)
    return connection.read_response()


def replies(connection: Any, commands: Sequence[Sequence[str]]) -> list[Any]:
    """The replies to commands that reach the server in one write; an error reply is one of them."""
    connection.send_packed_command(connection.pack_commands(commands))
    read = list[Any]()
    for _ in commands:
        try:
            read.append(connection.read_response())
        except ResponseError as error:
            read.append(error)
    return read
