"""`interlock __complete SHELL ...`: what the scripts of the shells call when the user presses Tab.

The first line says what may stand at the cursor: `words` (these follow, one a line), `files`, or `command`. It prints
no error: an error would stand in the middle of the line that the user types.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from .bash import insertable, plain, split
from .words import WORDS, Candidates, candidates

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["answer", "complete"]


def complete(group: Any, words: Sequence[str]) -> None:
    """Print the answer, and end the process: no thread that waits for a server delays the prompt."""
    logging.disable()
    with contextlib.suppress(BaseException):
        print("\n".join(answer(group, *words)), flush=True)
    sys.stdout = sys.stderr = None
    os._exit(0)


def answer(group: Any, shell: str, *words: str) -> list[str]:
    """The lines for this shell. bash sends its line, the cursor's place and COMP_WORDBREAKS; others send words."""
    if shell == "bash":
        return _for_bash(group, *words)
    found = candidates(group, words[:-1], words[-1], _names)
    return [found.kind, *(f"{word}\t{text}" if text else word for word, text in found.words)]


def _for_bash(group: Any, line: str, point: str, breaks: str) -> list[str]:
    before, typed = split(line, int(point))
    current = plain(typed)
    found = candidates(group, before[1:], current, _names) if current is not None else Candidates(WORDS)
    inserted = (insertable(word, typed, breaks) for word, _ in found.words)
    return [found.kind, *(word for word in inserted if word is not None)]


def _names(urls: Sequence[str], prefix: str) -> list[tuple[str, str]]:
    from .names import names  # noqa: PLC0415  # names of locks need redis-py, words of the command line do not

    return names(urls, prefix)
