"""Forks: what a process has copied from its parent belongs to the parent.

Theory. `os.fork` calls hooks of Python in the child, and a fork in C calls none: uWSGI forks its workers so, and so may
any extension. So a child can't rely on a hook. The page `KNOWN` has a 1 in a process that knows of its own beginning.
The kernel clears that page in each child of a fork (MADV_WIPEONFORK). Whatever begins here looks at the page first: a
call, an answer about a lease, a worker, a finalizer, the exit. A child finds a 0, and calls `notice`, which resets what
the parent has left.

Rules.
(a) A reader says `if not KNOWN[0]: notice()`. That takes 20 ns; to compare with `os.getpid()` would take 110.
(b) `notice` resets everything once, however many threads arrive together, and returns when all is reset. It waits for
    no lock that a thread of the parent may have held at the fork: the locks here have the process id as their key. (A
    child in a pid namespace of its own may have the id of its parent, which then must have been in `notice` itself.)
(c) A callback of `after_fork` sends nothing, and may run twice: an interrupt may end it, and a signal handler that uses
    a lock may run in the middle of it.
(d) The page is written last. Until then each answer about a lease is that it belongs to the parent.

Where the kernel does not clear pages, `KNOWN` compares process ids. That does not notice a child in a new pid namespace
whose id is that of its parent.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, Protocol

from interlock._protocol.log import log
from interlock._protocol.mutex import Mutex

if TYPE_CHECKING:
    from collections.abc import Callable

MADV_WIPEONFORK: Final = 18  # of Linux 4.14 and later
NO_ADVICE: Final = -1

count: int = 0
"""A number that no parent of this process has, and that grows. What stores it belongs to the process with that
number."""


class Known(Protocol):
    """Whether this process knows of its own beginning: `[0]` is 1, or 0 in a child that has not noticed the fork."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class KnownById:
    """`KNOWN` where the kernel does not clear pages: the id of the process that wrote the 1."""

    def __init__(self) -> None:
        self._pid = 0

    def __getitem__(self, index: int, /) -> int:
        return self._pid == os.getpid()

    def __setitem__(self, index: int, value: int, /) -> None:
        self._pid = os.getpid() if value else 0


def _known() -> Known:
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (AttributeError, OSError):  # no such flags, or no memory
        return KnownById()
    # An emulator may accept each advice and follow none, as older versions of qemu-user do. BoringSSL's fork_detect.c
    # has this test for them.
    if _accepts(page, NO_ADVICE) or not _accepts(page, MADV_WIPEONFORK):
        page.close()
        return KnownById()
    return page


def _accepts(page: mmap.mmap, advice: int) -> bool:
    try:
        page.madvise(advice)
    except (AttributeError, OSError):
        return False
    return True


KNOWN: Final[Known] = _known()
KNOWN[0] = 1
_callbacks: Final[list[Callable[[], None]]] = []
_locks: Final[dict[int, Mutex]] = {}  # by process id: no thread of another process has ever held it


def after_fork(callback: Callable[[], None]) -> None:
    """Call this in each child, once the child has noticed that it is one, in the order of these calls."""
    _callbacks.append(callback)


def notice() -> None:
    """In a child after a fork: reset what the parent has left, unless another thread has done so."""
    global count  # noqa: PLW0603 (there is one process)
    with _locks.setdefault(os.getpid(), Mutex()):
        if KNOWN[0]:
            return
        count += 1
        for callback in _callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 (logged: else every later call would raise it)
                log.exception("interlock: a child could not reset something of its parent")
            if KNOWN[0]:  # a signal handler in the middle of the callback has reset everything
                return
        KNOWN[0] = 1


if hasattr(os, "register_at_fork"):
    # So that a child closes its copies of the parent's sockets at once, where it can.
    os.register_at_fork(after_in_child=notice)
