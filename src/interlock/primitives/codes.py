"""The reply codes of the scripts, the same in every .lua file, and the words that replies begin with."""

from __future__ import annotations

from typing import Final

# Reply codes, the same in every .lua file.
GRANTED, QUEUED, BUSY, RETRY, NOT_FOUND, REVOKED, NO_EXPIRY, WRONG_KIND, LIMIT_MISMATCH, BROKEN = range(1, 11)
QUARANTINE: Final = b"!quarantine:"  # what holds a lock whose server may have lost a lease; the evidence follows


def free_text(rest: str) -> str:
    """The free text that ends a stored text or a push: it begins with " !", after words of a later version, if any.

    A version before the mark wrote nothing but the free text there.
    """
    _, mark, text = f" {rest}".partition(" !")
    return text if mark else rest
