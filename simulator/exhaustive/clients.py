"""The clients of a quorum as small state machines, and the next events of a state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from .column import AGREEING, COPIES, EMPTY, HOLDING, NEVER, OVER, TICK_US, VOTING, Column, Columns, Event, Step
from .node import TTL, USED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Nodes = tuple[int, ...]
NAMES, SERVERS, TICKS = "AB", "XYZ", Event("a tick")


@dataclass(frozen=True)
class Bounds:
    """The bounds of a search. Times are in ticks; a ttl is three ticks."""

    ticks: int = 4
    starts: int = 2
    """Attempts of both clients together."""
    asks: int = 0
    """How often attempts ask for votes again, under the same token."""
    renewals: int = 0
    faults: int = 0
    """Copies of messages, and messages that arrive after the end of their attempt."""
    restarts: int = 0
    ways: tuple[str, ...] = (EMPTY,)
    """What may happen to the data of a server: see `column`."""
    tail: int = 0
    """How many of its last writes a server may lose."""
    skews: tuple[int, int, int] = (0, 0, 0)
    """Ticks by which each server's clock is ahead."""


@dataclass(frozen=True)
class Design:
    """The rules of the clients, and a change of the Lua. The defaults are the rules of interlock."""

    lua: Callable[[str], str] = str
    majority: int = 2
    renewals_needed: int = 2
    """How many servers must renew a lease."""
    agreed: bool = True
    """Whether clients send the highest fence in a second round, unless a majority answered just that fence."""
    counted_from: str = "send"
    """From when a lease counts: the first "send"; "vote": that, without the time of round two; the "majority"."""
    forgets_replies: bool = True
    """Whether earlier replies stop counting when a client asks again."""
    releases_votes: bool = False
    """Whether a client that asks again first releases its votes, under the same token."""
    regrants: bool = True
    """Whether a client that has renewed its lease asks the servers that lost it to grant it again."""


class Client(NamedTuple):
    """The state of one client."""

    attempt: int = 0
    phase: int = OVER
    left: int = 0
    """Ticks for which its lease is valid, or would be."""
    fence: int = 0
    """The fence of its second round, or of its lease if that may be re-granted, relative to now."""
    renewed: int = 0
    """Ticks for which its lease will be valid once the renewal has a majority."""
    must_arrive: bool = False
    """Whether the next event must be the arrival of one of its new messages."""


class Left(NamedTuple):
    """The rest of the bounds."""

    ticks: int
    starts: int
    asks: int
    renewals: int
    faults: int
    restarts: int


class State(NamedTuple):
    """One state of the search, with times relative to now. The numbers of columns stand for the servers.

    A search makes millions of states, so the code below passes all five fields: `_replace` takes three times as long.
    """

    a: Client
    b: Client
    nodes: Nodes
    last: int
    """The fence of the last grant."""
    left: Left

    def client(self, who: int) -> Client:
        """Return client A (0) or B (1)."""
        return self.b if who else self.a

    @property
    def ended(self) -> bool:
        """Whether no client can get a grant any more."""
        left = self.left
        return not left.starts and self.a.phase >= HOLDING and self.b.phase >= HOLDING and not left.renewals


Next = tuple[str, Event, State, str]
"""A step of the search: a client or server, an event, the state after it, and the promise that it breaks, or ""."""


