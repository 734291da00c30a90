"""The server: the real Lua on a small Redis in memory, under the virtual clock.

Theory. Scripts run in a real Lua 5.1 (lupa), one after the other. Around them are just the commands that they
use, with Redis' own rules where those matter: times are whole milliseconds and a key is gone when the clock is
*past* its time, a TTL is at least 0 while the key is there, empty collections vanish, numbers that Lua passes
become text as `%.17g` makes it, replies lose their fractions, and an unknown SHA is NOSCRIPT. (fakeredis ran 2,200
of these scripts a second here, and this runs ten times as many; `tests/test_simulator.py` compares both.)
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from interlock._core import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EPOCH: Final = 1_700_000_000_000_000  # µs: the server's clock when the world begins

_PRELUDE: Final = """
local call = ...
KEYS, ARGV = {}, {}
redis = {
  call = function(...)
    local reply, failed = call(...)
    if failed then error({err = failed}, 0) end
    return reply
  end,
  pcall = function(...)
    local reply, failed = call(...)
    if failed then return {err = failed} end
    return reply
  end,
  error_reply = function(text) return {err = text} end,
  status_reply = function(text) return {ok = text} end,
}
local function strict(_, name) error('Script attempted to access a global variable: ' .. tostring(name), 2) end
setmetatable(_G, {__index = strict, __newindex = strict})
return function(script, keys, argv)
  KEYS, ARGV = keys, argv
  local fine, reply = pcall(script)
  if fine then return reply end
  return type(reply) == 'table' and reply or {err = 'ERR ' .. tostring(reply)}
