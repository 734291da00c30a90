"""The task that looks from time to time at what a session holds and waits for: for other people, and for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.primitives.registry import REPORT_INTERVAL

if TYPE_CHECKING:
    from interlock._people.long_waits import LongWaits
    from interlock._people.registry import Registry


class Looks:
    """The looks of one session. `Registry.look` says when the next is due."""

    def __init__(self, registry: Registry, long_waits: LongWaits) -> None:
        self.registry = registry
        self.long_waits = long_waits

    def due(self) -> float:
        """When the worker must run this task."""
        return self.registry.next_look

    async def tick(self) -> None:
        """Report what this session holds and waits for, and log its long waits."""
        waits = await self.registry.report()
        if waits is not None:
            await self.long_waits.look(waits, REPORT_INTERVAL)
