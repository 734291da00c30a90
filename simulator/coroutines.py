"""Processes and the coroutines at work in them, which run until they park on a `Future`.

Rules.
 1. A step comes a moment after what caused it, as it does with threads and loops, and who is first is chance.
 2. A cancellation is an exception thrown in where a coroutine is parked, even if its reply is already there.
 3. A *trap* springs at one of the places that every await has: `before_send`, before anything was sent; its `park`,
    right after; its `wake`, when what it waited for has come and the coroutine does not know yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .chance import Actor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from .scheduler import World


class Cancelled(BaseException):
    """Thrown into a coroutine: what a cancelled task or Ctrl-C is in the real world."""


class Process(Actor):
    """A client's process: it has a clock, may be paused, and may crash."""

    def __init__(self, world: World, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        super().__init__(world, name)
        self.base = name.partition("~")[0]  # also that of who comes in its place
        self.offset = offset
        self.rate = rate
        self.alive = True
        self.paused_until = 0.0
        self.pauses = 0
        self.tasks: list[Task] = []

    def clock(self) -> float:
        """Its own clock now: it started anywhere and runs a little fast or slow."""
        return self.offset + self.world.now * self.rate

    def when(self, clock: float) -> float:
        """The world's time at which its clock will show this."""
        return (clock - self.offset) / self.rate

    def pause(self, seconds: float) -> None:
        """Stand still, as with SIGSTOP; its clock goes on."""
        self.paused_until = max(self.paused_until, self.world.now + seconds)
        self.pauses += 1

    @property
    def awake(self) -> bool:
        """Whether its code can run now."""
        return self.alive and self.paused_until <= self.world.now

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Task:
        """Run a coroutine in this process."""
        task = Task(self, work, name)
        self.tasks.append(task)
        self.world.soon(task.step, task)
        return task


class Future:
    """A value to come, for one coroutine that awaits it. An exception as its value is raised there."""

    __slots__ = ("done", "task", "value", "watchers")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.task: Task | None = None
        self.watchers: list[Callable[[], None]] = []  # who is told that it is done

    def resolve(self, value: Any) -> None:
        """The first one counts."""
        if not self.done:
            self.done, self.value = True, value
            for watcher in self.watchers:
                watcher()
            if self.task is not None:
                self.task.process.world.soon(self.task.step, self.task)
                if self.task.traps:
                    self.task.passes("wake")

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.done:
            yield self
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Timer:
    """An event that resolves a future, unless something else has."""

    __slots__ = ("future", "value")

    def __init__(self, future: Future, value: Any) -> None:
        self.future = future
        self.value = value

    def __call__(self) -> None:
        """Its time has come."""
        self.future.resolve(self.value)


class Trap(NamedTuple):
    """What happens to a task when it next comes by a place."""

    others: int  # how often it may pass before
    wire: bool  # whether only messages count, not mere waiting
    action: Callable[[], None]


class Task(Actor):
    """A coroutine at work in a process."""

    __slots__ = (
        "__weakref__", "attempts", "cancels", "doom", "ended", "label", "parked", "process", "sends", "traps", "work",
    )  # fmt: skip

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> None:
        super().__init__(process.world, f"{process.name}/{name}")
        self.process = process
        self.work = work
        self.label = name
        self.parked: Future | None = None
        self.doom: BaseException | None = None
        self.cancels = 0  # how often it was asked to end, as asyncio counts that
        self.traps: dict[str, Trap] = {}  # by place
        self.sends = False  # its await is a message's
        self.ended = False
        self.attempts: list[bytes] = []  # the tokens of those that its call has made

    def step(self) -> None:
        """Run until the next parking."""
        world = self.process.world
        world.current = world.acting = self
        doom, self.doom = self.doom, None
        try:
            self.parked = None
            future: Future = self.work.throw(doom) if doom is not None else self.work.send(None)
            future.task, self.parked = self, future
            if self.doom is not None:  # it was cancelled while it ran
                future.done = True
                world.soon(self.step, self)
        except (StopIteration, Cancelled):
            self.ended = True
        except Exception as error:  # noqa: BLE001 (a bug of the code under test, or of the scenario)
            self.ended = True
            world.failed(self, error)
        finally:
            world.current = None
        if self.traps and not self.ended:
            self.passes("park")

    def passes(self, place: str) -> None:
        """It comes by a place where a trap may be."""
        if place not in self.traps:
            return
        trap = self.traps[place]
        if trap.wire and not self.sends:
            return
        if trap.others:
            self.traps[place] = trap._replace(others=trap.others - 1)
        else:
            del self.traps[place]
            trap.action()

    def cancel(self) -> None:
        """Throw Cancelled in, where it is parked now, or will be next."""
        if self.ended:
            return
        self.cancels += 1
        if self.doom is not None:
            return
        self.doom, future = Cancelled(), self.parked
        if future is not None and not future.done:  # else it runs, or its step is scheduled already
            future.done = True
            self.process.world.soon(self.step, self)

    # As asyncio's tasks have it

    def done(self) -> bool:
        """Whether it has ended."""
        return self.ended

    def cancelling(self) -> int:
        """How often it was asked to end."""
        return self.cancels

    def uncancel(self) -> int:
        """One of those who asked takes it back: how many are left."""
        self.cancels = max(0, self.cancels - 1)
        return self.cancels

    async def before_send(self) -> None:
        """The place before an await, where a process may stop, die, or get its Ctrl-C. Only with a trap set."""
        self.passes("before_send")
        if not self.process.awake:
            delayed = Future()
            self.world.at(self.process.paused_until, Timer(delayed, None), self.process)
            await delayed
        elif self.doom is not None:
            doom, self.doom = self.doom, None
            try:
                raise doom
            finally:
                del doom  # it would keep itself, and every lease in the frames that it came through
