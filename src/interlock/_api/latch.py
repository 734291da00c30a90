"""A latch: a count that goes down to zero, once."""

from __future__ import annotations

from interlock._client import latch
from interlock.primitives.latch import LatchState, parse_state

from .named import BreakableCore
from .options import timeout_of


class LatchCore(BreakableCore[LatchState]):
    """A count that goes down to zero, once; see Interlock.latch."""

    __slots__ = ()
    _init_advice = "An Interlock makes it, as in Interlock(url).latch(name, count)"
    _state_of = staticmethod(parse_state)

    async def _count_down(self, n: int = 1) -> int:
        return await latch.count_down(self._session.core, self._primitive, n)

    async def _count(self) -> int:
        return await latch.count(self._session.core, self._primitive)

    async def _wait(self, timeout: float | None = None) -> None:
        await latch.wait(self._session.core, self._primitive, timeout_of(timeout, self._primitive))
