"""`locked`: a task that runs under a lock, and what Celery does with the task while the lock is busy."""

# Celery has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, Never, ParamSpec, Unpack

from celery import Task, current_app, current_task
from celery.local import Proxy

from interlock.contrib._tasks import TaskLock, wrapped
from interlock.errors import ConfigError

from .settings import checks, locks_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock import Interlock
    from interlock.contrib._tasks import TaskOptions

P = ParamSpec("P")
BACKOFF: Final = 1.0  # seconds before the first retry; each further one waits twice as long
BACKOFF_MAX: Final = 600  # seconds, as of Celery's own backoff
DOUBLINGS: Final = 30  # more than 1023 would overflow a float


def locked(
    name: str | Callable[..., str],
    *,
    busy: object = "retry",
    timeout: float = 0.0,
    locks: Interlock | None = None,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[P, object]], Callable[P, object]]:
    """Decorate the function of a task, below `@app.task`: each run of it holds the lock of this name.

    Args:
        name: of the lock: a format of the task's arguments, as in "pay:{user_id}", or a function that takes them by
            their names and returns the name.
        busy: what a run does if the lock is not free: "retry" retries the task by Celery, "skip" returns the Skipped
            as a dict, "raise" raises AcquireTimeout. Any other value is the result of the run; a function is called
            with the Skipped, and what it returns is the result.
        timeout: seconds that a run waits for the lock in its worker, before the lock counts as busy.
        locks: the Interlock; by default that of the app's `interlock_url`.
        options: ttl, max_hold, fair, on_lost and others, as of Interlock.lock.

    "retry" counts as a retry of the task, up to its `max_retries`, and then raises AcquireTimeout, or Unavailable if no
    server answered. It waits 1 s, then twice as long each time, up to 10 minutes, with jitter; `retry_backoff`,
    `retry_backoff_max` and `retry_jitter` of the task change that. A run whose lease was lost fails with LeaseLost.
    Raises ConfigError.
    """

    def decorate(function: Callable[P, object]) -> Callable[P, object]:
        if isinstance(function, Task | Proxy):
            raise ConfigError(
                f"locked({name!r}) decorates the function of a task, not the task: put @locked below @app.task"
            )
        lock = TaskLock(name, function, busy=busy, timeout=timeout, options=options)
        if locks is None:
            checks.append(lock.check)
        else:
            lock.check(locks)

        def call(*args: Any, **kwargs: Any) -> object:
            return lock.call(locks or locks_of(_app()), args, kwargs, _retry)

        return wrapped(function, call)

    return decorate


def _app() -> Any:
    """The app of the task that runs in this thread."""
    return current_task.app if current_task else current_app._get_current_object()


def _retry(error: Exception) -> Never:
    """Retry the running task; raise the error if no task runs in a worker, or if it was retried often enough."""
    task: Any = current_task
    if not task:
        raise error
    raise task.retry(exc=error, countdown=_countdown(task))


def _countdown(task: Any) -> float:
    """Seconds until the next try: the task's own options of a backoff, or twice as long each time."""
    factor = float(getattr(task, "retry_backoff", False)) or BACKOFF
    most = float(getattr(task, "retry_backoff_max", BACKOFF_MAX))
    seconds: float = min(most, factor * 2.0 ** min(task.request.retries, DOUBLINGS))
    jitter: float = random.uniform(0.5, 1.0) if getattr(task, "retry_jitter", True) else 1.0
    return seconds * jitter
