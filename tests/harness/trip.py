"""The trips of an acquire: which functions of which files a reader opens to follow one, from the call to the lease.

    scripts/trip

There are two trips in each mode, with an Interlock that is connected and whose server knows the script.

- *uncontended*: nobody else wants the lock.
- *contended*: another client holds the lock. The caller is queued, and waits; then the holder releases, a push wakes
  the caller, and its next request confirms the handover. The trip has all that the caller's thread or task enters, and
  what reads the push: the thread of the subscription, or the callbacks of the event loop. It has nothing of workers,
  which send heartbeats meanwhile.

The table shows each function of `src/interlock` that a trip enters, in order, indented by its depth. The sums count
functions and files twice: with the transports, and without them (nor the servers and the quarantine above them), since
a reader of the algorithm may take these as given. The event loop calls `data_received` itself, so that call stands at
the left edge. Three things are no step: the `__init__` that Python makes of the fields of a data class, the clock, and
the margin of a ttl, which is computed once for each ttl.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import interlock
import interlock.aio
from interlock.embedded import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import FrameType

    from interlock._client.waiting import Waiters

SOURCE: Final = str(Path(interlock.__file__).parent) + "/"
TRANSPORTS: Final = ("_transports/", "_servers/", "_connect/", "_quarantine/")  # and what they stand on
LISTENER: Final = "interlock-listener"  # the thread that reads pushes
TRIES: Final = 5  # an acquire may find the worker of ends asleep for too long, and wake it: the shortest trip counts


class Size(NamedTuple):
    """How much there is to read."""

    files: int
    functions: int


class Step(NamedTuple):
    """One call of a function of `src/interlock`."""

    depth: int
    file: str
    function: str


class Recorder:
    """A profile function that records a step for each frame of `src/interlock`; a resumed coroutine is no new step.

    It calls `is_counted` where a frame begins: does this thread or task belong to the trip?
    """

    def __init__(self, is_counted: Callable[[], bool] = lambda: True) -> None:
        self.is_counted = is_counted
        self._steps: list[Step] | None = None  # None between two trips
        self._frames: set[FrameType] = set()  # keeps them alive, so that no later frame is taken for an earlier one

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        if (steps := self._steps) is not None and self.is_counted():
            self._record(frame, steps)

    def _record(self, frame: FrameType, steps: list[Step]) -> int:
        """Record this frame, after its callers, and return its depth. The listener's have begun before the trip."""
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCE):
            caller = caller.f_back
        depth = 0 if caller is None else self._record(caller, steps) + 1
        if frame not in self._frames:
            self._frames.add(frame)
            path = frame.f_code.co_filename.removeprefix(SOURCE)
            steps.append(Step(depth, path, frame.f_code.co_qualname))
        return depth

    @contextmanager
    def trip(self) -> Generator[list[Step], None, None]:
        """Record what this thread enters meanwhile, and what threads enter that began with this profile function."""
        steps: list[Step] = []
        self._steps = steps
        sys.setprofile(self)
        try:
            yield steps
        finally:
            sys.setprofile(None)
            self._steps = None
            self._frames.clear()


def of_threads(url: str) -> list[Step]:
    """The trip of an acquire that blocks its thread, for a lock that nobody else wants."""
    trips: list[list[Step]] = []
    with interlock.Interlock(url) as locks:
        locks.lock("warm").acquire().release()
        lock = locks.lock("trip")
        for _ in range(TRIES):
            with Recorder().trip() as steps:
                lease = lock.acquire()
            lease.release()
            del lease  # else the next trip drops it
            trips.append(steps)
    return min(trips, key=len)


def of_asyncio(url: str) -> list[Step]:
    """The trip of an acquire that a task awaits, for a lock that nobody else wants."""
    trips: list[list[Step]] = []

    async def main() -> None:
        async with interlock.aio.Interlock(url) as locks:
            await (await locks.lock("warm").acquire()).release()
            lock = locks.lock("trip")
            for _ in range(TRIES):
                with Recorder().trip() as steps:
                    lease = await lock.acquire()
                await lease.release()
                del lease  # else the next trip drops it
                trips.append(steps)

    asyncio.run(main())
    return min(trips, key=len)


