"""Cancelling a task for a reason of ours, and taking that cancellation back, as asyncio.timeout does.

Theory. Whoever cancels a task adds one to its count (`cancelling()`), and whoever takes a cancellation back
(`uncancel()`) subtracts one; but the task raises one CancelledError for all who asked since its last await. So the
count, and nothing in the exception, tells whether a CancelledError is ours alone.

Rules.
(a) A scope cancels its task at most once, and takes exactly that back when the task leaves it.
(b) A CancelledError becomes something else only if the count is then what it was on entry. Otherwise somebody else
    wants the task to end, too, and the CancelledError goes on.
(c) A body that ended before our cancellation was delivered must not leave it to the next await of its task.
(d) Another task may leave the scope in the stead of its task. It takes back what was delivered, and only that: what is
    on its way will be raised in the task of the scope.
(e) Before Python 3.13 a TaskGroup whose last task fails late takes no cancellation back: the count stays too high for
    ever, though the task goes on. So a scope notes the count when it cancels. A CancelledError that has the message of
    a scope, and interrupted no other CancelledError, is ours in spite of the older requests in that count.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

from interlock.errors import LeaseLost

from . import inside
from .lease import WatchedCore
from .misuse_errors import OnlyAsyncWith

if TYPE_CHECKING:
    from types import TracebackType


OURS: Final = "interlock: its lease has ended, or its stop event was set"  # the message of a cancellation by a scope
TASK_GROUPS_LEAVE_A_COUNT: Final = sys.version_info < (3, 13)


class CancelScope:
    """A part of a task that we may cancel."""

    __slots__ = ("_before", "_delivered", "cancelled", "who")

    def __init__(self, who: weakref.ref[asyncio.Task[object]] | None = None) -> None:
        """`who` is the current task, if the caller knows it."""
        task = asyncio.current_task() if who is None else who()
        # Weak: a task whose error leads back to this scope, through the frames of its traceback, is garbage at once.
        self.who = who or (weakref.ref(task) if task is not None else None)
        self._before = self._delivered = task.cancelling() if task is not None else 0
        self.cancelled = False

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The task, as long as there is one."""
        return self.who() if self.who is not None else None

    def cancel(self) -> None:
        """Cancel the task, unless this scope has done so."""
        if not self.cancelled and (task := self.task) is not None and not task.done():
            self.cancelled = True
            if TASK_GROUPS_LEAVE_A_COUNT and not _is_pending(task):
                self._delivered = max(self._before, task.cancelling())
            task.cancel(OURS)

    def take_back(self, error: BaseException | None) -> bool:
        """Leave the scope. Returns whether we alone cancelled the task, and nobody cancelled the task that leaves.

        `error` is that of the body.
        """
        here, task = asyncio.current_task(), self.task
        if not self.cancelled or here is None or task is None:
            return False
        if here is not task and (_is_pending(task) or here.cancelling()):
            return False
        left = task.uncancel()
        return left <= self._before or (left <= self._delivered and _is_ours_alone(error))

    async def discard(self) -> None:
        """After `take_back`: let nothing be left of a cancellation that was not delivered."""
        if not getattr(self.task, "_must_cancel", True):
            return  # it was, or an await swallowed it, or uncancel() has dropped it (Python 3.13)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if (task := self.task) is not None and task.cancelling() > self._before:
                raise  # somebody else has asked meanwhile


def _is_ours_alone(error: BaseException | None) -> bool:
    """Whether this is the cancellation of a scope, which interrupted no code that handled another cancellation."""
    if not isinstance(error, asyncio.CancelledError) or error.args != (OURS,):
        return False
    context = error.__context__
    while context is not None and not isinstance(context, asyncio.CancelledError):
        context = context.__context__
    return context is None


def _is_pending(task: asyncio.Task[object]) -> bool:
    """Whether a cancellation is still to be raised in this task, which does not run now."""
    waits_for = getattr(task, "_fut_waiter", None)
    return getattr(task, "_must_cancel", True) or (waits_for is not None and waits_for.cancelled())


class Body(CancelScope):
    """What one task does inside a lease."""

    __slots__ = ("until_any_end",)

    def __init__(self, who: weakref.ref[asyncio.Task[object]] | None, *, until_any_end: bool) -> None:
        super().__init__(who)
        self.until_any_end = until_any_end
        """Whether any end that another task causes cancels it, and not only a loss."""


class LeaseEvent(asyncio.Event):
    """An event of a lease. It is true once it is set, so that `if lease.lost:` asks whether the lease is lost."""

    def __bool__(self) -> bool:
        return self.is_set()


class LeaseForAsyncio(WatchedCore, OnlyAsyncWith):
    """A lease that tasks are inside of: a loss cancels each of them once, where it is innermost.

    The cancelled body turns the cancellation into LeaseLost, which the bodies around it then see.
    """

    __slots__ = ()
    _event_type = LeaseEvent

    def _on_lost(self) -> None:
        for body in {each.task: each for each in self._bodies}.values():  # of each task the innermost
            body.cancel()
        super()._on_lost()

    def _on_end(self) -> None:
        for body in self._bodies:
            if body.until_any_end and body.task is not asyncio.current_task():  # the task that ends it knows
                body.cancel()
        super()._on_end()

    def _begin(self, who: weakref.ref[Any] | None = None, *, until_any_end: bool = False) -> None:
        self._ensure()  # no body runs under a lease that has ended
        body = Body(who, until_any_end=until_any_end)
        self._bodies = (*self._bodies, body)
        if body.who is not None:
            inside.enter(body.who, self)

    def _body_left(self) -> Body | None:
        """Take out the innermost body of the current task; or that of another task, in whose stead this one leaves."""
        left: Body | None
        if len(self._bodies) < 2:  # as nearly always
            left = self._bodies[0] if self._bodies else None
            self._bodies = ()
            return left
        here = asyncio.current_task()
        left = next((each for each in reversed(self._bodies) if each.task is here), self._bodies[-1])
        self._bodies = tuple(each for each in self._bodies if each is not left)
        return left

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit(kind, error, trace)

    async def _exit(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        body = self._body_left()
        if body is not None and body.who is not None:
            inside.leave(body.who, self)
        if body is None or not body.cancelled:
            try:
                await self._leave(error)
            except RuntimeError as failed:
                self._check_loop(failed)
                raise
            return
        ours, interrupted = body.take_back(error), False
        converts = ours and isinstance(error, asyncio.CancelledError)
        try:
            if ours and not converts:
                try:
                    await body.discard()
                except asyncio.CancelledError as another:
                    error, interrupted = another, True
            await self._leave(None if converts else error)
            if interrupted and error is not None:
                raise error
            if converts:  # it was not lost: somebody else gave it back
                self._ensure()
        except LeaseLost as lost:
            raise lost from error
        finally:
            error = None  # its traceback refers to this frame


class StopScope:
    """An `async with` that cancels its body when an event is set, and ends without an error then."""

    def __init__(self, stop: asyncio.Event | None) -> None:
        self._stop = stop

    async def __aenter__(self) -> Self:
        self._scope = CancelScope()
        self._watch: asyncio.Task[object] | None = None
        if self._stop is not None:
            self._watch = asyncio.create_task(self._stop.wait(), name="interlock-stop")
            self._watch.add_done_callback(self._stopped)
        return self

    def _stopped(self, watch: asyncio.Task[object]) -> None:
        if self._watch is not None and not watch.cancelled():
            self._scope.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # what it has to say comes too late
        if not self._scope.take_back(error):
            return False
        if isinstance(error, asyncio.CancelledError):
            return True
        await self._scope.discard()
        return False
