"""Grants that replicas have acknowledged, or disks: what is asked for, and what a lease rests on.

A grant of one server is in its memory only: if that dies before a replica has the grant, a failover forgets it, and the
quarantine makes good for that. Who would rather not rely on it asks that a grant counts only once others have it (WAIT,
WAITAOF). Unlike elsewhere all that were asked for must acknowledge; if they don't in time, the grant is undone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from interlock.errors import ConfigError, Unavailable

MAX_ACKS: Final = 1000
ACK_TIMEOUT: Final = 1.0  # seconds that replicas may take, at the most; and a third of the ttl
FSYNC_TIMEOUT: Final = 3.0  # seconds that disks may: most are written to once a second (appendfsync everysec)


class Assurance(NamedTuple):
    """What a lease rested on when it was granted."""

    servers: int = 1
    """That granted it: one, or a majority of a quorum."""
    replicas: int = 0
    """That had it (with fsync: on their disks) before it counted."""
    disks: int = 0
    """1 if it was on the disk of the server that granted it."""


class Acks(NamedTuple):
    """How many replicas must have a grant: a number, "majority" (of server and replicas), or "all"; and their disks?"""

    number: int | str
    fsync: bool

    def needed(self, known: int) -> int:
        """Of so many replicas."""
        if self.number == "all":
            return max(1, known)
        if self.number == "majority":
            return max(1, (known + 1) // 2)
        return int(self.number)

    def timeout(self, ttl: float) -> float:
        """Seconds that replicas may take for a lease of so many."""
        return min(FSYNC_TIMEOUT if self.fsync else ACK_TIMEOUT, ttl / 3)

    def command(self, known: int, timeout: float) -> tuple[str, ...]:
        """What waits for them, on the connection of the grant, for so many seconds."""
        needed, ms = str(self.needed(known)), str(max(1, int(timeout * 1000)))
        return ("WAITAOF", "1", needed, ms) if self.fsync else ("WAIT", needed, ms)

    def checked(self, subject: object, known: int, reply: int | list[int], timeout: float) -> Assurance:
        """What the reply to that command, after so many seconds, is worth. Raises Unavailable if it is too little."""
        disks, replicas = reply if isinstance(reply, list) else (0, reply)
        needed, where = self.needed(known), "on their disks" if self.fsync else "in their memory"
        if self.fsync and not disks:
            raise Unavailable(
                f"{subject}: its server did not get the grant onto its own disk within {timeout:.2g} s; it was undone"
            )
        if replicas < needed:
            raise Unavailable(
                f"{subject}: only {replicas} of {needed} replicas (acks={self.number!r}) had the grant {where} within "
                f"{timeout:.2g} s; it was undone. "
                + (
                    f"Its server was seen with no more than {known}: attach more, or ask for fewer"
                    if known < needed
                    else "Are they all there, and near?"
                )
            )
        return Assurance(1, replicas, disks)


def checked_acks(number: object, fsync: object) -> Acks | None:
    """What was asked for; None is nothing. Raises ConfigError."""
    if not isinstance(fsync, bool):
        raise ConfigError(f"fsync must be True or False, not {fsync!r}")
    whole = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_ACKS
    if number is not None and not whole and number not in ("majority", "all"):
        raise ConfigError(f'acks must be a number of replicas, "majority" or "all", not {number!r}')
    return Acks(number or 0, fsync) if number or fsync else None  # type: ignore[arg-type]
