"""Several Redis commands in one step, unless a newer holder has been at the data. guard.lua decides.

`lease.execute` runs one command beside the lock itself. This is for data in any slot of any server: what is compared
is a fence that stands in a key beside the data, not the lock. Like the lock it needs a server that evicts nothing
(`maxmemory-policy noeviction`); an evicted fence refuses nobody.

Sent over your client, by its rules: it may send a request again if the connection broke before the answer, and then
the commands may run twice. Take those that may (SET, HSET, SADD; not INCR), or a client with no retries.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from interlock._names import duration
from interlock._scripts import load
from interlock.errors import ConfigError, LockError, Unavailable

from . import Fenced, fence_of, refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from interlock._api.lease import Reply

__all__ = ["AsyncClient", "Client", "Incomplete", "aexecute", "execute"]

DONE, STALE, MISUSED, READONLY, FAILED = 1, 2, 3, 4, 5  # as in guard.lua
WEEK: Final = 7 * 86400.0
MOST: Final = 7000  # words of a command: what Lua can pass on
Word = str | bytes | int | float


class Client(Protocol):
    """A client of redis-py or valkey-py: of one server, of Sentinel's master, or of a cluster."""

    def execute_command(self, *args: Any, **options: Any) -> object:
        """Send a command."""
        ...


class AsyncClient(Protocol):
    """The same for asyncio."""

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[object]:
        """Send a command."""
        ...


class Incomplete(LockError):  # noqa: N818 (as LeaseLost)
    """A command failed, and those before it stay applied: Redis takes nothing back."""

    def __init__(self, text: str, failed: int, replies: list[Reply]) -> None:
        super().__init__(text)
        self.failed = failed
        """Which command failed, from 1."""
        self.replies = replies
        """What those before it gave."""


def execute(
    client: Client,
    lease: Fenced,
    commands: Sequence[Sequence[Word]],
    *,
    keys: Sequence[str | bytes],
    beside: str | bytes,
    keep: float = WEEK,
) -> list[Reply]:
    """Run the commands in one atomic step, if no newer holder has done so before: the reply of each.

    Args:
        client: of redis-py or valkey-py, for the server that has the data.
        lease: of the lock that protects the data. Each piece of data has one lock.
        commands: for example [("SET", "{stock}:42", 9), ("INCR", "{stock}:sold")]. None at all only refuses
            older holders from now on; reads among them read what no older holder can change any more.
        keys: all keys of the commands; in a cluster they share a slot with `beside`.
        beside: the key for the fence, next to the data and used for nothing else.
        keep: seconds for which the fence is remembered after its last use. It must be longer than any holder may
            be paused and still write; no key is kept for ever, and nobody wakes up after a week.

    Raises LeaseLost if the fence there is newer, and nothing was run; Incomplete if a command failed; Unavailable
    if the server refuses writes; ConfigError; and the client's own errors as they are.

    """
    _may(client, asynchronous=False)
    script, words = load("guard", "interlock.fence"), _words(lease, commands, keys, beside, keep)
    try:
        reply = client.execute_command("EVALSHA", script.sha, *words)
    except Exception as error:
        if not _unknown(error):
            raise
        reply = client.execute_command("EVAL", script.source, *words)
    return _replies(reply, lease, commands, beside)


async def aexecute(
    client: AsyncClient,
    lease: Fenced,
    commands: Sequence[Sequence[Word]],
    *,
    keys: Sequence[str | bytes],
    beside: str | bytes,
    keep: float = WEEK,
) -> list[Reply]:
    """Do the same as `execute`, with a client for asyncio."""
    _may(client, asynchronous=True)
    script, words = load("guard", "interlock.fence"), _words(lease, commands, keys, beside, keep)
    try:
        reply = await client.execute_command("EVALSHA", script.sha, *words)
    except Exception as error:
        if not _unknown(error):
            raise
        reply = await client.execute_command("EVAL", script.source, *words)
    return _replies(reply, lease, commands, beside)


def _unknown(error: Exception) -> bool:
    """Whether the server did not know the script: redis-py and valkey-py each have a class for it."""
    return any(cls.__name__ == "NoScriptError" for cls in type(error).__mro__)


def _may(client: object, *, asynchronous: bool) -> None:
    if any("Pipeline" in cls.__name__ for cls in type(client).__mro__):
        raise ConfigError("a pipeline can't tell a refusal in time: give the client itself")
    if inspect.iscoroutinefunction(getattr(client, "execute_command", None)) != asynchronous:
        kind = ("threads", "execute()") if asynchronous else ("asyncio", "`await aexecute()`")
        raise ConfigError(f"a client for {kind[0]}: use {kind[1]} with it")


def _words(
    lease: Fenced, commands: Sequence[Sequence[Word]], keys: Sequence[str | bytes], beside: str | bytes, keep: float
) -> list[Word]:
    """What follows the script: numkeys, KEYS, ARGV."""
    keep = duration(keep, "keep", least=1.0)
    if isinstance(keys, str | bytes):
        raise ConfigError(f"lock {lease.name!r}: keys is a list of keys, not {keys!r}")
    if beside in keys:
        raise ConfigError(f"lock {lease.name!r}: the fence needs a key of its own: {beside!r} is data")
    words: list[Word] = [1 + len(keys), beside, *keys, str(fence_of(lease)), round(keep * 1000)]
    for command in commands:
        if isinstance(command, str | bytes) or not 1 <= len(command) <= MOST:
            raise ConfigError(
                f"lock {lease.name!r}: a command is 1 to {MOST} words, as in ('SET', 'key', 9); not {command!r:.60}"
            )
        words += [len(command), *command]
    return words


def _replies(reply: object, lease: Fenced, commands: Sequence[Sequence[Word]], beside: str | bytes) -> list[Reply]:
    code, *rest = cast("list[Any]", reply)
    if code == DONE:
        done: list[Reply] = rest[0]
        return done
    if code == STALE:
        raise refused(lease, int(rest[0]), f"key {_text(beside)}")
    if code == MISUSED:
        raise ConfigError(
            f"lock {lease.name!r}: the key {_text(beside)} holds no fence but something else [{_text(rest[0]):.60}]. "
            "Nothing was run. Give a key that nothing else uses"
        )
    if code == READONLY:
        raise Unavailable(f"lock {lease.name!r}: the server refuses writes, nothing was run [{_text(rest[0])}]")
    assert code == FAILED
    failed, error, replies = cast("tuple[int, object, list[Reply]]", tuple(rest))
    raise Incomplete(
        f"lock {lease.name!r}: command {failed} of {len(commands)} ({_text(commands[failed - 1][0])}) failed: "
        f"{_text(error)}. The {failed - 1} before it stay applied, those after it were not run",
        failed,
        replies,
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
