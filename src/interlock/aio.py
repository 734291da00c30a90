"""The API for asyncio: the same names as for threads. One connection per event loop carries all its tasks."""

from __future__ import annotations

import asyncio
import functools
import inspect as _inspect
import threading
import weakref
from typing import TYPE_CHECKING, Generic, ParamSpec, Self, TypeVar

from ._base import UNSET, BaseInterlock, BaseLock, BasePermits, Terms, Unset, timeout_of
from ._lease import BaseLease, LeaseState, Reply
from ._names import checked_name, word
from ._session import Session
from .errors import AcquireTimeout, ConfigError
from .ports.asyncio import AsyncioPort
from .ports.threads import ThreadPort
from .primitives.lock import State, lock, owned_by
from .primitives.permits import (
    Holder,
    PermitState,
    available,
    beside,
    reading,
    semaphore,
    set_limit,
    wanted,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    import redis.asyncio

    from ._core import Attempt, Grant, Primitive

__all__ = [
    "Holder", "Interlock", "Lease", "LeaseState", "Lock", "PermitState", "RLock", "RWLock", "RWSide", "Semaphore",
    "State",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
L = TypeVar("L", bound="Lease")


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
        terms = self._terms(ttl, timeout, renew, max_hold, fair, on_lost)
        return Lock(self, lock(name, self.prefix), terms)

    def rlock(
        self,
        name: str,
        *,
        owner: str | None = None,
        ttl: float = 30.0,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> RLock:
        """Mutual exclusion that its holder may enter again: the task that has it, without I/O and with one fence.

        The same lock as `lock(name)`, and the same options. `owner` names a holder that is not a task: who comes
        with the same word, in another process or after a restart, takes the lease over, with a new fence; the one
        before has lost it. Raises ConfigError. Nothing is sent until it is acquired.
        """
        terms = self._terms(ttl, timeout, renew, max_hold, fair, on_lost)
        return RLock(self, lock(name, self.prefix, owned_by(owner)), terms)

    def rwlock(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> RWLock:
        """Many readers, `.read()`, or one writer, `.write()`: in order of arrival, so that neither starves.

        Options as for `lock()`; each reader has a lease of its own. Raises ConfigError.
        """
        return RWLock(self, checked_name(name), self._terms(ttl, timeout, renew, max_hold, fair, on_lost))

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        ttl: float = 30.0,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        on_lost: Callable[[Lease], object] | None = None,
    ) -> Semaphore:
        """Up to `limit` permits at a time, over all processes; in order of arrival. Options as for `lock()`.

        Permits are leased, so a crash gives them back. The limit is the server's: who comes with another one gets a
        ConfigError. Raises ConfigError. Nothing is sent until it is acquired.
        """
        terms = self._terms(ttl, timeout, renew, max_hold, fair, on_lost)
        return Semaphore(self, semaphore(name, self.prefix, limit), terms)

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


class ReentrantLease(Lease):
    """The lease of an rlock: it is given back as often as it was acquired, the last time to the server."""

    __slots__ = ("_depth",)

    def __init__(self, session: Session, on_lost: Callable[[Lease], object] | None, grant: Grant) -> None:
        super().__init__(session, on_lost, grant)
        self._depth = 1

    def again(self) -> Self:
        """Have it once more. Raises LeaseLost."""
        self.ensure()
        self._depth += 1
        return self

    @property
    def inside(self) -> bool:
        """Whether somebody has yet to release it: also one that was lost."""
        return self._depth > 0

    def _inner(self) -> bool:
        self._depth -= 1
        return self._depth > 0

    async def release(self) -> bool:
        """Leave it once; the last time, give it back: whether it was still ours."""
        return self.state in {LeaseState.HELD, LeaseState.JEOPARDY} if self._inner() else await super().release()

    async def __aenter__(self) -> Self:
        return self if self._depth > 1 else await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._inner():
            await super().__aexit__(kind, error, trace)


class Lockable(BaseLock, Generic[S]):
    """Something that can be held: an `async with` holds it, a decorated function runs under it."""

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for it.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind; nor does a
        cancellation.
        """
        return await self._acquired(self._primitive, timeout, Lease)

    async def _acquired(self, primitive: Primitive, timeout: float | Unset | None, kind: type[L]) -> L:
        session, terms = self._session, self._terms
        timeout = terms.timeout if isinstance(timeout, Unset) else timeout_of(timeout)
        hold = functools.partial(kind, session, terms.on_lost)
        return await session.core.acquire(primitive, hold, terms.ttl, timeout, terms.renew, terms.max_hold)

    async def try_acquire(self) -> Lease | None:
        """Hold it if that is possible now, else None. Raises Unavailable or ConfigError."""
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
        """Decorate an `async def`: each call of it is under this."""
        if not _inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is not `async def`: use interlock (for threads) for it")

        @functools.wraps(function)
        async def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            async with await self.acquire():
                return await function(*args, **kwargs)

        return locked

    async def inspect(self) -> S:
        """Who holds it and who waits, now. For people: it is old when you read it."""
        state: S = await self._state()
        return state

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Take it away from whoever holds it, who is told `reason`: whether there was one.

        The next one gets it when the holder has let go, or its lease has run out. With `force` at once, though
        the holder may still be writing: that is unsafe unless fences are checked.
        """
        return await self._revoke(reason, force=force)


class Lock(Lockable[State]):
    """A lock by name; see Interlock.lock."""

    __slots__ = ()


class RLock(Lock):
    """A lock that its holder may take again; see Interlock.rlock."""

    __slots__ = ()

    def _may_enter(self, who: object) -> None: ...

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for it; if this task (or owner) has it, it is had once more, without I/O: the same lease.

        Each acquire wants its release; the last one gives it back. `timeout` is in seconds and bounds all of the
        call: None waits for ever, 0 does not wait; its own by default. Raises AcquireTimeout, Unavailable or
        ConfigError, and then leaves nothing behind; LeaseLost if this task has it, and lost it.
        """
        owned, key = self._interlock._owned, self._primitive.keys[0]
        owner = self._primitive.owner or asyncio.current_task()
        held: list[ReentrantLease] = [lease for lease in owned.of(owner, key) if lease.inside]
        if held:
            return held[0].again()
        lease = await self._acquired(self._primitive, timeout, ReentrantLease)
        owned.add(owner, key, lease)
        return lease


class Semaphore(BasePermits, Lockable[PermitState]):
    """Up to a limit of permits; see Interlock.semaphore."""

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET, *, permits: int = 1) -> Lease:
        """Wait for so many permits, which one lease holds.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        return await self._acquired(wanted(self._primitive, permits), timeout, Lease)

    async def try_acquire(self, *, permits: int = 1) -> Lease | None:
        """So many permits if they are free now, else None. Raises Unavailable or ConfigError."""
        try:
            return await self.acquire(0, permits=permits)
        except AcquireTimeout:
            return None

    async def available(self) -> int:
        """How many permits are free now. It is old when you read it."""
        return await available(self._session.core, self._primitive)

    async def set_limit(self, limit: int) -> None:
        """Change the limit for everybody, in the server. Holders keep what they have.

        Requests that wait for more than that fail; clients that come with another limit are told so.
        """
        self._primitive = await set_limit(self._session.core, self._primitive, limit)


class RWLock:
    """Many readers or one writer; see Interlock.rwlock."""

    __slots__ = ("_interlock", "_name", "_terms")

    def __init__(self, interlock: Interlock, name: str, terms: Terms) -> None:
        self._interlock, self._name, self._terms = interlock, name, terms

    @property
    def name(self) -> str:
        """The name, without the prefix."""
        return self._name

    def read(self) -> RWSide:
        """To be held together with other readers. Whoever writes may read as well, and go on reading."""
        return RWSide(self._interlock, reading(self._name, self._interlock.prefix), self._terms)

    def write(self) -> RWSide:
        """To be held alone. Who reads can't begin to write: that would wait for itself, and is refused."""
        return RWSide(self._interlock, writing(self._name, self._interlock.prefix), self._terms)


class RWSide(BasePermits, Lockable[PermitState]):
    """Reading, or writing, under a read-write lock."""

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait for it.

        `timeout` is in seconds and bounds all of the call: None waits for ever, 0 does not wait; its own by
        default. Raises AcquireTimeout, Unavailable or ConfigError, and then leaves nothing behind.
        """
        owned, key, task = self._interlock._owned, self._primitive.keys[0], asyncio.current_task()
        lease = await self._acquired(beside(self._primitive, owned.of(task, key)), timeout, Lease)
        owned.add(task, key, lease)
        return lease
