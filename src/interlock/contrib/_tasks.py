"""What `locked` of each task queue shares: the lock of each call of a task, and what a call does if that lock is busy.

Theory. A worker runs the task's function inside of the `with` of an rlock. So the run acquires the lock, and not the
call that queues the task; and the worker renews the lease as long as it lives. Whatever ends the function releases the
lease: a result, an error, a time limit or a signal that raises. The lease of a worker that dies runs out.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, cast

from interlock._api.functions import checked_function
from interlock._api.options import timeout_of
from interlock.errors import AcquireTimeout, ConfigError, NotHeld, Unavailable
from interlock.primitives.once import Skipped

from ._names import CallNames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Never

    from interlock.threads import Interlock, Lease

BUSY: Final = ("retry", "skip", "raise")
_SKIPPED: Final = frozenset(Skipped.__dataclass_fields__)

_current: ContextVar[Lease | None] = ContextVar("interlock_lease_of_task", default=None)


def current_lease() -> Lease:
    """Return the lease under which the running task was called, the innermost if there are several. No I/O.

    Ask it in long work: `current_lease().ensure()` raises LeaseLost once the lock is not certainly held any more; its
    `fence` goes with what the task writes. Raises NotHeld outside of a function that `locked` decorates.
    """
    lease = _current.get()
    if lease is None:
        raise NotHeld("current_lease(): no task with @locked runs here. Call it inside of the decorated function")
    return lease


def is_skipped(result: object) -> bool:
    """Whether this result of a task says that the task was skipped, also after a result back end made JSON of it."""
    if isinstance(result, dict):
        return cast("dict[str, object]", result).keys() == _SKIPPED
    return isinstance(result, Skipped)


class TaskOptions(TypedDict, total=False):
    """How a task holds its lock; Interlock.lock says what each means."""

    ttl: float
    renew: bool
    max_hold: float | None
    fair: bool
    confirm: bool | None
    max_waiters: int | None
    on_lost: Callable[[Lease], object] | None
    acks: int | Literal["majority", "all"] | None
    fsync: bool


class TaskLock:
    """The lock around each call of one function.

    `busy` says what a call does if the lock is not free within `timeout` seconds: "retry", "skip", "raise", a value to
    return, or a function of the Skipped that returns one. In a quarantine nobody is known to hold the lock: then a
    call retries with "retry", and else raises AcquireTimeout. Raises ConfigError at once, if no call can have such a
    name.
    """

    def __init__(
        self,
        name: str | Callable[..., str],
        function: Callable[..., Any],
        *,
        busy: object,
        timeout: float,
        options: Mapping[str, Any],
    ) -> None:
        self.subject = f"locked({name!r})" if isinstance(name, str) else "locked()"
        checked_function(self.subject, function, for_asyncio=False)
        self._names = CallNames(self.subject, name, function)
        self._function = function
        self._busy = self._checked_busy(busy)
        if timeout_of(timeout) is None:
            raise ConfigError(
                f"{self.subject}: a task that waits for ever takes its worker from all other tasks. Give timeout= in "
                'seconds, or 0 and busy="retry"'
            )
        if unknown := [*(options.keys() - TaskOptions.__annotations__.keys())]:
            known = ", ".join(("busy", "timeout", "locks", *TaskOptions.__annotations__))
            raise ConfigError(f"{self.subject}: there is no option {unknown[0]!r}. It has {known}")
        self._options: dict[str, Any] = {**options, "timeout": timeout}

    def _checked_busy(self, busy: object) -> object:
        if isinstance(busy, str) and busy not in BUSY:
            wait = ". To wait in the worker: timeout= in seconds" if busy == "wait" else ""
            raise ConfigError(
                f"{self.subject}: busy must be {', '.join(map(repr, BUSY))}, a function of the Skipped, or a value to "
                f"return, not {busy!r}{wait}. To return a str: busy=lambda skipped: {busy!r}"
            )
        if isinstance(busy, BaseException) or (inspect.isclass(busy) and issubclass(busy, BaseException)):
            raise ConfigError(
                f'{self.subject}: busy={busy!r} would be returned, not raised. Use busy="raise", or a function'
            )
        return busy

    def check(self, locks: Interlock) -> None:
        """Raise ConfigError if these locks can't have such options. No I/O."""
        try:
            locks.rlock("a task", **self._options)
        except ConfigError as error:
            raise ConfigError(f"{self.subject}: {error}") from None

    def call(
        self, locks: Interlock, args: tuple[Any, ...], kwargs: Mapping[str, Any], retry: Callable[[Exception], Never]
    ) -> Any:
        """Call the function under the lock of this call. `retry` raises what makes the queue try again later.

        Raises what the function raises; LeaseLost if the lease did not last until its end; AcquireTimeout and
        Unavailable, if `busy` does not say something else.
        """
        lock = locks.rlock(self._names.of(args, kwargs), **self._options)
        is_inside = False
        try:
            with lock as lease:
                is_inside = True
                outer = _current.set(lease)
                try:
                    return self._function(*args, **kwargs)
                finally:
                    _current.reset(outer)
        except AcquireTimeout as error:
            if is_inside or self._busy == "raise":
                raise
            if self._busy == "retry":
                retry(error)
            if error.quarantined:  # nobody is known to do this work, so it is not done by another
                raise
            return self._answer(Skipped(lock.name, error.holder, None, None))
        except Unavailable as error:
            if is_inside or self._busy != "retry":
                raise
            retry(error)

    def _answer(self, skipped: Skipped) -> object:
        """What a call returns that was skipped."""
        busy = self._busy
        if busy == "skip":
            return skipped.as_dict()
        if inspect.isroutine(busy) or inspect.isclass(busy) or isinstance(busy, functools.partial):
            return cast("Callable[[Skipped], object]", busy)(skipped)
        return busy


def wrapped(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` in place of the user's function: queues that look at its arguments see those of the function."""
    made = functools.wraps(function)(call)
    made.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # for what follows no __wrapped__
    return made