end
"""


def _lua() -> Any:
    try:
        import lupa.lua51  # noqa: PLC0415 (only tests need it)
    except ImportError:
        raise ImportError(
            "the simulator runs the real Lua and needs lupa: pip install lupa (it is in the group `test`)"
        ) from None
    module: Any = lupa.lua51
    return module


def encoded(value: object) -> bytes:
    """An argument as it goes over the wire."""
    return value if isinstance(value, bytes) else str(value).encode()


class Server:
    """Keys, their times, the scripts it knows, and its clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        lua = _lua()
        self._now = now
        self._runtime: Any = lua.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self._type: Any = lua.lua_type
        self._run: Any = self._runtime.execute(_PRELUDE, self._call)
        self._compiled: dict[str, Any] = {}
        self.known: set[str] = set()
        self.data: dict[bytes, Any] = {}
        self.expires: dict[bytes, int] = {}
        self.skew = 0.0  # seconds by which its clock was stepped
        self.frozen: int | None = None  # a script sees one time
        self.scripts = 0
        self.publish: Callable[[bytes, bytes], int] = lambda _channel, _payload: 0
        self.subscribers: Callable[[bytes], int] = lambda _channel: 0
        self.refused: frozenset[bytes] = frozenset()  # commands that fail now

    # Time

    def micros(self) -> int:
        """Its clock."""
        return self.frozen if self.frozen is not None else EPOCH + round((self._now() + self.skew) * 1e6)

    def millis(self) -> int:
        """The same, as expiry counts."""
        return self.micros() // 1000

    # Scripts

    def evalsha(self, sha: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """The reply: int, bytes, None, a list of such, or a ServerError."""
        if sha not in self.known:
            return ServerError("NOSCRIPT No matching script. Please use EVAL.")
        self.scripts += 1
        self.frozen = self.micros()
        try:
            table = self._runtime.table_from
            reply = self._run(self._compiled[sha], table(keys), table(args))
        finally:
            self.frozen = None
        return self._reply(reply)

    def eval(self, source: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """The same for a script that it may not know yet."""
        sha = hashlib.sha1(source.encode()).hexdigest()  # noqa: S324 (Redis names them so)
        if sha not in self._compiled:
            self._compiled[sha] = self._runtime.compile(source.encode())
        self.known.add(sha)
        return self.evalsha(sha, keys, args)

    def _reply(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return value
        if value is False or (
            value is not None and not isinstance(value, int | float) and self._type(value) != "table"
        ):
            return None
        if value is None or isinstance(value, int | float):
            return value if value is None else int(value)
        if (error := value[b"err"]) is not None:
            return ServerError(error.decode(errors="replace"))
        if (status := value[b"ok"]) is not None:
            return status
        listed: list[Any] = []
        while (item := value[len(listed) + 1]) is not None:
            listed.append(self._reply(item))
        return listed

    # Commands

    def _call(self, command: bytes, *args: Any) -> Any:
        """What redis.call and redis.pcall stand on: (reply, None) or (None, error)."""
        name = command.upper()
        try:
            run = _COMMANDS[name]
        except KeyError:
            return None, b"ERR the simulator's server has no command " + name + b": add it to server.py"
        if name in self.refused:
            return None, b"OOM command not allowed when used memory > 'maxmemory'."
        try:
            reply = run(self, *[_text(arg) for arg in args])
        except ServerError as error:
            return None, str(error).encode()
        if reply is None:
            return False, None
        return (self._runtime.table_from(reply) if isinstance(reply, list) else reply), None

    def find(self, key: bytes, kind: type[Any]) -> Any:
        """The value of a key that is alive, or None. Raises WRONGTYPE."""
        self.purge(key)
        value = self.data.get(key)
        if value is not None and type(value) is not kind:
            raise ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def purge(self, key: bytes) -> None:
        """Delete it if its time is over."""
        if self.expires.get(key, EPOCH * 2) < self.millis():
            self.remove(key)

    def purge_all(self) -> None:
        """Delete what is over, as the server does by and by."""
        for key in list(self.expires):
            self.purge(key)

    def remove(self, key: bytes) -> bool:
        """Delete it."""
        self.expires.pop(key, None)
        return self.data.pop(key, None) is not None

    def collection(self, key: bytes, kind: type[Any]) -> Any:
        """The collection at this key, made if need be."""
        value = self.find(key, kind)
        if value is None:
            value = self.data[key] = kind()
        return value

    def shrunk(self, key: bytes) -> None:
        """A collection without members is no key."""
        if not self.data[key]:
            self.remove(key)

    def ordered(self, key: bytes) -> list[bytes]:
        """The members of a sorted set."""
        scores: dict[bytes, float] = self.find(key, _ZSet) or {}
        return sorted(scores, key=lambda member: (scores[member], member))


class _ZSet(dict[bytes, float]):
    pass


class _Hash(dict[bytes, bytes]):
    pass


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ServerError("ERR Lua redis lib command arguments must be strings or integers")
    return b"%.17g" % value


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ServerError("ERR value is not an integer or out of range") from None


def _score(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise ServerError("ERR value is not a valid float") from None


def _get(server: Server, key: bytes) -> Any:
    return server.find(key, bytes)


def _set(server: Server, key: bytes, value: bytes, *options: bytes) -> Any:
    until = None
    match [option.upper() for option in options]:
        case []:
            pass
        case [b"KEEPTTL"]:
            server.purge(key)
            until = server.expires.get(key)
        case [b"PX", ms]:
            if _integer(ms) <= 0:
                raise ServerError("ERR invalid expire time in 'set' command")
            until = server.millis() + _integer(ms)
        case _:
            raise ServerError("ERR syntax error")
    server.remove(key)
    server.data[key] = value
    if until is not None:
        server.expires[key] = until
    return b"OK"


def _del(server: Server, *keys: bytes) -> Any:
    for key in keys:
        server.purge(key)
    return sum(server.remove(key) for key in keys)


def _exists(server: Server, *keys: bytes) -> Any:
    for key in keys:
        server.purge(key)
    return sum(key in server.data for key in keys)


def _pttl(server: Server, key: bytes) -> Any:
    server.purge(key)
    if key not in server.data:
        return -2
    return server.expires[key] - server.millis() if key in server.expires else -1


def _pexpire(server: Server, key: bytes, ms: bytes) -> Any:
    span = _integer(ms)
    server.purge(key)
    if key not in server.data:
        return 0
    if span <= 0:
        server.remove(key)
    else:
        server.expires[key] = server.millis() + span
    return 1


def _zadd(server: Server, key: bytes, score: bytes, member: bytes) -> Any:
    number = _score(score)
    scores = server.collection(key, _ZSet)
    new = member not in scores
    scores[member] = number
    return int(new)


def _zrem(server: Server, key: bytes, member: bytes) -> Any:
    return _dropped(server, key, _ZSet, [member])


def _hdel(server: Server, key: bytes, field: bytes) -> Any:
    return _dropped(server, key, _Hash, [field])


def _dropped(server: Server, key: bytes, kind: type[Any], members: Iterable[bytes]) -> int:
    collection = server.find(key, kind)
    if collection is None:
        return 0
    count = sum(collection.pop(member, None) is not None for member in members)
    server.shrunk(key)
    return count


def _zscore(server: Server, key: bytes, member: bytes) -> Any:
    scores: dict[bytes, float] = server.find(key, _ZSet) or {}
    return _text(scores[member]) if member in scores else None


def _zcard(server: Server, key: bytes) -> Any:
    return len(server.find(key, _ZSet) or ())


def _zrange(server: Server, key: bytes, first: bytes, last: bytes, *options: bytes) -> Any:
    members = server.ordered(key)
    start, stop = _integer(first), _integer(last)
    start, stop = (max(0, i + len(members)) if i < 0 else i for i in (start, stop)) if members else (0, -1)
    chosen = members[start : stop + 1]
    if not options:
        return chosen
    return [part for member in chosen for part in (member, _zscore(server, key, member))]


def _zremrangebyscore(server: Server, key: bytes, least: bytes, most: bytes) -> Any:
    low, high = _score(least), _score(most)
    scores: dict[bytes, float] = server.find(key, _ZSet) or {}
    return _dropped(server, key, _ZSet, [member for member, score in scores.items() if low <= score <= high])


def _hget(server: Server, key: bytes, field: bytes) -> Any:
    fields: dict[bytes, bytes] = server.find(key, _Hash) or {}
    return fields.get(field)


def _hset(server: Server, key: bytes, field: bytes, value: bytes) -> Any:
    fields = server.collection(key, _Hash)
    new = field not in fields
    fields[field] = value
    return int(new)


def _time(server: Server) -> Any:
    seconds, micros = divmod(server.micros(), 1_000_000)
    return [b"%d" % seconds, b"%d" % micros]


def _publish(server: Server, channel: bytes, payload: bytes) -> Any:
    return server.publish(channel, payload)


def _pubsub(server: Server, verb: bytes, channel: bytes) -> Any:
    if verb.upper() != b"NUMSUB":
        raise ServerError("ERR unknown PUBSUB subcommand")
    return [channel, server.subscribers(channel)]


_COMMANDS: Final[dict[bytes, Callable[..., Any]]] = {
    b"GET": _get, b"SET": _set, b"DEL": _del, b"EXISTS": _exists, b"PTTL": _pttl, b"PEXPIRE": _pexpire,
    b"ZADD": _zadd, b"ZREM": _zrem, b"ZSCORE": _zscore, b"ZCARD": _zcard, b"ZRANGE": _zrange,
    b"ZREMRANGEBYSCORE": _zremrangebyscore, b"HGET": _hget, b"HSET": _hset, b"HDEL": _hdel,
    b"TIME": _time, b"PUBLISH": _publish, b"PUBSUB": _pubsub,
}  # fmt: skip
