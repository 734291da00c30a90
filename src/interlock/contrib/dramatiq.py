"""Actors of dramatiq under a lock: `Locks`, a middleware, and `locked`, a decorator. Needs `interlock[dramatiq]`.

Theory. `locked` stands under `@dramatiq.actor`, so what the worker calls is the function under its lock. The Interlock
belongs to the process: the middleware has it, and notes it for the thread that is about to run a message.

Rules. (a) The lock is taken when the message runs, not when somebody sends it. (b) A busy lock raises dramatiq's own
`Retry`, so the actor's `max_retries`, `min_backoff` and `max_backoff` hold. (c) What can't work is refused when the
worker boots: dramatiq ignores errors of middleware but its own, so the refusal is one of these, too.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

try:
    import dramatiq
    from dramatiq.middleware import Middleware, Retries
    from dramatiq.middleware.middleware import MiddlewareError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.dramatiq needs dramatiq: pip install dramatiq, or '.[dramatiq]' in a checkout of interlock",
        name=error.name,
    ) from error

from interlock.errors import ConfigError
from interlock.threads import Interlock

from ._tasks import TaskLock, current_lease, is_skipped, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Unpack

    from dramatiq.broker import Broker, MessageProxy
    from dramatiq.worker import Worker

    from ._tasks import TaskOptions

__all__ = ["Locks", "current_lease", "is_skipped", "locked"]

P = ParamSpec("P")
R = TypeVar("R")

_of_message: ContextVar[Interlock | None] = ContextVar("interlock_of_message", default=None)


class _Refused(ConfigError, MiddlewareError):  # noqa: N818
    """What dramatiq raises out of a hook."""


class Locks(Middleware):
    """A middleware that has the locks of a worker: `broker.add_middleware(Locks())`.

    `locks` is an Interlock, what `Interlock(...)` takes (a URL, a client), or nothing: then the locks are on the server
    of a RedisBroker. Raises ConfigError for a wrong URL; and when the worker boots, if the broker holds no locks, or if
    dramatiq would not retry an actor that needs retries.
    """

    def __init__(self, locks: Interlock | str | object | None = None) -> None:
        self._given = locks
        self._locks = None if locks is None else _made_of(locks)

    def of(self, broker: Broker) -> Interlock:
        """The locks of this process. Raises ConfigError if the broker is no RedisBroker and none were given."""
        if self._locks is None:
            given = getattr(broker, "client", None) if self._given is None else self._given
            if given is None:
                raise _Refused(
                    f"Locks(): the broker is a {type(broker).__name__}, which holds no locks. Say on which Redis or "
                    "Valkey they are: Locks('redis://...')"
                )
            self._locks = _made_of(given)
        return self._locks

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002
        """Refuse to start a worker in which a locked actor can't work."""
        locks = self.of(broker)
        actors = cast("dict[str, dramatiq.Actor[..., object]]", broker.actors)  # pyright: ignore[reportUnknownMemberType]
        for actor in actors.values():
            lock = getattr(actor.fn, "_interlock_lock", None)
            if isinstance(lock, TaskLock):
                try:
                    lock.check(locks)
                except ConfigError as error:
                    raise _Refused(f"actor {actor.actor_name!r}: {error}") from None
                _check_retries(broker, actor, lock)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: ARG002
        """Note the locks for the thread that runs this message."""
        _of_message.set(self.of(broker))

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002
        """Close the connections that this middleware has opened. A later use opens them anew."""
        if self._locks is not None and self._locks is not self._given:
            self._locks.close()
            self._locks = None


def _made_of(given: object) -> Interlock:
    return given if isinstance(given, Interlock) else Interlock(given)


def locked(
    name: str | Callable[..., str],
    *,
    busy: object = "retry",
    timeout: float = 0.0,
    locks: Interlock | None = None,
    **options: Unpack[TaskOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run each message of an actor under a lock, whose name is made of its arguments: write it under `@dramatiq.actor`.

    Args:
        name: of the lock: a format of the arguments, as in "pay:{user_id}", or a function that takes them and returns
            the name.
        busy: what happens if the lock is not free: "retry" raises dramatiq's own Retry, with the actor's `max_retries`,
            `min_backoff` and `max_backoff`; "skip" makes the Skipped, as a dict, the result; "raise" raises
            AcquireTimeout. Any other value is the result; a function is called with the Skipped, and what it returns
            is the result.
        timeout: seconds that a message waits for the lock in its worker, before the lock counts as busy.
        locks: the Interlock; by default that of the middleware `Locks`.
        options: those of `Interlock.rlock`.

    While no server answers, "retry" tries again, and everything else raises Unavailable. A message whose lease was lost
    fails with LeaseLost. Raises ConfigError at once, if no call can have such a name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, dramatiq.Actor):
            raise ConfigError(
                f"locked({name!r}) decorates the function, not the actor: write @locked under @dramatiq.actor"
            )
        lock = TaskLock(name, function, busy=busy, timeout=timeout, options=options)

        def call(*args: Any, **kwargs: Any) -> Any:
            return lock.call(locks or _locks_here(lock), args, kwargs, _retry)

        made = wrapped(function, call)
        made._interlock_lock = lock  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return made

    return decorate


def _retry(error: Exception) -> Never:
    raise dramatiq.Retry(str(error)) from error


def _locks_here(lock: TaskLock) -> Interlock:
    locks = _of_message.get()
    if locks is None:  # called as a function, outside of a worker
        broker = dramatiq.get_broker()
        locks = next((each.of(broker) for each in broker.middleware if isinstance(each, Locks)), None)
    if locks is None:
        raise ConfigError(
            f"{lock.subject}: the broker has no locks. Say broker.add_middleware(Locks()), or give locks="
        )
    return locks


def _check_retries(broker: Broker, actor: dramatiq.Actor[..., object], lock: TaskLock) -> None:
    if lock._busy != "retry":
        return
    retries = next((each for each in broker.middleware if isinstance(each, Retries)), None)
    if retries is None:
        raise _Refused(
            f"actor {actor.actor_name!r}: {lock.subject} tries again while its lock is busy, but the broker has no "
            "Retries middleware, so dramatiq would drop the message. Add Retries(), or say busy='skip' or a timeout"
        )
    max_retries = actor.options.get("max_retries", retries.max_retries)
    if max_retries == 0 and actor.options.get("retry_when", retries.retry_when) is None:
        raise _Refused(
            f"actor {actor.actor_name!r}: {lock.subject} tries again while its lock is busy, but its max_retries is 0"
            f"{'' if 'max_retries' in actor.options else ', as the Retries middleware says'}. Raise it, or say "
            "busy='skip' or busy='raise'"
        )
