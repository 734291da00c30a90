"""The lines of the user's code that messages name. Noting a place is cheap: only a message computes its line.

Rules. (a) A place keeps a code object and no frame, since a frame would keep the user's variables alive. (b) Whether a
place is a `with` is read from the bytecode there: an exit stack or a call of `__enter__` holds a lock without one.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType, FrameType

Place = tuple["CodeType", int]
"""A code object of the user, and the offset of the instruction in it that runs."""

# Places that are remembered, without their files: Python takes equal code of two files for the same.
MAX_PLACES: Final = 1000
_LIBRARY: Final = Path(os.__file__).parent
_PASSED: Final = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(str(_LIBRARY / name) for name in ("asyncio", "concurrent", "contextlib.py")),
)
GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR  # the flags of code that any thread may go on with
_ENTRIES: Final = frozenset(
    str(_LIBRARY / name)
    for name in ("threading.py", "asyncio/events.py", "asyncio/base_events.py", "asyncio/runners.py")
)
"""These begin a thread or a task: no code below is the code that calls."""


class _NotTheUsers(dict[str, bool]):
    """Whether the code of a file is one through which the user's code only calls, by the name of the file."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = file.startswith(_PASSED) and file not in _ENTRIES
        return found


NOT_THE_USERS: Final = _NotTheUsers()


def calling_place() -> Place | None:
    """The first place on the stack that is the user's. `Core.attempt` does the same without a call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and NOT_THE_USERS[frame.f_code.co_filename]:
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None else None


def line_of(place: Place | None) -> str:
    """File and line of a place, for people."""
    if place is None or place[0].co_filename in _ENTRIES:
        return "a line that is not known"
    code, offset = place
    return f"{code.co_filename}:{_line_in(code, offset)}"


@lru_cache(maxsize=MAX_PLACES)
def _line_in(code: CodeType, offset: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line is not None)
    return next(lines, code.co_firstlineno)


def encloses_this_call(place: Place | None) -> bool:
    """Whether this place is a `with` whose body calls this function, as far as the stack and the bytecode tell.

    Never for a generator, whose body any thread or task may run on.
    """
    if place is None or place[0].co_flags & GENERATOR:
        return False
    code, entered_at = place[0], _start_of(*place)
    frame: FrameType | None = sys._getframe(1)
    # A frame that stands at the `with` itself is another call of the same function, which enters now: two tasks may run
    # one function.
    while frame is not None and not (frame.f_code is code and _start_of(code, frame.f_lasti) > entered_at):
        frame = frame.f_back
    return frame is not None and _is_with(*place)


def interrupted_calls() -> Iterator[Mapping[str, Any]]:
    """The local variables of each function of interlock below the user's code that makes the current call.

    There is one only if that code is a signal handler or a finalizer that interrupted interlock, or if interlock calls
    that code, as the call of a decorated function does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and NOT_THE_USERS[frame.f_code.co_filename]:
        frame = frame.f_back
    while frame is not None:
        if NOT_THE_USERS[frame.f_code.co_filename]:
            yield frame.f_locals
        frame = frame.f_back


@lru_cache(maxsize=MAX_PLACES)
def enters_with(place: Place) -> bool:
    """Whether this place enters a `with` whose body runs on the same thread or task, as far as the bytecode tells."""
    return not place[0].co_flags & GENERATOR and _is_with(*place)


def _start_of(code: CodeType, offset: int) -> int:
    """Where the instruction starts that runs at this offset, which may be in what the interpreter stores behind it."""
    return max((each.offset for each in dis.get_instructions(code) if each.offset <= offset), default=-1)


def _is_with(code: CodeType, offset: int) -> bool:
    """Whether the instruction at this offset enters a `with`, or awaits the `__aenter__` of an `async with`."""
    before = [each for each in dis.get_instructions(code) if each.offset <= offset][-4:]
    names = [each.opname for each in before]
    if names[-1:] == ["SEND"]:  # what is awaited came one instruction earlier or, since Python 3.15, two
        awaited = [each.arg for each in before if each.opname == "GET_AWAITABLE"]
        return awaited[-1:] == [1]  # 1: of what __aenter__ returned
    # Since Python 3.14 a `with` loads `__enter__` and calls it, as two instructions.
    return names[-1:] == ["BEFORE_WITH"] or names[-2:] == ["LOAD_SPECIAL", "CALL"]
