"""What is kept about one attempt, and about its lease, while somebody observes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock._client.grant import Attempt


@dataclass(slots=True, eq=False)
class Observation:
    """What observers and `Observed` know of one attempt. The attempt keeps it, and reads nothing in it."""

    began: float
    held_since: list[float] = field(default_factory=list[float])  # empty unless it is held: a pop is one step
    has_outcome: bool = False  # the attempt: observers know whether it got its lease
    has_ended: bool = False  # its lease
    state: Any = None  # of the observer that traces
    trace_id: str = ""  # of the trace in which the caller acquires, if somebody traces


def observation_of(attempt: Attempt) -> Observation | None:
    """What is kept about this attempt. None if nobody observed when it began."""
    found: Observation | None = attempt.observation
    return found


def trace_id_of(attempt: Attempt) -> str:
    """The id of the trace in which the caller acquires; "" if nobody traces."""
    observation = observation_of(attempt)
    return observation.trace_id if observation is not None else ""
