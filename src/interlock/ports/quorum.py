"""The port for a quorum: several servers that know nothing of each other, asked at the same time (Redlock).

Theory. A message goes to all servers, and what a majority says holds: `_votes` has what that means for each verb. Every
server runs the same scripts and has its own queue. A waiter stands in all of them; a release hands over at each, nearly
always to the same waiter, who is pushed, asks all, and has its majority. Fences are agreed on as PROTOCOL.md says:
each server proposes one, the highest counts, and unless a majority proposed just that, a majority must store it.

Rules.
 1. As soon as a majority decides, nobody waits for the rest. What comes later is read later (`_sweep`).
 2. A server that is silent for `SILENCE` is away: it is not asked until it has answered a greeting in the background.
 3. One that did not answer an acquire may still run it: its release leaves a tombstone there. A release that could not
    be sent is a debt: it is sent before the server is asked anything else.
 4. A token that was given back somewhere, without an answer, has no vote there any more: the release may come after it.
 5. Where several have a share and nobody a majority, the one with the most servers goes on, and all others give back at
    once, wait at random, and ask again: nobody waits for a lease to run out because of that.
 6. A server that may have forgotten leases does not vote: by what the locks' records and this client's memory tell, as
    for a single server; and one that this client never met, if it is younger than the longest lease. Only if all are
    there, all so young, and all started at about the same time, is it a new quorum.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from interlock._core import (
    FOREVER,
    GONE_FOR,
    GRANTED,
    HERE,
    QUARANTINE,
    QUEUED,
    RETRY,
    RETRY_FOR,
    Disconnected,
    ServerError,
    log,
    quarantined,
    run,
)
from interlock.errors import ConfigError, LockError

from ._votes import MERGED, SPLIT, UNAGREED, Said

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from interlock._core import Argument, Message, Place, Script

SILENCE: Final = 0.25  # seconds without an answer after which a server is away; less for a short ttl:
SHARE: Final = 0.1  # of the ttl that a vote may take
HASTE: Final = 0.05  # seconds that it may take however short the ttl is
GREETING: Final = 0.5  # seconds for a connection
LOOK: Final = (0.05, 1.0)  # seconds between two looks whether one that is away has come back: the first, the longest
LOUD: Final = 1.0  # seconds for which one is away before the log says so
PAUSE: Final = (0.005, 0.5)  # seconds that one who gave back waits before it asks again: the first, the longest
SOON: Final = 50  # ms after which the one who goes on looks whether the others have given back
INSISTS: Final = 20  # times that one who does not wait, and goes on, asks again
MOST: Final = 100_000  # tokens that are remembered of a server
TOGETHER: Final = 5.0  # seconds within which the servers of a new quorum are started
DRIFT: Final = 0.01  # of a ttl, as Redlock's authors have it
TOMBSTONE: Final = str(int(GONE_FOR * 1000))


class Node:
    """One server of the quorum, as this client knows it."""

    __slots__ = ("barred", "cause", "debts", "gone", "known", "longest", "port", "spoiled", "tokens", "told", "up")

    def __init__(self, port: Any) -> None:
        self.port = port  # of threads or of asyncio
        self.up = False
        self.longest = GONE_FOR  # seconds for which it may keep what it was asked for
        self.known = False  # it has answered once
        self.cause = "not asked yet"  # why it is away
        self.gone = port.now()  # since when it is
        self.told = False  # whether the log says so
        self.barred = ""  # of what its last quarantine was the evidence
        self.tokens: dict[str, bool] = {}  # those that asked it: whether it has not answered, and may still do so
        self.spoiled: dict[str, bool] = {}  # tokens that were given back, without an answer
        self.debts: dict[str, tuple[Message, float]] = {}  # releases that it has not got, by token, and until when

    def worded(self, message: Message) -> Message:
        """The message as this one gets it: whether it is heard is told for each, and so is what is in doubt."""
        script, keys, args = message
        if args[0] == "acquire":
            self.tokens[str(args[1])] = True
            _bound(self.tokens)
            self.longest = max(self.longest, int(args[2]) / 1000)
            return script, keys, (*args[:4], *self.port.ear(keys[0]), *args[6:])
        if args[0] == "renew":  # or extend
            self.longest = max(self.longest, *(int(ms) / 1000 for ms in args[2::2]))
        if args[0] == "vouch":
            heard, channel = self.port.ear(keys[0])
            return script, keys, ("vouch", channel, heard, *args[3:])
        if args[0] == "release" and self.tokens.pop(str(args[1]), False):
            return script, keys, (*args[:2], TOMBSTONE, *args[3:])
        return message

    def answered(self, messages: Sequence[Message], replies: list[Any]) -> None:
        """What its replies tell of it."""
        for (_, _, args), reply in zip(messages, replies, strict=False):
            if args[0] == "acquire" and not isinstance(reply, Disconnected):
                if args[1] in self.tokens:
                    self.tokens[str(args[1])] = False
                if not isinstance(reply, Exception) and (evidence := quarantined(reply)):
                    self.barred = evidence

    def counted(self, messages: Sequence[Message], replies: list[Any]) -> list[Any]:
        """Those that count. A release that is still on its way would free what this token is granted now."""
        if self.spoiled:
            for i, (_, _, args) in enumerate(messages):
                if args[0] in {"acquire", "fence"} and args[1] in self.spoiled:
                    replies[i] = Disconnected("what was given back there may still be on its way", sent=True)
        return replies

    def missed(self, messages: Sequence[Message], now: float) -> None:
        """It has not got these, or they are lost."""
        for script, keys, args in messages:
            token = str(args[1])
            if args[0] == "release":
                self.debts[token] = (script, keys, (*args[:2], TOMBSTONE, *args[3:])), now + self.longest
                _bound(self.debts)


def _bound(remembered: dict[str, Any]) -> None:
    with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was at it
        if len(remembered) > MOST:
            del remembered[next(iter(remembered))]


def _marks(value: bytes) -> bool:
    return value.startswith(QUARANTINE)


def _word(args: Sequence[Any], seen: Any) -> bytes:
    """What a server that says this when inspected calls its quarantine, or the note of a run; b"" if it has none."""
    if args[0] == "forget":
        note: bytes = seen[1]
        return note if note.split(b" ")[0] == args[1].split(b" ")[0] else b""
    value: bytes = seen[0][0] if isinstance(seen[0], list) else seen[0]
    return value if _marks(value) else b""


class QuorumPort:
    """A port over those of single servers."""

    patience = RETRY_FOR
    several = True
    drift = DRIFT

    def __init__(self, ports: Sequence[Any], shown: str) -> None:
        first = ports[0]
        self.shown = shown
        self.nodes = [Node(port) for port in ports]
        self.majority = len(ports) // 2 + 1
        self.now: Callable[[], float] = first.now
        self.signal: Callable[[], Any] = first.signal
        self.wait: Callable[[Any, float], Awaitable[bool]] = first.wait
        self.tell: Callable[[Callable[[Any], object], Any], None] = first.tell
        self.spawn: Callable[[Callable[[], Coroutine[Any, Any, None]], str, Callable[[], None]], None] = first.spawn
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._late: deque[tuple[Node, Any]] = deque()  # what was sent and is not answered yet
        self._bounced: dict[str, int] = {}  # tokens that gave back, and how often
        self._met = False
        self._fault = ""
        self._calm = False  # all are there, and they are a quorum
        self._looking = False
        self._rest = self.signal()

    @property
    def mutex(self) -> Any:
        """See Port."""
        return self.nodes[0].port.mutex

    @property
    def sink(self) -> Any:
        """Whom all of them tell what they hear."""
        return self.nodes[0].port.sink

    @sink.setter
    def sink(self, sink: Any) -> None:
        for node in self.nodes:
            node.port.sink = sink

    # What the core asks

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """See Port."""
        message = (script, keys, args)
        if args[0] == "acquire":
            return await self._acquire(message, until)
        if args[0] == "forget" or (args[0] == "revoke" and isinstance(args[1], bytes) and _marks(args[1])):
            return await self._own(message, until)
        return await self._one(message, until)

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Port."""
        try:
            replies, _ = await self._poll(messages, until)
        except LockError as error:
            return [error] * len(messages)
        return replies

    async def _one(self, message: Message, until: float) -> Any:
        (reply,), _ = await self._poll([message], until)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _acquire(self, message: Message, until: float) -> Any:
        script, keys, args = message
        token, waits = str(args[1]), args[6] == "1"
        within = min(SILENCE, max(HASTE, int(args[2]) / 1000 * SHARE))
        insisted = 0
        reply: Any
        while True:
            (reply,), said = await self._poll([message], until, within)
            if isinstance(reply, Exception):
                raise reply
            if reply[0] == UNAGREED:
                (agreed, *_), _ = await self._poll([(script, keys, ("fence", token, str(reply[1])))], until, within)
                if isinstance(agreed, Exception):
                    raise agreed
                reply = [GRANTED if agreed[0] == GRANTED else RETRY, reply[1]]
            if reply[0] != SPLIT:
                if reply[0] == GRANTED:
                    self._bounced.pop(token, None)
                return reply
            _, reply, first = reply
            if waits:
                return await self._shared(message, reply, said, until) if not first else [QUEUED, reply[1], SOON, 1]
            insisted += 1
            if not first or self.now() >= until or insisted == INSISTS:
                return reply  # the core gives all back
            await self._sleep(random.uniform(0.5, 1.0) * PAUSE[0] * insisted, until)

    async def _shared(self, message: Message, reply: Any, said: dict[Node, list[Any]], until: float) -> Any:
        """Another one goes first: give back what we have of it, and ask again later. Where we wait, we still do."""
        script, keys, args = message
        token = str(args[1])
        release: Message = (script, keys, ("release", token, "0", *(() if script.name != "once" else ("0", "0"))))
        having = [node for node, (vote,) in said.items() if not isinstance(vote, Exception) and vote[0] == GRANTED]
        end = min(until, self.now() + SILENCE)  # who has no time gives all back in the background
        sent = [(node, await node.port.begin([release], end)) for node in having]
        for node, each in sent:
            (done,) = await self._read(node, each, [release], late=False, owes=False)
            if isinstance(done, Exception):
                node.spoiled[token] = True
                _bound(node.spoiled)
        times = self._bounced[token] = self._bounced.get(token, 0) + 1
        _bound(self._bounced)
        least, most = PAUSE
        await self._sleep(random.uniform(0.2, 1.0) * min(most, least * 2 ** min(times, 10)), until)
        return [RETRY] if self.now() < until else reply

    async def _own(self, message: Message, until: float) -> Any:
        """The same of each, but that each has its own word for it: a marker or a note, with its clock or identity."""
        script, keys, args = message
        _, said = await self._poll([(script, keys, ("inspect", "1"))], until)
        done = 0
        for node, (vote,) in said.items():
            own = b"" if isinstance(vote, Exception) else _word(args, vote)
            if own:
                (reply,) = await node.port.calls([(script, keys, (args[0], own, *args[2:]))], self.now() + SILENCE)
                done |= not isinstance(reply, Exception) and reply[0]
        return [done, -2]

    async def _sleep(self, seconds: float, until: float) -> None:
        await self.wait(self.signal(), min(until, self.now() + seconds))

    async def proven(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:  # noqa: ARG002 (see Port)
        """See Port. Each server has its own evidence."""
        proven = False
        for node in self.nodes:
            if node.barred:
                proven |= await node.port.proven(keys, node.barred, self.now())
                node.barred = ""
        return proven

    def unsettled(self, key: str) -> str:  # noqa: ARG002 (see Port)
        """See Port. Nobody is promoted here."""
        return ""

    def place(self, key: str) -> Place:  # noqa: ARG002 (see Port)
        """See Port."""
        return HERE

    def ear(self, key: str) -> tuple[str, str]:
        """See Port. What each is told is its own, see Node.worded."""
        return "0", self.nodes[0].port.ear(key)[1]

    def listen(self, key: str) -> None:
        """See Port."""
        for node in self.nodes:
            node.port.listen(key)

    # Asking all

    async def _poll(
        self, messages: Sequence[Message], until: float, within: float = SILENCE
    ) -> tuple[list[Any], dict[Node, list[Any]]]:
        """Send these to all that are there, and wait until each is decided: the replies, and who said what."""
        if not self._calm:
            await self._ready(until)
        if self._late:
            await self._sweep()
        started = self.now()
        end = min(until, started + within)
        said: dict[Node, list[Any]] = {}
        asked: list[tuple[Node, list[Message], Any]] = []
        again: set[Node] = set()
        try:
            for node in self._order():
                if not node.up:
                    if node.tokens:
                        node.missed([each for each in messages if each[2][1] in node.tokens], started)
                else:
                    own = [node.worded(message) for message in messages]
                    asked.append((node, own, await node.port.begin(own, end)))
            number = self.majority
            while asked:
                ready = await self.nodes[0].port.answered([sent for _, _, sent in asked], number, end)
                if not ready:
                    if end == started + within:
                        for node, _, _ in asked:
                            self._away(node, f"no answer within {within:.3g} s")
                    break
                for node, own, sent in [asked.pop(i) for i in sorted(ready, reverse=True)]:
                    said[node] = node.counted(own, await self._read(node, sent, own))
                    first = said[node][0]
                    if isinstance(first, Disconnected) and first.stale and node not in again:
                        again.add(node)  # the connection had died while it was idle: that says nothing of the server
                        del said[node]
                        asked.append((node, own, await node.port.begin(own, end)))
                number = 1
                replies = [self._merged(i, message, said, len(asked)) for i, message in enumerate(messages)]
                if None not in replies:
                    return replies, said
        finally:
            for node, _, sent in asked:
                self._late.append((node, sent))
        return [self._merged(i, message, said, 0, len(asked)) for i, message in enumerate(messages)], said

    def _order(self) -> list[Node]:
        """Those first who need not be connected first."""
        for node in self.nodes:
            if not node.port.ready:
                return sorted(self.nodes, key=lambda node: not node.port.ready)
        return self.nodes

    def _merged(self, i: int, message: Message, said: dict[Node, list[Any]], pending: int, silent: int = 0) -> Any:
        """The reply to one of the messages, or the error; None while that may still turn."""
        votes = [replies[i] for replies in said.values() if not isinstance(replies[i], Exception)]
        if len(votes) + pending < self.majority:
            return self._silence([replies[i] for replies in said.values()], len(votes), silent + pending)
        if len(votes) < self.majority:
            return None
        _, _, args = message
        return MERGED[str(args[0])](Said(args, votes, pending, len(self.nodes)))

    def _silence(self, replies: list[Any], votes: int, silent: int) -> Exception:
        """Why there is no majority."""
        for kind in (LockError, ServerError):
            for reply in replies:
                if isinstance(reply, kind):
                    return reply
        away = "; ".join(f"{node.port.shown}: {node.cause}" for node in self.nodes if not node.up)
        lost = [reply for reply in replies if isinstance(reply, Disconnected)]
        return Disconnected(
            f"only {votes} of {len(self.nodes)} servers of the quorum answer" + (f" ({away})" if away else ""),
            sent=votes > 0 or silent > 0 or any(each.sent for each in lost),
            timed_out=True,
        )

    async def _read(
        self, node: Node, sent: Any, messages: Sequence[Message], *, late: bool = False, owes: bool = True
    ) -> list[Any]:
        """The replies of one server, that have come or come now."""
        replies: list[Any] = await node.port.finish(sent, late=late)
        node.answered(messages, replies)
        error = replies[0]
        if isinstance(error, Exception) and not isinstance(error, ServerError):
            if owes:
                node.missed(messages, self.now())
            if not (isinstance(error, Disconnected) and error.stale):
                self._away(node, str(error))
        return replies

    async def _sweep(self, patience: float = 0.0) -> None:
        """Read what has come late, so that its connection is free, and no doubt is left."""
        late: list[tuple[Node, Any]] = []
        while self._late:
            try:
                late.append(self._late.popleft())
            except IndexError:  # another thread was at it
                break
        now = self.now()
        came = await self.nodes[0].port.answered([sent for _, sent in late], len(late), now + patience)
        for i, (node, sent) in enumerate(late):
            if i in came or sent.until < now:
                await self._read(node, sent, sent.messages, late=True)
            else:
                self._late.append((node, sent))

    # Who is there

    async def _ready(self, until: float) -> None:
        """Raises ConfigError if these servers are no quorum."""
        if not self._met:
            for left, node in zip(range(len(self.nodes), 0, -1), self.nodes, strict=True):
                # A share for each: those that are silent leave time enough to meet the others.
                share = self.now() + max(0.0, until - self.now()) / left
                if not node.known and (error := await self._greet(node, share)):
                    raise error
            self._met = True
            self._judge()
            if any(not node.up for node in self.nodes):
                self._look()
        elif sum(node.up for node in self.nodes) < self.majority:
            self._rest.set()
        if self._fault:
            raise ConfigError(self._fault)
        self._calm = all(node.up for node in self.nodes)

    async def _greet(self, node: Node, until: float = FOREVER) -> ConfigError | None:
        """See whether it is there. Returns what only its user can mend."""
        try:
            try:
                await node.port.greet(min(until, self.now() + GREETING))
            except Disconnected as error:
                if not error.stale:
                    raise
                await node.port.greet(min(until, self.now() + GREETING))
            await self._settle(node)
        except ConfigError as error:
            node.cause = str(error)
            return error
        except (Disconnected, LockError, ServerError) as error:
            node.cause = str(error)
            return None
        if not node.known:
            node.known = True
            self._unlike(node)
            if self._met:
                node.port.memory.latest.suspect()
        node.port.teach = True  # a reply that only says that the script is unknown may come too late to mend it
        node.up = True
        if node.told:
            node.told = False
            log.warning("interlock: %s votes again", node.port.shown)
        return None

    async def _settle(self, node: Node) -> None:
        """Give back what this one has not heard of."""
        debts, now = list(node.debts.items()), self.now()
        if debts:
            replies = await node.port.calls([message for _, (message, _) in debts], now + GREETING)
            for (token, (_, until)), reply in zip(debts, replies, strict=True):
                if not isinstance(reply, Disconnected) or until < now:
                    node.debts.pop(token, None)

    def _unlike(self, node: Node) -> None:
        """One server has one vote, however many names it has."""
        facts = node.port.memory.latest.facts
        for other in self.nodes:
            there = other.port.memory.latest.facts
            if other is not node and other.known and facts and there and facts.run_id == there.run_id:
                self._calm = False
                self._fault = (
                    f"{other.port.shown} and {node.port.shown} are the same server, which must not have two votes in a "
                    "quorum. Name each server once"
                )

    def _judge(self) -> None:
        """Servers that may have forgotten leases do not vote; unless they all have just been born together."""
        epochs = [node.port.memory.latest for node in self.nodes]
        ages = [each.facts.uptime for each in epochs if each.facts is not None]
        together = len(ages) == len(epochs) and max(ages) - min(ages) <= TOGETHER
        if epochs[0].wait is not None and not (together and max(ages) < epochs[0].wait):
            for each in epochs:
                each.suspect()

    def _away(self, node: Node, cause: str) -> None:
        if node.up:
            node.gone = self.now()
        node.up, node.cause, self._calm = False, cause, False
        self._look()

    def _look(self) -> None:
        """See in the background whether those that are away come back."""
        with self.mutex:
            if self._looking or self._closed:
                return
            self._looking = True
        self.spawn(self._watch, "interlock-quorum", self._looked)

    def _looked(self) -> None:
        self._looking = False

    async def _watch(self) -> None:
        pause, longest = LOOK
        while not self._closed and any(not node.up for node in self.nodes):
            for node in self.nodes:
                if not node.up and not self._closed:
                    await self._greet(node)
                    if not node.up and not node.told and self.now() - node.gone > LOUD:
                        node.told = True
                        log.warning("interlock: %s does not vote: %s. %s", node.port.shown, node.cause, self._present())
            if await self.wait(self._rest, self.now() + pause):  # somebody is in need
                pause = LOOK[0]
            pause = min(longest, pause * 2)

    def _present(self) -> str:
        there = sum(node.up for node in self.nodes)
        return f"{there} of the quorum's {len(self.nodes)} servers are there; {self.majority} are needed"

    # Its end

    def close(self) -> Any:
        """End all of them. With asyncio, this is to be awaited."""
        ending = self._end()
        return ending if inspect.iscoroutinefunction(self.nodes[0].port.close) else run(ending)

    async def _end(self) -> None:
        self._closed = True
        self._rest.set()
        await self._sweep(SILENCE)  # what is given back should arrive
        self._drop()
        for node in self.nodes:
            ended = node.port.close()
            if ended is not None:
                await ended

    def _drop(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                node, sent = self._late.popleft()
                node.port.drop(sent)

    def forget(self) -> None:
        """See Port."""
        self._drop()
        for node in self.nodes:
            node.port.forget()
        self.nodes = [Node(node.port) for node in self.nodes]
        self._begin()
