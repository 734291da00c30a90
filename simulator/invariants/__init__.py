"""What must hold at every instant, watched from outside: in the server after each script, in clients after each event.

Rules, by the names that violations print. docs/rules.md lists planted bugs that break them.
 S1. `ensure()` would pass for at most one lease in the whole system; for a shared resource, for no more leases than the
     resource allows (`ResourceModel.exclusion_error`). The same holds in the server, by its own clock; and the server
     has every lease for which `ensure()` would pass.
 S2. Fences grow strictly in the order of grants; a write right after `ensure()` never has a fence that is too old.
 S3. After any script, no key is without a TTL, and the TTL of no record ends before the clock has reached its fence. No
     grant is longer than its request, and no unconfirmed handover lasts longer than its handover ttl.
 S4. If there is room for the first live waiter, that waiter gets its grant in time; no acquire waits for ever; a
     timeout bounds the call. A call reports that another attempt holds the resource only if a server has answered
     lately. A waiter that acquires nothing (at a latch, a barrier, an election) gets its news in time. After a new
     subscription each waiter asks at once.
 S5. Nothing is left: a token that was taken back never holds again; with clean weather an attempt that ended without a
     lease is no holder and no waiter after a second; in the end server and clients are empty.
 S6. No later waiter overtakes a live waiter, unless the latter lost its subscription, so that no push can wake it.
 S7. No client renews a lease that has ended.
 S8. A client reports a lost lease soon and once; a released lease never. It watches each lease that it holds, and gives
     up none that is alive by its own clock and in the server. A revocation takes the grant that it finds: a handover
     that its waiter has not confirmed, and not the grant that the waiter may get later under the same token.
 S9. A lease is alive when the caller gets it, and `ensure()` never passes again after it failed. Without faults
     `ensure()` passes for as long as the server keeps the lease, but for the time of a trip.
S10. The API raises only exceptions of `interlock.errors`, and the log has no error.
S11. A client sends an `execute` once; the server runs it at most once and only while its lease holds; and the call
     never reports otherwise.
S12. The rules of each subject, which only the subject can check.
S13. While leases that a server lost may last, the server grants nothing; it may confirm a lease to its holder. A person
     ends a quarantine only by a message that names it, not by a message meant for another server.
S14. A lease passes from caller to caller of one process only while it is certainly alive and half of its ttl is left,
     no renewal of it is due or has failed, no request of its user is unanswered, and no push has told of its
     revocation; within the budget once others wait, and only by fresh replies of the server.
S15. Each claim of a client goes from state to state by the table of `_client/claim.py` only, and stands in the places
     of the client where its events have led it.

A lease that was revoked by force is outside S1 and the second half of S2: its holder learns of the revocation later.
The same is true of leases that nobody there knows of: the server has lost all keys of that name, even the record, and
the first request is that of a client that started after the loss. Then S13 ends, too.
S2 begins anew if a server loses the grants that followed a quarantine which a person has ended: the fences of these
grants were ahead of the clock by the rest of that quarantine, and the next server knows only its own clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.coverage import Coverage

from .attempts import Attempts
from .beliefs import Beliefs
from .claims import Claims
from .leases import Leases
from .passing import Passing
from .server_state import ServerState
from .trace import Trace, Violation
from .votes import Votes

if TYPE_CHECKING:
    from interlock._client.grant import Grant
    from simulator.coroutines import Process
    from simulator.plan import Record
    from simulator.profiles import Profile
    from simulator.scheduler import World
    from simulator.server_group import ServerGroup
    from simulator.subjects import ResourceModel, Share

__all__ = ["Monitor", "Trace", "Violation"]

SWEEP_INTERVAL: Final = 0.25  # seconds between two checks for overdue events


class Monitor:
    """Watches servers and clients, and changes nothing."""

    def __init__(self, trace: Trace, world: World, groups: list[ServerGroup], record: Record, profile: Profile) -> None:
        self.trace = trace
        self.world = world
        self.attempts = Attempts(trace, groups[0], clean=profile.clean)
        self.leases = Leases(trace, self.attempts, record.counts, trusted=profile.trusted)
        if len(groups) == 1 and not profile.changes_primary:
            self.leases.only_server = lambda: groups[0].primary.server
        quiet = profile.clean and not profile.rates
        if len(groups) == 1:
            self.server_state = ServerState(trace, groups[0], self.attempts, quiet=quiet, trusted=profile.trusted)
        else:
            self.server_state = Votes(trace, groups, self.attempts, self.leases, profile)
        state = self.server_state
        state.on_fences_lost = self.leases.forget_fences
        state.longest_quarantine = profile.max_ttl + profile.isolation_grace
        lasting = groups if profile.trusted and not profile.loses_leases else []
        self.beliefs = Beliefs(trace, self.attempts, record, lasting, quiet=quiet)
        self.beliefs.granted_at = lambda token: state.granted_at.get(token, 0.0)
        self.leases.note_belief = self.beliefs.note_lease
        self.passing = Passing(trace, self.attempts, self.beliefs, record)
        self.claims = Claims(trace)
        self.coverage = Coverage(self.attempts.sessions, self._is_revoked, self._is_handed_over)
        record.meets = self.coverage.note
        self.sweeping = True
        world.after_step = self._after_step

    def _after_step(self, process: Process) -> None:
        """Check what a step of this process can break."""
        self.beliefs.after_step(process)
        self.passing.after_step(process)
        self.leases.after_step()
        self.claims.after_step(process)

    def _share(self, token: str) -> Share | None:
        """The lease of this token as the server had it after its last script."""
        attempt = self.attempts.known.get(token.encode())
        return self.server_state.seen[attempt.resource.key].holders.get(token.encode()) if attempt else None

    def _is_revoked(self, grant: Grant) -> bool:
        share = self._share(grant.token)
        return share is not None and share.revoked

    def _is_handed_over(self, token: str) -> bool:
        attempt = self.attempts.known.get(token.encode())
        return attempt is not None and not attempt.confirmed and self._share(token) is not None

    def watch(self, resource: ResourceModel) -> None:
        """Watch a resource that workers will use."""
        self.server_state.watch(resource)
        self.attempts.watch(resource)
        self.leases.watch(resource)

    def note_new_primary(self, *, lossy: bool, quarantine_time: float, other_clock: bool) -> None:
        """Note that another process serves now; leases that it lost may last for so many seconds."""
        self.server_state.note_new_primary(lossy=lossy, quarantine_time=quarantine_time, other_clock=other_clock)

    def sweep(self) -> None:
        """Report overdue events, and schedule the next check."""
        self.leases.sweep()
        self.attempts.sweep()
        self.server_state.sweep()
        self.claims.sweep()
        if self.sweeping:
            self.world.at(self.world.now + SWEEP_INTERVAL, self.sweep)
