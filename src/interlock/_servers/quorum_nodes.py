"""A server of a quorum, as one client knows it: whether it is up, its tokens, and its pending releases."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.server import Disconnected, Message
from interlock._protocol.timing import TOMBSTONE_TTL
from interlock.primitives.lock import RegrantCall, VoterReply
from interlock.primitives.messages import (
    ABSTENTION,
    Abstains,
    AcquireCall,
    Busy,
    HeartbeatCall,
    Queued,
    ReleaseCall,
    RenewCall,
    RenewReply,
    lost_identity,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from interlock._servers.quorum_votes import Request
    from interlock._servers.single import SentBatch, SingleServer
    from interlock.errors import ConfigError

# The handle of a batch that the server has not answered in the time of its round, and the requests in the batch.
Straggler = tuple["SentBatch", "Sequence[Request]"]

MAX_REMEMBERED: Final = 100_000  # tokens that a client remembers for each server
TOMBSTONE_MS: Final = str(int(TOMBSTONE_TTL * 1000))


class Node:
    """One server of the quorum, as this client knows it."""

    __slots__ = (
        "absence_logged",
        "absent_since",
        "abstentions",
        "cause",
        "counts_at",
        "fault",
        "is_up",
        "judged_run_id",
        "longest_ttl",
        "pending_releases",
        "server",
        "stragglers",
        "tokens",
    )

    def __init__(self, server: SingleServer) -> None:
        self.server = server
        self.is_up = False
        self.longest_ttl = TOMBSTONE_TTL  # seconds: a lease that this client requested there lasts no longer
        self.cause = "not connected yet"  # why the server is absent
        self.counts_at = 0.0  # until when it abstains, or at most until when, as far as this client knows
        self.judged_run_id = ""  # the process that this client asked last to judge itself
        self.fault: ConfigError | None = None  # why it can't judge itself, if it is absent for that
        self.absent_since = server.runtime.now()
        self.absence_logged = False  # whether the log says that the server is absent
        self.tokens: dict[str, bool] = {}  # tokens that requested a lease, and whether the reply is still outstanding
        # By token: the abstention in which this server said that it has lost the lease, until it is asked to re-grant.
        self.abstentions: dict[str, str] = {}
        self.stragglers: deque[Straggler] = deque()  # which the server has not answered yet, the oldest first
        # By token: a release that the server has not got, and until when (seconds) the client tries to deliver it.
        self.pending_releases: dict[str, tuple[Message, float]] = {}

    def personalize(self, request: Request) -> Request:
        """The request as this server gets it: with its subscription, and with a tombstone for a token in doubt."""
        call = request.call
        if isinstance(call, AcquireCall):
            self.tokens[call.token] = True
            drop_oldest(self.tokens)
            self.longest_ttl = max(self.longest_ttl, int(call.ttl_ms) / 1000)
            return request.with_subscription(*self.server.subscription_of(request.keys[0]))
        if isinstance(call, ReleaseCall):
            self.abstentions.pop(call.token, None)
            return _with_tombstone(request) if self.tokens.pop(call.token, False) else request
        if isinstance(call, RenewCall):  # or extend
            self.longest_ttl = max(self.longest_ttl, *(int(ms) / 1000 for _, ms in call.leases))
        elif isinstance(call, HeartbeatCall):
            return request.with_subscription(*self.server.subscription_of(request.keys[0]))
        return request

    def note_replies(self, requests: Sequence[Request], replies: Sequence[Any]) -> float:
        """Remember which tokens this server has answered, and which leases it has lost and may be asked to re-grant.

        Returns the seconds for which the server says that it abstains; 0 if it does not say so.
        """
        abstains_for = 0.0
        for request, reply in zip(requests, replies, strict=False):
            call = request.call
            if isinstance(call, AcquireCall | RegrantCall) and not isinstance(reply, Disconnected):
                if call.token in self.tokens:
                    self.tokens[call.token] = False
                if isinstance(reply, Queued | Busy) and lost_identity(reply) == ABSTENTION:
                    abstains_for = max(0, reply.pttl_ms) / 1000
            elif isinstance(reply, VoterReply):
                abstains_for = reply.abstains_ms / 1000
            elif (
                isinstance(call, RenewCall) and not isinstance(reply, Exception) and self._note_abstentions(call, reply)
            ):
                abstains_for = self.server.history.quarantine_seconds or 0.0  # or less
        return abstains_for

    def _note_abstentions(self, call: RenewCall, reply: RenewReply) -> bool:
        """Remember the leases that this server has lost. Returns whether it abstains."""
        for (token, _), state in zip(call.leases, reply.states, strict=False):
            if isinstance(state, Abstains) and state.abstention:
                self.abstentions[token] = state.abstention
                drop_oldest(self.abstentions)
            elif self.abstentions:
                self.abstentions.pop(token, None)
        return any(isinstance(state, Abstains) for state in reply.states)

    def take_stragglers(self) -> Iterator[Straggler]:
        """Take the stragglers out of the row, the oldest first."""
        with contextlib.suppress(IndexError):  # the row is empty, or another thread took the last one
            while True:
                yield self.stragglers.popleft()

    def take_arrived(self, now: float) -> Iterator[Straggler]:
        """The same, without those that can't have arrived: replies that arrive by themselves do so in their order."""
        for straggler in self.take_stragglers():
            sent, _ = straggler
            if sent.pending.fileno < 0 and not sent.pending.is_complete and now <= sent.until:
                self.stragglers.appendleft(straggler)
                return
            yield straggler

    @property
    def run_id(self) -> str:
        """The process that answered the last handshake; "" if it did not say which it is."""
        facts = self.server.history.latest.facts
        return facts.run_id if facts else ""

    def record_undelivered(self, requests: Sequence[Request], now: float, among: Container[str] | None = None) -> None:
        """Remember the releases (of tokens `among` these) that this server did not get, or did not answer."""
        for request in requests:
            if isinstance(request.call, ReleaseCall) and (among is None or request.call.token in among):
                until = now + self.longest_ttl
                self.pending_releases[request.call.token] = (_with_tombstone(request).message, until)
                drop_oldest(self.pending_releases)


def _with_tombstone(request: Request) -> Request:
    return request.instead(request.call._replace(tombstone_ms=TOMBSTONE_MS))


def drop_oldest(remembered: dict[str, Any]) -> None:
    """Drop the oldest entry, if there are more than `MAX_REMEMBERED`."""
    if len(remembered) > MAX_REMEMBERED:
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread changes the same dict
            del remembered[next(iter(remembered))]
