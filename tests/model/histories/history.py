"""One history: servers and workers start, faults strike, everything heals, the workers drain, the checker judges."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import interlock
from harness.older import last_of_days, unpacked_source
from harness.processes import lives
from harness.topology.group import ask, ask_all
from interlock._protocol.names import tagged
from interlock.errors import LockError
from model.histories import faults, phases
from model.histories.checker import MACHINE, History, Violation, check, tally
from model.histories.late import Lateness
from model.histories.lines import Pen, clock, read
from model.histories.rigs import RIGS
from model.histories.settings import LIMIT, Order, Settings
from model.histories.store import StoreServer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from random import Random

    from model.histories.lines import Line
    from model.histories.settings import Turn

TESTS: Final = Path(__file__).parents[2]  # where the package `model` is
IMPORTED: Final = Path(interlock.__file__).parent  # the copy of interlock that workers must test
AT_ONCE: Final = 3  # faults
FIRST_PHASE: Final = (0.3, 1.5)  # seconds after the start of the faults, at least and at most
BETWEEN: Final = (1.0, 3.0)  # seconds of random faults between two phases
BEFORE_PHASE: Final = 30.0  # seconds that faults may take to end before a phase
MEETING: Final = 5.0  # seconds in which each worker process has been granted something, if the servers are well
CALM: Final = 0.5  # seconds in which workers go on after everything is healed
TICK: Final = 0.05  # seconds between two looks at whether the machine is busy
LOOK: Final = 0.5  # seconds between two looks at how long processes waited for a processor
LATE: Final = 0.02  # seconds by which such a look is late if it is
MOST_LATE: Final = 0.8  # of the time: a bound comes nearer on any machine
STARTING: Final = 30.0  # seconds
FORKING: Final = 3.0  # seconds within which a worker process forks, if it plays sections
QUEUED_FOR: Final = 10.0  # seconds for which the server remembers a queue in which nobody lives
SETTLING: Final = 0.3  # seconds in which what a process gave back at its end is gone from the servers
LATE_END: Final = 1.0  # seconds by which a lease may last longer in a server than the longest ttl
ENDING: Final = 5.0  # seconds that a fault has to end when all is to end
SLOW: Final = 10.0  # seconds that a busy machine may take beyond what is promised


class OtherCopy(RuntimeError):
    """A worker imported another copy of interlock than the controller, so the history tests the wrong one."""


@dataclass
class Worker:
    """A worker process, from the outside."""

    name: str
    process: subprocess.Popen[bytes]
    version: str = ""  # the commit of interlock that it runs; "": that of the controller
    stopped: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


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
        self.settings = settings = settings.settled(last_of_days())
        self.directory, self.say = directory, say
        directory.mkdir(parents=True, exist_ok=True)
        self.pen = Pen(directory, "controller")
        self.rig = RIGS[settings.topology](settings, directory)
        self.store = StoreServer(settings.server)
        self.workers: list[Worker] = []
        self.random = settings.random("faults")
        self.over = threading.Event()  # no more faults
        self.ended = threading.Event()  # all of it
        self._lock = threading.Lock()
        self._wanted = 0  # worker processes that the main thread shall start
        self._number = 0
        self._orders = 0
        self._forks = 0
        self._children: dict[str, int] = {}  # of worker processes that were forked: name -> pid
        self._server_fault = threading.Lock()
        self._rests_until = 0.0  # until then other faults strike in place of those of servers
        self.strikers: list[threading.Thread] = []  # the faults that strike now
        self._locks: Any = None
        self._ended_well: set[str] = set()  # the pids of workers that did
        self._servers_started = False  # a server that just starts has no process to look at
        self._late = 0.0  # seconds by which the machine was late so far
        self._older: dict[str, Path] = {}  # version -> where its packages are
        self._kept: list[tuple[str, str]] = []
        self.spoiled = ""

    @property
    def max_ttl(self) -> float:
        """The longest ttl, in seconds."""
        assert self.settings.max_ttl is not None, "settled"
        return self.settings.max_ttl

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
            self._servers_started = True
            self.store.start(self.directory)
            (self.directory / "target").write_text(json.dumps(self.rig.target))
            for _ in range(self.settings.processes):
                self._start()
            self._await_start()
            self._check_copies()
            self._storm()
            self._heal()
            self._drain()
            self._check_copies()
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
        about = f"{self.rig.about}{f', beside {self.settings.older[0]}' if self.settings.older else ''}".lstrip(", ")
        return Verdict(self.settings, about, counts, check(history), self.spoiled, started)

    def _end(self) -> None:
        """End all that this history has started."""
        self.over.set()
        for striker in self.strikers:
            striker.join(ENDING)
        self._end_children(self._children)
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
            self.store.stop()
            self.rig.stop()

    def _watch(self) -> None:
        """Note when this machine gives processes no processor: a process that is late then is not to blame."""
        lateness, looked, ticks = Lateness(), clock(), 0.0
        while not self.ended.is_set():
            since = clock()
            self.ended.wait(TICK)
            now = clock()
            if (late := now - since - TICK) > LATE:
                ticks += late
                self.pen.write("paused", t=now - late, who=MACHINE, until=now)
            if now > looked + LOOK:
                with self._lock:
                    pids = {worker.name: worker.process.pid for worker in self.workers} | self._children
                workers = [(name, lateness.grown(pid)) for name, pid in pids.items()]
                nodes = [node for node in self.rig.nodes if node.running] if self._servers_started else []
                servers = max((lateness.grown(node.pid) for node in nodes), default=0.0)
                for who, waited in (*workers, (MACHINE, servers)):
                    if waited > LATE * LOOK / TICK:
                        self.pen.write("paused", t=now - waited, who=who, until=now)
                # A worker counts, too: beside a full suite one has waited for a processor until its drain was over.
                late = max(ticks, servers, *(waited for _, waited in workers))
                self._late += min(late, MOST_LATE * (now - looked))
                looked, ticks = now, 0.0

    def _allow(self, seconds: float) -> Callable[[], float]:
        """A function that returns how many seconds are left; those in which the machine was late do not count."""
        end = time.monotonic() + seconds - self._late
        return lambda: end + self._late - time.monotonic()

    # Workers

    def _start(self) -> None:
        """Another worker process. From the main thread only: a worker ends with the thread that started it."""
        mode = self.settings.modes[self._number % len(self.settings.modes)]
        name = f"p{self._number}{mode[0]}"
        version = self._version_of(self._number)
        self._number += 1
        path = os.pathsep.join(map(str, (self._packages(version), TESTS)))
        if version:
            self.pen.write("older", who=name, version=version)
        program = "hookless" if self.settings.forks else "worker"
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with (self.directory / f"{name}.err").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", f"model.histories.{program}", str(self.directory), name],
                stdin=subprocess.PIPE, stdout=stderr, stderr=stderr, env=environment,
            )  # fmt: skip
        with self._lock:
            self.workers.append(Worker(name, process, version))

    def _version_of(self, number: int) -> str:
        """The version of the process with this number: of four in a row, one of each mode may run an older version."""
        older = self.settings.older or ()
        return older[number // 4 % len(older)] if older and number % 4 in {1, 2} else ""

    def _packages(self, version: str) -> Path:
        """Where the packages of a version are."""
        if not version:
            return IMPORTED.parent
        if version not in self._older:
            self._older[version] = unpacked_source(version, self.directory / f"older-{version}")
        return self._older[version]

    def _await_start(self) -> None:
        left = self._allow(STARTING)
        waiting = list(self.workers)
        while waiting := [each for each in waiting if not self._has_started(each)]:
            for worker in waiting:
                if worker.process.poll() is not None:
                    raise RuntimeError(f"a worker did not start: {self._stderr(worker.name)}")
            if left() < 0:
                raise TimeoutError(f"{len(waiting)} workers did not start within {STARTING:g} s")
            time.sleep(0.02)

    def _check_copies(self) -> None:
        """Raise OtherCopy unless each worker has imported this process's copy of interlock, or its older version."""
        lines = read(self.directory)
        older = {line["who"]: self._older[line["version"]] / IMPORTED.name for line in lines if line["e"] == "older"}
        for line in lines:
            if line["e"] == "start" and Path(line["imported"]) != (wanted := older.get(line["p"], IMPORTED)):
                whose = "it should test" if line["p"] in older else "this process has imported"
                raise OtherCopy(f"worker {line['p']} tests {line['imported']}, and {whose} {wanted}")

    def _has_started(self, worker: Worker) -> bool:
        path = self.directory / f"{worker.name}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def _stderr(self, worker: str) -> str:
        return (self.directory / f"{worker}.err").read_text(errors="replace")[-3000:].strip()

    def _look(self) -> None:
        """Note worker processes that ended by themselves, and start others for these and for killed ones."""
        with self._lock:
            wanted, self._wanted = self._wanted, 0
            ended = [worker for worker in self.workers if worker.process.poll() is not None]
            self.workers = [worker for worker in self.workers if worker not in ended]
        for worker in ended:
            self.pen.write(
                "died", who=worker.name, text=f"exit status {worker.process.returncode}: {self._stderr(worker.name)}"
            )
            worker.process.stdin.close()  # type: ignore[union-attr]
        for _ in range(wanted + len(ended)):
            self._start()

    def some_worker(self, random: Random) -> Worker | None:
        """A worker process that runs; None if none does."""
        with self._lock:
            running = [worker for worker in self.workers if not worker.stopped and self._has_started(worker)]
        return random.choice(running) if running else None

    def running(self) -> list[Worker]:
        """The worker processes that run."""
        with self._lock:
            return [worker for worker in self.workers if not worker.stopped and self._has_started(worker)]

    def order(self, worker: Worker, turn: Turn, *, workers: int = 1, seconds: float = 0.0) -> str:
        """Let a process play this turn, too. Returns the name of its new workers, without their number behind a dot."""
        with self._lock:
            number, self._orders = self._orders, self._orders + 1
        assert worker.process.stdin is not None
        worker.process.stdin.write(Order(number, turn, workers, seconds).dumps().encode() + b"\n")
        worker.process.stdin.flush()
        return f"{worker.name}/o{number}"

    def fork(self, worker: Worker, *, inside: bool) -> str:
        """Fork a worker process without hooks: inside of a section, or between two. Returns what came of it."""
        with self._lock:
            self._forks += 1
            child, where = f"{worker.name}-f{self._forks}", "inside" if inside else "outside"
        assert worker.process.stdin is not None
        worker.process.stdin.write(f"fork {child} {where}\n".encode())
        worker.process.stdin.flush()
        line = self.await_line(worker, "fork", "child", child, FORKING)
        if line is None:
            return f"{worker.name} {where}: not yet"
        with self._lock:
            self._children[child] = line["pid"]
        return f"{child} {where}"

    def await_line(self, worker: Worker, event: str, of: str, name: str, seconds: float) -> Line | None:
        """The first line with this event of a hold, or another thing, whose name begins so; None if there is none."""
        end, path = time.monotonic() + seconds, self.directory / f"{worker.name}.jsonl"
        start = f'"e": "{event}", "{of}": "{name}'.encode()
        while True:
            found = next((line for line in path.read_bytes().split(b"\n")[:-1] if start in line), None)
            if found is not None:
                line: Line = json.loads(found)
                return line
            if time.monotonic() >= end or self.over.wait(0.01):
                return None

    def await_keeper(self, seconds: float) -> None:
        """Wait until a keeper gets its lock, for so many seconds at most."""
        end, keepers = time.monotonic() + seconds, re.compile(rb'"e": "got", "h": "p\d+./k')
        read = {worker.name: len(self._lines_of(worker)) for worker in self.running()}
        while time.monotonic() < end and not self.over.wait(0.02):
            for worker in self.running():
                if keepers.search(self._lines_of(worker), read.get(worker.name, 0)):
                    return

    def _await_meeting(self) -> bool:
        """Wait until each worker process has been granted something, and so knows the servers."""
        left = self._allow(MEETING)
        while not all(b'"e": "got"' in self._lines_of(worker) for worker in self.workers):
            if left() < 0 or self.over.is_set():
                return False
            time.sleep(0.02)
        return True

    def _lines_of(self, worker: Worker) -> bytes:
        path = self.directory / f"{worker.name}.jsonl"
        return path.read_bytes() if path.exists() else b""

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

    @contextlib.contextmanager
    def misled(self) -> Iterator[None]:
        """While this lasts, an address leads to a server that a quorum refuses: a replica, or another one's."""
        since = clock()
        try:
            yield
        finally:
            self.pen.write("misled", t=since, until=clock())

    def sleep(self, seconds: float) -> None:
        """Sleep for so long, but not beyond the end of the faults."""
        self.over.wait(seconds)

    # The storm, and what comes after it

    def _storm(self) -> None:
        """Faults strike at random; in between, one phase after the other plays, alone."""
        known, end = (
            faults.of(self.settings.topology, forks=self.settings.forks),
            time.monotonic() + self.settings.seconds,
        )
        chosen = {name: fault for name, fault in known.items() if self._has(name)}
        random, strikers = self.random, self.strikers
        number, played, when = 0, 0, time.monotonic() + random.expovariate(1 / self.settings.pace)
        program, said = self._program(), 0.0
        phase, phase_at = next(program, ""), time.monotonic() + random.uniform(*FIRST_PHASE)
        left = len(self.settings.phases or ())  # phases that must come before the end
        while (now := time.monotonic()) < end or strikers or left > 0:
            self._look()
            if now > said + 1:
                said = now
                self.say(f"{max(0.0, end - now):3.0f} s left, {number} faults")
            strikers[:] = [each for each in strikers if each.is_alive()]
            if phase and now >= phase_at:
                if now > phase_at + BEFORE_PHASE:
                    left = 0
                if not strikers:
                    self._look()  # a process that takes the place of a killed one begins before the phase
                    self._begin(self._play, phase, self.settings.random("phase", played))
                    played += 1
                    self._join(strikers)
                    phase, phase_at, left = next(program), time.monotonic() + random.uniform(*BETWEEN), left - 1
            elif chosen and when <= now < end and len(strikers) < AT_ONCE:
                name = random.choice(sorted(chosen))
                if now < self._rests_until and self._harms_servers(name):
                    name = random.choice(sorted(each for each in chosen if not self._harms_servers(each)) or [name])
                self._begin(self._strike, name, chosen[name], self.settings.random("fault", number))
                number, when = number + 1, now + random.expovariate(1 / self.settings.pace)
            if now >= end and not left:
                break
            time.sleep(0.02)
        self.over.set()
        self.say("waiting for the faults to end")
        for striker in strikers:
            striker.join(60)

    def _begin(self, work: Any, *about: Any) -> None:
        self.strikers.append(threading.Thread(target=work, args=about, daemon=True))
        self.strikers[-1].start()

    def _join(self, strikers: list[threading.Thread]) -> None:
        while any(each.is_alive() for each in strikers):
            self._look()
            time.sleep(0.02)

    def _program(self) -> Iterator[str]:
        """The phases of this history, again and again."""
        return cycle(self.settings.phases or ("",))

    def _play(self, name: str, random: Random) -> None:
        """One phase. Nothing else harms anybody meanwhile."""
        self.pen.write("phase", phase=name)
        came = False
        try:
            if not self._await_meeting():
                raise phases.Absent("not all processes know the servers")
            about = phases.KNOWN[name](self, random)
            came = not self.over.is_set()
        except phases.Absent as absent:
            about = f"did not come about: {absent}"
        except Exception as error:
            about = f"did not come about: {type(error).__name__}: {error}"
        self.pen.write("played", phase=name, came=came, about=about)

    def _harms_servers(self, name: str) -> bool:
        return name in faults.SERVERS[self.settings.topology] and name != "clock"

    def _has(self, name: str) -> bool:
        if name == "clock":
            return self.rig.stepped
        if name in self.rig.lacks:
            return False
        return name in faults.FORKS or self.settings.faults is None or name in self.settings.faults

    def _strike(self, name: str, fault: Any, random: Random) -> None:
        servers = self._harms_servers(name)
        if servers and not self._server_fault.acquire(blocking=False):
            return
        try:
            self.pen.write("fault", fault=name, about="")
            came, about = True, fault(self, random)
        except Exception as error:
            came, about = False, f"did not come about: {type(error).__name__}: {error}"
        finally:
            if servers:
                self._rests_until = time.monotonic() + random.uniform(*self.rig.rest) * self.max_ttl
                self._server_fault.release()
        self.pen.write("struck", fault=name, came=came, about=about)

    def _heal(self) -> None:
        self.say("healing")
        try:
            self.rig.heal()
        except Exception as error:  # of the rig, not of interlock: there is no verdict on what comes after
            self.spoiled = f"the servers did not get well: {error}"
            return
        self._look_for_stretched()
        self.pen.write("healed")
        end = time.monotonic() + CALM
        while time.monotonic() < end:
            self._look()
            time.sleep(0.02)

    def _bound(self) -> float:
        """Seconds after which each waiter has its lock, or an error."""
        return 2 * self.max_ttl + self.rig.grace + SLOW

    def _drain(self) -> None:
        self.say("draining the workers")
        with self._lock:
            workers = list(self.workers)
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.process.stdin.write(b"drain\n")  # type: ignore[union-attr]
                worker.process.stdin.flush()  # type: ignore[union-attr]
        self.pen.write("drained")
        left = self._allow(self._bound() if not self.spoiled else 1.0)
        for worker in workers:
            while (code := worker.process.poll()) is None and left() > 0:
                time.sleep(0.01)
            if code is None:
                if not self.spoiled:
                    self._hung(worker)
                worker.process.kill()
                worker.process.wait()
                self.pen.write("killed", who=worker.name)
            else:
                if not worker.version:
                    self._ended_well.add(str(worker.process.pid))
                if code:
                    self.pen.write("died", who=worker.name, text=f"exit status {code}: {self._stderr(worker.name)}")

        self._drain_children(left)

    def _drain_children(self, left: Callable[[], float]) -> None:
        """Wait for the children of forks, which end by themselves."""
        lines = read(self.directory) if self._forks else []
        stopped = {line["p"] for line in lines if line["e"] == "stop"}
        children = {line["child"]: line["pid"] for line in lines if line["e"] == "fork"}
        for child, pid in children.items():
            while lives(pid) and left() > 0:
                time.sleep(0.01)
            if lives(pid):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.3)
                self.pen.write("hung", who=child, text=self._stderr(child.partition("-")[0]))
        self._end_children(children)
        self._ended_well |= {str(pid) for child, pid in children.items() if child in stopped}

    @staticmethod
    def _end_children(children: dict[str, int]) -> None:
        for pid in filter(lives, children.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _hung(self, worker: Worker) -> None:
        self._look_for_stretched()
        worker.process.send_signal(signal.SIGUSR1)  # faulthandler says where it stands
        time.sleep(0.3)
        self.pen.write("hung", who=worker.name, text=self._stderr(worker.name))

    def _look_for_stretched(self) -> None:
        """Note the leases that last longer than any ttl, because the clock was ahead when they were granted.

        The server keeps the time at which a lease ends, by its own clock: once that clock is right again, such a lease
        lasts longer by as much as the clock was ahead.
        """
        if not self.rig.stepped:
            return
        for node in self.rig.primaries():
            for name in self.settings.names:
                seconds = _lasts(node, f"lock:{name}")
                if seconds > self.max_ttl + LATE_END:
                    self.pen.write("stretched", name=name, seconds=round(seconds, 3))

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
        """The synchronizer of this name."""
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
        for name in self.settings.names:
            began, left, error = clock(), self._allow(self._bound()), "not asked"
            while error and left() > 0:
                error = self._probed(name, left())
            if error:
                self._look_for_stretched()
            self.pen.write("probe", name=name, took=clock() - began, error=error)

    def _probed(self, name: str, seconds: float) -> str:
        """Acquire this name within so many seconds, and release it. Returns why that failed; "" if it did not."""
        try:
            if self.settings.names[name] == "once":
                time.sleep(0.05)
                return "" if self.resource(name).run(lambda _lease: None) else "always skipped"
            permits = {"permits": LIMIT} if self.settings.names[name] == "semaphore" else {}
            self.resource(name, ttl=min(1.0, self.max_ttl)).acquire(timeout=seconds, **permits).release()
        except LockError as failed:
            return f"{type(failed).__name__}: {failed}"
        return ""

    def _leftovers(self) -> None:
        if self.spoiled:
            return
        self.say("looking at what is left")
        for key, about in self._kept:
            self.pen.write("left", key=key, about=about)
        left = self._allow(QUEUED_FOR + self._bound())
        while (found := self._left()) and left() > 0:
            time.sleep(0.1)
        for key, about in found:
            self.pen.write("left", key=key, about=about)

    def _look_for_kept(self) -> None:
        """Note what servers still hold for processes that have ended as they should: these give back all they have."""
        left = self._allow(SETTLING)
        kept = self._held_by_ended()
        while kept and left() > 0:
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


def _lasts(node: Any, key: str) -> float:
    """Seconds until the server ends the last lease in this key, by the clock of the server."""
    kind, pttl = ask_all(node, [("TYPE", key), ("PTTL", key)])
    if kind != "zset":
        return float(pttl) / 1000
    last, (seconds, us) = ask_all(node, [("ZRANGE", key, -1, -1, "WITHSCORES"), ("TIME",)])
    return float(last[1]) / 1000 - int(seconds) - int(us) / 1e6 if last else 0.0


def play(settings: Settings, directory: Path, say: Callable[[str], None] = lambda _: None) -> Verdict:
    """Run one history whose files go into this directory."""
    return Controller(settings, directory, say).run()
