"""The command line in a process of its own, or in this one; the rows of a demo; what holds for both demos."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from interlock.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from interlock.cli.demo.scenario import Fault

Rows = dict[str, dict[str, Any]]

# What the log says if a busy machine gives a process no processor for as long as the short leases of a demo last.
LATE = ("its renewal is late", "its ttl passed without a renewal")
INTERLOCK = [sys.executable, "-c", "from interlock.cli import main; main()"]


def start(*args: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*INTERLOCK, *args], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def finish(demo: subprocess.Popen[str]) -> tuple[int, str, str]:
    with demo:
        out, err = demo.communicate(timeout=100)
    return demo.returncode, out, err


def rows(demo: subprocess.Popen[str]) -> Rows:
    status, out, err = finish(demo)
    assert not [line for line in err.splitlines() if not any(text in line for text in LATE)], err
    assert status == 0
    return {row["name"]: row for row in json.loads(out)}


def run(args: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the command line in this process, for commands that start no processes."""
    monkeypatch.setattr(sys, "argv", ["interlock", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def assert_one_line_and_64(args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Fails unless these options end with status 64 and one line on stderr that has `said`."""
    assert run(args, monkeypatch) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def assert_plan_follows_its_seed(plan: Callable[[int], Mapping[int, Fault]], size: int) -> None:
    """Fails unless a seed always gives the same faults, the first of which is a crash, in so many sections."""
    for seed in range(200):
        faults = plan(seed)
        assert faults == plan(seed)
        assert next(iter(faults.values())).kind == "crash"
        assert list(faults) == sorted(faults)
        assert max(faults) < size
    assert len({tuple(plan(seed)) for seed in range(20)}) > 10
