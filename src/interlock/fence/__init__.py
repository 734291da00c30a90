"""Guards with which the data itself refuses a late writer.

Theory. No lock server can stop a holder that was paused after its last check of the lease and now writes. The data can:
it stores the highest fence that it has seen, and refuses a lower fence in the same atomic step as the write. A fence is
unique to its grant, and each later grant has a higher fence, so "lower" means exactly "older".

Rules. (a) A guard refuses a fence that is *older* than the newest fence seen. The same fence passes: a holder may write
many times. (b) Guard, then read, then write. A guard refuses older holders from its first call on, not from the moment
of the grant: an older holder may still overwrite data that the newer holder has read before its first guard. (c) A
guard does not look at the lease: it uses no `ensure()`, no clock, no lock server. While no newer holder has written to
the data, a late write does no harm; and a service without a lease can write, too, if it receives the name and the
fence. (d) Each piece of data has one lock. Fences of different locks, or of locks on different servers, cannot be
compared. (e) A refusal raises LeaseLost, never returns a silent count of 0, and has changed nothing.

    dbapi        PostgreSQL and SQLite, over their DB-API connections
    sqlalchemy   the same for SQLAlchemy Core, and MySQL and MariaDB (needs sqlalchemy)
    sqlalchemy_orm   objects of SQLAlchemy's ORM
    redis        several Redis commands, on any server
    files        a file that is replaced as a whole

Every guard takes its arguments in this order: where the data is, the lease, what to write.
"""

from __future__ import annotations

from typing import Final, Protocol

from interlock.errors import ConfigError, LeaseLost

__all__ = ["Fenced", "StaleFence"]

# The largest integer that a double stores exactly, so any store can compare it. In µs since 1970: the year 2255.
MAX_FENCE: Final = 2**53 - 1


class Fenced(Protocol):
    """What a guard needs of a lease: any Lease, or any object that carries the name and fence of one."""

    @property
    def name(self) -> str:
        """The name that was locked."""
        ...

    @property
    def fence(self) -> int:
        """The fence of the grant."""
        ...


class StaleFence(LeaseLost):
    """The data has seen the fence of a newer holder, so it refused this older holder's change.

    It is a LeaseLost that the data reports: stop, roll back, acquire the lock again, read anew.
    """


def fence_of(lease: Fenced) -> int:
    """The fence of this lease. Raises ConfigError if it is no valid fence."""
    fence = lease.fence
    if isinstance(fence, bool) or not isinstance(fence, int) or not 0 < fence <= MAX_FENCE:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"lock {lease.name!r}: a fence is a whole number from 1 to 2**53 - 1, not {fence!r}")
    return fence


def stale_fence_error(lease: Fenced, newest: int, place: str) -> StaleFence:
    """The error for an older holder."""
    error = StaleFence(
        f"lock {lease.name!r}: {place} has seen fence {newest} of a newer holder, so it refuses the older "
        f"{lease.fence} and the change that carries it. Stop, roll back, acquire the lock again and read the data again"
    )
    error.name = lease.name
    return error
