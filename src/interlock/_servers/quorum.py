"""The port for a quorum: several servers that know nothing of each other, asked at the same time (Redlock).

Theory. A message goes to all servers, and what a majority says holds: `quorum_votes` has what that means for each verb.
Every server runs the same scripts and has its own queue. A waiter stands in all of them; a release hands over at each,
nearly always to the same waiter, who is pushed, asks all, and has its majority. Fences are agreed on as PROTOCOL.md
says: each server proposes one, the highest counts, and unless a majority proposed just that, a majority must store it.

Rules.
 1. As soon as a majority decides, nobody waits for the rest. What comes later is read later (`_collect_stragglers`).
 2. A server that is silent for `VOTE_TIMEOUT` is away: it is not asked until it has answered a greeting in the
    background.
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
import random
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER, RETRY_FOR
from interlock._protocol.types import ONLY_ROUTE, Argument, Disconnected, Message, Route, Script, ServerError
from interlock._servers.quorum_nodes import Node, forget_oldest
from interlock._servers.quorum_votes import Request, Split, Unagreed
from interlock.errors import ConfigError, LockError
from interlock.primitives.lock import FenceCall, FenceReply
from interlock.primitives.messages import (
    AcquireCall,
    AcquireReply,
    DoneReply,
    Granted,
    InspectCall,
    Queued,
    ReleaseCall,
    Retry,
)
from interlock.primitives.quorum_rules import rules_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.types import Runtime

VOTE_TIMEOUT: Final = 0.25  # seconds without an answer after which a server is away; less for a short ttl:
VOTE_TTL_SHARE: Final = 0.1  # of the ttl that a vote may take
MIN_VOTE_TIMEOUT: Final = 0.05  # seconds that it may take however short the ttl is
CONNECT_TIMEOUT: Final = 0.5  # seconds for a connection
ABSENT_CHECK_DELAYS: Final = (
    0.05,
    1.0,
)  # seconds between two looks whether one that is away has come back: the first, the longest
LOG_ABSENCE_AFTER: Final = 1.0  # seconds for which one is away before the log says so
YIELD_DELAYS: Final = (0.005, 0.5)  # seconds that one who gave back waits before it asks again: the first, the longest
RECHECK_MS: Final = 50  # ms after which the one who goes on looks whether the others have given back
MAX_INSISTENCE: Final = 20  # times that one who does not wait, and goes on, asks again
STARTED_TOGETHER_WITHIN: Final = 5.0  # seconds within which the servers of a new quorum are started
QUORUM_DRIFT: Final = 0.01  # of a ttl, as Redlock's authors have it

# A server, what was sent to it and is not answered yet, and the requests in that.
Straggler = tuple[Node, Any, "Sequence[Request]"]


def is_stale(error: object) -> bool:
    """Whether only the connection had died, while it was idle: that says nothing of the server."""
    return isinstance(error, Disconnected) and error.stale


class QuorumPort:
    """A port over those of single servers."""

    retry_for = RETRY_FOR
    is_quorum = True
    drift = QUORUM_DRIFT

    def __init__(self, ports: Sequence[Any], runtime: Runtime, shown: str) -> None:
        self.runtime = runtime
        self.display_url = shown
        self.nodes = [Node(port) for port in ports]
        self.majority = len(ports) // 2 + 1
        self.now, self.event, self.wait = runtime.now, runtime.event, runtime.wait
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._stragglers: deque[Straggler] = deque()  # what was sent and is not answered yet
        self._yielded: dict[str, int] = {}  # tokens that gave back, and how often
        self._has_met_all = False
        self._config_fault = ""
        self._all_up = False  # all are there, and they are a quorum
        self._watching_absent = False
        self._wakeup = self.event()

    @property
    def push_handler(self) -> Any:
        """Whom all of them tell what they hear."""
        return self.nodes[0].port.push_handler

    @push_handler.setter
    def push_handler(self, sink: Any) -> None:
        for node in self.nodes:
            node.port.push_handler = sink

    # What the core asks

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Any:
        """See Port."""
        request = Request.parse((script, keys, args))
        if isinstance(request.call, AcquireCall):
            reply: Any = await self._acquire(request, until)
        elif getattr(request.call, "differs_by_server", False):
            reply = await self._call_with_own_marker(request, until)
        else:
            reply = await self._call_one(request, until)
        return reply.encode()

    async def calls(self, messages: Sequence[Message], until: float) -> list[Any]:
        """See Port."""
        try:
            poll = await self._poll([Request.parse(message) for message in messages], until)
        except LockError as error:
            return [error] * len(messages)
        return [reply if isinstance(reply, Exception) else reply.encode() for reply in poll.outcomes]

    async def _call_one(self, request: Request, until: float, within: float = VOTE_TIMEOUT) -> Any:
        (reply,) = (await self._poll([request], until, within)).outcomes
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _acquire(self, request: Request, until: float) -> AcquireReply:
        call: AcquireCall = request.call
        within = min(VOTE_TIMEOUT, max(MIN_VOTE_TIMEOUT, int(call.ttl_ms) / 1000 * VOTE_TTL_SHARE))
        insisted = 0
        while True:
            poll = await self._poll([request], until, within)
            (outcome,) = poll.outcomes
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, Unagreed):
                outcome = await self._agree(request, outcome.fence, until, within)
            if isinstance(outcome, Granted):
                self._yielded.pop(call.token, None)
            if not isinstance(outcome, Split):
                return outcome  # type: ignore[no-any-return]
            reply, goes_first = outcome
            if call.may_wait == "1":
                if goes_first:
                    return Queued(reply.holder, RECHECK_MS, is_head=True)
                return await self._yield_split_vote(request, reply, poll.said, until)
            insisted += 1
            if not goes_first or self.now() >= until or insisted == MAX_INSISTENCE:
                return reply  # the core gives all back
            await self._sleep(random.uniform(0.5, 1.0) * YIELD_DELAYS[0] * insisted, until)

    async def _agree(self, request: Request, fence: int, until: float, within: float) -> AcquireReply:
        """Have a majority store the fence."""
        call = FenceCall(request.call.token, str(fence))
        agreed: FenceReply = await self._call_one(
            Request.parse((request.script, request.keys, call.encode())), until, within
        )
        return Granted(fence) if agreed.stored else Retry()

    async def _yield_split_vote(
        self, request: Request, reply: AcquireReply, said: dict[Node, list[Any]], until: float
    ) -> AcquireReply:
        """Another one goes first: give back what we have of it, and ask again later. Where we wait, we still do."""
        token = request.call.token
        release = Request.parse(
            (request.script, request.keys, ReleaseCall(token, "0", rules_of(request.script).release_args).encode())
        )
        having = [node for node, (vote,) in said.items() if isinstance(vote, Granted)]
        end = min(until, self.now() + VOTE_TIMEOUT)  # who has no time gives all back in the background
        sent = [(node, await node.port.send_batch([release.message], end)) for node in having]
        for node, each in sent:
            (done,) = await self.read(node, each, [release], owes=False)
            if isinstance(done, Exception):
                node.unconfirmed_releases[token] = True
                forget_oldest(node.unconfirmed_releases)
        times = self._yielded[token] = self._yielded.get(token, 0) + 1
        forget_oldest(self._yielded)
        least, most = YIELD_DELAYS
        await self._sleep(random.uniform(0.2, 1.0) * min(most, least * 2 ** min(times, 10)), until)
        return Retry() if self.now() < until else reply

    async def _call_with_own_marker(self, request: Request, until: float) -> DoneReply:
        """The same call for each server, but with the server's own word: a marker or a note with its own clock."""
        look = Request.parse((request.script, request.keys, InspectCall("1").encode()))
        said = (await self._poll([look], until)).said
        done = 0
        for node, (seen,) in said.items():
            own = None if isinstance(seen, Exception) else request.call.for_server(seen)
            if own is not None:
                (reply,) = await node.port.calls([request._replace(call=own).message], self.now() + VOTE_TIMEOUT)
                if not isinstance(reply, Exception):
                    done |= request.parse_reply(reply).done
        return DoneReply(done)

    async def _sleep(self, seconds: float, until: float) -> None:
        await self.wait(self.event(), min(until, self.now() + seconds))

    async def prove_lossless(self, keys: Sequence[str | bytes], evidence: str, until: float) -> bool:  # noqa: ARG002 (see Port)
        """See Port. Each server has its own evidence."""
        proven = False
        for node in self.nodes:
            if node.quarantine_evidence:
                proven |= await node.port.prove_lossless(keys, node.quarantine_evidence, self.now())
                node.quarantine_evidence = ""
        return proven

    def old_primary_may_still_grant(self, key: str) -> str:  # noqa: ARG002 (see Port)
        """See Port. Nobody is promoted here."""
        return ""

    def route(self, key: str) -> Route:  # noqa: ARG002 (see Port)
        """See Port."""
        return ONLY_ROUTE

    def subscription_of(self, key: str) -> tuple[str, str]:
        """See Port. What each is told is its own, see Node.worded."""
        return "0", self.nodes[0].port.subscription_of(key)[1]

    def ensure_subscribed(self, key: str) -> None:
        """See Port."""
        for node in self.nodes:
            node.port.ensure_subscribed(key)

    # Asking all

    async def _poll(self, requests: Sequence[Request], until: float, within: float = VOTE_TIMEOUT) -> Round:
        """Send these to all that are there, and wait until each is decided."""
        if not self._all_up:
            await self._ready(until)
        if self._stragglers:
            await self._collect_stragglers()
        poll = Round(self, requests, until, within)
        try:
            await poll.send()
            await poll.collect()
            while not poll.decide():
                await poll.collect()
        finally:
            self._stragglers += [(node, sent, own) for node, own, sent in poll.asked]
        return poll

    def order(self) -> list[Node]:
        """Those first who need not be connected first."""
        for node in self.nodes:
            if not node.port.ready:
                return sorted(self.nodes, key=lambda node: not node.port.ready)
        return self.nodes

    async def read(
        self, node: Node, sent: Any, requests: Sequence[Request], *, late: bool = False, owes: bool = True
    ) -> list[Any]:
        """The parsed replies of one server, that have come or come now."""
        raw: list[Any] = await node.port.read_batch(sent, late=late)
        replies = [request.parse_reply(reply) for request, reply in zip(requests, raw, strict=False)]
        node.note_replies(requests, replies)
        error = next(iter(replies))
        if isinstance(error, Exception) and not isinstance(error, ServerError):
            if owes:
                node.record_undelivered(requests, self.now())
            if not is_stale(error):
                self.mark_absent(node, str(error))
        return replies

    async def _collect_stragglers(self, patience: float = 0.0) -> None:
        """Read what has come late, so that its connection is free, and no doubt is left."""
        late: list[Straggler] = []
        while self._stragglers:
            try:
                late.append(self._stragglers.popleft())
            except IndexError:  # another thread was at it
                break
        now = self.now()
        came = await self.nodes[0].port.wait_any([sent for _, sent, _ in late], len(late), now + patience)
        for i, (node, sent, requests) in enumerate(late):
            if i in came or sent.until < now:
                await self.read(node, sent, requests, late=True)
            else:
                self._stragglers.append((node, sent, requests))

    # Who is there

    async def _ready(self, until: float) -> None:
        """Raises ConfigError if these servers are no quorum."""
        if not self._has_met_all:
            for left, node in zip(range(len(self.nodes), 0, -1), self.nodes, strict=True):
                # A share for each: those that are silent leave time enough to meet the others.
                share = self.now() + max(0.0, until - self.now()) / left
                if not node.has_answered and (error := await self._connect(node, share)):
                    raise error
            self._has_met_all = True
            self._suspect_restarted()
            if any(not node.is_up for node in self.nodes):
                self._watch_absent()
        elif sum(node.is_up for node in self.nodes) < self.majority:
            self._wakeup.set()
        if self._config_fault:
            raise ConfigError(self._config_fault)
        self._all_up = all(node.is_up for node in self.nodes)

    async def _connect(self, node: Node, until: float = FOREVER) -> ConfigError | None:
        """See whether it is there. Returns what only its user can mend."""
        try:
            try:
                await node.port.ping(min(until, self.now() + CONNECT_TIMEOUT))
            except Disconnected as error:
                if not error.stale:
                    raise
                await node.port.ping(min(until, self.now() + CONNECT_TIMEOUT))
            await self._send_pending_releases(node)
        except ConfigError as error:
            node.cause = str(error)
            return error
        except (Disconnected, LockError, ServerError) as error:
            node.cause = str(error)
            return None
        if not node.has_answered:
            node.has_answered = True
            self._reject_duplicates(node)
            if self._has_met_all:
                node.port.history.latest.mark_untrusted()
        node.port.send_script_text = (
            True  # a reply that only says that the script is unknown may come too late to mend it
        )
        node.is_up = True
        if node.absence_logged:
            node.absence_logged = False
            log.warning("interlock: %s votes again", node.port.display_url)
        return None

    async def _send_pending_releases(self, node: Node) -> None:
        """Give back what this one has not heard of."""
        debts, now = list(node.pending_releases.items()), self.now()
        if debts:
            replies = await node.port.calls([message for _, (message, _) in debts], now + CONNECT_TIMEOUT)
            for (token, (_, until)), reply in zip(debts, replies, strict=True):
                if not isinstance(reply, Disconnected) or until < now:
                    node.pending_releases.pop(token, None)

    def _reject_duplicates(self, node: Node) -> None:
        """One server has one vote, however many names it has."""
        facts = node.port.history.latest.facts
        for other in self.nodes:
            there = other.port.history.latest.facts
            if other is not node and other.has_answered and facts and there and facts.run_id == there.run_id:
                self._all_up = False
                self._config_fault = (
                    f"{other.port.display_url} and {node.port.display_url} are the same server, which must not have "
                    "two votes in a quorum. Name each server once"
                )

    def _suspect_restarted(self) -> None:
        """Servers that may have forgotten leases do not vote; unless they all have just been born together."""
        epochs = [node.port.history.latest for node in self.nodes]
        ages = [each.facts.uptime for each in epochs if each.facts is not None]
        together = len(ages) == len(epochs) and max(ages) - min(ages) <= STARTED_TOGETHER_WITHIN
        if epochs[0].quarantine_seconds is not None and not (together and max(ages) < epochs[0].quarantine_seconds):
            for each in epochs:
                each.mark_untrusted()

    def mark_absent(self, node: Node, cause: str) -> None:
        """This one does not answer: ask it no more until it does."""
        if node.is_up:
            node.gone_at = self.now()
        node.is_up, node.cause, self._all_up = False, cause, False
        self._watch_absent()

    def _watch_absent(self) -> None:
        """See in the background whether those that are away come back."""
        with self.runtime.mutex:
            if self._watching_absent or self._closed:
                return
            self._watching_absent = True
        self.runtime.spawn(self._reconnect_absent, "interlock-quorum", self._absent_watched)

    def _absent_watched(self) -> None:
        self._watching_absent = False

    async def _reconnect_absent(self) -> None:
        pause, longest = ABSENT_CHECK_DELAYS
        while not self._closed and any(not node.is_up for node in self.nodes):
            for node in self.nodes:
                if not node.is_up and not self._closed:
                    await self._connect(node)
                    if not node.is_up and not node.absence_logged and self.now() - node.gone_at > LOG_ABSENCE_AFTER:
                        node.absence_logged = True
                        log.warning(
                            "interlock: %s does not vote: %s. %s",
                            node.port.display_url,
                            node.cause,
                            self._who_is_there(),
                        )
            if await self.wait(self._wakeup, self.now() + pause):  # somebody is in need
                pause = ABSENT_CHECK_DELAYS[0]
            pause = min(longest, pause * 2)

    def _who_is_there(self) -> str:
        there = sum(node.is_up for node in self.nodes)
        return f"{there} of the quorum's {len(self.nodes)} servers are there; {self.majority} are needed"

    # Its end

    async def close(self) -> None:
        """See Port."""
        self._closed = True
        self._wakeup.set()
        await self._collect_stragglers(VOTE_TIMEOUT)  # what is given back should arrive
        self._discard_stragglers()
        for node in self.nodes:
            await node.port.close()

    def _discard_stragglers(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                node, sent, _ = self._stragglers.popleft()
                node.port.discard_batch(sent)

    def reset_after_fork(self) -> None:
        """See Port."""
        self._discard_stragglers()
        for node in self.nodes:
            node.port.reset_after_fork()
        self.nodes = [Node(node.port) for node in self.nodes]
        self._start()


class Round:
    """One time that all servers are asked the same: who said what so far, and what that decides."""

    def __init__(self, quorum: QuorumPort, requests: Sequence[Request], until: float, within: float) -> None:
        self.quorum = quorum
        self.requests = requests
        self.within = within
        self.started = quorum.now()
        self.end = min(until, self.started + within)
        self.asked: list[tuple[Node, list[Request], Any]] = []  # the servers that have not answered yet
        self.said: dict[Node, list[Any]] = {}  # the parsed replies, an error in the place of a reply
        self.outcomes: list[Any] = []  # of each request: the merged reply or the error; None as long as it is open
        self._ended = False  # nobody waits for those who have not answered yet
        self._asked_again: set[Node] = set()

    async def send(self) -> None:
        """Send to the servers that are there; remember what the others do not get."""
        for node in self.quorum.order():
            if node.is_up:
                await self._send(node, [node.personalize(request) for request in self.requests])
            elif node.tokens:
                node.record_undelivered(self.requests, self.started, node.tokens)

    async def _send(self, node: Node, own: list[Request]) -> None:
        sent = await node.port.send_batch([request.message for request in own], self.end)
        self.asked.append((node, own, sent))

    async def collect(self) -> None:
        """Wait for more replies, if there may be any."""
        if not self.asked:
            return
        number = 1 if self.said or self._asked_again else self.quorum.majority
        handles = [sent for _, _, sent in self.asked]
        ready = await self.quorum.nodes[0].port.wait_any(handles, number, self.end)
        if not ready:
            if self.end == self.started + self.within:
                for node, _, _ in self.asked:
                    self.quorum.mark_absent(node, f"no answer within {self.within:.3g} s")
            self._ended = True
        for node, own, sent in [self.asked.pop(i) for i in sorted(ready, reverse=True)]:
            replies = node.discard_unsafe(own, await self.quorum.read(node, sent, own))
            if is_stale(next(iter(replies))) and node not in self._asked_again:
                self._asked_again.add(node)
                await self._send(node, own)
            else:
                self.said[node] = replies

    def decide(self) -> bool:
        """Whether each request has its outcome."""
        pending = 0 if self._ended else len(self.asked)
        self.outcomes = [self._outcome(i, request, pending) for i, request in enumerate(self.requests)]
        return None not in self.outcomes

    def _outcome(self, i: int, request: Request, pending: int) -> Any:
        quorum, replies = self.quorum, [replies[i] for replies in self.said.values()]
        votes = [reply for reply in replies if not isinstance(reply, Exception)]
        if len(votes) + pending < quorum.majority:
            return self._no_majority(replies, len(votes))
        return request.merge(votes, pending, len(quorum.nodes)) if len(votes) >= quorum.majority else None

    def _no_majority(self, replies: list[Any], votes: int) -> Exception:
        """Why no majority answers."""
        for kind in (LockError, ServerError):
            for reply in replies:
                if isinstance(reply, kind):
                    return reply
        nodes = self.quorum.nodes
        away = "; ".join(f"{node.port.display_url}: {node.cause}" for node in nodes if not node.is_up)
        was_sent = any(isinstance(reply, Disconnected) and reply.sent for reply in replies)
        return Disconnected(
            f"only {votes} of {len(nodes)} servers of the quorum answer" + (f" ({away})" if away else ""),
            sent=votes > 0 or bool(self.asked) or was_sent,
            timed_out=True,
        )
