"""What only asyncio has: an Interlock with a session for each loop, `async with`, and a task as the caller."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, Self

from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.names import token_part
from interlock._protocol.snapshot import snapshot
from interlock.errors import ConfigError

from .interlock import InterlockCore
from .lock import LockableCore
from .misuse_errors import OnlyAsyncWith
from .multilease import MultiLeaseCore
from .named import StateT
from .options import LeaseT
from .scopes import LeaseForAsyncio
from .section import Section, WithExit, section_of_this_with

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from interlock._client.grant import Attempt
    from interlock._protocol.resource import Resource
    from interlock._protocol.server import Server
    from interlock._session.session import Session

    from .lease import LeaseCore


class InterlockForAsyncio(InterlockCore, OnlyAsyncWith):  # a session for each loop that uses it
    _for_asyncio = True

    def _start(self) -> None:
        # Now, and not with the first session: the import of redis-py would delay a loop.
        from interlock._transports.asyncio.pool import AsyncioPool  # noqa: PLC0415

        self._pool_type = AsyncioPool
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = weakref.WeakKeyDictionary()
        self._latest: tuple[asyncio.AbstractEventLoop | None, Session | None] = (None, None)

    @property
    def _session(self) -> Session:
        if not KNOWN[0]:
            notice()
        loop = asyncio.get_running_loop()
        latest, session = self._latest
        if latest is loop and session is not None and not session.requests.closed:
            return session
        session = self._sessions.get(loop)
        if session is not None and session.requests.is_of_parent:
            raise ConfigError(
                f"{self!r} was used in this event loop before a fork: in the child that loop watches the connections "
                "of the parent. Run another one in the child: asyncio.run()"
            )
        if session is None or session.requests.closed:
            self._check_not_closed()
            left = self._prune()
            # Between the user's code and Core.attempt(): acquire, _acquire
            session = self._session_of(self._open_server(), _task, self._farewell, frames_to_user=3)
            self._sessions[loop] = session
            for attempt in left:
                session.undo.add(attempt)
        self._latest = (loop, session)
        return session

    def _open_server(self) -> Server:
        """A server for the running loop."""
        from interlock._servers.open_server import open_server  # noqa: PLC0415 (it imports redis-py)
        from interlock._transports.asyncio.runtime import AsyncioRuntime  # noqa: PLC0415

        return open_server(self._address, self._pool_type, AsyncioRuntime(), self._histories, self.prefix)

    def _farewell(self) -> Server:
        """A server that needs no loop, for the exit of the process."""
        from interlock._servers.open_server import open_server  # noqa: PLC0415 (it imports redis-py)
        from interlock._transports.blocking.pool import BlockingPool  # noqa: PLC0415
        from interlock._transports.blocking.runtime import ThreadRuntime  # noqa: PLC0415

        return open_server(self._address, BlockingPool, ThreadRuntime(), self._histories, self.prefix)

    def _prune(self) -> list[Attempt]:
        """Forget the closed loops. Returns the attempts to undo; leases of these loops end when the process exits."""
        left: list[Attempt] = []
        for loop, session in snapshot(self._sessions.items()):
            if loop.is_closed() and self._sessions.pop(loop, None) is not None:  # else another loop's thread was first
                left += session.abandon()
        return left

    def _last_session(self) -> Session | None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        return None if session is None or session.requests.is_of_parent else session

    @staticmethod
    def _current_owner() -> asyncio.Task[object] | None:
        return asyncio.current_task()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()


def _task(_: Resource) -> tuple[str, weakref.ref[Any] | None]:
    task = asyncio.current_task()
    return (token_part(task.get_name()), weakref.ref(task)) if task else ("-", None)


class MultiLeaseForAsyncio(MultiLeaseCore, LeaseForAsyncio):
    """Several leases as one, which are released all at once."""

    __slots__ = ()

    async def _release_each(self, leases: list[LeaseCore]) -> list[bool | BaseException]:
        depths = [lease._depth for lease in leases]
        try:
            return await asyncio.gather(*(lease._release() for lease in leases), return_exceptions=True)
        except asyncio.CancelledError:
            for lease, depth in zip(leases, depths, strict=True):
                if not lease._ended and lease._depth == depth:  # cancelled before it began
                    lease._abandon()
            raise


class SectionForAsyncio(Section):
    """The `__aexit__` of one `async with`."""

    __slots__ = ()
    __call__ = Section.leave


class Lockable(LockableCore[StateT, LeaseT], OnlyAsyncWith):
    """Something that can be held: an `async with` holds it, a decorated function runs under it."""

    __slots__ = ()

    async def _enter_as_task(self, section: Section) -> LeaseT:
        try:
            if (task := asyncio.current_task()) is not None:
                section.entered_by = weakref.ref(task)
            lease: LeaseT = await self._enter(section)
        except BaseException:
            section.release_in_background()
            raise
        return lease

    if TYPE_CHECKING:

        async def __aenter__(self) -> LeaseT: ...
        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:  # help() would show a type variable

        def __aenter__(self) -> Coroutine[object, object, object]:
            return self._enter_as_task(section_of_this_with(self, SectionForAsyncio))

        __aexit__ = WithExit(SectionForAsyncio)
