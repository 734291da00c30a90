"""The lock: one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from interlock.primitives.lock import lock_resource
from simulator.terms import Terms, terms

from .subject import Reading, Share, Subject, Thing, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from random import Random

    from interlock import aio
    from interlock._protocol.types import Argument, Resource
    from simulator.server import Server
    from simulator.workers import Worker


class LockThing(Thing):
    """Keys as lock.lua has them: a plain string, and a record with its fence."""

    def __init__(self, primitive: Resource) -> None:
        super().__init__(primitive)
        self._owners: dict[bytes, bytes] = {}

    def read(self, server: Server) -> Reading:
        """See Thing."""
        value: bytes | None = server.find(self.key, bytes)
        if value is None:
            return read({}, 1)
        record: bytes | None = server.find(self.keys[1], bytes)
        fence = int(record.split()[2]) if record else 0
        share = Share(1, fence, server.expires.get(self.key, server.now_ms), revoked=value.startswith(b"!"))
        return read({value.removeprefix(b"!"): share}, 1)

    def asked(self, token: bytes, terms: Sequence[Argument]) -> None:
        """See Thing."""
        if terms and terms[0]:
            self._owners[token] = str(terms[0]).encode()

    def owner(self, token: bytes) -> bytes:
        """See Thing."""
        return self._owners.get(token, token)

    def beside(self, token: bytes, before: Iterable[bytes]) -> bool:
        """Whether it takes over from the same owner elsewhere."""
        return any(other != token and self.owner(other) == self.owner(token) for other in before)

    def apart(self, shares: Mapping[bytes, Share]) -> str | None:
        """One owner at a time."""
        return super().apart(shares) if len({self.owner(token) for token in shares}) > 1 else None


class Locking(NamedTuple):
    """Take it, hold it, let it go."""

    terms: Terms

    def __str__(self) -> str:
        return self.terms.told("lock")

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        lock = worker.locks.lock(self.terms.thing.name, **worker.options(self.terms))
        lease = await worker.take(lock.acquire, self.terms)
        if lease is not None:
            await worker.hold(lease, self.terms)


class Locks(Subject):
    """See Interlock.lock."""

    kind = "lock"

    def thing(self, name: str, _random: Random, /) -> Thing:
        """See Subject."""
        return LockThing(lock_resource(name, "lock:"))

    def lockable(self, locks: aio.Interlock, thing: Thing) -> aio.Lock:
        """See Subject."""
        return locks.lock(thing.name)

    def turn(self, random: Random) -> Locking:
        """See Subject."""
        return Locking(terms(random, self.things))
