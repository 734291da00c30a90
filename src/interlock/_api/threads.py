"""What only threads have: an Interlock with one session, `with`, and a thread as the caller."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from interlock._client.session import Session
from interlock._protocol.names import token_part
from interlock._protocol.run import run
from interlock._servers.open import open_server
from interlock._transports.blocking import ThreadPort, ThreadRuntime

from .blocking import blocking
from .interlock import InterlockCore, MemberT, MultiLeaseT
from .lease import WatchedCore
from .lock import LockableCore
from .named import StateT
from .options import LeaseT
from .section import Exit, Section, loaded, pooled

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")


class InterlockForThreads(InterlockCore[LeaseT, MultiLeaseT, MemberT]):  # one session, for all threads
    _for_asyncio = False

    def _start(self) -> None:
        server = open_server(self._address, ThreadPort, ThreadRuntime(), self._histories)
        self._session = server.push_handler = Session(
            server, self.label, _thread, self.max_ttl, lambda: server, self.try_for
        )

    def _last_session(self) -> Session | None:
        return None if self._closed else self._session

    @staticmethod
    def _current_owner() -> threading.Thread:
        return threading.current_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run(self._close())


def _thread() -> str:
    thread = threading.current_thread()
    try:
        return thread._interlock_name  # type: ignore[attr-defined,no-any-return]  # made once a thread
    except AttributeError:
        made = thread._interlock_name = token_part(thread.name)  # type: ignore[attr-defined]
        return made


class LeaseForThreads(WatchedCore[threading.Event]):
    """A lease that a `with` holds."""

    __slots__ = ()
    _event_type = threading.Event

    def __enter__(self) -> Self:
        run(self._enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._exit(kind, error, trace))


class SectionForThreads(Section):
    """The `__exit__` of one `with`."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        """Leave it; see leave()."""
        run(self.leave(*args))


class Lockable(LockableCore[StateT, LeaseT]):
    """Something that can be held: a `with` holds it, a decorated function runs under it."""

    __slots__ = ()
    inspect = blocking(LockableCore[StateT, LeaseT]._inspect)
    revoke = blocking(LockableCore[StateT, LeaseT]._revoke)

    def __enter__(self) -> LeaseT:
        section = loaded(self, SectionForThreads)
        frame = sys._getframe(1)
        if not (section.by_hand or frame.f_code.co_flags & inspect.CO_GENERATOR) or not pooled(frame.f_back):
            section.who = weakref.ref(threading.current_thread())
        try:
            lease: LeaseT = run(self._enter(section))
        except BaseException:
            section.give_up()
            raise
        return lease

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...
        def __call__(self, function: Callable[P, R]) -> Callable[P, R]: ...

    else:
        __exit__ = Exit(SectionForThreads)
