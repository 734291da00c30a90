"""A program that works under locks while signals interrupt it at random moments, and then looks for leftovers.

    python interrupted.py URL --mode threads --interrupts 1000 --seed 7

Each round does one kind of work under a lock of its own, or under one that another client holds and releases, and
after a random time a signal handler raises. Afterwards nothing may be held, or be renewed; no thread may be refused.
What was acquired by `acquire()` alone may run out: between its return and the next step only Python has the lease.
In asyncio no task may have lost its wake-up: the result of the future that the task awaits is there, and asyncio has
forgotten to run the task on. A handler that raises between two steps of asyncio causes that, so this program tells
apart who called asyncio. It does not raise where the loop itself is at work for the task, since no library can mend
what asyncio loses there. It raises where asyncio is at work for a call of interlock: a loss there is a fault of
interlock.
Exits with 1 if something is left, or if nothing moves for a minute, and says after which seed and round.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import redis

import interlock
import interlock.aio

SHORT = 2.0  # seconds: the ttl of what may have to run out
LONG = 30.0
STUCK = 60  # seconds without a finished round, after which the program gives up
ASYNCIO = str(Path(asyncio.__file__).parent)


class Stop(BaseException):
    """The exception of the signal handler."""


def stop(*_) -> None:
    raise Stop


class Interrupts:
    """One signal after a random time, about as long as the work takes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.usual = 0.001  # seconds that the work takes
        self.hits = 0
        self.started = 0.0

    def begin(self) -> None:
        """The signal comes after a random time."""
        self.started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(1e-5, self.chance.uniform(0, 1.2) * self.usual))

    def end(self, *, hit: bool) -> None:
        """The work has ended, by a signal or before."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.hits += hit
        if not hit:
            self.usual = min(0.05, 0.9 * self.usual + 0.1 * (time.monotonic() - self.started))


def works(locks, name: str):
    """Each kind of work: its name, and a function of the lockable that it uses."""
    yield "with lock", locks.lock(name, ttl=LONG), None
    yield "with semaphore", locks.semaphore(f"{name}:s", 2, ttl=LONG), None
    yield "with rlock", locks.rlock(name, ttl=LONG), "nested"
    yield "with write", locks.rwlock(f"{name}:w", ttl=LONG).write(), None
    yield "with multi", locks.multi(locks.lock(f"{{{name}}}1"), locks.rlock(f"{{{name}}}2")), None
    yield "synchronized", locks.synchronized(name, ttl=LONG), "decorate"
    yield "once", locks.once(f"{name}:o", at_most=20), "run"
    yield "election", locks.election(f"{name}:e", ttl=LONG), None
    yield "acquire", locks.lock(f"{name}:a", ttl=SHORT), "acquire"


def work(lockable, way: str | None) -> None:
    """The work of one round, in threads."""
    if way == "decorate":
        lockable(lambda: None)()
    elif way == "run":
        lockable.run(lambda _: None)
    elif way == "acquire":
        lockable.acquire().release()
    else:
        with lockable:
            if way == "nested":
                work(lockable, None)


async def awork(lockable, way: str | None) -> None:
    """The work of one round, in asyncio."""
    if way == "decorate":
        await lockable(_nothing)()
    elif way == "run":
        await lockable.run(_nothing)
    elif way == "acquire":
        await (await lockable.acquire()).release()
    else:
        async with lockable:
            if way == "nested":
                await awork(lockable, None)


async def _nothing(*_) -> None: ...


class Contender(threading.Thread):
    """Another client, which holds a lockable for a moment, so that the round gets a handover."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.locks = interlock.Interlock(url)
        self.name_of: list[str] = []
        self.wake = threading.Semaphore(0)
        self.taken = threading.Semaphore(0)
        self.start()

    def hold(self, name: str) -> None:
        self.name_of.append(name)
        self.wake.release()
        self.taken.acquire()

    def run(self) -> None:
        while self.wake.acquire():
            if not (name := self.name_of.pop()):
                return
            with self.locks.lock(name):
                self.taken.release()
                time.sleep(0.002)

    def close(self) -> None:
        self.name_of.append("")
        self.wake.release()
        self.join()
        self.locks.close()


def left(client) -> list[str]:
    """The names that are held."""
    keys = [key for key in client.scan_iter("lock:*", count=1000) if not key.endswith(b"}")]
    return sorted(key.decode()[5:] for key in keys if client.type(key) in {b"string", b"zset"})


def wrong(client, session, made: list, within: float) -> list[str]:
    """The leftovers after the time in which all leases must be released, or run out."""
    end = time.monotonic() + within
    while True:
        gc.collect()
        renewed = [grant.resource.name for grant in session.book.held()]
        keys = left(client)
        if not keys and not renewed:
            break
        if time.monotonic() > end:
            return [f"held: {key}" for key in keys] + [f"renewed: {name}" for name in renewed]
        time.sleep(0.05)
    return [f"refused: {each.name}" for each in made if refused(each)]


def refused(lockable) -> bool:
    """Whether interlock refuses this thread or task as if it were inside a section."""
    if not hasattr(lockable, "_inside"):
        return False
    return any((lease := ref()) is not None and not lease._ended for ref in list(lockable._inside.values()))


def is_loop_at_work(frame) -> bool:
    """Whether asyncio runs for itself here, between the steps of tasks, and not because a step of a task called it."""
    while frame is not None and frame.f_code.co_filename.startswith(ASYNCIO):
        if frame.f_code is asyncio.Handle._run.__code__:
            return True
        frame = frame.f_back
    return False


