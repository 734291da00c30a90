"""The API for threads. `interlock.aio` has the same names for asyncio."""

from __future__ import annotations

import functools
import inspect as _inspect
import threading
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from ._base import UNSET, BaseInterlock, BaseLock, Terms, Unset, revoke, timeout_of
from ._core import run
from ._lease import BaseLease, LeaseState, Reply
from ._session import Session, word
from .errors import AcquireTimeout, ConfigError
from .ports.threads import ThreadPort
from .primitives.lock import State, state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import redis

__all__ = ["Interlock", "Lease", "LeaseState", "Lock", "State"]

P = ParamSpec("P")
R = TypeVar("R")


class Interlock(BaseInterlock):
    """Locks on one server, for threads.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `embedded://`), a client of
    redis-py or valkey-py whose parameters are taken over, or nothing: then $INTERLOCK_URL.

    `prefix` goes before every name; `max_ttl` (seconds) is the longest ttl that any lock may have; `label` tells
    people who we are. Raises ConfigError. Connects at the first use. Close it, or use it in a `with`: that gives
    back all that is held. Safe to share between threads; a child made by fork holds nothing and connects anew.
    """

    def __init__(
        self,
        target: str | redis.Redis | object | None = None,
        *,
        prefix: str = "lock:",
        max_ttl: float = 60.0,
        label: str | None = None,
    ) -> None:
        super().__init__(target, prefix=prefix, max_ttl=max_ttl, label=label, for_asyncio=False)
        port = self._port = ThreadPort(self._address)
        self._session = port.sink = Session(port, label, _thread, self.max_ttl, lambda: port)

    def lock(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> Lock:
        """Mutual exclusion under this name, on every machine. Not reentrant.

        Args:
            name: 1 to 512 bytes, without control characters.
            ttl: seconds after which a dead holder's lock is free. A living one is renewed every ttl/3.
            timeout: seconds to wait for it; None waits for ever, 0 not at all.
            renew: False makes a lease that ends after ttl, come what may.
            max_hold: seconds after which a holder is told that it has lost the lock, however alive it is.
            fair: strict order of arrival over all processes.
            on_lost: called with the lease, in a thread of its own, when it is lost.

        Raises ConfigError. Nothing is sent until it is acquired.

        """
        self._open()
        terms = Terms(self._checked_ttl(ttl), timeout, renew, max_hold, fair, on_lost)
        return Lock(self, name, terms)

    def close(self) -> None:
        """Release all that is held, end all waiting, close the connections. Takes about a second at the most."""
        if not self._closed:
            self._closed = True
            try:
                run(self._session.close())
            finally:
                self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _thread() -> str:
    thread = threading.current_thread()
    try:
        return thread._interlock_word  # type: ignore[attr-defined,no-any-return]  # made once a thread
    except AttributeError:
        made = thread._interlock_word = word(thread.name)  # type: ignore[attr-defined]
        return made


class Lock(BaseLock):
    """A lock by name; see Interlock.lock. A `with` holds it, a decorated function runs under it."""

    __slots__ = ()

    def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for the lock.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; the lock's own
        by default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        session: Session = self._interlock._session
        terms = self._terms
        timeout = terms.timeout if isinstance(timeout, Unset) else timeout_of(timeout)
        hold = functools.partial(Lease, session, terms.on_lost)
        return run(session.core.acquire(self._primitive, hold, terms.ttl, timeout, terms.renew, terms.max_hold))

    def try_acquire(self) -> Lease | None:
        """The lock if it is free now, else None. Raises Unavailable or ConfigError."""
        try:
            return self.acquire(0)
        except AcquireTimeout:
            return None

    def __enter__(self) -> Lease:
        who = threading.get_ident()
        self._may_enter(who)
        lease = self.acquire()
        self._enter(who, lease)
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._leave(threading.get_ident())
        lease.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call of it holds the lock."""
        if _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function.__qualname__} is `async def`: use interlock.aio for it")

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.acquire():
                return function(*args, **kwargs)

        return locked

    def inspect(self) -> State:
        """Who holds it and who waits, now. For people: it is old when you read it."""
        session: Session = self._interlock._session
        return state(self.name, run(session.core.query(self._primitive, "inspect", "100")))

    def revoke(self, reason: str, force: bool = False) -> bool:
        """Take the lock away from its holder, who is told `reason`: whether there was one.

        The next one gets it when the holder has let go, or its lease has run out. With `force` at once, though
        the holder may still be writing: that is unsafe unless fences are checked.
        """
        session: Session = self._interlock._session
        return run(revoke(session, self._primitive, reason, force=force))


class Lease(BaseLease):
    """One grant of a lock: hold it in a `with`, or release it yourself; any thread may."""

    __slots__ = ()

    @property
    def lost(self) -> threading.Event:
        """Set when the lease is lost."""
        event: threading.Event = self._event(threading.Event)
        return event

    def release(self) -> bool:
        """Give it back: whether it was still ours. Safe to repeat. Raises Unavailable if nobody can tell."""
        return run(self._session.core.release(self._grant))

    def extend(self, ttl: float) -> None:
        """Make it last at least `ttl` seconds from now, renewed or not. Raises LeaseLost or Unavailable."""
        run(self._session.extend(self._grant, ttl))

    def execute(self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None) -> Reply:
        """Run one Redis command in the server if, and only if, the lease is still ours there: one atomic step.

        `keys` are those arguments that are keys (asked of the server if not given); in a cluster they must share
        the lock's slot. Returns the reply, strings as bytes. Never sent twice: raises Unavailable, saying whether
        it may have run; LeaseLost if it was not run.
        """
        return run(self._session.execute(self._grant, command, args, keys))  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        self.ensure()  # no body runs under a lease that has ended
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._session.core.leave(self._grant, error))
