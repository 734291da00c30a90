"""Slots of a cluster that have gone from one node to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock._quarantine.history import ServerHistory


class SlotMove:
    """Slots of a cluster have gone from one node to another."""

    __slots__ = ("at", "before", "here", "known", "least", "left")

    def __init__(self, left: ServerHistory, here: ServerHistory, at: float) -> None:
        self.left = left
        self.here = here
        self.before = left.latest  # the identity stamp under which they were served
        self.known = here.known
        self.at = at
        # The ttl (seconds) of leases that came whole from a node that is still the primary that it was; math.inf: it is
        # not; None: nobody has looked.
        self.least: float | None = None
