"""A worker process: `python -m model.histories.worker DIRECTORY PROCESS`; the directory has `settings` and `target`.

The turns are written once, as `async def`. With asyncio they run as tasks; with threads each worker is a thread that
drives its coroutine, in which nothing ever suspends. A line on stdin is an `Order` of a phase: more workers, which play
the turn of the order. The line "drain", or the end of stdin, begins the drain: no new section, and those that are open
end soon.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import interlock
import interlock.aio
from interlock.errors import LeaseLost
from model.histories import hookless
from model.histories.lines import Pen, clock
from model.histories.settings import ALL, LIMIT, Order, Settings, Turn, draw, draw_kept
from model.histories.store import Store

if TYPE_CHECKING:
    from random import Random

DEAF = 3.0  # seconds that a worker waits to hear of a loss that it knows of
LONGEST = 12.0  # seconds of a body
SHORTEST = 0.004  # seconds between two looks at the lease, and more in a longer body
DRAIN = b"drain"
FORK = b"fork"  # followed by the name of the child, and where: inside of a section, or outside
LIFE = 90  # seconds, at most, of the child of a fork


class BodyError(Exception):
    """What bodies raise by themselves."""


class Entering:
    """`async with` over what has `with` only."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    async def __aenter__(self) -> Any:
        return self.thing.__enter__()

    async def __aexit__(self, *error: object) -> Any:
        return self.thing.__exit__(*error)


class Threads:
    """What a turn needs of its mode."""

    name = "threads"
    api: Any = interlock.Interlock

    async def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    async def do(self, call: Any, *args: Any, **options: Any) -> Any:
        return call(*args, **options)

    def entering(self, thing: Any) -> Any:
        return Entering(thing)

    async def elsewhere(self, work: Any) -> None:
        """Run it in a thread of its own, and wait for its end."""
        thread = threading.Thread(target=drive, args=(work,))
        thread.start()
        thread.join()

    def cancelling(self) -> int:
        return 0


