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

import contextlib
import math
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar

import redis.asyncio.lock
import redis.lock
from redis.exceptions import AuthenticationError, LockError, LockNotOwnedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from interlock._protocol.names import duration
from interlock._protocol.run_to_end import run
from interlock.errors import ConfigError, Deadlock, Unavailable
from interlock.errors import LockError as InterlockLockError

from . import _plain_key as plain_key
from ._self_closing import SelfClosingInterlock
from ._targets import Interlocks, for_threads
from ._targets import close as close_all

if TYPE_CHECKING:
    from collections.abc import Generator

    from interlock._client.acquiring import Core

__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError", "aclose", "close"]

AnyLock = redis.lock.Lock | redis.asyncio.lock.Lock
ErrorT = TypeVar("ErrorT", bound=LockError)
NOT_OWNED: Final = "Cannot release a lock that's no longer owned"
for_asyncio: Final = Interlocks(SelfClosingInterlock, for_asyncio=True)


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
        value of the key, by default a new one. Raises redis-py's ConnectionError or ResponseError, and ConfigError.
        """
        value, timeout = _value(self, token), _timeout(self, blocking, blocking_timeout)
        try:
            sleep, was_given = self.sleep if sleep is None else sleep, token is not None
            if not run(_acquire(self, for_threads, value, timeout, sleep, was_given=was_given)):
                return False
            self.local.token, self.local.made = value, value if token is None else None
        except Exception:
            raise
        except BaseException:  # Ctrl-C, which may have come after the grant
            _forget(self, value)
            if token is None:
                _release_later(self, for_threads, value)
            raise
        return True

    def do_release(self, expected_token: Any) -> None:
        """Release the lock if it has this token. Raises LockNotOwnedError, ConnectionError or ResponseError."""
        try:
            was_ours = run(_release(self, for_threads, expected_token))
        except BaseException:  # also Ctrl-C
            if expected_token == _made(self):
                _release_later(self, for_threads, expected_token)
            raise
        if not was_ours:
            raise _named(LockNotOwnedError(NOT_OWNED), self)

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that changes what this class does not use."""
        super().__init_subclass__(**options)
        _check_overrides(cls, redis.lock.Lock)


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
        if not await _acquire(self, for_asyncio, value, timeout, self.sleep, was_given=token is not None):
            return False
        self.local.token, self.local.made = value, value if token is None else None
        return True

    async def release(self) -> None:
        """Release the lock. If the call is cancelled, the release goes on, unless the user gave the token.

        Raises LockError, LockNotOwnedError, redis-py's ConnectionError or ResponseError.
        """
        token = self.local.token
        if token is None:
            raise _named(LockError("Cannot release a lock that's not owned or is already unlocked."), self)
        if token == _made(self):
            self.local.token = None
        try:
            await self.do_release(token)
        except LockNotOwnedError:
            _forget(self, token)
            raise
        _forget(self, token)  # unless another task has acquired the lock through this object meanwhile

    async def do_release(self, expected_token: Any) -> None:
        """Release the lock if it has this token. Raises LockNotOwnedError, ConnectionError or ResponseError."""
        try:
            was_ours = await _release(self, for_asyncio, expected_token)
        except BaseException:  # also a cancellation
            if expected_token == _made(self):
                _release_later(self, for_asyncio, expected_token)
            raise
        if not was_ours:
            raise _named(LockNotOwnedError(NOT_OWNED), self)

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that changes what this class does not use."""
        super().__init_subclass__(**options)
        _check_overrides(cls, redis.asyncio.lock.Lock)


def close() -> None:
    """Close the connections and end the threads behind `Lock`, and behind the other drop-ins for threads.

    Locks stay held; the next call makes new connections. Functions under `RedisLock.redis_lock` of `recipes` lose their
    lease.
    """
    close_all()


async def aclose() -> None:
    """Close the connections of the running loop behind `AsyncLock`; its next call makes new ones.

    The end of asyncio.run() closes them, too.
    """
    for _, locks in list(for_asyncio.made):
        await locks.close_here()


# What both classes share


async def _acquire(
    lock: AnyLock, interlocks: Interlocks[Any], value: bytes, timeout: float | None, sleep: float, *, was_given: bool
) -> bool:
    resource = plain_key.plain_key_resource(_name(lock))
    options = plain_key.options_of(lock.timeout or None, "timeout")
    core, poll = _core(lock, interlocks), duration(plain_key.plain_number(sleep), "sleep")
    with _errors_of_redis_py(lock, core):
        return await plain_key.acquire(core, resource, options, value, timeout, poll, is_unique=not was_given)


async def _release(lock: AnyLock, interlocks: Interlocks[Any], value: bytes) -> bool:
    core, resource = _core(lock, interlocks), plain_key.plain_key_resource(_name(lock))
    with _errors_of_redis_py(lock, core):
        return await plain_key.release(core, resource, value)


def _release_later(lock: AnyLock, interlocks: Interlocks[Any], value: bytes) -> None:
    """Release in the background, as long as the lock may last. Only for a token that `acquire` made itself."""
    options = plain_key.options_of(lock.timeout or None, "timeout")
    plain_key.release_later(_core(lock, interlocks), plain_key.plain_key_resource(_name(lock)), value, options)


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
    """The name as text. Raises ConfigError, or redis-py's DataError."""
    if isinstance(lock.name, str):
        return lock.name
    try:
        return bytes(_pool(lock).get_encoder().encode(lock.name)).decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"lock {lock.name!r}: its name is not UTF-8, which interlock needs. Encode it, as base64.b64encode() does"
        ) from None


