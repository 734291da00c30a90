"""The command line in a process of its own, or in this one; and the rows of a demo."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from interlock.cli import main

Rows = dict[str, dict[str, Any]]

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
    assert err == ""
    assert status == 0
    return {row["name"]: row for row in json.loads(out)}


def run(args: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the command line in this process, for what starts no others."""
    monkeypatch.setattr(sys, "argv", ["interlock", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
