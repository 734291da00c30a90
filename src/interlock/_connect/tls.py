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
(c) A connection looks every few milliseconds whether the context is there that another thread is making, for about a
    second, in which an event loop stands still. Then it makes the next one to be shared. There is no lock: an interrupt
    could leave it locked, and a signal handler could find it locked by its own thread. Nobody waits for a context that
    the same thread is making.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from interlock._protocol.forks import after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_AGE: Final = 60.0  # seconds for which a context serves
LOOK_INTERVAL: Final = 0.005  # seconds between two looks for a context that another thread is making
MAX_LOOKS: Final = 200  # counted, so that a process that stood still waits on
_FILES: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_VARIABLES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")  # that OpenSSL and Python read


_Identities = tuple[tuple[int, ...], ...]  # of files


class _Making(NamedTuple):
    """A context that a thread is making."""

    thread: int


class _Shared(NamedTuple):
    """A context for all connections with the same mode, options and environment."""

    context: ssl.SSLContext | None
    """None if redis-py must make one for each connection."""
    files: _Identities
    """The identities of the files from which it was made."""
    began: float
    """When the making began."""


_contexts: dict[object, _Making | _Shared] = {}  # by mode, options and environment


def shared_context(mode: str, options: Mapping[str, object], make: Callable[[], object]) -> ssl.SSLContext | None:
    """Return the context for a new connection in this mode with these `ssl_` options, made by `make` if there is none.

    Raises what `make` raises. Returns None if redis-py must make the context: with OCSP, for which redis-py does more
    than to wrap the socket; with options that are no keys of a dict; for threads with truststore.
    """
    if any(value for name, value in options.items() if "ocsp" in name):
        return None
    try:
        named = frozenset((name, type(value), _hashable(value)) for name, value in options.items())
    except (TypeError, ValueError):
        return None
    key = mode, named, *map(os.environ.get, _VARIABLES)
    shared, files = _made_for(key, options)
    if shared is None or shared.files != files or _is_old(shared):
        shared = _make(key, options, files, make)
    return shared.context


def _made_for(key: object, options: Mapping[str, object]) -> tuple[_Shared | None, _Identities]:
    """The context that is there, or that another thread has made soon; and the identities of the files just before."""
    for _ in range(MAX_LOOKS):
        found = _contexts.get(key)
        if not isinstance(found, _Making):
            files = _files(options)
            if _contexts.get(key) is found:  # no other thread has begun while this one waited for the disk
                return found, files
        elif found.thread == threading.get_ident():  # this is a signal handler or a finalizer
            break
        else:
            time.sleep(LOOK_INTERVAL)
    return None, _files(options)


def _make(key: object, options: Mapping[str, object], files: _Identities, make: Callable[[], object]) -> _Shared:
    for other, each in _contexts.copy().items():
        if isinstance(each, _Shared) and _is_old(each):
            _contexts.pop(other, None)
    began = time.monotonic()
    making = _contexts[key] = _Making(threading.get_ident())
    try:
        context = make()
        # Of truststore's contexts, a socket for threads knows only the inner one, which does not ask the system.
        shared = _Shared(context if isinstance(context, ssl.SSLContext) else None, files, began)
        if _files(options) == files:  # else a file changed meanwhile: nobody knows from which one it was made
            _contexts[key] = shared
        return shared
    finally:
        if _contexts.get(key) is making:
            _contexts.pop(key, None)


def _is_old(shared: _Shared) -> bool:
    return time.monotonic() - shared.began > MAX_AGE


def _hashable(value: object) -> object:
    # ssl_include_verify_flags is a list
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _files(options: Mapping[str, object]) -> _Identities:
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


after_fork(_contexts.clear)  # no thread of the child makes what one of the parent began
