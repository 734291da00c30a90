"""What can be held, and a lock: acquiring it, its `with`, its decorator, and taking it away from its holder.

A lockable is a description: interlock sends nothing until a caller acquires it. A class of a lockable says which
resource it asks for (`_to_request`), whether its caller holds it already (`_reenter`), and makes the lease of a grant
(`_lease_of`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic

from interlock._client.self_wait import deadlock, kind_of_caller, way_out
from interlock._people.revocation import reason_text
from interlock._protocol.unset import Unset
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives.lock import LockInspect, LockState, parse_state

from .functions import checked_awaitable, checked_function, checked_result, checked_tag
from .misuse_errors import LOCK_HINTS, made_by_interlock
from .named import NamedCore, StateT
from .options import UNSET, LeaseT, timeout_of
from .section import CallSection, Section
from .synchronized import decorated

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._client.acquiring import Core
    from interlock._client.grant import AcquireOptions, Grant
    from interlock._protocol.resource import Resource


# Why a lease of an owner is lost: another thread or task of this owner asked at the same moment
TAKEN_OVER: Final = "its owner has acquired the lock again"


class LockableCore(NamedCore[StateT], Generic[StateT, LeaseT]):
    """Something that can be held: a `with` (asyncio: `async with`) holds it, a decorated function runs under it."""

    __slots__ = ("_by_hand", "_inside", "_options")
    _hints = LOCK_HINTS
    _lease_of: Callable[[Core, Grant], LeaseT]
    """Makes the lease of a grant, and remembers the lease if callers may re-enter it, before the caller gets it."""
    _is_reentrant: ClassVar[bool] = False
    _asks_by_caller: ClassVar[bool] = False
    """Whether what it asks for depends on what its caller holds: then `_to_request` says it."""

    @made_by_interlock
    def __init__(self, interlock: Any, resource: Resource, options: AcquireOptions) -> None:
        self._describe(interlock, resource)
        self._options = options
        self._inside: dict[weakref.ref[Any], weakref.ref[Any]] = {}  # by thread or task: the lease it entered last
        self._by_hand: list[Section] = []  # what was entered by __enter__() without a `with`, the innermost last

    async def _acquire(self, timeout: float | Unset | None = UNSET) -> LeaseT:
        if self._is_reentrant and (held := self._reenter()) is not None:
            return held
        try:
            core, options = self._interlock._session.core, self._options
        except ConfigError as error:  # it is closed
            raise self._about_this(error) from None
        timeout = options.timeout if isinstance(timeout, Unset) else timeout_of(timeout, self._primitive)
        resource = self._to_request() if self._asks_by_caller else self._primitive
        lease: LeaseT = await core.acquire(core.attempt(resource, options, timeout, self._lease_of))
        return lease

    async def _try_acquire(self) -> LeaseT | None:
        try:
            return await self._acquire(0)
        except AcquireTimeout:
            return None

    async def _revoke(self, reason: str, force: bool) -> bool:
        return await self._revoke_holders(reason_text(self._primitive, reason), force=force)

    async def _revoke_holders(self, reason: str, *, force: bool) -> bool:
        value, pttl, *_ = await self._inspected_lock()
        holder = value.removeprefix(b"!")  # "!<token>": revoked already
        if not holder or (value != holder and not force):
            return False
        if pttl == -1 and not force:
            raise ConfigError(
                f"{self._primitive} is held without an expiry by {holder.decode(errors='replace')!r}: a revocation "
                "that waits for its holder would wait for ever. If nobody is at work there, use force=True"
            )
        return await self._revoking(reason, force=force).revoke([value])

    async def _inspected_lock(self) -> LockInspect:
        return LockInspect.parse(await self._inspected("1"))

    def _decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, made so that each call acquires this first and releases it afterwards."""
        checked_function(self._primitive, function, for_asyncio=self._interlock._for_asyncio)
        checked_tag(self._primitive, self.name, function)

        async def locked(*args: Any, **kwargs: Any) -> Any:
            async with CallSection(self) as section:
                if (owner := self._interlock._current_owner()) is not None:
                    section.entered_by = weakref.ref(owner)
                await self._enter(section)
                return await self._call(function, *args, **kwargs)

        return decorated(function, locked, for_asyncio=self._interlock._for_asyncio)

    # Overridden by kinds of lockables; a multi calls these, too

    def _reenter(self) -> LeaseT | None:
        """The lease that this thread or task holds already, entered once more; None if it has to acquire one."""
        return None

    def _to_request(self) -> Resource:
        """The resource that an acquire asks for. Raises ConfigError if the server could never grant it."""
        return self._primitive

    # Entering a `with`

    def _check_not_inside(self, who: weakref.ref[Any]) -> None:
        """Refuse a caller that would wait for itself for ever. Raises Deadlock."""
        inside = self._inside.get(who)
        if inside is None or self._options.timeout == 0 or (lease := inside()) is None or lease._ended:
            return
        if grants := lease._lasting_grants():
            raise deadlock(self._primitive, kind_of_caller(who()), grants[0].attempt.place, way_out(self._primitive))

    async def _enter(self, section: Section) -> LeaseT:
        """Acquire the lease of a `with` for this section. After an error the caller must end the section."""
        who = section.entered_by
        if who is not None:
            self._check_not_inside(who)
        lease = section.lease = await self._acquire(UNSET)
        if not section.by_hand:
            lease._mark_in_with(section)
        if who is not None:
            self._inside[who] = weakref.ref(lease)
        if section.by_hand:
            self._by_hand.append(section)
        if who is not None:  # else any thread may run the body
            lease._begin(who)
        return lease

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the user's function returns; for asyncio, what awaiting that gives."""
        result = function(*args, **kwargs)
        for_asyncio = self._interlock._for_asyncio
        if for_asyncio:
            checked_awaitable(self._primitive, function, result)
            result = await result
        checked_result(self._primitive, function, result, for_asyncio=for_asyncio)
        return result


class LockCore(LockableCore[LockState, LeaseT]):
    """A lock by name; see Interlock.lock."""

    __slots__ = ()
    _state_of = staticmethod(parse_state)


class RLockCore(LockCore[LeaseT]):
    """A lock that its holder may acquire again; see Interlock.rlock."""

    __slots__ = ()
    _init_advice = "An Interlock makes it, as in Interlock(url).rlock(name)"
    _is_reentrant = True

    @property
    def _owner(self) -> Any:
        return self._primitive.owner_prefix or self._interlock._current_owner()

    def _reenter(self) -> LeaseT | None:
        leases = self._interlock._held_by_caller.of(self._owner, self._primitive.keys[0])
        held: list[Any] = [lease for lease in leases if lease._is_inside]
        # The newest: it took over from the others, of which some may not know that they are lost.
        entered: LeaseT | None = max(held, key=lambda lease: lease.fence)._reenter() if held else None
        return entered

    def _lease_of(self, core: Core, grant: Grant) -> Any:
        lease = super()._lease_of(core, grant)
        owner, key = self._owner, self._primitive.keys[0]
        self._interlock._held_by_caller.add(owner, key, lease)  # first: one of two threads sees the other's lease
        if self._primitive.owner_prefix:
            for other in self._interlock._held_by_caller.of(owner, key):
                if other.fence > grant.fence:
                    raise grant.error(TAKEN_OVER)
                if other.fence < grant.fence and not other._ended and other._core is core:  # else the server says so
                    core.ends.lose(other._grant, TAKEN_OVER)
        return lease

    def _check_not_inside(self, who: weakref.ref[Any]) -> None:
        """Refuse nobody: its holder may enter it again."""
