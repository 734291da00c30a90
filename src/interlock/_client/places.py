"""The lines of the user's code that messages name. Noting a place is cheap: only a message computes its line.

Rule. A place keeps a code object and no frame, since a frame would keep the user's variables alive.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import lru_cache
from itertools import islice
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
KEPT_PLACES: Final[dict[tuple[int, int], Place]] = {}
"""Places by the identity of their code, which they keep alive: leases acquired at one line share one place."""


def calling_place() -> Place | None:
    """The first place on the stack that is the user's. `Core.attempt` does the same without a call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and NOT_THE_USERS[frame.f_code.co_filename]:
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None else None


def keep_place(code: CodeType, offset: int) -> Place:
    """A place that later leases share, unless there are too many places."""
    place = code, offset
    return KEPT_PLACES.setdefault((id(code), offset), place) if len(KEPT_PLACES) < MAX_PLACES else place


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


def is_on_stack(frame_id: int) -> bool:
    """Whether the frame with this identity has called this function. That frame must be alive."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) != frame_id:
        frame = frame.f_back
    return frame is not None


def is_one_expression(one: Place, other: Place) -> bool:
    """Whether two instructions belong to one expression, or to the head of one `with`.

    Without columns (`-X no_debug_ranges`) only an instruction and itself certainly do.
    """
    if one[0] is not other[0]:
        return False
    return one[1] == other[1] or (None not in (span := _span_of(*one)) and span == _span_of(*other))


@lru_cache(maxsize=MAX_PLACES)
def _span_of(code: CodeType, offset: int) -> tuple[int | None, ...]:
    """The first and the last line and column of what an instruction belongs to."""
    return next(islice(code.co_positions(), offset // 2, None))


def interrupted_calls() -> Iterator[Mapping[str, Any]]:
    """The local variables of each function of interlock below the user's code that makes the current call.

    There is such a function only if that code is a signal handler or a finalizer that interrupted interlock, or if
    interlock has called that code, as it calls a decorated function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and NOT_THE_USERS[frame.f_code.co_filename]:
        frame = frame.f_back
    while frame is not None:
        if NOT_THE_USERS[frame.f_code.co_filename]:
            yield frame.f_locals
        frame = frame.f_back
