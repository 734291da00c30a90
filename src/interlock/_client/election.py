"""The leader of an election, and each change of leader. election.lua decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._client.error_texts import reply_error
from interlock._client.grant import NO_LEASE
from interlock._client.inspecting import inspect
from interlock.primitives.codes import WRONG_KIND
from interlock.primitives.election import Leader, WatchCall, is_leader, parse_watch
from interlock.primitives.lock import RECORD_VERSION, LockInspect
from interlock.primitives.messages import Refused

if TYPE_CHECKING:
    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource

WATCH_INTERVAL: Final = 1.0  # seconds between two polls of an observer, at most
EXPIRY_SLACK: Final = 0.005  # seconds after the end of a lease by which the server has ended it, too


class Watch:
    """An observer of one election."""

    def __init__(self, core: Core, resource: Resource) -> None:
        self.core = core
        self.attempt = core.attempt(resource, NO_LEASE, timeout=None)
        core.waiters.register(self.attempt)
        self.last_reported: object = self  # no leader reported yet

    async def look(self) -> Leader | None:
        """The leader now, or None. The server pushes the next change to this observer."""
        attempt, core = self.attempt, self.core
        _, channel = core.server.subscription_of(attempt.resource.keys[0])
        reply = parse_watch(await core.requests.query(attempt.resource, *WatchCall(attempt.token, channel).encode()))
        if isinstance(reply, Refused):
            raise reply_error(attempt.resource, reply)
        core.server.ensure_subscribed(attempt.resource.keys[0])  # at the node that has the key by now
        return _leader_of(*reply)

    async def change(self) -> Leader | None:
        """Wait until another leader leads than the last one reported. Returns the new leader, or None."""
        runtime = self.core.runtime
        while True:
            leader = await self.look()
            if leader != self.last_reported:
                self.last_reported = leader
                return leader
            # A foreign key without an expiry has no remaining time.
            pause = (
                min(WATCH_INTERVAL, leader.remaining + EXPIRY_SLACK) if leader and leader.remaining else WATCH_INTERVAL
            )
            assert self.attempt.event is not None  # it waits for ever
            await self.attempt.event.wait(runtime.now() + pause)

    def close(self) -> None:
        """Stop observing."""
        self.core.waiters.unregister(self.attempt)


async def leader(core: Core, resource: Resource) -> Leader | None:
    """See Election.leader."""
    state = LockInspect.parse(await inspect(core, resource, "1"))
    if state.record and not state.record.startswith(f"{RECORD_VERSION} ".encode()):
        raise reply_error(resource, Refused(WRONG_KIND, state.record))
    if state.record and state.fence <= 0:  # in a quorum the servers are just agreeing on the term
        return None
    return _leader_of(state.value, state.pttl_ms, max(0, state.fence))


def _leader_of(value: bytes, pttl_ms: int, term: int) -> Leader | None:
    if not is_leader(value):
        return None
    return Leader(value.decode(errors="replace").removeprefix("!"), term, max(0, pttl_ms) / 1000)
