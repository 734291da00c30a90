"""What type checkers say of a lock of threading and one of interlock.compat.threading in its place: never run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, assert_type

from interlock import Interlock
from interlock.compat import threading as compat

if TYPE_CHECKING:
    from types import TracebackType


class Context(Protocol):
    """A `with`."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class AnyLock(Context, Protocol):
    """What a lock and an rlock have in common."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire it."""
        ...

    def release(self) -> None:
        """Release it."""
        ...


class PlainLock(AnyLock, Protocol):
    """A lock that says whether it is held."""

    def locked(self) -> bool:
        """Whether it is held."""
        ...


class AnySemaphore(Context, Protocol):
    """A semaphore, bounded or not."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire a permit."""
        ...

    def release(self, n: int = 1) -> None:
        """Release n permits."""
        ...


class AnyBarrier(Protocol):
    """A barrier."""

    @property
    def parties(self) -> int:
        """How many meet."""
        ...

    @property
    def n_waiting(self) -> int:
        """How many wait."""
        ...

    @property
    def broken(self) -> bool:
        """Whether it is broken."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the others."""
        ...

    def reset(self) -> None:
        """Begin anew."""
        ...

    def abort(self) -> None:
        """Break it."""
        ...


def action() -> None:
    """What one party does."""


locks = Interlock("redis://localhost:6379/0")
plain: list[PlainLock] = [threading.Lock(), compat.Lock("a"), compat.Lock("a", locks=locks), compat.RLock("a")]
reentrant: list[AnyLock] = [threading.RLock(), compat.RLock("a"), compat.RLock("a", locks=locks)]
semaphores: list[AnySemaphore] = [
    threading.Semaphore(2), threading.BoundedSemaphore(value=2),
    compat.Semaphore("s", 2), compat.BoundedSemaphore("s", value=2, locks=locks),
]  # fmt: skip
barriers: list[AnyBarrier] = [
    threading.Barrier(2, action, timeout=5), threading.Barrier(2),
    compat.Barrier("b", 2, action, timeout=5), compat.Barrier("b", 2, locks=locks),
]  # fmt: skip
bounded: compat.Semaphore = compat.BoundedSemaphore("s")

with compat.Lock("a") as held:
    assert_type(held, bool)
assert_type(compat.RLock("a").acquire(False), bool)
assert_type(compat.Semaphore("s").acquire(timeout=None), bool)
assert_type(compat.Barrier("b", 2).wait(), int)
assert_type(compat.default_locks(), Interlock)
compat.set_default_locks(locks)
