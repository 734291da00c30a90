"""Processes and their coroutines, which run until they park on a `Future`.

Rules.
(a) A step runs a moment after its cause, as with threads and loops; chance decides which of several steps runs first.
(b) A cancellation is an exception that is thrown into a parked coroutine, even if its reply has arrived already.
(c) A *trap* springs at one of three points of an await: `before_send`, before anything was sent; `park`, right after;
    `wake`, when the awaited result has arrived and the coroutine has not run yet. Or it springs at `handover`, when a
    server hands its lock to a waiter: then the checks of the server call `pass_point`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .chance import Actor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from .scheduler import World


class Cancelled(BaseException):
    """Thrown into a coroutine: stands for a cancelled task or Ctrl-C of the real world."""


class Process(Actor):
    """A client's process: it has a clock, and may pause or crash."""

    def __init__(self, world: World, name: str, *, offset: float = 0.0, rate: float = 1.0) -> None:
        super().__init__(world, name)
        self.base = name.partition("~")[0]  # a process that replaces this one has the same base
        self.offset = offset
        self.rate = rate
        self.alive = True
        self.paused_until = 0.0
        self.pauses = 0
        self.tasks: list[Task] = []

    def clock(self) -> float:
        """The process's own clock now: it started at any time and runs a little fast or slow."""
        return self.offset + self.world.now * self.rate

    def when(self, clock: float) -> float:
        """Return the world's time at which the process's clock will show this time."""
        return (clock - self.offset) / self.rate

    def pause(self, seconds: float) -> None:
        """Stop the process, as SIGSTOP does; its clock goes on."""
        self.paused_until = max(self.paused_until, self.world.now + seconds)
        self.pauses += 1

    @property
    def awake(self) -> bool:
        """Whether the process can run code now."""
        return self.alive and self.paused_until <= self.world.now

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Task:
        """Run a coroutine in this process."""
        task = Task(self, work, name)
        self.tasks.append(task)
        self.world.soon(task.step, task)
        return task


class Future:
    """A later value, which one coroutine awaits. An exception as the value is raised in that coroutine."""

    __slots__ = ("began", "done", "task", "value", "watchers")

    def __init__(self, began: float = 0.0) -> None:
        self.began = began  # when its message was sent, by the world's time
        self.done = False
        self.value: Any = None
        self.task: Task | None = None
        self.watchers: list[Callable[[], None]] = []  # called when the future is done

    def resolve(self, value: Any) -> None:
        """Set the value, unless the future has one."""
        if not self.done:
            self.done, self.value = True, value
            for watcher in self.watchers:
                watcher()
            if self.task is not None:
                self.task.process.world.soon(self.task.step, self.task)
                if self.task.traps:
                    self.task.pass_point("wake")

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.done:
            yield self
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Timer:
    """An event that resolves a future, unless the future is done before."""

    __slots__ = ("future", "value")

    def __init__(self, future: Future, value: Any) -> None:
        self.future = future
        self.value = value

    def __call__(self) -> None:
        """Resolve the future at the time of the event."""
        self.future.resolve(self.value)


class Trap(NamedTuple):
    """A fault that strikes when its task passes a point: `Task.traps` has the trap under the name of that point."""

    skips: int  # how many such points the task passes before
    messages_only: bool  # whether only awaits of messages count
    action: Callable[[], None]


class Task(Actor):
    """A coroutine at work in a process."""

    __slots__ = (
        "__weakref__", "attempts", "cancels", "ended", "label", "parked", "pending", "process", "sends", "traps",
        "work",
    )  # fmt: skip

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any], name: str) -> None:
        super().__init__(process.world, f"{process.name}/{name}")
        self.process = process
        self.work = work
        self.label = name
        self.parked: Future | None = None
        self.pending: BaseException | None = None
        self.cancels = 0  # requests to cancel this task, as asyncio counts these
        self.traps: dict[str, Trap] = {}  # by point
        self.sends = False  # whether its current await is that of a message
        self.ended = False
        self.attempts: list[bytes] = []  # tokens of the attempts of its current call

    def step(self) -> None:
        """Run the coroutine until it parks again."""
        world = self.process.world
        world.current = world.acting = self
        pending, self.pending = self.pending, None
        try:
            self.parked = None
            future: Future = self.work.throw(pending) if pending is not None else self.work.send(None)
            future.task, self.parked = self, future
            if self.pending is not None:  # the task was cancelled while it ran
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
            self.pass_point("park")

    def pass_point(self, point: str) -> None:
        """Note that the task passes this point, and spring its trap if there is one."""
        if point not in self.traps:
            return
        trap = self.traps[point]
        if trap.messages_only and not self.sends:
            return
        if trap.skips:
            self.traps[point] = trap._replace(skips=trap.skips - 1)
        else:
            del self.traps[point]
            trap.action()

    def cancel(self, msg: str | None = None) -> None:
        """Throw Cancelled, with this message, into the coroutine where it is parked now, or parks next."""
        if self.ended:
            return
        self.cancels += 1
        if self.pending is not None:
            return
        self.pending, future = Cancelled() if msg is None else Cancelled(msg), self.parked
        if future is not None and not future.done:  # else the coroutine runs, or its step is scheduled
            future.done = True
            self.process.world.soon(self.step, self)

    # The methods of asyncio's tasks

    def done(self) -> bool:
        """Whether the task has ended."""
        return self.ended

    def cancelling(self) -> int:
        """Return the number of requests to cancel the task."""
        return self.cancels

    def uncancel(self) -> int:
        """Take one request to cancel back. Returns how many are left."""
        self.cancels = max(0, self.cancels - 1)
        return self.cancels

    async def before_send(self) -> None:
        """Pass the point before an await, at which a trap may pause, crash or cancel. Called only if a trap is set."""
        self.pass_point("before_send")
        if not self.process.awake:
            delayed = Future()
            self.world.at(self.process.paused_until, Timer(delayed, None), self.process)
            await delayed
        elif self.pending is not None:
            pending, self.pending = self.pending, None
            try:
                raise pending
            finally:
                del pending  # else a reference cycle would keep alive the leases in its frames


def process_of(actor: Actor) -> Process | None:
    """The process of an actor; None for the world outside."""
    if isinstance(actor, Task):
        return actor.process
    return actor if isinstance(actor, Process) else None
