"""Leases: those that clients hold and rely on. S1, S8, S9 and the resource's half of S2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._client.grant import Grant
from simulator.subjects.subject import Share

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from simulator.coroutines import Process
    from simulator.server import Server
    from simulator.subjects import ResourceModel

    from .attempts import Attempt, Attempts
    from .trace import Trace

REPORT_TIME: Final = 0.5  # seconds within which a client must report a loss, even during a request


@dataclass
class Held:
    """A lease that a client holds."""

    process: Process
    grant: Grant
    attempt: Attempt
    share: Share
    seen_ended_at: float | None = None
    reports: int = 0  # how often the client reported the loss

    def certain(self) -> bool:
        """Whether `ensure()` of this lease would pass now."""
        return self.grant.reason_ended(self.process.clock()) is None


class Leases:
    """All leases of all clients, by the key of the resource."""

    def __init__(self, trace: Trace, attempts: Attempts, counts: Counter[str], *, trusted: bool) -> None:
        self.trace = trace
        self.attempts = attempts
        self.counts = counts
        # the only server that ever grants; None if others may take over or vote
        self.only_server: Callable[[], Server] | None = None
        self.trusted = trusted  # the server loses no data and its clock is never set
        self.held: dict[bytes, list[Held]] = {}
        # called for each new lease
        self.on_lease: Callable[[ResourceModel, Grant], None] = lambda _resource, _grant: None
        self.note_belief: Callable[[Held], None] = lambda _held: None  # the same
        self._close_look = False  # whether to check after every step
        # the newest fence of a lease that excludes all others, and its token
        self._newest: dict[bytes, tuple[int, bytes]] = {}
        self._written: dict[bytes, tuple[int, bytes]] = {}  # the newest fence that the protected resource accepted

    def watch(self, resource: ResourceModel) -> None:
        """Watch a resource that workers will use."""
        self.held[resource.key] = []
        self._written[resource.key] = 0, b""

    def note_lease(self, process: Process, grant: Grant) -> None:
        """Note a lease that an acquire returned."""
        token = grant.token.encode()
        attempt = self.attempts.known[token]
        if attempt.grant is grant:
            return  # acquired again by its holder
        attempt.grant, attempt.task = grant, self.trace.world.current or attempt.task  # of a cohort, another task's
        held = Held(process, grant, attempt, Share(attempt.resource.permits_wanted(token), grant.fence))
        self.held[attempt.resource.key].append(held)
        self.note_belief(held)
        self._close_look |= len(self.held[attempt.resource.key]) > 1
        until = process.when(grant.hold.deadline)
        self.trace.note("%s holds %s fence %d until %.6f", process.name, grant.token, grant.fence, until)
        self.on_lease(attempt.resource, grant)
        if self.trusted and attempt.resource.is_exclusive(token) and not attempt.exempt:
            self._check_fence(attempt.resource, grant)
        if not held.certain():
            self.trace.violated(9, f"{grant.token} is returned though {grant.reason_ended(process.clock())}")

    def _check_fence(self, resource: ResourceModel, grant: Grant) -> None:
        """Check S2 for the sections of a cohort, too, of which the server sees only what they reserve."""
        token, server = grant.token.encode(), self.only_server
        record: bytes | None = server().find(resource.keys[1], bytes) if server is not None else None
        newest, before = self._newest.get(resource.key, (0, token))
        # An owner may get the lease late that another one of the same name has taken over.
        if grant.fence <= newest and (token == before or resource.owner_of(token) != resource.owner_of(before)):
            self.trace.violated(2, f"{grant.token} has the fence {grant.fence}, after a lease with {newest}")
        if record is not None and int(record.split()[2]) < grant.fence:
            self.trace.violated(2, f"{grant.token} has the fence {grant.fence}, and the record is {record!r}")
        self._newest[resource.key] = max((grant.fence, token), (newest, before))

    def forget_fences(self, key: bytes) -> None:
        """Compare the fences of this resource with no earlier ones."""
        self._newest.pop(key, None)
        self._written[key] = 0, b""

    def note_loss(self, lease: Any) -> None:
        """Note that a client reported a lost lease to its holder."""
        self.trace.note("the client reports the loss of %s: %s", lease._grant.token, lease._grant.end_reason)
        for held in self.held[lease._grant.resource.keys[0].encode()]:
            if held.grant is lease._grant:
                held.reports += 1
                if held.reports > 1 or held.grant.end_reason == Grant.RELEASED:
                    self.trace.violated(
                        8, f"{held.reports} reports of the loss of {held.grant.token}: {held.grant.end_reason}"
                    )

    def after_step(self) -> None:
        """Check S1 and S9 at every instant at which code can break them."""
        if not self._close_look:
            return
        self._close_look = False
        for holds in self.held.values():
            if not holds or (len(holds) == 1 and holds[0].seen_ended_at is None):
                continue
            if self.trusted and self._exclusion_error(holds):
                certain = [held for held in holds if held.certain() and not held.attempt.exempt]
                if why := self._exclusion_error(certain):
                    self.trace.violated(1, f"{certain[0].attempt.resource.key!r} is {why}")
                    certain[0].grant.end("the simulator has reported the violation")
            self._drop_ended(holds)
            self._close_look |= (
                any(held.seen_ended_at is not None for held in holds) or self._exclusion_error(holds) is not None
            )

    @staticmethod
    def _exclusion_error(holds: list[Held]) -> str | None:
        """Return why nobody may hold these leases at the same time; None if that is allowed."""
        if len(holds) < 2:
            return None
        by_token = {held.grant.token.encode(): held.share for held in holds}
        if len(by_token) < len(holds):
            return "held by two callers of one cohort"
        return holds[0].attempt.resource.exclusion_error(by_token)

    def sweep(self) -> None:
        """Report overdue events."""
        for holds in self.held.values():
            if holds:
                self._drop_ended(holds)
                self._close_look = True

    def _drop_ended(self, holds: list[Held]) -> None:
        for held in list(holds):
            certain, now = held.certain(), self.trace.world.now
            if held.seen_ended_at is None:
                if not certain and held.process.awake:  # now its code could have seen the loss
                    held.seen_ended_at = now
            elif certain:
                self.trace.violated(9, f"ensure() passes again for {held.grant.token}")
                held.seen_ended_at = None
            if held.seen_ended_at is not None and not certain and self._is_reported(held):
                holds.remove(held)

    def _is_reported(self, held: Held) -> bool:
        """Whether an ended lease needs no further report. S8."""
        grant = held.grant
        if not held.process.alive or grant.lease is None or grant.lease() is None:
            return True
        if grant.end_reason == Grant.RELEASED or held.reports:
            return True
        since = max(held.seen_ended_at or 0.0, held.process.paused_until)
        if self.trace.world.now - since > REPORT_TIME:
            why = grant.reason_ended(held.process.clock())
            self.trace.violated(8, f"the client does not report the loss of {grant.token}: {why}")
            return True
        return False

    def check_write(self, grant: Grant, *, sure: bool) -> None:
        """Check a write with this fence to the protected resource. `sure`: ensure() passed in this instant."""
        token = grant.token.encode()
        attempt = self.attempts.known[token]
        resource = attempt.resource
        newest, writer = self._written[resource.key]
        if not resource.is_exclusive(token) or attempt.exempt:
            self.counts["write without exclusion"] += 1
        elif grant.fence >= newest:
            self._written[resource.key] = grant.fence, resource.owner_of(token)
            self.counts["write accepted"] += 1
        else:
            self.counts["write refused by its fence"] += 1
            if sure and self.trusted and resource.owner_of(token) != writer:
                self.trace.violated(2, f"a certain holder's write with {grant.fence} comes after {newest}")
