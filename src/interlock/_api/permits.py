"""What several hold at once: a semaphore, and the two sides of a read-write lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock._client import permits as client
from interlock._client.error_texts import about
from interlock._protocol.unset import Unset
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives import permits as script
from interlock.primitives.permits import PermitInspect, SemaphoreState

from .lock import LockableCore
from .misuse_errors import RWLOCK_HINTS, made_by_interlock
from .named import NamedCore
from .options import UNSET, LeaseT, timeout_of

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from interlock._client.acquiring import Core
    from interlock._client.grant import AcquireOptions, Grant
    from interlock._protocol.resource import Resource


class PermitsCore(LockableCore[SemaphoreState, LeaseT]):
    """Something that several hold: a semaphore, or one side of a read-write lock."""

    __slots__ = ()
    _state_of = staticmethod(script.parse_state)

    def _check_not_inside(self, who: weakref.ref[Any]) -> None:
        """One caller may hold several permits."""

    async def _revoke_holders(self, reason: str, *, force: bool) -> bool:
        marker = PermitInspect.parse(await self._inspected("1")).marker
        tokens = await client.every_holder(self._session.core, self._primitive)
        if marker and force:
            tokens.insert(0, marker)
        return await self._revoking(reason, force=force).revoke(tokens)


class SemaphoreCore(PermitsCore[LeaseT]):
    """Up to a limit of permits; see Interlock.semaphore."""

    __slots__ = ()
    _init_advice = "An Interlock makes it, as in Interlock(url).semaphore(name, limit)"

    async def _acquire(self, timeout: float | Unset | None = UNSET, *, permits: int = 1) -> LeaseT:
        core, options = self._session.core, self._options
        timeout = options.timeout if isinstance(timeout, Unset) else timeout_of(timeout, self._primitive)
        resource = script.with_permits(self._primitive, permits)
        lease: LeaseT = await core.acquire(core.attempt(resource, options, timeout, self._lease_of))
        return lease

    async def _try_acquire(self, *, permits: int = 1) -> LeaseT | None:
        try:
            return await self._acquire(0, permits=permits)
        except AcquireTimeout:
            return None

    async def _available(self) -> int:
        return await client.available(self._session.core, self._primitive)

    async def _set_limit(self, limit: int) -> None:
        self._primitive = await client.set_limit(self._session.core, self._primitive, limit)


class RWSideCore(PermitsCore[LeaseT]):
    """One side of a read-write lock, beside what this thread or task holds of the same lock."""

    __slots__ = ()
    _init_advice = "An Interlock makes it, as in Interlock(url).rwlock(name).read()"
    _asks_by_caller = True
    _lease_type: Callable[[Core, Grant], LeaseT]

    def _to_request(self) -> Resource:
        interlock = self._interlock
        held = interlock._held_by_caller.of(interlock._current_owner(), self._primitive.keys[0])
        try:
            return script.beside_own_leases(self._primitive, held)
        except ConfigError as error:  # a reader that would write
            raise about(self._primitive, error) from None

    def _lease_of(self, core: Core, grant: Grant) -> Any:
        lease = self._lease_type(core, grant)
        self._interlock._held_by_caller.add(self._interlock._current_owner(), self._primitive.keys[0], lease)
        return lease


class RWLockCore(NamedCore[SemaphoreState]):
    """Many readers or one writer; see Interlock.rwlock."""

    __slots__ = ("_options",)
    _init_advice = "An Interlock makes it, as in Interlock(url).rwlock(name)"
    _state_of = staticmethod(script.parse_state)

    @made_by_interlock
    def __init__(self, interlock: Any, resource: Resource, options: AcquireOptions) -> None:
        self._describe(interlock, resource)
        self._options = options

    _hints = RWLOCK_HINTS
    if not TYPE_CHECKING:  # a type checker refuses these without them

        def __call__(self, _: object) -> None:
            """Refuse to decorate with both sides."""
            raise TypeError(f"{self._primitive}: say which side: `@rwlock.read()` or `@rwlock.write()`")

        def __enter__(self) -> None:
            """Refuse a `with` of both sides."""
            raise TypeError(f"{self._primitive}: say which side: `with rwlock.read():` or `with rwlock.write():`")

        def __exit__(self, *_: object) -> None: ...

        async def __aenter__(self) -> None:
            """Refuse an `async with` of both sides."""
            raise TypeError(f"{self._primitive}: say which side: `async with rwlock.read():` or `rwlock.write():`")

        async def __aexit__(self, *_: object) -> None: ...

    def _to_write(self) -> Resource:
        """What a writer asks the server for."""
        return script.write_resource(self.name, self._interlock.prefix)

    async def _revoke(self, reason: str, force: bool) -> bool:
        return await RWSideCore[Any](self._interlock, self._primitive, self._options)._revoke(reason, force)
