"""A parent that holds leases, works and waits at several servers, and forks.

    python forking.py threads|asyncio os.fork|unseen URL [URL ...]      (several URLs: a quorum)

It runs the commands of stdin, one a line, and prints a line after each:

    use NAME     acquire and release it, if the lock can be acquired within 2 s
    hold         12 leases of 1.5 s; wait for "wanted", woken by nothing but a push; work on others all the time
    look NAME    fork a child that says whether it gets this lock at once
    fork         a child that uses all of it in both ways, and ends in the ordinary way
    go           until each lease was renewed twice since; then until "wanted" is ours; then give all back
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback

from harness.unseen import hide_forks

hide_forks()

import interlock  # noqa: E402
import interlock.aio  # noqa: E402
from interlock._client import waiting as _waiters  # noqa: E402

_waiters.HEARTBEAT_INTERVAL = 1000.0  # a push that is lost would be missed for ever
mode, _how, *urls = sys.argv[1:]
NAMES = [f"held-{number}" for number in range(12)]
TTL = 1.5


def made(module):
    """An Interlock of this mode."""
    kind = module.Interlock
    return kind(urls[0], max_ttl=5) if len(urls) == 1 else kind.quorum(urls, max_ttl=5)


def blocking(locks) -> None:
    """Use each kind of lock with threads: free locks, a lock with a waiter, and the locks of the parent."""
    for name in NAMES:
        assert locks.lock(name).try_acquire() is None
        with locks.lock(f"child-{name}"):
            pass
    lease = locks.lock("child", fair=True).acquire(10)
    got = []
    waiter = threading.Thread(target=lambda: got.append(locks.lock("child", fair=True).acquire(10)))
    waiter.start()
    while not locks.lock("child").inspect().waiting:
        pass
    assert lease.release()
    waiter.join()
    assert got[0].release()


async def cooperative(locks) -> None:
    """Use each kind of lock with asyncio, as `blocking` does."""
    for name in NAMES:
        assert await locks.lock(name).try_acquire() is None
        async with locks.lock(f"child-{name}"):
            pass
    lease = await locks.lock("child", fair=True).acquire(10)
    waiter = asyncio.ensure_future(locks.lock("child", fair=True).acquire(10))
    while not (await locks.lock("child").inspect()).waiting:
        pass
    assert await lease.release()
    assert await (await waiter).release()


async def closing(locks, work) -> None:
    async with locks:
        await work(locks)


@contextlib.contextmanager
def inside(mutex):
    """Hold the mutex of the runtime in another thread, which a child does not have."""
    entered, leave = threading.Event(), threading.Event()

    def thread() -> None:
        with mutex:
            entered.set()
            leave.wait()

    running = threading.Thread(target=thread)
    running.start()
    entered.wait()
    yield
    leave.set()
    running.join()


def child(work) -> int:
    """Run this in a child of fork(); its result."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(20)  # one that waits for ever would outlive the test
    code = 1
    try:
        asyncio._set_running_loop(None)
        code = work() or 0
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Blocking:
    """The parent, with threads."""

    def __init__(self) -> None:
        self.locks = made(interlock)
        self.leases: list = []
        self.won: list = []
        self.over = False

    async def use(self, name: str) -> None:
        with contextlib.suppress(interlock.LockError), self.locks.lock(name).acquire(2):
            pass

    async def hold(self) -> None:
        self.leases = [self.locks.lock(name, ttl=TTL).acquire() for name in NAMES]
        self.waiter = threading.Thread(target=lambda: self.won.append(self.locks.lock("wanted").acquire()))
        self.workers = [threading.Thread(target=self.work, args=(number,)) for number in range(2)]
        for thread in (self.waiter, *self.workers):
            thread.start()

    def work(self, number: int) -> None:
        while not self.over:
            with self.locks.lock(f"work-{number}"):
                pass
            with self.locks.lock("work"):
                pass

    def looking(self, name: str) -> int:
        return 10 if self.locks.lock(name).try_acquire() is None else 11

    def inherited(self) -> None:
        for lease in self.leases:
            assert lease.state == "lost"
            assert not lease.release()
        blocking(self.locks)
        asyncio.run(closing(made(interlock.aio), cooperative))

    async def settle(self) -> None:
        await asyncio.to_thread(self.waiter.join)
        self.over = True
        for thread in self.workers:
            await asyncio.to_thread(thread.join)
        for lease in (*self.won, *self.leases):
            assert lease.release()
        self.locks.close()


class Async(Blocking):
    """The parent, with asyncio."""

    def __init__(self) -> None:
        self.locks = made(interlock.aio)
        self.leases = []
        self.over = False

    async def use(self, name: str) -> None:
        with contextlib.suppress(interlock.LockError):
            async with await self.locks.lock(name).acquire(2):
                pass

    async def hold(self) -> None:
        self.leases = [await self.locks.lock(name, ttl=TTL).acquire() for name in NAMES]
        self.waiter = asyncio.ensure_future(self.locks.lock("wanted").acquire())
        self.workers = [asyncio.ensure_future(self.work(number)) for number in range(2)]

    async def work(self, number: int) -> None:
        while not self.over:
            async with self.locks.lock(f"work-{number}"):
                pass
            async with self.locks.lock("work"):
                pass

    def looking(self, name: str) -> int:
        async def looks() -> int:
            return 10 if await self.locks.lock(name).try_acquire() is None else 11

        return asyncio.run(looks())

    def inherited(self) -> None:
        async def mine() -> None:
            for lease in self.leases:
                assert lease.state == "lost"
                assert not await lease.release()
            await closing(self.locks, cooperative)

        asyncio.run(mine())
        with made(interlock) as locks:
            blocking(locks)

    async def settle(self) -> None:
        won = await self.waiter
        self.over = True
        await asyncio.gather(*self.workers)
        for lease in (won, *self.leases):
            assert await lease.release()
        await self.locks.close()


async def renewed(leases) -> None:
    """Wait until each lease was renewed twice."""
    now = leases[0]._core.runtime.now()
    while min(lease._grant.hold.deadline for lease in leases) < now + TTL * 1.5:
        for lease in leases:
            lease.ensure()
        await asyncio.sleep(0.02)


async def main() -> None:
    parent = Blocking() if mode == "threads" else Async()
    say = asyncio.get_running_loop().run_in_executor
    while line := (await say(None, sys.stdin.readline)).split():
        verb, *args = line
        said = "done"
        if verb == "use":
            await parent.use(*args)
        elif verb == "hold":
            await parent.hold()
        elif verb == "look":
            said = {10: "no", 11: "yes"}[await say(None, ended, child(lambda: parent.looking(*args)))]
        elif verb == "fork":
            with inside(parent.locks._session.runtime.mutex):
                pid = child(parent.inherited)
            assert await say(None, ended, pid) == 0
        elif verb == "go":
            await renewed(parent.leases)
            print("renewed", flush=True)
            await parent.settle()
        print(said, flush=True)


asyncio.run(main())
