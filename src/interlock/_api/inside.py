"""The leases that each thread or task is inside of, by a `with` or a decorated call: what `assert_held()` looks up.

Nothing here keeps a lease, a thread or a task alive. If an interrupt destroys the frame of a `with`, nobody leaves its
lease here: the caller of `leases_of()` asks each lease whether it is alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .lease import WatchedCore

Who = weakref.ref[Any]  # a thread or task
# A plain dict, since each section pays for it. The last section that a caller leaves removes the caller's entry.
_inside: Final[dict[Who, tuple[weakref.ref[WatchedCore], ...]]] = {}


def enter(who: Who, lease: WatchedCore) -> None:
    """Note that this thread or task is inside of this lease from now on."""
    outer = _inside.get(who)
    _inside[who] = (weakref.ref(lease),) if outer is None else (*outer, weakref.ref(lease))


def leave(who: Who, lease: WatchedCore) -> None:
    """Note that this thread or task has left this lease, once."""
    entered = _inside.pop(who, ())
    if len(entered) > 1:
        left, mine = [*entered], weakref.ref(lease)
        if mine in left:
            left.remove(mine)
        _inside[who] = (*left,)


def leases_of(caller: object) -> list[WatchedCore]:
    """The leases that this thread or task (None: neither) is inside of, the innermost first."""
    entered = () if caller is None else _inside.get(weakref.ref(caller), ())
    return [lease for each in reversed(entered) if (lease := each()) is not None]
