"""The requests in one script call: a multi's acquire has one for each lock, in the words of the lock's own script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from interlock.primitives.codes import GRANTED

if TYPE_CHECKING:
    from collections.abc import Sequence


def several(args: Sequence[Any]) -> bool:
    """Whether the call has several requests: each is a list in JSON and begins with a bracket, and no token does."""
    return len(args) > 1 and args[1][:1] in {"[", b"["}


def requests(keys: Sequence[Any], args: Sequence[Any]) -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """Return the keys and arguments of each request; of the same types as those of the call."""
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
    """Return the reply to each request; nothing if a multi was not granted."""
    if not several(args):
        return [reply]
    return reply[1:] if reply[0] == GRANTED else []
