"""The latch: some workers count it down, others wait until it is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock.errors import BrokenBarrier
from interlock.primitives.codes import BROKEN, GRANTED, QUEUED
from interlock.primitives.latch import latch_resource
from simulator.commands import Hash

from .subject import Reading, ResourceModel, Share, Subject, Turn

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from random import Random

    from interlock import aio
    from simulator.server import Server

    from .seen import Attempt, Worker

TTL: Final = 10.0  # seconds: the shortest that a latch may have
LATCHES: Final = 12  # in a run: each opens once
LONG_TIMEOUT: Final = 20.0  # seconds: some latches never open, so each wait needs an end


class LatchModel(ResourceModel):
    """Computes the count of a latch from the messages that the server ran, for each generation of the latch."""

    has_leases = False

    def __init__(self, name: str, count: int) -> None:
        super().__init__(latch_resource(name, "lock:", count, TTL))
        self.count = count
        self.requested = 0  # the sum of all count_down() calls, whether or not the server ran them
        self._generation = b""
        self._left = count
        self._reason = b""
        self._expires_at = 0  # ms: when the server may forget it
        self._counted: set[bytes] = set()  # operations

    def read(self, server: Server) -> Reading:
        """See ResourceModel. A latch has no holders, and no room for a waiter."""
        del server
        return Reading({}, 1, 0)

    def _current_generation(self, server: Server) -> bytes:
        record: bytes = server.find(self.keys[1], bytes) or b""
        return record.split(b" ")[2] if record and server.find(self.key, Hash) else b""

    def _follow_generation(self, server: Server) -> str | None:
        """Note a new generation. Say what is wrong if the server forgot the one before too early."""
        generation, known, until = self._current_generation(server), self._generation, self._expires_at
        self._expires_at = server.expires.get(self.key, 0)
        if generation == known:
            return None
        self._generation, self._left, self._reason = generation, self.count, b""
        return (
            "a new generation began before the ttl of the latch was over" if known and server.now_ms < until else None
        )

    def news_due(self, server: Server, queued: Mapping[bytes, Attempt]) -> dict[Hashable, str]:
        """Return all waiters if the latch is open, revoked, or gone."""
        self._follow_generation(server)
        if self._generation and self._left and not self._reason:
            return {}
        return {
            token: f"{token!r} waits for nothing: {self.name} is open, or gone"
            for token, attempt in queued.items()
            if attempt.process.awake
        }

    def check_reply(
        self, server: Server, args: Sequence[bytes], reply: Any, _before: Mapping[bytes, Share]
    ) -> str | None:
        """Check that the server counts each count once, and lets no waiter pass before the count is zero."""
        verb, token, *rest = args
        if wrong := self._follow_generation(server):
            return wrong
        if verb == b"count":
            if token not in self._counted and reply[0] == GRANTED:
                self._counted.add(token)
                self._left = max(0, self._left - int(rest[0]))
            if reply[0] == GRANTED and self._generation and reply[1] != self._left:
                return f"{self._left} are left"
        elif verb == b"revoke" and reply[0] and token not in self._counted:
            self._counted.add(token)
            self._reason = rest[0]
        elif verb == b"acquire":
            if reply[0] == GRANTED and (self._left or self._reason):
                return f"{self._left} are left {self._reason!r}"
            if reply[0] == QUEUED and (reply[1] != self._left or not self._left or self._reason):
                return f"{self._left} are left {self._reason!r}"
            if reply[0] == BROKEN and not self._reason and rest[7] == self._generation:
                return "the latch is not broken"
        return None


class Waiting(NamedTuple):
    """Wait until the latch is open."""

    resource: LatchModel
    timeout: float

    def __str__(self) -> str:
        return f"latch({self.resource.name!r}, {self.resource.count}).wait(timeout={self.timeout:.3g})"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        resource = self.resource
        latch = worker.locks.latch(resource.name, resource.count, ttl=TTL)

        async def wait() -> bool:
            try:
                await latch.wait(self.timeout)
            except BrokenBarrier:
                worker.count("wait raised BrokenBarrier")
                return False
            return True

        if await worker.call(wait, self.timeout, what="wait"):
            worker.count("waiter went on")
            if resource.requested < resource.count and worker.run.profile.trusted:
                worker.violated(
                    12, f"wait() returned, and of {resource.count} only {resource.requested} were ever counted"
                )


class Counting(NamedTuple):
    """Count the latch down."""

    resource: LatchModel
    by: int

    def __str__(self) -> str:
        return f"latch({self.resource.name!r}, {self.resource.count}).count_down({self.by})"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        resource = self.resource
        latch = worker.locks.latch(resource.name, resource.count, ttl=TTL)
        resource.requested += self.by
        left = await worker.call(lambda: latch.count_down(self.by), 0, what="count_down")
        if left is None:
            return
        worker.count("latch opened" if left == 0 else "latch counted down")
        if not 0 <= left < resource.count:
            worker.violated(12, f"{left} of {resource.count} are left")


class LatchSubject(Subject):
    """See Interlock.latch."""

    kind = "latch"

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.resources = [self.new_resource(f"n{i}", random) for i in range(LATCHES)]

    def new_resource(self, name: str, random: Random, /) -> LatchModel:
        """See Subject."""
        return LatchModel(name, random.choice((1, 2, 3, 5, 8, 12)))

    async def revoke(self, locks: aio.Interlock, resource: LatchModel, *, force: bool) -> bool:
        """See Subject."""
        del force
        return await locks.latch(resource.name, resource.count, ttl=TTL).revoke("by a person")

    def turn(self, random: Random) -> Turn:
        """See Subject."""
        resource = random.choice(self.resources)
        if random.random() < 0.25:
            return Counting(resource, random.choice((1, 1, 1, 2)))
        return Waiting(resource, random.choice((0, random.uniform(0.01, 0.3), random.uniform(0.1, 3.0), LONG_TIMEOUT)))
