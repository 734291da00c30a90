"""The lease: one grant, and the only proof of ownership. What threads' and asyncio's leases have in common.

A lease is judged by our own clock whenever it is asked, so `ensure()`, `state` and `remaining()` are right even in
the moment after the process was stopped for a minute. Events and cancellations follow when it next runs.
"""

from __future__ import annotations

import enum
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from ._core import Grant

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._session import Session

# What `execute` gives back: bytes for strings, as the server sent them.
Reply = bytes | str | int | float | None | list["Reply"]


class LeaseState(enum.StrEnum):
    """How much a lease is worth now."""

    HELD = "held"
    """It is ours, and renewed in time."""
    JEOPARDY = "jeopardy"
    """It is ours, but no renewal got through lately."""
    LOST = "lost"
    """It is not certainly ours any more."""
    RELEASED = "released"
    """We gave it back."""


class BaseLease:
    """What a lease can tell without any I/O."""

    __slots__ = ("__weakref__", "_grant", "_lost", "_on_lost_call", "_session")

    def __init__(self, session: Session, on_lost: Callable[[Any], object] | None, grant: Grant) -> None:
        self._session = session
        self._grant = grant
        self._on_lost_call = on_lost
        self._lost: Any = None
        grant.owner = weakref.ref(self)

    @property
    def name(self) -> str:
        """The name that was locked."""
        return self._grant.primitive.name

    @property
    def token(self) -> str:
        """Who holds it, as the server knows it: host/pid/thread or task/random."""
        return self._grant.attempt.token

    @property
    def fence(self) -> int:
        """A number that only grows from grant to grant: send it with your writes, and refuse lower ones."""
        return self._grant.fence

    @property
    def state(self) -> LeaseState:
        """HELD, JEOPARDY, LOST or RELEASED, judged now."""
        grant = self._grant
        now = self._session.port.now()
        if why := grant.lapsed(now):
            return LeaseState.RELEASED if why == Grant.RELEASED else LeaseState.LOST
        at_risk = grant.failing or (grant.renews and now >= grant.overdue and grant.deadline < grant.ends)
        return LeaseState.JEOPARDY if at_risk else LeaseState.HELD

    def remaining(self) -> float:
        """Seconds for which the lease is certainly ours, without another renewal; 0.0 once it has ended."""
        if self._grant.ended is not None:
            return 0.0
        return max(0.0, self._grant.deadline - self._session.port.now())

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease is certainly still ours. No I/O: cheap enough before every write."""
        if why := self._grant.lapsed(self._session.port.now()):
            raise self._grant.error(why)

    def _on_lost(self) -> None:
        """Tell the holder. Called once, by whoever found out."""
        if self._lost is not None:
            self._lost.set()
        if self._on_lost_call is not None:
            self._session.port.tell(self._on_lost_call, self)

    def _event(self, make: Callable[[], Any]) -> Any:
        with self._session.port.mutex:
            if self._lost is None:
                self._lost = make()
        if self.state is LeaseState.LOST:
            self._lost.set()
        return self._lost

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} fence={self.fence} {self.state.value} for {self.remaining():.3f} s>"

    def __del__(self) -> None:
        grant = getattr(self, "_grant", None)
        if grant is not None and grant.lapsed(self._session.port.now()) is None:
            self._session.renewal.drop(grant)
            warnings.warn(
                f"{grant.primitive}: a lease was dropped without release. It is renewed no more, and keeps "
                f"others out for up to {grant.attempt.ttl:g} s. Use `with`, or call release()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
