"""One `with` of a lockable: what owns its lease, and what becomes of the lease if the `with` is never left.

Theory. A `with lock:` statement first loads `lock.__exit__`, then calls `lock.__enter__`, and keeps what it has loaded
for as long as it can still be left. So the descriptor `Exit` makes a Section each time that it is loaded, and the
Section owns the lease of this one `with`. It leaves that lease, in whichever thread or task it is called; and once the
`with` can never be left any more (an interrupt came before the first step of leaving), the Section is garbage.

Rules. (1) Between the grant and the body, and between the body and the end of the release, an interrupt gives the
lease back in the background. (2) A Section that is collected does the same; its finalizer does no I/O, and waits for
no lock. (3) A caller of `__enter__` without a `with` has no such frame: the lockable keeps its Section until the call
of `__exit__`.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

S = TypeVar("S", bound="Section")
# Between a generator and the bottom of its thread's stack, if a pool of threads drives it and no code of the user.
POOLS: Final = {"contextlib", "threading", "concurrent.futures.thread", "anyio._backends._asyncio"}


class Section:
    """What leaves one `with`."""

    __slots__ = ("__weakref__", "by_hand", "lease", "lockable", "who")

    def __init__(self, lockable: Any = None) -> None:
        # While it has one. To be stored in the statement that acquires it: a call between would let an interrupt in.
        self.lease: Any = None
        self.lockable = lockable  # None until it is entered or left, if `__exit__` was loaded from the class
        self.by_hand = False
        # The thread or task that entered it; None if that says nothing. Weak: an error of that task may lead back here.
        self.who: weakref.ref[Any] | None = None

    async def leave(self, *args: Any) -> None:
        """Leave it: `args` are those of `__exit__`, after the lockable if `__exit__` was loaded from the class."""
        lockable = args[0] if len(args) > 3 else self.lockable
        section = self if self.lease is not None else _left_by_hand(lockable)
        before = None
        try:
            before = section.lease._holds()
            await section.lease._exit(*args[-3:])
        except BaseException:
            section.give_up(before)  # what a cancellation or an interrupt has left
            raise
        finally:
            section.lease = None
            if section.who is not None:
                lockable._inside.pop(section.who, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lease is not None:
            await self.leave(kind, error, trace)

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


def _left_by_hand(lockable: Any) -> Section:
    """The section that is left now, by `__exit__()` without a `with`. Raises ConfigError if that is not clear."""
    with lockable._session.runtime.mutex:
        found = _found_by_hand(lockable._by_hand, lockable._interlock._current_owner())
    if not isinstance(found, int):
        return found
    raise ConfigError(
        f"{lockable._primitive}: __exit__() was called by another thread or task than __enter__(), and "
        f"{f'{found} leases were entered so' if found else 'no lease was entered so'}: nobody can tell which lease "
        "is meant. Keep the lease: `lease = s.acquire()`, and then `with lease:` or lease.release()"
    )


def _found_by_hand(sections: list[Section], caller: object) -> Section | int:
    """The caller's own section, or the only one, taken out of these; else how many there are."""
    entered = [section for section in sections if section.lease is not None]
    mine = [section for section in entered if section.who is not None and section.who() is caller]
    held = [section for section in entered if not section.lease._ended] or entered
    found = mine[-1:] or held
    if len(found) == 1:
        sections.remove(found[0])
        return found[0]
    # One of these sections will not be left. A caller that lives can still leave its own; the leases of the others are
    # renewed no more, unless somebody else refers to them.
    for section in held:
        if _has_ended(section.who):
            sections.remove(section)
    return len(held)


def _has_ended(who: weakref.ref[Any] | None) -> bool:
    """Whether this thread or task has ended, as far as anybody can tell."""
    one = who() if who is not None else None
    return one is None or not (one.is_alive() if hasattr(one, "is_alive") else not one.done())
