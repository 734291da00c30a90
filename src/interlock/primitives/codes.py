"""The reply codes of the scripts, the same in every .lua file, and the words that replies begin with."""

from __future__ import annotations

from typing import Any, Final

# Reply codes, the same in every .lua file.
GRANTED, QUEUED, BUSY, RETRY, NOT_FOUND, REVOKED, NO_EXPIRY, WRONG_KIND, LIMIT_MISMATCH, BROKEN = range(1, 11)
QUARANTINE: Final = b"!quarantine:"  # what holds a lock whose server may have lost a lease; the evidence follows


def free_text(rest: str) -> str:
    """The free text that ends a stored text or a push: it begins with " !", after words of a later version, if any.

    A version before the mark wrote nothing but the free text there.
    """
    _, mark, text = f" {rest}".partition(" !")
    return text if mark else rest


def reason_lost(state: Any) -> str | None:
    """Why a renewal's answer means that the lease is lost; None if it holds."""
    if state == GRANTED:
        return None
    if state != NOT_FOUND:
        return f"it was revoked: {state[1].decode(errors='replace')}"
    return "the server has no such lease any more: it was revoked by force, or the server lost it"


def quarantine_evidence(reply: Any) -> str | None:
    """The evidence, if a refusal is for a quarantine: the identity of the server that granted last."""
    holder = reply[1] if reply[0] in {QUEUED, BUSY} else None
    if isinstance(holder, bytes) and holder.startswith(QUARANTINE):
        return holder.removeprefix(QUARANTINE).partition(b">")[0].decode(errors="replace")
    return None
