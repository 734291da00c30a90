"""Processes that use interlock, from the outside: start them, send them commands, stop them, kill them.

Each process runs programs/lock_client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

from harness.modes import until

PROGRAMS = Path(__file__).parent / "programs"


def state_of(pid: int) -> str:
    """The state of a process, as ps shows it: T is stopped, Z is a zombie; "" if there is no such process."""
    return _stat(pid)[0]


def parent_of(pid: int) -> int:
    """The id of the parent of this process."""
    return int(_stat(pid)[1])


def lives(pid: int) -> bool:
    """Whether there is such a process; a zombie does not live."""
    return state_of(pid) not in {"", "Z"}


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return [""]
    return text.rpartition(")")[2].split()  # the name of its program stands in brackets, and may have spaces


class LockProcess:
    """One process that runs lock_client.py."""

    @classmethod
    async def start(cls, mode, url: str | None = None, *more: str) -> LockProcess:
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAMS / "lock_client.py"), url or mode.url, mode.name, *more,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await self.answer()
        return self

    async def say(self, *command) -> None:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    async def answer(self):
        line = await self.process.stdout.readline()
        assert line, "the process ended"
        answer = json.loads(line)
        return answer.get("result", answer)

    async def do(self, *command):
        await self.say(*command)
        return await self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def stopped(self) -> None:
        """Stop the process, and wait until the kernel shows that it is stopped."""
        self.signal(signal.SIGSTOP)
        await until(lambda: state_of(self.process.pid) == "T")

    async def end(self, number: int | None = None) -> int:
        if number is not None and self.process.returncode is None:
            self.signal(number)
        self.process.stdin.close()
        code = await self.process.wait()
        self.process._transport.close()
        return code


@contextlib.asynccontextmanager
async def processes(mode, number: int, url: str | None = None, *more: str):
    """Start so many processes of this mode, on its server or that of `url`; kill them at the end."""
    started = [await LockProcess.start(mode, url, *more) for _ in range(number)]
    try:
        yield started
    finally:
        for process in started:
            await process.end(signal.SIGKILL)
