"""TLS: the connections of this process with the same mode and options share one context.

Theory. redis-py makes a context for each connection, and each context loads the certificates that the machine trusts:
40 ms of processor time for Debian's 144, and 70 ms each if threads do it together. So 200 threads that connect together
compute for 14 s, in which their process renews no lease; and each connection of asyncio stops the event loop. Python's
`ssl` lets any number of threads and tasks share a context.

Rules.
(a) redis-py makes the context, by the code of the connection's own mode and at the same moment as ever: it alone
    decides what an option means and which error a wrong one raises. Some versions decide differently for threads and
    for asyncio.
(b) A context serves while the files that its options or the environment name are the same ones on the disk, and for
    `MAX_AGE` at most. So the next connection reads a renewed certificate. A file that changes inside a directory counts
    after `MAX_AGE` at the latest.
(c) A connection waits for a context that another thread is making, but no longer than `MAX_WAIT`, and never for one
    that its own thread is making, as in a signal handler. If the wait ends without a context, redis-py makes one for
    this connection alone: so nobody waits for ever, and errors do not queue up.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_AGE: Final = 60.0  # seconds for which a context serves
MAX_WAIT: Final = 5.0  # seconds that a connection waits for a context that another thread is making
_FILES: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


class _Shared:
    """A context that one thread makes for all."""

    __slots__ = ("context", "done", "maker", "started")

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.maker = threading.get_ident()
        self.done = threading.Event()  # also set if the context could not be made
        self.context: ssl.SSLContext | None = None

    def is_old(self) -> bool:
        """Whether the context has served for its time."""
        return time.monotonic() - self.started > MAX_AGE


_all_shared: dict[object, _Shared] = {}  # by mode, options and files


def shared_context(mode: str, options: Mapping[str, object], make: Callable[[], object]) -> ssl.SSLContext | None:
    """Return the context for a new connection in this mode with these `ssl_` options, made by `make` if there is none.

    Raises what `make` raises. Returns None if redis-py must make the context: by rule (c); with OCSP, for which
    redis-py does more than to wrap the socket; with options that are no keys of a dict; for threads with truststore.
    """
    if any(value for name, value in options.items() if "ocsp" in name):
        return None
    try:
        key = mode, frozenset((name, type(value), _hashable(value)) for name, value in options.items()), _files(options)
    except TypeError:
        return None
    shared = _all_shared.get(key)
    if shared is None or shared.is_old():
        for other, each in _all_shared.copy().items():
            if each.is_old():
                _all_shared.pop(other, None)
        own = _Shared()
        shared = _all_shared.setdefault(key, own)
        if shared is own:
            return _make(key, own, make)
    if shared.maker != threading.get_ident() and not shared.done.wait(MAX_WAIT):
        _all_shared.pop(key, None)
    return shared.context


def _make(key: object, shared: _Shared, make: Callable[[], object]) -> ssl.SSLContext | None:
    try:
        context = make()
        # Of truststore's contexts, a socket for threads knows only the inner one, which does not ask the system.
        shared.context = context if isinstance(context, ssl.SSLContext) else None
    except BaseException:
        _all_shared.pop(key, None)
        raise
    finally:
        shared.done.set()
    return shared.context


def _hashable(value: object) -> object:
    # ssl_include_verify_flags is a list
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _files(options: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    """The identities of the files and directories that the options or the environment name."""
    trusted = ssl.get_default_verify_paths()
    return tuple(_identity(path) for path in (trusted.cafile, trusted.capath, *map(options.get, _FILES)))


def _identity(path: Any) -> tuple[int, ...]:
    if not path:
        return ()
    try:
        state = Path(path).stat()
    except (OSError, ValueError):
        return ()
    return state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_shared.clear)  # no thread of the child makes what one of the parent began
