"""Many seeds, on all cores.

Theory. The main process deals out seeds in small shares to worker processes. Each returns a `Tally` for its share, and
the main process adds the tallies. The processes share nothing else, so a run is the same in each process.

Rules. (a) Ctrl-C ends the batch in a moment, and finished runs count. (b) A run that raises is a failure with its seed,
and the other runs go on. (c) With one job all runs happen in this process, where a debugger and a profiler see them.
(d) A batch with a time deals out no further share once the time is over; the shares that run then are finished.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from .simulation import Report, simulate
from .subjects import choices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from multiprocessing.synchronize import Event

    from .coverage import Pair
    from .invariants.claims import Transition

SHARE: Final = 20  # seeds: some seconds
MAX_FAILURES: Final = 100  # failures that a tally keeps in full
LOOK_INTERVAL: Final = 0.1  # seconds between two looks whether somebody pressed Ctrl-C
LAST_RUNS: Final = 10.0  # seconds that running shares get after Ctrl-C


class Kind(NamedTuple):
    """The kind of the runs: the choices that the seed does not make."""

    world: str | None = None
    profile: str | None = None
    subject: str | None = None


class Shares:
    """The shares of a batch: of so many seeds, or of seeds without an end until the time is over."""

    def __init__(self, first: int, seeds: int | None, seconds: float | None = None) -> None:
        self.next = first
        """The first seed that no process has got."""
        self._end = None if seeds is None else first + seeds
        self._until = None if seconds is None else time.monotonic() + seconds
        self.is_stopped = False
        """Whether Ctrl-C has ended the batch before its end."""

    @property
    def is_over(self) -> bool:
        """Whether there is no further share."""
        if self._until is not None and time.monotonic() >= self._until:
            return True
        return self._end is not None and self.next >= self._end

    def take(self) -> tuple[int, int]:
        """Return the next share: its first seed, and how many seeds it has."""
        first, size = self.next, SHARE if self._end is None else min(SHARE, self._end - self.next)
        self.next += size
        return first, size


class Failure(NamedTuple):
    """A run that broke a rule."""

    seed: int
    profile: str
    subject: str
    texts: list[str]


@dataclass
class Tally:
    """The sum of the results of several runs."""

    runs: int = 0
    subjects: Counter[str] = field(default_factory=Counter[str])
    """How many runs each subject had."""
    events: int = 0
    scripts: int = 0
    grants: int = 0
    virtual: float = 0.0
    """Virtual seconds."""
    slowest: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])
    pairs: Counter[Pair] = field(default_factory=Counter["Pair"])
    transitions: Counter[Transition] = field(default_factory=Counter["Transition"])
    interleavings: set[int] = field(default_factory=set[int])
    broken: int = 0
    """How many runs broke a rule."""
    violations: int = 0
    """How often all runs together broke a rule."""
    failures: list[Failure] = field(default_factory=list[Failure])
    """The first failures."""

    def add(self, report: Report) -> None:
        """Add one run."""
        self.runs += 1
        self.subjects[report.subject] += 1
        self.events += report.events
        self.scripts += report.scripts
        self.grants += report.grants
        self.virtual += report.end
        self.slowest = max(self.slowest, report.slowest)
        self.counts.update(report.counts)
        self.pairs.update(report.pairs)
        self.transitions.update(report.transitions)
        self.interleavings.add(int(report.interleaving, 16))
        if report.violations:
            texts = [str(violation) for violation in report.violations[:5]]
            self.failed(Failure(report.seed, report.profile, report.subject, texts), len(report.violations))

    def failed(self, failure: Failure, violations: int = 1) -> None:
        """Add a run that broke a rule so many times."""
        self.broken += 1
        self.violations += violations
        self.failures.append(failure)

    def merge(self, other: Tally) -> None:
        """Add the runs of another tally."""
        self.runs += other.runs
        self.subjects.update(other.subjects)
        self.events += other.events
        self.scripts += other.scripts
        self.grants += other.grants
        self.virtual += other.virtual
        self.slowest = max(self.slowest, other.slowest)
        self.counts.update(other.counts)
        self.pairs.update(other.pairs)
        self.transitions.update(other.transitions)
        self.interleavings |= other.interleavings
        self.broken += other.broken
        self.violations += other.violations
        self.failures += other.failures[: max(0, MAX_FAILURES - len(self.failures))]


def run_share(first: int, seeds: int, kind: Kind) -> Tally:
    """Run these seeds in this process. Returns their tally."""
    tally, (world, profile, subject) = Tally(), kind
    for seed in range(first, first + seeds):
        if _stop is not None and _stop.is_set():
            break
        try:
            tally.add(simulate(seed, profile, subject=subject, world=world))
        except Exception:  # noqa: BLE001 (an error of the simulator itself is reported like any failure)
            tally.runs += 1
            chosen, kind_of_lock = choices_of(seed, profile, subject, world)
            tally.failed(Failure(seed, chosen.name, kind_of_lock, [traceback.format_exc().strip()]))
    return tally


def run(shares: Shares, kind: Kind, jobs: int, report: Callable[[Tally], None]) -> tuple[Tally, str | None]:
    """Run all these shares, and give `report` the tally of each. Returns the sum, and why it was cut short."""
    total = Tally()

    def add(part: Tally) -> None:
        total.merge(part)
        report(part)

    try:
        for part in _run_here(shares, kind) if jobs == 1 else _run_in_pool(shares, kind, jobs):
            add(part)
    except KeyboardInterrupt:
        return total, "interrupted"
    except OSError as error:  # also after a kill of a process of the pool
        return total, f"a process failed: {error}"
    except RuntimeError as error:
        return total, f"a process died: {error}"
    return total, "interrupted" if shares.is_stopped else None


def _run_here(shares: Shares, kind: Kind) -> Iterator[Tally]:
    with _noted_interrupts() as interrupts:
        while not shares.is_over and not interrupts:
            yield run_share(*shares.take(), kind)
        shares.is_stopped = bool(interrupts) and not shares.is_over


def _run_in_pool(shares: Shares, kind: Kind, jobs: int) -> Iterator[Tally]:
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    stop = context.Event()  # a process killed while sending its tally would block the pool for ever
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(stop,))
    running: set[Future[Tally]] = set()
    ended = False
    try:
        with _noted_interrupts() as interrupts:
            while (running or not shares.is_over) and not interrupts:
                while len(running) < jobs + 2 and not shares.is_over:
                    with _held_back_interrupts():
                        running.add(pool.submit(run_share, *shares.take(), kind))
                done, running = wait(running, LOOK_INTERVAL, FIRST_COMPLETED)
                for future in done:
                    yield future.result()
            if running or not shares.is_over:
                stop.set()
                shares.is_stopped = True
                done, running = wait({future for future in running if not future.cancel()}, LAST_RUNS)
                for future in done:
                    with contextlib.suppress(RuntimeError):
                        yield future.result()
            ended = not running
    finally:
        stop.set()
        if not ended:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _noted_interrupts() -> Generator[list[int]]:
    """A list that grows with each Ctrl-C, which raises nothing meanwhile.

    An exception would come anywhere: Lua would swallow it, and the lock of a future, which the pool needs to end, would
    stay locked.
    """
    interrupts: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number)) if main else None
    try:
        yield interrupts
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _held_back_interrupts() -> Generator[None]:
    """A Ctrl-C comes afterwards; and never to a process that begins meanwhile, and does not ignore it yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stop: Event | None = None  # in a process of the pool: whether to stop


def _begin(stop: Event) -> None:
    """Ignore Ctrl-C, which reaches every process of the terminal: the main process alone acts, and stops the others."""
    global _stop  # noqa: PLW0603 (one for each process)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stop = stop
