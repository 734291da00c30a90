"""Grants that replicas or disks acknowledge: what the user asks for, and what a lease rests on.

The grant of one server is in that server's memory only. If the server dies before a replica has the grant, a failover
forgets the grant, and the quarantine makes up for that. A user who does not want to rely on the quarantine asks that a
grant counts only once replicas or disks have the grant (WAIT, WAITAOF). All of the requested number must acknowledge.
If they don't in time, the client undoes the grant.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from interlock.errors import ConfigError, Unavailable

MAX_ACKS: Final = 1000
ACK_TIMEOUT: Final = 1.0  # seconds that replicas may take, at most; and at most a third of the ttl
FSYNC_TIMEOUT: Final = 3.0  # seconds that disks may take: most servers write once a second (appendfsync everysec)


class Assurance(NamedTuple):
    """How many servers, replicas and disks had the grant of a lease when that grant counted."""

    servers: int = 1
    """How many servers granted the lease: one, or a majority of a quorum."""
    replicas: int = 0
    """How many replicas had the grant (with fsync: on their disks) before the grant counted."""
    disks: int = 0
    """1 if the grant was on the disk of the server that granted the lease, else 0."""


class Acks(NamedTuple):
    """How many replicas must have a grant: a number, "majority" (of server and replicas) or "all". `fsync`: on disk."""

    number: int | str
    fsync: bool

    def needed(self, known: int) -> int:
        """How many replicas must acknowledge, of the `known` ones."""
        if self.number == "all":
            return max(1, known)
        if self.number == "majority":
            return max(1, (known + 1) // 2)
        return int(self.number)

    def timeout(self, ttl: float) -> float:
        """Seconds that replicas may take for a lease of `ttl` seconds."""
        return min(FSYNC_TIMEOUT if self.fsync else ACK_TIMEOUT, ttl / 3)

    def command(self, known: int, timeout: float) -> tuple[str, ...]:
        """The command that waits for the replicas, on the connection of the grant, for `timeout` seconds."""
        needed, ms = str(self.needed(known)), str(max(1, int(timeout * 1000)))
        return ("WAITAOF", "1", needed, ms) if self.fsync else ("WAIT", needed, ms)

    def assurance(self, subject: object, known: int, reply: int | list[int], timeout: float) -> Assurance:
        """The assurance by the reply to `command` after `timeout` seconds. Raises Unavailable if it is too little."""
        disks, replicas = reply if isinstance(reply, list) else (0, reply)
        needed, where = self.needed(known), "on their disks" if self.fsync else "in their memory"
        if self.fsync and not disks:
            raise Unavailable(
                f"{subject}: its server did not get the grant onto its own disk within {timeout:.2g} s, and the "
                "grant was undone"
            )
        if replicas < needed:
            raise Unavailable(
                f"{subject}: acks={self.number!r} needs {needed} replicas with the grant {where}, but {replicas} had it"
                f" within {timeout:.2g} s, and the grant was undone. "
                + (
                    f"The server reported {known} replicas: attach more, or lower acks="
                    if known < needed
                    else "Are all of them connected, and fast enough?"
                )
            )
        return Assurance(1, replicas, disks)


def checked_acks(number: object, fsync: object) -> Acks | None:
    """The acks that the user asked for, checked; None if the user asked for none. Raises ConfigError."""
    if not isinstance(fsync, bool):
        raise ConfigError(f"fsync must be True or False, not {fsync!r}")
    is_valid_number = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_ACKS
    if number is not None and not is_valid_number and number not in ("majority", "all"):
        raise ConfigError(f'acks must be a number of replicas, "majority" or "all", not {number!r}')
    return Acks(number or 0, fsync) if number or fsync else None  # type: ignore[arg-type]
