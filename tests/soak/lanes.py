"""Runs the turns of all nets until the time is over, and sums up.

Rules. (a) A turn that began runs to its end, but no longer than `LONGEST`. (b) A turn that fails stops nothing: its
output is kept, and the command that repeats it. So is the output of a turn that Ctrl-C ends: it may have found
something before. (c) Half of the lanes play histories, and half simulate: a history waits most of the time, but its
bounds of time want a processor.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from soak import turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from soak.turns import Net

LONGEST: Final = 3 * 3600.0  # seconds that one command may take


class Lanes:
    """The nets at work."""

    def __init__(self, kept: Path, say: Callable[[str], None]) -> None:
        self.kept = kept
        """A directory for the output of turns that failed."""
        self.say = say
        self.state = turns.load()
        self._mutex = threading.Lock()
        self._stopped = threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run_once(self, nets: Iterable[Net]) -> None:
        """Run each of these to its end, one after the other. Ctrl-C ends the turn, and goes on to the caller."""
        for net in nets:
            self._turn(net)
            if self._stopped.is_set():
                raise KeyboardInterrupt

    def run(self, groups: Sequence[Sequence[Net]], end: float) -> None:
        """Let each group of nets take turns in a lane of its own until then (`time.monotonic()`)."""
        groups = [group for group in groups if group]
        with ThreadPoolExecutor(max(1, len(groups))) as pool:
            lanes = [pool.submit(self._lane, group, end) for group in groups]
            try:
                wait(lanes)
            except KeyboardInterrupt:
                self.stop()
                raise
        for lane in lanes:
            lane.result()

    def stop(self) -> None:
        """End all commands."""
        self._stopped.set()
        with self._mutex:
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its lane has not yet noted that
                    os.killpg(process.pid, signal.SIGINT)

    def _lane(self, nets: Sequence[Net], end: float) -> None:
        for net in cycle(nets):
            if self._stopped.is_set() or time.monotonic() >= end:
                return
            self._turn(net)

    def _turn(self, net: Net) -> None:
        with tempfile.TemporaryDirectory(prefix="interlock-soak-") as scratch:
            sums, output, began = Path(scratch, "sums.json"), Path(scratch, "output"), time.monotonic()
            with self._mutex:
                command = net.turn(self.state, sums)
                turns.save(self.state)
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, cwd=turns.PROJECT, process_group=0
                )
                with self._mutex:
                    self._running.add(process)
                    if self._stopped.is_set():  # stop() has come before
                        os.killpg(process.pid, signal.SIGINT)
                try:
                    status = process.wait(LONGEST)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGTERM)
                    status = process.wait()
                except KeyboardInterrupt:  # in run_once(): the main thread has it, and waits for this turn itself
                    self.stop()
                    status = process.wait()
                finally:
                    with self._mutex:
                        self._running.discard(process)
            with self._mutex:
                net.add(sums)
                net.sums["turns"] += 1
                net.sums["seconds"] += round(time.monotonic() - began)
                if status and self._stopped.is_set():
                    net.interrupted.append(f"interrupted: {self._keep(command, output)}")
                elif status:
                    net.failed.append(f"exit status {status}: {self._keep(command, output)}")
        interrupted = ", interrupted" if net.interrupted else ""
        self.say(f"{net.title}: {net.sums['runs'] or net.sums['turns']}, {len(net.failed)} failed{interrupted}")

    def _keep(self, command: Sequence[str], output: Path) -> str:
        """Keep the output of a turn. Returns the command that repeats the turn, and where the output is."""
        again = shlex.join(command[: command.index("--json")] if "--json" in command else command)
        self.kept.mkdir(parents=True, exist_ok=True)
        kept = self.kept / f"{len(list(self.kept.iterdir()))}.txt"
        kept.write_bytes(output.read_bytes())
        return f"{again}   (all it said: {kept})"


def table(nets: Iterable[Net]) -> str:
    """What each net has done, one line each, and the commands that failed or were interrupted."""
    columns = ("turns", "runs", "events or sections", "faults", "losses told", "broken", "seconds")
    lines = [
        f"{'net':38}" + "".join(f"{name:>20}" if " " in name else f"{name:>10}" for name in columns) + "    failed"
    ]
    failed: list[str] = []
    interrupted: list[str] = []
    for net in nets:
        if net.sums["turns"]:
            sums = [f"{net.sums[name]:>20,}" if " " in name else f"{net.sums[name]:>10,}" for name in columns]
            lines.append(f"{net.title:38}" + "".join(sums) + f"{len(net.failed):>10}")
            failed += [f"{net.title}: {each}" for each in net.failed]
            interrupted += [f"{net.title}: {each}" for each in net.interrupted]
    nothing = "nothing failed in the turns that ended" if interrupted else "nothing failed"
    return "\n".join([*lines, "", *(failed or [nothing]), *interrupted])
