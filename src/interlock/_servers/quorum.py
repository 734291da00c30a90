"""A quorum: several independent servers, to which the client sends each message at the same time (Redlock).

Theory. The client sends each message to all servers, and the votes of a majority decide: `quorum_votes` has a rule for
each verb. Every server runs the same scripts and has its own queue. A waiter stands in the queues of all servers. A
release hands the lock over at each server, nearly always to the same waiter: the waiter receives a push, asks all
servers, and gets a majority. The servers agree on a fence as PROTOCOL.md says: each server proposes a fence, the
highest one counts, and unless a majority proposed exactly that fence, a majority must store the fence.

Rules.
(a) As soon as a majority decides, the call returns. The client reads the stragglers later (`_read_late`).
(b) A server that is silent for `VOTE_TIMEOUT` is absent: the client sends no message to the server until the server has
    answered a PING in the background.
(c) A server that did not answer an acquire may still run it, so the release leaves a tombstone at that server. A
    release that could not be sent is pending: the client sends the release before any other message to that server.
(d) If a server did not answer a release, the attempt goes on under another token (`TokenSpent`): the server may run the
    release after a later vote for the same token.
(e) In a split vote, the attempt with the most votes keeps its votes. All other attempts release theirs at once, wait
    for a random time, and ask again. So no attempt has to wait until a lease expires.
(f) A server that may have forgotten leases judges that itself, and abstains for `max_ttl` (voter.lua, ADR 60). So each
    message that counts has the key of the voter record. The clock of an abstention starts with the first connection.
(g) If a majority has confirmed a renewal, the client asks each server that has lost the lease, and abstains, to grant
    it again (`regrants`).
(h) A server counts once in each round, by its run_id: two addresses may come to lead to it. While an address leads to
    the server of another one, it is absent.
"""

from __future__ import annotations

import builtins
import random
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log
from interlock._protocol.server import ONLY_ROUTE, Disconnected, Message, Route, ServerError, TokenSpent
from interlock._protocol.timing import FOREVER, RETRY_FOR
from interlock._servers.quorum_nodes import Node, drop_oldest
from interlock._servers.quorum_votes import Request, Split, Unagreed
from interlock._servers.regrants import Regrants
from interlock._servers.single import connected_clients
from interlock.errors import ConfigError, LockError
from interlock.primitives.kinds import rules_of
from interlock.primitives.lock import FenceCall, FenceReply, VoterCall
from interlock.primitives.messages import (
    AcquireCall,
    AcquireReply,
    DoneReply,
    Granted,
    InspectCall,
    Queued,
    ReleaseCall,
    RenewCall,
    Retry,
)
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.acks import Acks
    from interlock._protocol.resource import Argument, Script
    from interlock._protocol.runtime import Runtime
    from interlock._protocol.server import AckedReply, PushHandler, Reply
    from interlock._servers.single import SentBatch, SingleServer

VOTE_TIMEOUT: Final = 0.25  # seconds without an answer after which a server is absent; less for a short ttl:
VOTE_TTL_SHARE: Final = 0.1  # the part of the ttl that a vote may take
MIN_VOTE_TIMEOUT: Final = 0.05  # seconds that a vote may take however short the ttl is
CONNECT_TIMEOUT: Final = 0.5  # seconds for a connection
# Seconds between two checks whether an absent server answers again: the first, the longest.
ABSENT_CHECK_DELAYS: Final = (0.05, 1.0)
# Seconds for which a server is absent, or seems to abstain longer than it has said, before the log says so.
LOG_ABSENCE_AFTER: Final = 1.0
# Seconds that an attempt waits after a split vote before it asks again: the first, the longest.
YIELD_DELAYS: Final = (0.005, 0.5)
RECHECK_MS: Final = 50  # ms after which the attempt that goes first asks whether the others have released their votes
MAX_INSISTENCE: Final = 20  # rounds of one call at most, of an attempt that does not wait and goes first
QUORUM_DRIFT: Final = 0.01  # the part of a ttl that the authors of Redlock allow for drift

