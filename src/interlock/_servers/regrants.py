"""The leases of one client on a quorum, and which servers of it to ask for a re-grant.

Theory. A server that has lost a lease, and abstains, answers a renewal with its abstention (`Node.abstentions`). If a
majority has confirmed the renewal, that server may have the lease again, before any waiter gets it there. So a lease
outlives servers that restart one after another (ADR 60).

Rules.
(a) A re-grant lasts no longer than the lease that was just confirmed, and only the abstention that it names accepts it.
(b) A re-grant may be late, so the release leaves a tombstone at each server that was asked. A release in another thread
    first calls `forget`, and then reads `Node.tokens`; `due` writes `Node.tokens` first, and then looks whether the
    lease was forgotten. So either the release leaves a tombstone, or no re-grant is sent.
(c) A lease that expires without a release is forgotten some time later, as the next ones are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from interlock._servers.quorum_nodes import drop_oldest
from interlock.primitives.lock import RegrantCall
from interlock.primitives.messages import RENEWED, RenewCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from interlock._servers.quorum_nodes import Node
    from interlock._servers.quorum_votes import Request

MIN_SWEEP: Final = 1000  # leases from which on the expired ones are forgotten


@dataclass(slots=True)
class GrantedLease:
    """A lease that a majority has granted."""

    acquire: Request
    fence: int
    until: float
    """When it expires, unless it is renewed."""

    def regrant(self, node: Node, ttl_ms: int, abstention: str) -> Request:
        """The request that puts it back into this server."""
        channel, kind = node.server.subscription_of(self.acquire.keys[0])[1], self.acquire.call.own[1]
        return self.acquire.instead(
            RegrantCall(self.acquire.call.token, str(ttl_ms), str(self.fence), abstention, kind, channel)
        )


class Regrants:
    """The leases of one client on a quorum."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._leases: dict[str, GrantedLease] = {}  # by token
        self._sweep_at = MIN_SWEEP

    def remember(self, acquire: Request, fence: int) -> None:
        """Remember a lease that a majority has granted."""
        now = self.now()
        self._leases[acquire.call.token] = GrantedLease(acquire, fence, now + int(acquire.call.ttl_ms) / 1000)
        if len(self._leases) > self._sweep_at:
            for token, lease in list(self._leases.items()):
                if lease.until < now:
                    self._leases.pop(token, None)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._leases))

    def forget(self, token: str) -> None:
        """Forget a lease. Called before any server gets its release."""
        self._leases.pop(token, None)

    def due(
        self, requests: Sequence[Request], outcomes: Sequence[object], started: float, nodes: Iterable[Node]
    ) -> list[tuple[Node, list[Request]]]:
        """The requests for re-grants, by server, after these renewals, which were sent at `started`."""
        now = self.now()
        confirmed: dict[str, int] = {}  # by token: for how many ms the lease is certain
        for request, reply in zip(requests, outcomes, strict=True):
            if isinstance(request.call, RenewCall) and not isinstance(reply, Exception):
                for (token, ttl_ms), state in zip(request.call.leases, reply.states, strict=False):  # type: ignore[attr-defined]
                    until = started + int(ttl_ms) / 1000
                    if state == RENEWED and until > now and (lease := self._leases.get(token)) is not None:
                        lease.until = max(lease.until, until)
                        confirmed[token] = int((until - now) * 1000)
        asked = [(node, self._due_at(node, confirmed)) for node in nodes if node.abstentions]
        return [(node, regrants) for node, regrants in asked if regrants]

    def _due_at(self, node: Node, confirmed: dict[str, int]) -> list[Request]:
        regrants: list[Request] = []
        for token, abstention in list(node.abstentions.items()):
            if token not in self._leases:  # a late reply brought the abstention of a lease that is over
                node.abstentions.pop(token, None)
            elif node.is_up and confirmed.get(token, 0) > 0:
                node.abstentions.pop(token, None)
                was_in_doubt = node.tokens.get(token)
                node.tokens[token] = True  # rule (b): first
                drop_oldest(node.tokens)
                if (lease := self._leases.get(token)) is not None:
                    regrants.append(lease.regrant(node, confirmed[token], abstention))
                elif was_in_doubt is None:
                    node.tokens.pop(token, None)
                else:
                    node.tokens[token] = was_in_doubt
        return regrants
