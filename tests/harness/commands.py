"""Programs that a test runs as a user would: a worker, a web server, a beat.

Each has a process group of its own, writes into one file, and ends with the test: also if the test is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from harness.modes import wait_until
from harness.processes import lives, parent_of

_PR_SET_PDEATHSIG = 1


class Command:
    """A running program. `output` is all that it and its children have written so far."""

    def __init__(self, argv: list[str], *, cwd: Path, log: Path, env: dict[str, str] | None = None) -> None:
        self.argv, self.log = argv, log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}, preexec_fn=_die_with_parent,  # noqa: PLW1509
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def says(self, pattern: str, within: float = 60.0, times: int = 1) -> list[str]:
        """Wait until this pattern is in the output so many times. Returns the matches."""
        found: list[str] = []

        def seen() -> bool:
            found[:] = [each[0] for each in re.finditer(pattern, self.output)]
            if len(found) < times and not self.running:
                raise AssertionError(f"{self} ended without {pattern!r}:\n{self.output}")
            return len(found) >= times

        try:
            wait_until(seen, within)
        except AssertionError as error:
            raise AssertionError(f"{self}, {pattern!r}: {error}\n{self.output}") from None
        return found

    def children(self) -> list[int]:
        """The processes that it has started, and that live."""
        pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
        found = []
        for pid in pids:
            with contextlib.suppress(IndexError):  # it has ended meanwhile
                if parent_of(pid) == self.pid and lives(pid):
                    found.append(pid)
        return sorted(found)

    def send(self, number: int) -> None:
        """Send a signal to its first process alone."""
        self.process.send_signal(number)

    def ended(self, within: float = 30.0) -> int:
        """Wait until it has ended by itself. Returns its exit status."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {within} s:\n{self.output}") from None

    def end(self, number: int = signal.SIGTERM, within: float = 30.0) -> int:
        """Send a signal, and wait until it has ended. Returns its exit status."""
        if self.running:
            self.send(number)
        return self.ended(within)

    def kill_all(self) -> None:
        """End it and all processes of its group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def __str__(self) -> str:
        return " ".join(self.argv)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def python(*args: str | Path) -> list[str]:
    """The words of a command that this Python runs."""
    return [sys.executable, *map(str, args)]
