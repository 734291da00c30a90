"""Another checkout of interlock: its own Python is run against the server, and MONITOR says what it sends.

So the messages of any version can be sent again, with other tokens and other names, without knowing their layout: a
message is a template in which the token and the name of the lock are replaced.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from floor import Tapped, packed
from measure import Before

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parents[1]
BASELINE = "49003b8"  # the commit before the work on speed began
NAME = "recorded-0000"  # of the lock; other names have the same length
# Two Interlocks, since contenders of one may queue in their process. The waiter comes in another thread.
PROGRAM = """
import sys, threading, time
import interlock
from interlock import Interlock
assert interlock.__file__.startswith(sys.argv[3]), interlock.__file__
one, other = Interlock(f"unix://{sys.argv[1]}"), Interlock(f"unix://{sys.argv[1]}")
lock, again = one.lock(sys.argv[2], ttl=30), other.lock(sys.argv[2], ttl=30)
for _ in range(3):
    pair = lock.acquire()
    pair.release()
held = lock.acquire()
leases = []
waiter = threading.Thread(target=lambda: leases.append(again.acquire(timeout=20)))
waiter.start()
while not lock.inspect().waiters:
    time.sleep(0.02)
time.sleep(0.3)  # the waiter asks again after it has subscribed
held.release()
waiter.join()
leases[0].release()
one.close(); other.close()
print(pair.token); print(held.token); print(leases[0].token)
"""


# Pairs of acquire and release, so many as each line of stdin says, in the way of the rows uncontended and tasks.
CLIENT = """
import asyncio, gc, json, sys, time
import interlock
from interlock import Interlock, aio
assert interlock.__file__.startswith(sys.argv[2]), interlock.__file__
url, tasks, now = f"unix://{sys.argv[1]}", int(sys.argv[3]), time.monotonic
names = [f"before {tasks} {i}" for i in range(tasks)]
waits = []

def loop(lock, count):
    for _ in range(count):
        began = now()
        with lock:
            pass
        waits.append((now() - began) * 1e6)

async def task(lock, count):
    for _ in range(count):
        began = now()
        async with lock:
            pass
        waits.append((now() - began) * 1e6)

async def all_tasks(made, count):
    await asyncio.gather(*(task(lock, count) for lock in made))

async def setup():
    locks = aio.Interlock(url)
    return locks, [locks.lock(name, ttl=30) for name in names]

def serve(work):
    work(100)  # connects, and imports what the first use imports
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        waits.clear()
        gc.collect()
        began, thread, process = now(), time.thread_time(), time.process_time()
        work(int(line))
        spent = now() - began, time.thread_time() - thread, time.process_time() - process
        print(json.dumps([*spent, waits]), flush=True)

if tasks == 1:
    with Interlock(url) as locks:
        lock = locks.lock("before", ttl=30)
        serve(lambda count: loop(lock, count))
else:
    with asyncio.Runner() as runner:
        locks, made = runner.run(setup())
        serve(lambda count: runner.run(all_tasks(made, max(1, count // tasks))))
        runner.run(locks.close())
"""


class Client:
    """A process that runs the interlock of other sources, for the length of a `with`."""

    def __init__(self, path: str, src: str, tasks: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, path, src, str(tasks)], env={**os.environ, "PYTHONPATH": src},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def pairs(self, count: int) -> tuple[float, float, float, list[float]]:
        """Seconds for so many pairs: by the clock, of the calling thread, of the process; and the µs of each pair."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the interlock of other sources failed with status {self._process.wait()}; see above")
        took, thread, process, waits = json.loads(line)
        return took, thread, process, waits

    def timed(self, waits: list[float]) -> Callable[[int], float]:
        """A loop of so many pairs, which says how many seconds it took."""

        def loop(count: int) -> float:
            took, _, _, of_each = self.pairs(count)
            waits.extend(of_each)
            return took

        return loop


@dataclass(frozen=True)
class Template:
    """A message that was sent once. `packed()` makes another copy of it."""

    words: Sequence[str]
    token: str

    def packed(self, token: str, name: str = NAME) -> bytes:
        return packed([word.replace(self.token, token).replace(NAME, name) for word in self.words])

    def keys(self, name: str) -> list[str]:
        return [key.replace(NAME, name) for key in self.words[3 : 3 + int(self.words[2])]]


def fresh_token() -> str:
    """A token of the usual length."""
    return f"somehost/12345/MainThread/{secrets.token_hex(16)}"


@dataclass(frozen=True)
class Messages:
    """What one version of interlock sends for an uncontended pair, and for a handover."""

    acquire: Template
    release: Template
    enqueue: Template
    hand_over: Template
    confirm: Template
    channels: tuple[str, ...]


def record(path: str, src: str) -> Messages:
    """Run the interlock of these sources against the server, and return the messages that it sent."""
    said: list[str] = []

    def body() -> None:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path, NAME, src], env={**os.environ, "PYTHONPATH": src},
            stdout=subprocess.PIPE, text=True, check=True, timeout=60,
        )  # fmt: skip
        said.extend(done.stdout.split())

    commands = Tapped(path, body).commands
    pair, held, waiter = said

    def of(token: str, commands: list[list[str]]) -> list[Template]:
        return [Template(c, token) for c in commands if c[0] == "EVALSHA" and any(token in word for word in c)]

    released = commands.index(list(of(held, commands)[-1].words))
    waiting = of(waiter, commands[:released])
    return Messages(
        acquire=of(pair, commands)[0],
        release=of(pair, commands)[-1],
        enqueue=[each for each in waiting if len(each.words) == len(waiting[0].words)][-1],  # and no heartbeat
        hand_over=of(held, commands)[-1],
        confirm=of(waiter, commands[released:])[0],
        channels=tuple(word for c in commands if "SUBSCRIBE" in c[0].upper() for word in c[1:]),
    )


def find(wanted: str, unpacked: Path) -> Before | None:
    """The checkout at this path, or of this commit, which is unpacked there. None if there is neither."""
    if (path := Path(wanted, "src")).is_dir():
        return Before(wanted, str(path.resolve()))
    archive = subprocess.run(["git", "-C", ROOT, "archive", wanted, "src"], capture_output=True, check=False)
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(unpacked, filter="data")
    return Before(f"commit {wanted}", str(unpacked.resolve() / "src"))
