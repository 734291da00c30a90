"""What can go wrong. Each error names the lock, the cause and the way out; none shows a password.

LockError
├── AcquireTimeout   also a TimeoutError: a server answered, and somebody else has the lock; nothing is left behind
├── LeaseLost        the lease has ended under its holder: stop writing
├── BrokenBarrier    also threading's BrokenBarrierError: those whom we wait for will not come
├── Unavailable      also a ConnectionError: the server does not answer, in whatever way, or not enough of a quorum do
└── ConfigError      also a ValueError: bad URL, name, ttl, limit, or a server set up so that no lock is safe
"""

from __future__ import annotations

from threading import BrokenBarrierError

__all__ = ["AcquireTimeout", "BrokenBarrier", "ConfigError", "LeaseLost", "LockError", "Unavailable"]


class LockError(Exception):
    """Base of every error of this package."""


class AcquireTimeout(LockError, TimeoutError):  # noqa: N818 (the names are the contract)
    """A server answered, and somebody else has the lock, until the end of the timeout. Nothing stays queued or held."""

    holder: str | None = None
    """The token of who had it, when last asked."""


class LeaseLost(LockError):  # noqa: N818
    """The lease is not ours any more, or not certainly ours: the holder must stop writing."""

    token: str | None = None
    """That of the lease which was lost."""


class BrokenBarrier(LockError, BrokenBarrierError):  # noqa: N818
    """Who waits at this barrier or latch waits in vain: a party left or died, or it was reset, revoked, or is gone."""


class Unavailable(LockError, ConnectionError):  # noqa: N818
    """The server (or enough of a quorum) does not answer, in whatever way, or refuses to serve for now."""


class ConfigError(LockError, ValueError):
    """Something is set up wrongly. Raised before anything is sent where that can be known."""
