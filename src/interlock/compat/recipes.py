"""Recipes that people have in their code, by their own names, made safe. docs/recipes.md tells how each of them fails.

Theory. In a recipe the lock is a value: one process got it, any other may give it back. So a lease is let go of as
soon as it is granted, and its token is all there is of it: nobody here renews it, waits for its end, or gives it back
when the process ends. The server ends it after `timeout`; whoever has the token ends it before, in one step that hands
over to the next waiter. Where a function runs under the lock there is somebody who holds it: that lease is renewed.

The lock of a recipe is the same plain string key as ever: old code and new code exclude each other while both run.
"""

from __future__ import annotations

import functools
import inspect
import secrets
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, overload

from interlock._core import GONE, GRANTED, Grant, run
from interlock._names import SHORTEST_TTL, duration
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives.lock import lock
from interlock.primitives.permits import semaphore

from ._targets import MAX_TTL, Cache, Client, close, found, interlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._core import Primitive
    from interlock.threads import Interlock, Lock, Semaphore

__all__ = [
    "Cache", "Client", "GoZeroLock", "RedisLock", "acquire_fair_semaphore", "acquire_semaphore",
    "acquire_semaphore_with_lock", "close", "refresh_fair_semaphore", "refresh_semaphore", "release_fair_semaphore",
    "release_semaphore",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
EXPIRE: Final = 30.0  # seconds of a GoZeroLock that was not told. There it is half a second, which nobody means
SEMAPHORES: Final = "lock:"  # before their names, as Interlock's: with the recipe's sorted set nothing can be shared


class RedisLock:
    """The lock by a value, which many code bases have under this name.

    `target` is a client or a Django cache, whose spelling of keys is kept; another kind of cache is a ConfigError.
    `max_ttl` (seconds) is the longest timeout that `get_lock` takes. Safe to share between threads.
    """

    def __init__(self, target: Client | Cache | object, *, max_ttl: float = MAX_TTL) -> None:
        self._target = target
        self._max_ttl = max_ttl
        self._at("any")  # what is wrong with the target is told here

    @overload
    def get_lock(self, key: str, timeout: float) -> str: ...
    @overload
    def get_lock(self, key: str, timeout: float, *, wait: float | None) -> str | None: ...
    def get_lock(self, key: str, timeout: float, *, wait: float | None = None) -> str | None:
        """Get the lock: a value for `del_lock`, in this process or another one.

        It ends after `timeout` seconds, come what may. `wait` is in seconds: by default it waits for ever, as the
        recipe does, and 0 does not wait. None if it was not had in that time. Raises ConfigError or Unavailable.
        """
        locks, name = self._at(key)
        ttl = _lasting(timeout, "timeout", locks)
        return _value(locks.lock(name, ttl=ttl, renew=False), _waiting(wait))

    def del_lock(self, key: str, value: str | bytes | None) -> bool:
        """Give it back: whether this value still had it. Any other value deletes nothing, and nor does None.

        Raises ConfigError, or Unavailable if nobody can tell; then it ends after its timeout.
        """
        locks, name = self._at(key)
        return _give_back(locks, lock(name, locks.prefix), value)

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
        """Decorate a function: each call of it is under the lock, which is given back however the call ends.

        Args:
            key: the name, or what makes it from the arguments of the call, as `"report:{0}".format` does.
            timeout: seconds after which others may have it when this process has died. While the function runs it is
                renewed, so that is not how long it may take; and more than `max_ttl` is as much as `max_ttl`.
            wait: seconds to wait for it; None waits for ever, as `get_lock` does, 0 not at all.
            skip: when it was not had in that time, None is returned; without `skip`, AcquireTimeout is raised.

        A call raises LeaseLost if the lock did not last as long as the function. Inside of a call the same thread
        may make others under the same key. Raises ConfigError.

        """
        ttl = min(duration(timeout, "timeout", least=SHORTEST_TTL), self._max_ttl)
        wait = _waiting(wait)
        if not callable(key):  # what is wrong with it is told now, not at the first call
            locks, name = self._at(key)
            lock(name, locks.prefix)

        def decorated(function: Callable[P, R]) -> Callable[P, R | None]:
            if inspect.iscoroutinefunction(function):
                raise ConfigError(f"{function.__qualname__} is `async def`: decorate it with a lock of interlock.aio")

            @functools.wraps(function)
            def locked(*args: P.args, **kwargs: P.kwargs) -> R | None:
                locks, name = self._at(key(*args, **kwargs) if callable(key) else key)
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

    def _at(self, key: str) -> tuple[Interlock, str]:
        return found(self._target, key, self._max_ttl)


class GoZeroLock:
    """The lock in the shape that go-zero gave it: it has an id, and the same id has it again at once.

    `target` as for RedisLock; `key` is the key in the server, so that Go programs on it exclude it, and it them.
    `id` is by default one that nobody else has. Give one, and whoever comes with the same in another process, or after
    a restart, takes it over. `max_ttl` (seconds) is the longest that `set_expire` takes. Raises ConfigError.
    """

    def __init__(
        self,
        target: Client | Cache | object,
        key: str,
        id: str | None = None,  # noqa: A002 (its name there)
        *,
        max_ttl: float = MAX_TTL,
    ) -> None:
        if id is not None and not (isinstance(id, str) and id):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"lock {key!r}: id must be a word that names the holder in all processes, not {id!r}")
        self.id = id or secrets.token_hex(8)
        self._target = target
        self._key = key
        self._max_ttl = max_ttl
        self._token: str | None = None
        locks, _ = self._at()
        self._expire = min(EXPIRE, locks.max_ttl)

    def set_expire(self, seconds: float) -> None:
        """From the next `acquire` on it lasts so many seconds, unless it is acquired again. Raises ConfigError."""
        locks, _ = self._at()
        self._expire = _lasting(seconds, "seconds", locks)

    def acquire(self) -> bool:
        """Whether it is had now: it was free, or this id had it, and has it for longer now. Does not wait.

        Raises ConfigError or Unavailable.
        """
        locks, name = self._at()
        if self._token and _renewed(locks, lock(name, locks.prefix), self._token.encode(), self._expire) == GRANTED:
            return True
        token = _value(locks.rlock(name, owner=self.id, ttl=self._expire, renew=False), 0)
        if token is not None:
            self._token = token
        return token is not None

    def release(self) -> bool:
        """Give back what this object acquired: whether it still had it.

        In another process acquire it first, as the same id may. Raises ConfigError, or Unavailable if nobody can tell.
        """
        locks, name = self._at()
        return _give_back(locks, lock(name, locks.prefix), self._token)

    def _at(self) -> tuple[Interlock, str]:
        return found(self._target, self._key, self._max_ttl)


