"""The server histories of one client, and the slots of a cluster that have moved between these servers."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from interlock._quarantine.member_history import MemberHistory
from interlock._quarantine.server_history import ServerHistory

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._connect.address import Address
    from interlock._quarantine.slot_moves import SlotMove


class Histories:
    """The server histories of one Interlock, one for each address, shared by all of its event loops."""

    def __init__(self, quarantine_seconds: float | None) -> None:
        self.quarantine_seconds = quarantine_seconds
        self._by_url: dict[str, ServerHistory] = {}
        self.served: list[ServerHistory | None] = []  # by slot of a cluster: the node that served the slot last
        self.moves: dict[int, list[SlotMove]] = {}  # by slot: its moves since the last message about the slot
        _histories.add(self)

    def of(self, address: Address) -> ServerHistory:
        """The history of the server at this address."""
        kind = MemberHistory if address.votes else ServerHistory
        history = self._by_url.setdefault(address.display_url, kind(self.quarantine_seconds))
        history.address = address
        return history

    def forget(self, is_meant: Callable[[Address], bool]) -> None:
        """Forget all servers at the addresses for which `is_meant` returns True. Only for the tests of users."""
        for history in list(self._by_url.values()):
            if is_meant(history.address):
                history.forget()


_histories: WeakSet[Histories] = WeakSet()  # of all Interlocks of this process


def forget_servers(is_meant: Callable[[Address], bool]) -> None:
    """Let every Interlock of this process forget the servers at these addresses: see `interlock.testing`."""
    for histories in list(_histories):
        histories.forget(is_meant)
