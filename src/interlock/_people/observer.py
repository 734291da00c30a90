"""What this process reports about its locks: to metrics, to traces, to the log. By default nobody observes.

Theory. While somebody observes, the client of each session has an `Observed` (`observed.py`), to which it reports. That
`Observed` calls the observers here. Else the client sees at each point that it has no `Observed`, and reports nothing.

Rules.
(a) An observer that raises breaks no lock: its first error is logged, and it is called again.
(b) An attempt begins once and has one outcome. The hold of its lease ends once, whoever ends it.
(c) No observer is called under the mutex of a runtime, or by a finalizer: it may log, export, or use a lock itself.
(d) The attempt keeps what an observer notes about it. So a lease that never ends leaves nothing behind.
(e) An observer may be slow: the reports of a worker wait in `Reports`, and delay no lease.
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.log import log
from interlock._protocol.server import Stopped
from interlock.errors import AcquireTimeout, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.grant import Attempt, Grant


class Outcome(StrEnum):
    """What became of an attempt."""

    ACQUIRED = "acquired"
    BUSY = "busy"
    """Somebody else has it, or has done the work of a `once`, and the caller did not wait."""
    TIMEOUT = "timeout"
    """The caller waited, until its time was over."""
    UNAVAILABLE = "unavailable"
    """No server answered in time."""
    CANCELLED = "cancelled"
    """The caller was cancelled or interrupted, or stopped its campaign."""
    ERROR = "error"
    """The server or interlock refused the request."""


class Loss(StrEnum):
    """Why a lease was lost."""

    EXPIRED = "expired"
    """No renewal got through in time, or the lease was not renewed."""
    MAX_HOLD = "max_hold"
    """Its max_hold was over."""
    REVOKED = "revoked"
    """Somebody revoked it."""
    GONE = "gone"
    """The server had it no more: revoked by force, evicted, or lost with the server."""
    DROPPED = "dropped"
    """The program forgot to release it."""


BEGINNINGS: Final = {  # how a reason begins; its rest may be anybody's text
    "it was revoked": Loss.REVOKED,
    "its max_hold is over": Loss.MAX_HOLD,
    "the server has no such lease": Loss.GONE,
    "it had ended in the server": Loss.GONE,
    "it was dropped": Loss.DROPPED,
}


class Observer:
    """The methods that interlock calls, one for each event; these here do nothing.

    All times are in seconds. The calls come from any thread.
    """

    def begins(self, attempt: Attempt) -> None:
        """A caller begins to acquire."""

    def acquired(self, grant: Grant, waited: float) -> None:
        """The caller has its lease."""

    def not_acquired(self, attempt: Attempt, outcome: Outcome, waited: float, error: BaseException) -> None:
        """The caller gets no lease."""

    def released(self, grant: Grant, held: float) -> None:
        """The lease was given back, or has passed to the next caller of its cohort."""

    def lost(self, grant: Grant, loss: Loss, why: str, held: float | None) -> None:
        """The lease was lost. `held` is None if it was reported as released, or if nobody observed its acquire."""

    def renewed(self, grant: Grant, slack: float) -> None:
        """A renewal succeeded, this long before the lease would have ended."""

    def renewal_failed(self, grant: Grant) -> None:
        """The lease is in jeopardy: its renewal failed, or is late."""


observers: tuple[Observer, ...] = ()  # of this process
on_switch: list[Callable[[], None]] = []  # called after each change of `observers`
_have_failed: set[Observer] = set()
switching = threading.RLock()  # held while somebody switches; a signal handler may do so, too


def observe(observer: Observer) -> None:
    """Report the events of every Interlock of this process to this observer from now on."""
    _switch(lambda now: (*now, observer) if observer not in now else now)


def stop_observing(observer: Observer) -> None:
    """Report to this observer no more."""
    _switch(lambda now: tuple(each for each in now if each is not observer))


def _switch(change: Callable[[tuple[Observer, ...]], tuple[Observer, ...]]) -> None:
    global observers  # noqa: PLW0603 (there is one process)
    if not KNOWN[0]:
        notice()  # which makes another lock
    with switching:
        observers = change(observers)
        for switch in on_switch:
            switch()


def reset_after_fork() -> None:
    """In a child after a fork: another thread of the parent may have been switching."""
    global switching  # noqa: PLW0603 (there is one process)
    switching = threading.RLock()


def tell(event: Callable[[Observer], object]) -> None:
    """Tell all observers of this event, now."""
    for observer in observers:
        try:
            event(observer)
        except Exception:  # noqa: BLE001 (logged)
            if observer not in _have_failed:
                _have_failed.add(observer)
                log.exception("interlock: the observer %r failed. Further errors of it are not logged", observer)


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of an attempt that raised this."""
    if isinstance(error, AcquireTimeout):
        return Outcome.TIMEOUT if error.waited else Outcome.BUSY
    if isinstance(error, Unavailable):
        return Outcome.UNAVAILABLE
    if isinstance(error, Stopped) or not isinstance(error, Exception):
        return Outcome.CANCELLED
    return Outcome.ERROR


def loss_of(why: str) -> Loss:
    """The kind of this reason for the end of a lease."""
    return next((loss for text, loss in BEGINNINGS.items() if why.startswith(text)), Loss.EXPIRED)
