"""How a slot of a cluster came to the node that serves it now."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


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
