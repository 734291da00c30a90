"""Several leases as one."""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .lease import LeaseCore, LeaseState, WatchedCore, described_state
from .misuse_errors import MULTI_LEASE_HINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock._client.acquiring import Core
    from interlock._client.grant import Grant
    from interlock.errors import LeaseLost

    from .section import Section


class MultiLeaseCore(WatchedCore):
    """Several leases as one."""

    __slots__ = ("__weakref__", "_leases", "_name", "_on_lost_call", "_told")
    _hints = MULTI_LEASE_HINTS

    def __init__(self, core: Core, on_lost: Callable[[Any], object] | None, name: str, leases: dict[str, Any]) -> None:
        self._made_by = core
        self._lost_event = self._end_event = None
        self._bodies = ()
        self._on_lost_call = on_lost
        self._name = name
        self._leases: dict[str, LeaseCore] = leases
        self._told = False
        for lease in leases.values():
            lease._multi_leases = (*(each for each in lease._multi_leases if each()), weakref.ref(self))
        if self.state is LeaseState.LOST:  # the loss is not reported here yet
            self._on_lost()

    @property
    def name(self) -> str:
        """The names that were locked, in the order of their keys."""
        return self._name

    def _part(self, name: str) -> Any:
        if name not in self._leases:
            raise KeyError(f"multi {self._name!r} has no lock {name!r}. It has {', '.join(map(repr, self._leases))}")
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

    def _remaining(self) -> float:
        return min(lease._remaining() for lease in self._leases.values())

    def _ensure(self) -> None:
        for lease in self._leases.values():
            lease._ensure()

    async def _release(self) -> bool:
        ours = await self._release_each([*self._leases.values()])
        for each in ours:
            if isinstance(each, BaseException):
                raise each
        return all(ours)

    async def _release_each(self, leases: list[LeaseCore]) -> list[bool | BaseException]:
        """Release each, whatever becomes of the others; in asyncio all at once."""
        released: list[bool | BaseException] = []
        for lease in leases:
            try:
                released.append(await lease._release())
            except BaseException as error:  # noqa: BLE001 (it is raised when the others were released, too)
                released.append(error)
        return released

    async def _extend(self, ttl: float) -> None:
        for lease in self._leases.values():
            await lease._extend(ttl)

    async def _enter(self) -> None:
        try:
            await super()._enter()
        except BaseException:
            await self._release()
            raise

    async def _leave(self, error: BaseException | None) -> None:
        now = error
        try:
            for lease in reversed(self._leases.values()):
                try:
                    await lease._leave(now)
                except BaseException as raised:  # noqa: BLE001 (it is raised when the others were left, too)
                    if now is not None and raised.__context__ is None:
                        raised.__context__ = now
                    now = raised
            if now is not None and now is not error:
                raise now
        finally:
            now = error = None  # their tracebacks refer to this frame

    def _leases_of(self, name: str, core: Core) -> list[LeaseCore]:
        return [found for lease in self._leases.values() for found in lease._leases_of(name, core)]

    def _mark_in_with(self, section: Section | None = None) -> None:
        for lease in self._leases.values():
            lease._mark_in_with(section)

    def _revocation(self) -> LeaseLost | None:
        return next((lost for lease in self._leases.values() if (lost := lease._revocation()) is not None), None)

    def _lasting_grants(self) -> list[Grant]:
        return [grant for lease in self._leases.values() for grant in lease._lasting_grants()]

    @property
    def _ended(self) -> bool:
        return any(lease._ended for lease in self._leases.values())

    def _holds(self) -> list[int]:
        return [lease._depth for lease in self._leases.values()]

    def _release_in_background(self, before: list[int] | None, *, later: bool = False) -> None:
        """Give back in the background what was not given back of each; see LeaseCore."""
        for i, lease in enumerate(self._leases.values()):
            lease._release_in_background(before[i] if before else None, later=later)

    def _on_lost(self) -> None:
        """Report to the holder that one of them was lost. Calls `on_lost` once."""
        super()._on_lost()
        if self._on_lost_call is not None and not self._told:
            self._told = True
            self._core.runtime.run_callback(self._on_lost_call, self)

    @property
    def _log_fields(self) -> dict[str, object]:
        return {"lock": self._name, "kind": "multi", "fence": None, "token": None}

    def __repr__(self) -> str:
        return f"<MultiLease {self._name!r} {described_state(self.state, self._remaining())}>"