def acquire_semaphore(conn: Client, semname: str, limit: int, timeout: float = 10) -> str | None:
    """One of `limit` permits: an identifier for `release_semaphore`, in any process; None if no permit is free.

    It ends after `timeout` seconds unless it is refreshed. The same semaphore as `Interlock(conn).semaphore(semname,
    limit)`, which can also wait. Raises ConfigError (also for another limit than others use now) or Unavailable.
    """
    locks = interlock(conn, SEMAPHORES)
    ttl = _lasting(timeout, "timeout", locks)
    return _value(locks.semaphore(semname, limit, ttl=ttl, renew=False), 0)


def release_semaphore(conn: Client, semname: str, identifier: str | bytes | None) -> bool:
    """Give a permit back: whether this identifier still had it. Raises ConfigError or Unavailable."""
    locks = interlock(conn, SEMAPHORES)
    return _give_back(locks, semaphore(semname, locks.prefix, 1), identifier)


def refresh_semaphore(conn: Client, semname: str, identifier: str | bytes | None, timeout: float = 10) -> bool:
    """Have it for at least `timeout` seconds from now: whether it is still had. Raises ConfigError or Unavailable."""
    locks = interlock(conn, SEMAPHORES)
    primitive = semaphore(semname, locks.prefix, 1)
    ttl = _lasting(timeout, "timeout", locks)
    return bool(_renewed(locks, primitive, _token(primitive, identifier), ttl) == GRANTED)


# Every semaphore here is fair, and takes the last permit in one step: no counter and no lock around it is needed.
acquire_fair_semaphore = acquire_semaphore_with_lock = acquire_semaphore
release_fair_semaphore = release_semaphore
refresh_fair_semaphore = refresh_semaphore


# From a lease to a value, and back


def _value(lockable: Lock | Semaphore, wait: float | None) -> str | None:
    """The token of a grant that nobody holds here; None if it was not had in time."""
    while True:
        try:
            lease = lockable.acquire(wait)
        except AcquireTimeout:
            return None
        grant = lease._grant
        if not grant.attempt.in_doubt:
            lease._session.renewal.forget(grant)
            grant.ended = Grant.RELEASED
            return lease.token
        # A copy of its request may come late, and only this lease can see to it that the copy takes nothing.
        lease.release()
        wait = None if wait is None else 0


def _give_back(locks: Interlock, primitive: Primitive, value: object) -> bool:
    """Whether this value had it. Whoever waits next has it then."""
    token = _token(primitive, value)
    if _renewed(locks, primitive, token, SHORTEST_TTL) == GONE:
        return False  # asked first, since to a release that comes twice the server says twice that it was ours
    had, again = False, 1
    while again:  # the dead in the queue are passed over, so many in one step
        ours, again = run(locks._session.core.query(primitive, "release", token, "0"))
        had |= bool(ours)
    return had


def _renewed(locks: Interlock, primitive: Primitive, token: bytes, ttl: float) -> Any:
    """GRANTED if it is had, and now for `ttl` seconds at the least; GONE, [REVOKED, why], or the text of an error."""
    if not token:
        return GONE
    narrowed = primitive._replace(keys=primitive.renewed)
    (state,) = run(locks._session.core.query(narrowed, "renew", token, str(int(ttl * 1000))))
    return state


def _token(primitive: Primitive, value: object) -> bytes:
    """A value as it is in the server; empty if it can hold nothing. What was stored in Redis comes back as bytes."""
    token = b"" if value is None else value.encode(errors="replace") if isinstance(value, str) else value
    if not isinstance(token, bytes):
        raise ConfigError(f"{primitive}: a value is the str with which it was got, not {value!r}")
    # What begins so is a lease that was revoked, and that its holder has yet to let go of.
    return b"" if token.startswith(b"!") else token


def _lasting(value: object, what: str, locks: Interlock) -> float:
    """How long something may be had, in seconds. Raises ConfigError."""
    ttl = duration(value, what, least=SHORTEST_TTL)
    if ttl > locks.max_ttl:
        raise ConfigError(
            f"{what} must be at most max_ttl ({locks.max_ttl:g} s), not {ttl:g}: after a crash all would wait for so "
            "long. For long work hold a lease of Interlock, which is renewed; or give RedisLock or GoZeroLock a max_ttl"
        )
    return ttl


def _waiting(wait: object) -> float | None:
    return None if wait is None else duration(wait, "wait")
