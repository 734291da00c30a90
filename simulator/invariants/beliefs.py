"""What a client believes of its leases, after each of its steps. S1, S8 and S9, before anybody else is harmed.

Theory. Two holders at once are the harm, and a run seldom gets that far: somebody must want the lock in the
milliseconds in which a client is wrong. So these checks compare each belief with the facts at the step that makes it:
a deadline with the end of the lease in the server, a lease with the pushes that its process has received, and the
leases of a process with those that its session watches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from interlock._api.lock import TAKEN_OVER
from interlock._client.grant import Grant
from interlock._client.lease_ends import DROPPED
from interlock._protocol.timing import margin
from simulator.server import CLOCK_START

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulator.coroutines import Process
    from simulator.plan import Record
    from simulator.server_group import ServerGroup
    from simulator.subjects import ResourceModel, Share

    from .attempts import Attempt, Attempts
    from .leases import Held
    from .trace import Trace

NEVER: Final = -math.inf
GRAIN: Final = 0.001  # seconds: servers round the ends of keys to milliseconds
ROUNDING: Final = 1e-6  # seconds
WAKE_TIME: Final = 0.005  # seconds from a request to the step that uses its reply, if there is no fault


@dataclass(slots=True, eq=False)
class Belief:
    """A lease on which a client relies."""

    held: Held
    deadline: float = -1.0  # the last one that was compared


def end_of(group: ServerGroup, share: Share | None) -> float:
    """The end of this lease in a server, by the world's time; NEVER if the server has no such lease."""
    if share is None:
        return NEVER
    return (share.ends / 1e3 - CLOCK_START / 1e6 - group.primary.server.skew - group.offset) / group.rate


