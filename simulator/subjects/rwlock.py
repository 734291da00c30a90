"""The read-write lock: many readers or one writer. The writer may read as well, and then give up writing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import ConfigError, LockError
from interlock.primitives.codes import BUSY, QUEUED
from interlock.primitives.permits import read_resource
from simulator.usage import Usage, draw_usage

from .permits import PermitsModel
from .subject import ResourceModel, Share, Subject, live_shares

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from random import Random

    from interlock import aio
    from interlock._protocol.resource import Argument
    from simulator.server import Server

    from .seen import Worker


class RWLockModel(PermitsModel):
    """A reader has one permit, a writer all. A client may read beside another lease of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(read_resource(name, "lock:"))
        self._beside: dict[bytes, bytes] = {}  # by token of a reader: its client's earlier lease

    def note_attempt(self, token: bytes, acquire_args: Sequence[Argument]) -> None:
        """See ResourceModel."""
        super().note_attempt(token, acquire_args)
        if acquire_args[3]:
            self._beside[token] = str(acquire_args[3]).encode()

    def _outer_leases(self, token: bytes | None) -> Iterator[bytes]:
        """Yield the earlier leases of the same client: the one before this, the one before that, ..."""
        while token is not None and (token := self._beside.get(token)) is not None:
            yield token

    def is_exclusive(self, token: bytes) -> bool:
        """See ResourceModel. A writer excludes all others."""
        return self.permits_wanted(token) > 1

    def exclusion_error(self, shares: Mapping[bytes, Share]) -> str | None:
        """See ResourceModel. A writer excludes all others but itself as a reader."""
        for writer in filter(self.is_exclusive, shares):
            others = [token.decode() for token in shares if token != writer and writer not in self._outer_leases(token)]
            if others:
                return f"held for writing by {writer.decode()} and held by {' and by '.join(others)}"
        return None

    def may_skip_queue(self, token: bytes, before: Iterable[bytes]) -> bool:
        """See ResourceModel. A client reads beside its own lease at once."""
        return token in self._beside and self._beside[token] in before

    def waits_for_itself(self, token: bytes, alive: Iterable[bytes]) -> bool:
        """See ResourceModel. Nobody in front of a reader may get the lock before the reader's own lease ends."""
        return self.may_skip_queue(token, alive)

    def check_reply(
        self, server: Server, args: Sequence[bytes], reply: Any, before: Mapping[bytes, Share]
    ) -> str | None:
        """Check that no attempt waits for a lease of its own client."""
        verb, token, *_ = args
        if verb != b"acquire" or reply[0] not in {QUEUED, BUSY}:
            return None
        if not self.may_skip_queue(token, live_shares(before, server, surely=True)):
            return None
        return f"its client holds {self._beside[token]!r} and would wait for itself"


class ReadOrWrite(NamedTuple):
    """Read or write; perhaps read beside that lease, or try to upgrade from reading to writing."""

    usage: Usage
    writes: bool
    reads_too: bool  # acquire the lock for reading beside the first lease
    downgrades: bool  # then release the first lease
    upgrades: bool  # try to write while reading, which interlock refuses

    def __str__(self) -> str:
        also = ", and read too" * self.reads_too + ", then only read" * (self.reads_too and self.downgrades)
        side = "write" if self.writes else "read"
        return self.usage.describe("rwlock") + f": {side}{also}" + ", try to upgrade" * self.upgrades

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        rwlock = worker.locks.rwlock(self.usage.resource.name, **worker.options(self.usage))
        lease = await worker.take((rwlock.write() if self.writes else rwlock.read()).acquire, self.usage)
        if lease is None:
            return

        async def inside() -> None:
            if self.upgrades:
                await self._upgrade(worker, rwlock, lease)
            if self.reads_too:
                await self._read(worker, rwlock, lease)

        await worker.hold(lease, self.usage, inside)

    async def _read(self, worker: Worker, rwlock: aio.RWLock, first: aio.Lease) -> None:
        second = await worker.take(rwlock.read().acquire, self.usage)
        if second is None:
            return
        worker.count("read beside its own lease")

        async def release_first() -> None:
            await worker.let_go(first, exits=self.usage.exits)
            worker.count("downgraded")

        await worker.hold(second, self.usage, release_first if self.downgrades else None)

    @staticmethod
    async def _upgrade(worker: Worker, rwlock: aio.RWLock, lease: aio.Lease) -> None:
        """Check S12: the client refuses an upgrade at once, without a message."""
        if lease.remaining() == 0:
            return
        started = worker.now()
        try:
            await rwlock.write().acquire(0)
        except ConfigError:
            worker.count("upgrade refused")
        except LockError as error:
            worker.violated(12, f"a reader could try to write: {error}")
        if worker.now() != started:
            worker.violated(12, "an upgrade was refused, but not at once")


class RWLockSubject(Subject):
    """See Interlock.rwlock."""

    kind = "rwlock"
    seed_share = 2

    def new_resource(self, name: str, _random: Random, /) -> RWLockModel:
        """See Subject."""
        return RWLockModel(name)

    def lockable(self, locks: aio.Interlock, resource: ResourceModel) -> aio.WriteLock:
        """See Subject."""
        return locks.rwlock(resource.name).write()

    def turn(self, random: Random) -> ReadOrWrite:
        """See Subject."""
        chosen, writes = draw_usage(random, self.resources), random.random() < 0.35
        too = random.random() < (0.6 if self.resources[0].usage == "outlasting" else 0.3)
        return ReadOrWrite(chosen, writes, too, too and random.random() < 0.7, not writes and random.random() < 0.05)
