"""The audit of revocations: its entries, and what they say together. audit.lua stores them.

On a quorum each server that answers has the entries, with times of its own clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.resource import Resource
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock.primitives.messages import DoneReply, Raw, Words
    from interlock.primitives.votes import Votes

AUDIT_KEY: Final = "{interlock:audit}"
AUDIT: Final = Resource("audit", "revocations", load("audit"), (AUDIT_KEY,))  # as its errors name it
ASKED: Final = "asked"  # the step before the server changes anything
MAX_TOKENS: Final = 20  # of the holders that one entry names
PAGE: Final = 200  # entries in one reply


class NoteCall(NamedTuple):
    """Stores one step of a revocation."""

    operation: str
    step: str
    fields: tuple[str, ...] = ()
    """Names and values, by turns."""

    def encode(self) -> Words:
        """See Call."""
        return ("note", self.operation, self.step, *self.fields)

    @classmethod
    def parse(cls, args: Raw) -> NoteCall:
        """Parse an encoded call."""
        return cls(args[1], args[2], tuple(args[3:]))


class NotedCall(NamedTuple):
    """Asks for the newest entries before one of them."""

    before: str = "+"
    most: str = str(PAGE)

    def encode(self) -> Words:
        """See Call."""
        return ("noted", *self)

    @classmethod
    def parse(cls, args: Raw) -> NotedCall:
        """Parse an encoded call."""
        return cls(*args[1:])


class NotedReply(NamedTuple):
    """Entries, the newest first: id, field, value, field, value, ..."""

    entries: Sequence[Raw]

    def encode(self) -> Raw:
        """See Reply."""
        return list(self.entries)

    @classmethod
    def parse(cls, reply: Raw) -> NotedReply:
        """Parse the reply that the script returned."""
        return cls(reply)

    @property
    def oldest(self) -> str:
        """The argument `before` of the next call."""
        return f"({self.entries[-1][0].decode()}"


@dataclass(frozen=True)
class Revocation:
    """One revocation that somebody tried."""

    at: datetime
    """When, by the server's clock."""
    name: str
    key: str
    kind: str
    by: str
    """Who: host/pid/thread or task, with the label before the host; "<person> via <that>" if a web page asked."""
    reason: str
    forced: bool
    holders: tuple[str, ...]
    """The tokens of the holders, the first twenty."""
    holding: int
    """How many holders there were."""
    result: str | None
    """The last step: "revoked", "nothing: ..." or "unknown: ...". None: the process has noted only that it asked, and
    may or may not have revoked."""


def fold_entries(entries: Iterable[Raw]) -> list[Revocation]:
    """Make revocations of their entries, the newest first. Leaves out entries that this version can't read."""
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        number, *words = (word.decode(errors="replace") for word in entry)
        fields = dict(zip(words[::2], words[1::2], strict=False))
        operation, step = fields.pop("operation", ""), fields.pop("step", "")
        seen = found.setdefault(operation, {})
        if step == ASKED:
            seen |= fields | {"id": number}  # of equal entries, the oldest counts
        else:
            seen.setdefault("result", step)  # of several results, the newest counts
    asked = [revocation for fields in found.values() if "id" in fields and (revocation := _revocation(fields))]
    return sorted(asked, key=lambda each: each.at, reverse=True)


def _revocation(fields: dict[str, str]) -> Revocation | None:
    milliseconds, _, _ = fields["id"].partition("-")
    try:
        return Revocation(
            datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(milliseconds)),
            fields["name"],
            fields["key"],
            fields["kind"],
            fields["by"],
            fields["reason"],
            fields["forced"] == "1",
            tuple(fields["holders"].split()),
            int(fields["holding"]),
            fields.get("result"),
        )
    except (KeyError, ValueError, OverflowError):
        return None


def merge_note(votes: Votes[NoteCall, DoneReply]) -> DoneReply | None:
    """Merge the replies of a quorum: each server that answers has stored the entry."""
    return None if votes.pending else votes.replies[0]


def merge_noted(votes: Votes[NotedCall, NotedReply]) -> NotedReply | None:
    """Merge the replies of a quorum: the newest entries of all servers, in one list."""
    if votes.pending:
        return None
    entries = [entry for vote in votes.replies for entry in vote.entries]
    return NotedReply(sorted(entries, key=_id_of, reverse=True)[: int(votes.call.most)])


def _id_of(entry: Raw) -> tuple[int, int]:
    milliseconds, _, number = entry[0].partition(b"-")
    return int(milliseconds), int(number)
