"""python-redis-lock's Lock: the same arguments, methods, errors, keys and signal list, without its faults.

Change `import redis_lock` to `from interlock.compat import redis_lock`. Processes with python-redis-lock 3 or 4 and
processes with this class exclude each other, and wake each other at once, while both run.

Theory. The key `lock:NAME` has the id of its holder. A waiter blocks in BLPOP on the list `lock-signal:NAME`, over the
client that the user gave, and the server wakes the waiters of both libraries in one order. To acquire and to release
the key this class runs a script over interlock's own connections to the same server, because the script knows its
attempts: see compat/plain_key.lua. compat/_signals.py wakes a waiter where no release has woken one.

What is different from python-redis-lock 4.0.1:
 1. `acquire(timeout=0.5)` waits half a second (there: for ever, since it rounds down to 0), and `expire` may have
    fractions (there: 0.5 is an error of the server, and `extend(0.5)` deletes the key).
 2. If the reply to an acquire is lost, the lock is acquired all the same. There `acquire()` then says False, or waits
    for ever, while the key has its own id.
 3. If a waiter dies after it was woken, or a holder without release, the next waiter wakes within about a second of
    the moment at which the lock is free. There the others sleep for as long as their own `expire`, or for ever.
 4. A renewal that fails is logged and repeated until the key must have expired; that the lock is lost is logged as
    an error. There the first error ends the renewal, and the next `acquire()` raises AlreadyStarted and keeps the lock.
 5. An error of the release at the end of a `with` does not replace the error of its body: it is logged. If the server
    does not answer then, the release goes on in the background.
 6. A late copy of a release does not end a later section of the same Lock.
 7. While the server is away, each call tries for 5 seconds before it raises redis-py's ConnectionError. An `acquire`
    with a shorter `timeout` tries for that time, but for a second at least; with `blocking=False` for a second.
 8. In a cluster the name needs a hash tag, such as "{stock}:42"; there a release fails with CROSSSLOT.
 9. `reset_all` deletes keys that are strings only, in batches, and no lease of `Interlock.lock`.

What is the same: `timeout=0` means no timeout. A lock without `expire` stays held if its holder dies. Nobody learns
that a lock expired before `release()` raises NotAcquired, and a failover may forget the lock. `Interlock.lock` has none
of these faults.

What is not kept: the scripts, which were attributes of the class; the loggers `redis_lock.*` and their messages; names
that interlock does not accept (control characters, more than one pair of braces, more than 507 bytes) are a
ConfigError.
"""

from __future__ import annotations

import base64
import math
import os
import secrets
import threading
import time
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from redis import StrictRedis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError

from interlock._protocol import forks
from interlock._protocol.forks import KNOWN
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock._protocol.names import positive_int
from interlock._protocol.run_to_end import run
from interlock._protocol.server import is_transient
from interlock._protocol.timing import FOREVER, MIN_RETRY_DELAY, now
from interlock._servers.cluster import ClusterServer
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives.codes import NO_EXPIRY, NOT_FOUND

from . import _plain_key as plain_key
from ._redis_lock_errors import (
    AlreadyAcquired,
    AlreadyStarted,
    InvalidTimeout,
    NotAcquired,
    NotExpirable,
    TimeoutNotUsable,
    TimeoutTooLarge,
)
from ._signals import SignalWatch
from ._targets import close, for_threads, unavailable_as

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from interlock._client.acquiring import Core
    from interlock._session.session import Session

__all__ = [
    "AlreadyAcquired", "AlreadyStarted", "InvalidTimeout", "Lock", "NotAcquired", "NotExpirable", "TimeoutNotUsable",
    "TimeoutTooLarge", "close", "reset_all",
]  # fmt: skip

PREFIX, SIGNAL_PREFIX = "lock:", "lock-signal:"
SIGNAL_MS: Final = 1000
MAX_SIGNAL_MS: Final = 3_600_000
MAX_BLOCK: Final = 60.0  # seconds of one BLPOP: after a failover the server may be one that nobody signals
REPLY_MARGIN: Final = 0.25  # seconds: servers end a BLPOP up to 0.1 s late
ERROR_PAUSE: Final = 0.1  # seconds between two tries if BLPOP fails
MAX_RENEWAL_TRY: Final = 1.0  # seconds that one try to renew may take
SCAN_BATCH: Final = 1000  # keys


