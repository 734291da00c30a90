"""The lock: one holder at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from interlock.primitives.lock import lock_resource
from simulator.usage import Usage, draw_usage

from .subject import Reading, ResourceModel, Share, Subject, reading_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

    from interlock import aio
    from interlock._protocol.resource import Argument, Resource
    from simulator.server import Server

    from .seen import Worker


class LockModel(ResourceModel):
    """Reads keys as lock.lua stores them: the holder as a string, and a record with the fence."""

    def __init__(self, primitive: Resource) -> None:
        super().__init__(primitive)
        self._owners: dict[bytes, bytes] = {}

    def read(self, server: Server) -> Reading:
        """See ResourceModel."""
        value: bytes | None = server.find(self.key, bytes)
        if value is None:
            return reading_of({}, 1)
        record: bytes | None = server.find(self.keys[1], bytes)
        fence = int(record.split()[2]) if record else 0
        share = Share(1, fence, server.expires.get(self.key, server.now_ms), revoked=value.startswith(b"!"))
        return reading_of({value.removeprefix(b"!"): share}, 1)

    def note_attempt(self, token: bytes, acquire_args: Sequence[Argument]) -> None:
        """See ResourceModel."""
        if acquire_args and acquire_args[0]:
            self._owners[token] = str(acquire_args[0]).encode()

    def owner_of(self, token: bytes) -> bytes:
        """See ResourceModel."""
        return self._owners.get(token, token)

    def may_skip_queue(self, token: bytes, before: Iterable[bytes]) -> bool:
        """See ResourceModel. An attempt takes over the lease of the same owner elsewhere."""
        return any(other != token and self.owner_of(other) == self.owner_of(token) for other in before)

    def exclusion_error(self, shares: Mapping[bytes, Share]) -> str | None:
        """See ResourceModel. One owner may hold the lock at a time."""
        return super().exclusion_error(shares) if len({self.owner_of(token) for token in shares}) > 1 else None


class Locking(NamedTuple):
    """Acquire the lock, hold it, release it."""

    usage: Usage

    def __str__(self) -> str:
        return self.usage.describe("lock")

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        lock = worker.locks.lock(self.usage.resource.name, **worker.options(self.usage))
        lease = await worker.take(lock.acquire, self.usage)
        if lease is not None:
            await worker.hold(lease, self.usage)


class LockSubject(Subject):
    """See Interlock.lock."""

    kind = "lock"

    def new_resource(self, name: str, _random: Random, /) -> ResourceModel:
        """See Subject."""
        return LockModel(lock_resource(name, "lock:"))

    def lockable(self, locks: aio.Interlock, resource: ResourceModel) -> aio.Lock:
        """See Subject."""
        return locks.lock(resource.name)

    def turn(self, random: Random) -> Locking:
        """See Subject."""
        return Locking(draw_usage(random, self.resources))
