"""One line is one event: a JSON object with the time `t`, the process `p`, the event `e`, and what belongs to it.

    start     mode, pid, imported                   a worker process is ready; the folder of its interlock
    begin     s, kind, style, timeout               section `s` begins
    ask       h, s, name, kind, weight, limit, group, timeout     hold `h` is about to be acquired; see checker.Hold
    got       h, token, fence                       it was granted
    failed    h, error                              it was not
    ok        h                                     ensure() passed; `t` was read before the call
    wrote     h, until, accepted                    the store answered at `until` whether it accepts what the hold wrote
    lost      h, why                                ensure() raised LeaseLost
    told      h                                     then the worker heard of the loss: event set, or task cancelled
    untold    h, waited                             then the worker waited so long and heard nothing
    nested    h, token, fence                       an rlock was entered once more
    letting   h, how                                about to be released (how: with, release, drop)
    let       h, ours, error                        the release has ended: what release() returned, what came out
    on_lost   h                                     the callback ran
    cancel    s                                     somebody cancelled the task of this section
    end       s, outcome, cancelling, text          the section has ended: the error that came out, or ""
    logged, unhandled   text                        interlock logged an error; an exception reached nobody
    fork      child, pid                            the process was forked without hooks; the child is a process, too
    inherited h, passed, ours, error                the child has called ensure() and release() of its parent's lease
    stop                                            the process has ended as it should

The controller writes, as process "controller":

    fault     fault, about                          a fault strikes
    struck    fault, came, about                    the fault has ended; whether it came about
    phase     phase                                 a phase begins
    played    phase, came, about                    the phase has ended; whether its moment came
    paused    who, until                            a worker process, or "*" the machine, stood still from `t` on
    misled    until                                 from `t` on an address led to a server that a quorum refuses
    older     who, version                          a worker process runs an older version of interlock: this commit
    killed    who                                   a worker process was killed
    revoked   name, force, since, done              somebody revoked the holder of this name
    stretched name, seconds                         a stepped clock has made the lease on this name last so long
    healed                                          all faults are over, all servers are up
    drained                                         no worker begins a section any more
    hung, died   who, text                          a worker process did not end in time; ended by itself
    probe     name, took, error                     after the drain a new client acquired this name
    left      key, about                            this key should not be in the server any more
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, Any]
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Seconds on the clock by which interlock judges leases. All processes of one machine share it."""
    return time.clock_gettime(_CLOCK)


class Pen:
    """Appends events to the file of one process. A line is one write(2), so SIGKILL leaves whole lines."""

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self._file = os.open(directory / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, *, t: float | None = None, **about: Any) -> None:
        line = {"t": clock() if t is None else t, "p": self.process, "e": event, **about}
        if self._file >= 0:
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def go_on_as(self, directory: Path, process: str) -> None:
        """In the child of a fork: write into a file of its own. The other file is the parent's."""
        self.__init__(directory, process)  # type: ignore[misc]

    def close(self) -> None:
        """Close the file. Later events are lost."""
        file, self._file = self._file, -1
        os.close(file)


def read(directory: Path) -> list[Line]:
    """The lines of all processes, in order of time. A last line without its end is left out."""
    lines: list[Line] = []
    for path in sorted(directory.glob("*.jsonl")):
        *whole, _ = path.read_bytes().split(b"\n")
        lines += map(json.loads, whole)
    lines.sort(key=lambda line: line["t"])
    return lines


def shown(line: Line, since: float = 0.0) -> str:
    """A line for people, its time counted from `since`."""
    rest = " ".join(f"{name}={value}" for name, value in line.items() if name not in {"t", "p", "e"} and value != "")
    return f"{line['t'] - since:11.6f}  {line['p']:<10} {line['e']:<8} {rest}"
