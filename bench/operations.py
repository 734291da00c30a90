"""What the rows of the synchronizers do over and over: one table, the same for both modes.

To add a synchronizer: a line in OPERATIONS, and, if a crowd can wait for it, one in CROWDS or HELD. `locks` is an
Interlock of either mode; the loops know how each is entered, called and awaited.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlock.aio import Interlock as AsyncInterlock

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK = "lock"


@dataclass(frozen=True)
class Section:
    """Entered and left; what is entered is made once."""

    make: Callable[[Any, str], Any]  # of the locks and a name

    def loop(self, locks: Any, name: str) -> Callable[[int], None]:
        """So many of them in a thread, one after another."""
        section = self.make(locks, name)

        def loop(count: int) -> None:
            for _ in range(count):
                with section:
                    pass

        return loop

    def task(self, locks: Any, name: str) -> Callable[[int], Any]:
        """So many of them in a task."""
        section = self.make(locks, name)

        async def task(count: int) -> None:
            for _ in range(count):
                async with section:
                    pass

        return task


class Again(Section):
    """Entered and left by who is inside already."""

    def loop(self, locks: Any, name: str) -> Callable[[int], None]:
        outer, inner = self.make(locks, name), super().loop(locks, name)

        def loop(count: int) -> None:
            with outer:
                inner(count)

        return loop

    def task(self, locks: Any, name: str) -> Callable[[int], Any]:
        outer, inner = self.make(locks, name), super().task(locks, name)

        async def task(count: int) -> None:
            async with outer:
                await inner(count)

        return task


class Call(Section):
    """A function that is called; with asyncio, awaited."""

    def loop(self, locks: Any, name: str) -> Callable[[int], None]:
        call = self.make(locks, name)

        def loop(count: int) -> None:
            for _ in range(count):
                call()

        return loop

    def task(self, locks: Any, name: str) -> Callable[[int], Any]:
        call = self.make(locks, name)

        async def task(count: int) -> None:
            for _ in range(count):
                await call()

        return task


class Granted(Section):
    """A function that gives a lease, which is released."""

    def loop(self, locks: Any, name: str) -> Callable[[int], None]:
        call = self.make(locks, name)

        def loop(count: int) -> None:
            for _ in range(count):
                call().release()

        return loop

    def task(self, locks: Any, name: str) -> Callable[[int], Any]:
        call = self.make(locks, name)

        async def task(count: int) -> None:
            for _ in range(count):
                await (await call()).release()

        return task


OPERATIONS: dict[str, Section] = {
    LOCK: Section(lambda locks, name: locks.lock(name)),
    "rlock": Section(lambda locks, name: locks.rlock(name)),
    "rlock, entered again": Again(lambda locks, name: locks.rlock(name)),
    "rwlock, read": Section(lambda locks, name: locks.rwlock(name).read()),
    "rwlock, write": Section(lambda locks, name: locks.rwlock(name).write()),
    "semaphore": Section(lambda locks, name: locks.semaphore(name, 10)),
    "semaphore, 5 permits": Granted(
        lambda locks, name: functools.partial(locks.semaphore(name, 10).acquire, permits=5)
    ),
    "semaphore, available()": Call(lambda locks, name: locks.semaphore(name, 10).available),
    "multi, 5 locks": Section(lambda locks, name: locks.multi(*(locks.lock(f"{name} {i}") for i in range(5)))),
    "latch, count_down()": Call(lambda locks, name: locks.latch(name, 1_000_000_000).count_down),
    "barrier of one, wait()": Call(lambda locks, name: locks.barrier(name, 1).wait),
    "election": Section(lambda locks, name: locks.election(name)),
    "election, leader()": Call(lambda locks, name: locks.election(name).leader),
    "once": Call(lambda locks, name: locks.once(name, at_most=30)(_nothing(locks))),
    "synchronized": Call(lambda locks, name: functools.partial(locks.synchronized(name + " {x}")(_nothing(locks)), 7)),
}


def _nothing(locks: Any) -> Callable[..., Any]:
    """A function that does nothing, for this mode."""

    def nothing(x: int = 0) -> int:
        return x

    async def anothing(x: int = 0) -> int:
        return x

    return anothing if isinstance(locks, AsyncInterlock) else nothing


@dataclass(frozen=True)
class Crowd:
    """Something that many wait for: what the one with this number enters, and how many get in at once."""

    make: Callable[[Any, str, int], Any]
    room: int = 1


def _either_side(locks: Any, name: str, number: int) -> Any:
    lock = locks.rwlock(name)
    return lock.read() if number % 2 else lock.write()


CROWDS: dict[str, Crowd] = {
    LOCK: Crowd(lambda locks, name, _: locks.lock(name, fair=True)),  # else a process queues for itself
    "semaphore of 2": Crowd(lambda locks, name, _: locks.semaphore(name, 2), room=2),
    "rwlock, every other one reads": Crowd(_either_side),
    "election": Crowd(lambda locks, name, _: locks.election(name)),
}

# Something that many hold, while one more comes and goes.
HELD: dict[str, Callable[[Any, str], Any]] = {
    "semaphore": lambda locks, name: locks.semaphore(name, 1_000_000),
    "rwlock, readers": lambda locks, name: locks.rwlock(name).read(),
}


# Something at which many wait (all of it, for one to wait at) while others come: who comes, and by which verb.
WAITED: dict[str, tuple[Callable[[Any, str], Any], Callable[[Any], Any], str]] = {
    "latch, count_down()": (
        lambda locks, name: locks.latch(name, 1_000_000_000),
        lambda latch: latch.count_down(),
        "count",
    ),
    "barrier, one more arrival": (
        lambda locks, name: locks.barrier(name, 100_000),
        lambda barrier: asyncio.sleep(0, asyncio.ensure_future(barrier.wait())),
        "acquire",
    ),
}
