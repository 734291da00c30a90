"""The histories of all servers that one client knows, and the slots of a cluster that have moved between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock._quarantine.history import ServerHistory

if TYPE_CHECKING:
    from interlock._connect.address import Address
    from interlock._quarantine.slot_move import SlotMove


class Histories:
    """Those of one Interlock: of each address that it met, in all of its loops."""

    def __init__(self, wait: float | None) -> None:
        self.quarantine_seconds = wait
        self._by: dict[str, ServerHistory] = {}
        self.served: list[ServerHistory | None] = []  # by slot of a cluster: who served it when somebody last looked
        self.moves: dict[int, list[SlotMove]] = {}  # slots that have moved, and were not asked for since

    def of(self, address: Address, mark: str = " ") -> ServerHistory:
        """That of this address."""
        memory = self._by.setdefault(address.display_url, ServerHistory(self.quarantine_seconds, mark=mark))
        memory.address = address
        return memory
