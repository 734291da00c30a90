"""The semaphore: workers acquire one or more permits, and change the limit now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import ConfigError
from interlock.primitives.permits import semaphore_resource
from simulator.usage import Usage, draw_usage

from .permits import PermitsModel
from .subject import Reading, Share, Subject, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from interlock import aio
    from simulator.server import Server

    from .seen import Worker

MAX_LIMIT = 4  # permits


class SemaphoreModel(PermitsModel):
    """Permits granted under a limit of 3 may last under a limit of 2: the limit of the newest grant counts."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(semaphore_resource(name, "lock:", limit))
        self._limits: dict[bytes, int] = {}  # by token: the limit at its grant
        self._limit_set_last: int | None = limit  # None: unknown since the server lost data
        self._operations: dict[bytes, int] = {}  # by operation: the limit that set_limit() set

    def note_grant(self, token: bytes, reading: Reading) -> None:
        """See ResourceModel."""
        self._limits[token] = reading.limit

    def note_data_loss(self, _server: Server) -> None:
        """See ResourceModel. A late copy of a lost set_limit() may set the limit again."""
        self._limit_set_last = None

    def exclusion_error(self, shares: Mapping[bytes, Share]) -> str | None:
        """See ResourceModel."""
        newest = max(shares, key=lambda token: shares[token].fence)
        limit, total = self._limits.get(newest, self.limit), sum(share.permits for share in shares.values())
        if total <= limit:
            return None
        each = ", ".join(f"{share.permits} by {token.decode()}" for token, share in shares.items())
        return f"held {total} times, with a limit of {limit}: {each}"

    def check_reply(
        self, server: Server, args: Sequence[bytes], reply: Any, before: Mapping[bytes, Share]
    ) -> str | None:
        """Check that a late copy of a set_limit() does not undo a later set_limit()."""
        del reply, before
        if args[0] != b"limit":
            return None
        operation, wanted = args[1], int(args[3])
        if operation not in self._operations:
            self._operations[operation] = wanted
            self._limit_set_last = wanted if self._limit_set_last is not None else None
        limit = self.read(server).limit
        return (
            None
            if self._limit_set_last in {None, limit}
            else f"the limit is {limit}, and {self._limit_set_last} was set last"
        )

    def is_exclusive(self, _token: bytes) -> bool:
        """See ResourceModel."""
        return False


class TakingPermits(NamedTuple):
    """Acquire some permits, hold them, release them."""

    usage: Usage
    permits: int

    def __str__(self) -> str:
        return self.usage.describe("semaphore", f"permits={self.permits}")

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        resource: Any = self.usage.resource
        limit = worker.known_limits.get(resource.name, resource.limit)
        semaphore = worker.locks.semaphore(resource.name, limit, **worker.options(self.usage))
        try:
            lease = await worker.take(lambda: semaphore.acquire(permits=min(self.permits, limit)), self.usage)
        except ConfigError as error:
            if "set_limit" not in str(error):
                raise
            await self._learn_limit(worker, semaphore)
            return
        if lease is not None:
            await worker.hold(lease, self.usage)

    async def _learn_limit(self, worker: Worker, semaphore: aio.Semaphore) -> None:
        """Ask the server for the limit, which another worker has changed."""
        worker.count("limit refused")
        state = await worker.call(semaphore.inspect, 0, what="inspect")
        if state is not None and state.limit:
            worker.known_limits[semaphore.name] = state.limit


class SettingLimit(NamedTuple):
    """Change the limit for all clients."""

    resource: SemaphoreModel
    limit: int

    def __str__(self) -> str:
        return f"semaphore({self.resource.name!r}).set_limit({self.limit})"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        semaphore = worker.locks.semaphore(self.resource.name, self.resource.limit)

        async def change() -> bool:
            await semaphore.set_limit(self.limit)
            return True

        if await worker.call(change, 0, what="set_limit"):
            worker.count("limit set")
            worker.known_limits[self.resource.name] = self.limit


class SemaphoreSubject(Subject):
    """See Interlock.semaphore."""

    kind = "semaphore"
    seed_share = 2

    def new_resource(self, name: str, random: Random, /) -> SemaphoreModel:
        """See Subject."""
        return SemaphoreModel(name, random.randint(1, MAX_LIMIT))

    def lockable(self, locks: aio.Interlock, resource: Any) -> aio.Semaphore:
        """See Subject."""
        return locks.semaphore(resource.name, resource.limit)

    def turn(self, random: Random) -> Turn:
        """See Subject."""
        if random.random() < 0.04:
            return SettingLimit(random.choice(self.resources), random.randint(1, MAX_LIMIT))
        return TakingPermits(draw_usage(random, self.resources), random.choice((1, 1, 1, 2, 3, MAX_LIMIT)))
