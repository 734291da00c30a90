"""Decorated functions, and what `synchronized` makes of its arguments."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final, cast

from interlock._protocol.run_to_end import run
from interlock.errors import ConfigError
from interlock.primitives.lock import lock_resource

from .functions import checked_function
from .naming import Arguments, Naming, example_of
from .options import UNSET

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from interlock._protocol.unset import Unset
    from interlock.primitives.once import Skipped

BUSY: Final = ("wait", "raise", "skip")


def decorated(
    function: Callable[..., Any], call: Callable[..., Coroutine[Any, Any, Any]], *, for_asyncio: bool
) -> Callable[..., Any]:
    """`call` in place of the user's function: a coroutine function for asyncio, else a plain one that runs `call`."""

    def blocking(*args: Any, **kwargs: Any) -> Any:
        return run(call(*args, **kwargs))

    return functools.wraps(function)(call if for_asyncio else blocking)


def busy_answer(
    busy: object, name: object, timeout: float | None, max_waiters: int | None
) -> tuple[Callable[[Skipped], Any] | None, float | Unset]:
    """What makes the result of a call of a busy name (None: it raises); and how long it waits. Raises ConfigError."""
    subject = f"synchronized({name!r})" if isinstance(name, str) else "synchronized()"
    if isinstance(busy, str) and busy not in BUSY:
        raise ConfigError(
            f"{subject}: busy must be {', '.join(map(repr, BUSY))}, a function of the Skipped, or a value to return, "
            f"not {busy!r}. To return a str: busy=lambda skipped: {busy!r}"
        )
    if isinstance(busy, BaseException) or (inspect.isclass(busy) and issubclass(busy, BaseException)):
        raise ConfigError(f'{subject}: busy={busy!r} would be returned, not raised. Use busy="raise", or a function')
    waits = isinstance(busy, str) and busy == "wait"
    if not waits and timeout is not None:
        raise ConfigError(f"{subject}: with busy={busy!r} a call does not wait for a busy name: leave out timeout")
    if not waits and max_waiters is not None:
        raise ConfigError(f"{subject}: with busy={busy!r} no call waits for a busy name: leave out max_waiters")
    if isinstance(busy, str):
        return (_as_it_is if busy == "skip" else None), UNSET if waits else 0.0
    if inspect.isroutine(busy) or inspect.isclass(busy) or isinstance(busy, functools.partial):
        return cast("Callable[[Skipped], Any]", busy), 0.0
    return (lambda _: busy), 0.0  # a value, though it may be callable: so are the responses of some web frameworks


def _as_it_is(skipped: Skipped) -> Skipped:
    return skipped


class CallName:
    """The name of each call of a function: checked as far as that goes before any call."""

    def __init__(self, name: object, function: Callable[..., Any], *, for_asyncio: bool, prefix: str) -> None:
        subject = f"synchronized({name!r})" if isinstance(name, str) else "synchronized()"
        if not callable(function) and not isinstance(name, str):  # the "name" is what was to be decorated
            raise ConfigError(
                f"{subject} decorates functions, not {function!r}. To decorate, give a name: "
                '@locks.synchronized("report")'
            )
        checked_function(subject, function, for_asyncio=for_asyncio)
        if not inspect.isroutine(function):
            raise ConfigError(f"{subject} is for functions and methods, not {function!r}")
        self._arguments = Arguments(subject, function)
        self._naming = Naming(subject, "the name", name, self._arguments)
        if isinstance(name, str):
            lock_resource(example_of(subject, "the name", name), prefix)  # refuses what no argument makes valid

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name for this call. Raises ConfigError, or TypeError as the call itself would."""
        return self._naming.of(self._arguments.of(args, kwargs))
