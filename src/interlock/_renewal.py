"""Keeping many leases alive: every lease is renewed at ttl/3, many in one call, and every end is told.

Theory. Grants stand in slots of time, by when they are due: for their renewal, or (not renewed, or the server
is away) for their end. A slot is a dict, so that taking a grant out on release is one step, without search and
without a wake-up; the loop looks only at slots whose time has come.

Rules.
 1. A failed renewal is not a loss: the lease is in jeopardy, and tried again, until its deadline.
 2. The fixed rate is ttl/3, counted from when the last renewal was sent.
 3. One bad key never delays another (the script answers each by itself), and no call may take so long that
    the ends of others are told late (`PATIENCE`).
 4. A grant that ended is out of its slot before its release is sent; an answer that comes later changes nothing.
 5. Timers stand still while the machine sleeps and our clock does not: so nobody naps longer than ttl/10 or 1 s.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ._core import FOREVER, Argument, Disconnected, Grant, Port, Script, ServerError, log, margin, renewal_verdict
from .errors import LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._core import Attempt

BATCH: Final = 500  # leases in one script call: two keys each
PATIENCE: Final = 1.0  # seconds that one renewal call may take
LONG: Final = 1.0  # seconds after which a lease is worth a subscription, so that a revocation is pushed to it


class Slot(dict[str, Grant]):
    """The leases that are due at one time, by token; and the shortest ttl that any of them had."""

    shortest = FOREVER


class Renewal:
    """The leases of one client, by when each is due."""

    def __init__(self, port: Port, nudge: Callable[[float], None], channel: str) -> None:
        self.port = port
        self.channel = channel
        self.nudge = nudge  # tells the keeper of a time before which it must not sleep on
        self.slots: dict[float, Slot] = {}
        self.asking: dict[str, Grant] = {}  # those whose renewal is on its way, and who stand in no slot
        self.dropped: deque[Attempt] = deque(maxlen=1000)

    def due(self) -> float:
        """When the keeper must come at the latest."""
        slots = list(self.slots.items())  # in one step: other threads add to it
        if not slots:
            return FOREVER
        nap = min(_nap(slot.shortest) for _, slot in slots)
        return min(self.port.now() + nap, *(due for due, _ in slots))

    def held(self) -> list[Grant]:
        """All leases that have not ended."""
        return [grant for grant in self._all() if grant.ended is None]

    def _all(self) -> Iterator[Grant]:
        for slot in list(self.slots.values()):
            yield from list(slot.values())
        yield from list(self.asking.values())

    def add(self, grant: Grant) -> None:
        """Keep this lease alive from now on."""
        ttl = grant.attempt.ttl
        grain = ttl / 30
        if grant.renews:
            self._put(grant, (grant.overdue - ttl / 6) // grain * grain)
        else:
            self._put_end(grant)

    def _put_end(self, grant: Grant) -> None:
        grain = min(0.05, grant.attempt.ttl / 30)
        self._put(grant, math.ceil(grant.deadline / grain) * grain)

    def _put(self, grant: Grant, due: float) -> None:
        with self.port.mutex:
            slot = self.slots.get(due)
            if slot is None:
                slot = self.slots[due] = Slot()
            ttl = grant.attempt.ttl
            slot.shortest = min(slot.shortest, ttl)
            slot[grant.attempt.token] = grant
            grant.slot = slot
        nap = grant.overdue - ttl / 2 + _nap(ttl)
        self.nudge(min(due, nap))

    def forget(self, grant: Grant) -> None:
        """Renew it no more. No I/O and no lock: also called while it is garbage collected."""
        slot = grant.slot
        if slot is not None:
            slot.pop(grant.attempt.token, None)

    def drop(self, grant: Grant) -> None:
        """Nobody has it any more. Somebody may still work under it: so it runs out, unless the process ends."""
        self.forget(grant)
        grant.ended = "it was dropped without release"
        self.dropped.append(grant.attempt)

    def moved(self, grant: Grant) -> None:
        """Its deadline has been extended."""
        if not grant.renews:
            self.forget(grant)
            self._put_end(grant)

    def lose(self, grant: Grant, why: str) -> None:
        """It is lost: tell its holder, once."""
        self.forget(grant)
        if grant.ended is None:
            log.warning("%s", grant.error(why))
            self.dropped.append(grant.attempt)  # closing takes back what a revocation left
        if lease := grant.lose(why):
            lease._on_lost()

    def revoked(self, token: str, why: str) -> None:
        """The server's word that this lease was taken away."""
        for grant in self._all():
            if grant.token == token:
                self.lose(grant, f"it was revoked: {why}")
                return

    async def tick(self) -> None:
        """Tell the ends that have come, and renew what is due."""
        now = self.port.now()
        oldest = next(self._all(), None)
        if oldest is not None and now > oldest.overdue - oldest.attempt.ttl / 2 + LONG:
            self.port.listen(self.channel)
        with self.port.mutex:
            slots = [self.slots.pop(due) for due in sorted(self.slots) if due <= now]
        batches: dict[Script, list[Grant]] = {}
        for grant in (grant for slot in slots for grant in list(slot.values())):
            if grant.ended is not None:
                continue
            if why := grant.lapsed(now):
                self.lose(grant, why)
            elif grant.renews and grant.deadline < grant.ends:
                batches.setdefault(grant.primitive.script, []).append(grant)
            else:
                self._put_end(grant)
        for script, batch in batches.items():
            for i in range(0, len(batch), BATCH):
                await self._renew(script, batch[i : i + BATCH])

    async def _renew(self, script: Script, grants: list[Grant]) -> None:
        sent = self.port.now()
        patience = min(PATIENCE, max(0.05, min(grant.attempt.ttl for grant in grants) / 3))
        keys: list[str] = []
        args: list[Argument] = ["renew"]
        for grant in grants:
            self.asking[grant.token] = grant
            keys += grant.primitive.keys[:2]
            args += (grant.token, _px(grant, sent))
        try:
            states: list[Any] = await self.port.call(script, keys, args, sent + patience)
        except (Disconnected, ServerError, LockError) as error:
            states = [str(error).encode()] * len(grants)
        now = self.port.now()
        for grant, state in zip(grants, states, strict=True):
            self.asking.pop(grant.token, None)
            if grant.ended is not None:
                continue
            if why := grant.lapsed(now):  # what was lost stays lost
                self.lose(grant, why)
            elif isinstance(state, bytes):
                self._failed(grant, state)
            elif why := renewal_verdict(state):
                self.lose(grant, why)
            else:
                grant.confirmed(sent, _px(grant, sent) / 1000)
                self.add(grant)

    def _failed(self, grant: Grant, cause: bytes) -> None:
        if not grant.failing:
            log.info("%s: a renewal failed and is tried again: %r", grant.primitive, cause)
        grant.failing = True
        self._put(grant, min(self.port.now() + min(1.0, grant.attempt.ttl / 12), grant.deadline))


def _nap(ttl: float) -> float:
    """How long the keeper may sleep while such a lease is held: timers stand still when the machine sleeps."""
    return min(1.0, ttl / 10)


def _px(grant: Grant, now: float) -> int:
    """The ttl to ask for, in ms: not beyond max_hold."""
    ttl = grant.attempt.ttl
    return max(1, int(min(ttl, grant.ends - now + 2 * margin(ttl)) * 1000))
