"""The Redis commands that the scripts and users' `execute` need.

They keep the rules of Redis that matter here: times are whole milliseconds; a key ends when the clock is *past* its
time; a TTL is at least 0 while the key exists; empty collections vanish; a number that Lua passes becomes text by
`%.17g`. To add a command, write a function here, and name it in `COMMANDS`; if the command writes or may take memory,
name it in the sets below, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from interlock._protocol.server import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class ZSet(dict[bytes, float]):
    """A sorted set: its members with their scores."""


class Hash(dict[bytes, bytes]):
    """A hash: its fields with their values."""


class Stream(dict[bytes, tuple[bytes, ...]]):
    """A stream: its entries by their ids."""


class Keys(Protocol):
    """What the commands see of a server: see `server.Server`."""

    data: dict[bytes, Any]
    expires: dict[bytes, int]
    now_ms: int

    @property
    def publish(self) -> Callable[[bytes, bytes], int]:
        """Publish a payload on a channel. Returns the number of its subscribers."""
        ...

    @property
    def info(self) -> Callable[[str], bytes]:
        """Return the text of one section of INFO."""
        ...

    @property
    def subscribers(self) -> Callable[[bytes], int]:
        """Return the number of subscribers of a channel."""
        ...

    def find(self, key: bytes, kind: type[Any]) -> Any:
        """Return the value of a key, or None if the key does not exist. Raises WRONGTYPE."""
        ...

    def purge(self, key: bytes) -> None:
        """Delete the key if its time is over."""
        ...

    def remove(self, key: bytes) -> bool:
        """Delete the key. Returns whether it existed."""
        ...

    def collection(self, key: bytes, kind: type[Any]) -> Any:
        """Return the collection at this key; create it if there is none."""
        ...

    def ordered(self, key: bytes) -> list[bytes]:
        """Return the members of a sorted set in order."""
        ...


def text(value: Any) -> bytes:
    """Return the text that Redis makes of an argument from Lua. Raises ServerError if it is no string or number."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ServerError("ERR Lua redis lib command arguments must be strings or integers")
    return b"%.17g" % value


