"""Fences that bite: guards with which the data itself refuses a late writer.

Theory. No lock in a server can stop a holder that was paused after its last look at the lease and now writes. What
can is the data: it remembers the highest fence that it has seen, and refuses lower ones in the same step as the
write. A fence is unique to its grant and any later grant has a higher one, so "lower" means exactly "older".

Rules. (1) Refused is what is *older* than the newest seen. The same fence passes: a holder may write many times.
(2) Guard, then read, then write. A guard refuses older holders from then on, not from the moment of the grant: what
was read before the first guard may still be overwritten by an older holder that came just before it. (3) Nobody asks
the lease: no `ensure()`, no clock, no lock server. As long as nobody newer has been at the data, a late write is in
order; and the write may be done where there is no lease, by a service that was sent name and fence. (4) One piece of
data, one lock. Fences of different locks, or of locks on different servers, mean nothing to each other. (5) Refused is
LeaseLost, never a silent count of 0, and what was refused has changed nothing.

    dbapi        PostgreSQL and SQLite, over their DB-API connections
    sqlalchemy   the same for SQLAlchemy Core (needs sqlalchemy)
    redis        several Redis commands, on any server
    files        a file that is replaced as a whole

Everywhere the order of arguments is: where, under which lease, what.
"""

from __future__ import annotations

from typing import Final, Protocol

from interlock.errors import ConfigError, LeaseLost

__all__ = ["Fenced"]

HIGHEST: Final = 2**53 - 1  # what a double holds exactly, so any store can compare it: µs until the year 2255


class Fenced(Protocol):
    """What a guard needs of a lease. Any Lease is one; so is anything that carries its name and fence elsewhere."""

    @property
    def name(self) -> str:
        """The name that was locked."""
        ...

    @property
    def fence(self) -> int:
        """The fence of the grant."""
        ...


def fence_of(lease: Fenced) -> int:
    """Its fence, if it can be one. Raises ConfigError."""
    fence = lease.fence
    if isinstance(fence, bool) or not isinstance(fence, int) or not 0 < fence <= HIGHEST:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"lock {lease.name!r}: a fence is a whole number from 1 to 2**53 - 1, not {fence!r}")
    return fence


def refused(lease: Fenced, newest: int, where: str) -> LeaseLost:
    """What an older holder is told."""
    return LeaseLost(
        f"lock {lease.name!r}: {where} has seen fence {newest} and refuses the older {lease.fence}, with all that came "
        "with it: there is a newer holder. Stop, roll back, acquire the lock again and read anew"
    )
