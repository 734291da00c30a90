"""The data that the locks protect: a server of its own, which stores the highest fence for each name.

Theory. No fault strikes this server. Sections that exclude all others write into it with their own fences, some also
after their lease is lost, as a holder does that was stopped after its last look at the lease. The guard of
`interlock.fence` compares and stores in one step, so it must refuse a fence that is lower than one that it has
accepted. It must never refuse a current holder.

The controller loads the guard of its own copy of interlock, and a worker only names it: so a worker that runs an older
version uses the same guard.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import hiredis

if TYPE_CHECKING:
    from pathlib import Path

FILE: Final = "store"  # in the directory of a history: where the store is
KEEP_MS: Final = 3_600_000  # for which the store remembers a fence: longer than any history
DONE: Final = 1  # as in guard.lua
SILENCE: Final = 60.0  # seconds without an answer, on a machine that is very busy


class StoreServer:
    """The store, as the controller starts and ends it."""

    def __init__(self, kind: str) -> None:
        from harness.servers import Node  # here: a worker may run a version of interlock without what this imports

        self.node = Node(kind)

    def start(self, directory: Path) -> None:
        """Start the server, and write into the directory where it is."""
        from harness.topology.group import ask
        from interlock.primitives.scripts import load

        self.node.start()
        sha = ask(self.node, "SCRIPT", "LOAD", load("guard", "interlock.fence").source)
        (directory / FILE).write_text(json.dumps({"socket": str(self.node.socket), "sha": sha}))

    def stop(self) -> None:
        self.node.stop()


class Store:
    """The store, as the threads of a worker process write into it."""

    def __init__(self, directory: Path) -> None:
        about = json.loads((directory / FILE).read_text())
        self._socket, self._sha = about["socket"], about["sha"]
        self._of_thread = threading.local()

    def write(self, name: str, fence: int) -> bool:
        """Write with this fence. Returns False if the store has refused the write, since it knows a higher fence."""
        return bool(self._ask("EVALSHA", self._sha, "1", f"fence:{name}", str(fence), str(KEEP_MS))[0] == DONE)

    def _ask(self, *words: str) -> Any:
        connection = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = _Connection(self._socket)
        return connection.ask(words)


class _Connection:
    def __init__(self, path: str) -> None:
        self._reader: Any = hiredis.Reader()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SILENCE)
        self._socket.connect(path)

    def __del__(self) -> None:
        self._socket.close()

    def ask(self, words: tuple[str, ...]) -> Any:
        self._socket.sendall(hiredis.pack_command(words))
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionError("the store has gone")
            self._reader.feed(data)
        if isinstance(reply, Exception):
            raise reply
        return reply
