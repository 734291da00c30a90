"""The identity stamp: a text that the client sends with every message, so that the scripts know the server's past."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._protocol.timing import now
from interlock._quarantine.identity import IDENTITY_LENGTH, Facts
from interlock._quarantine.slot_history import SlotHistory, lossless_entry, lossless_through

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_IDENTITIES: Final = 12  # identities in `lossless_from`: servers before these no longer matter


class IdentityStamp:
    """The stamp for the messages to a server under one identity, and the facts from which the text is made."""

    __slots__ = (
        "_texts",
        "earlier",
        "facts",
        "isolation_grace",
        "lossless_from",
        "mark",
        "met_at",
        "previous",
        "quarantine_seconds",
        "since",
        "slot_histories",
        "text",
    )

    def __init__(
        self,
        facts: Facts | None,
        quarantine_seconds: float | None,
        previous: str,
        mark: str,
        isolation_grace: float = 0.0,
    ) -> None:
        self.facts = facts
        # Seconds of quarantine, the isolation grace included; None: there is no quarantine.
        self.quarantine_seconds = None if quarantine_seconds is None else quarantine_seconds + isolation_grace
        # Seconds for which the old primary may still grant.
        self.isolation_grace = 0.0 if quarantine_seconds is None else isolation_grace
        self.previous = previous
        self.mark = mark
        self.lossless_from: list[str] = []
        self.earlier: Mapping[str, IdentityStamp] = {}  # the stamps that the client knew here, by identity
        self.met_at = now()
        self.slot_histories: dict[int, SlotHistory] = {}  # by slot: only slots that moved here from another node
        self._texts: dict[int, str] = {}
        self.since = 0
        if facts is not None:
            self.since = facts.now_ms - (0 if facts.promoted else int(max(0, facts.uptime - 1) * 1000))
            if not facts.promoted:
                self.lossless_from.append(facts.run_id[:IDENTITY_LENGTH] + ":")
        self.text = ""
        self.render()

    @property
    def identity(self) -> str:
        """The identity of the server; "" if the server does not report one."""
        return self.facts.identity if self.facts else ""

    def history(self) -> str:
        """The end of the text: the identity that the client knew before, and the identities in `lossless_from`."""
        return " ".join([self.previous, *self.lossless_from])

    @property
    def began(self) -> float:
        """The latest time at which this identity can have begun, by the client's clock."""
        assert self.facts is not None
        return self.met_at - (self.facts.now_ms - self.since) / 1000

    @property
    def in_quarantine(self) -> bool:
        """Whether leases granted by an earlier server may still be alive, without a proof that none was lost."""
        if self.facts is None or self.quarantine_seconds is None or self.previous == "-":
            return False
        return now() < self.began + self.quarantine_seconds

    def old_primary(self, slot: int = -1) -> str:
        """The identity of the old primary while it may still grant beside this server; "" if none may."""
        if not self.isolation_grace:
            return ""
        former, at, *_ = self.slot_history(slot)
        return former if former != "-" and now() < at + self.isolation_grace else ""

    def slot_history(self, slot: int) -> SlotHistory:
        """The history of a slot at this server. A slot that never moved has the history of the server itself."""
        former, at, more, behind = self.slot_histories.get(slot) or SlotHistory(self.previous, self.began, ())
        lossless_from = [*self.lossless_from, *more]
        while (
            proof := next((each for each in lossless_from if former.startswith(each.partition("/")[0])), None)
        ) is not None:
            if behind is None:
                former = "-"
                break
            former, at, more, behind = behind
            lossless_from += lossless_through(more, int(proof.partition("/")[2] or 0) / 1000)
        return SlotHistory(former, at, tuple(dict.fromkeys(lossless_from)), behind)

    def set_slot_history(self, slot: int, slot_history: SlotHistory) -> None:
        """Store how this slot came to this server."""
        self.slot_histories[slot] = slot_history
        self._texts.pop(slot, None)

    def text_for(self, slot: int) -> str:
        """The text for messages about a slot."""
        if slot not in self.slot_histories or self.facts is None or self.quarantine_seconds is None:
            return self.text
        text = self._texts.get(slot)
        if text is None:
            former, at, lossless_from, _ = self.slot_history(slot)
            since = self.facts.now_ms + int((at - self.met_at) * 1000)
            history = " ".join([former, *lossless_from[:MAX_IDENTITIES]])
            text = self._texts[slot] = (
                f"{self.identity}{self.mark}{since} {int(self.quarantine_seconds * 1000)} {history}"
            )
        return text

    def render(self) -> None:
        """Build the text again, after a change of the history."""
        self._texts.clear()
        if self.facts is None or self.quarantine_seconds is None:
            self.text = self.mark.strip()
        else:
            self.text = f"{self.identity}{self.mark}{self.since} {int(self.quarantine_seconds * 1000)} {self.history()}"

    def mark_untrusted(self) -> None:
        """Note evidence that an unknown server may have been here before, and may have granted leases."""
        if self.facts is not None and self.previous == "-":
            self.previous = "?"
            self.render()

    def mark_lossless(self, identity: str, least: float = 0.0) -> None:
        """Note a proof: no lease with a ttl of `least` seconds or more was lost between that identity and this one."""
        if all(each.partition("/")[0] != identity for each in self.lossless_from):
            before = self.earlier.get(identity)
            self.lossless_from += [
                lossless_entry(identity, least),
                *lossless_through(before.lossless_from if before else (), least),
            ]
            del self.lossless_from[MAX_IDENTITIES:]
        if any(self.previous.startswith(each.partition("/")[0]) for each in self.lossless_from):
            self.previous = "-"
        self.render()
