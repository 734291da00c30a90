"""What is in the server for a semaphore or a read-write lock: keys as permits.lua has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.commands import Hash, ZSet

from .subject import Reading, Share, Thing, read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from interlock._protocol.types import Argument, Resource
    from simulator.server import Server


class PermitThing(Thing):
    """Holders by the ends of their leases, what each has, and a record with the limit."""

    def __init__(self, primitive: Resource) -> None:
        super().__init__(primitive)
        self.limit = int(primitive.acquire_args[2])  # what everybody believes at first
        self._wants: dict[bytes, int] = {}

    def read(self, server: Server) -> Reading:
        """See Thing."""
        ends: dict[bytes, float] = server.find(self.key, ZSet) or {}
        shares: dict[bytes, bytes] = server.find(self.keys[5], Hash) or {}
        record: bytes | None = server.find(self.keys[1], bytes)
        limit = int(record.split()[6]) if record else self.limit
        now, holders = server.micros / 1000, dict[bytes, Share]()
        for token, end in ends.items():
            if end > now and token in shares:
                permits, fence, *_ = shares[token].split(b" ")
                holders[token] = Share(int(permits), int(fence), end, b" !" in shares[token])
        return read(holders, limit)

    def places(self, server: Server) -> Iterator[tuple[str, Collection[bytes]]]:
        """See Thing."""
        yield from super().places(server)
        yield "the shares", server.find(self.keys[5], Hash) or ()

    def asked(self, token: bytes, terms: Sequence[Argument]) -> None:
        """See Thing."""
        self._wants[token] = int(terms[1])

    def wants(self, token: bytes) -> int:
        """See Thing."""
        return self._wants[token]
