"""A fork that Python's hooks do not see, as uWSGI and extensions in C make it."""

from __future__ import annotations

import ctypes
import os
import time

SETTLES = 0.02  # seconds: more than Python's switch interval


def fork_in_c() -> int:
    """fork(2), without os.fork's hooks; the child goes on with Python's lock (the GIL), as its only thread.

    Nothing in a child can mend the GIL if another thread of the parent waits for it at the fork: the child then hangs
    in Python itself, at its first switch of threads. So this gives the other threads the time to block elsewhere.
    """
    time.sleep(SETTLES)
    return ctypes.PyDLL(None).fork()


HOW = {"os.fork": os.fork, "in-C": fork_in_c}
