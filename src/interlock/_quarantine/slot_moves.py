"""Slots of a cluster that move from node to node: what a move proves about the leases, for the history of the slot.

Theory. An identity belongs to a node, but a slot may move. The slot moved without loss if the old node is still the
primary that it was, and the client knew the new node before the move. Then the new node trusts records that the old
node wrote. In any other case, the leases that the old node granted may be lost.

Rule. The client notes each move that follows a noted one, too: the last one leads to the node that serves the slot. The
grants of a node that the client never met may be lost.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from interlock._quarantine.identity import identity_of
from interlock._quarantine.lossless import least_ttl, read_server
from interlock._quarantine.stamp import RETURNED, SlotHistory, lossless_entry, lossless_through

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.runtime import Runtime
    from interlock._quarantine.server_history import ServerHistory

CHECK_TIMEOUT: Final = 1.0  # seconds that a node may take to tell its identity and its clock


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


async def history_after(moves: Sequence[SlotMove], slot: int, runtime: Runtime, until: float) -> SlotHistory | None:
    """The history of a slot after these moves, in order; None if the client knows nothing of any server before."""
    slot_history: SlotHistory | None = None
    known = ""  # the identity of the source; if the client never met the source, that of the last server before it
    for move in moves:
        known = move.source_stamp.identity or known
        if known:
            slot_history = await _history_after(move, known, slot, slot_history, runtime, until)
    return slot_history


async def _history_after(
    move: SlotMove, old_identity: str, slot: int, slot_history: SlotHistory | None, runtime: Runtime, until: float
) -> SlotHistory:
    """The slot history after this move, which was `slot_history` before it; None: that of the source."""
    target = move.target.latest
    if not move.source_stamp.identity:
        # A proof about the last server that the client met says nothing of the grants of the source. And that server
        # may be the target again.
        old_identity, move.least_ttl = f"{RETURNED}{old_identity}", math.inf
    if (least := move.least_ttl) is None:
        within = min(CHECK_TIMEOUT, max(0.05, until - runtime.now()))
        least = move.least_ttl = await runtime.run_blocking(partial(_least_kept_ttl, move, within, old_identity))
    before = slot_history or move.source_stamp.slot_history(slot)
    if least < math.inf and move.target_identity and move.target_identity == target.identity:
        lossless_from = (lossless_entry(old_identity, least), *lossless_through(before.lossless_from, least))
        since = move.noticed_at if least else before.since  # shorter leases may have been lost by this move
        returned = RETURNED if before.previous == target.identity else ""  # what was lost was granted in between
        return SlotHistory(f"{returned}{before.previous}", since, lossless_from, before.earlier)
    before = before._replace(earlier=None)
    # A node that never was a replica: the slot has been there no longer than the process has been running.
    if least == 0 and target.facts is not None and not target.facts.promoted:
        return SlotHistory(old_identity, target.latest_start, (), before)
    # The client may notice a move long before it first sends a message about the slot. What the target lost
    # meanwhile may be younger than the move.
    since = move.noticed_at if target.facts is None else max(move.noticed_at, target.latest_start)
    return SlotHistory(old_identity, since, (), before)


def _least_kept_ttl(move: SlotMove, within: float, identity: str) -> float:
    """The ttl for `SlotMove.least_ttl`. Blocks, for about `within` seconds a server.

    A key that moved keeps the time at which its lease ends, by the clock of the old node. So the clocks must agree.
    """
    source, target = read_server(move.source.address, within), read_server(move.target.address, within)
    if source is None or target is None or source.info.get("role") != "master" or identity_of(source.info) != identity:
        return math.inf
    return least_ttl(target, source, move.target.address.display_url, move.source_stamp.quarantine_seconds)
