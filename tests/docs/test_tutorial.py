"""The tutorial, done: its programs, by several processes at once, which see what it says that they see."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from docs.test_examples import blocks
from harness.modes import wait_until
from interlock.embedded import stop_shared

pexpect = pytest.importorskip("pexpect")
PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
PROGRAMS = dict(zip(("hold.py", "sell.py"), blocks(PAGE, "python"), strict=True))
SEEN = [line for block in blocks(PAGE, "console") for line in block.splitlines() if not line.startswith("$")]


HOST = "web-1"  # on the page


def without_numbers(text):
    return re.sub(r"\d+", "#", text.replace(HOST, "@").replace(" ^Z", "")).strip()


def seen(pattern):
    """The lines of the page that contain this, as an expression that any numbers match."""
    (line,) = {without_numbers(each) for each in SEEN if pattern in each}
    return re.escape(line).replace(r"\#", r"(\d+)").replace("@", r"\S+").replace(re.escape("..."), ".*")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start one of the programs, in a terminal of its own."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("INTERLOCK_URL", "embedded://")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, print() writes a line in parts, with logs between
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    running = []

    def run(name):
        child = pexpect.spawn(
            sys.executable, [name], cwd=tmp_path, encoding="utf-8", timeout=60, dimensions=(24, 400), echo=False
        )
        running.append(child)
        return child

    yield run
    for child in running:
        child.close(force=True)
    stop_shared(force=True)


def interlock(*words):
    return subprocess.run(
        [sys.executable, "-m", "interlock", *words], capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.skipif(sys.platform == "darwin", reason="a path of a socket is too long there")
def test_one_at_a_time_then_a_crash_then_a_loss(start):
    first = start("hold.py")
    first.expect(seen("Enter gives"))
    second = start("hold.py")
    second.expect(seen("wants stock:42"))
    with pytest.raises(pexpect.TIMEOUT):
        second.expect("has it", timeout=1)
    first.sendline()
    first.expect("given back")
    second.expect(seen("Enter gives"))
    earlier = int(second.match[2])

    wait_until(lambda: f"/{second.pid}/MainThread" in interlock("ls"))  # once the process has reported it
    listed = interlock("ls")
    assert listed.splitlines()[0].split() == next(each for each in SEEN if each.startswith("NAME")).split()
    assert f"/{second.pid}/MainThread" in listed
    assert "hold.py:6" in listed
    os.kill(second.pid, signal.SIGKILL)
    third = start("hold.py")
    third.expect(seen("Enter gives"))
    assert int(third.match[2]) > earlier

    said = interlock("revoke", "stock:42", "--reason", "to see a loss")
    assert re.fullmatch(seen("did not give it back"), said.strip())
    third.sendline()
    third.expect(seen("LeaseLost"))


def test_a_late_writer_is_refused(start):
    late = start("sell.py")
    late.expect(seen("^Z"))
    os.kill(late.pid, signal.SIGSTOP)
    other = start("sell.py")
    other.expect(seen("^Z"))
    other.sendline()
    other.expect(seen("sold, and left"))
    os.kill(late.pid, signal.SIGCONT)
    late.sendline()
    late.expect(seen("not sold"))
