"""Giving back a lease for which no caller waits: after a cancellation, an interrupt, a lost reference.

Theory. Whoever ends a lease in such a moment may be in a signal handler, a finalizer or a task that is being cancelled.
So nothing here waits: the end of the lease counts at once, and the worker of undos sends the release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock._client.grant import Grant

if TYPE_CHECKING:
    from interlock._client.people import Points
    from interlock._client.renewal import Renewal
    from interlock._client.undo import Undo
    from interlock._protocol.types import AutoResetEvent


class GivingBack:
    """What gives back the leases of one client."""

    def __init__(self, renewal: Renewal, undo: Undo, points: Points) -> None:
        self.runtime = renewal.runtime
        self.renewal = renewal
        self.undo = undo
        self.points = points

    def in_background(self, grant: Grant) -> AutoResetEvent:
        """Release in the background, since no caller will use the lease. The event is set when the undo is done.

        It is never set if the lease belongs to another caller by now.
        """
        with self.runtime.mutex:
            has_passed = grant.has_passed
            grant.mark_released()
        if has_passed:  # an interrupt came after that
            undone = self.runtime.event()
        else:
            self.renewal.end(grant.hold)
            undone = self.undo.add(grant.hold.claim)
        if (people := self.points.people) is not None:
            people.released(grant, self.runtime.now())
        return undone

    def later(self, grant: Grant) -> None:
        """As `in_background`, without I/O and locks: a finalizer in any thread may call this."""
        # First, since an interrupt may end the finalizer at any later step: the worker of ends then does the rest.
        self.undo.from_finalizers.append(grant)
        grant.end_reason = grant.end_reason or Grant.RELEASED
