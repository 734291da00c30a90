"""Many seeds, on all cores.

Theory. The main process deals out seeds in small shares to worker processes. Each returns a `Tally` for its share, and
the main process adds the tallies. The processes share nothing else, so a run is the same in each process.

Rules. (1) Ctrl-C ends the batch in a moment, and finished runs count. (2) A run that raises is a failure with its seed,
and the other runs go on. (3) With one job all runs happen in this process, where a debugger and a profiler see them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import traceback
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from .profiles import ALL, profile_of
from .simulation import Report, simulate
from .subjects import subject_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from multiprocessing.synchronize import Event

SHARE: Final = 20  # seeds: about a second
MAX_FAILURES: Final = 100  # failures that a tally keeps in full
LAST_RUNS: Final = 10.0  # seconds that running shares get after Ctrl-C


class Kind(NamedTuple):
    """The kind of the runs: the choices that the seed does not make."""

    world: str | None = None
    profile: str | None = None
    subject: str | None = None


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
    interleavings: set[int] = field(default_factory=set[int])
    broken: int = 0
    """How many runs broke a rule."""
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
        self.interleavings.add(int(report.interleaving, 16))
        if report.violations:
            texts = [str(violation) for violation in report.violations[:5]]
            self.failed(Failure(report.seed, report.profile, report.subject, texts))

    def failed(self, failure: Failure) -> None:
        """Add a run that broke a rule."""
        self.broken += 1
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
        self.interleavings |= other.interleavings
        self.broken += other.broken
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
            chosen = ALL[profile] if profile else profile_of(seed, world or "one")
            kind_of_lock = subject or subject_of(seed, world or chosen.world)
            tally.failed(Failure(seed, chosen.name, kind_of_lock, [traceback.format_exc().strip()]))
    return tally


def run(first: int, seeds: int, kind: Kind, jobs: int, report: Callable[[Tally], None]) -> tuple[Tally, str | None]:
    """Run all these seeds, and give `report` the tally of each share. Returns the sum, and why it was cut short."""
    total = Tally()

    def add(part: Tally) -> None:
        total.merge(part)
        report(part)

    end = first + seeds
    shares = deque((start, min(SHARE, end - start)) for start in range(first, end, SHARE))
    try:
        for part in _run_here(shares, kind) if jobs == 1 else _run_in_pool(shares, kind, jobs):
            add(part)
    except KeyboardInterrupt:
        return total, "interrupted"
    except OSError as error:  # also after a kill of a process of the pool
        return total, f"a process failed: {error}"
    except RuntimeError as error:
        return total, f"a process died: {error}"
    return total, "interrupted" if shares else None


def _run_here(shares: deque[tuple[int, int]], kind: Kind) -> Iterator[Tally]:
    interrupts: list[int] = []  # Ctrl-C waits for the end of a share: Lua would swallow it
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number)) if main else None
    try:
        while shares and not interrupts:
            yield run_share(*shares.popleft(), kind)
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _run_in_pool(shares: deque[tuple[int, int]], kind: Kind, jobs: int) -> Iterator[Tally]:
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    stop = context.Event()  # a process killed while sending its tally would block the pool for ever
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(stop,))
    running: set[Future[Tally]] = set()
    ended = False
    try:
        try:
            while shares or running:
                while shares and len(running) < jobs + 2:
                    with _held_back_interrupts():
                        running.add(pool.submit(run_share, *shares.popleft(), kind))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
            ended = True
        except KeyboardInterrupt:
            stop.set()
            shares.append((0, 0))  # further shares are left
            running = {future for future in running if not future.cancel()}
            done, left = wait(running, LAST_RUNS)
            ended = not left
            for future in done:
                with contextlib.suppress(RuntimeError):
                    yield future.result()
    finally:
        stop.set()
        if not ended:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        pool.shutdown(cancel_futures=True)


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
