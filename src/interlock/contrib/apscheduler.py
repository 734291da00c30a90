# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportMissingParameterType=false
# APScheduler 3 has no types.
"""A scheduler of APScheduler 3 that runs its jobs in one process of many: `Leading`. Needs `interlock[apscheduler]`.

Theory. Every process starts its scheduler, and `Leading` campaigns in a thread of its own. The scheduler of the leader
runs; those of the others are paused. A paused flag alone would be too late: when a process goes on after a stop, the
thread of its scheduler may run before the thread that learns of the loss. So each step asks the lease by itself:

    _process_jobs     looks for no due jobs without a certain lease
    submit_job        hands no job to an executor
    update_job        the round of jobs that a stop interrupts writes no old next_run_time over that of the next leader
    the job           a job that has waited in the pool of its executor does not start

A round asks the lease under which it began: what it found due is old once that one is lost, even if this process leads
anew.

Rules. (a) No certain lease, no run: a server that does not answer starts nothing. (b) A job that has begun goes on
after a loss, since nothing can end a thread: `current_lease()` is its lease, to ask and to fence by. (c) A shutdown
resigns after the last job of this process has ended, so the jobs of two leaders overlap after losses only. (d) Which
runs a leader has done is in the job store if the processes share one. For memory stores the leader writes into a key
beside the election's the moment until which it has run all that was due; the next leader begins after that moment.
(e) What is due and not done at a takeover is APScheduler's to judge, by `misfire_grace_time` and `coalesce`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

try:
    from apscheduler.events import EVENT_SCHEDULER_SHUTDOWN, EVENT_SCHEDULER_STARTED
    from apscheduler.executors.pool import BasePoolExecutor, ProcessPoolExecutor
    from apscheduler.job import Job
    from apscheduler.jobstores.memory import MemoryJobStore
    from apscheduler.schedulers import SchedulerNotRunningError
    from apscheduler.schedulers.base import BaseScheduler
    from apscheduler.util import iscoroutinefunction_partial
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.apscheduler needs APScheduler 3: "
        "pip install 'apscheduler>=3.10,<4', or '.[apscheduler]' in a checkout of interlock",
        name=error.name,
    ) from error

from interlock import Election
from interlock._protocol.log import log
from interlock._protocol.names import keys_of
from interlock.errors import ConfigError, LeaseLost, LockError, NotHeld, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from interlock import Leadership

__all__ = ["Leading", "current_lease"]

STOP_POLL: Final = 0.1  # seconds between two looks at whether the scheduler was shut down
LOOK_INTERVAL: Final = 1.0  # seconds between two looks for jobs that other processes have added
MARK_LIFE: Final = 7 * 24 * 3600  # seconds for which the server keeps until when a leader has run all that was due

_lease_of_job: ContextVar[Leadership] = ContextVar("interlock_lease_of_job")


def current_lease() -> Leadership:
    """Return the lease under which the job that calls this was started: for its `ensure()`, `lost` and `fence`.

    It stays the lease of that start, also if this process leads anew meanwhile. Raises NotHeld outside of a job; in a
    thread that the job has started; and in the child of a ProcessPoolExecutor.
    """
    lease = _lease_of_job.get(None)
    if lease is None:
        raise NotHeld(
            "current_lease() is for jobs that a scheduler under Leading runs, in the thread or task of the job. A "
            "child of a ProcessPoolExecutor has no lease"
        )
    return lease


class Leading:
    """Lets a scheduler run its jobs only while this process leads the election.

    Make it before you start the scheduler; then start and shut down the scheduler as ever, or use this in a `with` or
    `async with`, which does both. The election is one of `interlock.Interlock`, the one for threads, whatever the
    scheduler is: its renewals outlive an event loop that a job blocks. Use one name for each kind of scheduler.

    Raises ConfigError if the scheduler has been started already, or has a Leading.
    """

    def __init__(self, scheduler: BaseScheduler, election: Election) -> None:
        self._scheduler: Any = _checked_scheduler(scheduler)
        self._election = _checked_election(election)
        (self._mark_key,) = keys_of(election.name, election._interlock.prefix, ("apscheduler",))[1][1:]
        self._lease: Leadership | None = None
        self._stop: threading.Event | None = None
        self._campaign: threading.Thread | None = None
        self._running = 0  # jobs of this process that have begun and not ended
        self._none_runs = threading.Condition()
        self._round = threading.local()  # its `lease`: under which this thread looks for due jobs now
        self._due: datetime | None = None  # for when the job of this step of the round was due
        self._done: datetime | None = None  # until when all that was due has been submitted
        self._written: datetime | None = None  # what of that the server knows
        self._process_jobs: Callable[[], float | None] = self._scheduler._process_jobs
        self._scheduler._process_jobs = self._process_jobs_if_leading
        self._shutdown: Callable[[bool], None] = self._scheduler.shutdown
        self._scheduler.shutdown = self._shut_down_after_the_round
        self._scheduler._interlock_leading = self
        self._scheduler.add_listener(self._begin, EVENT_SCHEDULER_STARTED)
        self._scheduler.add_listener(self._end, EVENT_SCHEDULER_SHUTDOWN)

    @property
    def lease(self) -> Leadership | None:
        """The lease if this process leads now, else None."""
        lease = self._lease
        return lease if lease is not None and _is_certain(lease) else None

    def start(self) -> None:
        """Start the scheduler, and campaign in the background. Blocks only for a scheduler that blocks.

        While no server answers, nobody leads: the log says so once, and this raises nothing.
        """
        try:
            self._scheduler.start(paused=True)
        except (KeyboardInterrupt, SystemExit):  # of a scheduler that runs in this thread
            self.stop()
            raise

    def stop(self, *, wait: bool = True) -> None:
        """Shut the scheduler down, if it runs, and resign. With `wait` return when jobs and campaign have ended.

        A scheduler on an event loop shuts down on that loop, for which a call on the loop itself cannot wait: leave an
        `async with`, or call this in another thread. Nor can a signal handler wait that interrupts a round of jobs.
        """
        with contextlib.suppress(SchedulerNotRunningError):
            self._scheduler.shutdown(wait)
        if wait and self._campaign is not None and not self._is_in_round() and asyncio._get_running_loop() is None:
            self._campaign.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    # The campaign, in a thread of its own

    def _begin(self, _event: object) -> None:
        with contextlib.suppress(SchedulerNotRunningError):
            self._scheduler.pause()
        self._stop = threading.Event()
        name = f"interlock leading {self._election.name}"
        self._campaign = threading.Thread(target=self._run, args=(self._stop,), name=name, daemon=True)
        self._campaign.start()

    def _end(self, _event: object) -> None:
        if self._stop is not None:
            self._stop.set()

    def _run(self, stop: threading.Event) -> None:
        try:
            self._election.run(lambda lease: self._lead(lease, stop), stop=stop)
        except Exception:  # noqa: BLE001 (a thread of the background has nobody else to report to)
            log.exception("election %r: the campaign has ended, so the scheduler runs no job", self._election.name)

    def _lead(self, lease: Leadership, stop: threading.Event) -> None:
        if not self._skip_what_was_done(lease):
            return
        self._lease = lease
        try:
            with contextlib.suppress(SchedulerNotRunningError):
                self._scheduler.resume()
                self._scheduler.wakeup()  # also if somebody has resumed it before, in vain
            log.info("election %r: the scheduler of this process runs now (term %s)", lease.name, lease.term)
            looks = 0
            while not stop.is_set() and not lease.ended.wait(STOP_POLL):
                self._say_what_is_done(lease)
                looks += 1
                if looks * STOP_POLL >= LOOK_INTERVAL:
                    looks = 0
                    self._look_around()
            if not lease.ended:
                self._wait_for_jobs(lease)
                self._say_what_is_done(lease)
        finally:
            if self._lease is lease:  # else a later start of the scheduler leads already
                self._lease = None
            with contextlib.suppress(SchedulerNotRunningError):
                self._scheduler.pause()

    def _look_around(self) -> None:
        """Look for jobs that other processes have added to a job store that they share with this one."""
        if len(self._memory_stores()) < len(self._scheduler._jobstores):
            with contextlib.suppress(Exception):  # it may be shut down just now, and its loop closed
                self._scheduler.wakeup()

    def _wait_for_jobs(self, lease: Leadership) -> None:
        """Wait until this process has run each job that it has taken: the next leader may run the same ones."""
        with self._none_runs:
            while (self._running or self._pools_have_jobs()) and not lease.ended:
                self._none_runs.wait(STOP_POLL)

    def _pools_have_jobs(self) -> bool:
        """Whether a pool of threads or processes has a job that has not ended, begun or not.

        Other executors do what they do in an event loop, which may end without a word. They drop what has not begun.
        """
        pools = [each for each in list(self._scheduler._executors.values()) if isinstance(each, BasePoolExecutor)]
        return any(any(list(each._instances.values())) for each in pools)

    # Which runs a leader with memory stores has done

    def _memory_stores(self) -> list[str]:
        return [alias for alias, store in self._scheduler._jobstores.items() if isinstance(store, MemoryJobStore)]

    def _skip_what_was_done(self, lease: Leadership) -> bool:
        """Move the jobs of memory stores behind what earlier leaders have done. Returns whether this leads still."""
        self._done = self._written = None
        if not self._memory_stores():
            return True
        while True:
            try:
                mark = lease.execute("GET", self._mark_key, keys=[self._mark_key])
                break
            except LeaseLost:
                return False
            except Unavailable:
                if lease.ended.wait(STOP_POLL):
                    return False
            except LockError as error:  # a quorum can't say; rights are missing
                log.warning(
                    "election %r: a leader can't leave behind what it has done, so the next one may repeat runs within "
                    "their misfire_grace_time. Use a job store that the processes share. %s", lease.name, error,
                )  # fmt: skip
                return True
        if isinstance(mark, bytes):
            done = self._done = self._written = datetime.fromtimestamp(float(mark), UTC)
            with self._scheduler._jobstores_lock:
                for alias in self._memory_stores():
                    for job in self._scheduler.get_jobs(alias):
                        self._skip_until(job, alias, done)
        return True

    def _skip_until(self, job: Any, alias: str, done: datetime) -> None:
        times = job._get_run_times(done) if job.next_run_time is not None else []
        if not times:
            return
        following = job.trigger.get_next_fire_time(times[-1], done)
        if following is None:
            self._scheduler.remove_job(job.id, alias)
        else:
            self._scheduler.modify_job(job.id, alias, next_run_time=following)

    def _say_what_is_done(self, lease: Leadership) -> None:
        done = self._done
        if done is None or done == self._written or not self._memory_stores():
            return
        with contextlib.suppress(LockError):  # without it a later leader may repeat a run within its grace time
            text = repr(done.timestamp())
            lease.execute("SET", self._mark_key, text, "PX", MARK_LIFE * 1000, keys=[self._mark_key])
            self._written = done

    # Between the scheduler and its jobs

    def _is_in_round(self) -> bool:
        return getattr(self._round, "lease", None) is not None

    def _shut_down_after_the_round(self, wait: bool = True) -> None:
        """Shut down; if a signal handler calls this in the middle of a round, then at its end.

        Else APScheduler would note jobs as done that its executors refuse, or not note those that they have.
        """
        if self._is_in_round():
            self._round.shutdown = wait
        else:
            self._shutdown(wait)

    def _process_jobs_if_leading(self) -> float | None:
        lease = self.lease
        if lease is None:
            return None  # as a paused scheduler: the next leadership wakes it up
        for executor in list(self._scheduler._executors.values()):
            _wrap(executor, "submit_job", self._submit)
        for store in list(self._scheduler._jobstores.values()):
            _wrap(store, "update_job", self._write)
            _wrap(store, "remove_job", self._write)
        begun = datetime.now(UTC)
        self._round.shutdown = None  # first, since a handler may set it as soon as there is a lease
        self._round.lease = lease
        try:
            wait = self._process_jobs()
        except LeaseLost as error:
            log.warning("election %r: the scheduler has stopped to look for due jobs: %s", self._election.name, error)
            return None
        else:
            if self._scheduler.running and self._lease is lease:  # a shutdown empties the stores: nothing looks due
                self._done = max(begun, self._done or begun)
            return wait
        finally:
            self._round.lease = None
            if self._round.shutdown is not None:
                with contextlib.suppress(SchedulerNotRunningError):
                    self._shutdown(self._round.shutdown)

    def _certain_lease(self) -> Leadership:
        lease: Leadership | None = getattr(self._round, "lease", None)
        if lease is None:  # the program itself submits a job
            lease = self._lease
        if lease is None:
            error = LeaseLost(f"election {self._election.name!r}: this process does not lead any more")
            error.name = self._election.name
            raise error
        lease.ensure()
        return lease

    def _write(self, write: Callable[..., Any], *args: Any) -> Any:
        """Change a job store: in a round only with a certain lease, by a call of the program itself always."""
        if self._is_in_round():
            try:
                self._certain_lease()
            except LeaseLost:
                if isinstance(args[0], Job):  # a memory store has this very object, which is changed already
                    args[0].next_run_time = self._due
                raise
        return write(*args)

    def _submit(self, submit: Callable[[Any, list[datetime]], None], job: Any, run_times: list[datetime]) -> None:
        self._due = job.next_run_time
        lease = self._certain_lease()
        is_elsewhere = isinstance(getattr(submit, "__self__", None), ProcessPoolExecutor)  # it pickles the job
        submit(job if is_elsewhere else self._under(lease, job), run_times)
        latest = max(run_times)
        self._done = max(latest, self._done or latest)

    def _under(self, lease: Leadership, job: Any) -> Job:
        """The same job, which starts only while that lease is certain."""
        guarded = object.__new__(type(job))
        for field in type(job).__slots__:
            if field != "__weakref__" and hasattr(job, field):
                setattr(guarded, field, getattr(job, field))
        function = job.func
        if iscoroutinefunction_partial(function):

            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self._job_runs(lease):
                    return await function(*args, **kwargs)

            guarded.func = functools.wraps(function)(run_async)
        else:

            def run(*args: Any, **kwargs: Any) -> Any:
                with self._job_runs(lease):
                    return function(*args, **kwargs)

            guarded.func = functools.wraps(function)(run)
        return guarded

    @contextlib.contextmanager
    def _job_runs(self, lease: Leadership) -> Generator[None]:
        with self._none_runs:
            self._running += 1
        token = _lease_of_job.set(lease)
        try:
            lease.ensure()
            yield
        finally:
            _lease_of_job.reset(token)
            with self._none_runs:
                self._running -= 1
                self._none_runs.notify_all()


def _is_certain(lease: Leadership) -> bool:
    try:
        lease.ensure()
    except LeaseLost:
        return False
    return True


def _wrap(owner: Any, method: str, around: Callable[..., Any]) -> None:
    """Let each call of this object's method go through `around`. Repeating it changes nothing."""
    if method not in vars(owner):
        setattr(owner, method, functools.partial(around, getattr(owner, method)))


def _checked_scheduler(scheduler: Any) -> BaseScheduler:
    if not isinstance(scheduler, BaseScheduler):
        raise ConfigError(
            f"Leading() takes a scheduler of APScheduler 3, such as BackgroundScheduler(), not {scheduler!r}"
        )
    if hasattr(scheduler, "_interlock_leading"):
        raise ConfigError(
            "this scheduler has a Leading already: make one for each scheduler, where you make the scheduler"
        )
    if scheduler.running:
        raise ConfigError(
            "this scheduler has been started already, so it may have run jobs beside those of a leader: make its "
            "Leading first, then start it"
        )
    return scheduler


def _checked_election(election: object) -> Election:
    if isinstance(election, Election):
        return election
    given = f"{type(election).__module__}.{type(election).__qualname__}"
    if given == "interlock.aio.Election":
        raise ConfigError(
            "Leading() takes an election of interlock.Interlock, not of interlock.aio, for each kind of scheduler: its "
            "renewals run in a thread, so a job that blocks the event loop does not lose the lead"
        )
    raise ConfigError(f"Leading() takes an election, such as Interlock(url).election('scheduler'), not a {given}")
