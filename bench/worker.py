"""One process of a row that needs several: it reads orders from stdin, a JSON line each, and answers in JSON lines.

A worker ends when its stdin ends, so no worker outlives the benchmark. `Worker` is the side that gives the orders.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from contenders import TTL, AsyncClients, Clients
from floor import Bare, BareWaiter
from goals import FLOOR
from interlock.aio import Interlock as AsyncInterlock
from measure import now
from operations import CROWDS, HELD, WAITED

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 10.0  # seconds that a worker may take to end by itself
LONGEST = 30.0  # seconds that a crowd may take for its handovers
RUSH = 20  # script calls in 0.2 seconds that are more than heartbeats
SLOT = 8  # bytes of a number on the board


class Worker:
    """A process that takes orders. Ended, by its id, at the end of its `with`."""

    def __init__(self, *paths: str, inherits: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=inherits,
        )  # fmt: skip

    def tell(self, job: str, **order: object) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, **order}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What came of it. Raises RuntimeError if the process has died of it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker failed with status {self._process.wait(PATIENCE)}; see above")
        return json.loads(line)

    def __enter__(self) -> Self:
        """It returns at once; the worker's first answer may take as long as its imports."""
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


# handover


def handover(
    clients: Clients,
    contender: str,
    name: str,
    count: int,
    hold: float,
    first: bool,
    fd: int,
    floor: list[tuple[list[str], list[str]]],
) -> list[list[float]]:
    """Take turns with the process at the other end of `fd`: when it was got, and when it was given back.

    First, one holds the lock and the other waits for it. Who gets it says so over `fd`, and holds it for a while,
    in which the other, who heard that, begins to wait. So each release finds exactly one waiter.
    """
    if contender == FLOOR:
        lock: Any = BareWaiter(clients.paths, floor, str(os.getpid()))
    else:
        lock = clients.lock(contender, name)
    got, left = [], []
    for turn in range(count):
        if turn or not first:
            os.read(fd, 1)
        with lock:
            got.append(now())
            os.write(fd, b".")
            time.sleep(hold)
            left.append(now())
    if first:
        os.read(fd, 1)  # the other's last word
    if contender == FLOOR:
        lock.close()
    return [got, left]


# contended, fair, contended-tasks


class Board:
    """A page of memory that all processes map: the number of sections, and who is inside.

    Both are read and written without any other lock. So a section that is not alone is seen, or a count gets lost.
    """

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self._numbers = memoryview(self._mapped).cast("Q")
        self.waits: list[float] = []
        self.grants: list[tuple[int, str]] = []
        self.overlaps = 0

    def section(self, me: int, lease: Any) -> None:
        """The inside of a section."""
        numbers = self._numbers
        alone = numbers[1] == 0
        numbers[1], count = me, numbers[0]
        if hasattr(lease, "fence") and hasattr(lease, "token"):  # one of ours
            self.grants.append((lease.fence, lease.token))
        numbers[0] = count + 1
        if not alone or numbers[1] != me:
            self.overlaps += 1
        numbers[1] = 0

    def close(self, in_time: list[int]) -> dict[str, Any]:
        """What the process answers: every wait, the sections of each thread or task, and what went wrong."""
        self._numbers.release()
        self._mapped.close()
        return {"waits": self.waits, "in_time": in_time, "overlaps": self.overlaps, "grants": self.grants}


