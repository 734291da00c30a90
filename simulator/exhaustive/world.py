"""Processes of clients, one server, and the messages between them: the states of a search, and the next events of each.

Theory. The server runs the real lock.lua (`memory`), each process is a real session (`process`). The network holds what
is on its way. A message arrives at once, or it is *slow*: then it arrives at any later time, or never. A process runs
whenever a timer of it is due, or it is *stopped*: then it runs at any later time, or never. The bounds say how many
messages may be slow, and how often a process may be stopped; so there are few states in which nothing goes wrong, and a
search may last many ticks. From each state the search tries every next event.

Rules. In every state:
(a) At most one section believes that it holds the lock.
(b) The fence of each section is higher than all before.
(c) A lease that the server has as well ends there no earlier than its holder believes. (A server that restarted may
    know an earlier end, and then a quarantine keeps others out.)
(d) No command of a section runs in a later section.
(e) A process whose threads are idle, which takes back nothing, and of which nothing is on its way, has nothing in the
    server. (A server that restarted may have an old token, which runs out.)
(f) No process breaks a rule of its own: see `process`.
In every state without a next event, and so on some way from every state:
(g) If everybody goes on, every caller ends, each process gets the lock once more, and nothing is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock.primitives.messages import RevokeCall
from simulator.server import CLOCK_START

from .automaton import Automaton
from .memory import EMPTY, GONE, LOCK, QUEUE, RECORD, WAITERS, Memory
from .process import ACQUIRES, ASKS, EXECUTES, EXTENDS, HOLDS, IDLE, LEAVES, Input, Shape
from .wire import AGE, Host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .memory import Call
    from .process import Belief, View
    from .wire import Request

REQUEST, REPLY, PUSH = range(3)
KEYS: Final = (LOCK, RECORD, QUEUE, WAITERS, GONE)
PATIENCE: Final = 60  # ticks: a caller that still waits then waits for ever
END: Final = 30  # the tick at which nothing can be left
TRIES: Final = 2  # with the first one a client may meet a server that was a replica: a quarantine begins then
AFTERWARDS: Final = 4  # ticks: longer than the longest ttl, so that nothing may hold the lock any more


RESTARTS: Final[tuple[str, ...]] = ("restarts with all its data", "restarts without its last write", "restarts empty")
FAILOVERS: Final[tuple[str, ...]] = ("is replaced by a replica", "is replaced by a replica that lacks its last write")


class Bounds(NamedTuple):
    """The bounds of a search. A tick is a second."""

    shape: Shape = Shape()
    processes: int = 2
    ticks: int = 4
    starts: int = 3
    """Acquires of all threads together."""
    slow: int = 0
    """Messages that do not arrive at once: requests, replies, pushes."""
    stops: int = 0
    """How often a process does not run although a timer of it is due."""
    breaks: int = 0
    """Connections of a slow message that break, so that its process need not wait until the call gives up."""
    restarts: int = 0
    ways: tuple[str, ...] = RESTARTS
    """How the server may restart, or be replaced by its replica."""
    revocations: int = 0
    cancels: int = 0
    """Threads that are cancelled while they acquire."""
    extends: int = 0
    executes: int = 0
    end: str = LEAVES
    """How a thread ends its section: as a `with` does, or by release()."""


class Left(NamedTuple):
    """The rest of the bounds."""

    ticks: int
    starts: int
    slow: int
    stops: int
    breaks: int
    restarts: int
    revocations: int
    cancels: int
    extends: int
    executes: int


class Message(NamedTuple):
    """A message on its way."""

    kind: int
    process: int
    handle: str
    """Of the request; "": nobody waits for the reply."""
    host: int
    content: int
    """The number of the calls, the replies, or the push."""
    is_slow: bool = False
    """Else it arrives now, before anything else happens."""


class State(NamedTuple):
    """One state of the search."""

    now: int
    host: Host
    image: int
    before: int
    """The image before the last write, which a restart may lose."""
    processes: tuple[int, ...]
    stopped: tuple[bool, ...]
    """Which processes have not run when a timer of theirs was due."""
    network: tuple[Message, ...]
    fence: int
    """The highest fence of a section."""
    left: Left


class Event(NamedTuple):
    """One event: what happens, to whom, and with what."""

    kind: str
    who: int = -1
    what: str = ""
    content: int = -1


Next = tuple[Event, State, str]
"""A step of the search: an event, the state after it, and the rule that it breaks, or ""."""


class World:
    """The states of one search, and the steps between them. `lua`: a change of lock.lua."""

    def __init__(self, bounds: Bounds, lua: Callable[[str], str] = str) -> None:
        self.bounds = bounds
        self.memory = Memory(lua)
        self.names = [chr(ord("A") + i) for i in range(bounds.processes)]
        self.automata = [Automaton(name, bounds.shape) for name in self.names]
        self.contents: list[Any] = []
        self._numbers: dict[str, int] = {}

    def first_state(self) -> State:
        """Return the state in which no client has sent anything."""
        bounds = self.bounds
        left = Left(*(getattr(bounds, name) for name in Left._fields))
        return State(0, Host(), EMPTY, EMPTY, (0,) * bounds.processes, (False,) * bounds.processes, (), 0, left)

    def view(self, state: State, who: int) -> View:
        """Return what the search sees of a process."""
        return self.automata[who].views[state.processes[who]]

    def content(self, content: Any) -> int:
        """Return the number of this content of a message."""
        key = repr(content)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.contents)
            self.contents.append(content)
        return number

    # The next events

    def next_states(self, state: State) -> Iterator[Next]:
        """Yield every step from this state."""
        left = state.left
        for message in state.network:
            if not message.is_slow:
                yield self._delivered(state, message)
                if left.slow:
                    yield self._is_slow(_spend(state, slow=left.slow - 1), message)
                return
        for message in dict.fromkeys(state.network):
            yield self._delivered(state, message)
        for who in range(len(self.names)):
            yield from self._process_steps(state, who)
        if left.revocations and (step := self._revokes(state)) is not None:
            yield step
        if left.restarts:
            yield from self._restarts(state)
        if left.ticks and self._goes_on(state) and (stopping := self._stopping(state)) is not None:
            yield self._tick(_spend(stopping, ticks=left.ticks - 1))

    def _goes_on(self, state: State) -> bool:
        """Whether time matters: else whatever may follow later may as well follow now."""
        views = [self.view(state, who) for who in range(len(self.names))]
        return bool(
            state.network
            or state.host.since > state.now - AFTERWARDS
            or self.memory.lasts(state.image)
            or any(view.has_rest or any(doing != IDLE for _, doing in view.threads) for view in views)
        )

    def _stopping(self, state: State) -> State | None:
        """Return the state in which each process with a timer that is due is stopped; None if the bounds forbid it."""
        due = tuple(self.view(state, who).next_timer <= state.now for who in range(len(self.names)))
        cost = sum(is_due and not was for is_due, was in zip(due, state.stopped, strict=True))
        if cost > state.left.stops:
            return None
        return _spend(state, stops=state.left.stops - cost)._replace(stopped=due) if cost else state

    def _is_slow(self, state: State, message: Message) -> Next:
        """A message does not arrive now."""
        network = _without(state.network, message)
        after = state._replace(network=tuple(sorted((*network, message._replace(is_slow=True)))))
        return Event("is slow", message.process, message.handle, message.kind), after, ""

    def _delivered(self, state: State, message: Message) -> Next:
        return self._arrives(state, message) if message.kind == REQUEST else self._received(state, message)

    def _process_steps(self, state: State, who: int) -> Iterator[Next]:
        view, left = self.view(state, who), state.left
        for handle, host in view.awaited:
            if host != state.host.number:
                yield self._given(state, Event("notices", who, handle), "breaks", handle)
            elif left.breaks:
                yield self._given(_spend(state, breaks=left.breaks - 1), Event("breaks", who, handle), "breaks", handle)
        if view.next_timer <= state.now:
            yield self._given(state, Event("runs", who), "runs")
        idle = [thread for thread, doing in view.threads if doing == IDLE]
        if idle and left.starts:  # the threads of a process are alike: the first idle one begins
            yield self._acts(_spend(state, starts=left.starts - 1), who, idle[0], ACQUIRES)
        for thread, doing in view.threads:
            if doing == ASKS and left.cancels:
                after = _spend(state, cancels=left.cancels - 1)
                yield self._given(after, Event("is cancelled", who, thread), "cancels", thread)
            elif doing == HOLDS:
                yield from self._section_steps(state, who, thread)

    def _section_steps(self, state: State, who: int, thread: str) -> Iterator[Next]:
        left = state.left
        yield self._acts(state, who, thread, self.bounds.end)
        if left.extends:
            yield self._acts(_spend(state, extends=left.extends - 1), who, thread, EXTENDS)
        if left.executes:
            yield self._acts(_spend(state, executes=left.executes - 1), who, thread, EXECUTES)

    def _acts(self, state: State, who: int, thread: str, action: str) -> Next:
        return self._given(state, Event(action, who, thread), "acts", thread, action)

    def _given(
        self, state: State, event: Event, kind: str, handle: str = "", data: Any = None, content: int = -1
    ) -> Next:
        """Give an input to a process. `content`: of the message that is the input."""
        who = event.who
        if kind in {"reply", "push"}:
            data = self.contents[content]
        automaton, before = self.automata[who], self.view(state, who)
        number = state.processes[who]
        given = Input(kind, state.now, state.host, handle, _Frozen(data, content) if content >= 0 else data)
        step = automaton.step(number, given)
        network = self._after_step(state, who, step.kept, step.sent)
        processes = (*state.processes[:who], step.after, *state.processes[who + 1 :])
        fence, broken = state.fence, ""
        view = automaton.views[step.after]
        for belief in view.beliefs:
            if all(belief.fence != each.fence or belief.thread != each.thread for each in before.beliefs):
                if belief.fence <= fence:
                    broken = f"the fence of {belief.thread} is no higher than one before"
                fence = max(fence, belief.fence)
        stopped = (*state.stopped[:who], False, *state.stopped[who + 1 :])
        after = state._replace(processes=processes, stopped=stopped, network=network, fence=fence)
        return event, after, view.broken or self._broken(after) or broken

    def _after_step(
        self, state: State, who: int, kept: frozenset[str], sent: tuple[Request, ...]
    ) -> tuple[Message, ...]:
        """Return the network once a process sent these requests, and awaits no replies but to those and the `kept`."""
        messages = list[Message]()
        for message in state.network:
            if message.process != who or message.kind == PUSH or message.handle in kept or not message.handle:
                messages.append(message)
            elif message.kind == REQUEST:
                messages.append(message._replace(handle=""))
        for request in sent:
            if request.host == state.host.number:
                messages.append(Message(REQUEST, who, request.handle, request.host, self.content(request.calls)))
        return tuple(sorted(messages))

    # Messages

    def _arrives(self, state: State, message: Message) -> Next:
        """A request arrives at the server, which sends its reply."""
        network = _without(state.network, message)
        late = "" if message.handle else " late"
        image, replies, broken = state.image, list[Any](), ""
        for call in self.contents[message.content]:
            image, reply, pushes = self._run(state, image, call)
            replies.append(reply)
            network += pushes
            broken = broken or self._command_broken(state, call, reply)
        if message.handle:
            network.append(message._replace(kind=REPLY, content=self.content(replies), is_slow=False))
        event = Event(
            f"arrives{late}", message.process, message.handle, self.content((self.contents[message.content], replies))
        )
        before = EMPTY if not state.left.restarts else state.image if image != state.image else state.before
        after = state._replace(image=image, before=before, network=tuple(sorted(network)))
        return event, after, broken or self._broken(after)

    def _run(self, state: State, image: int, call: Call) -> tuple[int, Any, list[Message]]:
        """Run one script call. Returns the image after it, the reply, and the pushes to subscribed processes."""
        subscribed = {
            name.encode(): who
            for who, name in enumerate(self.names)
            if self.view(state, who).subscribed_at == state.host.number
        }
        ran = self.memory.run(image, state.now, call, frozenset(subscribed))
        pushes = [
            Message(PUSH, subscribed[channel], "", state.host.number, self.content(payload))
            for channel, payload in ran.pushes
            if channel in subscribed
        ]
        return ran.image, ran.reply, pushes

    def _received(self, state: State, message: Message) -> Next:
        """A reply or a push arrives at its process."""
        state = state._replace(network=tuple(_without(state.network, message)))
        kind = "push" if message.kind == PUSH else "reply"
        event = Event(f"receives a {kind}", message.process, message.handle, message.content)
        return self._given(state, event, kind, message.handle, content=message.content)

    def _revokes(self, state: State) -> Next | None:
        """A person revokes the lease of the holder."""
        holder, _ = self.memory.holder(state.image)
        if not holder or holder.startswith(b"!"):
            return None
        call = KEYS, (*_words(RevokeCall(holder, "0", "by a person").encode()), b"")
        image, _, pushes = self._run(state, state.image, call)
        network = tuple(sorted([*state.network, *pushes]))
        after = _spend(state, revocations=state.left.revocations - 1)
        return Event("is revoked", what=holder.decode()), after._replace(image=image, network=network), ""

    # The server, and time

    def _restarts(self, state: State) -> Iterator[Next]:
        images: dict[str, int] = dict(
            zip((*RESTARTS, *FAILOVERS), (state.image, state.before, EMPTY, state.image, state.before), strict=True)
        )
        seen = set[int]()
        for way in self.bounds.ways:
            image = self.memory.at(images[way], state.now)
            if image in seen:
                continue
            seen.add(image)
            began = -AGE if way in FAILOVERS else state.now
            host = Host(state.host.number + 1, began, self.memory.count(image), state.now)
            network = tuple(each for each in state.network if each.kind != REQUEST)
            after = _spend(state, restarts=state.left.restarts - 1)
            before = image if after.left.restarts else EMPTY
            after = after._replace(host=host, image=image, before=before, network=network)
            yield Event("restarts", what=way), after, self._broken(after)

    def _tick(self, state: State) -> Next:
        now = state.now + 1
        image, before = self.memory.at(state.image, now), self.memory.at(state.before, now)
        after = state._replace(now=now, image=image, before=before)
        return Event("tick"), after, self._broken(after)

    # Rules

    def _beliefs(self, state: State) -> list[Belief]:
        now = state.now
        return [
            belief for who in range(len(self.names)) for belief in self.view(state, who).beliefs if belief.until >= now
        ]

    def _broken(self, state: State) -> str:
        beliefs = self._beliefs(state)
        if len(beliefs) > 1:
            return f"{' and '.join(belief.thread for belief in beliefs)} both hold the lock"
        holder, end_ms = self.memory.holder(state.image)
        for belief in beliefs:
            if holder != belief.token or end_ms >= belief.deadline_ms:
                continue
            if self.memory.granted_by(state.image) == state.host.identity:
                return (
                    f"{belief.thread} believes until {belief.deadline_ms:.0f} ms, and the server frees at {end_ms} ms"
                )
        return self._left_behind(state) if not state.host.number else ""

    def _left_behind(self, state: State) -> str:
        """Return the token in the server that nobody will take back; "" if there is none."""
        for token in self.memory.tokens(state.image):
            who = self.names.index(token.removeprefix(b"!").partition(b"/")[0].decode())
            view = self.view(state, who)
            has_rest = view.has_rest or any(doing != IDLE for _, doing in view.threads)
            if not has_rest and all(each.process != who for each in state.network):
                return f"{token.decode()} is left in the server"
        return ""

    def _command_broken(self, state: State, call: Call, reply: Any) -> str:
        _, args = call
        if args[0] != b"execute" or isinstance(reply, str) or reply[0] != 1:
            return ""
        fence = int(args[4].rpartition(b":")[2])
        for belief in self._beliefs(state):
            if belief.token == args[1] and belief.fence != fence:
                return f"a command of the section with fence {_short(fence)} ran in a later section of the same lease"
        return ""

    # The way to the end

    def quiet_step(self, state: State) -> Next | None:
        """Return the next step if everybody goes on, and nothing else happens; None if everybody has ended."""
        for message in state.network:
            return self._delivered(state, message)
        has_rest = False
        for who in range(len(self.names)):
            view = self.view(state, who)
            for handle, host in view.awaited:
                if host != state.host.number:
                    return self._given(state, Event("notices", who, handle), "breaks", handle)
            if view.next_timer <= state.now:
                return self._given(state, Event("runs", who), "runs")
            for thread, doing in view.threads:
                if doing == HOLDS:
                    return self._acts(state, who, thread, self.bounds.end)
                has_rest |= doing != IDLE
            has_rest |= view.has_rest
        return self._tick(state) if has_rest else None

    def ends(self, state: State, known: set[State]) -> str:
        """Return what is wrong if everybody goes on from here; "" if everybody ends, and the lock is free."""
        nothing = Left(*(0 for _ in Left._fields))
        state = state._replace(
            left=nothing, network=tuple(each for each in state.network if each.handle or each.kind == PUSH)
        )
        passed, limit = set[State](), state.now + PATIENCE
        while state not in known:
            passed.add(state)
            step = self.quiet_step(state)
            if step is None:
                if broken := self._broken_at_end(state):
                    return broken
                break
            _, state, broken = step
            if broken:
                return broken
            if state.now > limit:
                return "somebody waits for ever"
        known |= passed
        return ""

    def _broken_at_end(self, state: State) -> str:
        """Let every process acquire the lock once more, when every ttl is over. Returns what is wrong."""
        held = self.memory.tokens(state.image)
        if not state.host.number and any(not token.startswith(b"!") for token in held):
            return f"something is left in the server: {self.memory.describe(state.image)}"
        end = max(END, state.now + AFTERWARDS)  # nearly always the same time, so that the search has seen most of it
        for who, name in enumerate(self.names):
            for _ in range(TRIES):
                state = state._replace(now=end, image=self.memory.at(state.image, end))
                state, has_held, broken = self._last_try(state, who)
                if broken:
                    return broken
                if has_held:
                    break
                end = state.now + AFTERWARDS
            else:
                return f"{name} never gets the lock again: {self.memory.describe(state.image)}"
        return ""

    def _last_try(self, state: State, who: int) -> tuple[State, bool, str]:
        """Let a process acquire the lock. Returns the state after that, whether it did, and the rule that broke."""
        _, state, broken = self._acts(state, who, f"{self.names[who]}1", ACQUIRES)
        has_held, limit = False, state.now + PATIENCE
        while not broken and (step := self.quiet_step(state)) is not None and state.now < limit:
            _, state, broken = step
            has_held |= any(doing == HOLDS for _, doing in self.view(state, who).threads)
        return state, has_held, broken


class _Frozen:
    """A reply or a push: two are equal if their contents have one number."""

    __slots__ = ("content", "value")

    def __init__(self, value: Any, content: int) -> None:
        self.value, self.content = value, content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and other.content == self.content

    def __hash__(self) -> int:
        return self.content


def _without(network: tuple[Message, ...], message: Message) -> list[Message]:
    messages = list(network)
    messages.remove(message)
    return messages


def _spend(state: State, **less: int) -> State:
    """Return the state with another rest of these bounds."""
    return state._replace(left=state.left._replace(**less))


def _words(args: Sequence[str | bytes]) -> tuple[bytes, ...]:
    return tuple(arg if isinstance(arg, bytes) else arg.encode() for arg in args)


def _short(fence: int) -> int:
    return fence - CLOCK_START
