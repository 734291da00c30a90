"""Giving back a lease for which no caller waits: after a cancellation, an interrupt.

Theory. Code that ends a lease in such a moment may run in a signal handler, or in a task that somebody cancels. So
nothing here waits: the end of the lease counts at once, and the worker of undos sends the release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock._client.grant import Grant
    from interlock._client.lease_ends import LeaseEnds
    from interlock._client.people import Points
    from interlock._protocol.runtime import AutoResetEvent


class GivingBack:
    """What gives back the leases of one client."""

    def __init__(self, ends: LeaseEnds, points: Points) -> None:
        self.runtime = ends.runtime
        self.ends = ends
        self.undo = ends.undo
        self.points = points

    def in_background(self, grant: Grant) -> AutoResetEvent:
        """Release in the background, since no caller will use the lease. The event is set when the undo is done.

        It is never set if the lease belongs to another caller by now.
        """
        with self.runtime.mutex:
            has_passed = grant.has_passed  # then an interrupt arrived behind that step
            # The undo first: after an interrupt here, and in close(), the lease is still held or already undone.
            undone = self.runtime.event() if has_passed else self.undo.add(grant.hold.claim)
            grant.mark_released()
        if not has_passed:
            self.ends.end(grant.hold)
        if (people := self.points.people) is not None:
            people.released(grant, self.runtime.now())
        return undone
