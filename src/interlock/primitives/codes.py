"""The reply codes of the scripts, the same in every .lua file, and the words with which replies begin."""

from __future__ import annotations

from typing import Final

GRANTED, QUEUED, BUSY, RETRY, NOT_FOUND, REVOKED, NO_EXPIRY, WRONG_KIND, LIMIT_MISMATCH, BROKEN, CROWDED = range(1, 12)
ABSTAINS: Final = 12
QUARANTINE: Final = b"!quarantine:"  # begins the value of a lock in quarantine; the evidence follows
# What people read in place of a kind: the key of another library, other data, a record of another version of interlock.
PLAIN, OTHER, NEWER = "plain key", "other data", "another version"


def free_text(rest: str) -> str:
    """Return the free text at the end of a stored text or a push.

    The mark " !" begins the free text; words of a later version may stand before the mark. An old version wrote the
    free text alone, without the mark.
    """
    _, mark, text = f" {rest}".partition(" !")
    return text if mark else rest
