"""The parts of a subject: models of its resources in the server, and turns, which are actions of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from simulator.commands import Hash, ZSet

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
    from random import Random

    from interlock import aio
    from interlock._client.grant import Grant
    from interlock._protocol.resource import Argument, Resource
    from simulator.server import Server

    from .seen import Attempt, Worker


class Share(NamedTuple):
    """One lease in the server: its permits, its fence, its end."""

    permits: int
    fence: int
    ends: float = 0.0  # ms on the server's clock
    revoked: bool = False


class Reading(NamedTuple):
    """The state of a resource by the keys in the server, at one moment."""

    holders: dict[bytes, Share]  # the leases that have not run out, by token
    limit: int  # permits in all
    room: int  # free permits


def reading_of(holders: dict[bytes, Share], limit: int) -> Reading:
    """Return the state of a resource with these holders and so many permits in all."""
    return Reading(holders, limit, limit - sum(share.permits for share in holders.values()))


def live_shares(shares: Mapping[bytes, Share], server: Server, *, surely: bool) -> dict[bytes, Share]:
    """Return the leases that have certainly (`surely`), or perhaps, not ended. Scripts round ends to milliseconds."""
    now = server.micros / 1000 + (1 if surely else -1)
    return {token: share for token, share in shares.items() if share.ends > now}


class ResourceModel:
    """One resource in the server: reads its keys, and says which leases and replies are right.

    The defaults fit a resource with one holder at a time. KEYS[3] and KEYS[4] are the queue of every kind of resource.
    """

    max_ttl = 5.0  # seconds: the longest ttl that workers ask for
    usage = "any"  # how workers use it: see usage.py
    has_leases = True  # which a server can lose
    release_writes = False  # whether a release takes memory, so that a full server refuses it

    def __init__(self, primitive: Resource) -> None:
        self.name = primitive.name
        self.keys = tuple(key.encode() for key in primitive.keys)
        self.key = self.keys[0]
        self.queue, self.waiters = self.keys[2], self.keys[3]

    def read(self, server: Server) -> Reading:
        """Return the state of the resource now. The caller has read the server's clock."""
        raise NotImplementedError

    def token_stores(self, server: Server) -> Iterator[tuple[str, Collection[bytes]]]:
        """Yield every part of the resource that stores tokens: its name for people, and its tokens."""
        yield "the lock", self.read(server).holders
        yield "the queue", server.find(self.queue, ZSet) or ()
        yield "the waiters", server.find(self.waiters, Hash) or ()

    def note_attempt(self, token: bytes, acquire_args: Sequence[Argument]) -> None:
        """Note an attempt that begins, with the arguments that only this primitive's `acquire` has."""

    def note_data_loss(self, _server: Server) -> None:
        """Note that the server lost data: from now on only the data that it still has counts."""

    def permits_wanted(self, _token: bytes) -> int:
        """Return the number of permits that this attempt asks for."""
        return 1

    def note_grant(self, token: bytes, reading: Reading) -> None:
        """Note that the server granted this attempt the resource."""

    def may_skip_queue(self, _token: bytes, _before: Iterable[bytes]) -> bool:
        """Whether this attempt need not queue, because a lease of its own owner was alive `before`."""
        return False

    def waits_for_itself(self, _token: bytes, _alive: Iterable[bytes]) -> bool:
        """Whether this attempt may wait in the queue for one of these leases, which belongs to its own client."""
        return False

    def exclusion_error(self, shares: Mapping[bytes, Share]) -> str | None:
        """S1: say why these leases must not be alive at once; None if they may be."""
        return f"held by {' and by '.join(token.decode() for token in shares)}" if len(shares) > 1 else None

    def owner_of(self, token: bytes) -> bytes:
        """Return the owner of the token. An owner may have several tokens, whose leases do not exclude each other."""
        return token

    def is_exclusive(self, _token: bytes) -> bool:
        """Whether this lease excludes all other leases, so that fences order the writes of the holders."""
        return True

    def news_due(self, _server: Server, _queued: Mapping[bytes, Attempt]) -> dict[Hashable, str]:
        """S4, where waiters acquire nothing: return each waiter that should have its news by now, and why."""
        return {}

    def check_reply(
        self, _server: Server, _args: Sequence[bytes], _reply: Any, _before: Mapping[bytes, Share]
    ) -> str | None:
        """S12: say what is wrong with this reply, if these leases were alive before the message; else None."""
        return None


class Revocable(Protocol):
    """An object whose lease a person can revoke."""

    async def revoke(self, reason: str, force: bool = False) -> bool:
        """Revoke the lease. Returns whether there was one."""
        ...


class Turn(Protocol):
    """One action of a worker, with all its random choices. `str(turn)` describes it for people."""

    async def play(self, worker: Worker) -> None:
        """Perform the action."""
        ...


class Subject:
    """One kind of primitive in one run: its resources, and the turns of its workers."""

    kind: ClassVar[str]
    seed_share: ClassVar[int] = 1  # of the seeds that are not the lock's, relative to other subjects

    def __init__(self, random: Random) -> None:
        self.resources = [self.new_resource(f"n{i}", random) for i in range(random.choice((1, 1, 2)))]

    def new_resource(self, name: str, random: Random, /) -> Any:
        """Return the model of a resource with this name."""
        raise NotImplementedError

    def lockable(self, locks: aio.Interlock, resource: Any) -> Revocable:
        """Return the synchronizer whose lease a person revokes."""
        raise NotImplementedError

    async def revoke(self, locks: aio.Interlock, resource: Any, *, force: bool) -> bool:
        """Revoke the lease as a person does. Returns whether there was one."""
        return await self.lockable(locks, resource).revoke("by a person", force=force)

    def turn(self, random: Random) -> Turn:
        """Draw the next action of a worker."""
        raise NotImplementedError

    def leases(self, lease: Any) -> list[aio.Lease]:
        """Return the single leases of a lease: several for a multi, else the lease itself."""
        return [lease]

    def grants(self, lease: Any) -> list[Grant]:
        """Return the client's record of each single lease."""
        return [each._grant for each in self.leases(lease)]
