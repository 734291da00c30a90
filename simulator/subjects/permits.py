"""The model of a semaphore or a read-write lock: it reads keys as permits.lua stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.commands import Hash, ZSet

from .subject import Reading, ResourceModel, Share, reading_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from interlock._protocol.resource import Argument, Resource
    from simulator.server import Server


class PermitsModel(ResourceModel):
    """Reads the holders with the ends of their leases, the share of each holder, and a record with the limit."""

    def __init__(self, primitive: Resource) -> None:
        super().__init__(primitive)
        self.limit = int(primitive.acquire_args[2])  # the limit that all clients give at first
        self._permits_wanted: dict[bytes, int] = {}

    def read(self, server: Server) -> Reading:
        """See ResourceModel."""
        ends: dict[bytes, float] = server.find(self.key, ZSet) or {}
        shares: dict[bytes, bytes] = server.find(self.keys[5], Hash) or {}
        record: bytes | None = server.find(self.keys[1], bytes)
        limit = int(record.split()[6]) if record else self.limit
        now, holders = server.micros / 1000, dict[bytes, Share]()
        for token, end in ends.items():
            if end > now and token in shares:
                permits, fence, *_ = shares[token].split(b" ")
                holders[token] = Share(int(permits), int(fence), end, b" !" in shares[token])
        return reading_of(holders, limit)

    def token_stores(self, server: Server) -> Iterator[tuple[str, Collection[bytes]]]:
        """See ResourceModel."""
        yield from super().token_stores(server)
        yield "the shares", server.find(self.keys[5], Hash) or ()

    def note_attempt(self, token: bytes, acquire_args: Sequence[Argument]) -> None:
        """See ResourceModel."""
        self._permits_wanted[token] = int(acquire_args[1])

    def permits_wanted(self, token: bytes) -> int:
        """See ResourceModel."""
        return self._permits_wanted[token]
