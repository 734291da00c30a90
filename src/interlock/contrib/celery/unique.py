"""`Unique`: a task that is queued once at a time. A caller that queues it again gets the result of the first one.

Theory. A *claim* is a key in the server of the locks: which task, by its id, has this name. It exists from the moment
at which the task is queued to the end of the task. While a task is queued no process has it, so nobody renews the
claim: it lasts `at_most` seconds from when its task was last queued, retried, or began to run. All reads and
writes of a claim are commands under the lease of one lock for each name. So nobody acts on a claim that has changed
meanwhile, and a process that was stopped inside of that lock changes nothing later.

Rules. (a) The message is sent inside of that lock, and the claim is written after it. A process that dies in between, a
broker that refuses, and a lost reply leave a message without a claim, which may run twice: `locked` is there for that.
No crash leaves a claim without a message, for which others would wait in vain. (b) Only the task whose id is in the
claim ends it. (c) For some tasks others wait: callbacks, or a chain, group or chord, which knows the id already. Such a
call is sent even if it is a second one; its task does nothing, and its result says so. Else a chord would wait for
ever. (d) The claim decides what is queued, never what runs: a task runs also if nobody knows its claim. (e) A retry,
and a call as in (c), is sent without a claim if no server of the locks answers, or the task would be lost. A retry is
never a second one, even if its claim has run out and belongs to another task: it has work to end.
"""

# Celery has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportIncompatibleVariableOverride=false
# pyright: reportMissingParameterType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from celery import Task, signals
from celery.exceptions import Reject, Retry, TimeLimitExceeded, WorkerLostError

from interlock._protocol.names import MIN_TTL, duration, keys_of
from interlock.contrib._names import CallNames
from interlock.errors import ConfigError, LockError
from interlock.primitives.once import MAX_AT_MOST, Skipped

from .settings import checks, locks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from interlock import Interlock, Lease

logger: Final = logging.getLogger("interlock.celery")
TTL: Final = 2.0  # seconds until the lock of a claim is free again, if its holder died while it sent a message
TIMEOUT: Final = 5.0  # seconds that a caller waits for that lock: longer than TTL
TIMEOUT_OF_WORKER: Final = 1.0  # seconds of the process that gives tasks to a pool: it must not stand still
NAME: Final = "interlock_unique"  # the header that says which claim a task has
DUPLICATE: Final = "interlock_duplicate_of"  # the header that says which task is queued or runs already
INSIDE: Final = "interlock_inside"  # the attribute of the request of a task that runs with its claim
FOLLOWED: Final = ("link", "link_error", "chain", "chord", "group_id")  # options of a call for which others wait


class Claim:
    """Which task has this name."""

    def __init__(self, locks: Interlock, name: str, timeout: float = TIMEOUT) -> None:
        self._lock = locks.lock(name, ttl=min(TTL, locks.max_ttl), timeout=timeout)
        _, (_, self._key) = keys_of(name, locks.prefix, ("task",))

    @contextlib.contextmanager
    def held(self) -> Generator[tuple[Lease, str | None]]:
        """Hold the lock of the claim: its lease, and the id of the task that has the claim. Raises LockError."""
        with self._lock as lease:
            owner = lease.execute("GET", self._key, keys=[self._key])
            yield lease, owner.decode() if isinstance(owner, bytes) else None

    def write(self, lease: Lease, task_id: str, at_most: float) -> None:
        """Give the claim to this task for so many seconds. Raises LockError."""
        lease.execute("SET", self._key, task_id, "PX", int(at_most * 1000), keys=[self._key])

    def begin(self, task_id: str, at_most: float) -> None:
        """Keep the claim of a task that begins to run, or take one that has run out. Raises LockError."""
        with self.held() as (lease, owner):
            if owner in {None, task_id}:
                self.write(lease, task_id, at_most)

    def end(self, task_id: str | None) -> bool:
        """End the claim of this task (None: of any task). Returns whether there was one. Raises LockError."""
        with self.held() as (lease, owner):
            if owner is None or task_id not in {None, owner}:
                return False
            return bool(lease.execute("DEL", self._key, keys=[self._key]))


