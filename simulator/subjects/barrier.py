"""The barrier: parties wait for each other, again and again; a barrier breaks, and workers reset it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock.errors import BrokenBarrier
from interlock.primitives.barrier import barrier_resource
from interlock.primitives.codes import BROKEN, GRANTED, QUEUED
from simulator.commands import Hash, ZSet

from .subject import Reading, ResourceModel, Share, Subject, Turn

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
    from random import Random

    from interlock import aio
    from simulator.server import Server

    from .seen import Attempt, Worker

ALIVE_MS: Final = 3000  # so long after its last heartbeat a waiter is dead
LONG_TIMEOUT: Final = 20.0  # seconds: at the end of a run too few parties are left, so each wait needs an end


class BarrierModel(ResourceModel):
    """Finds out which parties went on, by the numbers of arrivals after each script."""

    has_leases = False

    def __init__(self, name: str, parties: int) -> None:
        super().__init__(barrier_resource(name, "lock:", parties))
        self.parties = parties
        self.indices: dict[bytes, int] = {}  # the index of each party that went on
        self._last_heartbeats: dict[bytes, float] = {}  # of each waiting party, in ms
        self._generation: bytes = b""
        self._passed = 0  # the number of the last arrival that went on, or that a reset dismissed

    def read(self, server: Server) -> Reading:
        """See ResourceModel. A barrier has no holders, and never room for a single party."""
        del server
        return Reading({}, 1, 0)

    def _waiting(self, server: Server) -> dict[bytes, float]:
        """Return the arrival numbers of the parties that still wait."""
        numbers: dict[bytes, float] = server.find(self.queue, ZSet) or {}
        return {token: number for token, number in numbers.items() if number > self._passed}

    def _reason_broken(self, server: Server) -> bytes | None:
        fields: dict[bytes, bytes] | None = server.find(self.key, Hash)
        return b"the server does not know it" if fields is None else fields.get(b"why")

    def token_stores(self, server: Server) -> Iterator[tuple[str, Collection[bytes]]]:
        """See ResourceModel. The server keeps the parties that went on for a while: these are no leftovers."""
        yield "the queue", self._waiting(server)
        yield "the waiters", (server.find(self.waiters, Hash) or {}).keys() - self.indices.keys()

    def news_due(self, server: Server, queued: Mapping[bytes, Attempt]) -> dict[Hashable, str]:
        """Return the waiters that went on, and all waiters if the barrier broke, was reset, or has a dead party."""
        if not queued:
            return {}
        waiting, reason = self._waiting(server), self._reason_broken(server)
        alive_until: dict[bytes, float] = server.find(self.keys[5], ZSet) or {}
        if reason is None and any(until <= server.micros / 1000 - 1 for until in alive_until.values()):
            reason = b"one is dead"
        return {
            (token, self._generation): f"{token!r} waits at {self.name}, though it {'went on' if on else 'is broken'}"
            for token, attempt in queued.items()
            if attempt.process.awake and ((on := token in self.indices) or reason or token not in waiting)
        }

    def check_reply(
        self, server: Server, args: Sequence[bytes], reply: Any, _before: Mapping[bytes, Share]
    ) -> str | None:
        """Check that as many waiters go on together as there are parties, once, and each with its own index."""
        verb, token = args[:2]
        now = server.micros / 1000
        if verb == b"heartbeat":
            self._last_heartbeats |= dict.fromkeys(self._last_heartbeats.keys() & set(args[3::2]), now)
        elif verb == b"acquire" and (reply[0] == QUEUED or token in self._last_heartbeats):
            self._last_heartbeats[token] = now
        if wrong := self._check_passed(server, verb):
            return wrong
        if verb == b"acquire":
            return self._wrong_answer(server, token, reply)
        if verb == b"release" and self._last_heartbeats.pop(token, 0.0) and not self._reason_broken(server):
            return "a party left, and the barrier did not break"
        fields: dict[bytes, bytes] = server.find(self.key, Hash) or {}
        if verb == b"reset" and reply[0] == 1 and (b"why" in fields or fields[b"arrivals"] != fields[b"passed"]):
            return "the reset left arrivals behind"
        return None

    def _wrong_answer(self, server: Server, token: bytes, reply: Any) -> str | None:
        """Say what is wrong with the reply to a party that waits."""
        index, code = self.indices.get(token), reply[0]
        if code == GRANTED and reply[1] != index:
            return f"its index is {index}"
        if code in {BROKEN, QUEUED} and index is not None:
            return f"it went on as number {index}"
        if code == QUEUED and self._reason_broken(server):
            return f"it is broken: {self._reason_broken(server)!r}"
        return None

    def _check_passed(self, server: Server, verb: bytes) -> str | None:
        """Note the parties that this script let go on, and say what is wrong with them."""
        found: bytes | None = server.find(self.keys[1], bytes)
        generation = found.split(b" ")[2] if found else b""
        fields: dict[bytes, bytes] = server.find(self.key, Hash) or {}
        if generation != self._generation:
            self._last_heartbeats = {}
            self._generation, self._passed = generation, int(fields.get(b"passed", 0)) if verb == b"reset" else 0
        passed = int(fields.get(b"passed", 0))
        if passed == self._passed:
            return None
        before, numbers = self._passed, self._waiting(server)
        dead = [token for token, last in self._last_heartbeats.items() if last + ALIVE_MS < server.micros / 1000 - 1]
        self._passed, self._last_heartbeats = passed, {}
        if dead:
            return f"the others went on together with {dead}, which are dead"
        went = {token: int(number) - before - 1 for token, number in numbers.items() if number <= passed}
        again = went.keys() & self.indices.keys()
        self.indices |= went
        if sorted(went.values()) == list(range(self.parties)) and not again:
            return None
        return f"of {self.parties} parties went on {went}, and {again} before"


class Meeting(NamedTuple):
    """Wait for the other parties; if the barrier is broken, perhaps reset it."""

    resource: BarrierModel
    timeout: float
    resets: bool

    def __str__(self) -> str:
        also = ", and reset it if it is broken" * self.resets
        return f"barrier({self.resource.name!r}, {self.resource.parties}).wait(timeout={self.timeout:.3g}){also}"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        resource, pauses = self.resource, worker.client.process.pauses
        barrier = worker.locks.barrier(resource.name, resource.parties)
        broken = False

        async def wait() -> int:
            nonlocal broken
            try:
                index = await barrier.wait(self.timeout)
            except BrokenBarrier:
                broken = True
                # Without an answer from the server, a party that went on in its last moment can't know it.
                sure = worker.run.profile.clean and pauses == worker.client.process.pauses
                sure = sure and worker.client.closing is None  # nor can a closed client
                if sure and any(token in resource.indices for token in worker.task.attempts):
                    worker.violated(12, f"a party went on at {resource.name}, and wait() raised BrokenBarrier")
                raise
            if worker.run.profile.trusted and resource.indices.get(worker.task.attempts[-1]) != index:
                worker.violated(12, f"wait() at {resource.name} returned {index}, and the party did not go on as that")
            return index

        # wait() may need two undo graces: it leaves the barrier, then asks whether it went on before that.
        if await worker.call(wait, self.timeout, what="wait", undo_graces=2) is not None:
            worker.count("waiter went on")
        elif broken and self.resets:
            await Resetting(resource).play(worker)


class Resetting(NamedTuple):
    """Reset the barrier, broken or not."""

    resource: BarrierModel

    def __str__(self) -> str:
        return f"barrier({self.resource.name!r}).reset()"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        barrier = worker.locks.barrier(self.resource.name, self.resource.parties)

        async def reset() -> bool:
            await barrier.reset()
            return True

        if await worker.call(reset, 0, what="reset"):
            worker.count("barrier reset")


class BarrierSubject(Subject):
    """See Interlock.barrier."""

    kind = "barrier"

    def new_resource(self, name: str, random: Random, /) -> BarrierModel:
        """See Subject."""
        return BarrierModel(name, random.choice((2, 2, 3, 3, 4)))

    async def revoke(self, locks: aio.Interlock, resource: BarrierModel, *, force: bool) -> bool:
        """See Subject."""
        del force
        return await locks.barrier(resource.name, resource.parties).revoke("by a person")

    def turn(self, random: Random) -> Turn:
        """See Subject."""
        resource = random.choice(self.resources)
        if random.random() < 0.03:
            return Resetting(resource)
        short = random.uniform(0.01, 0.3), random.uniform(0.1, 3.0)
        timeout = random.choice((*short, LONG_TIMEOUT, LONG_TIMEOUT, LONG_TIMEOUT))
        return Meeting(resource, 0 if random.random() < 0.1 else timeout, random.random() < 0.6)
