"""Decorated functions, and what `synchronized` makes of its arguments."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.run import run
from interlock.errors import ConfigError
from interlock.primitives.lock import lock_resource

from .face import raise_stop_iteration
from .functions import checked_function
from .naming import Arguments, Naming, example_of
from .options import UNSET, Unset

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

BUSY: Final = ("wait", "raise", "skip")


def decorated(
    function: Callable[..., Any], call: Callable[..., Coroutine[Any, Any, Any]], *, for_asyncio: bool
) -> Callable[..., Any]:
    """`call` in place of the user's function, which is an `async def` or none."""

    def blocking(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(call(*args, **kwargs))
        except RuntimeError as error:
            raise_stop_iteration(error)
            raise

    return functools.wraps(function)(call if for_asyncio else blocking)


def busy_skips(busy: object, name: object, timeout: float | None) -> tuple[bool, float | Unset]:
    """Whether a busy name is skipped, and how long it is waited for. Raises ConfigError."""
    if busy not in BUSY:
        raise ConfigError(f"synchronized({name!r}): busy must be one of {', '.join(BUSY)}, not {busy!r}")
    if busy != "wait" and timeout is not None:
        raise ConfigError(f"synchronized({name!r}): with busy={busy!r} nothing is waited for: leave out timeout")
    return busy == "skip", UNSET if busy == "wait" else 0.0


class CallName:
    """The name of each call of a function: checked as far as that goes before any call."""

    def __init__(self, name: object, function: Callable[..., Any], *, for_asyncio: bool, prefix: str) -> None:
        subject = f"synchronized({name!r})" if isinstance(name, str) else "synchronized()"
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
