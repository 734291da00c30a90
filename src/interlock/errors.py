"""The errors of this package. Each names the lock, the cause and the way out; none shows a password.

LockError
├── AcquireTimeout   also a TimeoutError: somebody else holds the lock, or asks for it in this process
├── LeaseLost        the lease has ended before its holder released it: stop writing
├── BrokenBarrier    also threading's BrokenBarrierError: the barrier or latch is broken, so it will never open
├── Deadlock         also a RuntimeError: this thread or task would wait for itself for ever
├── NotHeld          also a RuntimeError: this code must run under a lock, and does not
├── Unavailable      also a ConnectionError: the server, or too much of a quorum, does not answer
└── ConfigError      also a ValueError: a bad URL, name, ttl, limit, or a server on which no lock is safe
"""

from __future__ import annotations

from threading import BrokenBarrierError

__all__ = [
    "AcquireTimeout", "BrokenBarrier", "ConfigError", "Deadlock", "LeaseLost", "LockError", "NotHeld", "Unavailable",
]  # fmt: skip


class LockError(Exception):
    """The base class of every error of this package."""

    name: str | None = None
    """The name of the lock, as it was given, if the error is about one; of a multi the names of all its locks."""
    _public_text = "{} can't be used, since this program has an error"

    @property
    def public_text(self) -> str:
        """What an answer to the outside may say: the name of the lock, and no host, process, token or address."""
        return self._public_text.format("a lock" if self.name is None else repr(self.name))


class AcquireTimeout(LockError, TimeoutError):  # noqa: N818 (the names are the contract)
    """The server answered, but somebody else held the lock until the timeout was over. Nothing stays queued or held."""

    holder: str | None = None
    """The token of the holder, by the last answer of the server; None if nobody is known, as in a quarantine."""
    place: str | None = None
    """File and line where the holder acquired it, if the holder's process has said so, and the call waited a second."""
    deadlock: tuple[str, ...] = ()
    """A line for each caller of the deadlock in which this call was, or behind which it waited: who it is, what it
    holds and waits for, and where in its code. Empty if none is known; a call that waited a second asks."""
    remaining: float | None = None
    """Seconds until the lease of the holder, or the quarantine, ends unless it is renewed, by the last answer of the
    server; None if that is unknown."""
    waited: float = 0.0
    """Seconds that the call waited: its timeout, or 0 if it did not wait."""
    waiting: int | None = None
    """How many callers waited already, if `max_waiters` refused this one; else None."""
    quarantined: bool = False
    """Whether nobody holds it, as far as the server knows, but it is in quarantine after a restart or failover."""
    _public_text = "{} is busy. Try again later"


class LeaseLost(LockError):  # noqa: N818
    """The lease has ended, or may have ended, before its holder released it: the holder must stop writing."""

    token: str | None = None
    """The token of the lost lease."""
    _public_text = "the work under {} was interrupted, and may be incomplete"


class BrokenBarrier(LockError, BrokenBarrierError):  # noqa: N818
    """The barrier or latch is broken: a party left or died, or somebody reset, revoked or removed it."""

    _public_text = "{} is broken: not all that it waits for will arrive"


class Deadlock(LockError, RuntimeError):  # noqa: N818
    """This thread or task is inside the lock already, and would wait for itself for ever. Nothing stays queued."""


class NotHeld(LockError, RuntimeError):  # noqa: N818
    """The thread or task that calls this function is not inside the lock under which the function must run."""


class Unavailable(LockError, ConnectionError):  # noqa: N818
    """The server, or too much of a quorum, does not answer, or refuses to serve for now."""

    waited: float = 0.0
    """Seconds for which the call waited for an answer that counts; 0 if it did not wait."""
    _unanswered: bool = False  # whether it is raised because no try of a request was answered in time
    _public_text = "{} is not available now. Try again later"


class ConfigError(LockError, ValueError):
    """An argument, a URL or a server is set up wrongly. Raised before anything is sent if the client can know it."""
