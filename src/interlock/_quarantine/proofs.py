"""The search for a proof (see `least_lossless_ttl`): one search in the background, and all callers wait for its result.

After a failover, hundreds of callers need a proof at the same time, and each search opens connections: to the server,
the sentinels and the replicas. A search takes as long as a server that does not answer, so no caller runs it: each
caller waits for the result until its own time is over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock._protocol.runtime import Runtime
    from interlock._quarantine.server_history import ServerHistory
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
        # Called with the evidence and the stamp; returns the result of `least_lossless_ttl`.
        self.find_least_ttl = find_least_ttl
        self._waiting: dict[Search, list[Any]] = {}  # the searches that run, and the events of their waiting callers
        self._results: dict[Search, tuple[float, float | None]] = {}  # the time of the last search, and its result

    async def prove_lossless(self, evidence: str, until: float, slot: int = -1) -> bool:
        """See Server.prove_lossless. A proof about the server just before this one may shorten the quarantine."""
        stamp = self.history.latest
        before = stamp.predecessor or stamp.slot_history(slot).previous
        while True:
            self._start_search(stamp, evidence)
            if before != "-":
                self._start_search(stamp, before)
            least_ttl = await self._result(stamp, evidence, until)
            if least_ttl is not None and least_ttl < math.inf:
                return True
            is_over = before == "-" or await self._result(stamp, before, until) is not None
            if (is_over and least_ttl is not None) or self.runtime.now() + PROOF_INTERVAL >= until:
                return False
            await self.runtime.sleep_until(self.runtime.now() + PROOF_INTERVAL)

    def old_primary(self, slot: int = -1) -> str:
        """The identity of the old primary while it may still grant (see `IdentityStamp.old_primary`); else "".

        While it may, a search runs in the background.
        """
        old_primary = self.history.latest.old_primary(slot)
        if old_primary:
            stamp = self.history.latest
            self._start_search(stamp, stamp.predecessor or old_primary)
        return old_primary

    def _start_search(self, stamp: IdentityStamp, evidence: str) -> None:
        """Start a search in the background, unless one runs, has found a result, or ended a moment ago."""
        if self._claim_search((stamp.identity, evidence)):
            try:
                self.runtime.spawn(lambda: self._search(stamp, evidence), "interlock-proof", lambda: None)
            except BaseException as error:
                self._finish_search((stamp.identity, evidence), None)
                if not isinstance(error, RuntimeError):  # no thread can be started: then there is no proof
                    raise

    def _claim_search(self, search: Search) -> bool:
        """Whether the caller must start a search now.

        It must not if a search runs, has found a result, or ended less than `PROOF_INTERVAL` ago.
        """
        ended_at, least_ttl = self._results.get(search, (-PROOF_INTERVAL, None))
        with self.runtime.mutex:
            is_due = least_ttl is None and self.runtime.now() >= ended_at + PROOF_INTERVAL
            must_search = is_due and search not in self._waiting
            if must_search:
                self._waiting[search] = []
        return must_search

    async def _result(self, stamp: IdentityStamp, evidence: str, until: float) -> float | None:
        """The result of the search that runs or has just ended; None also if it still runs at the time `until`."""
        search, done = (stamp.identity, evidence), self.runtime.event()
        with self.runtime.mutex:
            waiting = self._waiting.get(search)
            if waiting is not None:
                waiting.append(done)
        if waiting is not None:
            await done.wait(until)
        return self._results.get(search, (0.0, None))[1]

    async def _search(self, stamp: IdentityStamp, evidence: str) -> None:
        least_ttl: float | None = None
        try:
            least_ttl = await self.find_least_ttl(evidence, stamp)
            if least_ttl is not None and least_ttl < math.inf:
                was_in_quarantine = stamp.previous != "-"
                with self.runtime.mutex:
                    stamp.mark_lossless(evidence, least_ttl)
                if was_in_quarantine and stamp.previous == "-" and not least_ttl:
                    log.info(
                        "interlock: %s lost no lease when it took over: a proof shows that, and no quarantine begins",
                        self.history.display_url,
                    )
        finally:
            self._finish_search((stamp.identity, evidence), least_ttl)

    def _finish_search(self, search: Search, least_ttl: float | None) -> None:
        with self.runtime.mutex:
            self._results[search] = self.runtime.now(), least_ttl
            waiting = self._waiting.pop(search, [])
        for each in waiting:
            each.set()
