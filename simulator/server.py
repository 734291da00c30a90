"""A server: the real Lua scripts on a small Redis in memory, under the virtual clock.

Theory. Scripts run in a real Lua 5.1 (lupa), one after the other, and call the commands of commands.py. As in Redis,
numbers in replies lose their fractions, an unknown SHA gives NOSCRIPT, and the time stands still during a script.

Without free memory the server refuses each command that needs memory, unless the script has written before: Redis does
the same, because it can't stop such a script in the middle. `tests/model/test_simulator.py` compares the replies with
those of fakeredis, which is many times slower.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.server import ServerError

from .commands import COMMANDS, TAKE_MEMORY, WRITES, ZSet, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLOCK_START: Final = 1_700_000_000_000_000  # µs: the server's clock when the world begins
READONLY: Final = "READONLY You can't write against a read only replica."

_PRELUDE: Final = """
local run, decode = ...
local pcall, type, tostring, error = pcall, type, tostring, error
local seconds, micros  -- a script sees one time
KEYS, ARGV = {}, {}
cjson = {decode = decode}
redis = {
  call = function(command, ...)
    if command == 'TIME' then return {seconds, micros} end
    local reply = run(command, ...)
    if type(reply) == 'table' and reply.err then error(reply, 0) end
    return reply
  end,
  pcall = run,
  error_reply = function(text) return {err = text} end,
  status_reply = function(text) return {ok = text} end,
}
local function strict(_, name) error('Script attempted to access a global variable: ' .. tostring(name), 2) end
setmetatable(_G, {__index = strict, __newindex = strict})
return function(script, now_s, now_us, keys, argv)
  seconds, micros, KEYS, ARGV = now_s, now_us, keys, argv
  local ok, reply = pcall(script)
  if ok then return reply end
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


@cache
def _sha(source: str) -> str:
    return hashlib.sha1(source.encode()).hexdigest()  # noqa: S324 (Redis names scripts so)


class Interpreter:
    """One Lua for all servers of this process, which take turns: a script ends before the next one begins."""

    def __init__(self) -> None:
        lua = _lua()
        runtime = lua.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self.kind: Any = lua.lua_type
        self.table: Any = runtime.table_from
        self.run: Any = runtime.execute(_PRELUDE, self._command, self._decoded)
        self._runtime: Any = runtime
        self._compiled: dict[str, Any] = {}
        self.server: Server  # whose script runs

    def script(self, sha: str, source: str = "") -> Any:
        """Return the script as a Lua function."""
        if sha not in self._compiled:
            self._compiled[sha] = self._runtime.compile(source.encode())
        return self._compiled[sha]

    def _command(self, command: bytes, *args: Any) -> Any:
        return self.server.command(command, *args)

    def _decoded(self, words: bytes) -> Any:
        """Decode a list of words and numbers as cjson.decode does."""
        return self.table([word.encode() if isinstance(word, str) else word for word in json.loads(words)])


@cache
def _interpreter() -> Interpreter:
    return Interpreter()


