"""A fork of which interlock learns nothing, as uWSGI and extensions in C make it."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

HOW = ["os.fork", "unseen"]


def hide_forks() -> None:
    """Let no module that is imported from here on have a hook of os.fork, if the command line says "unseen".

    Python's own part of os.fork then runs in a child, as in uWSGI with its hooks. Without that part a child of a
    process with several threads hangs in Python itself: it waits for the GIL behind threads that it does not have.
    """
    if "unseen" in sys.argv:

        def keep(**_hooks: Any) -> None:
            """In place of os.register_at_fork."""

        os.register_at_fork = keep  # type: ignore[assignment]


def fork_in_c() -> int:
    """fork(2) of the C library, with the GIL held: for a process with one thread."""
    return ctypes.PyDLL(None).fork()
