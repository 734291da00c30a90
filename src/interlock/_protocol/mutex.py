"""A lock for compound steps on data that several threads share, which no interrupt leaves locked."""

from __future__ import annotations

import _thread
import sys
import threading

if sys.version_info >= (3, 14):

    class Mutex(_thread.RLock):
        """A reentrant lock that a `with` always gives back, also if a signal handler raises, as Ctrl-C does.

        Python 3.14 runs signal handlers right after a call of an `__enter__` in C, before the `with` is sure to call
        `__exit__`. It runs none when an `__enter__` in Python returns. `__exit__` stays in C, because Python runs no
        handler at its start.
        """

        def __enter__(self) -> bool:
            before = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                if self._recursion_count() > before:
                    self.release()
                raise

else:
    Mutex = threading.RLock


def new_mutex() -> Mutex:
    """A mutex for what runs as threads now: for greenlets, after gevent or eventlet has replaced `threading`.

    A greenlet may switch to another one while it holds a mutex, and both are one thread of the system: to a lock of the
    system they are one owner.
    """
    made = threading.RLock()
    return Mutex() if type(made).__module__ == "_thread" else made
