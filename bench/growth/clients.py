"""What crowds of real clients cost: many processes on one lock, one client on many locks, many clients that wait.

`python clients.py JOB PATH ...` is a process of its own, so that nothing of the benchmark lives in it; it answers with
one JSON line. Processes are forked from one that has imported interlock, which keeps each of them small.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # as for the other modules of the bench

from growth.sender import Sender
from interlock import Interlock, LeaseLost
from interlock.aio import Interlock as AsyncInterlock
from measure import now

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from growth.curves import Costs

JOIN_TIMEOUT = 60.0  # seconds in which a crowd must have begun to wait
SETTLE = 2.0  # seconds after which all of a crowd are subscribed and have asked once more
JOB_TIMEOUT = 240.0
FEWEST_FOR_MEMORY = 500  # clients: with fewer, other things outweigh them in used_memory
RAMP = 3.0  # seconds in which all processes contend before anything is measured: in these they subscribe
READY, STAMP = b"ready", struct.Struct("d")  # what a process says, and what it is told: when the measurement begins

SECTIONS, SECTION_MICROS, CALLS = (
    "sections of all processes",
    "server's time for a section",
    "script calls for a section",
)
MIDDLE_WAIT, LONGEST_WAIT, LEAST_SHARE = "median wait", "longest wait", "sections of the process served least"
LOST, PRIVATE = "leases lost", "private memory of a process"
BEATS, BEAT_CPU, BEAT_SHARE = "heartbeats", "client's processor time for a heartbeat", "client's processor time"
CALL_MICROS, CALL_CORE = "server's time for a call", "server's processor time for a call"
BYTES_CLIENT, MESSAGES = "memory of a client: connection, subscription, place in a queue", "script calls"


def run(job: str, *args: object) -> Any:
    """Run a job in a process of its own, and return its answer."""
    done = subprocess.run(
        [sys.executable, __file__, job, *map(str, args)], stdout=subprocess.PIPE, text=True, check=True,
        timeout=JOB_TIMEOUT,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


# Processes on one lock


def processes(path: str, size: int, seconds: float) -> Costs:
    """So many processes, a thread in each, in and out of one lock with fair=True, without any work inside."""
    with Interlock(f"unix://{path}"):
        pass  # imports what the first one imports, so that no child has to
    go_reading, go = os.pipe()
    pipes, children = [], []
    for _ in range(size):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            status = 1
            try:
                os.close(reading)
                _contend(path, go_reading, writing, seconds)
                status = 0
            except BaseException:  # noqa: BLE001 (shown; the parent fails)
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        pipes.append(reading)
        children.append(child)
    for reading in pipes:
        assert os.read(reading, len(READY)) == READY
    sender, start = Sender(path), now() + RAMP
    os.write(go, b"".join(STAMP.pack(start) for _ in pipes))
    time.sleep(max(0.0, start - now()))
    sender.bare.call("CONFIG", "RESETSTAT")
    time.sleep(seconds)
    calls, micros = sender.spent()
    sender.close()
    answers = []
    for reading, child in zip(pipes, children, strict=True):
        with os.fdopen(reading) as file:
            answers.append(json.loads(file.read()))
        os.waitpid(child, 0)
    waits = [wait for answer in answers for wait in answer["waits"]]
    done = [answer["in_time"] for answer in answers]
    return {
        SECTIONS: sum(done) / seconds, SECTION_MICROS: micros / sum(done), CALLS: calls / sum(done),
        MIDDLE_WAIT: statistics.median(waits) * 1000, LONGEST_WAIT: max(waits) * 1000,
        LEAST_SHARE: min(done) * size / sum(done) * 100,
        LOST: sum(answer["lost"] for answer in answers),
        PRIVATE: statistics.median(answer["private"] for answer in answers) / 1e6,
    }  # fmt: skip


def _contend(path: str, go: int, answer: int, seconds: float) -> None:
    """One of these processes. It connects, says so, and contends once it has read when the measurement begins."""
    waits: list[float] = []
    in_time = lost = 0
    got = 0.0
    with Interlock(f"unix://{path}") as locks:
        with locks.lock(f"growth {os.getpid()}"):
            pass
        os.write(answer, READY)
        (start,) = STAMP.unpack(os.read(go, STAMP.size))
        lock, end = locks.lock("growth processes", fair=True), start + seconds
        asked = now()
        while asked < end:
            try:
                with lock:
                    got = now()
            except LeaseLost:  # this process stood still for longer than the handover ttl
                lost += 1
            if got >= start:
                waits.append(got - asked)
                in_time += got < end
            asked = now()
        private = _private()
    with os.fdopen(answer, "w") as file:
        json.dump({"waits": waits or [end - start], "in_time": in_time, "private": private, "lost": lost}, file)


def _private() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


# One client, many locks


def one_client(path: str, size: int, seconds: float) -> Costs:
    """One asyncio client that waits for so many locks: what its heartbeats cost it."""

    sender = Sender(path)

    async def work() -> Costs:
        holder, locks = AsyncInterlock(f"unix://{path}", max_ttl=60), AsyncInterlock(f"unix://{path}")
        names = [f"growth {os.getpid()} {i}" for i in range(size)]
        leases = await _gather(holder.lock(name, ttl=60, renew=False).acquire() for name in names)
        tasks = [asyncio.create_task(locks.lock(name, fair=True).acquire()) for name in names]
        await _all_wait(locks, size)
        await asyncio.sleep(SETTLE)
        sender.bare.call("CONFIG", "RESETSTAT")
        began, used = now(), _processor()
        await asyncio.sleep(seconds)
        took, spent = now() - began, _processor() - used
        calls, _ = sender.spent()
        await _end(tasks)
        await _gather(lease.release() for lease in leases)
        await locks.close()
        await holder.close()
        return {BEATS: calls / took, BEAT_CPU: spent / calls * 1e6, BEAT_SHARE: spent / took * 100}

    return asyncio.run(work())


# Many clients


def many_clients(path: str, size: int, names: int, hold: float, seconds: float) -> Costs:
    """So many clients, each with its connection, in and out of one of so many locks; asyncio, in two processes."""
    sender = Sender(path)
    before, half = sender.used_memory(), -(-size // 2)
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "half", path, str(first), str(min(size, first + half)), str(names), str(hold)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for first in range(0, size, half)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    time.sleep(SETTLE)
    sender.bare.call("CONFIG", "RESETSTAT")
    began, used = now(), sender.core_seconds()
    time.sleep(seconds)
    took, core = now() - began, sender.core_seconds() - used
    calls, micros = sender.spent()
    memory = sender.used_memory() - before
    for worker in workers:
        worker.communicate("end\n", timeout=JOB_TIMEOUT)
    sender.close()
    return {
        MESSAGES: calls / took, CALL_MICROS: micros / calls, CALL_CORE: core / calls * 1e6,
        BYTES_CLIENT: memory / size if size >= FEWEST_FOR_MEMORY else None,
    }  # fmt: skip


def half(path: str, first: int, last: int, names: int, hold: float) -> None:
    """Clients with these numbers are in and out of their locks, until a line comes."""

    async def client(locks: AsyncInterlock, number: int) -> None:
        lock = locks.lock(f"growth crowd {number % names}", fair=True)
        while True:
            async with lock:
                await asyncio.sleep(hold)

    async def work() -> None:
        clients = [AsyncInterlock(f"unix://{path}") for _ in range(first, last)]
        tasks = [
            asyncio.create_task(client(locks, number))
            for number, locks in zip(range(first, last), clients, strict=True)
        ]
        late = now() + JOIN_TIMEOUT
        while not all(_is_at_work(locks) for locks in clients):
            assert now() < late, "not all wait"
            await asyncio.sleep(0.05)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await _end(tasks)
        await _gather(locks.close() for locks in clients)

    gc.freeze()
    asyncio.run(work())


def _is_at_work(locks: AsyncInterlock) -> bool:
    """Whether this client waits or holds."""
    return bool(locks._session.waiters.queues or locks._session.book.count())


async def _gather(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all of it, some at a time."""
    waiting, results = list(work), []
    for i in range(0, len(waiting), 500):
        results += await asyncio.gather(*waiting[i : i + 500])
    return results


async def _all_wait(locks: AsyncInterlock, count: int) -> None:
    """Until this client waits for so many locks."""
    late = now() + JOIN_TIMEOUT
    while len(locks._session.waiters.queues) < count:
        assert now() < late, "not all wait"
        await asyncio.sleep(0.05)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


JOBS: dict[str, Callable[..., Any]] = {
    "processes": lambda path, size, seconds: processes(path, int(size), float(seconds)),
    "one_client": lambda path, size, seconds: one_client(path, int(size), float(seconds)),
    "many_clients": lambda path, *numbers: many_clients(path, *map(int, numbers[:2]), *map(float, numbers[2:])),
    "half": lambda path, *numbers: half(path, *map(int, numbers[:3]), float(numbers[3])),
}

if __name__ == "__main__":
    answer = JOBS[sys.argv[1]](*sys.argv[2:])
    if answer is not None:
        print(json.dumps(answer), flush=True)
