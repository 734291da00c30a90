"""The trip of an acquire: which functions of which files a reader opens to follow one, from the call to the lease.

    scripts/trip

Each mode acquires a lock that nobody else wants, from an Interlock that is connected and whose server knows the
script. The table shows each function of `src/interlock` that the call enters, in order, indented by its depth. The
sums count functions and files twice: with the transports, and without them (nor the servers and the quarantine above
them), since a reader of the algorithm may take these as given. The event loop calls `data_received` itself, so that
call stands at the left edge. Three things are no step: the `__init__` that Python makes of the fields of a data class,
the clock, and the margin of a ttl, which is computed once for each ttl.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import interlock
import interlock.aio
from interlock.embedded import Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

SOURCE: Final = str(Path(interlock.__file__).parent) + "/"
TRANSPORTS: Final = ("_transports/", "_servers/", "_connect/", "_quarantine/")  # and what they stand on


class Size(NamedTuple):
    """How much there is to read."""

    files: int
    functions: int


# Without transports. No trip may grow beyond its ceiling; a change that shortens a trip lowers its ceiling.
GOAL: Final = Size(files=6, functions=16)
# ADR 40 has raised both by one file: how a request is sent, and sent again, is a question of its own.
CEILINGS: Final = {"threads": Size(files=12, functions=19), "asyncio": Size(files=10, functions=18)}


class Step(NamedTuple):
    """One call of a function of `src/interlock`."""

    depth: int
    file: str
    function: str


class Recorder:
    """A profile function that records a step for each frame of `src/interlock`; a resumed coroutine is no new step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._frames: list[
            FrameType
        ] = []  # keeps them alive, so that no later frame has the identity of an earlier one

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(SOURCE) or any(frame is each for each in self._frames):
            return
        self._frames.append(frame)
        depth, caller = 0, frame.f_back
        while caller is not None:
            depth += caller.f_code.co_filename.startswith(SOURCE)
            caller = caller.f_back
        self.steps.append(Step(depth, path.removeprefix(SOURCE), frame.f_code.co_qualname))


TRIES: Final = 5  # an acquire may find the worker of ends asleep for too long, and wake it: the shortest trip counts


def of_threads(url: str) -> list[Step]:
    """The trip of an acquire that blocks its thread."""
    trips: list[list[Step]] = []
    with interlock.Interlock(url) as locks:
        locks.lock("warm").acquire().release()
        lock = locks.lock("trip")
        for _ in range(TRIES):
            record = Recorder()
            sys.setprofile(record)
            try:
                lease = lock.acquire()
            finally:
                sys.setprofile(None)
            lease.release()
            trips.append(record.steps)
    return min(trips, key=len)


def of_asyncio(url: str) -> list[Step]:
    """The trip of an acquire that a task awaits."""
    trips: list[list[Step]] = []

    async def main() -> None:
        async with interlock.aio.Interlock(url) as locks:
            await (await locks.lock("warm").acquire()).release()
            lock = locks.lock("trip")
            for _ in range(TRIES):
                record = Recorder()
                sys.setprofile(record)
                try:
                    lease = await lock.acquire()
                finally:
                    sys.setprofile(None)
                await lease.release()
                trips.append(record.steps)

    asyncio.run(main())
    return min(trips, key=len)


TRIPS: Final = {"threads": of_threads, "asyncio": of_asyncio}


def without_transports(steps: Sequence[Step]) -> list[Step]:
    """The steps outside the transports."""
    return [step for step in steps if not step.file.startswith(TRANSPORTS)]


def size(steps: Sequence[Step]) -> Size:
    """How many files and functions these steps enter, each counted once."""
    return Size(len({step.file for step in steps}), len({(step.file, step.function) for step in steps}))


def table(steps: Sequence[Step]) -> str:
    """A line for each step: its file, and its function, indented by its depth."""
    width = max(len(step.file) for step in steps)
    return "\n".join(f"{step.file:{width}}  {'  ' * step.depth}{step.function}" for step in steps)


def sums(mode: str, steps: Sequence[Step]) -> str:
    """The calls, functions and files of a trip, with its ceiling and the goal."""
    lines = [f"{'':18}   calls   functions   files"]
    for name, counted in (("with transports", steps), ("without transports", without_transports(steps))):
        files, functions = size(counted)
        lines.append(f"{name:18}{len(counted):8}{functions:12}{files:8}")
    for name, limit in (("  ceiling", CEILINGS[mode]), ("  goal", GOAL)):
        lines.append(f"{name:18}{'':8}{limit.functions:12}{limit.files:8}")
    return "\n".join(lines)


def main() -> None:
    """Prints the trip of each mode."""
    with Server() as server:
        for mode, trip in TRIPS.items():
            steps = trip(server.url)
            print(f"{mode}\n\n{table(steps)}\n\n{sums(mode, steps)}\n")


if __name__ == "__main__":
    main()
