"""Names of locks that are made of what a framework hands over: the arguments of a task, the parameters of a request."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from interlock._api.naming import Arguments, Naming, example_of, fields_of
from interlock._protocol.names import checked_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_THE_NAME: Final = "the name"  # with these words, Naming encodes the characters that no name may have


class CallNames:
    """The name of each call of a function, from a format of its arguments or from a callable of them.

    The rules are those of `synchronized`: "report:{user_id}" for `report(7)` is the lock "report:7", and any text may
    stand in an argument. Raises ConfigError at once, if no call of the function can have such a name.
    """

    def __init__(self, subject: str, name: str | Callable[..., str], function: Callable[..., Any]) -> None:
        self._arguments = Arguments(subject, function)
        self._naming = Naming(subject, _THE_NAME, name, self._arguments)
        if isinstance(name, str):
            checked_name(example_of(subject, _THE_NAME, name))

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The name for this call. Raises ConfigError, or TypeError as the call itself would."""
        return self._naming.of(self._arguments.of(args, kwargs))


class TemplateNames:
    """The name that a format makes of values, of which `known` are the names; by the rules of `CallNames`.

    `caller` is what the values belong to, for messages. Raises ConfigError at once, if nothing has such a name.
    """

    def __init__(self, subject: str, template: str, caller: str, known: Iterable[str]) -> None:
        def call() -> None: ...

        call.__name__ = call.__qualname__ = caller
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in known]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self._naming = Naming(subject, _THE_NAME, template, Arguments(subject, call))
        checked_name(example_of(subject, _THE_NAME, template))

    @staticmethod
    def fields_of(subject: str, template: str) -> dict[str, None]:
        """The names of values that the format needs, in their order. Raises ConfigError."""
        return dict.fromkeys(fields_of(subject, _THE_NAME, template))

    def of(self, values: Mapping[str, Any]) -> str:
        """The name for these values. Raises ConfigError."""
        return self._naming.of(values)
