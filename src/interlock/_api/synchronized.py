"""Decorated functions, and names made of the arguments of a call, for `synchronized`."""

from __future__ import annotations

import functools
import inspect
import string
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.run import run
from interlock.errors import ConfigError

from .face import raise_stop_iteration
from .functions import checked_function, name_of
from .options import UNSET, Unset

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

BUSY: Final = ("wait", "raise", "skip")
_FORMATTER: Final = string.Formatter()


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


class Template:
    """A format for the names of a function's calls: checked as far as that goes before any call."""

    def __init__(self, template: object, function: Callable[..., Any], *, for_asyncio: bool) -> None:
        if not isinstance(template, str):
            raise ConfigError(f"synchronized(): the name must be a str, not {type(template).__name__}")
        self.template = template
        self.shown = f"synchronized({template!r})"
        checked_function(self.shown, function, for_asyncio=for_asyncio)
        if not inspect.isroutine(function):
            raise ConfigError(f"{self.shown} is for functions and methods, not {function!r}")
        self.called = name_of(function)
        try:
            fields = [field for _, field, _, _ in _FORMATTER.parse(template) if field is not None]
        except ValueError as error:
            raise ConfigError(f"{self.shown}: the name is no valid format: {error}") from None
        if any(not field or field[0].isdigit() for field in fields):
            raise ConfigError(
                f"{self.shown}: the fields of the name are arguments: write {{user_id}}, not {{}} or {{0}}"
            )
        self.signature = inspect.signature(function)

    def name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name for this call. Raises ConfigError, or TypeError as the call itself would."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                values |= values.pop(parameter.name)
        try:
            return _FORMATTER.vformat(self.template, (), values)
        except KeyError as missing:
            known = ", ".join(values) or "none"
            raise ConfigError(
                f"{self.shown}: the call of {self.called} lacks the argument {missing}, for the name. It has {known}"
            ) from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.shown}: the call of {self.called} can't make the name: {error}") from error