class Lock:
    """python-redis-lock's `redis_lock.Lock`: the same arguments, methods, errors and keys."""

    blocking: bool
    _lock_renewal_interval: float | None  # seconds; subclasses may set it
    _lock_renewal_thread: threading.Thread | None

    def __init__(
        self,
        redis_client: Any,
        name: str,
        expire: float | str | None = None,
        id: str | bytes | None = None,  # noqa: A002 (their name)
        auto_renewal: bool = False,
        strict: bool = True,
        signal_expire: int = SIGNAL_MS,
        blocking: bool = True,
    ) -> None:
        """Describe a lock; nothing is sent.

        Args:
            redis_client: a client of redis-py; with `strict=False` also one of valkey-py or of a cluster.
            name: the key is `lock:` and this.
            expire: seconds after which the server frees the lock unless it is renewed. None: never.
            id: the value of the key; by default a random one. A lock with the id of another instance may release and
                extend what that one has acquired.
            auto_renewal: renew the lock every two thirds of `expire` while it is held.
            strict: raise ValueError unless the client is a redis.StrictRedis.
            signal_expire: milliseconds for which a waiter may find the signal of a release.
            blocking: whether a `with` waits.

        Raises ValueError, TypeError or ConfigError.

        """
        if strict and not isinstance(redis_client, StrictRedis):
            raise ValueError(
                f"lock {name!r}: the client must be a redis.StrictRedis, not {type(redis_client).__name__}. "
                "For another kind of client say strict=False"
            )
        self._client = redis_client
        self._expire = _seconds(expire, "expire")
        if auto_renewal and self._expire is None:
            raise ValueError(f"lock {name!r}: auto_renewal needs an expire, by which it renews the lock")
        self._id = _checked_id(id)
        self._name = PREFIX + name
        self._signal = SIGNAL_PREFIX + name
        self._signal_expire = positive_int(int(signal_expire), "signal_expire", name, MAX_SIGNAL_MS)
        self._resource = plain_key.plain_key_resource(self._name, self._signal, self._signal_expire)
        self._lock_renewal_interval = self._expire * 2 / 3 if auto_renewal and self._expire else None
        self._lock_renewal_thread = None
        self._lock_renewal_fork_count = 0  # of the process in which the thread runs
        self._lock_renewal_stop = threading.Event()
        self._token: str | None = None  # of the attempt by which this object acquired the lock
        self._may_have_left = False  # interlock undoes an attempt, or releases, in the background
        self.blocking = blocking

    @property
    def id(self) -> str:
        """The value of the key while this lock is held."""
        return self._id

    @property
    def _held(self) -> bool:
        return self.id == self.get_owner_id()

    def get_owner_id(self) -> str | None:
        """The id of the holder, or None if the lock is free."""
        owner = self._client.get(self._name)
        return owner.decode("ascii", "replace") if isinstance(owner, bytes) else owner

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return bool(self._client.exists(self._name) == 1)

    # Acquire

    def acquire(self, blocking: bool = True, timeout: float | str | None = None) -> bool:
        """Acquire the lock. Returns False if another holds it and the time is over.

        `timeout` (seconds) is how long the call waits; None and 0: for ever. Raises AlreadyAcquired if the key has the
        id of this lock; TimeoutNotUsable, InvalidTimeout, TimeoutTooLarge; redis-py's ConnectionError; ConfigError.
        """
        if not blocking and timeout is not None:
            raise TimeoutNotUsable(f"{self._name}: a call with blocking=False does not wait, so it has no timeout")
        seconds = self._checked_timeout(timeout)
        until = FOREVER if seconds is None else now() + seconds
        with unavailable_as(RedisConnectionError):
            session = self._session()
            token = self._first_try(session.core, until, blocking=blocking)
            if token is None and blocking:
                token = self._wait(session, until)
            if token is None:
                return False
        self._token = token
        if self._lock_renewal_interval is not None:
            try:
                self._start_lock_renewer()
            except BaseException:
                self._release_in_background()
                raise
        return True

    def _checked_timeout(self, timeout: float | str | None) -> float | None:
        try:
            seconds = _seconds(timeout, "timeout")
        except _NegativeError as error:
            raise InvalidTimeout(f"{self._name}: {error}") from None
        if seconds and self._expire and self._lock_renewal_interval is None and seconds > self._expire:
            raise TimeoutTooLarge(
                f"{self._name}: the timeout ({seconds:g} s) must not be longer than the expire ({self._expire:g} s) of "
                "a lock without auto_renewal"
            )
        return seconds

    def _first_try(self, core: Core, until: float, *, blocking: bool) -> str | None:
        try:
            return self._try(core, until, try_for=None if blocking else core.try_for)
        except AcquireTimeout as error:
            # Until an earlier attempt is undone, the key may have its id.
            if error.holder == self._id and not self._may_have_left:
                raise AlreadyAcquired(
                    f"{self._name}: the key has the id of this lock already, {self._id!r}. Release it first"
                ) from None
            return None

    def _wait(self, session: Session, until: float) -> str | None:
        watch = SignalWatch.of(session)
        watch.add(self._resource)
        try:
            while True:
                is_last = not self._wait_for_signal(until)
                try:
                    return self._try(session.core, until)
                except AcquireTimeout:
                    if is_last:
                        return None
        except BaseException:  # an interrupt, say: the signal that woke this caller goes on to the next waiter
            token, value = f"release/{secrets.token_hex(16)}", self._value()
            plain_key.release_later(session.core, self._resource, value, whose=plain_key.NONE, token=token)
            raise
        finally:
            watch.remove(self._resource)

    def _try(self, core: Core, until: float, try_for: float | None = None) -> str:
        """Acquire the key without waiting. Returns the token of the attempt. Raises AcquireTimeout or Unavailable."""
        if try_for is None:
            try_for = min(core.patient_timeout, max(core.try_for, until - now()))
        value, options = self._value(), plain_key.options_of(self._expire, "expire")
        try:
            token = run(plain_key.try_acquire(core, self._resource, options, value, try_for))
        except AcquireTimeout:
            raise
        except BaseException:
            self._may_have_left = True
            raise
        self._may_have_left = False
        return token

    def _wait_for_signal(self, until: float) -> bool:
        """Block until a release signals, or for a bounded time. Returns False if the time is over."""
        left = until - now()
        if left <= 0:
            return False
        # At least 1 ms: 0 would be for ever, and so would be less than 1 ms with Redis 6.
        seconds = max(0.001, math.ceil(min(left, _longest_block(self._client)) * 1000) / 1000)
        try:
            self._client.blpop(self._signal, seconds)
        except Exception as error:
            if not _passes(error):
                raise
            log.debug(
                "%s: BLPOP failed, and the waiter asks again: %s", self._name, error, extra=lock_fields(self._resource)
            )
            time.sleep(min(ERROR_PAUSE, max(MIN_RETRY_DELAY, until - now())))
        return now() < until

    # Extend, release, reset

    def extend(self, expire: float | str | None = None) -> None:
        """Make the lock last for `expire` seconds from now, by default those of the Lock.

        Raises NotAcquired if the key does not have the id of this lock, NotExpirable if the key never expires;
        TypeError without any expire; ValueError; redis-py's ConnectionError; ConfigError.
        """
        seconds = _seconds(expire, "expire") or self._expire
        if seconds is None:
            raise TypeError(f"{self._name}: extend() needs an expire, here or in Lock(...)")
        with unavailable_as(RedisConnectionError):
            self._extend(seconds)

    def _extend(self, seconds: float, retry_for: float | None = None) -> None:
        core = self._session().core
        code = run(plain_key.extend(core, self._resource, self._value(), seconds, retry_for))
        if code == NOT_FOUND:
            raise self._not_acquired()
        if code == NO_EXPIRY:
            raise NotExpirable(f"{self._name}: the key never expires, so it can't be extended. Give Lock an expire")

    def release(self) -> None:
        """Release the lock: also one that another Lock with the same id has acquired.

        Raises NotAcquired if the key does not have the id of this lock; redis-py's ConnectionError; ConfigError.
        """
        self._stop_lock_renewer()
        token = self._token
        whose = plain_key.BY_VALUE if token is None else plain_key.BY_HOLDER
        with unavailable_as(RedisConnectionError):
            core = self._session().core
            was_ours = run(plain_key.release(core, self._resource, self._value(), whose=whose, token=token))
        self._token = None
        if not was_ours:
            raise self._not_acquired()

    def reset(self) -> None:
        """Delete the key, whoever holds the lock, and wake a waiter. Raises redis-py's ConnectionError, ConfigError."""
        with unavailable_as(RedisConnectionError):
            run(plain_key.release(self._session().core, self._resource, b"", whose=plain_key.ANY))

    def __enter__(self) -> Self:
        """Acquire the lock; with `blocking=False` raise NotAcquired if another holds it."""
        if not self.acquire(blocking=self.blocking):
            raise NotAcquired(f"{self._name}: another holds the lock, and blocking=False does not wait")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Release the lock. Raises an error of the release, unless the body raised one: then logs it."""
        try:
            self.release()
        except BaseException as error:
            fields = lock_fields(self._resource, token=self._token)
            self._release_in_background()
            if exc_value is None or not isinstance(error, Exception):
                raise
            log.warning(
                "%s: at the end of a `with` whose body raised an error, the release failed: %s",
                self,
                error,
                extra=fields,
            )

    def _release_in_background(self) -> None:
        """Release what this object has acquired, though its caller has left."""
        token, self._token = self._token, None
        if token is not None:
            self._may_have_left = True
            options = plain_key.options_of(self._expire, "expire")
            core, value = self._session().core, self._value()
            plain_key.release_later(core, self._resource, value, options, whose=plain_key.BY_HOLDER, token=token)

    # Renewal: a thread for each held lock, as in python-redis-lock

    def _start_lock_renewer(self) -> None:
        self._stop_lock_renewer()  # that of an earlier section, whose lock was lost
        stop = self._lock_renewal_stop = threading.Event()
        interval = self._lock_renewal_interval
        assert interval is not None
        assert self._expire is not None
        lock = weakref.ref(self, lambda _: stop.set())
        self._lock_renewal_thread = threading.Thread(
            target=_renew, args=(lock, interval, self._expire, stop), name=f"renewal of {self._name}", daemon=True
        )
        self._lock_renewal_fork_count = forks.count
        self._lock_renewal_thread.start()

    def _stop_lock_renewer(self) -> None:
        thread, self._lock_renewal_thread = self._lock_renewal_thread, None
        # In a child after a fork the thread is not there, whatever `is_alive` says.
        if thread is not None and KNOWN[0] and self._lock_renewal_fork_count == forks.count:
            self._lock_renewal_stop.set()
            thread.join()

    # What all of these share

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} id={self._id!r}>"

    def _session(self) -> Session:
        """The session with the server of the client. Raises ConfigError."""
        session = for_threads.plain(self._client)
        if isinstance(session.server, ClusterServer) and "{" not in self._name:
            raise ConfigError(
                f"{self._name}: in a cluster this key and {self._signal} must be in one slot. Give the name a hash "
                "tag, such as '{stock}:42'"
            )
        return session

    def _value(self) -> bytes:
        encoder = getattr(self._client, "get_encoder", None)
        return bytes(encoder().encode(self._id)) if encoder is not None else self._id.encode()

    def _not_acquired(self) -> RuntimeError:
        return NotAcquired(
            f"{self._name}: the key does not have the id of this lock, {self._id!r}: it was not acquired, or it has "
            "expired"
        )


def _renew(lockref: weakref.ref[Lock], interval: float, expire: float, stop: threading.Event) -> None:
    """Renew a lock until it is released, lost or collected."""
    expires_at, pause, fails = now() + expire, interval, False
    while not stop.wait(pause):
        lock = lockref()
        if lock is None:
            return
        # A log that keeps its records must not keep the lock.
        text, fields = repr(lock), lock_fields(lock._resource, token=lock._token)
        try:
            # A part of the time that is left, so that the warning comes before the loss.
            lock._extend(expire, retry_for=min(MAX_RENEWAL_TRY, max(MIN_RETRY_DELAY * 3, (expires_at - now()) / 3)))
        except NotAcquired:
            log.error(
                "%s is lost: its key expired or was reset, or another has it. Its holder works without it",
                text,
                extra=fields,
            )
            return
        except NotExpirable as error:
            log.warning("%s", error, extra=fields)
        except Exception as error:  # noqa: BLE001 (logged) only the end of the lock ends its renewal
            if now() >= expires_at:
                log.error(
                    "%s is lost: no renewal has succeeded for its expire, %g s: %s", text, expire, error, extra=fields
                )
                return
            if not fails:
                log.warning("the renewal of %s failed, and interlock tries again: %s", text, error, extra=fields)
            pause, fails = min(interval, MAX_RENEWAL_TRY / 2, expire / 10), True
        else:
            expires_at, pause, fails = now() + expire, interval, False
        del lock


def reset_all(redis_client: Any) -> None:
    """Delete all locks of python-redis-lock and of this module, whoever holds them, and wake their waiters.

    That is each string whose key begins with `lock:`, but no lease of `Interlock.lock` and none of interlock's records.
    Raises redis-py's errors or ConfigError.
    """
    with unavailable_as(RedisConnectionError):
        session = for_threads.plain(redis_client)
        for found in redis_client.scan_iter(f"{PREFIX}*", count=SCAN_BATCH, _type="string"):
            key = found.decode(errors="surrogateescape") if isinstance(found, bytes) else str(found)
            if not _is_companion(key):
                _reset(session, redis_client, key)


def _reset(session: Session, client: Any, key: str) -> None:
    signal = SIGNAL_PREFIX + key.removeprefix(PREFIX)
    try:
        if isinstance(session.server, ClusterServer) and "{" not in key:
            raise ConfigError("the two keys are in different slots")
        resource = plain_key.plain_key_resource(key, signal, SIGNAL_MS)
    except ConfigError:  # a key that only python-redis-lock takes
        client.delete(key)
        client.delete(signal)
        client.lpush(signal, 1)
        client.pexpire(signal, SIGNAL_MS)
        return
    run(plain_key.release(session.core, resource, b"", whose=plain_key.NOT_LEASE))


def _is_companion(key: str) -> bool:
    """Whether this is one of the keys that interlock stores beside a lock with a hash tag: see names.tagged."""
    return key.count("{") > 1 and key.endswith("}") and key.rpartition("{")[0].endswith(":")


class _NegativeError(ValueError):
    pass


def _seconds(value: float | str | None, what: str) -> float | None:
    """A number of seconds, or None for none: also for 0. Raises ValueError."""
    if not value:
        return None
    seconds = float(value)
    if seconds < 0:
        raise _NegativeError(f"{what} must not be negative: {value!r}")
    if not math.isfinite(seconds):
        raise ValueError(f"{what} must be a finite number of seconds, not {value!r}")
    return seconds or None


def _checked_id(value: object) -> str:
    """The id as a text, as python-redis-lock makes it. Raises TypeError."""
    if value is None:
        return base64.b64encode(os.urandom(18)).decode("ascii")
    if isinstance(value, bytes):
        return value.decode("ascii") if value.isascii() else base64.b64encode(value).decode("ascii")
    if isinstance(value, str):
        return value
    raise TypeError(f"id must be bytes or str, not {type(value).__name__}")


def _longest_block(client: Any) -> float:
    """How many seconds one BLPOP of this client may take: less than the client waits for a reply."""
    pool = getattr(client, "connection_pool", None) or getattr(client, "nodes_manager", None)
    options: dict[str, Any] = getattr(pool, "connection_kwargs", {})
    timeout: float | None = options.get("socket_timeout", _default_socket_timeout())
    if not timeout:
        return MAX_BLOCK
    return min(MAX_BLOCK, max(timeout - REPLY_MARGIN, timeout / 2))


@cache
def _default_socket_timeout() -> float | None:
    """The default of redis-py; None before its version 8."""
    import inspect  # noqa: PLC0415 (once)

    from redis.connection import AbstractConnection  # noqa: PLC0415

    default: float | None = inspect.signature(AbstractConnection).parameters["socket_timeout"].default
    return default


def _passes(error: Exception) -> bool:
    """Whether a BLPOP that failed with this error may succeed in a moment; of redis-py or of valkey-py."""
    if isinstance(error, AuthenticationError):
        return False
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"ConnectionError", "TimeoutError", "ReadOnlyError"}) or (
        "ResponseError" in names and (str(error).startswith("UNBLOCKED") or is_transient(str(error)))
    )