def _integer(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ServerError("ERR value is not an integer or out of range") from None


def _score(value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        raise ServerError("ERR value is not a valid float") from None


def _get(server: Keys, key: bytes) -> Any:
    return server.find(key, bytes)


def _set(server: Keys, key: bytes, value: bytes, *options: bytes) -> Any:
    until = None
    if options:
        match [option.upper() for option in options]:
            case [b"KEEPTTL"]:
                server.purge(key)
                until = server.expires.get(key)
            case [b"PX", ms]:
                if _integer(ms) <= 0:
                    raise ServerError("ERR invalid expire time in 'set' command")
                until = server.now_ms + _integer(ms)
            case _:
                raise ServerError("ERR syntax error")
    server.data[key] = value
    if until is not None:
        server.expires[key] = until
    else:
        server.expires.pop(key, None)
    return b"OK"


def _del(server: Keys, *keys: bytes) -> Any:
    for key in keys:
        server.purge(key)
    return sum(server.remove(key) for key in keys)


def _exists(server: Keys, *keys: bytes) -> Any:
    for key in keys:
        server.purge(key)
    return sum(key in server.data for key in keys)


def _pttl(server: Keys, key: bytes) -> Any:
    server.purge(key)
    if key not in server.data:
        return -2
    return server.expires[key] - server.now_ms if key in server.expires else -1


def _pexpire(server: Keys, key: bytes, ms: bytes) -> Any:
    span = _integer(ms)
    server.purge(key)
    if key not in server.data:
        return 0
    if span <= 0:
        server.remove(key)
    else:
        server.expires[key] = server.now_ms + span
    return 1


def _zadd(server: Keys, key: bytes, *words: bytes) -> Any:
    *options, score, member = words
    number = _score(score)
    scores = server.collection(key, ZSet)
    new = member not in scores
    if new or options != [b"NX"]:
        scores[member] = number
    return int(new)


def _zrem(server: Keys, key: bytes, *members: bytes) -> Any:
    return _dropped(server, key, ZSet, members)


def _hdel(server: Keys, key: bytes, *names: bytes) -> Any:
    return _dropped(server, key, Hash, names)


def _dropped(server: Keys, key: bytes, kind: type[Any], members: Iterable[bytes]) -> int:
    collection = server.find(key, kind)
    if collection is None:
        return 0
    count = sum(collection.pop(member, None) is not None for member in members)
    if not collection:
        server.remove(key)
    return count


def _zscore(server: Keys, key: bytes, member: bytes) -> Any:
    scores: dict[bytes, float] = server.find(key, ZSet) or {}
    return text(scores[member]) if member in scores else None


def _zcard(server: Keys, key: bytes) -> Any:
    return len(server.find(key, ZSet) or ())


def _zrange(server: Keys, key: bytes, first: bytes, last: bytes, *options: bytes) -> Any:
    members = server.ordered(key)
    start, stop = _integer(first), _integer(last)
    start, stop = (max(0, i + len(members)) if i < 0 else i for i in (start, stop)) if members else (0, -1)
    chosen = members[start : stop + 1]
    if not options:
        return chosen
    return [part for member in chosen for part in (member, _zscore(server, key, member))]


def _between(least: bytes, most: bytes) -> Callable[[float], bool]:
    """Return a test whether a score lies between two bounds; `(` excludes the bound itself."""
    low, high = _score(least.removeprefix(b"(")), _score(most.removeprefix(b"("))
    above, below = least[:1] == b"(", most[:1] == b"("
    return lambda score: (low < score if above else low <= score) and (score < high if below else score <= high)


def _zrangebyscore(server: Keys, key: bytes, least: bytes, most: bytes, *options: bytes) -> Any:
    inside = _between(least, most)
    scores: dict[bytes, float] = server.find(key, ZSet) or {}
    chosen = [member for member in server.ordered(key) if inside(scores[member])]
    if not options:
        return chosen
    *with_scores, _, first, count = options
    chosen = chosen[_integer(first) :][: _integer(count)]
    return [part for member in chosen for part in (member, _zscore(server, key, member))] if with_scores else chosen


def _zremrangebyscore(server: Keys, key: bytes, least: bytes, most: bytes) -> Any:
    inside = _between(least, most)
    scores: dict[bytes, float] = server.find(key, ZSet) or {}
    return _dropped(server, key, ZSet, [member for member, score in scores.items() if inside(score)])


def _hget(server: Keys, key: bytes, field: bytes) -> Any:
    fields: dict[bytes, bytes] = server.find(key, Hash) or {}
    return fields.get(field)


def _hmget(server: Keys, key: bytes, *names: bytes) -> Any:
    fields: dict[bytes, bytes] = server.find(key, Hash) or {}
    return [fields.get(name, False) for name in names]  # Lua sees a missing field as false


def _hset(server: Keys, key: bytes, *pairs: bytes) -> Any:
    fields = server.collection(key, Hash)
    before = len(fields)
    fields.update(zip(pairs[::2], pairs[1::2], strict=True))
    return len(fields) - before


def _hincrby(server: Keys, key: bytes, field: bytes, number: bytes) -> Any:
    fields = server.collection(key, Hash)
    fields[field] = b"%d" % (_integer(fields.get(field, b"0")) + _integer(number))
    return int(fields[field])


def _hgetall(server: Keys, key: bytes) -> Any:
    fields: dict[bytes, bytes] = server.find(key, Hash) or {}
    return [word for field in fields.items() for word in field]


def _xadd(server: Keys, key: bytes, *words: bytes) -> Any:
    _, _, longest, _, *fields = words  # MAXLEN ~ length *
    entries = server.collection(key, Stream)
    number = b"%d-%d" % (server.now_ms, len(entries))
    entries[number] = tuple(fields)
    while len(entries) > _integer(longest):
        del entries[next(iter(entries))]
    return number


def _publish(server: Keys, channel: bytes, payload: bytes) -> Any:
    return server.publish(channel, payload)


def _pubsub(server: Keys, verb: bytes, channel: bytes) -> Any:
    if verb.upper() != b"NUMSUB":
        raise ServerError("ERR unknown PUBSUB subcommand")
    return [channel, server.subscribers(channel)]


def _info(server: Keys, section: bytes) -> Any:
    return server.info(section.decode())


def _command(_: Keys, verb: bytes, name: bytes, *args: bytes) -> Any:
    if verb.upper() != b"GETKEYS":
        raise ServerError("ERR unknown COMMAND subcommand")
    if name.upper() not in {b"GET", b"SET"} or not args:
        raise ServerError("ERR The command has no key arguments")
    return [args[0]]


COMMANDS: Final[dict[bytes, Callable[..., Any]]] = {
    b"GET": _get, b"SET": _set, b"DEL": _del, b"EXISTS": _exists, b"PTTL": _pttl, b"PEXPIRE": _pexpire,
    b"ZADD": _zadd, b"ZREM": _zrem, b"ZSCORE": _zscore, b"ZCARD": _zcard, b"ZRANGE": _zrange,
    b"ZRANGEBYSCORE": _zrangebyscore, b"ZREMRANGEBYSCORE": _zremrangebyscore, b"HGET": _hget, b"HMGET": _hmget,
    b"HSET": _hset, b"HDEL": _hdel, b"HINCRBY": _hincrby, b"PUBLISH": _publish, b"PUBSUB": _pubsub,
    b"COMMAND": _command, b"HGETALL": _hgetall, b"XADD": _xadd, b"INFO": _info,
}  # fmt: skip
TAKE_MEMORY: Final = frozenset((b"SET", b"ZADD", b"HSET", b"HINCRBY", b"XADD"))
"""What a full server refuses, unless the script has written before."""
WRITES: Final = TAKE_MEMORY | {b"DEL", b"PEXPIRE", b"ZREM", b"HDEL", b"ZREMRANGEBYSCORE"}
