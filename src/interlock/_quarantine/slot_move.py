"""A move of slots of a cluster from one node to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock._quarantine.history import ServerHistory


class SlotMove:
    """Slots of a cluster have moved from the node `source` to the node `target`."""

    __slots__ = ("least_ttl", "noticed_at", "source", "source_stamp", "target", "target_identity")

    def __init__(self, source: ServerHistory, target: ServerHistory, noticed_at: float) -> None:
        self.source = source
        self.target = target
        self.source_stamp = source.latest  # the identity stamp under which the source served the slots
        # The identity of the target that the client knew when it asked for the map; "" if none.
        self.target_identity = target.identity_at_map
        self.noticed_at = noticed_at  # when the client noticed the move, by its own clock
        # Leases with this ttl (seconds) or a longer one moved without loss, since the source is still the primary that
        # it was. math.inf: leases of any ttl may have been lost. None: the client has not checked yet.
        self.least_ttl: float | None = None
