"""An Interlock for asyncio that closes itself with each event loop, for drop-ins and fixtures, which own no loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING

from interlock.aio import Interlock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from interlock._protocol.server import Server

__all__ = ["SelfClosingInterlock"]


class SelfClosingInterlock(Interlock):
    """Used in an event loop, it stays open until that loop ends, or until `close_here()` or `close_in_idle_loops()`.

    asyncio.run, asyncio.Runner, pytest-asyncio and anyio end the asynchronous generators of a loop before they close
    the loop. So a generator that is suspended in the loop can close what this Interlock has there.
    """

    def _start(self) -> None:
        super()._start()
        # Loops only know their generators weakly.
        self._closing: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None]] = (
            weakref.WeakKeyDictionary()
        )

    def _open_server(self) -> Server:
        loop = asyncio.get_running_loop()
        if loop not in self._closing:
            for former in [each for each in self._closing if each.is_closed()]:  # one that did not end its generators
                self._closing.pop(former, None)
            self._closing[loop] = closing = self._close_at_end(loop)
            with contextlib.suppress(StopIteration):  # the generator is suspended from here on
                closing.__anext__().send(None)
        return super()._open_server()

    async def _close_at_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._closing.pop(loop, None)
            await self.close_here()

    async def close_here(self) -> None:
        """Close what this Interlock has in the running loop. Other loops, and this one, may go on to use it."""
        await self._end(self._last_session())

    def close_in_idle_loops(self) -> None:
        """Close what this Interlock has in each loop that is neither running nor ended."""
        for loop in list(self._sessions):
            if not loop.is_closed() and not loop.is_running():
                loop.run_until_complete(self.close_here())
