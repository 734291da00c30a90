"""The identity stamp: a text that the client sends with every message, so that the scripts know the server's past."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from interlock._protocol.timing import now
from interlock._quarantine.identity import IDENTITY_LENGTH, Facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RETURNED: Final = "@"  # begins `previous` if what was lost was granted after that identity: it may be this server's
SPARE: Final = "@@"  # begins `previous` if that identity may have granted until the client met this server, its spare
MAX_IDENTITIES: Final = 12  # identities in `lossless_from`: leases of still earlier servers have run out


class SlotHistory(NamedTuple):
    """How a slot of a cluster came to the node that serves it now."""

    previous: str
    """The identity that served the slot before, if leases may have been lost since then; else "-"."""
    since: float
    """When the slot came here, by the client's clock: no lease of the previous identity is younger."""
    lossless_from: tuple[str, ...]
    """The identities from which the slot came without loss: "<identity>" or "<identity>/<least ttl ms>"."""
    earlier: SlotHistory | None = None
    """The slot history of the previous identity: used once a proof shows that no lease was lost since."""


def lossless_entry(identity: str, least_ttl: float) -> str:
    """The entry for an identity from which leases with a ttl of `least_ttl` seconds or more came without loss."""
    return f"{identity}/{math.ceil(least_ttl * 1000)}" if least_ttl else identity


def lossless_through(entries: Iterable[str], least_ttl: float) -> list[str]:
    """These entries after one more move, which leases with a ttl of `least_ttl` seconds or more survived."""
    parts = [each.partition("/") for each in entries]
    return [lossless_entry(identity, least_ttl + int(ms or 0) / 1000) for identity, _, ms in parts]


