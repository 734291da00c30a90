"""The keys of a terminal, by name, from the bytes that it sends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["keys"]

_NAMES: Final[dict[str, str]] = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home", "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end",
    "\r": "enter", "\n": "enter", "\x1b": "escape", "\x7f": "backspace", "\x08": "backspace", "\x15": "clear",
    "\x04": "q",
}  # fmt: skip
# A sequence of a function key, or an escape that stands alone, or one character.
_KEY: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)|.", re.DOTALL)


def keys(sent: bytes) -> Iterator[str]:
    """The keys: a character, or a name such as "up". Other control characters and unknown sequences are left out."""
    for match in _KEY.finditer(sent.decode(errors="ignore")):
        name = _NAMES.get(match[0], match[0])
        if name.isprintable():
            yield name
