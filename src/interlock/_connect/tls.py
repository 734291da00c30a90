"""TLS: the connections of this process with the same options share one context.

Theory. redis-py makes a context for each connection, and each context loads the certificates that the machine trusts:
70 ms of processor time for Debian's 140. So 200 threads that connected together computed for 14 s, in which their
process renewed no lease; and each connection of asyncio stopped the event loop. Python's `ssl` lets any number of
threads and tasks share a context.

Rules.
(a) redis-py makes the context, so redis-py alone decides what an option means. Where that is not possible, as for
    options that only its blocking connections have, `shared_context` returns None, and redis-py goes on as ever.
(b) A context counts for `MAX_AGE`: soon after a certificate was renewed on the disk, connections use the new one.
(c) An error of TLS ends all contexts: the next connection loads the files again.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import redis.asyncio.connection

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

MAX_AGE: Final = 60.0  # seconds
MOST: Final = 32  # contexts that are kept


class Contexts:
    """The contexts of this process. Any thread may call these methods."""

    def __init__(self) -> None:
        # Reentrant, since a signal handler may connect in a thread that is just making a context.
        self._mutex = threading.RLock()
        self._made: dict[object, tuple[ssl.SSLContext, float]] = {}  # by options: the context, and until when it counts

    def get(self, options: Mapping[str, Any]) -> ssl.SSLContext | None:
        """Return the context of connections with these `ssl_` options; None if redis-py must make one for each."""
        try:
            key = frozenset(options.items())
        except TypeError:  # a list
            return None
        with self._mutex:  # one thread makes the context, and those that connect meanwhile wait for it
            context, until = self._made.get(key, (None, 0.0))
            if context is None or time.monotonic() >= until:
                try:
                    context = redis.asyncio.connection.SSLConnection(**options).ssl_context.get()
                except Exception:  # noqa: BLE001 (redis-py raises the error again, where its caller expects it)
                    return None
                if len(self._made) >= MOST:
                    self._made.clear()
                self._made[key] = (context, time.monotonic() + MAX_AGE)
            return context

    def clear(self) -> None:
        """Forget all contexts."""
        with self._mutex:
            self._made.clear()


_contexts = Contexts()


def shared_context(options: Mapping[str, Any]) -> ssl.SSLContext | None:
    """See Contexts.get()."""
    return _contexts.get(options)


def forget_contexts() -> None:
    """Let the next connections load all certificates again."""
    _contexts.clear()


def _after_fork() -> None:
    """Begin anew in a child: another thread of its parent may have held the mutex."""
    global _contexts  # noqa: PLW0603
    _contexts = Contexts()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
