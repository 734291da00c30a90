"""Lines of bash: the words on them, and words as bash inserts them.

Bash gives a completion the whole line, and replaces the text from the last character of COMP_WORDBREAKS on, which has
":", "=" and "@". It inserts a word as it is: `$(reboot)` in the name of a lock must not become a command.
"""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["insertable", "split"]

_PLAIN: Final = re.compile(r"[\w./:@%+=,-]")
_UNQUOTABLE: Final = {"'": "'", '"': '"\\$`!'}  # what means something between these quotes


def split(line: str, point: int) -> tuple[list[str], str]:
    """The words before the cursor without their quotes, and the one at the cursor as it was typed."""
    line = os.fsencode(line)[:point].decode(errors="replace")
    words, typed, word, quote = list[str](), "", "", ""
    characters = iter(line)
    for character in characters:
        if not quote and character.isspace():
            if typed:
                words.append(word)
            typed, word = "", ""
            continue
        typed += character
        if character == "\\" and quote != "'":
            following = next(characters, "")
            typed, word = typed + following, word + following
        elif character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
        else:
            word += character
    return words, typed


def plain(typed: str) -> str | None:
    """The text of a word without its quotes and backslashes; None if it has quotes elsewhere than at its beginning."""
    if typed[:1] in _UNQUOTABLE:
        return typed[1:] if not set(typed[1:]) & set(_UNQUOTABLE[typed[0]]) else None
    return re.sub(r"\\(.)", r"\1", typed) if not set(typed) & set(_UNQUOTABLE) else None


def insertable(word: str, typed: str, breaks: str) -> str | None:
    """The text that bash must insert for the rest of what was typed to become this word; None if there is none."""
    if typed[:1] in _UNQUOTABLE:
        return word if not set(word) & set(_UNQUOTABLE[typed[0]]) else None
    quoted = "".join(each if _PLAIN.match(each) else f"\\{each}" for each in word)
    kept = max((typed.rfind(each) + 1 for each in breaks if each not in "\\'\""), default=0)
    # The same characters in both: what precedes a break was typed by hand, perhaps with other backslashes.
    before = len(re.sub(r"\\(.)", r"\1", typed[:kept]))
    return "".join(each if _PLAIN.match(each) else f"\\{each}" for each in word[before:]) if kept else quoted
