"""A server that a test may kill, start again and pause."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Final

from interlock.embedded import Server, _processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["BreakableServer"]

START_TIMEOUT: Final = 10.0  # seconds


class BreakableServer(Server):
    """A private server (see `interlock.embedded.Server`) that a test may kill, start again and pause.

    Without `config` the server stores nothing on disk, so after `restart()` it is empty, like a cache. With
    `config={"appendonly": "yes", "appendfsync": "always"}` it then has every write that it acknowledged.
    """

    def __init__(self, *, binary: str | Path | None = None, config: Mapping[str, str] | None = None) -> None:
        super().__init__(binary=binary, config=config)
        self._command: Sequence[str | Path] = ()

    @property
    def running(self) -> bool:
        """Whether the server was started, and neither killed nor stopped since. A paused server runs, too."""
        return self in _processes and _processes[self][-1].poll() is None

    def kill(self) -> None:
        """End the server as a crash does (SIGKILL). Its directory stays."""
        process = _processes[self][-1]
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()

    def restart(self, *, timeout: float = START_TIMEOUT) -> None:
        """Start the server again after `kill()`, at the same address, and wait until it has loaded its keys.

        Raises `Unavailable` if that takes longer than `timeout` seconds.
        """
        watcher, dead = _processes[self]
        assert dead.poll() is not None, "the server was not killed: call kill() first"
        _processes[self].remove(dead)
        self.socket.unlink(missing_ok=True)
        self._run(self._started(), self._command, watcher.pid, time.monotonic() + timeout)

    def pause(self) -> None:
        """Stop the server's process (SIGSTOP): it answers nothing until `resume()`, and its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        os.kill(self.pid, signal.SIGCONT)

    def _run(self, home: Path, command: Sequence[str | Path], group: int, deadline: float) -> None:
        self._command = command
        super()._run(home, command, group, deadline)
