"""One public method, two faces: what each face makes of the method that stands once in a core class.

Theory. A core class holds signature, docstring and body of a public method as `async def _method`. A face assigns it:
`method = blocking(Core._method)` for threads (`blocking` stands in threads.py), `method = awaitable(Core._method)` for
asyncio. What a call only makes, and does not wait for, a core describes by the arguments of a constructor, and a face
by `making(Class, Core._method)`.

`Face` gives each method the name, the qualified name, the module and the types under which a user knows it, in place
of those of the core: in help(), in the documentation of an editor, in a traceback.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import CellType, FunctionType, MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from interlock._protocol.names import has_address
from interlock.errors import ConfigError

from .misuse import advised, is_of_this_call, named, no_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")
_ADDRESS_ADVICE = (
    "this name has the address of an object, which is another one in each process. Name an attribute of the object, as "
    "in f'user:{user.id}'"
)
_TYPE = re.compile(r"\b[A-Z]\w*T\b")  # a type variable of the cores, in an annotation


def raise_stop_iteration(error: RuntimeError) -> None:
    """Raise the StopIteration of a user's function, which is what made this error of it: a coroutine can't raise it."""
    if isinstance(error.__cause__, StopIteration):
        raise error.__cause__ from None


def awaitable(method: F) -> F:
    """The method for asyncio: a copy, which can have names of its own and adds no call."""
    copy = _copied(cast("FunctionType", method))
    return cast("F", present(method, copy))


def _copied(function: FunctionType) -> FunctionType:
    """A copy of a function, with a cell of its own for the method of a core that it calls: see _name_core."""
    free, cells = function.__code__.co_freevars, function.__closure__
    if cells is not None and "method" in free:
        at = free.index("method")
        cells = (*cells[:at], CellType(cells[at].cell_contents), *cells[at + 1 :])
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _name_core(member: FunctionType) -> None:
    """Give the method of a core that `member` calls the name of `member`, which Python writes into a TypeError."""
    free, cells = member.__code__.co_freevars, member.__closure__
    if cells is not None and "method" in free:
        cell = cells[free.index("method")]
        cell.cell_contents = named = _copied(cell.cell_contents)
        named.__name__, named.__qualname__ = member.__name__, member.__qualname__


def making(
    kind: Callable[..., T], method: Callable[Concatenate[S, P], tuple[Any, ...]], advice: str = ""
) -> Callable[Concatenate[S, P], T]:
    """The method that makes a `kind` of the arguments which `method` returns.

    `advice` is the way out for a caller that gives other arguments than `method` takes.
    """

    def make(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        name = args[0] if args else kwargs.get("name")
        try:
            if isinstance(name, str) and has_address(name):
                raise ConfigError(_ADDRESS_ADVICE)
            described = method(self, *args, **kwargs)
        except TypeError as error:
            if is_of_this_call(error):
                raise advised(error, advice) from None
            raise
        except ConfigError as error:
            raise named(error, f"{make.__name__}({name!r})", name) from error.__cause__
        return kind(*described)

    return present(method, make, "tuple[Any, ...]", cast("type", kind).__name__)


def present(method: Callable[..., Any], made: F, type_there: str = "", type_here: str = "") -> F:
    """`made` of this method, until `Face` knows its name: here a type of its annotations is another one."""
    functools.update_wrapper(made, method)
    made.__annotations__ = {
        name: text.replace(type_there, type_here) for name, text in inspect.get_annotations(method).items()
    }
    vars(made)["core"] = vars(made).pop("__wrapped__")  # help() would show it
    return made


class Face:
    """The base of what users see: gives each class the methods, names and types under which its users know it."""

    __slots__ = ()
    _instead_of_pickling = "make it in each process"
    _init_advice: ClassVar[str | None] = None
    """What a TypeError of the constructor says; "": what fits the option, as elsewhere; None: nothing."""
    _hints: Mapping[str, str] = MappingProxyType({})
    """What does what a missing attribute of this name would do."""

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Say what there is instead of an attribute that there is not."""
            no_attribute(self, name, self._hints)

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Refuse to be pickled: this has connections, threads or a lease of this process."""
        raise TypeError(f"{self!r} can't be pickled, since it belongs to this process: {self._instead_of_pickling}")

    def __copy__(self) -> Self:
        """Return itself: a second one would be the same."""
        return self

    def __deepcopy__(self, memo: object, /) -> Self:
        """Return itself, as a part of something that is copied."""
        return self

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = cls.__doc__ or next(base.__doc__ for base in cls.__mro__[1:] if base.__doc__)
        types, seen = _types(cls), set[str]()
        is_ours = cls.__module__.partition(".")[0] == "interlock"
        for base in cls.__mro__[: -1 if types else 1]:
            for name, member in list(vars(base).items()):
                if name in seen:
                    pass
                elif types and is_ours and isinstance(member, classmethod) and name[0] != "_":
                    setattr(cls, name, classmethod(_advising(cls, name, cast("Any", member).__func__)))
                elif not isinstance(member, FunctionType):
                    pass
                elif base is cls:
                    if "core" in vars(member):
                        _publish(cls, name, member, types)
                elif (is_ours and (name[0] != "_" or name == "__call__")) or _is_generic(member, types):
                    setattr(cls, name, copy := awaitable(member))  # inherited
                    _publish(cls, name, copy, types)
                seen.add(name)
        if types and isinstance(cls.__init__, FunctionType):
            cls.__init__ = _init_of(cls)  # type: ignore[method-assign]


def _init_of(cls: type[Face]) -> Callable[..., None]:
    """The constructor under the name of this class."""
    given = cast("FunctionType", cls.__init__)
    init = _copied(given) if cls._init_advice is None else _advising(cls, "__init__", given, cls._init_advice)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _is_generic(member: FunctionType, types: Mapping[str, str]) -> bool:
    """Whether this method, known to users, has another type in each class that inherits it."""
    return not re.match("_[^_]", member.__name__) and bool(types.keys() & _TYPE.findall(str(member.__annotations__)))


def _advising(cls: type, name: str, function: FunctionType, advice: str = "") -> Callable[..., Any]:
    """A copy of `function` under the name of this class, whose TypeError for wrong arguments says the way out."""
    copied = _copied(vars(function).get("advised", function))
    copied.__qualname__, copied.__module__ = f"{cls.__qualname__}.{name}", cls.__module__

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return copied(*args, **kwargs)
        except TypeError as error:
            if is_of_this_call(error):
                raise advised(error, advice, whole=True) from None
            raise

    made: Any = functools.update_wrapper(call, copied)
    made.__signature__ = inspect.signature(copied)
    made.advised = made.__wrapped__
    del made.__wrapped__  # help() would show it
    return cast("Callable[..., Any]", made)


def _publish(cls: type, name: str, member: FunctionType, types: Mapping[str, str]) -> None:
    signature = inspect.signature(vars(member).pop("core"))
    member.__name__, member.__qualname__, member.__module__ = name, f"{cls.__qualname__}.{name}", cls.__module__
    _name_core(member)
    shown = member.__annotations__ = {
        each: _TYPE.sub(lambda found: types.get(found[0], found[0]), text)
        for each, text in member.__annotations__.items()
    }
    parameters = [each.replace(annotation=shown.get(each.name, each.empty)) for each in signature.parameters.values()]
    signature = signature.replace(parameters=parameters, return_annotation=shown["return"])
    member.__signature__ = signature  # type: ignore[attr-defined]


def _types(cls: type) -> dict[str, str]:
    """What the type variables of its bases stand for in this class, as users read it."""
    types: dict[str, str] = {}
    for base in cls.__mro__:
        for alias in vars(base).get("__orig_bases__", ()):
            parameters = getattr(get_origin(alias), "__parameters__", ())
            for parameter, argument in zip(parameters, get_args(alias), strict=False):
                if not isinstance(argument, TypeVar):
                    text = argument.__qualname__ if isinstance(argument, type) else str(argument)
                    types.setdefault(parameter.__name__, re.sub(r"[\w.]+\.(\w+)", r"\1", text))
    return types
