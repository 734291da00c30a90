"""What one script call asks: a multi's acquire asks several resources, each in the words of its own script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from interlock.primitives.codes import GRANTED

if TYPE_CHECKING:
    from collections.abc import Sequence


def several(args: Sequence[Any]) -> bool:
    """Whether it is a multi's: lists of words, with which no token begins."""
    return args[1][:1] in {"[", b"["}


def requests(keys: Sequence[Any], args: Sequence[Any]) -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """The keys and arguments for each resource that is asked; of the same types as these."""
    if not several(args):
        return [(keys, args)]
    found: list[tuple[Sequence[Any], Sequence[Any]]] = []
    raw, first = isinstance(args[1], bytes), 0
    for request in args[1:]:
        _, number, *words = json.loads(request)
        found.append((keys[first : first + number], [word.encode() if raw else word for word in words]))
        first += number
    return found


def answers(args: Sequence[Any], reply: Any) -> list[Any]:
    """The reply to each request; none if some were not granted."""
    if not several(args):
        return [reply]
    return reply[1:] if reply[0] == GRANTED else []
