"""A core that reports what its callers do, to the observers of this process (`observer.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._client.core import Core
from interlock._client.error_texts import ENDED_BEFORE_RELEASE
from interlock._client.grant import Grant
from interlock._people import observer
from interlock._people.observer import report_acquired, report_begin, report_lost, report_not_acquired, report_released

if TYPE_CHECKING:
    from interlock._client.grant import Attempt
    from interlock._protocol.types import AutoResetEvent


class ObservedCore(Core):
    """The class of each core while anybody observes. A core has no state that it would not have as a `Core`."""

    async def acquire(self, attempt: Attempt) -> Any:
        """See Core."""
        if attempt.make_lease is None:  # at a latch or a barrier, where nobody holds anything
            return await super().acquire(attempt)
        report_begin(attempt, self.runtime.now())
        lease = None
        try:
            lease = await super().acquire(attempt)
            report_acquired(lease._grant, self.runtime.now())
        except BaseException as error:
            if lease is not None:  # an interrupt: nobody will use the lease
                self.release_in_background(lease._grant)
            else:
                report_not_acquired(attempt, error, self.runtime.now())
            raise
        return lease

    def lease_from_grant(self, attempt: Attempt, fence: int, sent: float) -> Any:
        """See Core."""
        lease = None
        try:
            lease = super().lease_from_grant(attempt, fence, sent)
            # Else acquire() reports it: but not one of several in one step, or one that began before anybody observed.
            if lease is not None and attempt.observation is None:
                report_begin(attempt, sent)
                report_acquired(lease._grant, self.runtime.now())
        except BaseException:
            if lease is not None:  # as above
                self.release_in_background(lease._grant)
            raise
        return lease

    async def release(self, grant: Grant) -> bool:
        """See Core."""
        now = self.runtime.now()
        try:
            return await super().release(grant)
        finally:
            if grant.end_reason == Grant.RELEASED:
                report_released(grant, now)

    async def _release_held(self, grant: Grant, now: float, *, waits: bool = True) -> bool:
        was_ours = True
        try:
            was_ours = await super()._release_held(grant, now, waits=waits)
        finally:
            if was_ours:
                report_released(grant, now)
            elif grant.end_reason == Grant.RELEASED:  # else another thread has ended it, and reports that
                report_lost(grant, ENDED_BEFORE_RELEASE, now)
        return was_ours

    def _passes_on(self, grant: Grant, now: float) -> bool:
        has_passed = super()._passes_on(grant, now)
        if has_passed:
            report_released(grant, now)
        return has_passed

    def release_in_background(self, grant: Grant) -> AutoResetEvent:
        """See Core."""
        undone = super().release_in_background(grant)
        if grant.end_reason == Grant.RELEASED:
            report_released(grant, self.runtime.now())
        return undone


def core_type() -> type[Core]:
    """The class that cores have now."""
    return ObservedCore if observer.observers else Core
