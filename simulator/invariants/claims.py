"""The claims of all clients, step by step along the table of `_client/claim.py`. S15.

Theory. The code does not write the states yet (ADR 61), so this module follows them from outside: it stands before and
behind the functions in which a claim gets an event, and steps the claim by the table. After each step of a process it
compares the states that the events have led to with those that the places of the client say. So there are two ways to
fail: an event comes in a state in which the table does not have it, or a claim is elsewhere than its events say.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from interlock._api.lock import TAKEN_OVER
from interlock._client.claim import LATE, TABLE, Event, State, state_after, states
from interlock._client.grant import Attempt
from interlock._client.lease_ends import DROPPED
from interlock._people.observer import Loss, loss_of
from interlock.primitives.lock import ReserveReply
from interlock.primitives.messages import (
    Busy,
    Failed,
    Granted,
    Queued,
    Refused,
    ReleaseReply,
    Retry,
    parse_acquire,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock._client.grant import Grant, Hold
    from interlock._client.unread_releases import Left
    from interlock._session.session import Session
    from simulator.coroutines import Process

    from .trace import Trace

Transition = tuple[str, str]
"""The names of a state, and of an event that came in it."""

REPLIES: Final = {
    Queued: Event.SAYS_QUEUED,
    Busy: Event.SAYS_BUSY,
    Retry: Event.SAYS_RETRY,
    Refused: Event.SAYS_REFUSED,
}
LOSSES: Final = {
    Loss.EXPIRED: Event.DEADLINE,
    Loss.MAX_HOLD: Event.DEADLINE,
    Loss.GONE: Event.SAYS_GONE,
    Loss.REVOKED: Event.REVOKED,
}
NOWHERE: Final = frozenset({State.NEW, State.GONE})
ASKERS: Final = {State.NEW, State.ASKING, State.QUEUED, State.OFFERED, State.WATCHING}
UNSEEN: Final[Mapping[Event, str]] = {
    Event.FORKS: "nothing forks: tests/faults/test_forks.py",
    Event.LOOP_ENDS: "no loop ends without a close: tests/faults/test_event_loops.py",
    Event.COLLECTED: "no `with` becomes garbage: tests/unit/test_finalizers.py, tests/faults/test_interrupts.py",
    Event.SAYS_RETRY: "no queue has so many dead waiters: tests/faults/test_dead_waiters.py",
    Event.ASK_AGAIN: "the same",
}
"""Events that the simulator does not have, and the tests that do."""
POSSIBLE: Final = [
    (state.name, event.name)
    for state, row in TABLE.items()
    for event in row
    if event not in UNSEEN and (state, event) != (State.NEW, Event.GIVES_BACK)  # which follows LOOP_ENDS
]


class Judge(Protocol):
    """What is told of a violation: see `Trace`."""

    over: bool

    def violated(self, rule: int, text: str) -> None:
        """Report the break of a rule."""
        ...


class Claims:
    """The claims of all clients of a run."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.seen: Counter[Transition] = Counter()
        self._of: dict[Process, ClaimsOfClient] = {}

    def watch(self, process: Process, session: Session) -> None:
        """Follow the claims of this client."""
        self._of[process] = ClaimsOfClient(session, self.trace, self.seen)

    def after_step(self, process: Process) -> None:
        """Compare, if this step of the process had an event, what the events have led to with what the places say."""
        claims = self._of[process]
        if claims.has_moved:
            claims.compare()

    def sweep(self) -> None:
        """Compare for all processes, in case a claim has moved without an event."""
        for process, claims in self._of.items():
            if process.awake:
                claims.compare()


