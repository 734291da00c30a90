"""Which kind of synchronizer uses a name, for people who know the name alone. kind.lua answers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.names import keys_of
from interlock._protocol.resource import Resource
from interlock._protocol.tokens import Token
from interlock.primitives.codes import NEWER, OTHER, PLAIN, QUARANTINE
from interlock.primitives.kinds import KINDS, kind_named
from interlock.primitives.lock import RECORD_VERSION
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.primitives.messages import Raw, Words
    from interlock.primitives.votes import Votes

COMPANIONS: Final = ("record", "done", "plain-record")
_PERMIT_WORDS: Final = 7  # of a record without a kind that permits.lua has stored


def kind_resource(name: object, prefix: str) -> Resource:
    """Make the resource that asks for the kind of this name. Raises ConfigError."""
    checked, keys = keys_of(name, prefix, COMPANIONS)
    return Resource("name", checked, load("kind"), keys)


class KindCall(NamedTuple):
    """Asks which kind of synchronizer uses a name."""

    what: str = "-"

    def encode(self) -> Words:
        """See Call."""
        return ("kind", self.what)

    @classmethod
    def parse(cls, args: Raw) -> KindCall:
        """Parse an encoded call."""
        return cls(args[1])


class KindReply(NamedTuple):
    """What the server has under a name."""

    record: bytes
    value: bytes
    """The value of the key, if that is a text."""
    is_other_type: int
    note: bytes
    plain_record: bytes
    now_us: bytes
    """The server's time, in µs since 1970."""

    def encode(self) -> Raw:
        """See Reply."""
        return list(self)

    @classmethod
    def parse(cls, reply: Raw) -> KindReply:
        """Parse the reply that the script returned."""
        return cls(*reply)

    @property
    def kind(self) -> str | None:
        """The kind: one of `KINDS`, PLAIN, OTHER or NEWER; None if there is nothing."""
        if self.record:
            words = self.record.decode(errors="replace").split()
            version, kind = [*words, "", ""][:2]
            if version == RECORD_VERSION and kind == "unknown":  # a quarantine stored it where no record was
                return "semaphore" if len(words) == _PERMIT_WORDS else "lock"
            return kind if version == RECORD_VERSION and kind in KINDS else NEWER
        if self.value:
            token = Token.parse(self.value.decode(errors="replace").removeprefix("!"))
            is_ours = token is not None or self.value.startswith(QUARANTINE)
            return "lock" if is_ours else PLAIN
        if self.is_other_type:
            return OTHER
        return "once" if self.note else None

    @property
    def plain_holder(self) -> str | None:
        """The token of the attempt of ours that has the plain key, if one of ours has it."""
        words, mark, value = self.plain_record.partition(b" !")
        attempt = words.split(b" ")
        is_ours = mark and value == self.value and len(attempt) > 2
        return attempt[2].decode(errors="replace") if is_ours else None


def resource_of(kind: str, name: str, prefix: str) -> Resource:
    """Make the resource of a name of this kind, to inspect it: of a plain key, that of a lock. Raises ConfigError."""
    return kind_named(kind).make(name, prefix)


def merge_kind(votes: Votes[KindCall, KindReply]) -> KindReply | None:
    """Merge the replies of a quorum: the kind that most servers know, since a server may have missed the name."""
    if votes.pending:
        return None
    known: Sequence[KindReply] = [vote for vote in votes.replies if vote.kind is not None] or votes.replies
    kind, _ = Counter(vote.kind for vote in known).most_common(1)[0]
    return next(vote for vote in known if vote.kind == kind)
