"""One way to talk to both modes: every test is written once, as `async def`, and calls `mode.interlock()`.

In asyncio the test uses the real objects. With threads a thin stand-in (`AsyncView`) runs each blocking call in a
thread of its own, so that the test goes on meanwhile, as tasks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import interlock
import interlock.aio
from harness.clock import machine_time
from harness.matrix import WAYS
from interlock.errors import LockError

if TYPE_CHECKING:
    from harness.matrix import Cell
    from harness.servers import Node

FACES = [each for each in vars(interlock.aio).values() if getattr(each, "__module__", "") == "interlock.aio"]
BLOCKING = {name for face in FACES for name, member in vars(face).items() if inspect.iscoroutinefunction(member)}
BLOCKING |= {"__enter__", "__exit__"}
MAKING = {name for name, member in vars(interlock.aio.Interlock).items() if inspect.isfunction(member)}
MAKING = {name for name in MAKING - BLOCKING - {"synchronized"} if not name.startswith("_")}
MAKING |= {"read", "write", "__getitem__"}


SLACK = 4.0  # seconds that a busy machine may add to a call whose time is bounded


async def until(condition, within: float = 30.0) -> None:
    """Wait for a condition (plain or async), not for a time. A shorter `within` is a promise that the test checks."""
    end, pause = machine_time() + within, 0.002
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert machine_time() < end, f"not so within {within} s: {condition}"
        await asyncio.sleep(pause)
        pause = min(0.05, pause * 1.1)  # a condition that takes long need not be seen at once


def wait_until(condition, within: float = 30.0) -> None:
    """The same for tests of threads and processes alone."""
    end = machine_time() + within
    while not condition():
        assert machine_time() < end, f"not so within {within} s: {condition}"
        time.sleep(0.002)


class AsyncView:
    """A blocking object with awaitable methods: each call runs in a thread of the pool."""

    def __init__(self, real, mode) -> None:
        self._real = real
        self._mode = mode

    def __getattr__(self, name):
        value = getattr(self._real, name)
        if name in BLOCKING:
            return lambda *args, **kwargs: self._mode.in_thread(value, *args, **kwargs)
        if name in MAKING:
            return lambda *args, **kwargs: AsyncView(value(*map(real, args), **kwargs), self._mode)
        return value

    def __setattr__(self, name, value) -> None:
        if name in {"_real", "_mode"}:
            object.__setattr__(self, name, value)
        else:
            setattr(self._real, name, value)

    def __getitem__(self, name):
        return self.__getattr__("__getitem__")(name)

    async def __aenter__(self):
        return await self.__getattr__("__enter__")()

    async def __aexit__(self, *args):
        return await self.__getattr__("__exit__")(*args)


def real(thing):
    """The object itself, without its AsyncView."""
    return thing._real if isinstance(thing, AsyncView) else thing


class Mode:
    """Threads or asyncio, on one server: makes the Interlocks of one test, and closes them at its end.

    `name` is "threads" or "asyncio"; `way` makes what Interlock(...) gets; `made` has the Interlocks, `clients` the
    clients of others, `kept` the leases that last as long as the test.
    """

    def __init__(self, cell: Cell, server: Node) -> None:
        self.name = cell.mode
        self.server = server
        self.way = WAYS[cell.way]
        self.is_quorum = cell.way == "quorum"
        self.made: list = []
        self.clients: list = []
        self.kept: list = []
        self.pool = ThreadPoolExecutor(200, "blocking call")

    async def in_thread(self, call, *args, **kwargs):
        result = await asyncio.get_running_loop().run_in_executor(self.pool, lambda: call(*args, **kwargs))
        return AsyncView(result, self) if isinstance(result, interlock.Lease | interlock.MultiLease) else result

    @property
    def url(self) -> str:
        """The URL for other processes: that of the way, or of the server if the way is a client."""
        target = self.way(self.server, self.name)
        if isinstance(target, str):
            return target
        if isinstance(target, list):
            pytest.skip("a quorum has no URL")
        self.clients.append(target)
        return self.server.url

    def interlock(self, target=None, **options):
        """A new Interlock of this mode: another client, as another process would be."""
        if target is None:
            target = self.way(self.server, self.name)
            if not isinstance(target, str | list):
                self.clients.append(target)
        options.setdefault("try_for", 5.0)  # seconds, for a busy machine; a test of try_for gives its own
        made = interlock.Interlock if self.name == "threads" else interlock.aio.Interlock
        made = (made.quorum if isinstance(target, list) else made)(target, **options)
        if self.name == "threads":
            made = AsyncView(made, self)
        self.made.append(made)
        return made

    async def keep(self, acquiring):
        """Acquire a lease that lasts as long as the test; the close of its Interlock releases it."""
        self.kept.append(await acquiring)
        return self.kept[-1]

    @staticmethod
    def session(made):
        """The Session behind an Interlock."""
        return made._session

    async def close(self) -> None:
        for made in self.made:
            await made.close()
        self.made.clear()
        self.kept.clear()
        for client in self.clients:
            if self.name == "threads":
                client.close()
            else:
                await getattr(client, "aclose", client.close)()  # redis-py 5.0.0 has only the latter
        self.clients.clear()
        self.pool.shutdown()


class Residue:
    """What a test must not leave behind: threads, tasks and sockets of interlock."""

    def __init__(self) -> None:
        self.before = self.sockets()

    @staticmethod
    def sockets() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:"):
                found.add(target)
        return found

    @staticmethod
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("interlock-")]

    async def none(self) -> None:
        """Fails unless all threads and tasks are gone. Collects garbage, so that each forgotten socket warns."""
        with contextlib.suppress(AssertionError):
            await until(lambda: not self.threads())
        assert not self.threads()  # so that the report names them
        gc.collect()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and "interlock" in t.get_name()]
        assert not tasks


async def subscribe(session, name: str) -> None:
    """Subscribe the client, if a test must not see its first subscription: that renews what the client holds."""
    session.server.ensure_subscribed(f"lock:{name}")
    await until(lambda: is_subscribed(session, name))


def is_subscribed(session, name: str = "a") -> bool:
    """Whether the client is subscribed to the channel of this lock, and the server has confirmed that."""
    return session.server.subscription_of(f"lock:{name}")[0] == "1"


async def outcome(coroutine):
    """The result, or the LockError it raised."""
    try:
        return await coroutine
    except LockError as error:
        return error


async def queued(locks, number: int, name: str = "a") -> bool:
    """Whether so many callers wait for the lock of this name: in the server's queue, or in the cohort of `locks`."""
    return await waiting(locks.lock(name), number)


async def waiting(lockable, number: int) -> bool:
    """Whether so many callers wait for this lockable: in the server's queue, or in the cohort of its Interlock."""
    cohort = lockable._session.core.cohorts.by_key.get(lockable._primitive.keys[0])
    in_cohort = len(cohort.waiting) if cohort is not None else 0
    return (await lockable.inspect()).waiting + in_cohort == number
