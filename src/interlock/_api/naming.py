"""Names and keys that are made for each call of a decorated function: by a format of its arguments, or by a callable.

What a user of the program types may stand in an argument, and must never make the call fail. So the format of a name
percent-encodes the characters that no name may have. If the text gets too long, a hash replaces the end of each long
argument.
A text without such characters is in the name as it is: `lock("report:7")` and the format "report:{user_id}" mean the
same lock.
"""

from __future__ import annotations

import inspect
import re
import string
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from interlock._protocol.names import CUT_BYTES, MAX_NAME_BYTES, shortened
from interlock.errors import ConfigError

from .functions import name_of
from .misuse_warnings import warn_of_none

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_IN_NO_NAME: Final = re.compile(r"[\x00-\x1f\x7f-\x9f{}\ud800-\udfff]")
_HAS_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+>")  # the default repr of an object
_REQUIRED: Final = inspect.Parameter.empty


class Arguments:
    """The arguments of the calls of one function, by name."""

    def __init__(self, subject: object, function: Callable[..., Any]) -> None:
        self.called = name_of(function)
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise ConfigError(f"{subject}: Python does not know the arguments of {self.called}") from None
        parameters = self._signature.parameters.values()
        self.names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        self._others = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)

    def may_have(self, name: str) -> bool:
        """Whether a call can have an argument of this name."""
        return name in self.names or self._others is not None

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of this call, and the defaults of the others. Raises TypeError as the call itself would."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.called}: {error}") from None
        bound.apply_defaults()
        values = dict(bound.arguments)
        return values | values.pop(self._others) if self._others is not None else values


class Naming:
    """Makes one text, as the name or the key, for each call. `most` is its greatest size in bytes."""

    def __init__(
        self, subject: object, what: str, source: object, arguments: Arguments | None, most: int = MAX_NAME_BYTES
    ) -> None:
        self.subject, self.what, self.source, self.most, self.arguments = subject, what, source, most, arguments
        if isinstance(source, str):
            fields = fields_of(subject, what, source)
            literals = [literal for literal, *_ in string.Formatter().parse(source)]
            self._budget = (most - len("".join(literals).encode(errors="replace"))) // max(1, len(fields))
            if fields and self._budget < CUT_BYTES:
                raise ConfigError(
                    f"{subject}: {what} is too long: of its {most} bytes, the fixed text leaves none for arguments"
                )
            self._check_known(dict.fromkeys(fields, True))
        elif callable(source) and not inspect.iscoroutinefunction(source):
            self._parameters = _parameters(source)
            if any(each.kind is each.VAR_POSITIONAL for each in self._parameters):
                raise ConfigError(f"{subject}: {name_of(source)}, which makes {what}, must name its arguments")
            self._check_known(
                {each.name: each.default is _REQUIRED for each in self._parameters if each.kind is not each.VAR_KEYWORD}
            )
        else:
            raise ConfigError(f"{subject}: {what} must be a str or a function that returns one, not {source!r}")

    def _check_known(self, wanted: Mapping[str, bool]) -> None:
        """Refuse an argument that no call can have, and that is required. Raises ConfigError."""
        for name, required in wanted.items():
            if self.arguments is None and required:
                raise ConfigError(
                    f"{self.subject}: {self.what} is made of the arguments of a call ({name!r}), and this is none. "
                    "Decorate a function with it; or give the name or key that one call makes"
                )
            if self.arguments is not None and required and not self.arguments.may_have(name):
                raise ConfigError(
                    f"{self.subject}: {self.what} needs {name!r}, but {self.arguments.called} has no such argument. It "
                    f"has {', '.join(self.arguments.names) or 'none'}. For a brace alone write {{{{ or }}}}"
                )

    def of(self, values: Mapping[str, Any]) -> str:
        """The text for a call with these arguments. Raises ConfigError."""
        try:
            text = self._formatted(values) if isinstance(self.source, str) else self._called(values)
        except _MissingError as missing:
            raise ConfigError(
                f"{self.subject}: the call of {self._caller} lacks the argument {missing}, for {self.what}. It has "
                f"{', '.join(values) or 'none'}"
            ) from None
        return text

    @property
    def _caller(self) -> str:
        return self.arguments.called if self.arguments is not None else name_of(self.source)

    def _formatted(self, values: Mapping[str, Any]) -> str:
        template = str(self.source)
        try:
            formatter = _Formatter(self, None)
            text = formatter.vformat(template, (), values)
            if formatter.none is not None:
                warn_of_none(self.subject, self.what, formatter.none, text, self._caller)
            if len(text.encode(errors="replace")) > self.most:
                text = _Formatter(self, self._budget).vformat(template, (), values)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.subject}: the call of {self._caller} can't make {self.what}: {error}") from error
        return text or "%"  # no name is empty

    def _called(self, values: Mapping[str, Any]) -> str:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for each in self._parameters:
            if each.kind is each.VAR_KEYWORD:
                kwargs = {**values, **kwargs}
            elif each.name in values and each.kind is each.POSITIONAL_ONLY:
                args.append(values[each.name])
            elif each.name in values:
                kwargs[each.name] = values[each.name]
            elif each.default is _REQUIRED:
                raise _MissingError(each.name)
        source: Any = self.source
        result = source(*args, **kwargs)
        if result is None or result == "":
            raise ConfigError(f"{self.subject}: {name_of(self.source)} must return {self.what}, not {result!r}")
        return self.checked_text(result, str(result))

    def checked_text(self, value: object, text: str) -> str:
        """Return this text of a value, unless it has the address of an object, which no other process has.

        Raises ConfigError.
        """
        if not isinstance(value, str) and _HAS_ADDRESS.search(text):
            raise ConfigError(
                f"{self.subject}: {text} in {self.what} is the address of an object, and another one in each process. "
                "Name an attribute of it, as in {user.id}"
            )
        return text


