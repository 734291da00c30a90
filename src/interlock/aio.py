"""The API for asyncio: the same names as for threads. One connection per event loop carries all its tasks."""

from __future__ import annotations

import asyncio
import functools
import inspect as _inspect
import threading
import weakref
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from ._base import UNSET, BaseInterlock, BaseLock, Terms, Unset, revoke, timeout_of
from ._lease import BaseLease, LeaseState, Reply
from ._session import Session, word
from .errors import AcquireTimeout, ConfigError
from .ports.asyncio import AsyncioPort
from .ports.threads import ThreadPort
from .primitives.lock import State, state

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    import redis.asyncio

    from ._core import Attempt, Grant

__all__ = ["Interlock", "Lease", "LeaseState", "Lock", "State"]

P = ParamSpec("P")
R = TypeVar("R")


class Interlock(BaseInterlock):
    """Locks on one server, for asyncio.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `embedded://`), a client of
    redis.asyncio or valkey.asyncio whose parameters are taken over, or nothing: then $INTERLOCK_URL.

    `prefix` goes before every name; `max_ttl` (seconds) is the longest ttl that any lock may have; `label` tells
    people who we are. Raises ConfigError. May be made outside of any loop and used in several, one after another
    or in several threads; it connects at the first use in each. Close it in each loop, or use it in an
    `async with`: that gives back all that is held there.
    """

    def __init__(
        self,
        target: str | redis.asyncio.Redis | object | None = None,
        *,
        prefix: str = "lock:",
        max_ttl: float = 60.0,
        label: str | None = None,
    ) -> None:
        super().__init__(target, prefix=prefix, max_ttl=max_ttl, label=label, for_asyncio=True)
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = weakref.WeakKeyDictionary()
        self._guard = threading.Lock()
        self._latest: tuple[asyncio.AbstractEventLoop | None, Session | None] = (None, None)

    @property
    def _session(self) -> Session:
        loop = asyncio.get_running_loop()
        latest, session = self._latest
        if latest is loop and session is not None and not session.core.closed:
            return session
        session = self._sessions.get(loop)
        if session is None or session.core.closed:
            self._open()
            left = self._prune()
            port = AsyncioPort(self._address)
            session = port.sink = Session(port, self.label, _task, self.max_ttl, lambda: ThreadPort(self._address))
            with self._guard:
                self._sessions[loop] = session
            for attempt in left:
                session.undo.add(attempt)
        self._latest = (loop, session)
        return session

    def _prune(self) -> list[Attempt]:
        """Forget the loops that are over: what they left to be taken back. What is held there waits for the exit."""
        left: list[Attempt] = []
        with self._guard:  # loops of several threads
            for loop, session in list(self._sessions.items()):
                if loop.is_closed():
                    del self._sessions[loop]
                    left += session.abandon()
        return left

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
            on_lost: called (or awaited) with the lease when it is lost.

        Raises ConfigError. Nothing is sent until it is acquired.

        """
        self._open()
        terms = Terms(self._checked_ttl(ttl), timeout, renew, max_hold, fair, on_lost)
        return Lock(self, name, terms)

    async def close(self) -> None:
        """Release all that is held in this loop, end its waiting, close its connection. Bounded in time."""
        self._closed = True
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            port = session.port
            assert isinstance(port, AsyncioPort)
            try:
                await session.close()
            finally:
                await port.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _task() -> str:
    task = asyncio.current_task()
    return word(task.get_name()) if task else "-"


class Lock(BaseLock):
    """A lock by name; see Interlock.lock. An `async with` holds it, a decorated function runs under it."""

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for the lock.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; the lock's own
        by default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; nor does
        a cancellation.
        """
        session: Session = self._interlock._session
        terms = self._terms
        timeout = terms.timeout if isinstance(timeout, Unset) else timeout_of(timeout)
        hold = functools.partial(Lease, session, terms.on_lost)
        return await session.core.acquire(self._primitive, hold, terms.ttl, timeout, terms.renew, terms.max_hold)

    async def try_acquire(self) -> Lease | None:
        """The lock if it is free now, else None. Raises Unavailable or ConfigError."""
        try:
            return await self.acquire(0)
        except AcquireTimeout:
            return None

    async def __aenter__(self) -> Lease:
        who = asyncio.current_task()
        self._may_enter(who)
        lease = await (await self.acquire()).__aenter__()
        self._enter(who, lease)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._leave(asyncio.current_task())
        await lease.__aexit__(kind, error, trace)

    def __call__(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        """Decorate an `async def`: each call of it holds the lock."""
        if not _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is not `async def`: use interlock (for threads) for it")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with await self.acquire():
                return await function(*args, **kwargs)

        return locked

    async def inspect(self) -> State:
        """Who holds it and who waits, now. For people: it is old when you read it."""
        session: Session = self._interlock._session
        return state(self.name, await session.core.query(self._primitive, "inspect", "100"))

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take the lock away from its holder, who is told `reason`: whether there was one.

        The next one gets it when the holder has let go, or its lease has run out. With `force` at once, though
        the holder may still be writing: that is unsafe unless fences are checked.
        """
        session: Session = self._interlock._session
        return await revoke(session, self._primitive, reason, force=force)


class Lease(BaseLease):
    """One grant of a lock: hold it in an `async with`, or release it yourself; any task of its loop may."""

    __slots__ = ("_cancelled", "_cancels", "_task")

    def __init__(self, session: Session, on_lost: Callable[[Lease], object] | None, grant: Grant) -> None:
        super().__init__(session, on_lost, grant)
        self._task: asyncio.Task[object] | None = None  # whose body the lease protects
        self._cancels = 0  # how often that task had been asked to end before
        self._cancelled = False

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease is lost."""
        event: asyncio.Event = self._event(asyncio.Event)
        return event

    async def release(self) -> bool:
        """Give it back: whether it was still ours. Safe to repeat. Raises Unavailable if nobody can tell."""
        return await self._session.core.release(self._grant)

    async def extend(self, ttl: float) -> None:
        """Make it last at least `ttl` seconds from now, renewed or not. Raises LeaseLost or Unavailable."""
        await self._session.extend(self._grant, ttl)

    async def execute(
        self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None
    ) -> Reply:
        """Run one Redis command in the server if, and only if, the lease is still ours there: one atomic step.

        `keys` are those arguments that are keys (asked of the server if not given); in a cluster they must share
        the lock's slot. Returns the reply, strings as bytes. Never sent twice: raises Unavailable, saying whether
        it may have run; LeaseLost if it was not run.
        """
        return await self._session.execute(self._grant, command, args, keys)  # type: ignore[no-any-return]

    def _on_lost(self) -> None:
        if self._task is not None and not self._task.done():
            self._cancelled = True
            self._task.cancel()
        super()._on_lost()

    async def __aenter__(self) -> Self:
        self.ensure()  # no body runs under a lease that has ended
        task = self._task = asyncio.current_task()
        self._cancels = task.cancelling() if task else 0
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._cancelled and task is not None:
            # As asyncio.timeout does: take our cancellation back, and leave that of anybody else.
            alone = task.uncancel() <= self._cancels
            if alone and not isinstance(error, asyncio.CancelledError):
                try:
                    await asyncio.sleep(0)  # the body ended before it was delivered
                except asyncio.CancelledError:
                    if task.cancelling() > self._cancels:
                        raise
            elif alone:
                try:
                    await self._session.core.leave(self._grant, None)
                except BaseException as lost:
                    raise lost from error
        await self._session.core.leave(self._grant, error)
