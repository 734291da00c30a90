"""Jobs of RQ under a lock: `locked`, a decorator. Needs `interlock[rq]`.

Theory. RQ finds the function of a job by its name, so the work-horse calls what the decorator made. A work-horse is a
process for one job; it makes its Interlock on the Redis of its job, unless the decorator has one.

Rules. (a) The lock is taken when the job runs, not when somebody enqueues it. (b) A job that finds it busy waits a few
seconds in its worker, in the lock's queue; then it goes to the end of its own queue, by a `Retry` that RQ takes for
the job's result. That needs no scheduler, which few workers run, and a wait bounds how often a job goes round.
(c) Work-horses end by `os._exit`, and by signals: so nothing here relies on the end of a process but the lease itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

try:
    from rq import Retry, get_current_job
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.rq needs RQ: pip install 'rq>=2.1', or '.[rq]' in a checkout of interlock", name=error.name
    ) from error

from interlock.errors import ConfigError
from interlock.threads import Interlock

from ._tasks import TaskLock, current_lease, is_skipped, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Unpack

    from rq.job import Job

    from ._tasks import TaskOptions

__all__ = ["current_lease", "is_skipped", "locked"]

P = ParamSpec("P")
R = TypeVar("R")

WAIT: Final = 5.0  # seconds that a job waits in its worker before it goes to the end of its queue
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

    `name` is a format ("pay:{user_id}") or a function of the arguments. `busy` says what happens while somebody else
    has the lock, after `timeout` seconds in the worker: "retry" (the job goes to the end of its queue; `timeout` is 5
    then by default, else 0), `rq.Retry(max=..., interval=...)` (RQ's own, whose interval needs a worker
    `--with-scheduler`), "skip" (the result is a Skipped as a dict), "raise" (AcquireTimeout), another value to return,
    or a function of the Skipped. While no server answers, "retry" tries again, and everything else raises Unavailable.
    `locks` is an Interlock, by default one on the Redis of the job; the other options are those of `Interlock.rlock`.
    Raises ConfigError at once, if no call can have such a name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        wait = timeout if timeout is not None else WAIT if isinstance(busy, str) and busy == "retry" else 0.0
        lock = TaskLock(name, function, busy=busy, timeout=wait, options=options, again=Retry)

        def call(*args: Any, **kwargs: Any) -> Any:
            job = get_current_job()
            try:
                return lock.call(locks or _locks_of(job, lock), args, kwargs, _again if job else _raise)
            except _Again:
                return Retry(max=ROUNDS)

        return cast("Callable[P, R]", wrapped(function, call))

    return decorate


def _again(error: Exception) -> Never:
    raise _Again from error


def _raise(error: Exception) -> Never:
    raise error


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
