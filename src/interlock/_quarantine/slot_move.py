"""A move of slots of a cluster from one node to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock._quarantine.history import ServerHistory


class SlotMove:
    """Slots of a cluster have moved from the node `left` to the node `here`."""

    __slots__ = ("at", "before", "here", "known", "least", "left")

    def __init__(self, left: ServerHistory, here: ServerHistory, at: float) -> None:
        self.left = left
        self.here = here
        self.before = left.latest  # the identity stamp under which the old node served the slots
        self.known = here.known  # the new node's identity that the client met before it asked for the map; "" if none
        self.at = at  # when the client noticed the move, by its own clock
        # Leases with this ttl (seconds) or a longer one moved without loss, since the old node is still the primary
        # that it was. math.inf: leases of any ttl may have been lost. None: the client has not checked yet.
        self.least: float | None = None
