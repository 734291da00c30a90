"""One `with` of a lockable: what owns its lease, and what happens to the lease if nobody leaves the `with`.

Theory. A `with lock:` statement first loads `lock.__exit__`, then calls `lock.__enter__`, and keeps what it has loaded
for as long as it can still be left. So the descriptor `Exit` makes a Section each time that it is loaded, and the
Section owns the lease of this one `with`. It leaves that lease, in whichever thread or task it is called; and once the
`with` can never be left any more (an interrupt came before the first step of leaving), the Section is garbage.

Rules. (1) Between the grant and the body, and between the body and the end of the release, an interrupt gives the
lease back in the background. (2) A Section that is collected does the same; its finalizer does no I/O, and waits for
no lock. (3) Who calls `__enter__` by hand has no such frame: then the lockable keeps the Section until `__exit__`.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

S = TypeVar("S", bound="BaseSection")
# Between a generator and the bottom of its thread's stack, if a pool of threads drives it and no code of the user.
POOLS: Final = {"contextlib", "threading", "concurrent.futures.thread", "anyio._backends._asyncio"}


class BaseSection:
    """What leaves one `with`."""

    __slots__ = ("__weakref__", "by_hand", "lease", "lockable", "who")

    def __init__(self, lockable: Any = None) -> None:
        # While it has one. To be stored in the statement that acquires it: a call between would let an interrupt in.
        self.lease: Any = None
        self.lockable = lockable  # None until it is entered or left, if `__exit__` was loaded from the class
        self.by_hand = False
        # The thread or task that entered it; None if that says nothing. Weak: an error of that task may lead back here.
        self.who: weakref.ref[Any] | None = None

    def give_up(self, before: Any = None) -> None:
        """Give back in the background what was not given back; `before`: see Lease._holds."""
        if (lease := self.lease) is not None:
            self.lease = None
            lease._give_up(before)

    def __del__(self) -> None:
        if not self.by_hand and self.lease is not None:
            self.lease._give_up(None, later=True)


class Exit(Generic[S]):
    """The `__exit__` of a lockable: another Section each time that it is loaded."""

    def __init__(self, make: Callable[[Any], S]) -> None:
        self.make = make

    def __get__(self, lockable: Any, _: object = None) -> S:
        section = self.make(lockable)
        _loaded.section = weakref.ref(section)
        return section


class _Loaded(threading.local):
    """The Section that was loaded last in this thread."""

    section: Callable[[], Any] = staticmethod(lambda: None)


_loaded: Final = _Loaded()


def loaded(lockable: Any, kind: type[S]) -> S:
    """The Section of the `with` that is entering this lockable now. If nobody loaded one, a new one: it is by hand."""
    section = _loaded.section()
    if type(section) is kind and section.lease is None and section.lockable in (None, lockable):
        section.lockable = lockable
        return section
    section = kind(lockable)
    section.by_hand = True
    return section


def pooled(frame: FrameType | None) -> bool:
    """Whether a pool of threads drives this frame, and no code of the user: then its thread says nothing."""
    while frame is not None and frame.f_globals.get("__name__") in POOLS:
        frame = frame.f_back
    return frame is None