class World:
    """The states of one search, and the steps between them."""

    def __init__(self, bounds: Bounds, design: Design) -> None:
        self.bounds = bounds
        self.design = design
        self.columns = Columns(design.lua, bounds.tail, bounds.ways)
        self._keeps_fence = bool(bounds.renewals and bounds.restarts and design.regrants)

    def first_state(self) -> State:
        """Return the state in which no client has sent anything."""
        bounds, before = self.bounds, (USED,) if self.bounds.tail else ()
        nodes = tuple([self.columns.number(Column(skew, before=before)) for skew in bounds.skews])
        left = Left(bounds.ticks, bounds.starts, bounds.asks, bounds.renewals, bounds.faults, bounds.restarts)
        return State(Client(), Client(), nodes, NEVER, left)

    def canonical(self, state: State) -> State:
        """Return one state for all states that differ only by the names of clients and servers."""
        a, b, nodes, last, left = state
        if a < b:
            return State(a, b, tuple(sorted(nodes)), last, left)
        mirrored = sorted(map(self.columns.with_clients_swapped, nodes))
        return State(b, a, tuple(mirrored if b < a else min(sorted(nodes), mirrored)), last, left)

    def next_states(self, state: State) -> Iterator[Next]:
        """Yield every step from this state."""
        if state.ended and not self._may_regrant(state):
            return
        sender = 0 if state.a.must_arrive else 1 if state.b.must_arrive else None
        yield from self._arrivals(state, sender)
        if sender is not None:
            if state.client(sender).phase == OVER:
                yield from self._client_steps(state, sender)
            return
        left = state.left
        if left.restarts:
            for index, number in enumerate(state.nodes):
                for step in self.columns.restart_steps(number):
                    after = self._arrived(state, index, step)
                    yield SERVERS[index], step.event, _spent(after, restarts=left.restarts - 1), ""
            if COPIES in self.bounds.ways:
                yield from self._copies(state)
        yield from self._client_steps(state, 0)
        yield from self._client_steps(state, 1)
        if left.ticks:
            yield "", TICKS, self._after_tick(state), ""

    def _may_regrant(self, state: State) -> bool:
        """Whether a re-grant is on its way, or may follow a renewal."""
        is_renewing = self._keeps_fence and (state.a.renewed or state.b.renewed)
        return bool(is_renewing) or any(map(self.columns.awaits_regrant, state.nodes))

    def _arrivals(self, state: State, sender: int | None) -> Iterator[Next]:
        faults, after, wanted = state.left.faults, state, None
        if sender is not None:
            client = state.client(sender)
            wanted = sender, client.attempt, client.phase
            after = _with(state, sender, client._replace(must_arrive=False))
        for index, number in enumerate(state.nodes):
            for step in self.columns.steps(number):
                if step.cost <= faults and (wanted is None or (step.client, step.attempt, step.phase) == wanted):
                    yield SERVERS[index], step.event, self._arrived(after, index, step), step.broken

    def _copies(self, state: State) -> Iterator[Next]:
        a, b, nodes, last, left = state
        left = left._replace(restarts=left.restarts - 1)
        for index, number in enumerate(nodes):
            for other, source in enumerate(nodes):
                if other != index:
                    copied = self.columns.copied(number, source)
                    after = State(a, b, (*nodes[:index], copied, *nodes[index + 1 :]), last, left)
                    yield SERVERS[index], Event(f"{COPIES} {SERVERS[other]}"), after, ""

    def _arrived(self, state: State, index: int, step: Step) -> State:
        a, b, nodes, last, left = state
        nodes = (*nodes[:index], step.after, *nodes[index + 1 :])
        if step.cost:
            left = left._replace(faults=left.faults - step.cost)
            if not left.faults:
                nodes = tuple(map(self.columns.without_late_messages, nodes))
        return State(a, b, nodes, last, left)

    # The actions of clients

    def _client_steps(self, state: State, who: int) -> Iterator[Next]:
        client = state.client(who)
        if client.phase == OVER:
            if state.left.starts:
                yield self._start(state, who, client.attempt + 1)
            return
        yield NAMES[who], Event("releases" if client.phase == HOLDING else "gives up"), self._end(state, who, True), ""
        if client.phase == HOLDING:
            yield from self._renew(state, who)
            return
        if state.left.asks:
            yield self._ask_again(state, who)
        if client.phase == VOTING:
            yield from self._decide(state, who)
        elif client.left and self._answers(state, who) >= self.design.majority:
            yield self._holds(state, who, client.fence)

    def _start(self, state: State, who: int, attempt: int) -> Next:
        nodes = [self.columns.start_attempt(number, who, attempt) for number in state.nodes]
        after = self._set(state, who, Client(attempt, VOTING, TTL, must_arrive=True), nodes)
        event = Event(f"asks for votes as {NAMES[who]}{attempt}")
        return NAMES[who], event, _spent(after, starts=state.left.starts - 1), ""

    def _ask_again(self, state: State, who: int) -> Next:
        """Ask for the votes again, under the same token."""
        client, back = state.client(who), self.design.releases_votes
        counts = client.phase == VOTING and not self.design.forgets_replies
        nodes = [
            number
            if counts and self.columns.answer(number, who) is not None
            else self.columns.ask_again(number, who, back)
            for number in state.nodes
        ]
        after = self._set(state, who, client._replace(phase=VOTING, left=TTL, fence=0, must_arrive=True), nodes)
        event = Event("releases its votes, and asks again" if back else "asks again")
        return NAMES[who], event, _spent(after, asks=state.left.asks - 1), ""

    def _decide(self, state: State, who: int) -> Iterator[Next]:
        """Decide by the votes: the client may have received any majority of the replies that are there."""
        client = state.client(who)
        for fence, agreed in self._decisions(state, who):
            if not agreed and self.design.agreed:
                nodes = [self.columns.move_to_phase(number, who, AGREEING, fence) for number in state.nodes]
                after = self._set(state, who, client._replace(phase=AGREEING, fence=fence, must_arrive=True), nodes)
                yield NAMES[who], Event("has a majority, and sends its fence to all"), after, ""
            elif client.left:
                yield self._holds(state, who, fence)

    def _answers(self, state: State, who: int) -> int:
        return sum(self.columns.answer(number, who) is not None for number in state.nodes)

    def _decisions(self, state: State, who: int) -> set[tuple[int, bool]]:
        """Return the highest fence of each majority of votes, and whether a majority answered just that fence."""
        majority = self.design.majority
        fences = [fence for number in state.nodes if (fence := self.columns.answer(number, who)) is not None]
        return {
            (max(chosen), chosen.count(max(chosen)) >= majority)
            for size in range(majority, len(fences) + 1)
            for chosen in combinations(fences, size)
        }

    def _holds(self, state: State, who: int, fence: int) -> Next:
        client, other = state.client(who), state.client(1 - who)
        left = TTL if self.design.counted_from == "majority" else client.left
        broken = ""
        if other.phase == HOLDING:
            broken = f"{NAMES[1 - who]} and {NAMES[who]} both hold the lock"
        elif fence <= state.last:
            broken = "this fence is no higher than the last one"
        kept = fence if self._keeps_fence else 0
        nodes = [self.columns.move_to_phase(number, who, HOLDING) for number in state.nodes]
        a, b, after, _, bounds = self._set(state, who, Client(client.attempt, HOLDING, left, kept), nodes)
        return NAMES[who], Event("holds", fence), State(a, b, after, fence, bounds), broken

    def _renew(self, state: State, who: int) -> Iterator[Next]:
        client, move_to_phase, renewals = state.client(who), self.columns.move_to_phase, state.left.renewals
        if not client.renewed and renewals:
            nodes = [move_to_phase(number, who, HOLDING, None, True) for number in state.nodes]
            after = self._set(state, who, client._replace(renewed=TTL, must_arrive=True), nodes)
            yield NAMES[who], Event("renews"), _spent(after, renewals=renewals - 1), ""
        elif client.renewed and self._answers(state, who) >= self.design.renewals_needed:
            nodes = [move_to_phase(number, who, HOLDING) for number in state.nodes]
            if self._keeps_fence:
                nodes = [self.columns.regrant(each, who, client.fence, client.renewed) for each in nodes]
            renewed = client._replace(left=max(client.left, client.renewed), renewed=0)
            yield NAMES[who], Event("has renewed"), self._set(state, who, renewed, nodes), ""

    def _end(self, state: State, who: int, must_arrive: bool = False) -> State:
        nodes = [self.columns.move_to_phase(number, who, OVER) for number in state.nodes]
        return self._set(state, who, Client(state.client(who).attempt, must_arrive=must_arrive), nodes)

    def _set(self, state: State, who: int, client: Client, nodes: list[int]) -> State:
        a, b, _, last, left = state
        after = tuple(nodes) if left.faults else tuple(map(self.columns.without_late_messages, nodes))
        return State(client, b, after, last, left) if who == 0 else State(a, client, after, last, left)

    # Time

    def _after_tick(self, state: State) -> State:
        nodes = tuple(map(self.columns.after_tick, state.nodes))
        last = state.last if state.last == NEVER else state.last - TICK_US
        state = State(state.a, state.b, nodes, last, state.left._replace(ticks=state.left.ticks - 1))
        for who in (0, 1):
            client = state.client(who)
            if client.phase == OVER:
                continue
            stands = client.phase == AGREEING and self.design.counted_from == "vote"
            left = max(0, client.left - (not stands))
            if not left and (
                client.phase == HOLDING or (not state.left.asks and self.design.counted_from != "majority")
            ):
                state = self._end(state, who)
                continue
            is_aged = client.phase == AGREEING or (client.phase == HOLDING and self._keeps_fence)
            fence = client.fence - TICK_US if is_aged else 0
            state = _with(state, who, client._replace(left=left, fence=fence, renewed=max(0, client.renewed - 1)))
        return state


def _with(state: State, who: int, client: Client) -> State:
    """Return the state with another state of one client."""
    a, b, nodes, last, left = state
    return State(client, b, nodes, last, left) if who == 0 else State(a, client, nodes, last, left)


def _spent(state: State, **less: int) -> State:
    """Return the state with another rest of these bounds."""
    a, b, nodes, last, left = state
    return State(a, b, nodes, last, left._replace(**less))
