"""The state of resources on several servers together: a majority decides about the holder. S1 to S5 and S10.

A single server may have any state; only the leases in clients count, and the fences of these leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._protocol.server import ServerError
from interlock.primitives.codes import GRANTED, QUEUED

from .server_state import Seen, ServerState, may_fail

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from interlock._client.grant import Grant
    from simulator.profiles import Profile
    from simulator.server_group import Host, ServerGroup
    from simulator.subjects import ResourceModel

    from .attempts import Attempts
    from .leases import Leases
    from .trace import Trace

# Seconds within which a waiter must get a resource without a holder: the ttl of a dead holder or of a dead waiter.
MAX_IDLE_TIME: Final = 5.0


class Votes(ServerState):
    """The states of all resources on all servers."""

    def __init__(
        self, trace: Trace, groups: Sequence[ServerGroup], attempts: Attempts, leases: Leases, profile: Profile
    ) -> None:
        quiet = profile.clean and not profile.rates
        super().__init__(trace, groups[0], attempts, quiet=quiet, trusted=profile.trusted)
        self.groups = groups
        self.leases = leases
        self._held_at: dict[bytes, float] = {}  # when each resource last had a holder
        self._owners: dict[bytes, bytes] = {}  # the owner of the newest fence of each resource
        leases.on_lease = self._check_fence_of
        # A renewal goes to one server after the other, so some servers may still renew a lease that is being released.
        attempts.check_s7 = False

    def executed(self, host: Host, sender: str, keys: Sequence[bytes], args: Sequence[bytes], reply: Any) -> None:
        """Check the rules after a script."""
        trace, server = self.trace, host.server
        verb, token = args[:2]
        where = host.group.name or "s0"
        trace.note("%s runs %s's %s %s -> %s", where, sender, verb.decode(), token.decode(), reply)
        if isinstance(reply, ServerError):
            if not may_fail(host, str(reply)):
                trace.violated(10, f"{verb.decode()} of {sender} failed: {reply}")
            return
        trace.served(sender, where, verb, token.rpartition(b"/")[0], keys[0], reply[0] if reply else 0)
        if not server.data.keys() <= server.expires.keys():
            trace.violated(3, f"{server.data.keys() - server.expires.keys()} have no TTL after {verb!r}")
        attempt = self.attempts.known.get(token)
        if attempt is not None and verb == b"acquire" and reply[0] == QUEUED:
            self.attempts.note_queued(token, attempt)
        if verb == b"revoke" and reply[0] == GRANTED and args[2] == b"1":
            self._exempt_forced(self.seen[keys[0]], token.removeprefix(b"!"))
        for key in keys:
            if key in self.seen and verb != b"renew":
                self._check_majority(self.seen[key])

    def _check_majority(self, seen: Seen) -> None:
        """Whether an attempt has a majority now and had none before."""
        votes: dict[bytes, int] = {}
        for group in self.groups:
            server = group.primary.server
            server.read_clock()
            for token, share in seen.resource.read(server).holders.items():
                if not share.revoked:
                    votes[token] = votes.get(token, 0) + 1
        won = next((token for token, number in votes.items() if 2 * number > len(self.groups)), None)
        before, seen.head = seen.head, won
        if won is None or won == before:
            return
        self.grants += 1
        self.on_grant()
        attempt = self.attempts.known.get(won)
        if attempt is not None and attempt.queued_at is not None and not attempt.ended:
            self.on_handover(attempt.task)

    def note_new_primary(self, *, lossy: bool, quarantine_time: float, other_clock: bool) -> None:
        """See ServerState. No server of a quorum is judged alone."""
        del quarantine_time, other_clock
        for seen in self.seen.values() if lossy else ():
            seen.resource.note_data_loss(self.server)

    def _check_fence_of(self, resource: ResourceModel, grant: Grant) -> None:
        """Check S2: the fences of leases grow in the order in which clients get the leases."""
        seen, token = self.seen[resource.key], grant.token.encode()
        if self.attempts.known[token].exempt:
            return
        # An owner may take over from itself before the client of the earlier lease has the reply with its fence.
        owner = resource.owner_of(token)
        if grant.fence <= seen.fence and owner != self._owners.get(resource.key):
            self.trace.violated(2, f"{token!r} has the fence {grant.fence} after {seen.fence}")
        if grant.fence > seen.fence:
            seen.fence, self._owners[resource.key] = grant.fence, owner

    def sweep(self) -> None:
        """Check S4: a waiter gets a resource that has no holder."""
        now = self.trace.world.now
        if now <= self.quiet_since:
            return
        waiting: dict[bytes, float] = {}
        for attempt in self.attempts.known.values():
            if not attempt.ended and attempt.process.awake and not attempt.certain():
                key = attempt.resource.key
                waiting[key] = min(waiting.get(key, now), max(attempt.began, self.quiet_since))
        for key, asked in waiting.items():
            if any(held.attempt.certain() for held in self.leases.held[key]):
                self._held_at[key] = now
            since = max(asked, self._held_at.get(key, 0.0))
            self.slowest = max(self.slowest, now - since)
            if now - since > MAX_IDLE_TIME:
                self.trace.violated(4, f"{key!r} has waiters, and no holder since {since:.3f}")
                self._held_at[key] = now
