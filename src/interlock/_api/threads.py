"""What only threads have: an Interlock with one session, `with`, and a thread as the caller.

The transport for threads suspends no coroutine, so `run` runs each to its end without an event loop.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.names import token_part
from interlock._protocol.run_to_end import run

from . import inside
from .interlock import InterlockCore
from .lease import WatchedCore
from .lock import LockableCore
from .misuse_errors import OnlyWith, check_threads_run, patched_too_late
from .misuse_warnings import warn_of_blocked_loop
from .multilease import MultiLeaseCore
from .named import StateT
from .options import LeaseT
from .section import Section, WithExit, is_driven_by_pool, section_of_this_with

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from interlock._protocol.resource import Resource
    from interlock._session.session import Session


StopScope: Final = nullcontext  # nothing interrupts a thread: see the one of asyncio


class InterlockForThreads(InterlockCore, OnlyWith):  # one session, for all threads
    _for_asyncio = False

    def _start(self) -> None:
        from interlock._servers.open_server import open_server  # noqa: PLC0415 (it imports redis-py)
        from interlock._transports.blocking.pool import BlockingPool  # noqa: PLC0415
        from interlock._transports.blocking.runtime import ThreadRuntime  # noqa: PLC0415

        check_threads_run()
        self._runtime = ThreadRuntime()
        server = open_server(
            self._address,
            partial(BlockingPool, max_connections=self.max_connections),
            self._runtime,
            self._histories,
            self.prefix,
        )
        # Between the user's code and Core.attempt(): acquire, run, _acquire; or __enter__, _enter, _acquire
        self._only_session = self._session_of(server, _thread, lambda: server, frames_to_user=4)

    @property
    def _session(self) -> Session:
        if threading.Lock is not self._runtime.made_of:
            self._begin_anew()
        return self._only_session

    def _begin_anew(self) -> None:
        """Make anew what was made of the system's locks, if greenlets run as threads now. Raises ConfigError."""
        if (library := self._runtime.replaced_by()) is None:
            return
        if self._runtime.has_started:
            raise patched_too_late(library, self._runtime.first_use)
        self._only_session.reset_after_fork()

    def _last_session(self) -> Session | None:
        return None if self._closed else self._only_session

    @staticmethod
    def _current_owner() -> threading.Thread:
        return threading.current_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run(self._close())


def _thread(resource: Resource) -> tuple[str, weakref.ref[Any]]:
    # asyncio is not imported here: a process that has not imported it has no loop.
    if (events := sys.modules.get("asyncio.events")) is not None and events._get_running_loop() is not None:
        warn_of_blocked_loop(resource)
    thread = threading.current_thread()
    try:
        return thread._interlock_caller  # type: ignore[attr-defined,no-any-return]  # made once a thread
    except AttributeError:
        made = thread._interlock_caller = token_part(thread.name), weakref.ref(thread)  # type: ignore[attr-defined]
        return made


class LeaseEvent(threading.Event):
    """An event of a lease. It is true once it is set, so that `if lease.lost:` asks whether the lease is lost."""

    def __bool__(self) -> bool:
        return self.is_set()


class LeaseForThreads(WatchedCore, OnlyWith):
    """A lease that threads are inside of. Its loss interrupts no thread; a revocation ends what a thread waits for.

    Else a deadlock of two processes would outlast the revocation of one of its leases, up to the end of that lease. A
    lease that expires is free in the server, and so ends a deadlock by itself.
    """

    __slots__ = ()
    _event_type = LeaseEvent

    def _on_lost(self) -> None:
        super()._on_lost()
        if self._bodies and (lost := self._revocation()) is not None:
            self._core.end_waits([thread for who in self._bodies if (thread := who()) is not None], lost)

    def _begin(self, who: weakref.ref[Any] | None = None, *, until_any_end: bool = False) -> None:  # noqa: ARG002 (see WatchedCore)
        who = who or weakref.ref(threading.current_thread())
        with self._core.runtime.mutex:  # several threads may be inside of an rlock with `owner=`
            self._bodies = (*self._bodies, who) if self._bodies else (who,)
        inside.enter(who, self)

    def _exit(self, _kind: object, error: BaseException | None, _trace: object) -> Coroutine[Any, Any, None]:
        with self._core.runtime.mutex:
            left = self._body_left() if self._bodies else None
        if left is not None:
            inside.leave(left, self)
        return self._leave(error)

    def _body_left(self) -> Any:
        """The innermost body of this thread is over; or that of another thread, in whose stead this one leaves.

        Under the mutex.
        """
        bodies = [*self._bodies]
        if len(bodies) > 1:
            here = threading.current_thread()
            mine = [i for i, who in enumerate(bodies) if who() is here]
            left = bodies.pop(mine[-1] if mine else -1)
        else:
            left = bodies.pop()
        self._bodies = (*bodies,)
        return left

    def __enter__(self) -> Self:
        run(self._enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._exit(kind, error, trace))


class MultiLeaseForThreads(MultiLeaseCore, LeaseForThreads):
    """Several leases as one."""

    __slots__ = ()


class SectionForThreads(Section):
    """The `__exit__` of one `with`."""

    __slots__ = ()

    def __call__(self, *args: Any) -> None:
        """Leave it; see leave()."""
        run(self.leave(*args))


class Lockable(LockableCore[StateT, LeaseT], OnlyWith):
    """Something that can be held: a `with` holds it, a decorated function runs under it."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> LeaseT: ...
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:  # help() would show a type variable

        def __enter__(self) -> object:
            if not KNOWN[0]:
                notice()  # as run() does
            section = section_of_this_with(self, SectionForThreads)
            frame = sys._getframe(1)
            if not (section.by_hand or frame.f_code.co_flags & inspect.CO_GENERATOR) or not is_driven_by_pool(
                frame.f_back
            ):
                section.entered_by = weakref.ref(threading.current_thread())
            coroutine = self._enter(section)
            try:  # as run() does, which would be one call more for each `with`
                coroutine.send(None)
            except StopIteration as finished:
                return finished.value
            except BaseException:
                section.release_in_background()
                raise
            coroutine.close()
            raise RuntimeError("a coroutine was suspended, although threads run it")

        __exit__ = WithExit(SectionForThreads)
