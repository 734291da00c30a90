"""A fork(2) of which interlock learns nothing, and the program of a worker process that may be forked in this way.

Theory. Some servers of applications fork in C: no hook of `os.register_at_fork` runs in their children. uWSGI does that
in its default mode. So a child has the memory of its parent, and a process id of its own is all that it can notice.

In a process with one thread `fork()` of the C library is called, with the GIL held. In a process with several threads
Python itself needs its part of os.fork() in the child: else the child waits for the GIL behind threads that it does not
have. So this program keeps the hooks that any module registers from the start on, and they run in no child.

`python -m model.histories.hookless DIRECTORY PROCESS` is a worker process as `worker.py` has it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any


def fork(*, alone: bool) -> int:
    """Fork this process, which has one thread if it is `alone`. Returns what fork(2) returns."""
    return ctypes.PyDLL(None).fork() if alone else os.fork()


def main() -> None:
    def keep(**_hooks: Any) -> None:
        """In place of os.register_at_fork: no hook ever runs."""

    os.register_at_fork = keep  # type: ignore[assignment]
    from model.histories import worker  # here: it imports interlock

    worker.main()


if __name__ == "__main__":
    main()
