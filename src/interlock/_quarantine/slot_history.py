"""How a slot of a cluster came to the node that serves it now."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class SlotHistory(NamedTuple):
    """How a slot of a cluster came to the node that serves it now."""

    previous: str
    """The identity under which it was served, if something may have been lost since then; else "-"."""
    since: float
    """When, by our clock: no lease of before is younger."""
    lossless_from: tuple[str, ...]
    """The identities of those from whom it came without loss: "<identity>" or "<identity>/<least ttl ms>"."""
    earlier: SlotHistory | None = None
    """How it came to the former: that counts once it is proven that nothing was lost since."""


def lossless_entry(identity: str, least: float) -> str:
    """What is said of an identity from which leases with this ttl (seconds) or a longer one came without loss."""
    return f"{identity}/{math.ceil(least * 1000)}" if least else identity


def lossless_through(fine: Iterable[str], least: float) -> list[str]:
    """What is said of these one step further, to which leases came with this ttl (seconds) or a longer one."""
    parts = [each.partition("/") for each in fine]
    return [lossless_entry(identity, least + int(ms or 0) / 1000) for identity, _, ms in parts]