class _MissingError(Exception):
    """The call lacks an argument of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(repr(name))


class _Formatter(string.Formatter):
    """A format whose fields can have any text in them. `most` is the greatest size of a field, in bytes."""

    def __init__(self, naming: Naming, most: int | None) -> None:
        self._naming = naming
        self._most = most
        self._encode = naming.what == "the name"  # a key may have any character
        self.none: str | None = None
        """The last field whose value is None."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            self.none = field_name
        return value, first

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if key not in kwargs:
            raise _MissingError(str(key))
        return super().get_value(key, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        converted = super().convert_field(value, conversion)
        return self._naming.checked_text(value, converted) if conversion else converted

    def format_field(self, value: Any, format_spec: str) -> str:
        text = self._naming.checked_text(value, super().format_field(value, format_spec))
        if self._encode:
            text = _IN_NO_NAME.sub(lambda found: quote(found[0], safe="", errors="surrogatepass"), text)
        return text if self._most is None else shortened(text, self._most)


def example_of(subject: object, what: str, template: str) -> str:
    """What a format makes of short arguments. Raises ConfigError."""
    fields_of(subject, what, template)
    return "".join(literal + "0" * (field is not None) for literal, field, _ in _parts(template))


def fields_of(subject: object, what: str, template: str) -> list[str]:
    """The arguments that a format names, those in its specifications included. Raises ConfigError."""
    try:
        parts = _parts(template)
    except ValueError as error:
        raise ConfigError(
            f"{subject}: {what} is no valid format: {error}. For a brace alone write {{{{ or }}}}"
        ) from None
    fields = [re.split(r"[.\[]", field, maxsplit=1)[0] for _, field, _ in parts if field is not None]
    if any(not field.isidentifier() for field in fields):
        raise ConfigError(
            f"{subject}: the fields of {what} are arguments: write {{user_id}}, not {{}} or {{0}}; and {{{{42}}}} for "
            "a hash tag {42}"
        )
    return fields + [field for _, _, spec in parts if spec for field in fields_of(subject, what, spec)]


def _parts(template: str) -> list[tuple[str, str | None, str | None]]:
    """The literal, the field and the specification of each part of a format."""
    return [(literal, field, spec) for literal, field, spec, _ in string.Formatter().parse(template)]


def _parameters(function: Any) -> list[inspect.Parameter]:
    """What a callable takes; nothing if Python does not know."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