class ClaimsOfClient:
    """The claims of one client."""

    def __init__(self, session: Session, trace: Judge, seen: Counter[Transition]) -> None:
        self.session, self.trace, self.seen = session, trace, seen
        self.states: dict[str, State] = {}
        self.live: dict[str, None] = {}  # the tokens of those that are neither NEW nor GONE
        self.forgotten_at: dict[str, float] = {}  # when the server may forget a lease that runs out, by token
        self.is_over = False  # the client has closed
        self.has_moved = False  # since the last comparison
        self._is_granting = False
        self._cause: Event | None = None  # of what is under way
        core, ends, waiters, undo = session.core, session.ends, session.waiters, session.undo
        hooks: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (session.requests, "ask_until_answered", self._ask),
            (waiters, "register", self._register),
            (waiters, "unregister", self._unregister),
            (waiters, "_on_heartbeat_reply", self._on_heartbeat_reply),
            (core, "lease_from_grant", self._lease_from_grant),
            (core, "_abandon_token", self._abandon_token),
            (core.cohorts, "leave", self._leave_cohort),
            (core.cohorts, "pass_on", self._pass_on),
            (core.turns, "begin_section", self._begin_section),
            (core.holding, "release", self._release),
            (core.holding, "_release_held", self._release_held),
            (core.giving_back, "in_background", self._in_background),
            (session.renewer, "_on_state", self._on_renewal),
            (ends, "lose", self._lose),
            (ends, "orphaned", self._orphaned),
            (undo, "add", self._give_back),
            (undo, "tick", self._tick_undo),
            (session.unread_releases, "_forget", self._forget_unread),
            (session, "dispatch_push", self._dispatch_push),
            (session, "stop_granting", self._stop_granting),
        )
        self.hooked = {(type(owner).__name__, name) for owner, name, _ in hooks}
        for owner, name, around in hooks:
            setattr(owner, name, partial(around, getattr(owner, name)))

    # Steps

    def state(self, token: str) -> State:
        """Return the state to which the events of this claim have led."""
        return self.states.get(token, State.NEW)

    def step(self, token: str, event: Event) -> None:
        """Step a claim by the table."""
        if self.is_over or self.trace.over:
            return
        before = self.state(token)
        after = state_after(before, event)
        if after is None:
            self.trace.violated(15, f"{token}: the table has no {event.name} in {before.name}")
            return
        self.seen[before.name, event.name] += 1
        if after is not before or before is State.NEW:
            self._put(token, after)

    def _put(self, token: str, state: State) -> None:
        self.states[token], self.has_moved = state, True
        if state in NOWHERE:
            self.live.pop(token, None)
        else:
            self.live[token] = None

    def compare(self) -> None:
        """Compare the states with those that today's places say."""
        self.has_moved = False
        if self.is_over:
            return
        now = self.session.runtime.now()
        places = states(self.session.ends, now)
        for token in [*self.live, *(token for token in places if token not in self.live)]:
            expected, found = self.state(token), places.get(token, NOWHERE)
            if expected is State.EXPIRING and expected not in found and now >= self.forgotten_at.pop(token, 0.0):
                self.step(token, Event.RUNS_OUT)
                expected = State.GONE
            if expected not in found:
                names = " or ".join(sorted(state.name for state in found))
                self.trace.violated(15, f"{token}: its events lead to {expected.name}, and its places say {names}")
                self._put(token, min(found, key=lambda state: state.name))

    # The caller asks

    async def _ask(self, ask: Callable[..., Any], question: Any, args: Any, *rest: Any) -> Any:
        verb, token = str(args[0]), str(args[1])
        is_acquire = verb == "acquire" and isinstance(question, Attempt)
        if is_acquire:
            arrives = self.state(token) is State.NEW and question.is_queued
            self.step(token, Event.ARRIVES if arrives else Event.ASKS)
        try:
            raw, sent = await ask(question, args, *rest)
        except BaseException:
            if question.in_doubt and (is_acquire or verb in {"release", "reserve"}):
                self.step(token, Event.NO_REPLY)
            raise
        if is_acquire:
            self._note_reply(question, parse_acquire(raw))
        elif verb == "release" and self.state(token) is not State.GONE:
            self.step(token, Event.ASK_AGAIN if ReleaseReply.parse(raw).ask_again else Event.ANSWERED)
        elif verb == "reserve" and ReserveReply.parse(raw).fence:
            self.step(token, Event.RESERVED)
        return raw, sent

    def _note_reply(self, attempt: Attempt, reply: Any) -> None:
        if not isinstance(reply, Granted):
            self.step(attempt.token, REPLIES[type(reply)])
        elif attempt.make_lease is None:
            self.step(attempt.token, Event.PASSED)

    def _register(self, register: Callable[..., Any], attempt: Attempt) -> None:
        self.step(attempt.token, Event.WATCHES if attempt.make_lease is None else Event.ASKS)
        register(attempt)

    def _unregister(self, unregister: Callable[..., Any], attempt: Attempt) -> None:
        """A claim whose caller ends it leaves this place after the undo has begun, if there is one."""
        if self.state(attempt.token) in ASKERS and not self._is_granting and not self.is_over:
            if attempt.in_doubt:
                self.trace.violated(15, f"{attempt.token} is in doubt, and its caller leaves nothing behind")
            self.step(attempt.token, Event.NOTHING_LEFT)
        unregister(attempt)

    def _lease_from_grant(self, make: Callable[..., Any], attempt: Attempt, *rest: Any) -> Any:
        lease, self._is_granting = None, True
        try:
            lease = make(attempt, *rest)
        finally:
            self._is_granting = False
            self.step(attempt.token, Event.GRANTED if lease is not None else Event.GRANTED_IN_VAIN)
        return lease

    def _abandon_token(self, abandon: Callable[..., Any], attempt: Attempt) -> None:
        self._cause = Event.IS_SPENT
        abandon(attempt)
        self._cause = None

    # Hints

    def _on_heartbeat_reply(self, heed: Callable[..., Any], queue: Any, batch: list[Attempt], reply: Any) -> None:
        for attempt in batch:
            self.step(attempt.token, Event.HEARTBEAT)
        heed(queue, batch, reply)

    def _dispatch_push(self, dispatch: Callable[..., Any], payload: bytes) -> None:
        verb, token, *_ = (payload.decode() + "  ").split(" ", 2)
        if token in self.states:
            if verb == "granted":
                self.step(token, Event.PUSH_GRANTED)
            elif self.state(token) not in {State.HELD, State.PASSING}:  # else `lose` follows
                self.step(token, Event.REVOKED)
        dispatch(payload)

    # Within a cohort

    def _leave_cohort(self, leave: Callable[..., Any], attempt: Attempt) -> Any:
        token, passed = attempt.token, leave(attempt)
        if attempt.token != token:
            self.step(token, Event.HANDS_ON)
        return passed

    def _pass_on(self, pass_on: Callable[..., Any], grant: Grant, now: float) -> bool:
        has_passed: bool = pass_on(grant, now)
        if has_passed:
            self.step(grant.token, Event.PASSES_ON)
        return has_passed

    def _begin_section(self, begin: Callable[..., Any], grant: Grant) -> Any:
        if (lease := begin(grant)) is not None:
            self.step(grant.token, Event.BEGINS)
        return lease

    # While it is held, and how it ends

    def _on_renewal(self, heed: Callable[..., Any], hold: Hold, state: Any, sent: float) -> None:
        deadline = hold.deadline
        heed(hold, state, sent)
        if isinstance(state, Failed):
            self.step(hold.token, Event.NOT_RENEWED)
        elif hold.deadline > deadline or hold.last_answered_sent == sent:
            self.step(hold.token, Event.RENEWED)

    def _lose(self, lose: Callable[..., Any], grant: Grant, why: str) -> None:
        if grant.end_reason is None and not grant.has_passed:
            self._note_end(grant, Event.TAKEN_OVER if why == TAKEN_OVER else LOSSES[loss_of(why)])
        lose(grant, why)

    def _orphaned(self, orphaned: Callable[..., Any], grant: Grant, why: str) -> None:
        if not grant.has_passed:
            self._note_end(grant, Event.DROPPED if why == DROPPED else Event.COLLECTED)
        orphaned(grant, why)

    def _note_end(self, grant: Grant, event: Event) -> None:
        self.step(grant.token, event)
        if self.state(grant.token) is State.EXPIRING:
            self.forgotten_at[grant.token] = grant.hold.claim.lasts_until(self.session.runtime.now())

    async def _release_held(self, release: Callable[..., Any], grant: Grant, now: float, **options: Any) -> Any:
        if grant.end_reason is None and grant.hold.grant is grant:
            self.step(grant.token, Event.RELEASES)
        return await release(grant, now, **options)

    # It goes back

    async def _release(self, release: Callable[..., Any], grant: Grant) -> bool:
        if grant.end_reason is not None:  # then it awaits nothing
            self._cause = Event.LETS_GO
        try:
            was_held: bool = await release(grant)
        finally:
            self._cause = None
        return was_held

    def _in_background(self, give_back: Callable[..., Any], grant: Grant) -> Any:
        self._cause = Event.GIVES_BACK if grant.end_reason is None else Event.LETS_GO
        try:
            return give_back(grant)
        finally:
            self._cause = None

    def _give_back(self, add: Callable[..., Any], attempt: Attempt) -> Any:
        event = Event.GIVES_UP if self.state(attempt.token) in ASKERS else Event.GIVES_BACK
        self.step(attempt.token, self._cause or event)
        return add(attempt)

    async def _tick_undo(self, tick: Callable[..., Any]) -> None:
        undo = self.session.undo
        before = {token: until for token, (_, until, _) in undo.jobs.items()}
        began = self.session.runtime.now()
        try:
            await tick()
        finally:
            for token in before.keys() - undo.jobs.keys():
                self.step(token, Event.RUNS_OUT if began > before[token] else Event.ANSWERED)

    def _forget_unread(self, forget: Callable[..., Any], left: Left) -> bool:
        has_forgotten: bool = forget(left)
        if has_forgotten and left.grant.token not in self.session.undo.jobs:
            reply: Any = left.sent.reply
            self.step(left.grant.token, Event.ANSWERED if ReleaseReply.parse(reply).was_ours else Event.WAS_NOT_OURS)
        return has_forgotten

    # The client ends

    def _stop_granting(self, stop: Callable[..., Any], *, announce: bool) -> Any:
        for token in {**self.states, **states(self.session.ends, self.session.runtime.now())}:
            self.step(token, Event.CLOSES)
        self.is_over = True
        return stop(announce=announce)


def unseen(seen: Counter[Transition]) -> list[Transition]:
    """Return the transitions that were never seen, of those that the simulator can show."""
    return [each for each in POSSIBLE if not seen[each]]


def lines(seen: Counter[Transition]) -> list[str]:
    """Say for people which transitions a batch has seen, and list the others."""
    missing = unseen(seen)
    late = sum(seen[state.name, event.name] > 0 for state, row in TABLE.items() for event in LATE - row.keys())
    number = f"{len(POSSIBLE) - len(missing)} of {len(POSSIBLE)}"
    said = [f"claims: {number} transitions of the table were seen, and {late} pairs of a state and a late message"]
    for state in TABLE:
        never = ", ".join(event for each, event in missing if each == state.name)
        if never:
            said.append(f"  never in {state.name}: {never}")
    return said
