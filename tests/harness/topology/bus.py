"""The links between servers, so that a test can cut them, or let them fall silent.

An ACL closes connections, and does not concern what the nodes of a cluster say to each other of who is alive. So each
server announces a port of ours to the others, which leads there; and it connects from an address of its own, so that we
see which server it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Final

_SOURCES: Final = "127.0.1"


class Bus:
    """Forwards between the servers, in a thread, from `start()` until `stop()`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)
        self._cut: set[frozenset[int]] = set()
        self._silent: set[frozenset[int]] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and all connections that it forwards."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    @staticmethod
    def source(number: int) -> str:
        """The address from which this server is to connect."""
        return f"{_SOURCES}.{number}"

    def lead(self, number: int, to: int) -> int:
        """A port that leads to this server, or to its bus, which listens at the port `to`."""
        listener = socket.create_server(("127.0.0.1", 0))
        asyncio.run_coroutine_threadsafe(self._serve(listener, number, to), self._loop)
        return int(listener.getsockname()[1])

    def cut(self, one: int, other: int) -> None:
        """Cut the links between these two."""
        self._cut.add(frozenset({one, other}))

    def mute(self, one: int, other: int) -> None:
        """Let nothing arrive between these two, not even the end of a connection: as if packets were dropped."""
        self._silent.add(frozenset({one, other}))

    def mend(self) -> None:
        """Let all reach each other again, over new connections."""
        self._cut.clear()
        self._silent.clear()

    async def _serve(self, listener: socket.socket, number: int, to: int) -> None:
        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire = frozenset({_number(writer.get_extra_info("peername")[0]), number})
            with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
                there, back = await asyncio.open_connection("127.0.0.1", to)
                with contextlib.closing(back):
                    both = [asyncio.ensure_future(self._pass(*way, wire)) for way in ((reader, back), (there, writer))]
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    for each in both:
                        each.cancel()

        async with await asyncio.start_server(met, sock=listener) as server:
            await server.serve_forever()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: frozenset[int]) -> None:
        lost = False
        with contextlib.suppress(OSError):
            while (data := await reader.read(65536)) and wire not in self._cut:
                lost |= wire in self._silent
                if not lost:
                    writer.write(data)
                    await writer.drain()
                elif wire not in self._silent:
                    return  # the rest would make no sense
        while wire in self._silent:
            await asyncio.sleep(0.02)


def _number(source: str) -> int:
    """Which server connects from this address; 0: a client, or another one that has no wires."""
    prefix, _, number = source.rpartition(".")
    return int(number) if prefix == _SOURCES else 0