class Beliefs:
    """The beliefs of all clients."""

    def __init__(
        self, trace: Trace, attempts: Attempts, record: Record, groups: Sequence[ServerGroup], *, quiet: bool
    ) -> None:
        self.trace = trace
        self.attempts = attempts
        self.record = record
        self.quiet = quiet  # whether there is no fault of any kind
        self.groups = groups  # where leases last as long as they were granted; none if servers may lose leases
        self.granted_at: Callable[[bytes], float] = lambda _token: 0.0  # when the server granted this token last
        self._mine: dict[Process, list[Belief]] = {}
        self._revoked: dict[Process, dict[bytes, float]] = {}  # the pushes of revocations, and when they arrived

    def note_lease(self, held: Held) -> None:
        """Note a lease that an acquire returned."""
        self._mine.setdefault(held.process, []).append(Belief(held))

    def note_push(self, process: Process, payload: bytes) -> None:
        """Note a push that a process has received."""
        verb, _, rest = payload.partition(b" ")
        if verb == b"revoked":
            self._revoked.setdefault(process, {})[rest.partition(b" ")[0]] = self.trace.world.now

    def has_heard_of_revocation(self, process: Process, token: bytes) -> bool:
        """Whether a push has told this process that the lease which it has under this token was revoked."""
        heard_at = self._revoked.get(process, {}).get(token)
        return heard_at is not None and heard_at >= self.granted_at(token)

    def check_ensured(self, process: Process, grant: Grant) -> None:
        """Check S9 for a lease whose `ensure()` has just passed."""
        if process.clock() >= grant.hold.deadline:
            self.trace.violated(9, f"ensure() has passed for {grant.token}, whose deadline is over")

    def after_step(self, process: Process) -> None:
        """Check the beliefs of a process that has just run."""
        mine = self._mine.get(process)
        if not mine:
            return
        now, session = process.clock(), self.attempts.sessions[process]
        for belief in list(mine):
            held, grant = belief.held, belief.held.grant
            if now >= grant.hold.deadline:
                self.record.meets("deadline passes", process)
                if held.certain():
                    self.trace.violated(9, f"ensure() passes for {grant.token}, whose deadline is over")
                    grant.end("the simulator has reported the violation")
                mine.remove(belief)
            elif grant.end_reason is not None:
                mine.remove(belief)
                self._check_loss(held.attempt, grant, process)
            elif not session.core.requests.closed:
                if grant.hold.deadline != belief.deadline:
                    belief.deadline = grant.hold.deadline
                    self._check_deadline(held.attempt, grant, process.when(grant.hold.deadline))
                self._check_watched(process, grant)

    def _check_deadline(self, attempt: Attempt, grant: Grant, until: float) -> None:
        """Check S1: a client relies on a lease no longer than a majority of the servers keeps it.

        `until`: the client's deadline, by the world's time.
        """
        if not self.groups or attempt.exempt:
            return
        resource, token = attempt.resource, grant.token.encode()
        shares = [self._share_at(group, resource, token) for group in self.groups]
        if any(share is not None and share.revoked for share in shares):
            return  # the client may not have heard of that
        ends = [end_of(group, share) for group, share in zip(self.groups, shares, strict=True)]
        ends_at = sorted(ends)[len(ends) - len(ends) // 2 - 1]  # until then a majority has it
        if ends_at == NEVER:
            if resource.owner_of(token) == token:  # else another process of its owner may have taken the lease over
                self.trace.violated(1, f"{grant.token} is believed until {until:.6f}, and the server has no such lease")
        elif until > ends_at + GRAIN + ROUNDING:
            self.trace.violated(
                1, f"{grant.token} is believed until {until:.6f}, and the server ends it at {ends_at:.6f}"
            )
        elif self.quiet and len(ends) == 1 and resource.owner_of(token) == token:
            self._check_not_early(grant, until, ends_at)

    def _check_not_early(self, grant: Grant, until: float, ends_at: float) -> None:
        """Check the second half of S9."""
        earliest = ends_at - margin(ends_at - self.trace.world.now) - 2 * WAKE_TIME
        if until < earliest and grant.hold.deadline < grant.hold.max_hold_until and not self._is_asked(grant):
            self.trace.violated(9, f"{grant.token} is believed only until {until:.6f}, and lasts until {ends_at:.6f}")

    @staticmethod
    def _share_at(group: ServerGroup, resource: ResourceModel, token: bytes) -> Share | None:
        server = group.primary.server
        server.read_clock()
        return resource.read(server).holders.get(token)

    def _check_loss(self, attempt: Attempt, grant: Grant, process: Process) -> None:
        """Check S8: a client gives up no lease that is alive by its own clock and in the server."""
        own = grant.end_reason in {Grant.RELEASED, DROPPED} or self.attempts.sessions[process].core.requests.closed
        if own or not self.groups or grant.token.encode() in self._revoked.get(process, {}):
            return
        shares = [self._share_at(group, attempt.resource, grant.token.encode()) for group in self.groups]
        if grant.end_reason == TAKEN_OVER and self._is_granted_anew(grant, shares):
            return
        if all(share is not None and not share.revoked for share in shares):
            self.trace.violated(8, f"{grant.token} is given up, and the server has it: {grant.end_reason}")

    def _is_granted_anew(self, grant: Grant, shares: Sequence[Share | None]) -> bool:
        """Whether the server has another grant of this token than the one that has ended.

        A late copy of an owner's acquire takes the lock over from the same owner's newer lease. The client has no reply
        to that copy. It goes by the fences that it knows, and hears of the loss of the newer lease from its renewal.
        """
        newest = max((belief.held.grant.fence for belief in self._mine[self._process_of(grant)]), default=0)
        return all(share is not None and share.fence > newest > grant.fence for share in shares)

    def _process_of(self, grant: Grant) -> Process:
        return self.attempts.known[grant.token.encode()].process

    def _is_asked(self, grant: Grant) -> bool:
        """Whether a request about this lease may have lengthened it, and its reply is on its way."""
        session = self.attempts.sessions[self.attempts.known[grant.token.encode()].process]
        return grant.token in session.book.set_aside or self.attempts.unanswered[grant.token.encode()] > 0

    def _check_watched(self, process: Process, grant: Grant) -> None:
        """Check S8: a client that knows of a revocation heeds it, and watches each of its leases."""
        if self.has_heard_of_revocation(process, grant.token.encode()):
            self.trace.violated(8, f"ensure() passes for {grant.token}, and a push has told of its revocation")
            grant.end("the simulator has reported the violation")
        book = self.attempts.sessions[process].book
        if book.bucket_of(grant.hold) is None and book.set_aside.get(grant.token) is not grant.hold:
            self.trace.violated(8, f"nobody watches {grant.token} any more, which is held")
            grant.end("the simulator has reported the violation")
