"""A server of a quorum, as one client knows it: whether it is there, what it was asked, and what it is still owed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import TOMBSTONE_TTL
from interlock._protocol.types import Disconnected, Message
from interlock.primitives.lock import FenceCall
from interlock.primitives.messages import AcquireCall, HeartbeatCall, ReleaseCall, RenewCall, quarantine_evidence

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from interlock._servers.quorum_votes import Request

MAX_REMEMBERED: Final = 100_000  # tokens that are remembered of a server
TOMBSTONE_MS: Final = str(int(TOMBSTONE_TTL * 1000))


class Node:
    """One server of the quorum, as this client knows it."""

    __slots__ = (
        "absence_logged",
        "cause",
        "gone_at",
        "has_answered",
        "is_up",
        "longest_ttl",
        "pending_releases",
        "port",
        "quarantine_evidence",
        "tokens",
        "unconfirmed_releases",
    )

    def __init__(self, port: Any) -> None:
        self.port = port  # of threads or of asyncio
        self.is_up = False
        self.longest_ttl = TOMBSTONE_TTL  # seconds for which it may keep what it was asked for
        self.has_answered = False  # it has answered once
        self.cause = "not asked yet"  # why it is away
        self.gone_at = port.runtime.now()  # since when it is
        self.absence_logged = False  # whether the log says so
        self.quarantine_evidence = ""  # of what its last quarantine was the evidence
        self.tokens: dict[str, bool] = {}  # those that asked it: whether it has not answered, and may still do so
        self.unconfirmed_releases: dict[str, bool] = {}  # tokens that were given back, without an answer
        self.pending_releases: dict[
            str, tuple[Message, float]
        ] = {}  # releases that it has not got, by token, and until when

    def personalize(self, request: Request) -> Request:
        """The request as this server gets it: with its subscription, and with a tombstone for a token in doubt."""
        call = request.call
        if isinstance(call, AcquireCall):
            self.tokens[call.token] = True
            forget_oldest(self.tokens)
            self.longest_ttl = max(self.longest_ttl, int(call.ttl_ms) / 1000)
        elif isinstance(call, RenewCall):  # or extend
            self.longest_ttl = max(self.longest_ttl, *(int(ms) / 1000 for _, ms in call.leases))
        elif isinstance(call, ReleaseCall) and self.tokens.pop(call.token, False):
            return _with_tombstone(request)
        if isinstance(call, AcquireCall | HeartbeatCall):
            subscribed, channel = self.port.subscription_of(request.keys[0])
            return request._replace(call=call._replace(subscribed=subscribed, channel=channel))
        return request

    def note_replies(self, requests: Sequence[Request], replies: Sequence[Any]) -> None:
        """Remember what the parsed replies of this server say about it."""
        for request, reply in zip(requests, replies, strict=False):
            call = request.call
            if isinstance(call, AcquireCall) and not isinstance(reply, Disconnected):
                if call.token in self.tokens:
                    self.tokens[call.token] = False
                if not isinstance(reply, Exception) and (evidence := quarantine_evidence(reply)):
                    self.quarantine_evidence = evidence

    def discard_unsafe(self, requests: Sequence[Request], replies: Sequence[Any]) -> list[Any]:
        """The replies that count. A release that is still on its way would free what this token is granted now."""
        return [
            Disconnected("what was given back there may still be on its way", sent=True)
            if isinstance(request.call, AcquireCall | FenceCall) and request.call.token in self.unconfirmed_releases
            else reply
            for request, reply in zip(requests, replies, strict=False)
        ]

    def record_undelivered(self, requests: Sequence[Request], now: float, among: Container[str] | None = None) -> None:
        """Remember the releases (of tokens `among` these) that this server did not get, or did not answer."""
        for request in requests:
            if isinstance(request.call, ReleaseCall) and (among is None or request.call.token in among):
                until = now + self.longest_ttl
                self.pending_releases[request.call.token] = (_with_tombstone(request).message, until)
                forget_oldest(self.pending_releases)


def _with_tombstone(request: Request) -> Request:
    return request._replace(call=request.call._replace(tombstone_ms=TOMBSTONE_MS))


def forget_oldest(remembered: dict[str, Any]) -> None:
    """Forget one, if there are too many."""
    with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was at it
        if len(remembered) > MAX_REMEMBERED:
            del remembered[next(iter(remembered))]
