"""One history: servers and workers start, faults strike, everything heals, the workers drain, the checker judges."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import interlock
from harness.topology.group import ask, ask_all
from interlock._protocol.names import tagged
from interlock.errors import LockError
from model.histories import faults
from model.histories.checker import MACHINE, History, Violation, check, tally
from model.histories.lines import Pen, clock, read
from model.histories.rigs import RIGS
from model.histories.settings import LIMIT, Settings

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from random import Random

TESTS: Final = Path(__file__).parents[2]  # where the package `model` is
AT_ONCE: Final = 3  # faults
CALM: Final = 0.5  # seconds in which workers go on after everything is healed
TICK: Final = 0.05  # seconds between two looks at whether the machine is busy
LATE: Final = 0.2  # seconds by which such a look is late if it is
STARTING: Final = 30.0  # seconds
QUEUED_FOR: Final = 10.0  # seconds for which the server remembers a queue in which nobody lives
SETTLING: Final = 0.3  # seconds in which what a process gave back at its end is gone from the servers
ENDING: Final = 5.0  # seconds that a fault has to end when all is to end
SLOW: Final = 10.0  # seconds that a busy machine may take beyond what is promised


@dataclass
class Worker:
    """A worker process, from the outside."""

    name: str
    process: subprocess.Popen[bytes]
    stopped: bool = False


@dataclass
class Verdict:
    """What became of a history."""

    settings: Settings
    about: str
    counts: Counter[str]
    violations: list[Violation]
    spoiled: str  # why the servers did not get well, if so: then only what was written before is judged
    started: float  # on the clock of the lines


class Controller:
    """It starts everything, and ends everything, whatever happens."""

    def __init__(self, settings: Settings, directory: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self.settings, self.directory, self.say = settings, directory, say
        directory.mkdir(parents=True, exist_ok=True)
        self.pen = Pen(directory, "controller")
        self.rig = RIGS[settings.topology](settings, directory)
        self.workers: list[Worker] = []
        self.random = settings.random("faults")
        self.over = threading.Event()  # no more faults
        self.ended = threading.Event()  # all of it
        self._lock = threading.Lock()
        self._wanted = 0  # worker processes that are to be started by the main thread
        self._number = 0
        self._server_fault = threading.Lock()
        self.strikers: list[threading.Thread] = []  # the faults that strike now
        self._locks: Any = None
        self._ended_well: set[str] = set()  # the pids of workers that did
        self._kept: list[tuple[str, str]] = []
        self.spoiled = ""

    # The whole

    def run(self) -> Verdict:
        """One history."""
        started = clock()
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        (self.directory / "settings").write_text(self.settings.dumps())
        try:
            self.say("starting the servers")
            self.rig.start()
            (self.directory / "target").write_text(json.dumps(self.rig.target))
            for _ in range(self.settings.processes):
                self._start()
            self._await_start()
            self._storm()
            self._heal()
            self._drain()
            self._look_for_kept()
            self._probe()
            self._leftovers()
        finally:
            self._end()
            self.ended.set()
            watch.join()
            self.pen.close()
        history = History.of(read(self.directory), clock_stepped=self.rig.stepped, patience=self.rig.patience)
        counts = tally(history)
        return Verdict(self.settings, self.rig.about, counts, check(history), self.spoiled, started)

    def _end(self) -> None:
        """Nothing that was started here lives on."""
        self.over.set()
        for striker in self.strikers:
            striker.join(ENDING)
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            with contextlib.suppress(OSError):
                worker.process.stdin.close()  # type: ignore[union-attr]
            worker.process.wait()
        try:
            if self._locks is not None:
                self._locks.close()
        finally:
            self.rig.stop()

    def _watch(self) -> None:
        """Note when this machine gives nobody a processor: that is no fault of who is late then."""
        while not self.ended.is_set():
            since = clock()
            self.ended.wait(TICK)
            if (now := clock()) > since + TICK + LATE:
                self.pen.write("paused", t=since + TICK, who=MACHINE, until=now)

    # Workers

    def _start(self) -> None:
        """Another worker process. From the main thread only: a worker ends with the thread that started it."""
        mode = self.settings.modes[self._number % len(self.settings.modes)]
        name = f"p{self._number}{mode[0]}"
        self._number += 1
        environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1"}
        with (self.directory / f"{name}.err").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "model.histories.worker", str(self.directory), name],
                stdin=subprocess.PIPE, stdout=stderr, stderr=stderr, env=environment,
            )  # fmt: skip
        with self._lock:
            self.workers.append(Worker(name, process))

    def _await_start(self) -> None:
        end = time.monotonic() + STARTING
        waiting = list(self.workers)
        while waiting := [each for each in waiting if not self._has_started(each)]:
            for worker in waiting:
                if worker.process.poll() is not None:
                    raise RuntimeError(f"a worker did not start: {self._stderr(worker)}")
            if time.monotonic() > end:
                raise TimeoutError(f"{len(waiting)} workers did not start within {STARTING:g} s")
            time.sleep(0.02)

    def _has_started(self, worker: Worker) -> bool:
        path = self.directory / f"{worker.name}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def _stderr(self, worker: Worker) -> str:
        return (self.directory / f"{worker.name}.err").read_text(errors="replace")[-3000:].strip()

    def _look(self) -> None:
        """Worker processes that ended by themselves, and those that are to be started."""
        with self._lock:
            wanted, self._wanted = self._wanted, 0
            ended = [worker for worker in self.workers if worker.process.poll() is not None]
            self.workers = [worker for worker in self.workers if worker not in ended]
        for worker in ended:
            self.pen.write(
                "died", who=worker.name, text=f"exit status {worker.process.returncode}: {self._stderr(worker)}"
            )
            worker.process.stdin.close()  # type: ignore[union-attr]
        for _ in range(wanted + len(ended)):
            self._start()

    def some_worker(self, random: Random) -> Worker | None:
        """One that runs."""
        with self._lock:
            running = [worker for worker in self.workers if not worker.stopped and self._has_started(worker)]
        return random.choice(running) if running else None

    def kill(self, worker: Worker) -> None:
        """SIGKILL; the main thread starts another one."""
        with self._lock:
            if worker not in self.workers:
                return
            self.workers.remove(worker)
        worker.process.kill()
        worker.process.wait()
        self.pen.write("killed", who=worker.name)
        worker.process.stdin.close()  # type: ignore[union-attr]
        with self._lock:
            self._wanted += 1

    @contextlib.contextmanager
    def stopped(self, worker: Worker) -> Iterator[None]:
        """SIGSTOP, and at the end SIGCONT."""
        worker.stopped = True
        since = clock()
        try:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGSTOP)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGCONT)
            worker.stopped = False
            # It is not on a processor at once.
            self.pen.write("paused", t=since, who=worker.name, until=clock() + 0.05)

    def sleep(self, seconds: float) -> None:
        """Not beyond the end of the faults."""
        self.over.wait(seconds)

    # The storm, and what comes after it

    def _storm(self) -> None:
        known = faults.of(self.settings.topology)
        chosen = {name: fault for name, fault in known.items() if self._has(name)}
        random, end = self.random, time.monotonic() + self.settings.seconds
        strikers: list[threading.Thread] = self.strikers
        number, when = 0, time.monotonic() + random.expovariate(1 / self.settings.pace)
        said = 0.0
        while (now := time.monotonic()) < end:
            self._look()
            if now > said + 1:
                said = now
                self.say(f"{end - now:3.0f} s left, {number} faults")
            strikers[:] = [each for each in strikers if each.is_alive()]
            if chosen and now >= when and len(strikers) < AT_ONCE:
                name = random.choice(sorted(chosen))
                numbers = self.settings.random("fault", number)
                number, when = number + 1, now + random.expovariate(1 / self.settings.pace)
                strikers.append(threading.Thread(target=self._strike, args=(name, chosen[name], numbers), daemon=True))
                strikers[-1].start()
            time.sleep(0.02)
        self.over.set()
        self.say("waiting for the faults to end")
        for striker in strikers:
            striker.join(60)

    def _has(self, name: str) -> bool:
        if name == "clock":
            return self.rig.stepped
        if name in self.rig.lacks:
            return False
        return self.settings.faults is None or name in self.settings.faults

    def _strike(self, name: str, fault: Any, random: Random) -> None:
        servers = name in faults.SERVERS[self.settings.topology] and name != "clock"
        if servers and not self._server_fault.acquire(blocking=False):
            return
        try:
            self.pen.write("fault", fault=name, about="")
            about = fault(self, random)
        except Exception as error:
            about = f"did not come about: {type(error).__name__}: {error}"
        finally:
            if servers:
                self._server_fault.release()
        self.pen.write("struck", fault=name, about=about)

    def _heal(self) -> None:
        self.say("healing")
        try:
            self.rig.heal()
        except Exception as error:  # of the rig, not of interlock: there is no verdict on what comes after
            self.spoiled = f"the servers did not get well: {error}"
            return
        self.pen.write("healed")
        end = time.monotonic() + CALM
        while time.monotonic() < end:
            self._look()
            time.sleep(0.02)

    def _bound(self) -> float:
        """Seconds after which whoever waits has it, or an error."""
        return 2 * self.settings.max_ttl + self.rig.grace + SLOW

    def _drain(self) -> None:
        self.say("draining the workers")
        with self._lock:
            workers = list(self.workers)
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.process.stdin.write(b"drain\n")  # type: ignore[union-attr]
                worker.process.stdin.flush()  # type: ignore[union-attr]
        self.pen.write("drained")
        end = time.monotonic() + (self._bound() if not self.spoiled else 1.0)
        for worker in workers:
            try:
                code = worker.process.wait(max(0.01, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not self.spoiled:
                    self._hung(worker)
                worker.process.kill()
                worker.process.wait()
                self.pen.write("killed", who=worker.name)
            else:
                self._ended_well.add(str(worker.process.pid))
                if code:
                    self.pen.write("died", who=worker.name, text=f"exit status {code}: {self._stderr(worker)}")

    def _hung(self, worker: Worker) -> None:
        worker.process.send_signal(signal.SIGUSR1)  # faulthandler says where it stands
        time.sleep(0.3)
        self.pen.write("hung", who=worker.name, text=self._stderr(worker))

    # What a new client finds

    @property
    def locks(self) -> Any:
        """A client of the controller's own."""
        with self._lock:
            if self._locks is None:
                made: Any = interlock.Interlock
                target = self.rig.target
                made = made.quorum if isinstance(target, list) else made
                self._locks = made(target, max_ttl=self.settings.max_ttl)
        return self._locks

    def resource(self, name: str, **options: Any) -> Any:
        """What has this name."""
        match self.settings.names[name]:
            case "lock":
                return self.locks.lock(name, **options)
            case "rwlock":
                return self.locks.rwlock(name, **options).write() if options else self.locks.rwlock(name)
            case "semaphore":
                return self.locks.semaphore(name, LIMIT, **options)
            case "election":
                return self.locks.election(name, **options)
        return self.locks.once(name, at_most=2.0)

    def _probe(self) -> None:
        if self.spoiled:
            return
        self.say("probing")
        for name, kind in self.settings.names.items():
            began, error = clock(), ""
            try:
                if kind == "once":
                    end = began + self._bound()
                    while not self.resource(name).run(lambda _lease: None):
                        if clock() > end:
                            raise TimeoutError("always skipped")
                        time.sleep(0.05)
                else:
                    permits = {"permits": LIMIT} if kind == "semaphore" else {}
                    self.resource(name, ttl=1.0).acquire(self._bound(), **permits).release()
            except (LockError, TimeoutError) as failed:
                error = f"{type(failed).__name__}: {failed}"
            self.pen.write("probe", name=name, took=clock() - began, error=error)

    def _leftovers(self) -> None:
        if self.spoiled:
            return
        self.say("looking at what is left")
        for key, about in self._kept:
            self.pen.write("left", key=key, about=about)
        end = time.monotonic() + QUEUED_FOR + self._bound()
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        for key, about in found:
            self.pen.write("left", key=key, about=about)

    def _look_for_kept(self) -> None:
        """What is still held for processes that have ended as they should: they give back all they have."""
        end = time.monotonic() + SETTLING
        kept = self._held_by_ended()
        while kept and time.monotonic() < end:
            time.sleep(0.05)
            kept = [each for each in self._held_by_ended() if each in kept]
        self._kept = kept

    def _held_by_ended(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for node in [] if self.spoiled else self.rig.primaries():
            for name in self.settings.names:
                key = f"lock:{name}"
                kind = ask(node, "TYPE", key) if key in ask(node, "KEYS", key) else "none"
                read = {"string": ("GET", key), "zset": ("ZRANGE", key, 0, -1)}.get(kind)
                held = (ask(node, *read) or []) if read else []
                about = f"at port {node.port}, held by {{}}, whose process has ended as it should"
                found += [
                    (key, about.format(token))
                    for token in ([held] if isinstance(held, str) else held)
                    if {*token.split("/")[1:3]} & self._ended_well  # host/pid/..., or owner/host/pid/...
                ]
        return found

    def _left(self) -> list[tuple[str, str]]:
        """Keys that should not be there, with what is wrong with each."""
        locks = {f"lock:{name}" for name in self.settings.names}
        waiting = {
            f"{head}{which}{tail}" for head, tail in map(tagged, locks) for which in ("queue", "waiters", "shares")
        }
        found: list[tuple[str, str]] = []
        for node in self.rig.primaries():
            keys: list[str] = ask(node, "KEYS", "*")
            ttls = ask_all(node, [("PTTL", key) for key in keys]) if keys else []
            for key, ms in zip(keys, ttls, strict=True):
                if ms == -1:
                    found.append((key, f"at port {node.port}, without a TTL"))
                elif ms > 0 and key in locks | waiting:
                    found.append((key, f"at port {node.port}, for {ms} ms more"))
        return found


def play(settings: Settings, directory: Path, say: Callable[[str], None] = lambda _: None) -> Verdict:
    """Run one history whose files go into this directory."""
    return Controller(settings, directory, say).run()
