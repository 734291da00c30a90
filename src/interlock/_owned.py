"""Which leases a thread or a task has taken. Only `rlock` and `rwlock` ask; to everything else the lease is the owner.

An owner is a thread, a task, or a word that the user gave. Nothing here keeps a lease or its owner alive.
"""

from __future__ import annotations

import weakref
from typing import Any

from ._core import Grant


class Owned:
    """Leases by owner and key."""

    def __init__(self) -> None:
        self._by: weakref.WeakKeyDictionary[Any, dict[str, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()
        self._by_word: dict[str, dict[str, list[weakref.ref[Any]]]] = {}

    def add(self, owner: object, key: str, lease: Any) -> None:
        """It took this lease."""
        shelf: Any = self._by_word if isinstance(owner, str) else self._by
        shelf.setdefault(owner, {}).setdefault(key, []).append(weakref.ref(lease))

    def of(self, owner: object, key: str) -> list[Any]:
        """Its leases on this key that were not given back, oldest first: lost ones, too."""
        shelf: Any = self._by_word if isinstance(owner, str) else self._by
        keys = shelf.get(owner)
        references = keys.get(key) if keys else None
        if not references:
            return []
        leases = [lease for reference in references if (lease := reference()) is not None]
        left = [lease for lease in leases if lease._grant.ended not in {Grant.RELEASED, Grant.FORKED}]
        if left:
            references[:] = [weakref.ref(lease) for lease in left]
        else:
            del keys[key]
            if not keys:
                shelf.pop(owner, None)
        return left
