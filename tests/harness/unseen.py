"""A fork that Python's hooks do not see, as uWSGI and extensions in C make it."""

from __future__ import annotations

import ctypes
import os
import time

PAUSE = 0.02  # seconds
LATE = 0.003  # seconds: less than Python's switch interval, for which a thread waits before it asks for the GIL


def fork_in_c() -> int:
    """fork(2), without os.fork's hooks; the child goes on with Python's lock (the GIL), as its only thread.

    Nothing in a child can mend the GIL if another thread of the parent waits for it at the fork: the child then hangs
    in Python itself, at its first switch of threads. So this pauses until a pause ends in time: then this thread got
    the GIL at once, from nobody who wants it back.
    """
    late, end = LATE + 1, time.monotonic() + 20
    while late > LATE and time.monotonic() < end:
        due = time.monotonic() + PAUSE
        time.sleep(PAUSE)
        late = time.monotonic() - due
    return ctypes.PyDLL(None).fork()


HOW = {"os.fork": os.fork, "in-C": fork_in_c}
