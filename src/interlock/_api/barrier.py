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
        """Wait until all parties have arrived. Returns which arrival this was, from 0 to parties - 1.

        `timeout` is in seconds: None waits for ever. A party whose time is over breaks the barrier for all that wait,
        and so does a party that dies, is cancelled or is interrupted. Raises BrokenBarrier, until `reset()`;
        Unavailable or ConfigError.
        """
        return await barrier.wait(self._session.core, self._primitive, timeout_of(timeout, self._primitive))

    async def _reset(self) -> None:
        """Begin anew: each party that waits gets BrokenBarrier, and parties that arrive from now on wait again.

        Raises Unavailable or ConfigError.
        """
        await barrier.reset(self._session.core, self._primitive)