class Server:
    """One server: its keys with their ends, its loaded scripts, and its clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lua = _interpreter()
        self._table: Any = self._lua.table
        self.known_scripts: set[str] = set()
        self.data: dict[bytes, Any] = {}
        self.expires: dict[bytes, int] = {}
        self.skew = 0.0  # seconds by which its clock is ahead of `now`
        self.full = False  # no memory is left
        self.refused_at = -1.0  # seconds: when it last refused a command for lack of memory
        self.scripts = 0
        self.publish: Callable[[bytes, bytes], int] = lambda _channel, _payload: 0
        self.subscribers: Callable[[bytes], int] = lambda _channel: 0
        self.info: Callable[[str], bytes] = lambda _section: b"role:master\r\nmaster_replid:%s\r\n" % (b"0" * 40)
        self.is_replica = False  # so it refuses every write
        self.micros = CLOCK_START  # its clock at the last read_clock()
        self._written = False  # whether the running script has written
        self.now_ms = CLOCK_START // 1000  # the same in ms, by which keys end

    # Time

    def read_clock(self) -> int:
        """Read the clock. Returns its time in ms."""
        self.micros = CLOCK_START + round((self._now() + self.skew) * 1e6)
        self.now_ms = self.micros // 1000
        return self.now_ms

    # Scripts

    def evalsha(self, sha: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """Run a loaded script. Returns an int, bytes, None, a list of these, or a ServerError."""
        if sha not in self.known_scripts:
            return ServerError("NOSCRIPT No matching script. Please use EVAL.")
        self.scripts += 1
        self.read_clock()
        self._written = False
        seconds, micros = divmod(self.micros, 1_000_000)
        lua, table = self._lua, self._table
        lua.server = self
        reply = lua.run(lua.script(sha), b"%d" % seconds, b"%d" % micros, table(keys), table(args))
        return self._python(reply)

    def eval(self, source: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """Load a script and run it."""
        sha = _sha(source)
        self._lua.script(sha, source)
        self.known_scripts.add(sha)
        return self.evalsha(sha, keys, args)

    def _python(self, value: Any) -> Any:
        """Return a value of Lua as the reply that Redis makes of it."""
        if type(value) is bytes:
            return value
        if isinstance(value, int | float):
            return None if value is False else int(value)
        if value is None or self._lua.kind(value) != "table":
            return None
        listed: list[Any] = []
        while (item := value[len(listed) + 1]) is not None:
            listed.append(item if type(item) is bytes else self._python(item))
        if listed:
            return listed
        if (error := value[b"err"]) is not None:
            return ServerError(error.decode(errors="replace"))
        return listed if value[b"ok"] is None else value[b"ok"]

    def command(self, command: bytes, *args: Any) -> Any:
        """Run a command of a script. Returns the reply as a value of Lua; {err=...} if the command failed."""
        name = command if command in COMMANDS else command.upper()
        try:
            if name not in COMMANDS:
                raise ServerError(f"ERR the simulator has no command {name.decode()}: add it to commands.py")
            if self.is_replica and name in WRITES:
                raise ServerError(READONLY)
            if self.full and name in TAKE_MEMORY and not self._written:
                self.refused_at = self._now()
                raise ServerError("OOM command not allowed when used memory > 'maxmemory'.")
            reply = COMMANDS[name](self, *[arg if type(arg) is bytes else text(arg) for arg in args])
        except ServerError as error:
            return self._table({b"err": str(error).encode()})
        if name in WRITES:
            self._written = True
        if reply is None:
            return False
        return self._table(reply) if type(reply) is list else reply

    # Keys

    def image(self) -> tuple[dict[bytes, Any], dict[bytes, int]]:
        """Return a copy of all keys and their ends, as a disk or a replica may have it."""
        data = {key: value if type(value) is bytes else type(value)(value) for key, value in self.data.items()}
        return data, dict(self.expires)

    def find(self, key: bytes, kind: type[Any]) -> Any:
        """Return the value of a key, or None if the key does not exist. Raises WRONGTYPE."""
        value = self.data.get(key)
        if value is None:
            return None
        until = self.expires.get(key)
        if until is not None and until < self.now_ms:
            self.remove(key)
            return None
        if type(value) is not kind:
            raise ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def purge(self, key: bytes) -> None:
        """Delete the key if its time is over."""
        until = self.expires.get(key)
        if until is not None and until < self.now_ms:
            self.remove(key)

    def purge_all(self) -> None:
        """Delete all keys whose time is over, as a real server does in the background."""
        self.read_clock()
        for key in list(self.expires):
            self.purge(key)

    def remove(self, key: bytes) -> bool:
        """Delete the key. Returns whether it existed."""
        self.expires.pop(key, None)
        return self.data.pop(key, None) is not None

    def collection(self, key: bytes, kind: type[Any]) -> Any:
        """Return the collection at this key; create it if there is none."""
        value = self.find(key, kind)
        if value is None:
            value = self.data[key] = kind()
        return value

    def ordered(self, key: bytes) -> list[bytes]:
        """Return the members of a sorted set in order."""
        scores: dict[bytes, float] = self.find(key, ZSet) or {}
        return sorted(scores, key=lambda member: (scores[member], member)) if len(scores) > 1 else list(scores)
