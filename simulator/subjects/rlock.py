"""The reentrant lock: the task that holds it, or its owner by name, may acquire it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from interlock._client.grant import Grant
from interlock.primitives.lock import lock_resource
from simulator.usage import Usage, draw_usage

from .lock import LockModel
from .subject import ResourceModel, Subject

if TYPE_CHECKING:
    from random import Random

    from interlock import aio

    from .seen import Worker


class Reentering(NamedTuple):
    """Acquire the lock, acquire it again while it is held, and release it as often."""

    usage: Usage
    owner: str | None
    depth: int

    def __str__(self) -> str:
        owner = (f"owner={self.owner!r}",) if self.owner else ()
        return self.usage.describe("rlock", *owner) + f", {self.depth} deep" * (self.depth > 1)

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        rlock = worker.locks.rlock(self.usage.resource.name, owner=self.owner, **worker.options(self.usage))
        await self._enter(worker, rlock, self.depth, None)

    async def _enter(self, worker: Worker, rlock: aio.RLock, depth: int, outer: aio.Lease | None) -> None:
        certain, started = outer is not None and outer.remaining() > 0, worker.now()
        lease = await worker.take(rlock.acquire, self.usage)
        if certain and self.owner is None:
            if lease is not outer or worker.now() != started:
                worker.violated(12, f"{outer!r} was held, and its holder did not get it again at once: {lease!r}")
            worker.count("acquired again by its holder")
        if lease is None:
            return

        async def deeper() -> None:
            await self._enter(worker, rlock, depth - 1, lease)
            if lease._grant.end_reason == Grant.RELEASED and not worker.session.core.requests.closed:
                worker.violated(12, f"an inner release gave {lease!r} back")

        await worker.hold(lease, self.usage, deeper if depth > 1 else None)


class RLockSubject(Subject):
    """See Interlock.rlock."""

    kind = "rlock"

    def new_resource(self, name: str, _random: Random, /) -> ResourceModel:
        """See Subject."""
        return LockModel(lock_resource(name, "lock:"))

    def lockable(self, locks: aio.Interlock, resource: ResourceModel) -> aio.RLock:
        """See Subject."""
        return locks.rlock(resource.name)

    def turn(self, random: Random) -> Reentering:
        """See Subject."""
        chosen = draw_usage(random, self.resources)
        return Reentering(chosen, random.choice((None, None, "shop", "till")), random.choice((1, 1, 2, 3)))
