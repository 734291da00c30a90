"""The search for a proof (see `least_lossless_ttl`): one caller searches, and all other callers wait for the result.

After a failover, hundreds of callers need a proof at the same time, and each search opens connections: to the server,
the sentinels and the replicas.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log
from interlock._quarantine.lossless import MIN_PROOF_TIME, PROOF_STEP_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock._protocol.types import Runtime
    from interlock._quarantine.history import ServerHistory
    from interlock._quarantine.stamp import IdentityStamp

PROOF_INTERVAL: Final = 0.2  # seconds between two searches: a demoted primary may have become a replica meanwhile

Search = tuple[str, str]  # the identity of a server, and the identity of an earlier server


class Proofs:
    """The results of the searches about one server, and the callers that wait for a result."""

    def __init__(
        self, runtime: Runtime, history: ServerHistory, find_least_ttl: Callable[..., Awaitable[float | None]]
    ) -> None:
        self.runtime = runtime
        self.history = history
        # Called with the evidence, the stamp and the seconds left; returns the result of `least_lossless_ttl`.
        self.find_least_ttl = find_least_ttl
        self._waiting: dict[Search, list[Any]] = {}  # the events of waiting callers, while one caller searches
        self._results: dict[Search, tuple[float, float | None]] = {}  # the time of the last search, and its result

    async def prove_lossless(self, evidence: str, until: float) -> bool:
        """See Server.prove_lossless."""
        stamp = self.history.latest
        while (
            least_ttl := await self._search_or_wait(stamp, evidence, until)
        ) is None and self.runtime.now() + PROOF_INTERVAL < until:
            await self.runtime.sleep_until(self.runtime.now() + PROOF_INTERVAL)
        return least_ttl is not None and least_ttl < math.inf

    def old_primary(self, slot: int = -1) -> str:
        """The identity of the old primary while it may still grant (see `IdentityStamp.old_primary`); else "".

        While it may, a search runs in the background.
        """
        old_primary = self.history.latest.old_primary(slot)
        if old_primary:
            self._start_search(old_primary)
        return old_primary

    def _start_search(self, evidence: str) -> None:
        """Start a search in the background, unless one runs, has found a result, or ended a moment ago."""
        stamp = self.history.latest
        if self._claim_search((stamp.identity, evidence)):
            try:
                self.runtime.spawn(lambda: self._search_in_background(stamp, evidence), "interlock-proof", lambda: None)
            except BaseException:
                self._finish_search((stamp.identity, evidence), None)
                raise

    def _claim_search(self, search: Search) -> bool:
        """Whether the caller must search now; then all other callers wait for its result.

        The caller must not search if another search runs, has found a result, or ended less than `PROOF_INTERVAL` ago.
        """
        ended_at, least_ttl = self._results.get(search, (-PROOF_INTERVAL, None))
        with self.runtime.mutex:
            is_due = least_ttl is None and self.runtime.now() >= ended_at + PROOF_INTERVAL
            must_search = is_due and search not in self._waiting
            if must_search:
                self._waiting[search] = []
        return must_search

    async def _search_or_wait(self, stamp: IdentityStamp, evidence: str, until: float) -> float | None:
        """The result of a search: of this caller's own, or of the search that another caller runs."""
        search = stamp.identity, evidence
        if self._claim_search(search):
            return await self._search(stamp, evidence, until)
        done = self.runtime.event()
        with self.runtime.mutex:
            others = self._waiting.get(search)
            if others is not None:
                others.append(done)
        if others is not None:
            await done.wait(max(until, self.runtime.now() + MIN_PROOF_TIME))
        return self._results.get(search, (0.0, None))[1]

    async def _search_in_background(self, stamp: IdentityStamp, evidence: str) -> None:
        await self._search(stamp, evidence, self.runtime.now() + PROOF_STEP_TIMEOUT)

    async def _search(self, stamp: IdentityStamp, evidence: str, until: float) -> float | None:
        least_ttl: float | None = None
        try:
            least_ttl = await self.find_least_ttl(evidence, stamp, until - self.runtime.now())
            if least_ttl is not None and least_ttl < math.inf:
                was_in_quarantine = stamp.previous != "-"
                stamp.mark_lossless(evidence, least_ttl)
                if was_in_quarantine and stamp.previous == "-" and not least_ttl:
                    log.info(
                        "interlock: %s lost no lease when it took over, as a proof shows: no name waits there",
                        self.history.display_url,
                    )
        finally:
            self._finish_search((stamp.identity, evidence), least_ttl)
        return least_ttl

    def _finish_search(self, search: Search, least_ttl: float | None) -> None:
        with self.runtime.mutex:
            self._results[search] = self.runtime.now(), least_ttl
            waiting = self._waiting.pop(search, [])
        for each in waiting:
            each.set()
