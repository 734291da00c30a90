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

import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from ._core import (
    FOREVER,
    GRANTED,
    UNSETTLED,
    Disconnected,
    Grant,
    Message,
    Place,
    Port,
    Script,
    ServerError,
    log,
    margin,
    renewal_verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._core import Attempt

BATCH: Final = 500  # leases in one script call: two keys each
PATIENCE: Final = 1.0  # seconds that one renewal call may take
AGAIN_IN: Final = 0.1  # seconds after which the keeper sees again to what it could not finish
LONG: Final = 1.0  # seconds after which a lease is worth a subscription, so that a revocation is pushed to it


class Slot(dict[str, Grant]):
    """The leases that are due at one time, by token; and the shortest ttl that any of them had."""

    shortest = FOREVER


class Renewal:
    """The leases of one client, by when each is due."""

    def __init__(self, port: Port, nudge: Callable[[float], None]) -> None:
        self.port = port
        self.nudge = nudge  # tells the keeper of a time before which it must not sleep on
        self.slots: dict[float, Slot] = {}
        self.asking: dict[str, Grant] = {}  # those who are being seen to; each is here or in a slot, always
        self.dropped: deque[tuple[float, Attempt]] = deque(maxlen=1000)  # until when, what

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
            self.asking.pop(grant.attempt.token, None)
        nap = grant.overdue - ttl / 2 + _nap(ttl)
        self.nudge(min(due, nap))

    def forget(self, grant: Grant) -> None:
        """Renew it no more. No I/O and no lock: also called while it is garbage collected."""
        slot = grant.slot
        if slot is not None:
            slot.pop(grant.attempt.token, None)
        self.asking.pop(grant.attempt.token, None)

    def drop(self, grant: Grant) -> None:
        """Nobody has it any more. Somebody may still work under it: so it runs out, unless the process ends."""
        self.forget(grant)
        grant.ended = "it was dropped without release"
        self._leave_behind(grant)

    def _leave_behind(self, grant: Grant) -> None:
        """Closing takes it back, as long as something of it may be left."""
        now = self.port.now()
        with contextlib.suppress(IndexError):  # empty, or another thread was at it
            while self.dropped[0][0] < now:
                self.dropped.popleft()
        self.dropped.append((now + grant.attempt.ttl, grant.attempt))

    def moved(self, grant: Grant) -> None:
        """Its deadline has been extended."""
        if not grant.renews:
            before = grant.slot
            self._put_end(grant)  # first into the new place, then out of the old one
            if before is not None and before is not grant.slot:
                before.pop(grant.attempt.token, None)

    def lose(self, grant: Grant, why: str) -> None:
        """It is lost: tell its holder, once."""
        self.forget(grant)
        if grant.ended is None:
            log.warning("%s", grant.error(why))
            self._leave_behind(grant)
        if lease := grant.lose(why):
            try:
                lease._on_lost()
            except Exception:  # noqa: BLE001 (one that can't be told must not keep the others from it)
                log.exception("interlock: the loss of %s could not be told", grant.primitive)

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
            self.port.listen(oldest.primitive.keys[0])
        with self.port.mutex:
            for due in sorted(due for due in self.slots if due <= now):
                self.asking.update(self.slots[due])  # first in the one place, then out of the other
                del self.slots[due]
        try:
            await self._settle(now)
        finally:  # whatever went wrong, nobody is forgotten
            for grant in list(self.asking.values()):
                self._put(grant, now + AGAIN_IN)

    async def _settle(self, now: float) -> None:
        due: list[Grant] = []
        for grant in list(self.asking.values()):
            if grant.ended is not None:
                self.forget(grant)
            elif why := grant.lapsed(now):
                self.lose(grant, why)
            elif grant.renews and grant.deadline < grant.ends:
                due.append(grant)
            else:
                self._put_end(grant)
        silent: dict[object, bytes] = {}
        for i in range(0, len(due), BATCH):
            await self._renew(due[i : i + BATCH], silent)

    async def _renew(self, grants: list[Grant], silent: dict[object, bytes]) -> None:
        """Renew these at once. `silent` has the nodes that did not answer: to ask for more would tell ends late."""
        sent, batches = self.port.now(), dict[tuple[Script, Place], list[Grant]]()
        for grant in grants:
            if grant.ended is None:
                place = self.port.place(grant.primitive.keys[0])
                batches.setdefault((grant.primitive.script, place), []).append(grant)
                if grant.overdue - grant.attempt.ttl / 2 + LONG < sent:
                    self.port.listen(grant.primitive.keys[0])
        asked = [(place, batch) for (_, place), batch in batches.items() if place.node not in silent]
        replies: list[Any] = []
        if asked:
            shortest = min(grant.attempt.ttl for _, batch in asked for grant in batch)
            patience = min(PATIENCE, max(0.05, shortest / 3))
            replies = await self.port.calls([_message(batch, sent) for _, batch in asked], sent + patience)
        stale: list[Grant] = []
        apart: list[Grant] = []
        for (place, batch), reply in zip(asked, replies, strict=True):
            if isinstance(reply, Disconnected) and reply.stale:
                stale += batch  # it had died while idle: that says nothing of the server
            elif len(batch) > 1 and isinstance(reply, ServerError) and str(reply).startswith("TRYAGAIN"):
                apart += batch  # their slot is on its way to another node, and some of them have arrived
            elif isinstance(reply, Exception):
                if not isinstance(reply, ServerError):
                    silent[place.node] = _said(reply)
                self._answered(batch, [_said(reply)] * len(batch), sent)
            else:
                counts = GRANTED not in reply or not self.port.unsettled(batch[0].primitive.keys[0])
                states = reply if counts else [UNSETTLED.encode() if each == GRANTED else each for each in reply]
                self._answered(batch, states, sent)
        for (_, place), batch in batches.items():
            if (place, batch) not in asked:
                self._answered(batch, [silent[place.node]] * len(batch), sent)
        if stale:
            await self._renew(stale, silent)
        for grant in apart:
            await self._renew([grant], silent)

    def _answered(self, grants: list[Grant], states: list[Any], sent: float) -> None:
        now = self.port.now()
        for grant, state in zip(grants, states, strict=False):
            if grant.ended is not None:
                self.forget(grant)
            elif why := grant.lapsed(now):  # what was lost stays lost
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
            log.info("%s: a renewal failed and is tried again: %s", grant.primitive, cause.decode(errors="replace"))
        grant.failing = True
        self._put(grant, min(self.port.now() + min(1.0, grant.attempt.ttl / 12), grant.deadline))


def _nap(ttl: float) -> float:
    """How long the keeper may sleep while such a lease is held: timers stand still when the machine sleeps."""
    return min(1.0, ttl / 10)


def _message(grants: list[Grant], sent: float) -> Message:
    """The renewal of leases that are in one place."""
    keys = [key for grant in grants for key in grant.primitive.renewed]
    args = [word for grant in grants for word in (grant.token, str(_px(grant, sent)))]
    return grants[0].primitive.script, keys, ["renew", *args]


def _said(error: Exception) -> bytes:
    return (str(error) or type(error).__name__).encode()


def _px(grant: Grant, now: float) -> int:
    """The ttl to ask for, in ms: not beyond max_hold."""
    ttl = grant.attempt.ttl
    return max(1, int(min(ttl, grant.ends - now + 2 * margin(ttl, grant.attempt.drift)) * 1000))