class Asyncio:
    name = "asyncio"
    api: Any = interlock.aio.Interlock

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    async def do(self, call: Any, *args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        return await result if inspect.isawaitable(result) else result

    def entering(self, thing: Any) -> Any:
        return thing

    async def elsewhere(self, work: Any) -> None:
        """Run it in a task of its own, which nobody cancels, and wait for its end."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def cancelling(self) -> int:
        task = asyncio.current_task()
        return task.cancelling() if task else 0


def drive(work: Any) -> None:
    """Finish a coroutine that never suspends."""
    with contextlib.suppress(StopIteration):
        work.send(None)
        raise RuntimeError("a coroutine of a thread was suspended")


class Worker:
    """One thread or task, with its random numbers."""

    def __init__(self, process: Process, label: str) -> None:
        self.process = process
        self.mode = process.mode
        self.pen = process.pen
        self.name = f"{process.name}/{label}"
        self.random: Random = process.settings.random(self.name)
        self.number = 0
        self.holds = 0

    async def turns(self) -> None:
        """Sections, one after the other, until the drain."""
        while not self.process.draining:
            self.process.fork_if_wanted("outside")
            await self.play_one()

    async def keep(self) -> None:
        """Hold the lock of the keepers again and again, until the drain."""
        while not self.process.draining:
            await self._play(draw_kept(self.random, self.process.settings))

    async def play_one(self) -> None:
        """Play a section, which the seed chooses."""
        await self._play(draw(self.random, self.process.settings, self.mode.name))

    async def obey(self, order: Order) -> None:
        """Play the turn of an order once, or again and again for its time, each time with a body of another length."""
        until, once = clock() + order.seconds, order.seconds == 0
        while once or (clock() < until and not self.process.draining):
            turn = order.turn
            if not once:
                turn = turn.but(
                    seconds=self.random.expovariate(1 / turn.seconds),
                    style=self.random.choice((turn.style, "released")),
                    blind=self.random.random() < 0.5,
                )
            await self._play(turn)
            if once:
                return

    async def _play(self, turn: Turn) -> None:
        self.number += 1
        section = Run(self, f"{self.name}#{self.number}", turn)
        if self.mode.name == "asyncio" and turn.own_task:
            await self._as_task(section)
        else:
            await section.play()
        await self._undisturbed(section, self.mode.sleep(turn.pause))

    async def _as_task(self, section: Run) -> None:
        """Play the section as a task of its own, which the worker may cancel."""
        task = asyncio.ensure_future(section.play())
        if (after := section.turn.cancel) is not None:
            await self._undisturbed(section, asyncio.wait([task], timeout=after))
            if task.cancel("by the worker"):
                section.pen.write("cancel", s=section.id)
        while not task.done():
            await self._undisturbed(section, asyncio.wait([task]))

    async def _undisturbed(self, section: Run, waiting: Any) -> None:
        """Outside of sections nobody cancels a worker."""
        try:
            await waiting
        except asyncio.CancelledError:
            self.process.unhandled(None, f"a CancelledError outside of {section.id}, which nobody had asked for")


class Run:
    """One section as it is played."""

    def __init__(self, worker: Worker, name: str, turn: Turn) -> None:
        self.worker, self.id, self.turn = worker, name, turn
        self.mode, self.pen, self.process, self.random = worker.mode, worker.pen, worker.process, worker.random
        self.locks = worker.process.locks

    async def play(self) -> None:
        """Play the section, and write how it ended. Raises nothing."""
        turn = self.turn
        self.pen.write("begin", s=self.id, kind=turn.kind, style=turn.style, timeout=turn.timeout)
        outcome, text, before = "", "", self.mode.cancelling()
        try:
            await self._kind()
        except BaseException as error:
            outcome, text = type(error).__name__, str(error)
            if not isinstance(error, interlock.LockError | asyncio.CancelledError | BodyError):
                text = traceback.format_exc()[-1500:]
        self.pen.write("end", s=self.id, outcome=outcome, cancelling=self.mode.cancelling() - before, text=text)

    def options(self) -> dict[str, Any]:
        turn = self.turn
        return {
            "ttl": turn.ttl, "timeout": turn.timeout, "renew": turn.renew, "max_hold": turn.max_hold,
            "fair": turn.fair, "on_lost": self.on_lost,
        }  # fmt: skip

    def on_lost(self, lease: Any) -> None:
        if not self.id.startswith(f"{self.process.name}/"):
            return  # in the child of a fork: the hold is the parent's
        for hold in self.current:
            if self.tokens.get(hold) == getattr(lease, "token", ""):
                self.pen.write("on_lost", h=hold)

    async def _kind(self) -> None:
        turn, locks = self.turn, self.locks
        self.current: list[str] = []  # the holds that are open
        self.tokens: dict[str, str] = {}
        self.writes: dict[str, tuple[str, int]] = {}  # hold -> the name and fence with which it writes
        name = turn.names[0]
        match turn.kind:
            case "lock":
                await self.use(locks.lock(name, **self.options()), [(name, 1, 1, "")])
            case "rlock":
                await self.use(locks.rlock(name, **self.options()), [(name, 1, 1, "")])
            case "owner":
                group = f"owner {turn.owner}"
                await self.use(locks.rlock(name, owner=turn.owner, **self.options()), [(name, 1, 1, group)])
            case "rwlock" if turn.side == "downgrade":
                await self.downgrade(locks.rwlock(name, **self.options()), name)
            case "rwlock":
                both = locks.rwlock(name, **self.options())
                side, weight = (both.read(), 1) if turn.side == "read" else (both.write(), ALL)
                await self.use(side, [(name, weight, ALL, "")])
            case "semaphore":
                pool = locks.semaphore(name, LIMIT, **self.options())
                if turn.style in {"with", "crossed"}:
                    await self.use(pool, [(name, 1, LIMIT, "")])
                else:
                    acquire = functools.partial(pool.acquire, permits=turn.permits)
                    await self.use(pool, [(name, turn.permits, LIMIT, "")], acquire)
            case "multi":
                options = self.options() | {"on_lost": None}
                del options["timeout"]
                members = [self.member(each, options) for each in turn.names]
                whole = locks.multi(*(member for member, _ in members), timeout=turn.timeout)
                await self.use(whole, [part for _, part in members])
            case "election":
                await self.use(locks.election(name, **self.options()), [(name, 1, 1, "")])
            case "once":
                await self.once(name)

    def member(self, name: str, options: dict[str, Any]) -> tuple[Any, tuple[str, int, int, str]]:
        """A member of a multi, and what it weighs."""
        if name == "pool":
            return self.locks.semaphore(name, LIMIT, **options), (name, 1, LIMIT, "")
        if name == "books":
            both = self.locks.rwlock(name, **options)
            return (
                (both.read(), (name, 1, ALL, "")) if self.turn.side == "read" else (both.write(), (name, ALL, ALL, ""))
            )
        return self.locks.lock(name, **options), (name, 1, 1, "")

    # One hold, or those of a multi

    def ask(self, parts: list[tuple[str, int, int, str]], timeout: float | None) -> list[str]:
        holds = []
        for name, weight, limit, group in parts:
            self.worker.holds += 1
            holds.append(f"{self.worker.name}.{self.worker.holds}")
            self.pen.write(
                "ask", h=holds[-1], s=self.id, name=name, kind=self.turn.kind, weight=weight, limit=limit, group=group,
                timeout=timeout,
            )  # fmt: skip
        self.current = [*self.current, *holds]
        return holds

    def got(self, holds: list[str], parts: list[tuple[str, int, int, str]], lease: Any) -> None:
        several = isinstance(lease, interlock.MultiLease | interlock.aio.MultiLease)
        for hold, (name, weight, limit, group) in zip(holds, parts, strict=True):
            each = lease[name] if several else lease
            self.tokens[hold] = each.token
            self.process.held[hold] = each
            if weight == limit and not group:  # else another one with a higher fence may write beside it
                self.writes[hold] = name, each.fence
            self.pen.write("got", h=hold, token=each.token, fence=each.fence)

    def write(self, holds: list[str]) -> None:
        """Write what these holds protect, without another look at the lease."""
        for hold in holds:
            if hold in self.writes:
                since = clock()
                accepted = self.process.store.write(*self.writes[hold])
                self.pen.write("wrote", t=since, until=clock(), h=hold, accepted=accepted)

    def each(self, event: str, holds: list[str], **about: Any) -> None:
        for hold in holds:
            if event == "letting":
                self.process.held.pop(hold, None)
            self.pen.write(event, h=hold, **about)

    @contextlib.contextmanager
    def letting(self, holds: list[str]) -> Any:
        """Write what comes out of leaving the `with` of a lease."""
        try:
            yield
        except BaseException as error:
            self.each("let", holds, ours=None, error=names(error))
            raise
        else:
            self.each("let", holds, ours=None, error="")

    async def use(self, thing: Any, parts: list[tuple[str, int, int, str]], acquire: Any = None) -> None:
        """Acquire it, be inside, and let it go, in the style of the turn."""
        turn = self.turn
        holds = self.ask(parts, turn.timeout)
        if turn.style in {"with", "crossed"}:
            manager = self.mode.entering(thing) if turn.style == "with" else self.crossed(thing)
            await self._with(manager, holds, parts, thing)
            return
        try:
            lease = await self.mode.do(acquire or thing.acquire)
        except BaseException as error:
            self.each("failed", holds, error=type(error).__name__)
            raise
        self.got(holds, parts, lease)
        if turn.style == "handed":
            await self.mode.elsewhere(self.handed(lease, holds, thing))
        elif turn.style == "entered":
            await self._body(lease, holds, thing)
        elif turn.style == "dropped" and turn.depth == 1:
            try:
                await self.stay(lease, holds, thing, entered=False)
            finally:
                self.each("letting", holds, how="drop")
            del lease
            self.each("let", holds, ours=None, error="")
        else:
            await self._released(lease, holds, thing)

    async def _with(self, manager: Any, holds: list[str], parts: Any, thing: Any) -> None:
        granted = False
        try:
            async with manager as lease:
                granted = True
                self.got(holds, parts, lease)
                try:
                    await self.stay(lease, holds, thing, entered=True)
                finally:
                    self.each("letting", holds, how="with")
        except BaseException as error:
            if granted:
                self.each("let", holds, ours=None, error=names(error))
            else:
                self.each("failed", holds, error=type(error).__name__)
            raise
        self.each("let", holds, ours=None, error="")

    async def _body(self, lease: Any, holds: list[str], thing: Any) -> None:
        with self.letting(holds):
            async with self.mode.entering(lease):
                try:
                    await self.stay(lease, holds, thing, entered=True)
                finally:
                    self.each("letting", holds, how="with")

    async def _released(self, lease: Any, holds: list[str], thing: Any) -> None:
        error: BaseException | None = None
        try:
            await self.stay(lease, holds, thing, entered=False)
        except BaseException as raised:
            error = raised
        self.each("letting", holds, how="release")
        try:
            ours = await self.mode.do(lease.release)
        except BaseException as failed:
            self.each("let", holds, ours=None, error=type(failed).__name__)
            if error is None or not isinstance(failed, interlock.LockError):
                raise
        else:
            self.each("let", holds, ours=ours, error="")
        if error is not None:
            raise error

    async def handed(self, lease: Any, holds: list[str], thing: Any) -> None:
        """Play the rest of a section in another thread or task; the lines have it as a section of its own."""
        name = f"{self.id}/handed"
        self.pen.write("begin", s=name, kind=self.turn.kind, style="handed", timeout=None)
        outcome, text = "", ""
        try:
            await self._body(lease, holds, thing)
        except BaseException as error:
            outcome, text = type(error).__name__, str(error)
        self.pen.write("end", s=name, outcome=outcome, cancelling=self.mode.cancelling(), text=text)

    def crossed(self, thing: Any) -> Any:
        """`with thing`, entered here and left in another thread or task."""
        mode = self.mode

        class Crossed:
            async def __aenter__(self) -> Any:
                return await mode.entering(thing).__aenter__()

            async def __aexit__(self, *error: object) -> None:
                raised: list[BaseException] = []

                async def leave() -> None:
                    try:
                        await mode.entering(thing).__aexit__(*error)
                    except BaseException as failed:
                        raised.append(failed)

                await mode.elsewhere(leave())
                if raised:
                    raise raised[0]

        return Crossed()

    # Inside

    async def stay(self, lease: Any, holds: list[str], thing: Any, *, entered: bool, level: int = 1) -> None:
        """Be at work under the lease."""
        turn = self.turn
        try:
            await self._stay(lease, holds, thing, entered=entered, level=level)
        except asyncio.CancelledError:
            if turn.turns and entered and level == 1:
                raise BodyError("made of a CancelledError") from None
            raise
        if turn.fails and level == 1:
            raise BodyError("the body's own")

    async def _stay(self, lease: Any, holds: list[str], thing: Any, *, entered: bool, level: int) -> None:
        turn, random = self.turn, self.random
        until = clock() + min(LONGEST, turn.seconds) / level
        extends, goes_in, likely = turn.extends, level < turn.depth, 0.5  # to write: at the beginning, and later on
        lost = lease.lost if turn.deaf else None  # a later look would make the event and set it in one step
        while True:  # at least once: a section that begins in the drain proves something, too
            now = clock()
            try:
                lease.ensure()
            except LeaseLost as error:
                self.each("lost", holds, why=str(error))
                if self.random.random() < 0.5:  # as a holder does that was stopped behind its last look
                    self.write(holds)
                if lost is not None:
                    await self.deaf(lost, holds, entered=entered)
                if turn.ignores and entered:
                    return
                raise
            for hold in holds:
                self.pen.write("ok", t=now, h=hold)
            self.process.fork_if_wanted("inside")
            if random.random() < likely:
                self.write(holds)
            likely = 0.1
            if extends and (turn.extends_to or random.random() < 0.1):
                extends = False
                with contextlib.suppress(LeaseLost, interlock.Unavailable):
                    ttl = turn.extends_to or random.uniform(0.1, self.process.settings.max_ttl)
                    await self.mode.do(lease.extend, ttl)
            elif goes_in and random.random() < 0.3:
                goes_in = False
                await self.again(thing, holds, level)
            if (left := until - clock()) <= 0 or self.process.draining:
                return
            if turn.blind:
                await self.mode.sleep(left)
                return
            await self.mode.sleep(min(left, random.uniform(0.001, turn.looks or SHORTEST + turn.seconds / 20)))

    async def again(self, thing: Any, holds: list[str], level: int) -> None:
        """Enter an rlock once more, in this thread or task."""
        if self.turn.style == "handed":  # in another one it would wait for itself
            return
        if self.random.random() < 0.5:
            async with self.mode.entering(thing) as inner:
                self.each("nested", holds, token=inner.token, fence=inner.fence)
                await self.stay(inner, holds, thing, entered=True, level=level + 1)
            return
        inner = await self.mode.do(thing.acquire)
        try:
            self.each("nested", holds, token=inner.token, fence=inner.fence)
            await self.stay(inner, holds, thing, entered=False, level=level + 1)
        finally:
            await self.mode.do(inner.release)

    async def deaf(self, lost: Any, holds: list[str], *, entered: bool) -> None:
        """A body that does not ask: does it hear of the loss? By its cancellation, if it is one of asyncio."""
        since = clock()
        try:
            while clock() < since + DEAF:
                if lost.is_set() and not (entered and self.mode.name == "asyncio"):
                    self.each("told", holds)
                    return
                await self.mode.sleep(0.01)
        except asyncio.CancelledError:
            self.each("told", holds)
            raise
        self.each("untold", holds, waited=clock() - since)

    # Others

    async def downgrade(self, both: Any, name: str) -> None:
        """Write, and go on reading before the write lease is given back."""
        written = [(name, ALL, ALL, "")]
        holds = self.ask(written, self.turn.timeout)
        try:
            lease = await self.mode.do(both.write().acquire)
        except BaseException as error:
            self.each("failed", holds, error=type(error).__name__)
            raise
        self.got(holds, written, lease)
        read = [(name, 1, ALL, holds[0])]
        reading: Any = None
        reads: list[str] = []
        try:
            await self.stay(lease, holds, both, entered=False)
            reads = self.ask(read, self.turn.timeout)
            try:
                reading = await self.mode.do(both.read().acquire)
            except BaseException as error:
                self.each("failed", reads, error=type(error).__name__)
                raise
            self.got(reads, read, reading)
        finally:
            try:
                self.each("letting", holds, how="release")
                self.each("let", holds, ours=await self.mode.do(lease.release), error="")
            except BaseException as error:
                self.each("let", holds, ours=None, error=type(error).__name__)
                raise
            finally:
                if reading is not None:
                    await self._body(reading, reads, both)

    async def once(self, name: str) -> None:
        """Work that runs once at a time."""
        turn, parts = self.turn, [(name, 1, 1, "")]
        limit = turn.max_hold or turn.ttl * 2
        job = self.locks.once(name, at_most=limit, at_least=min(limit, 0.05) if self.turn.extends else 0.0)
        holds = self.ask(parts, None)
        granted = False

        async def work(lease: Any) -> None:
            nonlocal granted
            granted = True
            self.got(holds, parts, lease)
            try:
                await self.stay(lease, holds, job, entered=True)
            finally:
                self.each("letting", holds, how="with")

        try:
            ran = await self.mode.do(job.run, work if self.mode.name == "asyncio" else lambda lease: drive(work(lease)))
        except BaseException as error:
            if granted:
                self.each("let", holds, ours=None, error=names(error))
            else:
                self.each("failed", holds, error=type(error).__name__)
            raise
        if ran:
            self.each("let", holds, ours=None, error="")
        else:
            self.each("failed", holds, error="Skipped")


def names(error: BaseException | None) -> str:
    """The error and those that it is chained to, by name."""
    found: list[str] = []
    todo, seen = [error], set[int]()
    while todo:
        if (each := todo.pop(0)) is not None and id(each) not in seen:
            seen.add(id(each))
            found.append(type(each).__name__)
            todo += [each.__cause__, each.__context__]
    return " ".join(found)


class Ear(logging.Handler):
    def __init__(self, pen: Pen) -> None:
        super().__init__(logging.ERROR)
        self.pen = pen

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.pen.write("logged", text=record.getMessage() + cause)


class Process:
    """All workers of a process."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.directory = directory
        self.settings = Settings.loads((directory / "settings").read_text()).of(name)
        self.target = json.loads((directory / "target").read_text())
        self.pen = Pen(directory, name)
        self.store = Store(directory)
        self.held: dict[str, Any] = {}  # the leases of the open holds
        self.wanted: dict[str, list[str]] = {"inside": [], "outside": []}  # the names of children, by where to fork
        self.draining = False
        self.mode: Any = Asyncio() if name.endswith("a") else Threads()
        self.locks: Any = None
        logging.getLogger("interlock").addHandler(Ear(self.pen))
        sys.unraisablehook = lambda about: self.unhandled(about.exc_value)
        threading.excepthook = lambda about: self.unhandled(about.exc_value)

    def unhandled(self, error: BaseException | None, text: str = "") -> None:
        if not isinstance(error, ResourceWarning):
            shown = "".join(traceback.format_exception(error))[-1500:] if error else ""
            self.pen.write("unhandled", text=f"{text} {shown}".strip())

    def open(self) -> Any:
        made = self.mode.api.quorum if isinstance(self.target, list) else self.mode.api
        return made(self.target, max_ttl=self.settings.max_ttl)

    def run(self) -> None:
        self._start()
        if self.mode.name == "asyncio":
            asyncio.run(self._loop())
        else:
            self._threads()
        self.pen.write("stop")

    def _start(self) -> None:
        imported = str(Path(interlock.__file__).parent)
        self.pen.write("start", mode=self.mode.name, pid=os.getpid(), imported=imported)

    # The child of a fork

    def fork_if_wanted(self, where: str) -> None:
        """Fork here, if the controller wants that. The child never returns."""
        try:
            name = self.wanted[where].pop()
        except IndexError:
            return
        # Kept to the end of the child: a task that is collected before it is done tells of that.
        _of_parent = asyncio.all_tasks() if self.mode.name == "asyncio" else set()
        if pid := hookless.fork(alone=self.mode.name == "asyncio"):
            self.pen.write("fork", child=name, pid=pid)
            return
        code = 1
        try:
            signal.alarm(LIFE)
            self.name, self.wanted = name, {"inside": [], "outside": []}
            self.pen.go_on_as(self.directory, name)
            self._start()
            self.store = Store(self.directory)
            inherited, self.held = self.held, {}
            if self.mode.name == "asyncio":
                asyncio._set_running_loop(None)
                asyncio.run(self._child(inherited))
            else:
                drive(self._child(inherited))
            code = 0
        except BaseException as error:
            self.unhandled(error)
        finally:
            os._exit(code)

    async def _child(self, inherited: dict[str, Any]) -> None:
        """Look at what the parent holds, and play some sections with its Interlock."""
        if self.mode.name == "asyncio":
            self._report_errors()
        for hold, lease in inherited.items():
            passed, ours, error = True, None, ""
            try:
                lease.ensure()
            except LeaseLost:
                passed = False
            try:
                ours = await self.mode.do(lease.release)
            except Exception as raised:
                error = repr(raised)
            self.pen.write("inherited", h=hold, passed=passed, ours=ours, error=error)
        worker = Worker(self, "w0")
        for _ in range(worker.random.randrange(3, 12)):
            await worker.play_one()
        if worker.random.random() < 0.5:  # else it ends as a process does that knows nothing of interlock
            await self.mode.do(self.locks.close)
            atexit._run_exitfuncs()
            self.pen.write("stop")

    def _report_errors(self) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, about: self.unhandled(about.get("exception"), about["message"])
        )

    def _workers(self) -> list[Any]:
        """The coroutines of the workers that this process has from its start."""
        keepers = [Worker(self, "k0").keep()] if self.settings.has_keepers else []
        return [*(Worker(self, f"w{number}").turns() for number in range(self.settings.workers)), *keepers]

    # Orders

    def _orders(self, line: bytes) -> list[Any]:
        """The coroutines of the workers that obey an order."""
        if line.startswith(FORK):
            _, name, where = line.decode().split()
            self.wanted[where].append(name)
            return []
        order = Order.loads(line.decode())
        return [Worker(self, f"o{order.number}.{number}").obey(order) for number in range(order.workers)]

    def _threads(self) -> None:
        self.locks = self.open()
        threads = [threading.Thread(target=drive, args=(each,)) for each in self._workers()]
        for thread in threads:
            thread.start()
        for line in sys.stdin.buffer:
            if line.strip() == DRAIN:
                break
            more = [threading.Thread(target=drive, args=(each,)) for each in self._orders(line)]
            threads += more
            for thread in more:
                thread.start()
        self.draining = True
        for thread in threads:
            thread.join()
        self.locks.close()

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        self._report_errors()
        self.locks = self.open()
        tasks = [asyncio.ensure_future(each) for each in self._workers()]
        rest = b""

        def hear() -> None:
            nonlocal rest
            data = os.read(sys.stdin.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.strip() == DRAIN:
                    data = b""
                    break
                tasks.extend(asyncio.ensure_future(each) for each in self._orders(line))
            if not data:
                self.draining = True
                loop.remove_reader(sys.stdin)

        loop.add_reader(sys.stdin, hear)
        while not self.draining or not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.05)
        await asyncio.gather(*tasks)
        await self.locks.close()


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the controller, even when stopped
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
    process = Process(Path(sys.argv[1]), sys.argv[2])
    if process.settings.plant:
        from model.histories import plants  # here: an older version may lack what this breaks

        plants.plant(process.settings.plant)
    process.run()


if __name__ == "__main__":
    main()