def _value(lock: AnyLock, token: str | bytes | None) -> bytes:
    """The value of the key for this token, or a new value."""
    if token is None:
        return uuid.uuid4().hex.encode()
    return bytes(_pool(lock).get_encoder().encode(token))


def _forget(lock: AnyLock, token: bytes) -> None:
    """Forget that this thread holds the lock with this token."""
    if getattr(lock.local, "token", None) == token:
        lock.local.token = None


def _made(lock: AnyLock) -> bytes | None:
    """The token that this thread's last `acquire` made itself, if any."""
    made: bytes | None = getattr(lock.local, "made", None)
    return made


def _timeout(lock: AnyLock, blocking: bool | None, blocking_timeout: float | None) -> float | None:
    """How many seconds the call waits: None for ever. Raises ConfigError."""
    if not (lock.blocking if blocking is None else blocking):
        return 0.0
    seconds: Any = lock.blocking_timeout if blocking_timeout is None else blocking_timeout
    if seconds is None or seconds == math.inf:
        return None
    return max(0.0, duration(plain_key.plain_number(seconds), "blocking_timeout", minimum=-math.inf))


def _named(error: ErrorT, lock: Any) -> ErrorT:
    error.lock_name = lock.name  # redis-py 5 has no argument for it
    return error


@contextlib.contextmanager
def _errors_of_redis_py(lock: AnyLock, core: Core) -> Generator[None, None, None]:
    """Raise redis-py's errors in place of interlock's. The arguments of the user are checked before."""
    try:
        yield
    except Unavailable as error:
        raise RedisConnectionError(str(error)) from error
    except Deadlock as error:
        raise _named(LockError(str(error)), lock) from error
    except InterlockLockError as error:  # an error reply of the server
        if core.requests.closed:
            raise RedisConnectionError(f"lock {lock.name!r}: its connections were closed by close()") from error
        cause = error.__context__  # redis-py for asyncio wraps the error of a login
        is_login = isinstance(cause, AuthenticationError) or isinstance(cause and cause.__cause__, AuthenticationError)
        raise (AuthenticationError if is_login else ResponseError)(str(error)) from error


def _check_overrides(cls: type, original: type) -> None:
    """Raise ConfigError if this class replaces what redis-py's class uses, and interlock's does not."""
    for name in ("do_acquire", "LUA_RELEASE_SCRIPT"):
        if getattr(cls, name) is not getattr(original, name):
            raise ConfigError(
                f"{cls.__qualname__} replaces {name}, which interlock's {original.__name__} does not use: it acquires "
                "and releases by a script of its own. Override acquire() or do_release() instead"
            )
