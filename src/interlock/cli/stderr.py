"""A stderr that waits for nobody, for `interlock run`: a thread of its own writes what the others print.

Theory. A write to stderr may fail (a full disk, a reader that has gone), may wait for ever (a pipe that nobody reads, a
terminal after Ctrl-S), and may stop the process (a terminal after `stty tostop`, for a process in the background).
`interlock run` renews a lease and answers for a command, so nothing of it may depend on a reader. All that Python
prints (messages, the log, warnings, tracebacks) goes through `sys.stderr`, which only puts the bytes into a queue.
O_NONBLOCK is no way: that flag belongs to the open file, which the command and the user's shell share.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["drain", "wait_for_nobody"]

MAX_WAIT: Final = 1.0  # seconds that the end of the process waits for a reader
MAX_WAITING: Final = 1000  # writes that wait for a reader; what comes then is dropped


class _Queued(io.RawIOBase):
    """The bytes of a descriptor that a thread writes as soon as it can."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.name = "<stderr>"
        self.descriptor = descriptor
        self.waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        threading.Thread(target=self.write_on, name="interlock-run-stderr", daemon=True).start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        copy = bytes(data)
        if self.waiting.qsize() < MAX_WAITING:
            self.waiting.put(copy)
        return len(copy)

    def write_on(self) -> None:
        """Write for ever. What can't be written is lost."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # SIGTTOU, which would stop all of the job
        while True:
            data = self.waiting.get()
            if isinstance(data, threading.Event):
                data.set()
                continue
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self.descriptor, data) :]

    def drain(self) -> None:
        written = threading.Event()
        self.waiting.put(written)
        written.wait(MAX_WAIT)


_queued: Final[list[_Queued]] = []  # one, or none: the process prints as usual


def wait_for_nobody() -> None:
    """Replace `sys.stderr` for the rest of the process, which ends when all is written, or after a second."""
    before = sys.__stderr__
    if before is None or sys.stderr is not before:  # /dev/null, which takes all; or that of a caller, as of a test
        return
    queued = _Queued(before.fileno())
    sys.stderr = io.TextIOWrapper(queued, before.encoding, "backslashreplace", line_buffering=True)
    _queued.append(queued)
    atexit.register(drain)


def drain() -> None:
    """Wait until what was printed is written, a second at most."""
    for queued in _queued:
        queued.drain()
