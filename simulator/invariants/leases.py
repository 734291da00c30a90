"""Leases: what clients hold and believe. Rules 1, 8, 9 and the resource's half of 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from interlock._client.grant import Grant
from simulator.subjects.subject import Share

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from simulator.coroutines import Process
    from simulator.subjects import Thing

    from .attempts import Attempt, Attempts
    from .trace import Trace

TOLD: Final = 0.5  # seconds after which a loss must have been told, whatever is asked of a server meanwhile


@dataclass
class Held:
    """A lease in a client."""

    process: Process
    grant: Grant
    attempt: Attempt
    share: Share
    lapsed_at: float | None = None
    told: int = 0


class Leases:
    """All leases that clients have, by the key of what they are on."""

    def __init__(self, trace: Trace, attempts: Attempts, counts: Counter[str], *, trusted: bool) -> None:
        self.trace = trace
        self.attempts = attempts
        self.counts = counts
        self.trusted = trusted  # the server loses no data and its clock is never set
        self.held: dict[bytes, list[Held]] = {}
        self.had: Callable[[Thing, Grant], None] = lambda _thing, _grant: None  # somebody has a new lease
        self._close = False  # whether somebody must be watched closely
        self._written: dict[bytes, tuple[int, bytes]] = {}  # the newest fence that the protected resource accepted

    def watch(self, thing: Thing) -> None:
        """Something that will be used."""
        self.held[thing.key] = []
        self._written[thing.key] = 0, b""

    def leased(self, process: Process, grant: Grant) -> None:
        """An acquire returns this."""
        token = grant.token.encode()
        attempt = self.attempts.known[token]
        if attempt.grant is grant:
            return  # had once more
        attempt.grant = grant
        held = Held(process, grant, attempt, Share(attempt.thing.wants(token), grant.fence))
        self.held[attempt.thing.key].append(held)
        self._close |= len(self.held[attempt.thing.key]) > 1
        until = process.when(grant.deadline)
        self.trace.note("%s holds %s fence %d until %.6f", process.name, grant.token, grant.fence, until)
        self.had(attempt.thing, grant)
        if not held.attempt.certain():
            self.trace.violated(9, f"{grant.token} is returned though {grant.reason_ended(process.clock())}")

    def told(self, lease: Any) -> None:
        """Its holder hears that a lease is lost."""
        self.trace.note("the holder is told: %s: %s", lease._grant.token, lease._grant.end_reason)
        for held in self.held[lease._grant.resource.keys[0].encode()]:
            if held.grant is lease._grant:
                held.told += 1
                if held.told > 1 or held.grant.end_reason == Grant.RELEASED:
                    self.trace.violated(8, f"{held.grant.token} is told {held.told} times: {held.grant.end_reason}")

    def after_step(self) -> None:
        """Rules 1 and 9, at every instant at which they can be broken."""
        if not self._close:
            return
        self._close = False
        for holds in self.held.values():
            if not holds or (len(holds) == 1 and holds[0].lapsed_at is None):
                continue
            if self.trusted and self._together(holds):
                certain = [held for held in holds if held.attempt.certain() and not held.attempt.ousted]
                if why := self._together(certain):
                    self.trace.violated(1, f"{certain[0].attempt.thing.key!r} is {why}")
                    certain[0].grant.lose("the simulation has seen enough of it")
            self._tidy(holds)
            self._close |= any(held.lapsed_at is not None for held in holds) or self._together(holds) is not None

    @staticmethod
    def _together(holds: list[Held]) -> str | None:
        """Why these can't be had at once."""
        if len(holds) < 2:
            return None
        return holds[0].attempt.thing.apart({held.grant.token.encode(): held.share for held in holds})

    def sweep(self) -> None:
        """What should have happened by now."""
        for holds in self.held.values():
            if holds:
                self._tidy(holds)
                self._close = True

    def _tidy(self, holds: list[Held]) -> None:
        for held in list(holds):
            certain, now = held.attempt.certain(), self.trace.world.now
            if held.lapsed_at is None:
                if not certain and held.process.awake:  # now its code could have seen it
                    held.lapsed_at = now
            elif certain:
                self.trace.violated(9, f"ensure() passes again for {held.grant.token}")
                held.lapsed_at = None
            if held.lapsed_at is not None and not certain and self._settled(held):
                holds.remove(held)

    def _settled(self, held: Held) -> bool:
        """Whether nothing more is expected of an ended lease. Rule 8."""
        grant = held.grant
        if not held.process.alive or grant.lease is None or grant.lease() is None:
            return True
        if grant.end_reason == Grant.RELEASED or held.told:
            return True
        since = max(held.lapsed_at or 0.0, held.process.paused_until)
        if self.trace.world.now - since > TOLD:
            why = grant.reason_ended(held.process.clock())
            self.trace.violated(8, f"nobody is told that {grant.token} is lost: {why}")
            return True
        return False

    def wrote(self, grant: Grant, *, sure: bool) -> None:
        """The protected resource gets a write with this fence; `sure`: ensure() passed in this instant."""
        token = grant.token.encode()
        attempt = self.attempts.known[token]
        thing = attempt.thing
        newest, writer = self._written[thing.key]
        if not thing.alone(token):
            self.counts["write beside others"] += 1
        elif grant.fence >= newest:
            self._written[thing.key] = grant.fence, thing.owner(token)
            self.counts["write accepted"] += 1
        else:
            self.counts["write refused by its fence"] += 1
            if sure and self.trusted and not attempt.ousted and thing.owner(token) != writer:
                self.trace.violated(2, f"a certain holder's write with {grant.fence} comes after {newest}")