# What the start of a thread raises if the machine has no thread left, or if Python is ending.
_NO_THREAD: Final = (RuntimeError, getattr(builtins, "PythonFinalizationError", RuntimeError))

_LOCK: Final = load("lock")
_ABSTAINS: Final = (
    "interlock: %s abstains for %.3g s more: it was started, emptied or given other data, and may have lost leases "
    "that are alive"
)
_IS_NEW: Final = (
    "interlock: %s grants nothing for up to %.3g s: most of its servers are new, or were started, emptied or given "
    "other data, and may have lost leases that are alive. If the quorum is new, `interlock quorum new` with these URLs "
    "ends the wait"
)


def is_stale(error: object) -> bool:
    """Whether the connection broke while it was idle: the server itself may be well."""
    return isinstance(error, Disconnected) and error.stale


def same_server(first: Node, second: Node) -> str:
    """Why the second one must not count."""
    return (
        f"{first.server.display_url} and {second.server.display_url} are the same server, which must not have two "
        "votes in a quorum. Name each server once"
    )


def voter_error(node: Node, error: Exception) -> ConfigError | None:
    """The error for users if the server can't judge whether it counts (voter.lua); None for any other reply."""
    _, is_of_voter, cause = str(error).partition("ERR interlock: voter: ")
    if not is_of_voter:
        return None
    way_out = (
        "Give this user the right +info"
        if cause.startswith("INFO")
        else "Update interlock here, if a later version is in use elsewhere; or DEL that key, after which the server "
        "abstains for max_ttl"
    )
    return ConfigError(f"{node.server.display_url} does not count in its quorum: {cause}. {way_out}")


@lru_cache(maxsize=256)  # one warning for each quorum
def _warn_of_search(display_url: str, cause: str) -> None:
    log.warning(
        "interlock: the search for absent servers of %s could not start, and starts with a later call: %s",
        display_url,
        cause,
    )


