"""A fleet of processes that share locks while it goes over from a library to a drop-in; what its log says.

Each process runs programs/rollout_client.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.modes import wait_until
from harness.processes import PROGRAMS

if TYPE_CHECKING:
    import random
    from pathlib import Path

Kind = tuple[str, str]  # a side (old or new) and a mode


@dataclass
class Section:
    """One section of a caller: since when it surely had the lock, until when the lock lasted, and its end."""

    side: str
    pid: int
    asked: float
    until: float
    end: float = float("inf")  # until a leave says more; a crash ends it, too


@dataclass
class Outcome:
    """What the log of a fleet says."""

    sections: Counter[str] = field(default_factory=Counter)  # by side
    crashes: Counter[str] = field(default_factory=Counter)  # in a section, by side
    longest: dict[str, float] = field(default_factory=dict)  # wait, by side: seconds
    expired: int = 0  # sections that lasted longer than their locks, and calls that the server answered too late
    pauses: int = 0  # of a process, in a section, until its lock had expired
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sides = (
            f"{side}: {self.sections[side]} sections, longest wait {self.longest[side]:.2f} s, "
            f"{self.crashes[side]} crashes in a section"
            for side in self.sections
        )
        return "; ".join(sides)


def read_log(path: Path) -> Outcome:
    """Judge what the processes wrote."""
    found, inside, sections = Outcome(), {}, {}
    lines = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["at"])
    overlaps = []
    for line in lines:
        event, lock, caller = line["event"], line.get("lock"), (line["pid"], line.get("lock"))
        if event == "enter":
            section = Section(line["side"], line["pid"], line["asked"], line["until"])
            sections.setdefault(lock, []).append(section)
            inside[caller] = section
            found.sections[line["side"]] += 1
            found.longest[line["side"]] = max(found.longest.get(line["side"], 0.0), line["waited"])
        elif event in {"leave", "crash"}:
            inside.pop(caller).end = line["at"]
            found.crashes[line["side"]] += event == "crash"
        elif event == "pause":
            found.pauses += 1
        elif event == "ready":
            pass
        elif event == "overlap":
            overlaps.append(line)
        elif event in {"late", "not stored"}:
            found.expired += 1
        else:
            found.wrong.append(f"{event}: {line}")
    for line in overlaps:
        mine = line["pid"], line["until"]
        others = [
            each
            for each in sections.get(line["lock"], [])
            if each.asked < line["at"] < each.end and (each.pid, each.until) != mine
        ]
        if line["at"] < line["until"] and (not others or any(line["at"] < each.until for each in others)):
            found.wrong.append(f"overlap: {line} with {others}")
        else:
            found.expired += 1
    return found


class Fleet:
    """The processes: if one dies, another one of its kind takes its place."""

    def __init__(self, library: str, kinds: list[Kind], url: str, folder: Path, path: list[Path]) -> None:
        self._command = [sys.executable, str(PROGRAMS / "rollout_client.py"), library]
        self._arguments = [url, str(folder)]
        self._log = folder / "log"
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *map(str, path)])
        }
        self._started = 0
        self.killed: Counter[str] = Counter()  # by side; so is `stopped`
        self.stopped: Counter[str] = Counter()
        self.running = [(kind, self._start(kind)) for kind in kinds]

    def _start(self, kind: Kind) -> subprocess.Popen[bytes]:
        self._started += 1
        return subprocess.Popen(
            [*self._command, *kind, *self._arguments, str(self._started)],
            stdin=subprocess.PIPE, env=self._environment,
        )  # fmt: skip

    def run(self, seconds: float, chance: random.Random, *, every: float, stop_for: float) -> None:
        """Let the processes work. At random moments kill one of them, or stop one for `stop_for` seconds.

        Another process of its kind takes the place of each that died. The time begins once all processes are at work:
        on a busy machine the import of the libraries takes seconds.
        """
        wait_until(lambda: {process.pid for _, process in self.running} <= self._ready(), 60.0)
        end = time.monotonic() + seconds
        harm_at, stopped = time.monotonic() + every, {}
        while (now := time.monotonic()) < end:
            if now > harm_at:
                harm_at = now + every * chance.uniform(0.5, 1.5)
                kind, process = chance.choice(self.running)
                if process.poll() is None and chance.random() < 0.7:
                    self.killed[kind[0]] += 1
                    process.kill()
                elif process.poll() is None:
                    self.stopped[kind[0]] += 1
                    process.send_signal(signal.SIGSTOP)
                    stopped[process] = now + stop_for
            for process in [each for each, until in stopped.items() if until < now]:
                process.send_signal(signal.SIGCONT)
                del stopped[process]
            for i, (kind, process) in enumerate(self.running):
                if process.poll() is not None:
                    assert process.returncode == -signal.SIGKILL, f"a process of kind {kind} failed by itself"
                    process.stdin.close()
                    self.running[i] = kind, self._start(kind)
            time.sleep(0.02)
        for process in stopped:
            process.send_signal(signal.SIGCONT)

    def _ready(self) -> set[int]:
        """The processes that have begun to work."""
        lines = map(json.loads, self._log.read_text().splitlines() if self._log.exists() else ())
        return {line["pid"] for line in lines if line["event"] == "ready"}

    def deploy(self, i: int, kind: Kind, within: float) -> int:
        """Let process `i` finish what it does, and start one of this kind in its place. Returns the status of `i`."""
        _, process = self.running[i]
        process.stdin.close()
        status = process.wait(within)
        self.running[i] = kind, self._start(kind)
        return status

    def end(self, within: float) -> list[int]:
        """Let each caller finish what it does, and wait for the processes. Returns the status of each."""
        for _, process in self.running:
            process.stdin.close()
        limit = time.monotonic() + within
        return [process.wait(max(0.1, limit - time.monotonic())) for _, process in self.running]

    def kill(self) -> None:
        """End the processes, however this test ends."""
        for _, process in self.running:
            process.kill()
            process.wait()
            process.stdin.close()
