"""Whether a server of a quorum counts, by its voter record: for people who look, or who run `interlock quorum`.

A server of a quorum judges itself, in `primitives/voter.lua`, whenever a client calls it. Here stands what that script
would find now, in words. No decision of the protocol reads it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._quarantine.voter import VoterRecord, voter_key

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNREADABLE", "Standing", "State", "judge", "way_out"]

MAX_MS: Final = 2**53  # the largest time that Lua's numbers hold
UNREADABLE: Final = "?"  # in place of a record that the server does not give, or that is no text


class State(StrEnum):
    """What the script would find."""

    COUNTS = "counts"
    ABSTAINS = "abstains"
    NEW = "new"  # it has no record
    CHANGED = "changed"  # its record names another replid, or a time to come
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"  # it refuses INFO


class Standing(NamedTuple):
    """Whether a server counts, at the moment at which somebody looked."""

    state: State
    wait: float = 0.0
    """Seconds for which it abstains: from now on, or, if NEW or CHANGED, from the next call of a client on."""
    record: VoterRecord | None = None

    def sentence(self, wait: str) -> str:
        """The standing in words, with the server as the subject. `wait`: as the caller writes these seconds."""
        return {
            State.COUNTS: "counts",
            State.ABSTAINS: f"abstains for {wait} more, since it was started, emptied or given other data",
            State.NEW: f"has no voter record: it counts {wait} after a client first reaches it",
            State.CHANGED: "was restarted, promoted, given other data, or got its first replica: it counts "
            f"{wait} after a client next reaches it",
            State.UNREADABLE: "has a voter record that can't be read: a later version of interlock or another program "
            "has written its key, or this user has no right to it",
            State.UNKNOWN: "refuses INFO, so it can't judge itself",
        }[self.state]


def way_out(prefix: str) -> str:
    """What to do about a record that can't be read."""
    return f"Use that version's interlock; or delete the key {voter_key(prefix)}, after which this server abstains"


def judge(stored: str, info: Mapping[str, str], now_ms: int, max_ttl: float) -> Standing:
    """What a client with this max_ttl (seconds) would find. `info`: that of the server, `now_ms`: its clock."""
    replid = info.get("master_replid")
    if not replid:
        return Standing(State.UNKNOWN)
    if not stored:
        return Standing(State.NEW, max_ttl)
    record = VoterRecord.parse(stored)
    if record is None or max(record.since_ms, record.longest_ms) > MAX_MS:
        return Standing(State.UNREADABLE)
    wait_ms = max(record.longest_ms, max_ttl * 1000)
    if record.replid != replid or record.since_ms > now_ms:
        return Standing(State.CHANGED, wait_ms / 1000, record)
    left_ms = record.since_ms + wait_ms - now_ms
    return Standing(State.ABSTAINS, left_ms / 1000, record) if left_ms > 0 else Standing(State.COUNTS, 0.0, record)
