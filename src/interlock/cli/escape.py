"""Makes the words of others harmless for a terminal, and discards output that nobody reads. Imports little."""

from __future__ import annotations

import os
import unicodedata
from typing import Final

__all__ = ["discard_output", "safe"]

# Categories of Unicode: control characters, formats such as a change of the direction, characters of private use, to
# which each font gives another picture or none, characters that do not exist, halves of surrogates, ends of lines and
# paragraphs.
_UNSAFE: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})


def discard_output() -> None:
    """Send the rest of the output to /dev/null: else Python would report at exit that it can't write it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def safe(text: object) -> str:
    """The text with every character escaped that could move a cursor, change a colour or hide another character."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in _UNSAFE else character
        for character in str(text)
    )
