"""Which functions a lock can hold: those whose work is done when they return (asyncio: when the `async def` ends)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, cast

from interlock._client.error_texts import about
from interlock.errors import ConfigError

from .misuse_warnings import warn_of_work_after_release

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from interlock._protocol.resource import Resource


@contextlib.contextmanager
def _context() -> Generator[None]:
    yield


@contextlib.asynccontextmanager
async def _async_context() -> AsyncGenerator[None]:
    yield


# All functions that contextlib makes of generators share one code object and one type of result.
_MAKES_CONTEXT: Final = frozenset((_context.__code__, _async_context.__code__))
# What runs only when somebody uses it, which is after the release.
_RUNS_LATER: Final = frozenset(
    (GeneratorType, AsyncGeneratorType, CoroutineType, type(_context()), type(_async_context()))
)


def refusal(subject: object, text: str) -> ConfigError:
    """The error for what `subject`, a lock, can't do."""
    return about(subject, ConfigError(text))


def checked_function(subject: object, function: Any, *, for_asyncio: bool) -> None:
    """Refuse to decorate what `subject`, a lock, cannot hold until its work is done. Raises ConfigError."""
    called = name_of(function)
    if inspect.isclass(function):
        raise refusal(subject, f"{subject} decorates functions, and {called} is a class. Decorate its methods")
    if isinstance(function, classmethod | property):
        over = "@property" if isinstance(function, property) else "@classmethod"
        raise refusal(subject, f"{subject} decorates functions. Put it under {over}, not over it")
    if not callable(function):
        raise refusal(subject, f"{subject} decorates functions, not {function!r}")
    if later := _what_runs_later(function):
        raise refusal(subject, f"{subject}: {called} is {later}, whose body would run after the release. {_INSIDE}")
    if inspect.iscoroutinefunction(function) != for_asyncio:
        if for_asyncio:
            raise refusal(
                subject,
                f"{subject}: {called} is not an `async def`: use interlock (for threads) for it, or wrap what it "
                "returns into an `async def` that awaits it",
            )
        raise refusal(subject, f"{subject}: {called} is an `async def`: use interlock.aio for it")


def checked_tag(subject: object, name: str, function: Any) -> None:
    """Refuse a hash tag that names an argument: each call is meant to have its own lock. Raises ConfigError."""
    try:
        arguments = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    for tag in re.findall(r"\{([^{}.\[!:]*)", name):
        if tag in arguments:
            raise refusal(
                subject,
                f"{subject}: {name_of(function)} has an argument {tag!r}, but {{{tag}}} is a hash tag here, and all "
                "calls would share one lock. Decorate with synchronized(), whose name is a format; or call the tag "
                "something else",
            )


def checked_work(subject: object, work: Any) -> None:
    """Refuse work that can't be called with a lease, before there is one. Raises ConfigError."""
    if not callable(work):
        if inspect.iscoroutine(work):
            work.close()
        raise refusal(subject, f"{subject}: run() takes a function, which it calls with the lease, not {work!r}")
    try:
        signature = inspect.signature(work)
    except (TypeError, ValueError):  # Python does not know the arguments
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise refusal(
            subject,
            f"{subject}: run() calls {name_of(work)} with one argument, the lease, but: {error}. Give the function one "
            "parameter for it",
        ) from None


def checked_stop(subject: object, stop: object, *, for_asyncio: bool) -> None:
    """Refuse an event of the other mode: one of threads would block the event loop. Raises ConfigError."""
    if stop is None:
        return
    is_event = callable(getattr(stop, "is_set", None))
    if not is_event or inspect.iscoroutinefunction(getattr(stop, "wait", None)) != for_asyncio:
        wanted = "an asyncio.Event" if for_asyncio else "a threading.Event"
        raise refusal(subject, f"{subject}: stop must be {wanted}, not {stop!r}")


def checked_awaitable(subject: object, function: Any, result: object) -> None:
    """Refuse work of asyncio whose result can't be awaited. Raises ConfigError."""
    if not inspect.isawaitable(result):
        raise refusal(
            subject,
            f"{subject}: {name_of(function)} returned {type(result).__name__}, which can't be awaited. Make it an "
            "`async def`; for a function that blocks use asyncio.to_thread() in it",
        )


def checked_result(subject: Resource, function: Any, result: Any, *, for_asyncio: bool) -> None:
    """Refuse a result that is work to be done later, after the release; warn if it may be meant. Raises ConfigError."""
    if type(result) not in _RUNS_LATER:
        return
    called, what = name_of(function), type(result).__name__.strip("_")
    if isinstance(result, CoroutineType) and not for_asyncio:
        result.close()
        raise refusal(
            subject,
            f"{subject}: {called} returned a coroutine, which would run after the release, and did not run. Use "
            "interlock.aio, or run it inside the function",
        )
    if _what_runs_later(inspect.unwrap(function)):
        raise refusal(
            subject, f"{subject}: {called} returned a {what}, whose body would run after the release. {_INSIDE}"
        )
    text = f"{subject}: {called} returned a {what}: what it does runs after the release. {_INSIDE}"
    warn_of_work_after_release(subject, text)


_INSIDE: Final = "Hold the lock inside it, in a `with`"


def name_of(function: Any) -> str:
    """How messages name a function."""
    function = inspect.unwrap(function) if callable(function) else function
    return f"{function.__qualname__}()" if hasattr(function, "__qualname__") else repr(function)


def _what_runs_later(function: Any) -> str | None:
    """What this function is, if a call of it only makes what runs later."""
    while isinstance(function, functools.partial):
        function = cast("Any", function).func
    if not inspect.isroutine(function):
        function = type(function).__call__
    if getattr(function, "__code__", None) in _MAKES_CONTEXT:
        return "a context manager"
    if inspect.isgeneratorfunction(function):
        return "a generator"
    return "an async generator" if inspect.isasyncgenfunction(function) else None
