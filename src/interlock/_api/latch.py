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
        """Count down by `n`, not below zero. Returns how many are left.

        Raises Unavailable if no answer came, and then the server may have counted; BrokenBarrier if the latch was
        revoked; ConfigError.
        """
        return await latch.count_down(self._session.core, self._primitive, n)

    async def _count(self) -> int:
        """Return how many are left now. Raises Unavailable or ConfigError."""
        return await latch.count(self._session.core, self._primitive)

    async def _wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left; return at once if that is so already.

        `timeout` is in seconds: None waits for ever, 0 does not wait. Raises AcquireTimeout; BrokenBarrier if the
        latch was revoked, or is gone from the server; Unavailable or ConfigError.
        """
        await latch.wait(self._session.core, self._primitive, timeout_of(timeout, self._primitive))
