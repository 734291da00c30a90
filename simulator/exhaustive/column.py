"""A column: the part of a state that concerns one server, which is the server and its messages on their way.

Theory. Servers do not know each other, so the next events of one server do not depend on the others. Each column has a
number, and each step from one column to another is computed once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from simulator.server import CLOCK_START

from .node import GRANTED, NOTHING, TICK, TTL, TTL_MS, USED, Lua, StoredLock, abstention, token

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_US: Final = TICK * 1000
_STEPS: Final = (
    "steps", "restart_steps", "after_tick", "start_attempt", "move_to_phase", "ask_again", "answer",
    "awaits_regrant", "with_clients_swapped", "without_late_messages", "fence_after_quiet",
)  # fmt: skip
VOTING, AGREEING, HOLDING, OVER = range(4)  # the phases of a client and of each of its attempts
NEVER: Final = -(10**15)  # a fence below all others
PRESENT, EARLIER = 1, 2
# How a server may lose data, and what else is the same here:
EMPTY: Final = "restarts empty"  # FLUSHALL, a spare
LAGS: Final = "restarts without its last writes"  # re-seeded from its own replica, which lags
KEEPS: Final = "restarts with its data"  # its first replica attaches
COPIES: Final = "is re-seeded from"
TOMBSTONE_MS: Final = b"60000"
GHOST: Final = "a lease comes back that has been released"


class Exchange(NamedTuple):
    """The messages of one attempt that have not arrived at this server yet, and the reply that its client may count."""

    attempt: int
    phase: int = VOTING
    vote: bool = True
    fence: int | None = None
    renewal: bool = False
    back: bool = False
    """Whether a release is on its way after which the same attempt goes on."""
    answer: int | None = None
    """The reply to the current request: the fence of the vote, or 1 for yes."""
    lost_in: int = 0
    """The abstention in which the server said that it has lost the lease: `PRESENT` or `EARLIER`; 0: none."""
    regrant: tuple[int, int] | None = None
    """A re-grant on its way: the fence, and for how many ticks."""
    in_doubt: bool = False
    """Whether the release leaves a tombstone, because there was a re-grant."""
    freed: bool = False
    """Whether the release has arrived, and a re-grant is on its way still."""


class Column(NamedTuple):
    """One server. All times are relative to now."""

    skew: int
    """Ticks by which its clock is ahead."""
    stored: StoredLock = USED
    before: tuple[StoredLock, ...] = ()
    """The stored lock before each of the last writes, which a restart may lose."""
    exchanges: tuple[tuple[Exchange, ...], ...] = ((), ())
    """The exchanges of A and of B; that of the current attempt is the last."""


class Event(NamedTuple):
    """One event, for people."""

    what: str
    reply: Any = None


class Step(NamedTuple):
    """One possible next event of a column."""

    event: Event
    after: int
    cost: int
    """The number of faults that it needs."""
    client: int = -1
    """The sender of the message, the attempt, and the phase that the message belongs to."""
    attempt: int = 0
    phase: int = -1
    broken: str = ""
    """The promise that it breaks."""


class Columns:
    """All columns so far, by number. `tail`, `ways`: see `Bounds`."""

    def __init__(self, change: Callable[[str], str], tail: int, ways: tuple[str, ...]) -> None:
        self.lua = Lua(change)
        self._tail = tail
        self._ways = ways
        self.all: list[Column] = []
        self._numbers: dict[Column, int] = {}
        for step in _STEPS:
            setattr(self, step, cache(getattr(self, step)))

    def number(self, column: Column) -> int:
        """Return the number of this column."""
        number = self._numbers.get(column)
        if number is None:
            number = self._numbers[column] = len(self.all)
            self.all.append(column)
        return number

    # What happens at a server

    def _ask(self, at: Column, *words: bytes) -> tuple[StoredLock, Any]:
        return self.lua.run(at.stored, at.skew, words)

    def _vote(self, at: Column, name: bytes) -> tuple[StoredLock, Any]:
        return self._ask(at, b"acquire", name, b"%d" % TTL_MS, b"%d" % TTL_MS, b"0", b"-", b"0", b"", b"lock")

    def _fence(self, at: Column, name: bytes, fence: int) -> tuple[StoredLock, Any]:
        return self._ask(at, b"fence", name, b"%d" % (CLOCK_START + fence))

    def steps(self, number: int) -> list[Step]:
        """Return each arrival of a message at this server that changes something."""
        at, found = self.all[number], list[Step]()
        for client, exchanges in enumerate(at.exchanges):
            for index, exchange in enumerate(exchanges):
                self._arrivals(found, at, client, index, exchange)
        return found

    def _arrivals(self, found: list[Step], at: Column, client: int, index: int, exchange: Exchange) -> None:
        name, late = token(client, exchange.attempt), int(exchange.phase == OVER)

        def arrives(what: str, phase: int, stored: StoredLock, reply: Any, after: Exchange, cost: int = 0) -> None:
            said = after.answer, after.lost_in, after.freed
            if stored != at.stored or said != (exchange.answer, exchange.lost_in, exchange.freed):
                event = Event(f"{name.decode()}'s {what}", reply)
                number = self.number(self._with(at, stored, client, index, after))
                broken = GHOST if exchange.freed and stored.holder == name != at.stored.holder else ""
                found.append(Step(event, number, cost, client, exchange.attempt, phase, broken))

        if exchange.vote:
            stored, reply = self._vote(at, name)
            answer = exchange.answer
            if exchange.phase == VOTING and answer is None and reply[0] == GRANTED:
                answer = reply[1] - CLOCK_START
            cost = late + exchange.back  # the vote may have overtaken the release
            arrives("vote", VOTING, stored, reply, exchange._replace(vote=False, answer=answer), cost)
            arrives("vote, with a copy on its way", VOTING, stored, reply, exchange._replace(answer=answer), cost + 1)
        if exchange.fence is not None:
            stored, reply = self._fence(at, name, exchange.fence)
            answer = 1 if exchange.phase == AGREEING and reply == [GRANTED] else exchange.answer
            arrives("agreed fence", AGREEING, stored, reply, exchange._replace(fence=None, answer=answer), late)
        if exchange.renewal:
            stored, reply, after = self._renew(at, name, exchange)
            arrives("renewal", HOLDING, stored, reply, after)
        if exchange.regrant is not None:
            stored, reply = self._regrant(at, name, exchange)
            arrives("re-grant", HOLDING, stored, reply, exchange._replace(regrant=None), late)
        if exchange.back or exchange.phase == OVER:
            stored, reply = self._ask(at, b"release", name, TOMBSTONE_MS if exchange.in_doubt else b"0")
            after = exchange._replace(back=False, freed=exchange.phase == OVER and exchange.regrant is not None)
            arrives("release", VOTING if exchange.back else OVER, stored, reply, after)

    def _renew(self, at: Column, name: bytes, exchange: Exchange) -> tuple[StoredLock, Any, Exchange]:
        stored, reply = self._ask(at, b"renew", name, b"%d" % TTL_MS)
        after = exchange._replace(renewal=False)
        if reply == [GRANTED]:
            return stored, reply, after._replace(answer=1)
        if type(reply[0]) is list and reply[0][1:] == [abstention(stored, at.skew)]:
            return stored, reply, after._replace(lost_in=PRESENT)
        return stored, reply, after

    def _regrant(self, at: Column, name: bytes, exchange: Exchange) -> tuple[StoredLock, Any]:
        assert exchange.regrant is not None
        fence, left = exchange.regrant
        named = abstention(at.stored, at.skew) if exchange.lost_in == PRESENT else b"an earlier one"
        words = name, b"%d" % (left * TICK - 1), b"%d" % (CLOCK_START + fence), named, b"lock", b"-"
        return self._ask(at, b"regrant", *words)

    def _with(self, at: Column, stored: StoredLock, client: int, index: int, exchange: Exchange) -> Column:
        exchanges = at.exchanges[client]
        before = (at.stored, *at.before)[: self._tail] if stored != at.stored else at.before
        at = at._replace(stored=stored, before=before)
        return self._without_ended(_with_exchanges(at, client, (*exchanges[:index], exchange, *exchanges[index + 1 :])))

    def _without_ended(self, at: Column) -> Column:
        """Forget attempts that have ended and have nothing here, and no message on its way."""

        def matters(client: int, exchange: Exchange) -> bool:
            name = token(client, exchange.attempt)
            if exchange.phase != OVER or exchange.vote or exchange.regrant or at.stored.holder == name:
                return True
            return exchange.fence is not None and self._fence(at, name, exchange.fence)[0] != at.stored

        return at._replace(
            exchanges=tuple(
                tuple([exchange for exchange in exchanges if matters(client, exchange)])
                for client, exchanges in enumerate(at.exchanges)
            )
        )

    def restart_steps(self, number: int) -> list[Step]:
        """Return each restart of this server that the bounds allow."""
        at = self.all[number]
        images = {EMPTY: (NOTHING,), LAGS: at.before, KEEPS: (at.stored,), COPIES: ()}
        return [Step(Event(way), self.with_data(number, each), 0) for way in self._ways for each in images[way]]

    def copied(self, number: int, source: int) -> int:
        """Return this server with the data of another one."""
        return self.with_data(number, self.all[source].stored)

    def with_data(self, number: int, stored: StoredLock) -> int:
        """Return this server with these data, and another replid."""
        at = self.all[number]
        exchanges = [
            tuple([each._replace(lost_in=EARLIER) if each.lost_in else each for each in exchanges])
            for exchanges in at.exchanges
        ]
        after = at._replace(stored=stored.elsewhere(), before=(), exchanges=tuple(exchanges))
        return self.number(self._without_ended(after))

    def after_tick(self, number: int) -> int:
        """Return the column a tick later."""
        at = self.all[number]

        def aged(exchange: Exchange) -> Exchange:
            fence = None if exchange.fence is None else exchange.fence - TICK_US
            answer = (
                exchange.answer if exchange.answer is None or exchange.phase != VOTING else exchange.answer - TICK_US
            )
            regrant = exchange.regrant and (exchange.regrant[0] - TICK_US, exchange.regrant[1])
            return exchange._replace(fence=fence, answer=answer, regrant=regrant)

        return self.number(
            self._without_ended(
                at._replace(
                    stored=at.stored.after_tick(),
                    before=tuple([stored.after_tick() for stored in at.before]),
                    exchanges=tuple([tuple([aged(exchange) for exchange in exchanges]) for exchanges in at.exchanges]),
                )
            )
        )

    # The actions of clients, as far as they concern one server

    def start_attempt(self, number: int, client: int, attempt: int) -> int:
        """A new attempt asks for the vote of this server."""
        at = self.all[number]
        return self.number(_with_exchanges(at, client, (*at.exchanges[client], Exchange(attempt))))

    def move_to_phase(
        self, number: int, client: int, phase: int, fence: int | None = None, renewal: bool = False
    ) -> int:
        """The current attempt enters this phase, and sends the message of that phase."""
        changes: dict[str, Any] = {"phase": phase, "answer": None, "renewal": renewal}
        if renewal:
            changes["lost_in"] = 0
        if phase == AGREEING:
            changes["fence"] = fence
        if phase == OVER:
            changes["back"] = False  # a release is on its way anyway
        return self._change(number, client, **changes)

    def regrant(self, number: int, client: int, fence: int, left: int) -> int:
        """A majority has confirmed the renewal: ask this server to grant the lease again, if it has lost it."""
        at = self.all[number]
        lost = any(each.phase != OVER and each.lost_in for each in at.exchanges[client])
        return self._change(number, client, regrant=(fence, left), in_doubt=True) if lost else number

    def ask_again(self, number: int, client: int, back: bool) -> int:
        """The current attempt asks for the vote again. `back`: it first releases the vote that it has."""
        back = back and self.answer(number, client) is not None
        return self._change(number, client, phase=VOTING, vote=True, answer=None, back=back)

    def _change(self, number: int, client: int, **changes: Any) -> int:
        at = self.all[number]
        exchanges = [
            exchange if exchange.phase == OVER else exchange._replace(**changes) for exchange in at.exchanges[client]
        ]
        return self.number(self._without_ended(_with_exchanges(at, client, tuple(exchanges))))

    def answer(self, number: int, client: int) -> int | None:
        """Return the reply of this server to the client's current request; None if there is none."""
        exchanges = self.all[number].exchanges[client]
        return exchanges[-1].answer if exchanges and exchanges[-1].phase != OVER else None

    # Looking at columns

    def awaits_regrant(self, number: int) -> bool:
        """Whether a re-grant is on its way to this server."""
        return any(exchange.regrant for exchanges in self.all[number].exchanges for exchange in exchanges)

    def with_clients_swapped(self, number: int) -> int:
        """Return the column with A and B swapped."""
        at = self.all[number]
        before = tuple([stored.swapped() for stored in at.before])
        return self.number(at._replace(stored=at.stored.swapped(), before=before, exchanges=at.exchanges[::-1]))

    def without_late_messages(self, number: int) -> int:
        """Return the column without messages of attempts that have ended."""
        at = self.all[number]
        exchanges = [
            tuple(
                [
                    exchange._replace(vote=False, fence=None, regrant=None) if exchange.phase == OVER else exchange
                    for exchange in exchanges
                ]
            )
            for exchanges in at.exchanges
        ]
        return self.number(self._without_ended(at._replace(exchanges=tuple(exchanges))))

    def fence_after_quiet(self, number: int) -> int:
        """Return the fence that a new client gets, longer than a ttl after it has connected; NEVER if it gets none."""
        at = self.all[number]
        number = self.number(at._replace(stored=self._ask(at, b"voter")[0]))
        for _ in range(TTL + 1):
            number = self.after_tick(number)
        _, reply = self._vote(self.all[number], b"C")
        return reply[1] - CLOCK_START + (TTL + 1) * TICK_US if reply[0] == GRANTED else NEVER


def _with_exchanges(at: Column, client: int, exchanges: tuple[Exchange, ...]) -> Column:
    return at._replace(exchanges=(exchanges, at.exchanges[1]) if client == 0 else (at.exchanges[0], exchanges))