def contend(
    clients: Clients, contender: str, name: str, crowd: int, start: float, end: float, board: str, number: int
) -> dict[str, Any]:
    """So many threads in and out of one lock, from `start` until `end`."""
    locks = [clients.lock(contender, name) for _ in range(crowd)]
    page, in_time = Board(board), [0] * crowd

    def work(thread: int) -> None:
        me, lock = number * crowd + thread + 1, locks[thread]
        time.sleep(max(0.0, start - now()))
        asked = now()
        while not in_time[thread] or asked < end:
            with lock as lease:
                got = now()
                page.section(me, lease)
            page.waits.append(got - asked)
            in_time[thread] += got < end or not in_time[thread]
            asked = now()

    threads = [threading.Thread(target=work, args=(i,), name=f"bench-{i}") for i in range(crowd)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return page.close(in_time)


def contend_tasks(
    clients: Clients, contender: str, name: str, crowd: int, start: float, end: float, board: str, number: int
) -> dict[str, Any]:
    """The same with so many asyncio tasks."""
    page, in_time = Board(board), [0] * crowd

    async def work(make: Callable[[], Any], task: int) -> None:
        await asyncio.sleep(max(0.0, start - now()))
        asked = now()
        while not in_time[task] or asked < end:
            async with make() as lease:
                got = now()
                page.section(number * crowd + task + 1, lease)
            page.waits.append(got - asked)
            in_time[task] += got < end or not in_time[task]
            asked = now()

    async def all_of_them() -> None:
        async_clients = AsyncClients(clients.path)
        makers = [async_clients.lock(contender, name) for _ in range(crowd)]
        await asyncio.gather(*(work(make, i) for i, make in enumerate(makers)))
        await async_clients.close()

    asyncio.run(all_of_them())
    return page.close(in_time)


# waiters, crowds, holders, arrivals


class SlowLog:
    """The server's own time for every script call, by verb: its slow log, with a threshold of 0."""

    def __init__(self, path: str) -> None:
        self._bare = Bare(path)

    def start(self) -> None:
        """From now on."""
        self._bare.call("CONFIG", "SET", "slowlog-log-slower-than", "0", "slowlog-max-len", "1000000")
        self._bare.call("SLOWLOG", "RESET")

    def micros(self) -> dict[str, int]:
        """Until now: µs for each verb. It does not let an event loop run on meanwhile."""
        return {verb: sum(each) for verb, each in self.each().items()}

    def each(self) -> dict[str, list[int]]:
        """The same, call by call."""
        spent: dict[str, list[int]] = {}
        for _, _, micros, command, *_ in self._bare.call("SLOWLOG", "GET", "-1"):
            if command[0] == b"EVALSHA":
                spent.setdefault(command[3 + int(command[2])].decode(), []).append(micros)
        return spent

    def calls(self) -> int:
        """How many script calls there were since the server began."""
        (calls,) = re.findall(rb"cmdstat_evalsha:calls=(\d+)", self._bare.call("INFO", "commandstats"))
        return int(calls)

    def close(self) -> None:
        self._bare.call("CONFIG", "SET", "slowlog-log-slower-than", "-1")
        self._bare.call("SLOWLOG", "RESET")
        self._bare.close()


def crowd(clients: Clients, what: str, waiters: int, handovers: int) -> dict[str, Any]:
    """So many tasks that wait for one thing: what each verb cost the server during so many handovers.

    When the handovers are done the log is read without letting the loop run on, so the window ends there; or, if
    that takes too long, with fewer of them.
    """

    async def all_of_them() -> dict[str, Any]:
        locks = AsyncInterlock(f"unix://{clients.path}")
        kind, name = CROWDS[what], f"crowd of {waiters} {os.getpid()}"
        over = asyncio.get_running_loop().create_future()
        sections = 0

        async def task(number: int) -> None:
            nonlocal sections
            mine = kind.make(locks, name, number)
            while True:
                async with mine:
                    sections += 1
                    if sections == handovers and not over.done():
                        over.set_result(window())

        def window() -> dict[str, Any]:
            return {"took": now() - started, "micros": log.micros(), "handovers": sections}

        lock = kind.make(locks, name, 0)
        full = [await lock.acquire() for _ in range(kind.room)]
        tasks = [asyncio.create_task(task(number)) for number in range(waiters)]
        while (await lock.inspect()).waiting < waiters:
            await asyncio.sleep(0.05)
        calls, late = 0, now() + LONGEST
        while log.calls() > calls + RUSH and now() < late:  # all ask once more, when they can be woken
            calls = log.calls()
            await asyncio.sleep(0.2)
        log.start()
        started = now()
        for lease in full:
            await lease.release()
        await asyncio.wait([over], timeout=LONGEST)
        result: dict[str, Any] = over.result() if over.done() else window()
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await locks.close()
        return result

    log = SlowLog(clients.path)
    try:
        return asyncio.run(all_of_them())
    finally:
        log.close()


def beside(clients: Clients, what: str, holders: int, pairs: int) -> dict[str, Any]:
    """One that comes and goes beside so many that stay: what its acquires and releases cost the server."""

    async def all_of_them() -> dict[str, int]:
        locks = AsyncInterlock(f"unix://{clients.path}")
        name = f"{holders} hold {os.getpid()}"
        held = await _leases(lambda _: HELD[what](locks, name), holders)
        mine = HELD[what](locks, name)
        log.start()
        for _ in range(pairs):
            async with mine:
                pass
        micros = log.micros()
        await _released(held)
        await locks.close()
        return {verb: spent for verb, spent in micros.items() if verb in {"acquire", "release"}}

    log = SlowLog(clients.path)
    try:
        return {"micros": asyncio.run(all_of_them())}
    finally:
        log.close()


def waited(clients: Clients, what: str, waiters: int, calls: int) -> dict[str, Any]:
    """Some come where so many wait: what their calls cost the server."""
    make, come, verb = WAITED[what]

    async def all_of_them() -> float:
        locks = AsyncInterlock(f"unix://{clients.path}")
        thing = make(locks, f"{waiters} wait {os.getpid()}")
        tasks = [asyncio.ensure_future(thing.wait()) for _ in range(waiters)]
        while (await thing.inspect()).waiting < waiters:
            await asyncio.sleep(0.05)
        log.start()
        came = [await come(thing) for _ in range(calls)]
        tasks += [each for each in came if isinstance(each, asyncio.Future)]
        while len(tasks) > waiters and (await thing.inspect()).waiting < len(tasks):
            await asyncio.sleep(0.05)
        each = log.each()[verb]  # who waits may have asked again, too
        await thing.revoke("measured")
        await asyncio.gather(*tasks, return_exceptions=True)
        await locks.close()
        return sum(each) / len(each)

    log = SlowLog(clients.path)
    try:
        return {"micros": asyncio.run(all_of_them())}
    finally:
        log.close()


async def _leases(make: Callable[[int], Any], count: int) -> list[Any]:
    """So many leases, asked for by tasks of their own, some at a time."""
    held: list[Any] = []
    for i in range(0, count, 1000):
        held += await asyncio.gather(*(make(n).acquire() for n in range(i, min(count, i + 1000))))
    return held


async def _released(leases: list[Any]) -> int:
    """How many of them were ours until now."""
    ours = 0
    for i in range(0, len(leases), 1000):
        ours += sum(await asyncio.gather(*(lease.release() for lease in leases[i : i + 1000])))
    return ours


# leases


def hold(clients: Clients, leases: int, seconds: float, settle: float) -> dict[str, Any]:
    """Hold so many leases for so long: memory and processor time of this process, and how many were still ours."""

    async def all_of_them() -> dict[str, Any]:
        async_clients = AsyncClients(clients.path)
        locks = async_clients.ours
        warm = [await locks.lock(f"warm {i}", ttl=TTL).acquire() for i in range(100)]
        gc.collect()
        before = _resident()
        held = await _leases(lambda n: locks.lock(f"lease {n}", ttl=TTL), leases)
        gc.collect()
        grown = _resident() - before
        await asyncio.sleep(settle)
        used, started = _processor(), now()
        await asyncio.sleep(seconds)
        share = (_processor() - used) / (now() - started)
        lost = sum(lease.state.value not in {"held", "jeopardy"} for lease in held)
        shaky = sum(lease.state.value == "jeopardy" for lease in held)
        ours = await _released(held)
        await _released(warm)
        await async_clients.close()
        return {"share": share, "bytes": grown / leases, "lost": max(lost, leases - ours), "jeopardy": shaky}

    return asyncio.run(all_of_them())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ready(_clients: Clients) -> bool:
    """Imports are done."""
    return True


JOBS: dict[str, Callable[..., Any]] = {
    "ready": ready,
    "handover": handover,
    "contend": contend,
    "contend_tasks": contend_tasks,
    "crowd": crowd,
    "beside": beside,
    "waited": waited,
    "hold": hold,
}


def main() -> None:
    clients = Clients(*sys.argv[1:])
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(JOBS[order.pop("job")](clients, **order)), flush=True)
    clients.close()


if __name__ == "__main__":
    main()
