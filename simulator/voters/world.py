"""Clients and members together: the states of a search, the next events, and what must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from .member import AGREEING, ASKING, FENCES_PER_TICK, HOLDING, NAMES, OVER, Members, Step
from .rules import ALL_EMPTY, ALL_FLUSH, FOLLOW, MOVE, RESEED, SPLIT, Bounds, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Part = TypeVar("Part")
MEMBERS: Final = "XYZVW"
NEVER: Final = -(10**9)  # a fence before all others
TWO, STALE = "both hold the lock", "the fence is no higher than that of the holder before"


class Client(NamedTuple):
    """The state of one client."""

    phase: int = OVER
    attempt: int = 0
    left: int = 0
    """Ticks for which its lease is certain, or would be."""
    fence: int = 0
    renewed: int = 0
    """Ticks for which its lease will be certain once the renewal under way is confirmed."""


class Left(NamedTuple):
    """The rest of the bounds."""

    starts: int
    renewals: int
    late: int
    faults: int
    ticks: int


class State(NamedTuple):
    """One state of the search. Times are relative to now, and members are numbers."""

    clients: tuple[Client, ...]
    members: tuple[int, ...]
    last: int
    """The fence of the last holder, relative to now."""
    left: Left


class Next(NamedTuple):
    """A step of the search."""

    text: str
    after: State
    broken: str = ""
    """The promise that it breaks."""


class World:
    """The states of one search, and the steps between them."""

    def __init__(self, rule: Rule, bounds: Bounds) -> None:
        self.rule, self.bounds = rule, bounds
        self.members = Members(rule, bounds)
        self.majority = bounds.members // 2 + 1
        self._parts: dict[object, object] = {}
        self._may_swap = bounds.ttls == (bounds.ttls[0],) * 2 and SPLIT not in bounds.kinds

    def first_state(self) -> State:
        """Return the state in which no client has asked for anything, and all members have voted for long."""
        bounds = self.bounds
        members = tuple([self.members.first(skew) for skew in (*bounds.skews, 0, 0)[: bounds.members]])
        last = -FENCES_PER_TICK if bounds.used else NEVER
        left = Left(bounds.starts, bounds.renewals, bounds.late, bounds.faults, bounds.ticks)
        return State((Client(),) * len(bounds.ttls), members, last, left)

    def canonical(self, state: State) -> State:
        """Return one state for all that differ only by the names of clients and members."""
        clients, members, last, left = state
        if not left.faults:
            members = tuple(map(self.members.without_past, members))
        if not left.late:
            members = tuple(map(self.members.without_late, members))
        ordered = tuple(sorted(members))
        if self._may_swap and clients[0] >= clients[1]:
            mirrored = tuple(sorted(map(self.members.with_clients_swapped, members)))
            if clients[0] > clients[1] or mirrored < ordered:
                clients, ordered = clients[::-1], mirrored
        return State(self._shared(clients), ordered, last, self._shared(left))

    def _shared(self, part: Part) -> Part:
        """Return one object for all equal ones: millions of states have few different clients."""
        return self._parts.setdefault(part, part)  # type: ignore[return-value]

    def is_over(self, state: State) -> bool:
        """Whether too few clients can hold the lock any more for a promise to break."""
        if state.left.starts or (self.rule.regrants and any(map(self.members.has_regrant, state.members))):
            return False
        may_hold = sum(each.phase != OVER for each in state.clients)
        may_hold += self.rule.lost_comes_back and any(
            each.phase == OVER and self._has_held(state, who) for who, each in enumerate(state.clients)
        )
        return may_hold < (1 if self.bounds.fences or self.rule.regrants else 2)

    def next_states(self, state: State) -> Iterator[Next]:
        """Yield every step from this state."""
        if self.is_over(state):
            return
        yield from self._arrivals(state, "")
        for who in range(len(state.clients)):
            yield from self._client_steps(state, who)
        if state.left.faults:
            yield from self._faults(state)
        if state.left.ticks:
            yield Next("tick", self._after_tick(state))

    # Messages

    def _arrivals(self, state: State, first: str, who: int = -1) -> Iterator[Next]:
        """Yield each arrival of a message; with `who`: only the first one of what that client has just sent."""
        all_missing = self.rule.all_missing_is_new and all(
            self.members.all[number].data.voter is None for number in state.members
        )
        seen = set[int]()
        for place, number in enumerate(state.members):
            if number in seen:
                continue
            if who >= 0:
                seen.add(number)
            for step in self.members.steps(number, all_missing):
                if step.late <= state.left.late and (who < 0 or (step.client == who and not step.late)):
                    yield self._arrived(state, place, step, first)

    def _arrived(self, state: State, place: int, step: Step, first: str) -> Next:
        text, number, late, who, broken = step
        members = (*state.members[:place], number, *state.members[place + 1 :])
        left = state.left._replace(late=state.left.late - late) if late else state.left
        after = state._replace(members=members, left=left)
        text = f"{first}{MEMBERS[place]} {text}"
        if broken or who < 0:
            return Next(text, after, broken)
        return self._decided(after, who, text)

    def _decided(self, state: State, who: int, text: str) -> Next:
        """Let a client decide as soon as a majority of members has answered."""
        client = state.clients[who]
        if client.phase == OVER and not client.renewed:
            return Next(text, state)
        answers = [
            answer
            for number in state.members
            if (answer := self.members.answer(number, who)) is not None
            for _ in range(self.members.all[number].weight)
        ]
        if len(answers) < self.majority:
            return Next(text, state)
        if client.phase == ASKING:
            client = client._replace(fence=max(answers))
            if self.bounds.fences and answers.count(client.fence) < self.majority:
                after = self._asking(state, who, client._replace(phase=AGREEING), client.fence)
                return Next(f"{text}; {NAMES[who]} sends fence {client.fence}", after)
        if client.phase in (ASKING, AGREEING):
            return self._holds(state, who, client, text)
        return self._renewed(state, who, text) if client.renewed else Next(text, state)

    def _holds(self, state: State, who: int, client: Client, text: str) -> Next:
        members = tuple([self.members.hold(number, who) for number in state.members])
        after = self._with(state._replace(members=members), who, client._replace(phase=HOLDING))
        said = f", fence {client.fence}" if self.bounds.fences else ""
        return self._checked(after, who, f"{text}; {NAMES[who]} holds the lock for {client.left}{said}", True)

    def _renewed(self, state: State, who: int, text: str) -> Next:
        """A majority has confirmed a renewal: the members that abstain and have lost the token get a re-grant."""
        client = state.clients[who]
        client = client._replace(phase=HOLDING, left=client.renewed, renewed=0)
        after = self._asking(state, who, client, client.fence, client.left)
        text = f"{text}; {NAMES[who]} holds the lock for {client.left}"
        return self._checked(after, who, text, False)

    def _checked(self, state: State, who: int, text: str, is_new: bool) -> Next:
        """Return the step after which a client holds the lock, with the promise that it breaks."""
        fence, broken = state.clients[who].fence, ""
        if any(each.phase == HOLDING for i, each in enumerate(state.clients) if i != who):
            broken = TWO
        elif self.bounds.fences and (fence < state.last or (is_new and fence == state.last)):
            broken = STALE
        if is_new and self.bounds.fences:
            state = state._replace(last=fence)
        return Next(text, state, broken)

    def _asking(self, state: State, who: int, client: Client, fence: int, regrant_left: int = 0) -> State:
        """Let an attempt ask all members something: what its phase says."""
        members = tuple([self.members.ask(number, who, client.phase, fence, regrant_left) for number in state.members])
        return self._with(state._replace(members=members), who, client)

    def _with(self, state: State, who: int, client: Client) -> State:
        return state._replace(clients=(*state.clients[:who], client, *state.clients[who + 1 :]))

    # What clients do

    def _client_steps(self, state: State, who: int) -> Iterator[Next]:
        client, left = state.clients[who], state.left
        name = f"{NAMES[who]}{client.attempt}"
        if client.phase == OVER and left.starts:
            yield from self._starts(state, who)
        may_renew = client.phase == HOLDING or (self.rule.lost_comes_back and self._has_held(state, who))
        if may_renew and left.renewals and not client.renewed:
            asked = client._replace(renewed=self.bounds.ttls[who])
            after = self._asking(state, who, asked._replace(phase=HOLDING), client.fence)
            after = self._with(after, who, asked)._replace(left=left._replace(renewals=left.renewals - 1))
            yield from self._arrivals(after, f"{NAMES[who]} renews {name}; ", who)
        if client.phase != OVER:
            what = "releases" if client.phase == HOLDING else "gives up"
            yield Next(f"{NAMES[who]} {what} {name}", self._ended(state, who, True))

    def _starts(self, state: State, who: int) -> Iterator[Next]:
        attempt = state.clients[who].attempt + 1
        members = tuple([self.members.start(number, who, attempt) for number in state.members])
        after = self._with(state._replace(members=members), who, Client(ASKING, attempt, self.bounds.ttls[who]))
        after = after._replace(left=state.left._replace(starts=state.left.starts - 1))
        yield from self._arrivals(after, f"{NAMES[who]} asks as {NAMES[who]}{attempt}; ", who)

    def _ended(self, state: State, who: int, releases: bool) -> State:
        members = state.members
        stays = self.rule.lost_comes_back and not releases and state.clients[who].phase == HOLDING
        if not stays:
            members = tuple([self.members.end(number, who, releases) for number in members])
        client = state.clients[who]
        ended = Client(OVER, client.attempt, fence=client.fence if stays else 0)
        return self._with(state._replace(members=members), who, ended)

    def _has_held(self, state: State, who: int) -> bool:
        return any(self.members.is_asked_by_holder(number, who) for number in state.members)

    # Time and faults

    def _after_tick(self, state: State) -> State:
        if state.left.ticks > 0:
            state = state._replace(left=state.left._replace(ticks=state.left.ticks - 1))
        step = FENCES_PER_TICK if self.bounds.fences else 0
        members = tuple(map(self.members.after_tick, state.members))
        state = state._replace(members=members, last=state.last - step if state.last != NEVER else NEVER)
        for who, client in enumerate(state.clients):
            fence = client.fence - step if client.fence or client.phase != OVER else 0
            if client.phase != OVER:
                aged = client._replace(left=client.left - 1, fence=fence, renewed=max(0, client.renewed - 1))
                state = self._with(state, who, aged)
                if not aged.left:
                    state = self._ended(state, who, False)
            elif client.renewed:
                state = self._with(state, who, client._replace(renewed=client.renewed - 1, fence=fence))
            elif fence:
                state = self._with(state, who, client._replace(fence=fence))
        return state

    def _faults(self, state: State) -> Iterator[Next]:
        members, kinds = self.members, self.bounds.kinds
        left = state.left._replace(faults=state.left.faults - 1)

        def fault(text: str, numbers: tuple[int, ...]) -> Next:
            return Next(text, state._replace(members=numbers, left=left))

        for place, number in enumerate(state.members):
            for step in members.faults(number):
                numbers = (*state.members[:place], step.after, *state.members[place + 1 :])
                yield fault(f"{MEMBERS[place]} {step.text}", numbers)
            if SPLIT in kinds:
                one, other = members.split(number)
                numbers = (*state.members[:place], one, *state.members[place + 1 :], other)
                yield fault(f"{MEMBERS[place]} {SPLIT}", numbers)
        for kind, emptied in ((ALL_EMPTY, True), (ALL_FLUSH, False)):
            if kind in kinds:
                yield fault(kind, tuple([members.emptied(number, emptied) for number in state.members]))
        yield from self._faults_of_two(state, fault)

    def _faults_of_two(self, state: State, fault: Callable[[str, tuple[int, ...]], Next]) -> Iterator[Next]:
        members, kinds = self.members, self.bounds.kinds
        for place, number in enumerate(state.members):
            for other, source in enumerate(state.members):
                if other == place or not members.all[number].reach or not members.all[source].reach:
                    continue
                numbers = list(state.members)
                for kind in (RESEED, FOLLOW):
                    if kind in kinds:
                        numbers[place] = members.copied(number, source, kind == FOLLOW)
                        yield fault(f"{MEMBERS[place]} {kind} {MEMBERS[other]}", tuple(numbers))
                if MOVE in kinds:
                    numbers[place], numbers[other] = members.moved(number, source)
                    yield fault(f"{MEMBERS[place]} {MOVE} {MEMBERS[other]}", tuple(numbers))
