"""A server and what is on its way between it and the clients: all of a state that concerns one server.

Theory. Servers know nothing of each other, so what can happen to one is the same whatever the others do. A column is
looked up by its number, and each of its steps is computed once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from simulator.server import CLOCK_START

from .node import GRANTED, NOTHING, TICK, TTL, TTL_MS, Lua, Memory, epoch, token

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_US: Final = TICK * 1000
_STEPS: Final = (
    "steps", "restarted", "later", "begun", "turned", "again", "answer", "mirrored", "punctual", "calm",
)  # fmt: skip
VOTING, AGREEING, HOLDING, OVER = range(4)  # what a client, or one attempt of it, is at
NEVER: Final = -(10**15)  # a fence below all others


class Talk(NamedTuple):
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
    memory: Memory = NOTHING
    before: tuple[Memory, ...] = ()
    """What it remembered before its last writes, which a restart may lose."""
    talks: tuple[tuple[Talk, ...], ...] = ((), ())
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
    """All columns met so far, by number. `former`: whom clients knew before a restart; `tail`: see Bounds."""

    def __init__(self, planted: Callable[[str], str], former: str, tail: int) -> None:
        self.lua = Lua(planted)
        self._former = former.encode()
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

    def _ask(self, at: Column, *words: bytes) -> tuple[Memory, Any]:
        message = (*words, epoch(at.skew, at.restarts, at.since, self._former))
        return self.lua.run(at.memory, at.skew, message)

    def _vote(self, at: Column, name: bytes) -> tuple[Memory, Any]:
        return self._ask(at, b"acquire", name, b"%d" % TTL_MS, b"%d" % TTL_MS, b"0", b"-", b"0", b"", b"lock")

    def _fence(self, at: Column, name: bytes, fence: int) -> tuple[Memory, Any]:
        return self._ask(at, b"fence", name, b"%d" % (CLOCK_START + fence))

    def steps(self, number: int) -> list[Step]:
        """Every message that can arrive here now, and changes something."""
        at, found = self.all[number], list[Step]()
        for client, talks in enumerate(at.talks):
            for place, talk in enumerate(talks):
                self._arrivals(found, at, client, place, talk)
        return found

    def _arrivals(self, found: list[Step], at: Column, client: int, place: int, talk: Talk) -> None:
        name, late = token(client, talk.attempt), int(talk.phase == OVER)

        def arrives(what: str, phase: int, memory: Memory, reply: Any, after: Talk, cost: int = 0) -> None:
            if memory != at.memory or after.answer != talk.answer:
                event = Event(f"{name.decode()}'s {what}", reply)
                number = self.number(self._with(at, memory, client, place, after))
                found.append(Step(event, number, cost, client, talk.attempt, phase))

        if talk.vote:
            memory, reply = self._vote(at, name)
            answer = talk.answer
            if talk.phase == VOTING and answer is None and reply[0] == GRANTED:
                answer = reply[1] - CLOCK_START
            cost = late + talk.back  # it may have overtaken the release
            arrives("vote", VOTING, memory, reply, talk._replace(vote=False, answer=answer), cost)
            arrives("vote, with a copy to come", VOTING, memory, reply, talk._replace(answer=answer), cost + 1)
        if talk.fence is not None:
            memory, reply = self._fence(at, name, talk.fence)
            answer = 1 if talk.phase == AGREEING and reply == [GRANTED] else talk.answer
            arrives("agreed fence", AGREEING, memory, reply, talk._replace(fence=None, answer=answer), late)
        if talk.renewal:
            memory, reply = self._ask(at, b"renew", name, b"%d" % TTL_MS)
            answer = 1 if reply == [GRANTED] else talk.answer
            arrives("renewal", HOLDING, memory, reply, talk._replace(renewal=False, answer=answer))
        if talk.back or talk.phase == OVER:
            memory, reply = self._ask(at, b"release", name, b"0")
            arrives("release", VOTING if talk.back else OVER, memory, reply, talk._replace(back=False))

    def _with(self, at: Column, memory: Memory, client: int, place: int, talk: Talk) -> Column:
        talks = at.talks[client]
        before = (at.memory, *at.before)[: self._tail] if memory != at.memory else at.before
        at = at._replace(memory=memory, before=before)
        return self._tidy(_said(at, client, (*talks[:place], talk, *talks[place + 1 :])))

    def _tidy(self, at: Column) -> Column:
        """Forget attempts that are over and have nothing here, nor on its way."""

        def matters(client: int, talk: Talk) -> bool:
            name = token(client, talk.attempt)
            if talk.phase != OVER or talk.vote or at.memory.holder == name:
                return True
            return talk.fence is not None and self._fence(at, name, talk.fence)[0] != at.memory

        return at._replace(
            talks=tuple(
                tuple([talk for talk in talks if matters(client, talk)]) for client, talks in enumerate(at.talks)
            )
        )

    def restarted(self, number: int) -> list[Step]:
        """It dies and is back at once, in the ways that the bounds allow."""
        at = self.all[number]
        ways = [("without its last writes", each) for each in at.before] if self._tail else [("empty", NOTHING)]
        fresh = at._replace(restarts=at.restarts + 1, since=0, before=())
        return [
            Step(Event(f"restarts {how}"), self.number(self._tidy(fresh._replace(memory=memory))), 0)
            for how, memory in ways
        ]

    def later(self, number: int) -> int:
        """A tick later."""
        at = self.all[number]

        def aged(talk: Talk) -> Talk:
            fence = None if talk.fence is None else talk.fence - TICK_US
            answer = talk.answer if talk.answer is None or talk.phase != VOTING else talk.answer - TICK_US
            return talk._replace(fence=fence, answer=answer)

        return self.number(
            self._tidy(
                at._replace(
                    since=max(at.since - 1, -TTL),
                    memory=at.memory.later(),
                    before=tuple([memory.later() for memory in at.before]),
                    talks=tuple([tuple([aged(talk) for talk in talks]) for talks in at.talks]),
                )
            )
        )

    # What clients do, as far as it concerns a server

    def begun(self, number: int, client: int, attempt: int) -> int:
        """An attempt asks for its vote."""
        at = self.all[number]
        return self.number(_said(at, client, (*at.talks[client], Talk(attempt))))

    def turned(self, number: int, client: int, phase: int, fence: int | None = None, renewal: bool = False) -> int:
        """The attempt goes on to this phase, and says so here."""
        changes: dict[str, Any] = {"phase": phase, "answer": None, "renewal": renewal}
        if phase == AGREEING:
            changes["fence"] = fence
        if phase == OVER:
            changes["back"] = False  # a release is on its way anyway
        return self._change(number, client, **changes)

    def again(self, number: int, client: int, back: bool) -> int:
        """The attempt asks for its vote again; `back`: and releases it first, if it has got it."""
        back = back and self.answer(number, client) is not None
        return self._change(number, client, phase=VOTING, vote=True, answer=None, back=back)

    def _change(self, number: int, client: int, **changes: Any) -> int:
        at = self.all[number]
        talks = [talk if talk.phase == OVER else talk._replace(**changes) for talk in at.talks[client]]
        return self.number(self._tidy(_said(at, client, tuple(talks))))

    def answer(self, number: int, client: int) -> int | None:
        """What it has said to what the client's attempt asks now."""
        talks = self.all[number].talks[client]
        return talks[-1].answer if talks and talks[-1].phase != OVER else None

    # Looking at columns

    def mirrored(self, number: int) -> int:
        """The same with A and B changed."""
        at = self.all[number]
        before = tuple([memory.swapped() for memory in at.before])
        return self.number(at._replace(memory=at.memory.swapped(), before=before, talks=at.talks[::-1]))

    def punctual(self, number: int) -> int:
        """The same if nothing comes late any more."""
        at = self.all[number]
        talks = [
            tuple([talk._replace(vote=False, fence=None) if talk.phase == OVER else talk for talk in talks])
            for talks in at.talks
        ]
        return self.number(self._tidy(at._replace(talks=tuple(talks))))

    def calm(self, number: int) -> int:
        """The fence that a newcomer is granted if nothing arrives for longer than a ttl; NEVER if it is refused."""
        for _ in range(TTL + 1):
            number = self.later(number)
        _, reply = self._vote(self.all[number], b"C")
        return reply[1] - CLOCK_START + (TTL + 1) * TICK_US if reply[0] == GRANTED else NEVER


def _said(at: Column, client: int, talks: tuple[Talk, ...]) -> Column:
    return at._replace(talks=(talks, at.talks[1]) if client == 0 else (at.talks[0], talks))
