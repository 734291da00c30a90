"""One `with` of a lockable: what owns its lease, and what becomes of the lease if the `with` is never left.

Theory (ADR 12). Python loads `lock.__exit__` before it calls `lock.__enter__`, and keeps the loaded object until the
`with` ends. So the descriptor `WithExit` makes a new Section for each load, and the Section owns the lease of this one
`with`. Python may call the Section in any thread or task: the Section ends its own lease. If an interrupt destroys the
frame before the frame calls `__exit__`, Python drops the Section, and the Section's finalizer releases the lease.

Rules. (a) Between the grant and the body, and between the body and the end of the release, an interrupt gives the
lease back in the background. (b) A Section that is collected does the same; its finalizer does no I/O, and waits for
no lock. (c) A caller of `__enter__` without a `with` has no such frame: the lockable keeps its Section until the call
of `__exit__`. Such a Section is *by hand*.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar

from interlock._client.error_texts import about
from interlock._client.places import GENERATOR, is_on_stack, is_one_expression
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from interlock._client.places import Place

S = TypeVar("S", bound="Section")
# Modules whose frames may lie below a generator that a pool of threads drives, with no code of the user in between.
POOLS: Final = {"contextlib", "threading", "concurrent.futures.thread", "anyio._backends._asyncio"}


class Section:
    """The `__exit__` of one `with`, and the owner of its lease."""

    __slots__ = ("__weakref__", "by_hand", "entered_by", "frame_id", "lease", "loaded_at", "lockable")
    is_call: ClassVar[bool] = False

    def __init__(self, lockable: Any = None) -> None:
        # None outside the body. Assign the result of `_acquire` directly: between two statements an interrupt could
        # lose the lease.
        self.lease: Any = None
        self.lockable = lockable  # None until it is entered, if `__exit__` was loaded from the class
        self.by_hand = False  # entered by a call of `__enter__` without a `with`
        # Where `__exit__` was loaded from the lockable, and the identity of the frame that did so
        self.loaded_at: Place | None = None
        self.frame_id = 0
        # The thread or task that entered; None if another one may run the body. Weak: an error of that task may refer
        # to this Section.
        self.entered_by: weakref.ref[Any] | None = None

    async def leave(self, *args: Any) -> None:
        """End the section. `args` are those of `__exit__`.

        The lockable stands first if the caller loaded `__exit__` from the class, as contextlib.ExitStack does.
        """
        section, before = self, None
        try:
            if self.lease is None:
                section = _left_by_hand(args[0] if len(args) > 3 else self.lockable)
            before = section.lease._holds()
            await section.lease._exit(*args[-3:])
        except BaseException:
            section.release_in_background(before)  # what a cancellation or an interrupt has left
            raise
        finally:
            section.lease = None
            if section.entered_by is not None:
                section.lockable._inside.pop(section.entered_by, None)

    def holds_for_its_body(self, place: Place | None) -> bool:
        """Whether it is a `with` at this place whose body runs on the thread or task that entered it.

        Never in a generator, whose body any thread or task may run.
        """
        if self.loaded_at is None or place is None or place[0].co_flags & GENERATOR:
            return False
        return is_one_expression(self.loaded_at, place)

    def encloses_this_call(self, place: Place | None) -> bool:
        """Whether the body of a `with`, entered at this place, calls this function.

        The frame of a `with` is alive as long as its Section, and so no other frame has its identity.
        """
        return self.holds_for_its_body(place) and is_on_stack(self.frame_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lease is not None:
            await self.leave(kind, error, trace)

    def release_in_background(self, before: Any = None) -> None:
        """Release in the background a lease that the section has not released. `before`: see Lease._holds."""
        if (lease := self.lease) is not None:
            self.lease = None
            lease._release_in_background(before)

    def __del__(self) -> None:
        # An interrupt may have ended __init__().
        if getattr(self, "lease", None) is not None and not self.by_hand:
            self.lease._release_in_background(None, later=True)


class CallSection(Section):
    """The section of a decorated call, or of the work of an election: its body is the function that is called."""

    __slots__ = ()
    is_call = True

    def holds_for_its_body(self, place: Place | None) -> bool:  # noqa: ARG002 (see Section)
        """Always: the section gives the lease back when the function returns."""
        return True

    def encloses_this_call(self, place: Place | None) -> bool:  # noqa: ARG002 (see Section)
        """Always for the thread or task that acquired the lease: that one runs the function."""
        return True


class WithExit(Generic[S]):
    """The `__exit__` of a lockable: a new Section for each load."""

    def __init__(self, make: Callable[[Any], S]) -> None:
        self.make = make

    def __get__(self, lockable: Any, _: object = None) -> S:
        section = self.make(lockable)
        if lockable is not None:  # else loaded from the class, as no `with` does
            frame = sys._getframe(1)
            section.frame_id, section.loaded_at = id(frame), (frame.f_code, frame.f_lasti)
        _loaded.section = weakref.ref(section)
        return section


class _Loaded(threading.local):
    """The Section that was loaded last in this thread."""

    section: Callable[[], Any] = staticmethod(lambda: None)


_loaded: Final = _Loaded()


def section_of_this_with(lockable: Any, kind: type[S]) -> S:
    """The Section of the `with` that now enters this lockable; if no `with` does, a new one, by hand."""
    section = _loaded.section()
    if type(section) is kind and section.lease is None and section.lockable in (None, lockable):
        section.lockable = lockable
        return section
    section = kind(lockable)
    section.by_hand = True
    return section


def is_driven_by_pool(frame: FrameType | None) -> bool:
    """Whether a pool of threads drives this frame, and no code of the user: then any thread may run the next step."""
    while frame is not None and frame.f_globals.get("__name__") in POOLS:
        frame = frame.f_back
    return frame is None


def _left_by_hand(lockable: Any) -> Section:
    """The section that is left now, by `__exit__()` without a `with`. Raises ConfigError if that is not clear."""
    with lockable._session.runtime.mutex:
        found = _found_by_hand(lockable._by_hand, lockable._interlock._current_owner())
    if not isinstance(found, int):
        return found
    raise about(
        lockable._primitive,
        ConfigError(
            f"{lockable._primitive}: __exit__() can't tell which lease to release: "
            f"{f'{found} leases were entered, none by this thread or task' if found else 'no lease was entered'}. "
            "Keep the lease: `lease = lock.acquire()`, and then `with lease:` or lease.release()"
        ),
    )


def _found_by_hand(sections: list[Section], caller: object) -> Section | int:
    """The caller's own section, or the only one, taken out of these; else how many there are."""
    entered = [section for section in sections if section.lease is not None]
    mine = [section for section in entered if section.entered_by is not None and section.entered_by() is caller]
    held = [section for section in entered if not section.lease._ended] or entered
    found = mine[-1:] or held
    if len(found) == 1:
        sections.remove(found[0])
        return found[0]
    # The caller gets an error, and no section ends. A caller that lives can still leave its own section. The client
    # drops the others, and so renews their leases no more, unless user code refers to these leases.
    for section in held:
        if _has_ended(section.entered_by):
            sections.remove(section)
    return len(held)


def _has_ended(who: weakref.ref[Any] | None) -> bool:
    """Whether this thread or task has ended, as far as anybody can tell."""
    one = who() if who is not None else None
    return one is None or not (one.is_alive() if hasattr(one, "is_alive") else not one.done())
