"""The voter record of a server of a quorum: its own evidence of how long it has served without a loss (ADR 60).

`primitives/voter.lua` judges by it and writes it. On this side stand its key, and its text for those who show it or
write it on a person's word (`interlock quorum`) or for a test.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from interlock._protocol.names import tagged

VERSION: Final = "1"
RECORD_TTL: Final = 90 * 86_400.0  # seconds; calls renew it


def voter_stem(prefix: str) -> str:
    """What this prefix shares with others that have the same voter record: a hash tag may begin in it."""
    return re.sub(r"\{[^{}]*$", "", prefix)


def voter_key(prefix: str) -> str:
    """The key of the voter record: one for each stem, in a form that no name's key has, and that ACL lines allow."""
    head, tail = tagged(voter_stem(prefix))
    return f"{head}voter{tail}"


class VoterRecord(NamedTuple):
    """What a server of a quorum knows of itself."""

    replid: str
    """The replid under which it has served."""
    since_ms: int
    """Since when, ms, by its own clock."""
    longest_ms: int
    """The longest max_ttl of all clients since then, ms: it counts again so long after `since_ms`."""

    def encode(self) -> str:
        """The text in the server."""
        return f"{VERSION} {self.replid} {self.since_ms} {self.longest_ms}"

    @classmethod
    def parse(cls, text: str) -> VoterRecord | None:
        """The record of this text; None if another version, or somebody else, has written it."""
        words = text.split(" ")
        if len(words) < 4 or words[0] != VERSION or not (words[2].isdecimal() and words[3].isdecimal()):
            return None
        return cls(words[1], int(words[2]), int(words[3]))