class Unique(Task):  # type: ignore[misc]  # Celery has no types
    """A task of which only one with the same name is queued or runs: `@app.task(base=Unique, unique=..., at_most=...)`.

    `unique` is a format of the task's arguments, as in "report:{day}", or a function that takes them by their names
    and returns the name. `at_most` (seconds) is the longest time for which a lost message can keep others from being
    queued: more than a message may wait, and more than a run may take. `locks` is an Interlock, by default that of the
    app.

    While a task waits, runs, or is to be retried, `delay()` and `apply_async()` of the same name send nothing and
    return the AsyncResult of that task. They raise Unavailable if the server of the locks does not answer,
    AcquireTimeout if other calls of the name keep its lock, and ConfigError for a countdown or an eta beyond `at_most`.
    The options are checked when the app is finalized.
    """

    abstract = True
    unique: str | Callable[..., str] | None = None
    at_most: float | None = None
    locks: Interlock | None = None
    _names: CallNames

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the options. Raises ConfigError."""
        super().on_bound(app)
        subject = f"the unique task {cls.name}"
        if cls.unique is None:
            raise ConfigError(
                f'{subject} has no unique=, the name of which only one is queued: unique="{cls.name}:{{argument}}"'
            )
        if cls.at_most is None:
            raise ConfigError(
                f"{subject} has no at_most=: the seconds after which another one may be queued, if its message is lost"
            )
        duration(cls.at_most, f"{subject}: at_most", minimum=MIN_TTL, maximum=MAX_AT_MOST)
        if cls.time_limit is not None and cls.time_limit > cls.at_most:
            raise ConfigError(
                f"{subject} may run for {cls.time_limit:g} s (time_limit), but is unique for {cls.at_most:g} s only "
                "(at_most). Give a longer at_most"
            )
        unique = f"unique:{cls.unique}" if isinstance(cls.unique, str) else cls.unique
        cls._names = CallNames(subject, unique, cls().run)
        if cls.locks is None:
            checks.append(_nothing_more)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        **options: Any,
    ) -> Any:
        """Queue the task, unless one of this name is queued or runs: then return that one's AsyncResult.

        Raises ConfigError, Unavailable, AcquireTimeout, LeaseLost (this process stood still inside of the claim's
        lock), and what Celery raises; then nothing keeps the next call from queueing the task. A retry, and a call
        for which others wait (rule c), raises none of these but ConfigError, and is sent without a claim.
        """
        if self.app.conf.task_always_eager:  # it runs at once, in this thread
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        name = self._name_of(args, kwargs)
        self._check_delay(options)
        claim, headers = self._claim(name), {**(options.pop("headers", None) or {}), NAME: name}
        is_retry = bool(options.get("retries"))
        is_followed = is_retry or task_id is not None or any(options.get(each) for each in FOLLOWED)

        def send() -> Any:
            return super(Unique, self).apply_async(args, kwargs, task_id=task_id, headers=headers, **options)

        result: Any = None
        is_sent = True
        try:
            with claim.held() as (lease, owner):
                if owner is None or owner == task_id:
                    result = send()
                    claim.write(lease, result.id, self._at_most)
                elif not is_followed:
                    result, is_sent = self.AsyncResult(owner), False
                else:
                    if not is_retry:
                        headers[DUPLICATE] = owner
                    result = send()
        except LockError as error:
            if result is not None:
                if is_sent:
                    logger.warning(
                        "%s[%s] is queued, and another one may be queued beside it: %s", self.name, result.id, error
                    )
            elif not is_followed or isinstance(error, ConfigError):
                raise
            else:
                logger.warning("%s is queued without a claim, since its message must not be lost: %s", self.name, error)
                headers.pop(DUPLICATE, None)
                result = send()
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task; in a worker, keep its claim until its end."""
        request = self.request
        if request.called_directly or request.get(INSIDE):  # the second: the running task calls itself as a function
            return super().__call__(*args, **kwargs)
        name, first = request.get(NAME), request.get(DUPLICATE)
        if first is not None:
            return Skipped(name, first, None, None).as_dict()
        if name is None or request.is_eager:  # queued by app.send_task(), which makes no claim; or eager
            return self.run(*args, **kwargs)
        may = "may be queued once more while it runs"
        setattr(request, INSIDE, True)
        self._in_worker(name, may, lambda claim: claim.begin(request.id, self._at_most))
        try:
            result = self.run(*args, **kwargs)
        except Retry:
            raise
        except Exception as error:
            if not (isinstance(error, Reject) and error.requeue):
                self._end(name, request.id)
            raise  # not for SystemExit and the like: the worker says whether the task runs again
        self._end(name, request.id)
        return result

    def forget(self, *args: Any, **kwargs: Any) -> bool:
        """Let the task with these arguments be queued again, though one waits or runs. Returns whether one did.

        For people, after `celery purge` or a lost queue. Raises Unavailable, AcquireTimeout or ConfigError.
        """
        return self._claim(self._name_of(args, kwargs)).end(None)

    @property
    def _at_most(self) -> float:
        assert self.at_most is not None  # on_bound() has seen it
        return self.at_most

    def _name_of(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str:
        name = self._names.of(tuple(args or ()), kwargs or {})
        return name if isinstance(self.unique, str) else f"unique:{name}"

    def _claim(self, name: str, timeout: float = TIMEOUT) -> Claim:
        return Claim(self.locks or locks_of(self.app), name, timeout)

    def _check_delay(self, options: Mapping[str, Any]) -> None:
        """Refuse a task that would begin after its claim has ended. Raises ConfigError."""
        at_most = self._at_most
        eta, delay = options.get("eta"), options.get("countdown") or 0
        if isinstance(eta, datetime):
            now = datetime.now(UTC) if eta.tzinfo is not None else datetime.now(UTC).replace(tzinfo=None)
            delay = (eta - now).total_seconds()
        if delay <= at_most:
            return
        text = f"the unique task {self.name} would begin in {delay:.0f} s, and is unique for {at_most:g} s (at_most)"
        if options.get("retries"):  # else its worker would lose the task
            logger.warning("%s: another one may be queued before this retry", text)
        else:
            raise ConfigError(f"{text}. Give a longer at_most, or queue it later")

    def _end(self, name: str, task_id: str, timeout: float = TIMEOUT) -> None:
        what = f"is not queued for {self._at_most:g} s more"
        self._in_worker(name, what, lambda claim: claim.end(task_id), timeout)

    def _in_worker(self, name: str, what: str, step: Callable[[Claim], object], timeout: float = TIMEOUT) -> None:
        """Take a step about the claim. The task goes on without it, if no server answers."""
        try:
            step(self._claim(name, timeout))
        except LockError as error:
            logger.warning("%s with %r %s: %s", self.name, name, what, error)


def _nothing_more(locks: Interlock) -> None:
    """Check no more: a worker with this in `checks` makes sure that its app has locks, which suffices here."""


@signals.task_revoked.connect  # type: ignore[untyped-decorator]  # Celery has no types
def end_of_revoked(sender: Any, request: Any, **_: object) -> None:
    """End the claim of a task that was revoked or has expired: it was not run, or its process was ended."""
    if isinstance(sender, Unique) and (name := request.get(NAME)) is not None:
        sender._end(name, request.id, TIMEOUT_OF_WORKER)


@signals.task_failure.connect  # type: ignore[untyped-decorator]  # Celery has no types
def end_of_killed(sender: Any, task_id: str, exception: object, args: Any, kwargs: Any, **_: object) -> None:
    """End the claim of a task whose process has died, if the task is not run again: its worker learns of that."""
    if not isinstance(sender, Unique):
        return
    is_late = isinstance(exception, TimeLimitExceeded)
    if is_late and sender.acks_late and not _acks_on_timeout(sender):  # the broker has its message again
        return
    if is_late or isinstance(exception, WorkerLostError):
        sender._end(sender._name_of(args, kwargs), task_id, TIMEOUT_OF_WORKER)


def _acks_on_timeout(task: Any) -> bool:
    found = getattr(task, "acks_on_timeout", None)  # older Celery has only the option below
    return bool(task.acks_on_failure_or_timeout if found is None else found)
