"""The leases that a thread or a task holds. Only `rlock` and `rwlock` ask; elsewhere the lease proves ownership.

An owner is a thread, a task, or a name that the user gave. Nothing here keeps a lease or its owner alive. When a lease
has been garbage collected, nothing of that lease stays here.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from interlock._client.grant import Grant

Shelf = dict[str, list[weakref.ref[Any]]]  # by key


class HeldByCaller:
    """Leases by owner and key."""

    def __init__(self) -> None:
        self._by: weakref.WeakKeyDictionary[Any, Shelf] = weakref.WeakKeyDictionary()
        self._by_name: dict[str, Shelf] = {}

    def add(self, owner: object, key: str, lease: Any) -> None:
        """Note that this owner has acquired this lease."""
        owners: Any = self._by_name if isinstance(owner, str) else self._by
        shelf: Shelf = owners.setdefault(owner, {})
        held = shelf.setdefault(key, [])
        name = owner if isinstance(owner, str) else None

        def on_collected(reference: weakref.ref[Any]) -> None:
            with contextlib.suppress(ValueError):
                held.remove(reference)
            if not held and shelf.get(key) is held:
                shelf.pop(key, None)
                if name is not None and not shelf:
                    self._by_name.pop(name, None)

        held.append(weakref.ref(lease, on_collected))

    def of(self, owner: object, key: str) -> list[Any]:
        """The leases of this owner on this key that were not released, oldest first. Lost leases count, too."""
        owners: Any = self._by_name if isinstance(owner, str) else self._by
        leases = [reference() for reference in owners.get(owner, {}).get(key, ())]
        return [
            lease
            for lease in leases
            if lease is not None and lease._grant.why_ended not in {Grant.RELEASED, Grant.FORKED}
        ]
