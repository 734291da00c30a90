"""The names and keys of runs: texts, formats of the arguments of a call, or functions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._protocol.names import CUT_BYTES, MAX_NAME_BYTES, tagged
from interlock.errors import ConfigError
from interlock.primitives.once import once_resource

from .functions import name_of
from .misuse_warnings import FrozenText
from .naming import Arguments, Naming, example_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock._protocol.resource import Resource

MAX_KEY_BYTES: Final = 1_000_000  # before it is shortened
_BRACE: Final = re.compile(r"[{}]")


class RunSource(NamedTuple):
    """What a user gave as the name and the key of runs."""

    name: str | Callable[..., object]
    key: str | Callable[..., object] | None
    made_at_call: bool
    """Whether run() makes one of them at each call, and not only a decorated function."""


NAMED: Final = RunSource("", None, made_at_call=False)  # of work whose name and key a call has made


def run_source(name: Any, prefix: str, key: Any) -> tuple[Resource, RunSource]:
    """The resource that this name and key mean, or one that only shows the name; and both as given.

    Raises ConfigError.
    """
    plain_key = None if callable(key) else key
    made_at_call = callable(name) or callable(key)
    if callable(name) or _is_format(name, prefix, decorates=False):
        made_at_call = True
        example = "-" if callable(name) else example_of(f"once({name!r})", "the name", name)
        resource = once_resource(example, prefix, plain_key)
    else:
        resource = once_resource(name, prefix, plain_key)
    if made_at_call:
        resource = resource._replace(name=name_of(name) if callable(name) else name)
    return resource, RunSource(name, key, made_at_call)


class RunNames:
    """The names and keys of the calls of a decorated function; or, without a function, those of this moment."""

    def __init__(self, subject: Resource, source: RunSource, prefix: str, function: Any = None) -> None:
        decorates = function is not None
        name, key, _ = self._source = source
        self._subject, self._prefix = subject, prefix
        makes_name = _is_format(name, prefix, decorates=decorates)
        makes_key = callable(key) or (decorates and key is not None and _BRACE.search(key) is not None)
        self.differ = makes_name or makes_key
        self._arguments = arguments = Arguments(subject, function) if self.differ and decorates else None
        most = MAX_NAME_BYTES - (0 if key is None else len(":key=") + CUT_BYTES)
        self._name = Naming(subject, "the name", name, arguments, most) if makes_name else None
        self._key = Naming(subject, "the key", key, arguments, MAX_KEY_BYTES) if makes_key else None

    def frozen(self, function: object) -> list[FrozenText]:
        """The name and the key, unless each call makes them: all calls share these."""
        given = (("the name", self._source.name, self._name), ("the key", self._source.key, self._key))
        return [
            FrozenText(self._subject, what, text, name_of(function))
            for what, text, naming in given
            if naming is None and isinstance(text, str)
        ]

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Resource:
        """The resource for this call. Raises ConfigError, or TypeError as the call itself would."""
        values = self._arguments.of(args, kwargs) if self._arguments is not None else {}
        name, key, _ = self._source
        return once_resource(
            self._name.of(values) if self._name is not None else name,
            self._prefix,
            self._key.of(values) if self._key is not None else key,
        )


def _is_format(name: Any, prefix: str, *, decorates: bool) -> bool:
    """Whether each call makes its own name of this: a function, or a format.

    A hash tag that could be the name of an argument is a field in a decorator, and a hash tag elsewhere.
    """
    if not isinstance(name, str):
        return callable(name)
    if not _BRACE.search(name):
        return False
    try:
        tagged(prefix + name)
    except ConfigError:
        return True
    return decorates and any(field.isidentifier() for field in re.findall(r"\{([^{}.\[!:]*)", name))
