"""What a subject is made of: resources in the server that are watched, and turns that workers take with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from simulator.commands import Hash, ZSet

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
    from random import Random

    from interlock import aio
    from interlock._client.grant import Grant
    from interlock._protocol.types import Argument, Resource
    from simulator.invariants.attempts import Attempt
    from simulator.server import Server
    from simulator.workers import Worker


class Share(NamedTuple):
    """What one has of a resource."""

    permits: int
    fence: int
    ends: float = 0.0  # ms on the server's clock
    revoked: bool = False


class Reading(NamedTuple):
    """What the server's keys say of a resource, at one moment."""

    holders: dict[bytes, Share]  # by token; those whose leases have run out are not among them
    limit: int  # permits that there are
    room: int  # those of them that are free


def reading_of(holders: dict[bytes, Share], limit: int) -> Reading:
    """What it is when these have some of so many permits."""
    return Reading(holders, limit, limit - sum(share.permits for share in holders.values()))


def live_shares(shares: Mapping[bytes, Share], server: Server, *, surely: bool) -> dict[bytes, Share]:
    """Those whose time is surely, or perhaps, not over: scripts round to ms."""
    now = server.micros / 1000 + (1 if surely else -1)
    return {token: share for token, share in shares.items() if share.ends > now}


class ResourceModel:
    """One name in the server: how its keys are read, and what must hold for those who have it.

    As it stands here it is of a kind that one has at a time. KEYS[3] and KEYS[4] are the queue of any kind.
    """

    max_ttl = 5.0  # seconds: the longest ttl that workers ask for
    has_leases = True  # which a server can lose
    release_writes = False  # whether a release takes memory, so that a full server refuses it

    def __init__(self, primitive: Resource) -> None:
        self.name = primitive.name
        self.keys = tuple(key.encode() for key in primitive.keys)
        self.key = self.keys[0]
        self.queue, self.waiters = self.keys[2], self.keys[3]

    def read(self, server: Server) -> Reading:
        """What the server says of it now; the clock was looked at."""
        raise NotImplementedError

    def token_stores(self, server: Server) -> Iterator[tuple[str, Collection[bytes]]]:
        """Where a token can be left behind."""
        yield "the lock", self.read(server).holders
        yield "the queue", server.find(self.queue, ZSet) or ()
        yield "the waiters", server.find(self.waiters, Hash) or ()

    def note_attempt(self, token: bytes, acquire_args: Sequence[Argument]) -> None:
        """An attempt begins; `usage` are those of its primitive."""

    def note_data_loss(self, _server: Server) -> None:
        """The server has lost something: what it knows now is what counts."""

    def permits_wanted(self, _token: bytes) -> int:
        """How many permits it asks for."""
        return 1

    def note_grant(self, token: bytes, reading: Reading) -> None:
        """The server gave it what it wants."""

    def may_skip_queue(self, _token: bytes, _before: Iterable[bytes]) -> bool:
        """Whether it need not queue, since one of those who had it before is its own."""
        return False

    def exclusion_error(self, shares: Mapping[bytes, Share]) -> str | None:
        """Rule 1: why all of these can't be held at once."""
        return f"held by {' and by '.join(token.decode() for token in shares)}" if len(shares) > 1 else None

    def owner_of(self, token: bytes) -> bytes:
        """Whose token it is: an owner may have several, and does not harm himself."""
        return token

    def is_exclusive(self, _token: bytes) -> bool:
        """Whether who has this is alone with what he writes, so that fences tell who is too late."""
        return True

    def news_due(self, _server: Server, _queued: Mapping[bytes, Attempt]) -> dict[Hashable, str]:
        """Rule 4, for who gets nothing but news: who of those awake should be told now, and what about it."""
        return {}

    def check_reply(
        self, _server: Server, _args: Sequence[bytes], _reply: Any, _before: Mapping[bytes, Share]
    ) -> str | None:
        """Rule 12: what is wrong with this answer of the server, when the last one left it to these."""
        return None


class Revocable(Protocol):
    """What people may take away."""

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Whether there was something to take away."""
        ...


class Turn(Protocol):
    """What a worker is about to do, all of it drawn at once; its text says so."""

    async def play(self, worker: Worker) -> None:
        """Do it."""
        ...


class Subject:
    """A kind of primitive: its resources in a run, and the turns that workers take with them."""

    kind: ClassVar[str]
    seed_share: ClassVar[int] = 1  # of the seeds that are not the lock's, in relation to others

    def __init__(self, random: Random) -> None:
        self.resources = [self.new_resource(f"n{i}", random) for i in range(random.choice((1, 1, 2)))]

    def new_resource(self, name: str, random: Random, /) -> Any:
        """One of its names."""
        raise NotImplementedError

    def lockable(self, locks: aio.Interlock, resource: Any) -> Revocable:
        """It, for people who revoke it."""
        raise NotImplementedError

    async def revoke(self, locks: aio.Interlock, resource: Any, *, force: bool) -> bool:
        """A person revokes it: whether there was something to revoke."""
        return await self.lockable(locks, resource).revoke("by a person", force=force)

    def turn(self, random: Random) -> Turn:
        """What a worker does next."""
        raise NotImplementedError

    def leases(self, lease: Any) -> list[aio.Lease]:
        """What a lease is made of."""
        return [lease]

    def grants(self, lease: Any) -> list[Grant]:
        """What a lease rests on."""
        return [each._grant for each in self.leases(lease)]
