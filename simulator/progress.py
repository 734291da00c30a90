"""The progress of a batch: a bar on a terminal (if rich is installed), else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from .batch import Tally


class Progress:
    """Shows how many of the seeds are done."""

    def __init__(self, seeds: int | None, seconds: float | None, lines_every: float) -> None:
        """`seeds`: how many there are; None: as many as fit into these seconds."""
        self._seeds = seeds
        self._seconds = seconds
        self._lines_every = lines_every
        self._done = self._broken = 0
        self._started = self._printed_at = time.monotonic()
        self._bar: Any = _bar() if sys.stderr.isatty() else None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("simulating", total=self._seeds, speed="", broken=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextlib.contextmanager
    def _hidden(self) -> Any:
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def bar_hidden(self) -> AbstractContextManager[object]:
        """Hide the bar while the caller prints something else."""
        return self._hidden() if self._bar is not None and sys.stdout.isatty() else contextlib.nullcontext()

    def advance(self, part: Tally) -> None:
        """Add finished runs."""
        self._done += part.runs
        self._broken += part.broken
        now = time.monotonic()
        speed = self._done / max(1e-9, now - self._started)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, speed=f"{speed:.1f}", broken=self._broken)
        elif self._done and now - self._printed_at >= self._lines_every:
            self._printed_at = now
            if self._seeds is None:
                left = max(0.0, (self._seconds or 0.0) - (now - self._started))
                done = f"{self._done} runs, {speed:.1f} runs/s"
            else:
                left = (self._seeds - self._done) / speed
                done = f"{self._done} of {self._seeds} runs, {speed:.1f} runs/s"
            sys.stderr.write(f"{done}, {left:.0f} s left, {self._broken} broke a rule\n")


def _bar() -> Any:
    try:
        import rich.console  # noqa: PLC0415 (an extra)
        import rich.progress as shown  # noqa: PLC0415
    except ImportError:
        return None
    return shown.Progress(
        shown.TextColumn("{task.description}"),
        shown.BarColumn(),
        shown.MofNCompleteColumn(),
        shown.TextColumn("{task.fields[speed]} runs/s"),
        shown.TimeRemainingColumn(elapsed_when_finished=True),
        shown.TextColumn("{task.fields[broken]} broke a rule"),
        console=rich.console.Console(stderr=True),
    )
