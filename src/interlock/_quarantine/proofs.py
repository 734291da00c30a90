"""The search for a proof (see `least_lossless_ttl`): one caller searches, and all other callers wait for the result.

After a failover, hundreds of callers need a proof at the same time, and each search opens connections: to the server,
the sentinels and the replicas.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from interlock._quarantine.lossless import MIN_PROOF_TIME, PROOF_STEP_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock._protocol.types import Runtime
    from interlock._quarantine.history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp

PROOF_INTERVAL: Final = 0.2  # seconds between two searches: a demoted primary may have become a replica meanwhile

Look = tuple[str, str]  # a search: the identity of a server, and the identity of an earlier one


class Proofs:
    """The results of one port's searches, and the callers that wait for a result."""

    def __init__(self, runtime: Runtime, history: ServerHistory, look: Callable[..., Awaitable[float | None]]) -> None:
        self.runtime = runtime
        self.history = history
        self.look = look  # (evidence, stamp, seconds left) -> the result of `least_lossless_ttl`
        self._waiting: dict[Look, list[Any]] = {}  # the events of waiting callers, while one caller searches
        self._found: dict[Look, tuple[float, float | None]] = {}  # the time of the last search, and its result

    async def prove_lossless(self, evidence: str, until: float) -> bool:
        """See Server.prove_lossless."""
        stamp = self.history.latest
        while (
            verdict := await self._verdict(stamp, evidence, until)
        ) is None and self.runtime.now() + PROOF_INTERVAL < until:
            await self.runtime.sleep_until(self.runtime.now() + PROOF_INTERVAL)
        return verdict is not None and verdict < math.inf

    def old_primary(self, slot: int = -1) -> str:
        """The old primary while it may still grant (see `IdentityStamp`). Starts a search in the background then."""
        former = self.history.latest.old_primary(slot)
        if former:
            self._begin(former)
        return former

    def _begin(self, evidence: str) -> None:
        """Search in the background, unless a search runs or ended less than `PROOF_INTERVAL` ago."""
        stamp = self.history.latest
        if self._may_look((stamp.identity, evidence)):
            try:
                self.runtime.spawn(lambda: self._look_in_background(stamp, evidence), "interlock-proof", lambda: None)
            except BaseException:
                self._end((stamp.identity, evidence), None)
                raise

    def _may_look(self, look: Look) -> bool:
        """Whether the caller has to search now."""
        at, verdict = self._found.get(look, (-PROOF_INTERVAL, None))
        with self.runtime.mutex:
            mine = look not in self._waiting and verdict is None and self.runtime.now() >= at + PROOF_INTERVAL
            if mine:
                self._waiting[look] = []
        return mine

    async def _verdict(self, stamp: IdentityStamp, evidence: str, until: float) -> float | None:
        look = stamp.identity, evidence
        if self._may_look(look):
            return await self._look_and_report(stamp, evidence, until)
        done = self.runtime.event()
        with self.runtime.mutex:
            others = self._waiting.get(look)
            if others is not None:
                others.append(done)
        if others is not None:
            await done.wait(max(until, self.runtime.now() + MIN_PROOF_TIME))
        return self._found.get(look, (0.0, None))[1]

    async def _look_in_background(self, stamp: IdentityStamp, evidence: str) -> None:
        await self._look_and_report(stamp, evidence, self.runtime.now() + PROOF_STEP_TIMEOUT)

    async def _look_and_report(self, stamp: IdentityStamp, evidence: str, until: float) -> float | None:
        verdict: float | None = None
        try:
            verdict = await self.look(evidence, stamp, until - self.runtime.now())
            if verdict is not None and verdict < math.inf:
                stamp.mark_lossless(evidence, verdict)
        finally:
            self._end((stamp.identity, evidence), verdict)
        return verdict

    def _end(self, look: Look, verdict: float | None) -> None:
        with self.runtime.mutex:
            self._found[look] = self.runtime.now(), verdict
            waiting = self._waiting.pop(look, [])
        for each in waiting:
            each.set()
