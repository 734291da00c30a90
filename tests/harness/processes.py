"""Processes of their own, from the outside: started, told what to do, stopped, killed.

Inside runs programs/lock_client.py.
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


class Actor:
    """A process that runs lock_client.py, and its end."""

    @classmethod
    async def start(cls, kit, url: str | None = None) -> Actor:
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAMS / "lock_client.py"), url or kit.url, kit.mode,
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
        """Until the kernel says so."""
        self.signal(signal.SIGSTOP)
        await until(lambda: Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ")[1].startswith("T"))

    async def end(self, number: int | None = None) -> int:
        if number is not None and self.process.returncode is None:
            self.signal(number)
        self.process.stdin.close()
        code = await self.process.wait()
        self.process._transport.close()
        return code


@contextlib.asynccontextmanager
async def actors(kit, number: int, url: str | None = None):
    """So many of them, on the kit's server or on that of `url`; killed at the end."""
    started = [await Actor.start(kit, url) for _ in range(number)]
    try:
        yield started
    finally:
        for actor in started:
            await actor.end(signal.SIGKILL)