class IdentityStamp:
    """The stamp for the messages to a server under one identity, and the facts from which the text is made."""

    __slots__ = (
        "_texts",
        "answered_at",
        "earlier_stamps",
        "epoch",
        "facts",
        "isolation_grace",
        "lossless_from",
        "met_at",
        "predecessor",
        "previous",
        "quarantine_seconds",
        "since_ms",
        "slot_histories",
        "text",
    )

    def __init__(
        self,
        facts: Facts | None,
        quarantine_seconds: float | None,
        previous: str,
        isolation_grace: float = 0.0,
    ) -> None:
        self.facts = facts
        # Seconds of quarantine, the isolation grace included; None: there is no quarantine.
        self.quarantine_seconds = None if quarantine_seconds is None else quarantine_seconds + isolation_grace
        # Seconds for which the old primary may still grant.
        self.isolation_grace = 0.0 if quarantine_seconds is None else isolation_grace
        self.previous = previous
        self.epoch: int | None = None  # under which the sentinels named the server last; None if none did
        self.lossless_from: list[str] = []
        self.earlier_stamps: Mapping[str, IdentityStamp] = {}  # the stamps of earlier servers here, by identity
        self.predecessor = ""  # the identity before this one, if a quarantine of that one goes on here
        self.met_at = now()  # when the client first read this identity in a handshake
        # When the client last read anything from this server, over any of its connections: the transports write this.
        self.answered_at = self.met_at
        self.slot_histories: dict[int, SlotHistory] = {}  # by slot: only slots that moved here from another node
        self._texts: dict[int, str] = {}
        self.since_ms = 0  # by the server's clock: this identity began no later
        if facts is not None:
            self.since_ms = facts.now_ms - (0 if facts.promoted else int(facts.least_age * 1000))
            if not facts.promoted:
                self.lossless_from.append(facts.run_id[:IDENTITY_LENGTH] + ":")
        self.text = ""
        self.render()

    @property
    def identity(self) -> str:
        """The identity of the server; "" if the server does not report one."""
        return self.facts.identity if self.facts else ""

    @property
    def latest_start(self) -> float:
        """The latest time at which this identity can have begun, by the client's clock."""
        assert self.facts is not None
        return self.met_at - (self.facts.now_ms - self.since_ms) / 1000

    @property
    def process_start(self) -> tuple[float, float]:
        """The earliest and the latest time at which the server's process can have started, to within a second.

        By the client's clock: the client can't know when the server wrote its uptime, only when it asked, and when it
        read the reply.
        """
        assert self.facts is not None
        return min(self.facts.sent_at, self.met_at) - self.facts.uptime, self.met_at - self.facts.uptime

    def is_of_process(self, earlier: IdentityStamp) -> bool:
        """Whether the same process had an earlier identity: its first replica changes its replid."""
        return self.facts is not None and earlier.facts is not None and self.facts.run_id == earlier.facts.run_id

    def may_be_older_than(self, earlier: IdentityStamp) -> bool:
        """Whether the process may have started before the client last read something from another, earlier one."""
        earliest_start, _ = self.process_start
        return earliest_start - 1 < earlier.answered_at and not self.is_of_process(earlier)

    @property
    def in_quarantine(self) -> bool:
        """Whether leases granted by an earlier server may still be alive, without a proof that none was lost."""
        if self.facts is None or self.quarantine_seconds is None or self.previous == "-":
            return False
        return now() < self.latest_start + self.quarantine_seconds

    def old_primary(self, slot: int = -1) -> str:
        """The identity of the old primary while it may still grant beside this server; "" if none may."""
        if not self.isolation_grace:
            return ""
        previous, since, *_ = self.slot_history(slot)
        return previous if previous != "-" and now() < since + self.isolation_grace else ""

    def slot_history(self, slot: int) -> SlotHistory:
        """The history of a slot at this server. A slot that never moved has the history of the server itself."""
        previous, since, moved_lossless, earlier = self.slot_histories.get(slot) or SlotHistory(
            self.previous, self.latest_start, ()
        )
        lossless_from = [*self.lossless_from, *moved_lossless]
        while (
            proof := next((each for each in lossless_from if previous.startswith(each.partition("/")[0])), None)
        ) is not None:
            if earlier is None:
                previous = "-"
                break
            least_ttl = int(proof.partition("/")[2] or 0) / 1000
            previous, earlier_since, moved_lossless, earlier = earlier
            if not least_ttl:  # else shorter leases may have been lost since then
                since = earlier_since
            lossless_from += lossless_through(moved_lossless, least_ttl)
        return SlotHistory(previous, since, tuple(dict.fromkeys(lossless_from)), earlier)

    def set_slot_history(self, slot: int, slot_history: SlotHistory) -> None:
        """Store how this slot came to this server."""
        self.slot_histories[slot] = slot_history
        self._texts = {}  # a new dict: text_for() in another thread may still write into the old one

    def text_for(self, slot: int) -> str:
        """The text for messages about a slot."""
        if slot not in self.slot_histories or self.facts is None or self.quarantine_seconds is None:
            return self.text
        texts = self._texts  # read before the history
        text = texts.get(slot)
        if text is None:
            previous, since, lossless_from, _ = self.slot_history(slot)
            text = texts[slot] = self._format(self._server_ms(since), previous, lossless_from[:MAX_IDENTITIES])
        return text

    def _server_ms(self, since: float) -> int:
        """A time of the client's clock, by the server's clock."""
        assert self.facts is not None
        return self.facts.now_ms + int((since - self.met_at) * 1000)

    def render(self) -> None:
        """Build the text again, after a change of the history."""
        self._texts = {}
        if self.facts is None or self.quarantine_seconds is None:
            self.text = ""
        else:
            self.text = self._format(self.since_ms, self.previous, self.lossless_from)

    def _format(self, since_ms: int, previous: str, lossless_from: Sequence[str]) -> str:
        """The text, in the layout that message.lua describes beside STAMP."""
        assert self.quarantine_seconds is not None
        grace_ms = int(self.isolation_grace * 1000)
        wait_ms = int(self.quarantine_seconds * 1000) - grace_ms
        mark = "*" if previous.startswith(RETURNED) and not previous.startswith(SPARE) else " "
        return " ".join([f"{self.identity}{mark}{since_ms} {wait_ms} {grace_ms} {previous}", *lossless_from])

    def mark_untrusted(self) -> None:
        """Note evidence that an unknown server may have been here before, and may have granted leases."""
        if self.previous == "-":
            self.previous = "?"
            self.render()

    def mark_spare(self) -> None:
        """Note that the server may have run beside the one before, which then granted until the client met this one."""
        assert self.facts is not None
        self.previous, self.since_ms = f"{SPARE}{self.previous.lstrip(RETURNED)}", self.facts.now_ms

    def mark_lossless(self, identity: str, least_ttl: float = 0.0) -> None:
        """Note a proof: this server has every lease that was granted under `identity`.

        Or, if `least_ttl` is not 0, every such lease whose ttl is at least that many seconds.
        """
        if all(each.partition("/")[0] != identity for each in self.lossless_from):
            earlier = self.earlier_stamps.get(identity)
            self.lossless_from += [
                lossless_entry(identity, least_ttl),
                *lossless_through(earlier.lossless_from if earlier else (), least_ttl),
            ]
            del self.lossless_from[MAX_IDENTITIES:]
            if identity == self.predecessor and earlier is not None and not least_ttl:
                self.since_ms = min(self.since_ms, self._server_ms(earlier.latest_start))
        if any(self.previous.startswith(each.partition("/")[0]) for each in self.lossless_from):
            self.previous = "-"
        self.render()
