"""redis-py's Lock, woken by push and served in order: `client.lock(name, lock_class=Lock)`, or `Lock(client, name)`.

Theory. Both classes are redis-py's own, with its arguments, methods, errors and key; only `acquire` and `release` are
ours. So processes with the original and processes with these classes exclude each other while both run. A waiter of
these classes stands in a queue in the server, and the release of a lock of these classes wakes the head of that queue.
The original deletes the key and wakes nobody: while it has the key, the head of the queue polls every `sleep` seconds.
compat/plain_key.lua has the rules.

As with the original, `timeout=None` makes a lock that no crash and no time frees, nothing renews a lock, nobody learns
that its lock expired before it calls `release()`, and a failover may forget the lock. `Interlock.lock` has none of
these faults.
"""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

import redis.asyncio.lock
import redis.lock
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError

from interlock import aio
from interlock._protocol.names import duration
from interlock._protocol.run import run

from . import _plain_key as plain_key
from ._targets import Interlocks, for_threads, unavailable_as
from ._targets import close as close_all

if TYPE_CHECKING:
    from interlock._client.core import Core

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "aclose", "close"]

AnyLock = redis.lock.Lock | redis.asyncio.lock.Lock
ErrorT = TypeVar("ErrorT", bound=LockError)
NOT_OWNED: Final = "Cannot release a lock that's no longer owned"
for_asyncio: Final = Interlocks(aio.Interlock, for_asyncio=True)


class Lock(redis.lock.Lock):
    """redis-py's `redis.lock.Lock`: the same arguments, methods, errors and key."""

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock. Returns False if another has it and the time is over.

        `sleep` (seconds) is how often a waiter looks at a lock that a process with redis-py's own class has. With
        `blocking=False` the call does not wait; else it waits `blocking_timeout` seconds, None for ever. `token` is the
        value of the key, by default a new one. Raises redis-py's ConnectionError, or ConfigError.
        """
        value, timeout = _value(self, token), _timeout(self, blocking, blocking_timeout)
        with unavailable_as(RedisConnectionError):
            if not run(_acquire(self, for_threads, value, timeout, self.sleep if sleep is None else sleep)):
                return False
        self.local.token, self.local.made = value, None if token else value
        return True

    def do_release(self, expected_token: Any) -> None:
        """Release the lock if it has this token. Raises LockNotOwnedError, ConnectionError or ConfigError."""
        with unavailable_as(RedisConnectionError):
            was_ours = run(_release(self, for_threads, expected_token))
        if not was_ours:
            raise _named(LockNotOwnedError(NOT_OWNED), self)


class AsyncLock(redis.asyncio.lock.Lock):
    """redis-py's `redis.asyncio.lock.Lock`: the same arguments, methods, errors and key."""

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Acquire the lock; see `Lock.acquire`. A call that is cancelled leaves nothing in the server."""
        value, timeout = _value(self, token), _timeout(self, blocking, blocking_timeout)
        with unavailable_as(RedisConnectionError):
            if not await _acquire(self, for_asyncio, value, timeout, self.sleep):
                return False
        self.local.token, self.local.made = value, None if token else value
        return True

    async def release(self) -> None:
        """Release the lock. If the call is cancelled, the release goes on, unless the user gave the token.

        Raises LockError, LockNotOwnedError, redis-py's ConnectionError or ConfigError.
        """
        token = self.local.token
        if token is None:
            raise _named(LockError("Cannot release a lock that's not owned or is already unlocked."), self)
        if token == _made(self):
            self.local.token = None
        try:
            await self.do_release(token)
        except LockNotOwnedError:
            self.local.token = None
            raise
        self.local.token = None

    async def do_release(self, expected_token: Any) -> None:
        """Release the lock if it has this token. Raises LockNotOwnedError, ConnectionError or ConfigError."""
        with unavailable_as(RedisConnectionError):
            was_ours = await _release(self, for_asyncio, expected_token)
        if not was_ours:
            raise _named(LockNotOwnedError(NOT_OWNED), self)


def close() -> None:
    """Close the connections and end the threads behind `Lock`. Locks stay held; the next call makes new ones."""
    close_all()


async def aclose() -> None:
    """Close the connections of the running loop behind `AsyncLock`; its next call makes new ones."""
    while for_asyncio.made:
        await for_asyncio.made.pop()[1].close()


# What both classes share


async def _acquire(
    lock: AnyLock, interlocks: Interlocks[Any], value: bytes, timeout: float | None, sleep: float
) -> bool:
    resource = plain_key.plain_key_resource(_name(lock))
    options = plain_key.options_of(lock.timeout or None, "timeout")
    return await plain_key.acquire(_core(lock, interlocks), resource, options, value, timeout, sleep)


async def _release(lock: AnyLock, interlocks: Interlocks[Any], value: bytes) -> bool:
    resource = plain_key.plain_key_resource(_name(lock))
    # Nobody acquires the lock again with a token that was made here: so the release may be repeated for long.
    repeat_for = plain_key.options_of(lock.timeout or None, "timeout") if value == _made(lock) else None
    return await plain_key.release(_core(lock, interlocks), resource, value, repeat_for=repeat_for)


def _core(lock: AnyLock, interlocks: Interlocks[Any]) -> Core:
    """The client for the server of this lock's redis-py client."""
    return interlocks.plain(_client(lock)).core


def _client(lock: Any) -> Any:
    return lock.redis


def _pool(lock: AnyLock) -> Any:
    """The pool of the lock's client; a client of a cluster has none, and is as good here."""
    client = _client(lock)
    return getattr(client, "connection_pool", client)


def _name(lock: Any) -> str:
    return lock.name if isinstance(lock.name, str) else bytes(lock.name).decode(errors="surrogateescape")


def _value(lock: AnyLock, token: str | bytes | None) -> bytes:
    """The value of the key for this token, or a new value."""
    if token is None:
        return uuid.uuid4().hex.encode()
    value: bytes = _pool(lock).get_encoder().encode(token)
    return value


def _made(lock: AnyLock) -> bytes | None:
    """The token that this thread's last `acquire` made itself, if any."""
    made: bytes | None = getattr(lock.local, "made", None)
    return made


def _timeout(lock: AnyLock, blocking: bool | None, blocking_timeout: float | None) -> float | None:
    """How many seconds the call waits: None for ever. Raises ConfigError."""
    if not (lock.blocking if blocking is None else blocking):
        return 0.0
    seconds: Any = lock.blocking_timeout if blocking_timeout is None else blocking_timeout
    return None if seconds is None else max(0.0, duration(seconds, "blocking_timeout", minimum=-math.inf))


def _named(error: ErrorT, lock: AnyLock) -> ErrorT:
    error.lock_name = _name(lock)  # redis-py 5 has no argument for it
    return error