class QuorumServer:
    """All servers of a quorum, as one server: it sends each message to every one of them."""

    retry_for = RETRY_FOR
    is_quorum = True
    can_fail_over = False
    drift = QUORUM_DRIFT

    def __init__(self, servers: Sequence[SingleServer], runtime: Runtime, display_url: str, voter_key: str) -> None:
        self.runtime = runtime
        self.display_url = display_url
        self._voter_key = voter_key  # the key of the voter record, the same in each server
        self.nodes = [Node(server) for server in servers]
        self.majority = len(servers) // 2 + 1
        self.now = runtime.now
        self._judges = servers[0].history.quarantine_seconds is not None
        self._judging = Request.parse((_LOCK, (), VoterCall().encode()), voter_key)
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._yielded: dict[str, int] = {}  # the tokens that yielded in a split vote, and how often
        self._regrants = Regrants(self.now)
        self._has_tried_all = False  # whether this client has tried to connect to every server
        self._all_up = False  # whether all servers answer, and are a quorum
        self._watching_absent = False
        self._wakeup = self.runtime.event()

    @property
    def has_answered(self) -> bool:
        """See Server: whether a majority has, one after another or together."""
        return sum(node.server.has_answered for node in self.nodes) >= self.majority

    @property
    def push_handler(self) -> PushHandler:
        """The handler that all servers call for each push."""
        return self.nodes[0].server.push_handler

    @push_handler.setter
    def push_handler(self, handler: PushHandler) -> None:
        for node in self.nodes:
            node.server.push_handler = handler

    # Calls

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Reply:
        """See Server."""
        request = Request.parse((script, keys, args), self._voter_key)
        if isinstance(request.call, AcquireCall):
            reply: Any = await self._acquire(request, until)
        elif request.verb.merge is None:
            reply = await self._call_with_own_note(request, until)
        else:
            reply = await self._call_one(request, until)
        return reply.encode()  # type: ignore[no-any-return]

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Reply | Exception]:
        """See Server."""
        if not messages:
            return []
        try:
            requests = [Request.parse(message, self._voter_key) for message in messages]
            round_ = await self._ask_all(requests, until)
        except LockError as error:
            return [error] * len(messages)
        return [reply if isinstance(reply, Exception) else reply.encode() for reply in round_.outcomes]

    async def call_with_acks(self, message: Message, until: float, acks: Acks, ack_timeout: float) -> AckedReply:  # noqa: ARG002
        """See Server. No client calls this: `Interlock.lock` refuses acks= with a quorum."""
        raise ConfigError("a quorum takes no acks=: a majority of its servers has each grant")

    async def _call_one(self, request: Request, until: float, within: float = VOTE_TIMEOUT) -> Any:
        (reply,) = (await self._ask_all([request], until, within)).outcomes
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _acquire(self, request: Request, until: float) -> AcquireReply:
        call: AcquireCall = request.call
        within = min(VOTE_TIMEOUT, max(MIN_VOTE_TIMEOUT, int(call.ttl_ms) / 1000 * VOTE_TTL_SHARE))
        insisted = 0
        while True:
            round_ = await self._ask_all([request], until, within)
            (outcome,) = round_.outcomes
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, Unagreed):
                outcome = await self._agree(request, outcome.fence, until, within)
            if isinstance(outcome, Granted):
                self._yielded.pop(call.token, None)
                self._regrants.remember(request, outcome.number)
            if not isinstance(outcome, Split):
                return outcome  # type: ignore[no-any-return]
            reply, goes_first = outcome
            if call.may_wait:
                if goes_first:
                    return Queued(reply.holder, RECHECK_MS, is_head=True)
                return await self._yield_split_vote(request, reply, round_.replies, until)
            insisted += 1
            if not goes_first or self.now() >= until or insisted == MAX_INSISTENCE:
                return reply  # then the core releases the token at all servers
            await self._sleep(random.uniform(0.5, 1.0) * YIELD_DELAYS[0] * insisted, until)

    async def _agree(self, request: Request, fence: int, until: float, within: float) -> AcquireReply:
        """Have a majority store the fence."""
        call = FenceCall(request.call.token, str(fence))
        agreed: FenceReply = await self._call_one(request.instead(call), until, within)
        return Granted(fence) if agreed.stored else Retry()

    async def _yield_split_vote(
        self, request: Request, reply: AcquireReply, replies: dict[Node, list[Any]], until: float
    ) -> AcquireReply:
        """Another attempt goes first: release the votes of this one, wait, and ask again.

        At the servers that queued the attempt, the attempt keeps its place.
        """
        token = request.call.token
        release = request.instead(ReleaseCall(token, "0", rules_of(request.script).release_args))
        is_spent = False
        granting = [node for node, (vote,) in replies.items() if isinstance(vote, Granted)]
        end = min(
            until, self.now() + VOTE_TIMEOUT
        )  # if no time is left, the client undoes the attempt in the background
        sent = [(node, await node.server.send_batch([release.message], end)) for node in granting]
        for node, each in sent:
            (done,) = await self.read(node, each, [release], remember=False)
            is_spent |= isinstance(done, Exception)
        times = self._yielded[token] = self._yielded.get(token, 0) + 1
        drop_oldest(self._yielded)
        first, longest = YIELD_DELAYS
        await self._sleep(random.uniform(0.2, 1.0) * min(longest, first * 2 ** min(times, 10)), until)
        if is_spent:
            self._yielded.pop(token, None)
            raise TokenSpent
        return Retry() if self.now() < until else reply

    async def _call_with_own_note(self, request: Request, until: float) -> DoneReply:
        """Send the call to each server with that server's own note: each server has its own clock."""
        look = Request.parse((request.script, request.keys, InspectCall("1").encode()), self._voter_key)
        replies = (await self._ask_all([look], until)).replies
        done = 0
        for node, (state,) in replies.items():
            own = None if isinstance(state, Exception) else request.call.for_server(state)
            if own is not None:
                (reply,) = await node.server.call_many([request.instead(own).message], self.now() + VOTE_TIMEOUT)
                if not isinstance(reply, Exception):
                    done |= request.parse_reply(reply).done
        return DoneReply(done)

    async def _sleep(self, seconds: float, until: float) -> None:
        await self.runtime.sleep_until(min(until, self.now() + seconds))

    def send(self, message: Message) -> None:
        """See Server. Sends nothing: a release counts once a majority has it, so its caller waits."""

    async def prove_lossless(self, keys: Sequence[str | bytes], lost_identity: str, until: float) -> bool:  # noqa: ARG002 (see Server)
        """See Server. No proof ends an abstention."""
        return False

    def old_primary_may_still_grant(self, key: str) -> str:  # noqa: ARG002 (see Server)
        """See Server. A quorum has no failover."""
        return ""

    def route(self, key: str) -> Route:  # noqa: ARG002 (see Server)
        """See Server."""
        return ONLY_ROUTE

    def subscription_of(self, key: str | bytes) -> tuple[str, str]:
        """See Server. Each server gets its own subscription in `Node.personalize`."""
        return "0", self.nodes[0].server.subscription_of(key)[1]

    def ensure_subscribed(self, key: str) -> None:
        """See Server."""
        for node in self.nodes:
            node.server.ensure_subscribed(key)

    # Asking all servers

    async def _ask_all(self, requests: Sequence[Request], until: float, within: float = VOTE_TIMEOUT) -> Round:
        """Send these requests to all servers that are up, and wait until each request has its outcome."""
        if not self._all_up:
            await self._ready(until)
        now = self.now()
        if late := [(node, *each) for node in self.nodes if node.stragglers for each in node.take_arrived(now)]:
            await self._read_late(late, now)
        for request in requests:
            if isinstance(request.call, ReleaseCall):
                self._regrants.forget(request.call.token)
        round_ = Round(self, requests, until, within)
        try:
            await round_.send()
            await round_.collect()
            while not round_.decide():
                await round_.collect()
        finally:
            for node, own, sent in round_.awaited:
                node.stragglers.append((sent, own))
        if isinstance(requests[0].call, RenewCall):
            await self._regrant(round_)
        return round_

    async def _regrant(self, round_: Round) -> None:
        """Ask servers that have lost leases for re-grants: rule (g). Nobody waits for the replies."""
        for node, regrants in self._regrants.due(round_.requests, round_.outcomes, round_.started, self.nodes):
            sent = await node.server.send_batch([each.message for each in regrants], self.now() + VOTE_TIMEOUT)
            node.stragglers.append((sent, regrants))

    def order(self) -> list[Node]:
        """All servers; those with an open connection first."""
        for node in self.nodes:
            if not node.server.ready:
                return sorted(self.nodes, key=lambda node: not node.server.ready)
        return self.nodes

    async def read(
        self, node: Node, sent: SentBatch, requests: Sequence[Request], *, late: bool = False, remember: bool = True
    ) -> list[Any]:
        """Read and parse the replies of one server.

        If the server did not answer, mark the server as absent, and (with `remember`) remember the releases among the
        requests as pending. With `late` the requests are stragglers.
        """
        raw = await node.server.read_batch(sent, late=late)
        replies = [request.parse_reply(reply) for request, reply in zip(requests, raw, strict=False)]
        if (abstains_for := node.note_replies(requests, replies)) and self.now() > node.counts_at + LOG_ABSENCE_AFTER:
            node.counts_at = self.now() + abstains_for
            self._log_abstentions([node])  # it has lost its data under an open connection
        error = next(iter(replies))
        if isinstance(error, ServerError):
            replies = [(isinstance(each, ServerError) and voter_error(node, each)) or each for each in replies]
        elif isinstance(error, Exception):
            if remember:
                node.record_undelivered(requests, self.now())
            if not is_stale(error):
                self.mark_absent(node, str(error))
        return replies

    async def _read_late(self, late: Sequence[tuple[Node, SentBatch, Sequence[Request]]], until: float) -> None:
        """Read those of these stragglers that arrive by then. That frees connections, and ends doubt about tokens."""
        now = self.now()
        left = deque(late)
        try:
            complete = await self.nodes[0].server.wait_any([sent for _, sent, _ in late], len(late), until)
            for i in range(len(late)):
                node, sent, requests = left.popleft()
                if i in complete or sent.until < now:
                    await self.read(node, sent, requests, late=True)
                else:
                    node.stragglers.append((sent, requests))
        finally:
            for node, sent, requests in left:
                node.stragglers.append((sent, requests))

    # The servers that are up

    async def _ready(self, until: float) -> None:
        """Connect to all servers before the first round. Raises ConfigError if these servers are no quorum.

        A server that can't judge itself is no more than absent, unless too few are left: another version of interlock
        may have written its record, and running processes go on without it.
        """
        if not self._has_tried_all:
            for left, node in zip(range(len(self.nodes), 0, -1), self.nodes, strict=True):
                # Each server gets a share of the time, so that silent servers leave enough time to connect to the rest.
                share = self.now() + max(0.0, until - self.now()) / left
                if not node.is_up and (error := await self._connect(node, share)):
                    raise error
            faults = [node.fault for node in self.nodes if node.fault is not None]
            if len(self.nodes) - len(faults) < self.majority:
                raise faults[0]
            self._has_tried_all = True
            self._log_abstentions(self.nodes)
        up = sum(node.is_up for node in self.nodes)
        if up < len(self.nodes):
            self._watch_absent()  # the start of an earlier call may have failed
        if up < self.majority:
            self._wakeup.set()
        self._all_up = all(node.is_up for node in self.nodes)

    async def _connect(self, node: Node, until: float = FOREVER) -> ConfigError | None:
        """Ping the server, and mark it as up if it answers. Returns an error that only the user can correct."""
        node.fault = None
        try:
            try:
                await node.server.ping(min(until, self.now() + CONNECT_TIMEOUT))
            except Disconnected as error:
                if not error.stale:
                    raise
                await node.server.ping(min(until, self.now() + CONNECT_TIMEOUT))
            if cause := await self._same_server(node, min(until, self.now() + CONNECT_TIMEOUT)):
                raise ConfigError(cause)
            await self._judge(node, min(until, self.now() + CONNECT_TIMEOUT))
            await self._send_pending_releases(node)
        except ConfigError as error:
            node.cause = str(error)
            return error
        except (Disconnected, LockError, ServerError) as error:
            node.cause = str(error)
            return None
        # Send the script's text with the next call: a NOSCRIPT reply of a straggler may be too late for a retry.
        node.server.send_script_text = True
        node.is_up, node.fault = True, None
        if node.absence_logged:
            node.absence_logged = False
            log.warning("interlock: %s answers again", node.server.display_url)
        if self._has_tried_all:
            self._log_abstentions([node])
        return None

    async def _send_pending_releases(self, node: Node) -> None:
        """Send the releases that this server did not get."""
        undelivered, now = list(node.pending_releases.items()), self.now()
        if undelivered:
            replies = await node.server.call_many([message for _, (message, _) in undelivered], now + CONNECT_TIMEOUT)
            for (token, (_, until)), reply in zip(undelivered, replies, strict=True):
                if not isinstance(reply, Disconnected) or until < now:
                    node.pending_releases.pop(token, None)

    async def _same_server(self, node: Node, until: float) -> str:
        """Why this server must not count beside another one: both addresses lead to one process. "" if none does."""
        for other in self.nodes:
            if other is not node and other.is_up and node.run_id == other.run_id != "":
                # The other address may have moved, and only its open connections lead to this server: look again.
                try:
                    await other.server.connect_anew(until)
                except (Disconnected, LockError, ServerError) as error:
                    self.mark_absent(other, str(error))
                    continue
                if node.run_id == other.run_id:
                    return same_server(other, node)
        return ""

    async def _judge(self, node: Node, until: float) -> None:
        """Let the server judge itself, which starts its clock. Raises ConfigError, Disconnected or ServerError."""
        if not self._judges:
            return
        (raw,) = await node.server.call_many([self._judging.message], until)
        reply = self._judging.parse_reply(raw)
        if isinstance(reply, ServerError) and (fault := voter_error(node, reply)):
            node.fault = fault
            raise ServerError(str(fault))
        if isinstance(reply, Exception):
            raise reply
        node.judged_run_id, node.counts_at = node.run_id, self.now() + reply.abstains_ms / 1000

    async def judge_new(self, node: Node, run_id: str) -> None:
        """If another process answers than the one that judged itself last, let it do so; nobody waits for the reply."""
        if self._judges and node.is_up and run_id not in ("", node.judged_run_id):
            node.judged_run_id = run_id
            sent = await node.server.send_batch([self._judging.message], self.now() + VOTE_TIMEOUT)
            node.stragglers.append((sent, [self._judging]))

    def _log_abstentions(self, nodes: Sequence[Node]) -> None:
        """Log for how long these servers abstain, if any does."""
        now = self.now()
        waits = {node.server.display_url: node.counts_at - now for node in nodes if node.counts_at > now}
        if len(waits) >= self.majority:
            log.warning(_IS_NEW, self.display_url, max(waits.values()))
        else:
            for display_url, wait in waits.items():
                log.warning(_ABSTAINS, display_url, wait)

    def mark_absent(self, node: Node, cause: str) -> None:
        """Send nothing more to this server until it has answered a PING in the background."""
        if node.is_up:
            node.absent_since = self.now()
            node.server.pool.drop_idle()  # the server itself may be well: the search for it begins without a dead one
        node.is_up, node.cause, self._all_up = False, cause, False
        self._watch_absent()

    def _watch_absent(self) -> None:
        """Start the background work that connects to absent servers again, unless it runs already."""
        is_starting = False
        try:
            with self.runtime.mutex:
                if self._watching_absent or self._closed:
                    return
                is_starting = True
                self._watching_absent = True
            self.runtime.spawn(self._reconnect_absent, "interlock-quorum", self._absent_watched)
        except BaseException as error:  # the next call tries again
            if is_starting:
                self._watching_absent = False
            if type(error) not in _NO_THREAD:  # as from a signal handler
                raise
            _warn_of_search(self.display_url, str(error))

    def _absent_watched(self) -> None:
        self._watching_absent = False

    async def _reconnect_absent(self) -> None:
        pause, longest = ABSENT_CHECK_DELAYS
        while not self._closed and any(not node.is_up for node in self.nodes):
            for node in self.nodes:
                if not node.is_up and not self._closed:
                    await self._connect(node)
                    if (
                        not node.is_up
                        and not node.absence_logged
                        and self.now() - node.absent_since > LOG_ABSENCE_AFTER
                    ):
                        node.absence_logged = True
                        log.warning(
                            "interlock: %s does not vote: %s. %s",
                            node.server.display_url,
                            str(node.cause).rstrip("."),
                            self._majority_text(),
                        )
            if await self._wakeup.wait(self.now() + pause):  # a caller has no majority: check more often
                pause = ABSENT_CHECK_DELAYS[0]
            pause = min(longest, pause * 2)

    def _majority_text(self) -> str:
        there = sum(node.is_up for node in self.nodes)
        return f"{there} of the quorum's {len(self.nodes)} servers answer; {self.majority} are needed"

    # Closing

    async def connected_clients(self, until: float) -> int | None:
        """See Server."""
        return await connected_clients((node.server for node in self.nodes if node.is_up), until)

    async def close(self) -> None:
        """See Server."""
        self._closed = True
        self._wakeup.set()
        late = [(node, *each) for node in self.nodes for each in node.take_stragglers()]
        await self._read_late(late, self.now() + VOTE_TIMEOUT)  # give the last releases time to reach the servers
        self._discard_stragglers()
        for node in self.nodes:
            await node.server.close()

    def _discard_stragglers(self) -> None:
        for node in self.nodes:
            for sent, _ in node.take_stragglers():
                node.server.discard_batch(sent)

    def reset_after_fork(self) -> None:
        """See Server."""
        for node in self.nodes:
            node.server.reset_after_fork()  # drops the connections of the stragglers
        self.nodes = [Node(node.server) for node in self.nodes]
        self._start()


