"""Several Redis commands in one atomic step, unless a newer holder has written to the data. guard.lua decides.

`lease.execute` runs one command in the slot of the lock. `execute` here is for data in any slot of any server: the
script compares the lease's fence with a fence that a key next to the data stores, not with the lock. Like the lock, the
fence needs a server that evicts nothing (`maxmemory-policy noeviction`): an evicted fence refuses nobody.

Your client sends the commands, by its own rules: it may send a request again if the connection broke before the reply,
and then the server may run the commands twice. Use commands for which that does no harm (SET, HSET, SADD; not INCR), or
a client without retries.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from interlock._protocol.names import duration
from interlock._protocol.run_to_end import run
from interlock.errors import ConfigError, LockError, Unavailable
from interlock.primitives.scripts import load

from . import Fenced, fence_of, stale_fence_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from interlock._api.lease import Reply

__all__ = ["AsyncClient", "Client", "Incomplete", "aexecute", "execute"]

DONE, STALE, WRONG_KIND, READONLY, FAILED = 1, 2, 3, 4, 5  # as in guard.lua
WEEK: Final = 7 * 86400.0
MAX_COMMAND_WORDS: Final = 7000  # words of a command: what Lua can unpack
Word = str | bytes | int | float


class Client(Protocol):
    """A client of redis-py or valkey-py: for one server, Sentinel's master, or a cluster."""

    def execute_command(self, *args: Any, **options: Any) -> object:
        """Send a command."""
        ...


class AsyncClient(Protocol):
    """A client for asyncio, of the same kinds."""

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[object]:
        """Send a command."""
        ...


class Incomplete(LockError):  # noqa: N818 (as LeaseLost)
    """A command failed, and the commands before it stay applied: Redis has no rollback."""

    def __init__(self, text: str, failed: int, replies: list[Reply]) -> None:
        super().__init__(text)
        self.failed = failed
        """The number of the command that failed, from 1."""
        self.replies = replies
        """The replies of the commands before it."""


def execute(
    client: Client,
    lease: Fenced,
    commands: Sequence[Sequence[Word]],
    *,
    keys: Sequence[str | bytes],
    fence_key: str | bytes,
    keep: float = WEEK,
) -> list[Reply]:
    """Run the commands in one atomic step, unless a newer holder has done so. Returns the reply of each command.

    Args:
        client: a client of redis-py or valkey-py, for the server that has the data.
        lease: a lease on the lock that protects the data. Each piece of data has one lock.
        commands: for example [("SET", "{stock}:42", 9), ("INCR", "{stock}:sold")]. An empty list only refuses
            older holders from now on. No older holder can change any more what these commands read.
        keys: all keys of the commands; in a cluster they share a slot with `fence_key`.
        fence_key: the key for the fence, next to the data and used for nothing else.
        keep: seconds for which the server remembers the fence after its last use. It must be longer than any
            holder may be paused and still write: by default a week, since no key is kept for ever.

    Raises StaleFence if the stored fence is newer, and the server ran nothing; Incomplete if a command failed;
    Unavailable if the server refuses writes; ConfigError; and the client's own errors.

    """
    _check_client(client, asynchronous=False)

    async def send(*words: Word) -> object:
        return client.execute_command(*words)

    return run(_execute(send, lease, commands, keys, fence_key, keep))


async def aexecute(
    client: AsyncClient,
    lease: Fenced,
    commands: Sequence[Sequence[Word]],
    *,
    keys: Sequence[str | bytes],
    fence_key: str | bytes,
    keep: float = WEEK,
) -> list[Reply]:
    """Run the commands as `execute` does, with a client for asyncio."""
    _check_client(client, asynchronous=True)
    return await _execute(client.execute_command, lease, commands, keys, fence_key, keep)


async def _execute(
    send: Callable[..., Awaitable[object]],
    lease: Fenced,
    commands: Sequence[Sequence[Word]],
    keys: Sequence[str | bytes],
    fence_key: str | bytes,
    keep: float,
) -> list[Reply]:
    """See `execute`. Sends the script by its SHA1, and its text only to a server that does not know the script."""
    script, words = load("guard", "interlock.fence"), _words(lease, commands, keys, fence_key, keep)
    try:
        reply = await send("EVALSHA", script.sha, *words)
    except Exception as error:
        if not _is_noscript(error):
            raise
        reply = await send("EVAL", script.source, *words)
    return _replies(reply, lease, commands, fence_key)


def _is_noscript(error: Exception) -> bool:
    """Whether the server does not know the script: redis-py and valkey-py have a class of their own for that reply."""
    return any(cls.__name__ == "NoScriptError" for cls in type(error).__mro__)


def _check_client(client: object, *, asynchronous: bool) -> None:
    if any("Pipeline" in cls.__name__ for cls in type(client).__mro__):
        raise ConfigError("a pipeline would return a refusal only at its end: give the client itself")
    if inspect.iscoroutinefunction(getattr(client, "execute_command", None)) != asynchronous:
        kind = ("threads", "execute()") if asynchronous else ("asyncio", "`await aexecute()`")
        raise ConfigError(f"the client is for {kind[0]}: use {kind[1]} with it")


def _words(
    lease: Fenced, commands: Sequence[Sequence[Word]], keys: Sequence[str | bytes], fence_key: str | bytes, keep: float
) -> list[Word]:
    """The arguments after the script: numkeys, KEYS, ARGV."""
    keep = duration(keep, "keep", minimum=1.0)
    if isinstance(keys, str | bytes):
        raise ConfigError(f"lock {lease.name!r}: keys is a list of keys, not {keys!r}")
    if fence_key in keys:
        raise ConfigError(
            f"lock {lease.name!r}: the fence needs a key of its own, and {fence_key!r} is a key of the commands"
        )
    words: list[Word] = [1 + len(keys), fence_key, *keys, str(fence_of(lease)), round(keep * 1000)]
    for command in commands:
        if isinstance(command, str | bytes) or not 1 <= len(command) <= MAX_COMMAND_WORDS:
            raise ConfigError(
                f"lock {lease.name!r}: a command is 1 to {MAX_COMMAND_WORDS} words, as in ('SET', 'key', 9); "
                f"not {command!r:.60}"
            )
        words += [len(command), *command]
    return words


def _replies(reply: object, lease: Fenced, commands: Sequence[Sequence[Word]], fence_key: str | bytes) -> list[Reply]:
    code, *rest = cast("list[Any]", reply)
    if code == DONE:
        done: list[Reply] = rest[0]
        return done
    if code == STALE:
        raise stale_fence_error(lease, int(rest[0]), f"key {_text(fence_key)}")
    if code == WRONG_KIND:
        raise ConfigError(
            f"lock {lease.name!r}: the key {_text(fence_key)} holds no fence, but other data "
            f"[{_text(rest[0]):.60}]; nothing was run. Give a key that nothing else uses"
        )
    if code == READONLY:
        raise Unavailable(f"lock {lease.name!r}: the server refuses writes, nothing was run [{_text(rest[0])}]")
    assert code == FAILED
    failed, error, replies = cast("tuple[int, object, list[Reply]]", tuple(rest))
    raise Incomplete(
        f"lock {lease.name!r}: command {failed} of {len(commands)} ({_text(commands[failed - 1][0])}) failed: "
        f"{_text(error)}. The {failed - 1} commands before it stay applied, those after it were not run",
        failed,
        replies,
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
