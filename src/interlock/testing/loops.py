"""An Interlock for asyncio that closes itself with each event loop, since a pytest fixture does not know the loop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from interlock.aio import Interlock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from interlock._protocol.types import Server

__all__ = ["SelfClosingInterlock"]


class SelfClosingInterlock(Interlock):
    """Used in an event loop, it stays open until that loop ends, or until `close_in_idle_loops()`.

    Each loop that is ended by asyncio.run, asyncio.Runner, pytest-asyncio or anyio ends its asynchronous generators
    before. So a generator that is suspended in the loop is where to close what this Interlock has there.
    """

    def _start(self) -> None:
        super()._start()
        self._closing: list[AsyncGenerator[None]] = []  # loops only know their generators weakly

    def _open_server(self) -> Server:
        closing = self._close_at_end()
        with contextlib.suppress(StopIteration):  # the generator is suspended from here on
            closing.__anext__().send(None)
        self._closing.append(closing)
        return super()._open_server()

    async def _close_at_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await self._close_here()

    async def _close_here(self) -> None:
        """Close what this Interlock has in the running loop. Other loops may go on to use it."""
        session = self._last_session()
        if session is not None:
            await session.close()
            await session.server.close()
            await session.runtime.close()

    def close_in_idle_loops(self) -> None:
        """Close what this Interlock has in each loop that is neither running nor ended."""
        for loop in list(self._sessions):
            if not loop.is_closed() and not loop.is_running():
                loop.run_until_complete(self._close_here())
