"""The leases that each thread or task is inside of, by a `with` or a decorated call: what `assert_held()` looks up.

Nothing here keeps a lease, a thread or a task alive. If an interrupt destroys the frame of a `with`, nobody leaves its
lease here: the caller of `leases_of()` asks each lease whether it is alive.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .lease import WatchedCore

_inside: Final[weakref.WeakKeyDictionary[Any, list[weakref.ref[WatchedCore]]]] = weakref.WeakKeyDictionary()


def enter(caller: object, lease: WatchedCore) -> None:
    """Note that this thread or task is inside of this lease from now on."""
    try:
        _inside[caller].append(weakref.ref(lease))
    except KeyError:
        _inside[caller] = [weakref.ref(lease)]


def leave(caller: object, lease: WatchedCore) -> None:
    """Note that this thread or task (None: it is gone) has left this lease, once."""
    if caller is not None and (entered := _inside.get(caller)) is not None:
        with contextlib.suppress(ValueError):
            entered.remove(weakref.ref(lease))


def leases_of(caller: object) -> list[WatchedCore]:
    """The leases that this thread or task (None: neither) is inside of, the innermost first."""
    entered = [] if caller is None else _inside.get(caller, [])
    return [lease for each in reversed(entered) if (lease := each()) is not None]
