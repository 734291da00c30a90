"""A process that is snapshotted and restored twice, as a virtual machine is: two processes with the same memory.

    python clones.py threads|asyncio URL DIRECTORY idle|holds|waits|predictable

The program connects, and prints "ready". With `holds` it has a lease on "held" by then; with `waits` it stands in the
queue of "held"; with `predictable` the numbers in its tokens are part of the snapshot. A line on stdin takes the
snapshot: fork(2) makes two children without Python's hooks, so nothing in the children can know of it, and the process
itself only waits for their ends. In each child every connection is dead, as after a restore. Then each child acquires
locks for a while and writes lines of model/histories, as process c0 or c1. A task of asyncio is the same in both
children; of the threads only the one that forks lives on, so `holds` and `waits` are for asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import selectors
import socket
import stat
import sys
import threading
import time
import traceback
import types
from pathlib import Path

import interlock
import interlock.aio
from interlock._client import acquiring as _core
from interlock._protocol import forks
from model.histories.lines import Pen, clock

SECTIONS = 25
TTL = 1.5
PREDICTABLE = "predictable"


def snapshot() -> int:
    """Take the snapshot, and go on in each of two clones; returns the number of the clone."""
    loop, pids = asyncio._get_running_loop(), []
    for each in range(2):
        pid = ctypes.PyDLL(None).fork()  # not os.fork(), which calls Python's fork hooks; and the GIL stays ours
        if not pid:
            forks.KNOWN[0] = 1  # the kernel has cleared it, as a restore would not
            if loop is not None:
                # It is kept with the id of the process, which a restore does not change.
                asyncio._set_running_loop(loop)
            cut(loop)
            return each
        pids.append(pid)
    # The image. It gives nothing back, and it closes no connection.
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os._exit(max(map(abs, codes)))


def cut(loop) -> None:
    """Cut every socket of this clone, without a sign to the server."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode):
                dead, other = socket.socketpair()
                with dead, other:
                    dead.setblocking(os.get_blocking(fd))
                    os.dup2(dead.fileno(), fd, inheritable=False)
    if loop is not None:  # it wakes itself through a pair of sockets, which a snapshot does not hurt
        for fresh, old in zip(socket.socketpair(), (loop._ssock, loop._csock), strict=True):
            with fresh:
                fresh.setblocking(False)
                os.dup2(fresh.fileno(), old.fileno(), inheritable=False)


class Clone:
    """What a clone does after the restore, and what it writes."""

    def __init__(self, directory: str, mode: str, number: int) -> None:
        self.name, self.other = f"c{number}", Path(directory, f"c{1 - number}.jsonl")
        self.pen = Pen(Path(directory), self.name)
        self.mode = mode
        self.number = 0

    async def do(self, call, *args, **options):
        result = call(*args, **options)
        return await result if self.mode == "asyncio" else result

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds) if self.mode == "asyncio" else time.sleep(seconds)

    async def sections(self, locks) -> None:
        """Enter sections of a lock and of a semaphore, until the other clone has had some sections, too."""
        self.pen.write("memory", channel=locks._session.channel, me=locks._session.core.process_id)
        end = time.monotonic() + 20
        while self.number < SECTIONS or (self.others() < SECTIONS and time.monotonic() < end):
            await self.section("stock", locks.lock("stock", ttl=TTL), 1)
            await self.section("pool", locks.semaphore("pool", 1, ttl=TTL), 1)

    def others(self) -> int:
        """How many sections the other clone has had."""
        return self.other.read_bytes().count(b'"ask"') if self.other.exists() else 0

    async def section(self, name: str, lockable, limit: int) -> None:
        self.number += 1
        hold = f"{self.name}.{self.number}"
        self.pen.write("ask", h=hold, s="", name=name, kind="lock", weight=1, limit=limit, group="", timeout=20.0)
        try:
            lease = await self.do(lockable.acquire, timeout=20 if PREDICTABLE not in sys.argv else 1)
        except interlock.LockError as error:  # two that have one token are in each other's way
            if PREDICTABLE not in sys.argv:
                raise
            self.pen.write("failed", h=hold, error=type(error).__name__)
            return
        self.pen.write("got", h=hold, token=lease.token, fence=lease.fence)
        for _ in range(3):
            now = clock()
            with contextlib.suppress(interlock.LeaseLost):
                lease.ensure()
                self.pen.write("ok", t=now, h=hold)
            await self.sleep(0.002)
        self.pen.write("letting", h=hold, how="release")
        self.pen.write("let", h=hold, ours=await self.do(lease.release), error="")

    async def held(self, lease) -> None:
        """Use the lease of the snapshot: one clone releases it; then the other clone writes what its lease says."""
        before = lease.remaining()
        while lease.remaining() <= before:  # it is renewed
            before = lease.remaining()
            await self.sleep(0.02)
        lease.ensure()
        self.pen.write("across", token=lease.token)
        if self.name == "c1":
            await asyncio.wait_for(lease.lost.wait(), 20)
            self.pen.write("told", state=lease.state.value, ours=await self.do(lease.release))
            return
        while not (self.other.exists() and b'"across"' in self.other.read_bytes()):
            await self.sleep(0.02)
        self.pen.write("gave back", ours=await self.do(lease.release))


async def cooperative(url: str, directory: str, what: str) -> None:
    locks = interlock.aio.Interlock(url, max_ttl=5)
    await locks.lock("warm").inspect()
    async with locks.lock("warm"), locks.semaphore("warm-pool", 1):
        pass
    lease = await locks.lock("held", ttl=5).acquire() if what == "holds" else None
    waiting = asyncio.ensure_future(locks.lock("held", ttl=TTL).acquire()) if what == "waits" else None
    while waiting and not (await locks.lock("held").inspect()).waiting:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    sys.stdin.readline()
    clone = Clone(directory, "asyncio", snapshot())
    if lease is not None:
        await clone.held(lease)
    if waiting is not None:
        granted = await asyncio.wait_for(waiting, 20)
        granted.ensure()
        clone.pen.write("across", token=granted.token)
        await asyncio.sleep(0.3)
        clone.pen.write("gave back", ours=await granted.release())
    await clone.sections(locks)
    await locks.close()


def blocking(url: str, directory: str) -> None:
    locks = interlock.Interlock(url, max_ttl=5)
    locks.lock("warm").inspect()
    print("ready", flush=True)
    sys.stdin.readline()
    work = Clone(directory, "threads", snapshot()).sections(locks)
    with contextlib.suppress(StopIteration):
        work.send(None)
    locks.close()


def main() -> None:
    mode, url, directory, what = sys.argv[1:]
    if what == PREDICTABLE:
        _core.os = types.SimpleNamespace(urandom=random.Random(1).randbytes)
    try:
        if mode == "threads":
            assert threading.active_count() == 1
            blocking(url, directory)
        else:
            # A selector without a file of its own in the kernel, which the clones would share.
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
                runner.run(cooperative(url, directory, what))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # what is left of the image in this clone has nothing to say


if __name__ == "__main__":
    main()
