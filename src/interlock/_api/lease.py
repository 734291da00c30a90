"""The lease: one grant, and the only proof of ownership.

`ensure()`, `state` and `remaining()` compare the deadline with the client's own clock at each call, so they are right
even just after the process was stopped for a minute. Events and cancellations follow when the process next runs.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

from interlock._client.grant import Grant
from interlock._client.lease_ends import DROPPED, dropped_text
from interlock._client.self_wait import lasts
from interlock._people.observer import Loss, loss_of
from interlock._protocol.acks import Assurance
from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.names import check_command
from interlock._protocol.timing import FOREVER
from interlock.errors import ConfigError

from .face import Face
from .misuse_errors import LEASE_HINTS, named
from .misuse_warnings import warn_of_dropped_lease
from .own_keys import check_writes_no_own_key

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from interlock._client.acquiring import Core
    from interlock._protocol.runtime import AutoResetEvent
    from interlock.errors import LeaseLost

    from .section import Section

# What `execute` returns: bytes for strings, as the server sent them.
Reply = bytes | str | int | float | None | list["Reply"]


class LeaseState(enum.StrEnum):
    """How much a lease is worth now."""

    HELD = "held"
    """It is ours, and no renewal has failed or is late."""
    JEOPARDY = "jeopardy"
    """It is ours, but no renewal got through lately."""
    LOST = "lost"
    """It is not certainly ours any more."""
    RELEASED = "released"
    """We gave it back."""


_LOST: Final = frozenset({LeaseState.LOST})
_ENDED: Final = frozenset({LeaseState.LOST, LeaseState.RELEASED})


def described_state(state: LeaseState, remaining: float, but: str = " unless renewed") -> str:
    """The state of a lease, and for how many seconds it lasts, for a repr."""
    return state.value if state in _ENDED else f"{state.value}, ends in {remaining:.3f} s{but}"


class WatchedCore(Face):
    """A lease, or several as one: its events, each made when a user first reads it, and its `with`."""

    __slots__ = ("_bodies", "_end_event", "_lost_event", "_made_by")
    _event_type: Callable[[], Any]
    _made_by: Core
    """The client that acquired it: for an answer about the lease. Else use `_core`."""
    _lost_event: Any
    _end_event: Any
    _hints = LEASE_HINTS
    _instead_of_pickling = (
        "acquire another lease in the other process, or send it this lease's fence with the data to write"
    )
    _bodies: tuple[Any, ...]
    """What threads or tasks do inside of it, the innermost last: see `LeaseForThreads`, `LeaseForAsyncio`."""

    @property
    def _core(self) -> Core:
        """The client that acquired it. In a child after a fork this resets all clients first."""
        if not KNOWN[0]:
            notice()
        return self._made_by

    def _event_of_loss(self) -> Any:
        with self._core.runtime.mutex:
            if (event := self._lost_event) is None or self._belongs_to_parent:
                event = self._lost_event = self._event_type()
        if self.state in _LOST:  # read after the event was made: a loss in between sets it, too
            event.set()
        return event

    def _event_of_end(self) -> Any:
        with self._core.runtime.mutex:
            if (event := self._end_event) is None or self._belongs_to_parent:
                event = self._end_event = self._event_type()
        if self.state in _ENDED:
            event.set()
        return event

    @property
    def _belongs_to_parent(self) -> bool:
        """Whether a parent process acquired it, one of whose threads may have used its events at the fork."""
        return self._made_by.requests.is_of_parent

    @property
    def state(self) -> LeaseState:
        """HELD, JEOPARDY, LOST or RELEASED, judged now; of several leases the worst."""
        raise NotImplementedError

    def _ensure(self) -> None:
        """Raise LeaseLost unless the lease is certainly still ours. No I/O."""
        raise NotImplementedError

    def _check_loop(self, error: RuntimeError) -> None:
        """Raise an error in words for the user, if this one of asyncio shows that another event loop uses the lease."""
        if any(words in str(error) for words in ("different loop", "loop is closed", "loop other than")):
            raise RuntimeError(
                f"{self!r} belongs to the event loop in which it was acquired, and is used in another one. Use it in "
                "its own loop while that runs, or acquire the lock in this loop"
            ) from error

    def _on_lost(self) -> None:
        """Report a loss to the holder. The code that found the loss calls this, once for each lost lease."""
        if self._lost_event is not None:
            self._lost_event.set()

    def _on_end(self) -> None:
        """Report any end: a loss, a release, a close. Called once for each lease that has ended."""
        if self._end_event is not None:
            self._end_event.set()

    @property
    def _log_fields(self) -> dict[str, object]:
        """The attributes of a log record about it."""
        raise NotImplementedError

    def _begin(self, who: weakref.ref[Any] | None = None, *, until_any_end: bool = False) -> None:
        """The calling thread or task, `who` if that is known, is inside from now on.

        In asyncio a loss cancels the task; with `until_any_end` each end that another task causes does, too.
        """
        raise NotImplementedError

    def _revocation(self) -> LeaseLost | None:
        """The error that says who revoked it; None if nobody did."""
        raise NotImplementedError

    def _leases_of(self, name: str, core: Core) -> list[LeaseCore]:
        """This lease, or its parts, if they have this name and belong to this client."""
        raise NotImplementedError

    def _mark_in_with(self, section: Section | None = None) -> None:
        """Note that a `with` of its lockable acquired it, and so gives it back; and the section of that `with`."""
        raise NotImplementedError

    def _lasting_grants(self) -> list[Grant]:
        """Those of its grants that are renewed without end."""
        raise NotImplementedError

    async def _enter(self) -> None:
        """Enter a section by a `with` of the lease itself. Raises LeaseLost if that has ended: no body runs then."""
        self._ensure()
        self._begin()

    def _leave(self, error: BaseException | None) -> Coroutine[Any, Any, None]:
        """Release it, and raise LeaseLost if it did not last, unless the body raised `error`."""
        raise NotImplementedError

    def _exit(self, _kind: object, error: BaseException | None, _trace: object) -> Coroutine[Any, Any, None]:
        """Leave a section: the arguments are those of `__exit__`."""
        return self._leave(error)


class LeaseCore(WatchedCore):
    """One grant of a lock."""

    __slots__ = ("__weakref__", "_depth", "_grant", "_multi_leases")

    def __init__(self, core: Core, grant: Grant) -> None:
        self._made_by = core
        self._grant = grant
        self._lost_event = self._end_event = None
        self._bodies = ()
        self._depth: int = 1  # how often it was acquired, and not released yet
        self._multi_leases: tuple[weakref.ref[WatchedCore], ...] = ()  # of which it is a part
        grant.lease = weakref.ref(self)

    @property
    def name(self) -> str:
        """The name that was locked."""
        return self._grant.resource.name

    @property
    def token(self) -> str:
        """Who holds it, as the server knows it: host/pid/thread or task/random."""
        return self._grant.token

    @property
    def fence(self) -> int:
        """A number that only grows from grant to grant: send it with your writes, and refuse lower ones."""
        return self._grant.fence

    @property
    def assurance(self) -> Assurance:
        """What it rested on when it was granted: how many servers, replicas, disks; see `Interlock.lock(acks=...)`."""
        return self._grant.hold.claim.assurance or Assurance(self._core.server.majority)

    @property
    def state(self) -> LeaseState:
        """HELD, JEOPARDY, LOST or RELEASED, judged now."""
        grant, hold = self._grant, self._grant.hold
        now = self._made_by.runtime.now()
        if why := grant.reason_ended(now):
            return LeaseState.RELEASED if why == Grant.RELEASED else LeaseState.LOST
        at_risk = hold.renewal_failing or (
            hold.renews and now >= hold.jeopardy_after and hold.deadline < hold.max_hold_until
        )
        return LeaseState.JEOPARDY if at_risk else LeaseState.HELD

    def _remaining(self) -> float:
        if self._grant.why_ended is not None or self._grant.has_passed:
            return 0.0
        return max(0.0, self._grant.hold.deadline - self._made_by.runtime.now())

    def _ensure(self) -> None:
        if why := self._grant.reason_ended(self._made_by.runtime.now()):
            raise self._grant.error(self._made_by.ends.why_lost(self._grant, why))

    async def _release(self) -> bool:
        if self._leaves_inner():
            return self.state not in _ENDED
        try:
            return await self._core.holding.release(self._grant)
        except RuntimeError as error:
            self._check_loop(error)
            raise

    async def _extend(self, ttl: float) -> None:
        try:
            await self._core.holding.extend(self._grant, ttl)
        except ConfigError as error:
            raise self._named(error) from None
        except RuntimeError as error:
            self._check_loop(error)
            raise

    async def _execute(
        self, command: str, *args: str | bytes | float, keys: Sequence[str | bytes] | None = None
    ) -> Reply:
        try:
            check_command(command, keys)
            check_writes_no_own_key(self._grant.resource, command, args, keys)
            reply: Reply = await self._core.holding.execute(self._grant, command, args, keys)
        except ConfigError as error:
            raise self._named(error) from error.__cause__
        except RuntimeError as error:
            self._check_loop(error)
            raise
        return reply

    @property
    def _log_fields(self) -> dict[str, object]:
        return self._grant.log_fields

    def _revocation(self) -> LeaseLost | None:
        why = self._grant.why_ended
        return self._grant.error(why) if why is not None and loss_of(why) is Loss.REVOKED else None

    def _leases_of(self, name: str, core: Core) -> list[LeaseCore]:
        return [self] if self._core is core and self.name == name else []

    def _named(self, error: ConfigError) -> ConfigError:
        return named(error, str(self._grant.resource), self.name)

    def _on_lost(self) -> None:
        super()._on_lost()
        self._on_end()
        if (on_lost := self._grant.attempt.options.on_lost) is not None:
            self._core.runtime.run_callback(on_lost, self)
        for reference in self._multi_leases:
            if whole := reference():
                whole._on_lost()

    def _on_end(self) -> None:
        if self._end_event is None and not self._bodies and not self._multi_leases:
            return  # nobody would learn of it
        super()._on_end()
        for reference in self._multi_leases:
            if whole := reference():
                whole._on_end()

    def _leave(self, error: BaseException | None) -> Coroutine[Any, Any, None]:
        return self._leave_inner(error) if self._leaves_inner() else self._core.holding.exit_section(self._grant, error)

    async def _leave_inner(self, error: BaseException | None) -> None:
        if error is None and self.state is LeaseState.LOST:
            self._ensure()

    def _leaves_inner(self) -> bool:
        """Count one release. Returns whether other acquires are left, as those of an rlock may be."""
        with self._core.runtime.mutex:  # with `owner=`, another thread may enter it just now
            self._depth -= 1
            return self._depth > 0

    def _reenter(self) -> Self | None:
        """Acquire it once more. None if another thread has just left it, and releases it.

        Raises LeaseLost if it has ended.
        """
        self._ensure()
        is_counted = False
        try:
            with self._core.runtime.mutex:
                if not self._is_inside:
                    return None
                self._depth += 1
                is_counted = True
        except BaseException:  # an interrupt: nobody gets this acquire, so nobody would release it
            if is_counted:
                self._depth -= 1
            raise
        return self

    @property
    def _is_inside(self) -> bool:
        """Whether an acquire of it has no release yet. That may be so after the lease was lost, too."""
        return self._depth > 0

    def _mark_in_with(self, section: Section | None = None) -> None:
        self._grant.in_with = True
        if section is not None and self._depth == 1:  # else re-entered: its caller may release it elsewhere
            self._grant.held_by = weakref.ref(section)

    def _lasting_grants(self) -> list[Grant]:
        return [self._grant] if lasts(self._grant) else []

    @property
    def _ended(self) -> bool:
        return self._grant.why_ended is not None

    def _abandon(self) -> AutoResetEvent | None:
        """Give it back in the background, since nobody will use it. Returns an event that is set when that is done.

        Returns None if this was an inner acquire of an rlock.
        """
        return None if self._leaves_inner() else self._core.giving_back.in_background(self._grant)

    def _holds(self) -> Any:
        """How often it is held now: what `_release_in_background` compares."""
        return self._depth

    def _release_in_background(self, before: Any, *, later: bool = False) -> None:
        """Give it back in the background, unless its section has done so. Nobody will leave that section any more.

        `before`: what `_holds` returned before the section tried; None: it has not tried. `later`: a finalizer calls.
        """
        if before is None or self._depth >= before:  # it was not left
            self._depth -= 1
        ended = self._grant.why_ended
        if self._depth > 0:
            return
        if ended is not None and (before is not None or ended in {Grant.RELEASED, Grant.FORKED}):
            return  # else it was lost, and its section did not try: the undo removes the mark of a revocation
        if later:
            self._core.ends.orphaned(self._grant, Grant.RELEASED)
        else:
            self._core.giving_back.in_background(self._grant)

    def __repr__(self) -> str:
        renewed = self._grant.attempt.options.renew
        state = described_state(self.state, self._remaining(), " unless renewed" if renewed else "")
        return f"<Lease {self.name!r} fence={self.fence} {state}>"

    def __del__(self) -> None:
        grant = getattr(self, "_grant", None)
        if grant is None or grant.why_ended is not None:
            return
        if grant.hold.due == FOREVER or grant.reason_ended(now := self._core.runtime.now()):
            return
        if grant.in_with:  # its section is garbage as well, and may be finalized later than this
            self._core.ends.orphaned(grant, Grant.RELEASED)
        else:
            self._core.ends.orphaned(grant, DROPPED)
            warn_of_dropped_lease(self, dropped_text(grant, now))
