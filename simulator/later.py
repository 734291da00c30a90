"""A later version of interlock that shares the server: it adds a word to every text that the server stores.

Theory. What the scripts store may grow (message.lua, "Wire format", says where). A word that a script does not know
must change no answer, and must still be there after a change of the text in which it stands.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from .commands import Hash

if TYPE_CHECKING:
    from collections.abc import Callable

WORD: Final = b"later=1"
_KEY: Final = re.compile(rb"(record|waiters|shares|done)}?$")
_FIELD: Final = b"later"
_OWN: Final = {b"left", b"parties"}  # fields that only the hash of a latch or of a barrier has


def add(data: dict[bytes, Any]) -> None:
    """Add the word to all texts of these keys."""
    _change(data, _more)
    for value in data.values():
        if type(value) is Hash and not _OWN.isdisjoint(value):
            value[_FIELD] = b"1"


def strip(data: dict[bytes, Any]) -> None:
    """Remove the word again."""
    _change(data, lambda words: words.replace(b" " + WORD, b""))
    for value in data.values():
        if type(value) is Hash:
            value.pop(_FIELD, None)


def _change(data: dict[bytes, Any], change: Callable[[bytes], bytes]) -> None:
    for key, value in data.items():
        if not _KEY.search(key):
            continue
        if type(value) is bytes:
            data[key] = change(value)
        elif type(value) is Hash:
            for name, words in value.items():
                value[name] = words if name == b"sum" else change(words)


def _more(text: bytes) -> bytes:
    words, mark, free = text.partition(b" !")
    if WORD in words.split(b" "):
        return text
    return words + b" " + WORD + mark + free
