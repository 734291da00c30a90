"""The server, as a simulated process sees it: the real `SingleServer` over virtual connections."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from interlock._protocol.timing import RETRY_FOR
from interlock._quarantine.lossless import PROOF_STEP_TIMEOUT, least_lossless_ttl
from interlock._servers.single import PendingCall, SentBatch, SingleServer, send_over

from .chance import TRAFFIC
from .coroutines import Future, Process, Timer
from .network import Journey, Network
from .sim_pool import ADDRESS, SimPending, SimPool, as_address
from .sim_runtime import SimRuntime, current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.resource import Argument, Script
    from interlock._protocol.server import Message, Reply
    from interlock._quarantine.server_history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp


class SimServer(SingleServer):
    """See Server."""

    pool: SimPool

    def __init__(
        self,
        process: Process,
        network: Network,
        history: ServerHistory,
        runtime: SimRuntime,
        isolation_grace: float = 0.0,
    ) -> None:
        pool = SimPool(process, network, history, runtime, isolation_grace)
        super().__init__(ADDRESS, history, runtime, lambda _address, _history, _primacy: pool)
        self.process = process
        self.network = network
        self.retry_for = RETRY_FOR
        # Called with the messages of each call, before a fault can strike.
        self.on_call: Callable[[Sequence[Message]], None] = lambda _messages: None

    async def call(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Argument],
        until: float,
        slot: int | None = None,
    ) -> Reply:
        """See Server. Sends the script with a planted bug, if there is one."""
        self.on_call([(script, keys, args)])
        return await super().call(self.network.script(script), keys, args, until, slot)

    async def send_batch(
        self,
        messages: Sequence[Message],
        until: float,
        slots: Sequence[int] = (),
        packed: Sequence[bytes] = (),  # noqa: ARG002
    ) -> SentBatch:
        """See Server. Sends the scripts with a planted bug, if there is one."""
        self.on_call(messages)
        planted = [(self.network.script(script), keys, args) for script, keys, args in messages]
        return await super().send_batch(planted, until, slots)

    def send(self, message: Message) -> PendingCall | None:
        """See Server. Sends the script with a planted bug, if there is one."""
        self.on_call([message])
        script, keys, args = message
        connection = self.pool.connection
        if connection is None or self.network.group.promotes:
            return None
        sent = send_over(connection, (self.network.script(script), keys, args))
        if isinstance(sent.pending, SimPending):
            connection.expect(sent.pending)
        return sent

    def old_primary_may_still_grant(self, key: str, slot: int = -1) -> str:
        """See Server."""
        old_primary = super().old_primary_may_still_grant(key, slot)
        self.network.record.counts["old primary may still grant"] += bool(old_primary)
        return old_primary

    async def _lossless(self, evidence: str, stamp: IdentityStamp) -> float | None:
        """The result of `least_lossless_ttl`, which asks over connections of its own: a request, and a reply."""
        network, result = self.network, Future()
        process, journey = self.process, Journey(current(self.process.world), TRAFFIC)

        def arrived() -> None:
            if not network.blocked(process, there=False):
                least = least_lossless_ttl(as_address(network.group.seen_by(process)), evidence, stamp)
                process.world.at(process.world.now + network.trip(journey, 1), lambda: result.resolve(least), process)

        if not network.blocked(process, there=True):
            process.world.at(process.world.now + network.trip(journey), arrived)
        process.world.at(process.world.now + PROOF_STEP_TIMEOUT, Timer(result, None), process)
        least: float | None = await result
        network.record.counts["proven lossless"] += least is not None and least < math.inf
        return least
