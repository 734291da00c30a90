"""What the client reports while somebody observes, as calls of the observers: the `People` of `_client/people.py`.

The callers of a core report at once, each in its own thread or task. The workers leave their reports to `Reports`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from interlock._client.grant import Grant
from interlock._people import observer
from interlock._people.observation import Observation, observation_of
from interlock._people.observer import loss_of, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.grant import Attempt
    from interlock._client.reports import Reports
    from interlock._people.observer import Observer


class Observed:
    """Says each outcome of an attempt, and each end of its lease, once."""

    def __init__(self, tell: Callable[[Callable[[Observer], object]], None] = observer.tell) -> None:
        self._tell = tell  # calls this with each observer

    def begins(self, attempt: Attempt, now: float) -> None:
        """See People."""
        self._begin(attempt, now)

    def acquired(self, grant: Grant, now: float) -> None:
        """See People. Without a call of `begins`, the attempt begins when its acquire was sent.

        There is no such call for one of several locks that one step acquires, nor if nobody observed at that time.
        """
        attempt = grant.attempt
        if (observation := observation_of(attempt)) is None:
            observation = self._begin(attempt, grant.since)
        waited = now - observation.began
        try:
            observation.held_since.append(now)
            observation.has_outcome = True
            self._tell(lambda observer: observer.acquired(grant, waited))
            if observation.has_ended and grant.end_reason is not None:  # the hold ended before this report of it
                self._release(grant, now)
        except BaseException:  # an interrupt: nobody will use the lease
            self._release(grant, now)
            raise

    def not_acquired(self, attempt: Attempt, error: BaseException, now: float) -> None:
        """See People."""
        observation = observation_of(attempt)
        if observation is not None and not observation.has_outcome:
            observation.has_outcome = True
            outcome, waited = outcome_of(error), now - observation.began
            self._tell(lambda observer: observer.not_acquired(attempt, outcome, waited, error))

    def released(self, grant: Grant, now: float) -> None:
        """See People."""
        if grant.end_reason == Grant.RELEASED:
            self._release(grant, now)

    def lost(self, grant: Grant, why: str, now: float) -> None:
        """See People."""
        held, loss = _end_hold(grant, now), loss_of(why)
        self._tell(lambda observer: observer.lost(grant, loss, why, held))

    def renewed(self, grant: Grant, slack: float) -> None:
        """See People."""
        self._tell(lambda observer: observer.renewed(grant, slack))

    def renewal_failed(self, grant: Grant) -> None:
        """See People."""
        self._tell(lambda observer: observer.renewal_failed(grant))

    def _begin(self, attempt: Attempt, now: float) -> Observation:
        observation = attempt.observation = Observation(now)
        self._tell(lambda observer: observer.begins(attempt))
        return observation

    def _release(self, grant: Grant, now: float) -> None:
        held = _end_hold(grant, now)
        if held is not None:
            self._tell(lambda observer: observer.released(grant, held))


BY_CALLERS: Final = Observed()


def by_workers(reports: Reports) -> Observed:
    """An `Observed` for workers: the worker of `reports` calls the observers."""
    return Observed(lambda event: reports.add(partial(observer.tell, event)))


def _end_hold(grant: Grant, now: float) -> float | None:
    """How long the lease was held, if nobody has ended its hold before."""
    observation = observation_of(grant.attempt)
    if observation is None:
        return None
    observation.has_ended = True  # before the pop: acquired() appends first, and then reads this
    try:
        return max(0.0, now - observation.held_since.pop())
    except IndexError:
        return None
