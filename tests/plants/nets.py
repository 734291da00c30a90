"""The nets, and what counts as caught.

Each net runs a command with the planted copy first on PYTHONPATH. A net that needs longer than `LIMIT` has missed the
plant, and so has one that ends without a finding. A net that fails for another reason (it imported another copy, it
could not collect its tests) raises, since it has judged nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from plants.plant import PROJECT

LIMIT: Final = 300.0  # seconds that a net has


class Finding(NamedTuple):
    """What a net said of a plant."""

    caught: bool
    seconds: float
    by: str
    """The seed, the test or the story that shows it; or how much the net searched in vain."""


class WentWrongError(Exception):
    """The net has judged nothing."""


@dataclass(frozen=True)
class Net:
    """A command that searches a planted copy."""

    title: ClassVar[str]
    hangs = False

    def command(self, scratch: Path) -> list[str]:
        """The command that searches; `scratch` is a directory for its files."""
        raise NotImplementedError

    def judge(self, status: int, output: str, scratch: Path) -> tuple[bool, str]:
        """Whether the search has found something, and what. Raises WentWrongError."""
        raise NotImplementedError

    def search(self, source: Path) -> Finding:
        """Search the copy below `source`."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="interlock-net-") as scratch:
            path = os.pathsep.join([str(source), str(PROJECT), str(PROJECT / "tests")])
            env = {**os.environ, "PYTHONPATH": path, "PLANTED": str(source)}
            status, output = _run(self.command(Path(scratch)), env, 60.0 if self.hangs else LIMIT)
            seconds = time.monotonic() - began
            if status is None:
                return Finding(self.hangs, seconds, f"{'a test that does not end' if self.hangs else 'nothing'}")
            caught, by = self.judge(status, output, Path(scratch))
        return Finding(caught, seconds, by)


_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


def stop() -> None:
    """End the commands of all searches, now and later: each has a session of its own, which no Ctrl-C reaches."""
    _stopped.set()
    for process in [*_running]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _run(command: list[str], env: dict[str, str], limit: float) -> tuple[int | None, str]:
    """The exit status and the output of a command; no status if it took longer than the limit."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=env, cwd=PROJECT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        try:
            status = process.wait(0.0 if _stopped.is_set() else limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _running.discard(process)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # histories stop their servers
                try:
                    process.wait(20.0)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


@dataclass(frozen=True)
class Tests(Net):
    """Directed tests: for what only one order of events, or one fault of the system around, can show."""

    title = "tests"
    files: tuple[str, ...]
    names: str = ""
    """An expression for -k."""
    hangs: bool = False
    """Whether the plant keeps a test from ending. It is caught after a minute: these tests take seconds."""

    def command(self, scratch: Path) -> list[str]:
        # Without the tests of planted bugs: those fail because the text has changed.
        names = f"({self.names}) and not planted and not is_caught" if self.names else "not planted and not is_caught"
        options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", names]
        return [sys.executable, "-m", "plants.inside", "tests", *options, *(f"tests/{file}" for file in self.files)]

    def judge(self, status: int, output: str, scratch: Path) -> tuple[bool, str]:
        if status not in {0, 1}:
            raise WentWrongError(output[-2000:])
        failed = re.findall(r"^FAILED tests/(\S+)", output, re.MULTILINE)
        if (status == 1) != bool(failed):
            raise WentWrongError(output[-2000:])
        return bool(failed), failed[0].partition("::")[2] if failed else output.splitlines()[-1]


@dataclass(frozen=True)
class Walk(Tests):
    """The random walks of the scripts, and the search of the cohort's steps, against models of their rules."""

    title = "unit walk"


@dataclass(frozen=True)
class Simulator(Net):
    """Random orders of events on a virtual clock."""

    title = "simulator"
    profile: str
    subject: str = "lock"
    first: int = 0
    """The seed with which the search begins."""

    def command(self, scratch: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "plants.inside",
            "simulator",
            self.profile,
            self.subject,
            str(self.first),
            str(LIMIT - 5),
        ]

    def judge(self, status: int, output: str, scratch: Path) -> tuple[bool, str]:
        if status:
            raise WentWrongError(output[-2000:])
        said: dict[str, Any] = json.loads(output.splitlines()[-1])
        where = f'"{self.profile}", {self.subject}'
        if said["seed"] is None:
            return False, f"{where}: {said['runs']} seeds"
        return True, f"{where}, seed {said['seed']}, rule S{said['rule']}"


@dataclass(frozen=True)
class Search(Net):
    """Every order of events within bounds."""

    title = "exhaustive search"
    group: str
    """The searches that run: quorum, restarts or cohort."""
    only: str = ""
    """Text in the name of each search that runs."""

    def command(self, scratch: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "plants.inside",
            "search",
            self.group,
            "--only",
            self.only,
            "--seconds",
            str(LIMIT - 20),
        ]

    def judge(self, status: int, output: str, scratch: Path) -> tuple[bool, str]:
        if status not in {0, 1}:
            raise WentWrongError(output[-2000:])
        lines = [line for line in output.splitlines() if line.strip()]
        broken = next((line for line in lines if "BROKEN" in line or "broken:" in line.lower()), lines[-1])
        return status == 1, f"{self.group}: {broken.strip()}"


@dataclass(frozen=True)
class Histories(Net):
    """Random faults on real servers and processes."""

    title = "random histories"
    topology: str
    options: tuple[str, ...] = ()
    checks: tuple[str, ...] = ("overlap", "outlived", "fence", "stale write", "no progress")
    """The checks of which one must find it. On a busy machine others may find that a call is slow.

    "no progress" counts: after the faults, a new client alone gets a name that nobody holds, however busy the machine.
    """

    def command(self, scratch: Path) -> list[str]:
        return [
            sys.executable, "-m", "plants.inside", "histories", str(LIMIT - 60), ",".join(self.checks),
            "--topology", self.topology, "--json", str(scratch / "sums.json"), "--report", str(scratch / "lines"),
            *self.options,
        ]  # fmt: skip

    def judge(self, status: int, output: str, scratch: Path) -> tuple[bool, str]:
        if status not in {0, 1}:
            raise WentWrongError(output[-2000:])
        try:
            said: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            raise WentWrongError(output[-2000:]) from None
        found = [check for check in said["broken"] if check in self.checks]
        what = ", ".join(found or said["broken"]) or "nothing"
        return bool(found), f"{self.topology}: {what} in history {said['histories']}"
