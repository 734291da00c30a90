"""How threads wait, and how they run work in the background: see `Runtime`."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, TypeVar

from interlock._client.places import calling_place
from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.greenlets import library_of_greenlets
from interlock._protocol.log import log
from interlock._protocol.mutex import new_mutex
from interlock._protocol.run_to_end import run
from interlock._protocol.timing import now

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from interlock._client.places import Place

T = TypeVar("T")
MAX_WAIT: Final = 3600.0  # seconds of one wait: `Lock.acquire` accepts no infinite timeout
# The same in the main thread, which alone runs signal handlers. The kernel may deliver Ctrl-C to another thread, for
# example to one that starts a thread at that moment; then nothing wakes the main thread.
MAX_WAIT_OF_MAIN_THREAD: Final = 1.0


class AutoResetEvent:
    """A flag that one thread waits for. It is a raw lock, which is the cheapest means to wake a thread."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the flag, and wake the thread that waits for it."""
        with contextlib.suppress(RuntimeError):  # the flag is set already
            self._lock.release()

    async def wait(self, until: float) -> bool:
        """Wait for the flag until this time at the latest, and reset it. Returns False if it was not set in time."""
        longest = MAX_WAIT if threading.current_thread() is not threading.main_thread() else MAX_WAIT_OF_MAIN_THREAD
        while True:
            left = until - now()
            if self._lock.acquire(timeout=max(0.0, min(left, longest))):
                return True
            if not KNOWN[0]:  # a signal handler has forked in C
                notice()  # which wakes the callers of the parent's clients, of which this may be one
            elif left <= longest:
                return False


class ThreadRuntime:
    """See Runtime: threads wait for raw locks, and background work runs in daemon threads."""

    def __init__(self) -> None:
        self.now = now
        self.event = AutoResetEvent
        self.reset_after_fork()

    def reset_after_fork(self) -> bool:
        """See Runtime. The threads of the parent do not exist here."""
        self.made_of = threading.Lock  # the locks of the system, or those of gevent or eventlet
        self._library = library_of_greenlets()
        self.mutex = new_mutex()  # reentrant: a signal handler may run in the thread that holds the mutex
        self._threads: list[threading.Thread] = []
        self.first_use: Place | None = None  # the line of the user that made the first thread start
        return True

    def holds_mutex(self) -> bool:
        """See Runtime."""
        return self.mutex._is_owned()  # type: ignore[attr-defined,no-any-return]

    async def sleep_until(self, until: float) -> None:
        """See Runtime."""
        await AutoResetEvent().wait(until)

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, on_end: Callable[[], None]) -> None:
        """See Runtime."""

        def work_then_end() -> None:
            try:
                run(work())
            finally:
                on_end()

        self.start_thread(work_then_end, name)

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        """See Runtime."""

        def run_and_log() -> None:
            try:
                callback(subject)
            except Exception:  # noqa: BLE001 (logged)
                log.exception(
                    "interlock: the callback %r failed", callback, extra=getattr(subject, "_log_fields", None)
                )

        threading.Thread(target=run_and_log, name="interlock-callback", daemon=True).start()

    def start_thread(self, work: Callable[[], None], name: str) -> None:
        """Start a daemon thread, and remember it: `close` waits for its end."""
        if self.has_started and self.replaced_by() is not None:
            return
        thread = threading.Thread(target=work, name=name, daemon=True)
        if not self.has_started:
            self.first_use = calling_place()
        thread.start()
        with self.mutex:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    @property
    def has_started(self) -> bool:
        """Whether a background thread was started in this process."""
        return bool(self._threads)

    def replaced_by(self) -> str | None:
        """The library of greenlets that has replaced `threading` since this runtime began; None if none has."""
        if threading.Lock is self.made_of:
            return None
        if (library := library_of_greenlets()) == self._library:  # a profiler of locks came, for example
            self.made_of = threading.Lock
            return None
        return library

    def is_background(self) -> bool:
        """Whether the current thread is one that this runtime started."""
        return threading.current_thread() in self._threads

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """See Runtime."""
        return work()

    async def close(self) -> None:
        """See Runtime."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
