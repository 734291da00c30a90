"""Well-known lock recipes under their usual names, made safe.

Theory. In a recipe the lock is a value: one process acquires it, and any other process may release it. So this module
detaches a lease from the process as soon as the server has granted it, and keeps only its token: the process does not
renew the lease, watch it, or release it on exit. The lease expires after `timeout`; any process that has the token may
release it earlier, in one step that hands over to the next waiter. Only `redis_lock` holds a lease while a function
runs: the process renews that lease.

The lock of a recipe is the same plain string key as before: old code and new code exclude each other while both run.
"""

from __future__ import annotations

import functools
import inspect
import secrets
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, overload

from interlock._client.grant import Grant
from interlock._protocol.names import MIN_TTL, duration
from interlock._protocol.run_to_end import run
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives.codes import GRANTED, NOT_FOUND
from interlock.primitives.lock import lock_resource
from interlock.primitives.permits import semaphore_resource

from ._targets import MAX_TTL, Cache, Client, close, interlock_for, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.resource import Resource
    from interlock.threads import Interlock, Lock, Semaphore

__all__ = [
    "Cache", "Client", "GoZeroLock", "RedisLock", "acquire_fair_semaphore", "acquire_semaphore",
    "acquire_semaphore_with_lock", "close", "refresh_fair_semaphore", "refresh_semaphore", "release_fair_semaphore",
    "release_semaphore",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
DEFAULT_EXPIRE: Final = (
    30.0  # seconds, of a GoZeroLock: the default of go-zero, half a second, is too short for most work
)
SEMAPHORE_PREFIX: Final = "lock:"  # as Interlock's: a semaphore here can't share the key of the recipe's sorted set


class RedisLock:
    """A lock whose holder has a value, as many code bases have it under this name.

    `target` is a client or a Django cache on Redis; the lock's key is the one that the cache would use. Any other kind
    of cache is a ConfigError. `max_ttl` (seconds) is the longest timeout that `get_lock` accepts. Threads may share one
    RedisLock.
    """

    def __init__(self, target: Client | Cache | object, *, max_ttl: float = MAX_TTL) -> None:
        self._target = target
        self._max_ttl = max_ttl
        self._resolve("any")  # raises ConfigError now if the target is wrong

    @overload
    def get_lock(self, key: str, timeout: float) -> str: ...
    @overload
    def get_lock(self, key: str, timeout: float, *, wait: float | None) -> str | None: ...
    def get_lock(self, key: str, timeout: float, *, wait: float | None = None) -> str | None:
        """Acquire the lock, and return a value for `del_lock`, in this process or another one.

        The lock expires after `timeout` seconds in any case. `wait` is in seconds: by default the call waits for ever,
        as the recipe does; 0 does not wait. Returns None if the call did not acquire the lock in that time. Raises
        ConfigError or Unavailable.
        """
        locks, name = self._resolve(key)
        ttl = _checked_ttl(timeout, "timeout", locks)
        return _acquire_and_detach(locks.lock(name, ttl=ttl, renew=False), _checked_wait(wait))

    def del_lock(self, key: str, value: str | bytes | None) -> bool:
        """Release the lock. Returns whether this value still held it; any other value, or None, releases nothing.

        Raises ConfigError, or Unavailable if the server does not answer; then the lock expires after its timeout.
        """
        locks, name = self._resolve(key)
        return _release(locks, lock_resource(name, locks.prefix), value)

    @overload
    def redis_lock(
        self, key: str | Callable[..., str], timeout: float, *, wait: float | None = None, skip: Literal[False] = False
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
    @overload
    def redis_lock(
        self, key: str | Callable[..., str], timeout: float, *, wait: float | None = None, skip: bool
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def redis_lock(
        self, key: str | Callable[..., str], timeout: float, *, wait: float | None = None, skip: bool = False
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorate a function: each call runs under the lock, and releases it however the call ends.

        Args:
            key: the name, or a function that makes it from the arguments of the call, as `"report:{0}".format` does.
            timeout: seconds after which others may acquire the lock if this process has died. interlock renews the
                lock while the function runs, so the function may take longer. More than `max_ttl` counts as `max_ttl`.
            wait: seconds to wait for the lock; None waits for ever, as `get_lock` does, 0 does not wait.
            skip: return None if the call does not acquire the lock in that time; by default it raises AcquireTimeout.

        A call raises LeaseLost if it lost the lock while the function ran, and Unavailable if no server answers. Inside
        a call, the same thread may make other calls under the same key. Raises ConfigError.

        """
        ttl = min(duration(timeout, "timeout", minimum=MIN_TTL), self._max_ttl)
        wait = _checked_wait(wait)
        if not callable(key):  # raises ConfigError for a wrong key now, not at the first call
            locks, name = self._resolve(key)
            lock_resource(name, locks.prefix)

        def decorated(function: Callable[P, R]) -> Callable[P, R | None]:
            if inspect.iscoroutinefunction(function):
                raise ConfigError(f"{function.__qualname__} is `async def`: decorate it with a lock of interlock.aio")

            @functools.wraps(function)
            def locked(*args: P.args, **kwargs: P.kwargs) -> R | None:
                locks, name = self._resolve(key(*args, **kwargs) if callable(key) else key)
                try:
                    lease = locks.rlock(name, ttl=ttl).acquire(wait)
                except AcquireTimeout:
                    if skip:
                        return None
                    raise
                with lease:
                    return function(*args, **kwargs)

            return locked

        return decorated

    def _resolve(self, key: str) -> tuple[Interlock, str]:
        return resolve(self._target, key, self._max_ttl)


class GoZeroLock:
    """A lock with the interface of go-zero's: the lock has an id, and the same id may acquire it again at once.

    `target` as for RedisLock. `key` is the key in the server, so this lock and Go programs that use the same key
    exclude each other. The default `id` is random. With an `id` of your own, a process with the same id, or the same
    process after a restart, takes the lock over. `max_ttl` (seconds) is the longest time that `set_expire` accepts.
    Raises ConfigError.
    """

    def __init__(
        self,
        target: Client | Cache | object,
        key: str,
        id: str | None = None,  # noqa: A002 (the name in go-zero)
        *,
        max_ttl: float = MAX_TTL,
    ) -> None:
        if id is not None and not (isinstance(id, str) and id):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"lock {key!r}: id must be a str that names one holder in all its processes, not {id!r}")
        self.id = id or secrets.token_hex(8)
        self._target = target
        self._key = key
        self._max_ttl = max_ttl
        self._token: str | None = None
        locks, _ = self._resolve()
        self._expire = min(DEFAULT_EXPIRE, locks.max_ttl)

    def set_expire(self, seconds: float) -> None:
        """Set how many seconds the lock lasts from the next `acquire` on. Raises ConfigError."""
        locks, _ = self._resolve()
        self._expire = _checked_ttl(seconds, "seconds", locks)

    def acquire(self) -> bool:
        """Acquire the lock if it is free, or extend it if this id holds it. Returns whether this id now holds it.

        Does not wait. Raises ConfigError or Unavailable.
        """
        locks, name = self._resolve()
        if (
            self._token
            and _renew(locks, lock_resource(name, locks.prefix), self._token.encode(), self._expire) == GRANTED
        ):
            return True
        token = _acquire_and_detach(locks.rlock(name, owner=self.id, ttl=self._expire, renew=False), 0)
        if token is not None:
            self._token = token
        return token is not None

    def release(self) -> bool:
        """Release the lock that this object acquired. Returns whether this object still held it.

        To release it from another process, acquire it there first, with the same id. Raises ConfigError, or Unavailable
        if the server does not answer.
        """
        locks, name = self._resolve()
        return _release(locks, lock_resource(name, locks.prefix), self._token)

    def _resolve(self) -> tuple[Interlock, str]:
        return resolve(self._target, self._key, self._max_ttl)


def acquire_semaphore(conn: Client, semname: str, limit: int, timeout: float = 10) -> str | None:
    """Acquire one of `limit` permits: returns an identifier for `release_semaphore`, or None if no permit is free.

    Any process may release the permit. It expires after `timeout` seconds unless `refresh_semaphore` extends it. This
    is the same semaphore as `Interlock(conn).semaphore(semname, limit)`, which can also wait. Raises ConfigError (also
    if others use another limit now) or Unavailable.
    """
    locks = interlock_for(conn, SEMAPHORE_PREFIX)
    ttl = _checked_ttl(timeout, "timeout", locks)
    return _acquire_and_detach(locks.semaphore(semname, limit, ttl=ttl, renew=False), 0)


def release_semaphore(conn: Client, semname: str, identifier: str | bytes | None) -> bool:
    """Release a permit. Returns whether this identifier still held it. Raises ConfigError or Unavailable."""
    locks = interlock_for(conn, SEMAPHORE_PREFIX)
    return _release(locks, semaphore_resource(semname, locks.prefix, 1), identifier)


def refresh_semaphore(conn: Client, semname: str, identifier: str | bytes | None, timeout: float = 10) -> bool:
    """Extend a permit to at least `timeout` seconds from now. Returns whether this identifier still holds it.

    Raises ConfigError or Unavailable.
    """
    locks = interlock_for(conn, SEMAPHORE_PREFIX)
    resource = semaphore_resource(semname, locks.prefix, 1)
    ttl = _checked_ttl(timeout, "timeout", locks)
    return bool(_renew(locks, resource, _token_of(resource, identifier), ttl) == GRANTED)


# Every semaphore here is fair, and grants the last permit in one atomic step: it needs no counter and no lock.
acquire_fair_semaphore = acquire_semaphore_with_lock = acquire_semaphore
release_fair_semaphore = release_semaphore
refresh_fair_semaphore = refresh_semaphore


# From a lease to a value, and back


def _acquire_and_detach(lockable: Lock | Semaphore, wait: float | None) -> str | None:
    """Acquire, detach the lease from this process, and return its token; None if the wait was over first."""
    while True:
        try:
            lease = lockable.acquire(timeout=wait)
        except AcquireTimeout:
            return None
        grant = lease._grant
        if not grant.hold.claim.in_doubt:
            lease._core.book.remove(grant.hold)
            grant.end(Grant.RELEASED)
            return lease.token
        # A copy of the request may reach the server late: releasing the lease makes sure that it acquires nothing.
        lease.release()
        wait = None if wait is None else 0


def _release(locks: Interlock, resource: Resource, value: object) -> bool:
    """Release, and hand over to the next waiter. Returns whether this value still held it."""
    token = _token_of(resource, value)
    if _renew(locks, resource, token, MIN_TTL) == NOT_FOUND:
        return False  # a release alone can't tell: the server answers a second copy of it as it answered the first
    was_held, ask_again = False, 1
    while ask_again:  # one script call drops only a limited number of dead waiters
        is_ours, ask_again = run(locks._session.core.requests.query(resource, "release", token, "0"))
        was_held |= bool(is_ours)
    return was_held


def _renew(locks: Interlock, resource: Resource, token: bytes, ttl: float) -> Any:
    """Extend to at least `ttl` seconds. Returns GRANTED, NOT_FOUND if not held, [REVOKED, why], or an error text."""
    if not token:
        return NOT_FOUND
    narrowed = resource._replace(keys=resource.renew_keys)
    (state,) = run(locks._session.core.requests.query(narrowed, "renew", token, str(int(ttl * 1000))))
    return state


def _token_of(resource: Resource, value: object) -> bytes:
    """The token in the server for this value; empty if this value can hold nothing. Redis returns values as bytes."""
    token = b"" if value is None else value.encode(errors="replace") if isinstance(value, str) else value
    if not isinstance(token, bytes):
        raise ConfigError(f"{resource}: a value is the str that acquiring it returned, not {value!r}")
    # A token with this prefix marks a lease that was revoked, and that its holder has not released yet.
    return b"" if token.startswith(b"!") else token


def _checked_ttl(value: object, name: str, locks: Interlock) -> float:
    """Check a duration of a lease, in seconds. Raises ConfigError."""
    ttl = duration(value, name, minimum=MIN_TTL)
    if ttl > locks.max_ttl:
        raise ConfigError(
            f"{name} must be at most max_ttl ({locks.max_ttl:g} s), not {ttl:g}: after a crash, all others would "
            "wait that long. For long work use a lease of Interlock, which is renewed; or give RedisLock or "
            "GoZeroLock a longer max_ttl"
        )
    return ttl


def _checked_wait(wait: object) -> float | None:
    return None if wait is None else duration(wait, "wait")