class Round:
    """One round of the same requests to all servers: the replies so far, and the outcomes that they decide."""

    def __init__(self, quorum: QuorumServer, requests: Sequence[Request], until: float, within: float) -> None:
        self.quorum = quorum
        self.requests = requests
        self.within = within
        self.started = quorum.now()
        self.end = min(until, self.started + within)
        self.awaited: list[tuple[Node, list[Request], SentBatch]] = []  # the servers that have not answered yet
        self.replies: dict[Node, list[Any]] = {}  # the parsed replies; an error where there is no reply
        self.outcomes: list[Any] = []  # of each request: the merged reply or the error; None while it is undecided
        self._ended = False  # whether the time is up: this round waits no longer for the servers in `awaited`
        self._sent_again: set[Node] = set()
        self._run_ids: dict[str, Node] = {}  # the processes that have answered, and for which server

    async def send(self) -> None:
        """Send the requests to the servers that are up; remember the releases that the absent servers do not get."""
        for node in self.quorum.order():
            if node.is_up:
                await self._send(node, [node.personalize(request) for request in self.requests])
            elif node.tokens:
                node.record_undelivered(self.requests, self.started, node.tokens)
        for request in self.requests:
            request.drop_copies()

    async def _send(self, node: Node, own: list[Request]) -> None:
        packed = [request.packed for request in own]
        sent = await node.server.send_batch([request.message for request in own], self.end, packed=packed)
        self.awaited.append((node, own, sent))

    async def collect(self) -> None:
        """Wait for more replies, unless all servers have answered."""
        if not self.awaited:
            return
        number = 1 if self.replies or self._sent_again else self.quorum.majority
        batches = [sent for _, _, sent in self.awaited]
        ready = await self.quorum.nodes[0].server.wait_any(batches, number, self.end)
        if not ready:
            if self.end == self.started + self.within:
                for node, _, _ in self.awaited:
                    self.quorum.mark_absent(node, f"no answer within {self.within:.3g} s")
            self._ended = True
        for i in sorted(ready, reverse=True):
            node, own, sent = self.awaited.pop(i)  # one by one: an interrupt leaves the others to the stragglers
            replies = await self.quorum.read(node, sent, own)
            if is_stale(next(iter(replies))) and node not in self._sent_again:
                self._sent_again.add(node)
                await self._send(node, own)
            elif sent.run_id and (twin := self._run_ids.setdefault(sent.run_id, node)) is not node:
                cause = same_server(twin, node)
                self.quorum.mark_absent(node, cause)
                self.replies[node] = [Disconnected(cause, sent=True)] * len(replies)
            else:
                self.replies[node] = replies
                await self.quorum.judge_new(node, sent.run_id)

    def decide(self) -> bool:
        """Merge the replies so far. Returns whether each request has its outcome."""
        pending = 0 if self._ended else len(self.awaited)
        self.outcomes = [self._outcome(i, request, pending) for i, request in enumerate(self.requests)]
        return None not in self.outcomes

    def _outcome(self, i: int, request: Request, pending: int) -> Any:
        quorum, replies = self.quorum, [each[i] for each in self.replies.values()]
        votes = [reply for reply in replies if not isinstance(reply, Exception)]
        if len(votes) + pending < quorum.majority:
            return self._no_majority(replies, len(votes))
        return request.merge(votes, pending, len(quorum.nodes)) if len(votes) >= quorum.majority else None

    def _no_majority(self, replies: list[Any], votes: int) -> Exception:
        """The error of a request that no majority answered."""
        for kind in (LockError, ServerError):
            for reply in replies:
                if isinstance(reply, kind):
                    return reply
        nodes = self.quorum.nodes
        away = "; ".join(f"{node.server.display_url}: {node.cause}" for node in nodes if not node.is_up)
        was_sent = any(isinstance(reply, Disconnected) and reply.sent for reply in replies)
        return Disconnected(
            f"only {votes} of {len(nodes)} servers of the quorum answer" + (f" ({away})" if away else ""),
            sent=votes > 0 or bool(self.awaited) or was_sent,
            timed_out=True,
        )
