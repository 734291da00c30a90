"""The lease: one grant, and the only proof of ownership. What threads' and asyncio's leases have in common.

A lease is judged by our own clock whenever it is asked, so `ensure()`, `state` and `remaining()` are right even in
the moment after the process was stopped for a minute. Events and cancellations follow when it next runs.
"""

from __future__ import annotations

import enum
import warnings
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from ._acks import Assurance
from ._core import Grant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._core import Signal
    from ._session import Session

L = TypeVar("L", bound="BaseLease")
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


_LOST: Final = frozenset({LeaseState.LOST})
_ENDED: Final = frozenset({LeaseState.LOST, LeaseState.RELEASED})


class Watched:
    """The events that tell of the end of a lease: each is made when it is asked for."""

    __slots__ = ("_end_event", "_lost_event")
    _session: Session

    def __init__(self) -> None:
        self._lost_event: Any = None
        self._end_event: Any = None

    @property
    def state(self) -> LeaseState:
        """HELD, JEOPARDY, LOST or RELEASED, judged now."""
        raise NotImplementedError

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease is certainly still ours. No I/O: cheap enough before every write."""
        raise NotImplementedError

    def _on_lost(self) -> None:
        """Tell the holder of a loss."""
        if self._lost_event is not None:
            self._lost_event.set()

    def _on_end(self) -> None:
        """Tell who watches of any end: a loss, a release, a close."""
        if self._end_event is not None:
            self._end_event.set()

    def _lost_of(self, make: Callable[[], Any]) -> Any:
        """The event that a loss sets."""
        with self._session.port.mutex:
            if self._lost_event is None:
                self._lost_event = make()
        if self.state in _LOST:  # looked at after it was made: an end in between sets it, too
            self._lost_event.set()
        return self._lost_event

    def _end_of(self, make: Callable[[], Any]) -> Any:
        """The event that every end sets."""
        with self._session.port.mutex:
            if self._end_event is None:
                self._end_event = make()
        if self.state in _ENDED:
            self._end_event.set()
        return self._end_event


class BaseLease(Watched):
    """What a lease can tell without any I/O."""

    __slots__ = ("__weakref__", "_depth", "_grant", "_in_with", "_multi_leases", "_on_lost_call", "_session")

    def __init__(self, session: Session, on_lost: Callable[[Any], object] | None, grant: Grant) -> None:
        super().__init__()
        self._session = session
        self._grant = grant
        self._on_lost_call = on_lost
        self._depth: int = 1  # how often it was acquired, and not released yet
        self._in_with = False  # a `with` of its lockable acquired it, and so gives it back
        self._multi_leases: tuple[weakref.ref[BaseMultiLease[Any]], ...] = ()  # of which it is a part
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
    def assurance(self) -> Assurance:
        """What it rested on when it was granted: how many servers, replicas, disks; see `acks`."""
        return self._grant.attempt.assurance or Assurance(self._session.port.majority)

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
        super()._on_lost()
        self._on_end()
        if self._on_lost_call is not None:
            self._session.port.tell(self._on_lost_call, self)
        for reference in self._multi_leases:
            if whole := reference():
                whole._on_lost()

    def _on_end(self) -> None:
        """Tell who watches. Called once."""
        if self._end_event is not None:
            self._end_event.set()
        for reference in self._multi_leases:
            if whole := reference():
                whole._on_end()

    @property
    def _ended(self) -> bool:
        return self._grant.ended is not None

    def _abandon(self) -> Signal | None:
        """Nobody will use it: it is given back in the background. The signal tells when that is done."""
        return self._session.core.give_up(self._grant)

    def _holds(self) -> Any:
        """How often it is held now: what `_give_up` compares."""
        return self._depth

    def _give_up(self, before: Any, *, later: bool = False) -> None:
        """Give it back in the background, unless that was done: a section of it can't be left any more.

        `before`: what it said of its holds before that was tried; None: it was not tried. `later`: by a finalizer.
        """
        ended = self._grant.ended
        if ended is not None and (before is not None or ended in {Grant.RELEASED, Grant.FORKED}):
            return  # else it was lost before its body: what a revocation left in the server is for the next one
        if later:
            self._session.core.leave_behind(self._grant)
        else:
            self._session.core.give_up(self._grant)

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} fence={self.fence} {self.state.value} for {self.remaining():.3f} s>"

    def __del__(self) -> None:
        grant = getattr(self, "_grant", None)
        if grant is None or grant.slot is None or grant.lapsed(now := self._session.port.now()):
            return
        if self._in_with:  # its section is garbage as well, and may be finalized later than this
            self._session.core.leave_behind(grant)
        else:
            self._session.renewal.drop(grant)
            left = max(grant.attempt.ttl, round(grant.attempt.extended_until - now, 3))
            warnings.warn(
                f"{grant.primitive}: a lease was dropped without release. It is renewed no more, and keeps "
                f"others out for up to {left:g} s. Use `with`, or call release()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


class BaseReentrantLease(BaseLease):
    """The lease of an rlock: it is given back as often as it was acquired, the last time to the server."""

    __slots__ = ()

    def reenter(self) -> Self:
        """Have it once more. Raises LeaseLost."""
        self.ensure()
        self._depth += 1
        return self

    @property
    def inside(self) -> bool:
        """Whether somebody has yet to release it: also one that was lost."""
        return self._depth > 0

    def _inner(self) -> bool:
        self._depth -= 1
        return self._depth > 0

    def _left_once(self, error: BaseException | None) -> None:
        """An inner section is over: raises LeaseLost if the lease is lost, unless the body raised `error`."""
        if error is None and self.state is LeaseState.LOST:
            self.ensure()

    def _abandon(self) -> Signal | None:
        return None if self._inner() else super()._abandon()

    def _give_up(self, before: int | None, *, later: bool = False) -> None:
        if before is None or self._depth >= before:  # it was not left
            self._depth -= 1
        if self._depth <= 0:
            super()._give_up(before, later=later)


class BaseMultiLease(Watched, Generic[L]):
    """Several leases as one: what it can tell without any I/O."""

    __slots__ = ("__weakref__", "_in_with", "_leases", "_name", "_on_lost_call", "_session", "_told")

    def __init__(
        self, session: Session, on_lost: Callable[[Any], object] | None, name: str, leases: dict[str, L]
    ) -> None:
        super().__init__()
        self._session = session
        self._on_lost_call = on_lost
        self._name = name
        self._leases = leases
        self._told = False
        for lease in leases.values():
            lease._multi_leases = (*(each for each in lease._multi_leases if each()), weakref.ref(self))
        if self.state is LeaseState.LOST:  # before it could be told here
            self._on_lost()

    @property
    def name(self) -> str:
        """The names that were locked, in the order of their keys."""
        return self._name

    def __getitem__(self, name: str) -> L:
        """The lease on one of them: for its `execute`, or its token."""
        return self._leases[name]

    @property
    def fence(self) -> Mapping[str, int]:
        """For each name a number that only grows from grant to grant: send it with your writes there."""
        return MappingProxyType({name: lease.fence for name, lease in self._leases.items()})

    @property
    def state(self) -> LeaseState:
        """The worst of theirs: LOST when any is lost."""
        states = {lease.state for lease in self._leases.values()}
        return next(
            each
            for each in (LeaseState.LOST, LeaseState.RELEASED, LeaseState.JEOPARDY, LeaseState.HELD)
            if each in states
        )

    def remaining(self) -> float:
        """Seconds for which all of them are certainly ours; 0.0 once one has ended."""
        return min(lease.remaining() for lease in self._leases.values())

    def ensure(self) -> None:
        """Raise LeaseLost unless all are certainly still ours. No I/O: cheap enough before every write."""
        for lease in self._leases.values():
            lease.ensure()

    @property
    def _ended(self) -> bool:
        return any(lease._ended for lease in self._leases.values())

    def _holds(self) -> list[int]:
        return [lease._depth for lease in self._leases.values()]

    def _give_up(self, before: list[int] | None, *, later: bool = False) -> None:
        """Give back in the background what was not given back of each; see BaseLease."""
        for i, lease in enumerate(self._leases.values()):
            lease._give_up(before[i] if before else None, later=later)

    def _on_lost(self) -> None:
        """Tell the holder that one of them was lost; `on_lost` once."""
        super()._on_lost()
        if self._on_lost_call is not None and not self._told:
            self._told = True
            self._session.port.tell(self._on_lost_call, self)

    def __repr__(self) -> str:
        return f"<MultiLease {self._name!r} {self.state.value} for {self.remaining():.3f} s>"
