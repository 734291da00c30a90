"""The multi: some workers acquire several locks, all or none; others acquire just one of these locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import LeaseLost
from interlock.primitives.lock import lock_resource
from simulator.usage import Usage, draw_usage

from .lock import Locking, LockModel
from .subject import ResourceModel, Subject, Turn

if TYPE_CHECKING:
    from random import Random

    from interlock import aio

    from .seen import Worker

MAX_LOCKS = 4  # locks


class LockingSeveral(NamedTuple):
    """Acquire all these locks at once, hold them, release them."""

    usage: Usage
    resources: list[ResourceModel]

    def __str__(self) -> str:
        names = ", ".join(resource.name for resource in self.resources)
        return self.usage.describe("multi", f"of {names}")

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        usage, losses = self.usage, list[Any]()
        options = worker.options(usage)
        timeout = options.pop("timeout")
        members = [worker.locks.lock(resource.name, **options) for resource in self.resources]
        multi = worker.locks.multi(*members, timeout=timeout, on_lost=losses.append)
        lease = await worker.take(multi.acquire, usage)
        if lease is None:
            self._check_none_held(worker)
            return
        worker.count("several locks acquired at once")
        if list(lease.fence) != sorted(resource.name for resource in self.resources):
            worker.violated(12, f"{lease!r} is not of {self.resources}")
        if usage.exits and not usage.drops and not await self._enter(worker, lease):
            return
        await worker.hold(lease, usage)
        if len(losses) > 1:
            worker.violated(8, f"on_lost was called {len(losses)} times for {lease!r}")

    @staticmethod
    async def _enter(worker: Worker, lease: Any) -> bool:
        """Enter as `async with` does: from now on the loss of any lock cancels the body."""
        try:
            await lease.__aenter__()
        except LeaseLost:
            worker.count("multi lost before its body")
            return False
        return True

    @staticmethod
    def _check_none_held(worker: Worker) -> None:
        """Check S12: after a failed acquire, `ensure()` passes for none of the locks."""
        attempts, process = worker.run.monitor.attempts, worker.client.process
        for grant in worker.session.book.held():
            attempt = attempts.known[grant.token.encode()]
            # A lease that passes on keeps its first caller's token.
            left = attempt.task is worker.task and attempt.ended and not attempts.is_in_cohort(grant.token, process)
            if left and grant.reason_ended(worker.now()) is None:
                worker.violated(12, f"ensure() passes for {grant.token}, though the multi was not acquired")


class MultiSubject(Subject):
    """See Interlock.multi."""

    kind = "multi"

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.resources = [self.new_resource(f"n{i}", random) for i in range(random.randint(2, MAX_LOCKS))]

    def new_resource(self, name: str, _random: Random, /) -> ResourceModel:
        """See Subject."""
        return LockModel(lock_resource(name, "lock:"))

    def lockable(self, locks: aio.Interlock, resource: ResourceModel) -> aio.Lock:
        """See Subject."""
        return locks.lock(resource.name)

    def turn(self, random: Random) -> Turn:
        """See Subject."""
        chosen = draw_usage(random, self.resources)
        if random.random() < 0.3:
            return Locking(chosen)
        return LockingSeveral(chosen, random.sample(self.resources, random.randint(1, len(self.resources))))

    def leases(self, lease: Any) -> list[aio.Lease]:
        """See Subject."""
        return list(lease._leases.values()) if hasattr(lease, "_leases") else [lease]
