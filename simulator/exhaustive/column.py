"""A server and what is on its way between it and the clients: all of a state that concerns one server.

Theory. Servers know nothing of each other, so what can happen to one is the same whatever the others do. A column is
looked up by its number, and each of its steps is computed once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from simulator.server import CLOCK_START

from .node import GRANTED, NOTHING, TICK, TTL, TTL_MS, Lua, StoredLock, identity_stamp, token

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_US: Final = TICK * 1000
_STEPS: Final = (
    "steps", "restart_steps", "after_tick", "start_attempt", "move_to_phase", "ask_again", "answer",
    "with_clients_swapped", "without_late_messages", "fence_after_quiet",
)  # fmt: skip
VOTING, AGREEING, HOLDING, OVER = range(4)  # what a client, or one attempt of it, is at
NEVER: Final = -(10**15)  # a fence below all others


class Exchange(NamedTuple):
    """Between an attempt and this server: what has not arrived yet, and the answer that its client may count."""

    attempt: int
    phase: int = VOTING
    vote: bool = True
    fence: int | None = None
    renewal: bool = False
    back: bool = False
    """A release on its way, after which the same attempt goes on."""
    answer: int | None = None
    """To what is asked now: the fence it votes for, or 1 for yes."""


class Column(NamedTuple):
    """A server, seen from now."""

    skew: int
    """Ticks that its clock is ahead."""
    restarts: int = 0
    since: int = -TTL
    """Ticks since its last restart, negative; TTL at most."""
    stored: StoredLock = NOTHING
    before: tuple[StoredLock, ...] = ()
    """What it remembered before its last writes, which a restart may lose."""
    exchanges: tuple[tuple[Exchange, ...], ...] = ((), ())
    """Of A and B; the attempt that is not over comes last."""


class Event(NamedTuple):
    """What happened, for people."""

    what: str
    reply: Any = None


class Step(NamedTuple):
    """What can happen to a column."""

    event: Event
    after: int
    cost: int
    """How many faults it takes."""
    client: int = -1
    """Whose message it is, of which attempt, and what that sends it for: votes, an agreed fence, a renewal, the end."""
    attempt: int = 0
    phase: int = -1


class Columns:
    """All columns met so far, by number. `previous`: whom clients knew before a restart; `tail`: see Bounds."""

    def __init__(self, planted: Callable[[str], str], previous: str, tail: int) -> None:
        self.lua = Lua(planted)
        self._previous = previous.encode()
        self._tail = tail
        self.all: list[Column] = []
        self._numbers: dict[Column, int] = {}
        for step in _STEPS:
            setattr(self, step, cache(getattr(self, step)))

    def number(self, column: Column) -> int:
        """Of this one."""
        number = self._numbers.get(column)
        if number is None:
            number = self._numbers[column] = len(self.all)
            self.all.append(column)
        return number

    # What happens at a server

    def _ask(self, at: Column, *words: bytes) -> tuple[StoredLock, Any]:
        message = (*words, identity_stamp(at.skew, at.restarts, at.since, self._previous))
        return self.lua.run(at.stored, at.skew, message)

    def _vote(self, at: Column, name: bytes) -> tuple[StoredLock, Any]:
        return self._ask(at, b"acquire", name, b"%d" % TTL_MS, b"%d" % TTL_MS, b"0", b"-", b"0", b"", b"lock")

    def _fence(self, at: Column, name: bytes, fence: int) -> tuple[StoredLock, Any]:
        return self._ask(at, b"fence", name, b"%d" % (CLOCK_START + fence))

    def steps(self, number: int) -> list[Step]:
        """Every message that can arrive here now, and changes something."""
        at, found = self.all[number], list[Step]()
        for client, exchanges in enumerate(at.exchanges):
            for index, exchange in enumerate(exchanges):
                self._arrivals(found, at, client, index, exchange)
        return found

    def _arrivals(self, found: list[Step], at: Column, client: int, index: int, exchange: Exchange) -> None:
        name, late = token(client, exchange.attempt), int(exchange.phase == OVER)

        def arrives(what: str, phase: int, stored: StoredLock, reply: Any, after: Exchange, cost: int = 0) -> None:
            if stored != at.stored or after.answer != exchange.answer:
                event = Event(f"{name.decode()}'s {what}", reply)
                number = self.number(self._with(at, stored, client, index, after))
                found.append(Step(event, number, cost, client, exchange.attempt, phase))

        if exchange.vote:
            stored, reply = self._vote(at, name)
            answer = exchange.answer
            if exchange.phase == VOTING and answer is None and reply[0] == GRANTED:
                answer = reply[1] - CLOCK_START
            cost = late + exchange.back  # it may have overtaken the release
            arrives("vote", VOTING, stored, reply, exchange._replace(vote=False, answer=answer), cost)
            arrives("vote, with a copy to come", VOTING, stored, reply, exchange._replace(answer=answer), cost + 1)
        if exchange.fence is not None:
            stored, reply = self._fence(at, name, exchange.fence)
            answer = 1 if exchange.phase == AGREEING and reply == [GRANTED] else exchange.answer
            arrives("agreed fence", AGREEING, stored, reply, exchange._replace(fence=None, answer=answer), late)
        if exchange.renewal:
            stored, reply = self._ask(at, b"renew", name, b"%d" % TTL_MS)
            answer = 1 if reply == [GRANTED] else exchange.answer
            arrives("renewal", HOLDING, stored, reply, exchange._replace(renewal=False, answer=answer))
        if exchange.back or exchange.phase == OVER:
            stored, reply = self._ask(at, b"release", name, b"0")
            arrives("release", VOTING if exchange.back else OVER, stored, reply, exchange._replace(back=False))

    def _with(self, at: Column, stored: StoredLock, client: int, index: int, exchange: Exchange) -> Column:
        exchanges = at.exchanges[client]
        before = (at.stored, *at.before)[: self._tail] if stored != at.stored else at.before
        at = at._replace(stored=stored, before=before)
        return self._without_ended(_with_exchanges(at, client, (*exchanges[:index], exchange, *exchanges[index + 1 :])))

    def _without_ended(self, at: Column) -> Column:
        """Forget attempts that are over and have nothing here, nor on its way."""

        def matters(client: int, exchange: Exchange) -> bool:
            name = token(client, exchange.attempt)
            if exchange.phase != OVER or exchange.vote or at.stored.holder == name:
                return True
            return exchange.fence is not None and self._fence(at, name, exchange.fence)[0] != at.stored

        return at._replace(
            exchanges=tuple(
                tuple([exchange for exchange in exchanges if matters(client, exchange)])
                for client, exchanges in enumerate(at.exchanges)
            )
        )

    def restart_steps(self, number: int) -> list[Step]:
        """It dies and is back at once, in the ways that the bounds allow."""
        at = self.all[number]
        ways = [("without its last writes", each) for each in at.before] if self._tail else [("empty", NOTHING)]
        fresh = at._replace(restarts=at.restarts + 1, since=0, before=())
        return [
            Step(Event(f"restarts {how}"), self.number(self._without_ended(fresh._replace(stored=stored))), 0)
            for how, stored in ways
        ]

    def after_tick(self, number: int) -> int:
        """A tick later."""
        at = self.all[number]

        def aged(exchange: Exchange) -> Exchange:
            fence = None if exchange.fence is None else exchange.fence - TICK_US
            answer = (
                exchange.answer if exchange.answer is None or exchange.phase != VOTING else exchange.answer - TICK_US
            )
            return exchange._replace(fence=fence, answer=answer)

        return self.number(
            self._without_ended(
                at._replace(
                    since=max(at.since - 1, -TTL),
                    stored=at.stored.after_tick(),
                    before=tuple([stored.after_tick() for stored in at.before]),
                    exchanges=tuple([tuple([aged(exchange) for exchange in exchanges]) for exchanges in at.exchanges]),
                )
            )
        )

    # What clients do, as far as it concerns a server

    def start_attempt(self, number: int, client: int, attempt: int) -> int:
        """An attempt asks for its vote."""
        at = self.all[number]
        return self.number(_with_exchanges(at, client, (*at.exchanges[client], Exchange(attempt))))

    def move_to_phase(
        self, number: int, client: int, phase: int, fence: int | None = None, renewal: bool = False
    ) -> int:
        """The attempt goes on to this phase, and says so here."""
        changes: dict[str, Any] = {"phase": phase, "answer": None, "renewal": renewal}
        if phase == AGREEING:
            changes["fence"] = fence
        if phase == OVER:
            changes["back"] = False  # a release is on its way anyway
        return self._change(number, client, **changes)

    def ask_again(self, number: int, client: int, back: bool) -> int:
        """The attempt asks for its vote again; `back`: and releases it first, if it has got it."""
        back = back and self.answer(number, client) is not None
        return self._change(number, client, phase=VOTING, vote=True, answer=None, back=back)

    def _change(self, number: int, client: int, **changes: Any) -> int:
        at = self.all[number]
        exchanges = [
            exchange if exchange.phase == OVER else exchange._replace(**changes) for exchange in at.exchanges[client]
        ]
        return self.number(self._without_ended(_with_exchanges(at, client, tuple(exchanges))))

    def answer(self, number: int, client: int) -> int | None:
        """What it has said to what the client's attempt asks now."""
        exchanges = self.all[number].exchanges[client]
        return exchanges[-1].answer if exchanges and exchanges[-1].phase != OVER else None

    # Looking at columns

    def with_clients_swapped(self, number: int) -> int:
        """The same with A and B changed."""
        at = self.all[number]
        before = tuple([stored.swapped() for stored in at.before])
        return self.number(at._replace(stored=at.stored.swapped(), before=before, exchanges=at.exchanges[::-1]))

    def without_late_messages(self, number: int) -> int:
        """The same if nothing comes late any more."""
        at = self.all[number]
        exchanges = [
            tuple(
                [
                    exchange._replace(vote=False, fence=None) if exchange.phase == OVER else exchange
                    for exchange in exchanges
                ]
            )
            for exchanges in at.exchanges
        ]
        return self.number(self._without_ended(at._replace(exchanges=tuple(exchanges))))

    def fence_after_quiet(self, number: int) -> int:
        """The fence that a newcomer is granted if nothing arrives for longer than a ttl; NEVER if it is refused."""
        for _ in range(TTL + 1):
            number = self.after_tick(number)
        _, reply = self._vote(self.all[number], b"C")
        return reply[1] - CLOCK_START + (TTL + 1) * TICK_US if reply[0] == GRANTED else NEVER


def _with_exchanges(at: Column, client: int, exchanges: tuple[Exchange, ...]) -> Column:
    return at._replace(exchanges=(exchanges, at.exchanges[1]) if client == 0 else (at.exchanges[0], exchanges))
