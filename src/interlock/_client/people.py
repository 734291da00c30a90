"""Where people are plugged in: what the client calls for them, and never asks. `_people` stands behind it.

Theory. The code of callers reports to `Core.points`, that of workers to `LeaseEnds.points`. The attribute `people` of
both is None while nobody observes. Each point reads it once, and calls one method of it if it is not None:

    if (people := self.points.people) is not None:  # in one step: another thread may switch
        people.released(grant, now)

Rules. (a) These methods return nothing, so that no decision can depend on an observer. (b) No point is under the mutex,
or in a finalizer. (c) An observer raises nothing here but an interrupt. So each point stands where one may arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from interlock._client.grant import Attempt, Grant
    from interlock.errors import AcquireTimeout


class SayMore(Protocol):
    """Adds to the error of a caller whose time is over what people know of the holder, and returns by `until`.

    Raises nothing of its own.
    """

    async def __call__(self, attempt: Attempt, error: AcquireTimeout, until: float) -> None: ...


class Points:
    """Where people are plugged in: the core, its turns and its holding share one, the ends and the renewer another."""

    __slots__ = ("people",)

    def __init__(self) -> None:
        self.people: People | None = None  # None while nobody observes


class People(Protocol):
    """What happens to attempts and leases. All times are by the clock of the runtime."""

    def begins(self, attempt: Attempt, now: float) -> None:
        """A caller begins to acquire."""

    def acquired(self, grant: Grant, now: float) -> None:
        """The caller has its lease."""

    def not_acquired(self, attempt: Attempt, error: BaseException, now: float) -> None:
        """The caller gets no lease, but this error."""

    def released(self, grant: Grant, now: float) -> None:
        """The lease was given back or has passed on, if it ended so: this may be called for any end, and twice."""

    def lost(self, grant: Grant, why: str, now: float) -> None:
        """The lease was lost for this reason."""

    def renewed(self, grant: Grant, slack: float) -> None:
        """A renewal succeeded, this many seconds before the lease would have ended."""

    def renewal_failed(self, grant: Grant) -> None:
        """The lease is in jeopardy."""
