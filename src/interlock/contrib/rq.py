"""Jobs of RQ under a lock: `locked`, a decorator. Needs `interlock[rq]`.

Theory. RQ finds the function of a job by its name, so the work-horse calls what the decorator made. A work-horse is a
process for one job; it makes its Interlock on the Redis of its job, unless the decorator has one.

Rules. (a) The lock is taken when the job runs, not when somebody enqueues it. (b) A job that finds it busy waits a few
seconds in its worker, in the lock's queue; then it goes to the end of its own queue, by a `Retry` that it returns to
RQ. That needs no scheduler, which few workers run, and a wait bounds how often a job goes round. (c) Work-horses end by
`os._exit`, and by signals: so nothing here relies on the end of a process but the lease itself. (d) RQ sees what the
job's own function returns, and nothing else: a call inside of a job raises instead.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

try:
    from rq import Retry, get_current_job
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.rq needs RQ: pip install 'rq>=2.1', or '.[rq]' in a checkout of interlock", name=error.name
    ) from error

from interlock.errors import AcquireTimeout, ConfigError
from interlock.threads import Interlock

from ._tasks import TaskLock, _current, current_lease, is_skipped, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Unpack

    from rq.job import Job

    from ._tasks import TaskOptions

__all__ = ["current_lease", "is_skipped", "locked"]

P = ParamSpec("P")
R = TypeVar("R")

WAIT: Final = 5.0  # seconds that a job waits in its worker before it goes to the end of its queue
SHORTEST_WAIT: Final = 1.0  # seconds; each round costs a fork
ROUNDS: Final = 10_000  # after which RQ counts the job as failed

_of_connection: WeakKeyDictionary[object, Interlock] = WeakKeyDictionary()


class _Again(Exception):  # noqa: N818
    """The job shall go to the end of its queue."""


def locked(
    name: str | Callable[..., str],
    *,
    busy: object = "retry",
    timeout: float | None = None,
    locks: Interlock | None = None,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run each job of a function under a lock, whose name is made of its arguments.

    Args:
        name: of the lock: a format of the arguments, as in "pay:{user_id}", or a function that takes them and returns
            the name.
        busy: what happens if the lock is not free: "retry" sends the job to the end of its queue; an
            `rq.Retry(max=..., interval=...)` is RQ's own, whose interval needs a worker
            `--with-scheduler`; "skip" makes the Skipped, as a dict, the result; "raise" raises AcquireTimeout. Any
            other value is the result; a function is called with the Skipped, and what it returns is the result.
        timeout: seconds that a job waits for the lock in its worker, before the lock counts as busy: 5 with "retry",
            else 0, if it is left out.
        locks: the Interlock; by default one on the Redis of the job.
        options: those of `Interlock.rlock`.

    While no server answers, "retry" tries again, and everything else raises Unavailable. Only the job's own function is
    tried again: another decorated function that it calls raises AcquireTimeout. A job whose lease was lost fails with
    LeaseLost. Raises ConfigError at once, if no call can have such a name, or "retry" has a `timeout` below a second.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        goes_round = isinstance(busy, str) and busy == "retry"
        again = busy if isinstance(busy, Retry) else Retry(max=ROUNDS)
        wait = timeout if timeout is not None else WAIT if goes_round else 0.0
        lock = TaskLock(name, function, busy="retry" if again is busy else busy, timeout=wait, options=options)
        if goes_round and wait < SHORTEST_WAIT:
            raise ConfigError(
                f'{lock.subject}: with busy="retry" and timeout={wait!r} a job that finds its lock busy would go round '
                f"its queue without a pause, a fork each time, until its {ROUNDS} rounds are used up. Give a "
                f"timeout of {SHORTEST_WAIT:g} s or more, or busy=rq.Retry(max=..., interval=...)"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            job = get_current_job()
            is_inner = _current.get() is not None

            def retry(error: Exception) -> Never:
                is_tried_again = goes_round or isinstance(error, AcquireTimeout)
                if is_tried_again and job is not None and not is_inner and _is_own(job, function):
                    raise _Again from error
                raise error

            try:
                return lock.call(locks or _locks_of(job, lock), args, kwargs, retry)
            except _Again:
                return again

        return cast("Callable[P, R]", wrapped(function, call))

    return decorate


def _is_own(job: Job, function: Callable[..., object]) -> bool:
    """Whether RQ itself called this function for this job, so that it sees what the call returns."""
    called = cast("Callable[..., object]", job.func)
    return inspect.unwrap(getattr(called, "__func__", called)) is inspect.unwrap(function)


def _locks_of(job: Job | None, lock: TaskLock) -> Interlock:
    if job is None:
        raise ConfigError(
            f"{lock.subject}: the function was called outside of a worker, so no job says on which server its lock is. "
            "Give locks=Interlock(...)"
        )
    connection = job.connection
    locks = _of_connection.get(connection)
    if locks is None:
        locks = _of_connection[connection] = Interlock(connection)
    return locks