class Holder:
    """Holds the lock of a trip, in a thread and a client of its own, until one of these waiters waits for its event."""

    def __init__(self, url: str, waiters: Waiters) -> None:
        self._url = url
        self._waiters = waiters
        self._holds = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holder")

    def __enter__(self) -> None:
        self._thread.start()
        assert self._holds.wait(30)

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        with interlock.Interlock(self._url) as others, others.lock("trip"):
            self._holds.set()
            while "lock:trip" not in self._waiters.queues:
                time.sleep(0.001)


def contended_of_threads(url: str) -> list[Step]:
    """The trip of an acquire that blocks its thread until a push wakes it."""
    caller, trips = threading.current_thread(), list[list[Step]]()
    record = Recorder(lambda: threading.current_thread() is caller or threading.current_thread().name == LISTENER)
    threading.setprofile(record)  # for the listener
    try:
        with interlock.Interlock(url) as locks:
            lock, waiters = locks.lock("trip"), locks._session.waiters
            with Holder(url, waiters):
                lock.acquire().release()  # subscribes
            for _ in range(TRIES):
                with Holder(url, waiters):
                    pushes = waiters.pushes
                    with record.trip() as steps:
                        lease = lock.acquire()
                lease.release()
                del lease  # else the next trip drops it
                assert waiters.pushes == pushes + 1
                trips.append(steps)
    finally:
        threading.setprofile(None)
    return min(trips, key=len)


def contended_of_asyncio(url: str) -> list[Step]:
    """The trip of an acquire that a task awaits until a push wakes it."""
    trips: list[list[Step]] = []

    async def main() -> None:
        caller = asyncio.current_task()
        record = Recorder(lambda: asyncio.current_task() in (caller, None))  # None: a callback of the loop
        async with interlock.aio.Interlock(url) as locks:
            lock, waiters = locks.lock("trip"), locks._session.waiters
            with Holder(url, waiters):
                await (await lock.acquire()).release()  # subscribes
            for _ in range(TRIES):
                with Holder(url, waiters):
                    pushes = waiters.pushes
                    with record.trip() as steps:
                        lease = await lock.acquire()
                await lease.release()
                del lease  # else the next trip drops it
                assert waiters.pushes == pushes + 1
                trips.append(steps)

    asyncio.run(main())
    return min(trips, key=len)


class Trip(NamedTuple):
    """A trip, and how much there may be to read. A ceiling only goes down: a change that shortens a trip lowers it."""

    of: Callable[[str], list[Step]]
    ceiling: Size
    ceiling_without_transports: Size
    goal: Size  # with transports


TRIPS: Final = {
    "uncontended, threads": Trip(of_threads, Size(17, 28), Size(12, 19), Size(10, 22)),
    "uncontended, asyncio": Trip(of_asyncio, Size(15, 31), Size(10, 18), Size(10, 22)),
    "contended, threads": Trip(contended_of_threads, Size(24, 55), Size(17, 37), Size(15, 45)),
    "contended, asyncio": Trip(contended_of_asyncio, Size(21, 57), Size(15, 36), Size(15, 45)),
}


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


def sums(name: str, steps: Sequence[Step]) -> str:
    """The functions and files of a trip, with its ceilings and the goal."""
    trip = TRIPS[name]
    rows = (
        ("with transports", size(steps)),
        ("  ceiling", trip.ceiling),
        ("  goal", trip.goal),
        ("without transports", size(without_transports(steps))),
        ("  ceiling", trip.ceiling_without_transports),
    )
    lines = [f"{'':18}   functions   files"]
    lines += [f"{row:18}{counted.functions:12}{counted.files:8}" for row, counted in rows]
    return "\n".join(lines)


def main() -> None:
    """Print each trip."""
    with Server() as server:
        for name, trip in TRIPS.items():
            steps = trip.of(server.url)
            print(f"{name}\n\n{table(steps)}\n\n{sums(name, steps)}\n")


if __name__ == "__main__":
    main()