def with_result(tasks) -> dict:
    """The tasks that await a future which has its result, each with that future."""
    return {task: future for task in tasks if (future := task._fut_waiter) is not None and future.done()}


async def forgotten() -> list[str]:
    """The tasks that asyncio will never run on: each still awaits what has long had its result."""
    if not (before := with_result(asyncio.all_tasks())):
        return []
    await asyncio.sleep(0.05)
    after = with_result(before)
    return [f"never woken: {task!r}" for task, future in after.items() if future is before[task]]


class Watchdog(threading.Thread):
    """Ends the process when no round has finished for a while, and says what it waits for."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(daemon=True)
        self.rounds = rounds
        self.loop: asyncio.AbstractEventLoop | None = None
        self.start()

    def run(self) -> None:
        done, quiet = 0, 0
        while quiet < STUCK:
            time.sleep(1)  # counted, not measured: the process may have been stopped
            quiet = quiet + 1 if self.rounds.done == done else 0
            done = self.rounds.done
        self.give_up()

    def give_up(self) -> None:
        print(f"  nothing moves in round {self.rounds.done}", flush=True)
        faulthandler.dump_traceback(sys.stdout, all_threads=True)
        if self.loop is not None:
            tasks = asyncio.all_tasks(self.loop)
            print("\n".join([f"  never woken: {task!r}" for task in with_result(tasks)]))
            print("\n".join([f"  waits: {task!r}" for task in tasks]), flush=True)
        os._exit(1)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("url")
    arguments.add_argument("--mode", choices=["threads", "asyncio"], default="threads")
    arguments.add_argument("--interrupts", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None  # a handler that raises in a finalizer is only printed
    signal.signal(signal.SIGALRM, stop)
    print(f"{options.mode}: {options.interrupts} interrupts, seed {options.seed}", flush=True)
    rounds = Rounds(options)
    faults = rounds.threads() if options.mode == "threads" else asyncio.run(rounds.asyncio())
    for fault in faults:
        print(f"  {fault}", flush=True)
    verdict = f"{len(faults)} FAULTS" if faults else "nothing is left"
    print(f"{options.mode}: {rounds.interrupts.hits} interrupts in {rounds.done} rounds: {verdict}", flush=True)
    return 1 if faults else 0


class Rounds:
    """The rounds of one run. In batches: what is left is looked for after each."""

    BATCH = 250  # interrupts

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.chance = random.Random(options.seed)
        self.interrupts = Interrupts(self.chance)
        self.client = redis.Redis.from_url(options.url)
        self.contender = Contender(options.url)
        self.done = 0
        self.made: list = []
        self.watchdog = Watchdog(self)

    def each(self, locks):
        """The work of each round: what to do with which lockable."""
        while self.interrupts.hits < self.options.interrupts:
            goal = min(self.options.interrupts, self.interrupts.hits + self.BATCH)
            self.made.clear()
            while self.interrupts.hits < goal:
                self.done += 1
                name = f"{os.getpid()}:{self.done}"
                kind, lockable, way = self.chance.choice(list(works(locks, name)))
                self.made.append(lockable)
                if kind in {"with lock", "with rlock"} and self.chance.random() < 0.3:
                    self.contender.hold(name)
                yield lockable, way
            yield None, None
            print(f"  {self.interrupts.hits} interrupts", flush=True)

    def threads(self) -> list[str]:
        with interlock.Interlock(self.options.url) as locks:
            for lockable, way in self.each(locks):
                if lockable is None:
                    if faults := wrong(self.client, locks._session, self.made, SHORT + 4):
                        return faults
                    continue
                hit = True
                try:
                    try:
                        self.interrupts.begin()
                        work(lockable, way)
                        hit = False
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Stop:
                    hit = True
                self.interrupts.end(hit=hit)
        self.contender.close()
        return []

    async def asyncio(self) -> list[str]:
        self.watchdog.loop = asyncio.get_running_loop()
        self.watchdog.loop.set_exception_handler(lambda *_: None)  # what was raised in a callback
        async with interlock.aio.Interlock(self.options.url) as locks:
            for lockable, way in self.each(locks):
                if lockable is None:
                    if faults := await forgotten():
                        print("\n".join(f"  {fault}" for fault in faults), flush=True)
                        os._exit(1)  # neither close() nor the end of the loop could end such a task
                    looking = asyncio.to_thread(wrong, self.client, locks._session, self.made, SHORT + 8)
                    if faults := await looking:
                        return faults
                    continue
                await self.interrupted(lockable, way)
        self.contender.close()
        return []

    async def interrupted(self, lockable, way) -> None:
        """In the task itself the handler raises; elsewhere in the loop it cancels it, as that of asyncio.run() does."""
        running = asyncio.create_task(awork(lockable, way))
        loop = asyncio.get_running_loop()

        def handler(_, frame) -> None:
            if asyncio.current_task() is running and not is_loop_at_work(frame):
                raise Stop
            running.cancel()
            loop.call_soon_threadsafe(lambda: None)  # to wake it

        signal.signal(signal.SIGALRM, handler)
        self.interrupts.begin()
        await asyncio.wait([running])
        hit = running.cancelled() or isinstance(running.exception(), Stop)
        self.interrupts.end(hit=hit)
        # `handler` refers to the task, and so to the frames of its error: these keep a lease that nobody can leave
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        if not hit and (error := running.exception()) is not None:
            raise error


if __name__ == "__main__":
    sys.exit(main())
