"""The 16,384 slots of a cluster: the slot of a key, and a hash tag for each slot."""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache
from itertools import count
from typing import Final

SLOTS: Final = 16384


@lru_cache(maxsize=1 << 16)
def slot_of(key: str | bytes) -> int:
    """The slot of a key, computed from the hash tag if the key has one, else from the whole key."""
    text = key.encode() if isinstance(key, str) else key
    start = text.find(b"{")
    if start >= 0 and (end := text.find(b"}", start + 1)) > start + 1:
        text = text[start + 1 : end]
    return crc_hqx(text, 0) % SLOTS


_tags: dict[int, str] = {}  # a hash tag for each slot that `tag_of` has passed so far
_numbers = count()


def tag_of(slot: int) -> str:
    """A hash tag that belongs to this slot."""
    while slot not in _tags:
        number = str(next(_numbers))
        _tags.setdefault(slot_of.__wrapped__(number), number)
    return _tags[slot]
