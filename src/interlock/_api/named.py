"""What every lockable, latch and barrier has: a name, and what the server knows under it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from interlock._client.inspecting import inspect
from interlock._people.revocation import Revoking, reason_text
from interlock._protocol.forks import KNOWN, notice
from interlock.errors import ConfigError
from interlock.primitives.messages import BreakCall

from .face import Face
from .misuse_errors import BREAKABLE_HINTS, NoWith, made_by_interlock, named

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.resource import Resource
    from interlock._session.session import Session
    from interlock.primitives.messages import Call

StateT = TypeVar("StateT")


class NamedCore(Face, Generic[StateT]):
    """Something that a name stands for, on this Interlock: safe to share between threads and tasks."""

    __slots__ = ("__weakref__", "_interlock", "_primitive")
    _init_advice: ClassVar[str] = (
        "An Interlock makes it, as in Interlock(url).lock(name). What redis-py's client.lock() takes as lock_class= is "
        "Lock or AsyncLock of interlock.compat.redis_py"
    )
    _instead_of_pickling = "send its name, and make it in each process with the Interlock of that process"
    _name_may_be_format: ClassVar[bool] = False
    """Whether braces in its name are fields, if it decorates a function."""
    _state_of: Callable[[str, Any], StateT]
    """Makes a state of the name and the server's reply."""

    @made_by_interlock
    def __init__(self, interlock: Any, resource: Resource) -> None:
        self._describe(interlock, resource)

    def _describe(self, interlock: Any, resource: Resource) -> None:
        if interlock._is_quorum:
            interlock._check_on_a_quorum(resource.kind)
        self._interlock = interlock
        self._primitive = resource

    @property
    def name(self) -> str:
        """The name, without the prefix."""
        return self._primitive.name

    async def _inspect(self) -> StateT:
        return await self._state()

    async def _state(self) -> StateT:
        return self._state_of(self.name, await self._inspected("100"))

    @property
    def _session(self) -> Session:
        if not KNOWN[0]:
            notice()
        try:
            session: Session = self._interlock._session
        except ConfigError as error:  # it is closed
            raise self._about_this(error) from None
        return session

    def _about_this(self, error: ConfigError) -> ConfigError:
        return named(error, str(self._primitive), self.name)

    async def _inspected(self, max_waiters: str) -> Any:
        return await inspect(self._session.core, self._primitive, max_waiters)

    async def _query(self, call: Call) -> Any:
        return await self._session.core.requests.query(self._primitive, *call.encode())

    def _revoking(self, reason: str, *, force: bool) -> Revoking:
        """A revocation of this. Raises ConfigError for a reason that says nothing."""
        return Revoking(self._session.core, self._primitive, reason_text(self._primitive, reason), force=force)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.name!r}>"


class BreakableCore(NamedCore[StateT], NoWith):
    """Something that several wait for, and that can be broken for all of them: a latch or a barrier."""

    __slots__ = ()
    _hints = BREAKABLE_HINTS
    _instead_of_with = "nobody holds it. Call wait()"

    async def _revoke(self, reason: str) -> bool:
        revoking = self._revoking(reason, force=False)
        call = BreakCall(f"revoke/{secrets.token_hex(16)}", f"it was revoked: {revoking.why}")
        return await revoking.send([], [call])
