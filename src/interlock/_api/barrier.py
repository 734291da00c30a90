"""A barrier: several parties wait for each other, again and again."""

from __future__ import annotations

from interlock._client import barrier
from interlock.primitives.barrier import BarrierState, parse_state

from .named import BreakableCore
from .options import timeout_of


class BarrierCore(BreakableCore[BarrierState]):
    """Several parties that wait for each other; see Interlock.barrier."""

    __slots__ = ()
    _init_advice = "An Interlock makes it, as in Interlock(url).barrier(name, parties)"
    _state_of = staticmethod(parse_state)

    async def _wait(self, timeout: float | None = None) -> int:
        return await barrier.wait(self._session.core, self._primitive, timeout_of(timeout, self._primitive))

    async def _reset(self) -> None:
        await barrier.reset(self._session.core, self._primitive)
