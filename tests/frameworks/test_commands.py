"""The programs that the other tests of this directory start: they are seen, and they end."""

from __future__ import annotations

import signal

import pytest

from harness.modes import wait_until
from harness.processes import lives

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid)
child.wait()
"""


def test_a_program_is_seen_with_its_children_and_ends_by_a_signal(start):
    program = start("-c", PARENT)
    assert program.says(r"child \d+") == [f"child {program.children()[0]}"]
    assert program.running
    assert program.end() == -signal.SIGTERM
    assert not program.running


def test_all_processes_of_a_program_end_together(start):
    program = start("-c", PARENT)
    program.says("child")
    (child,) = program.children()
    program.kill_all()
    wait_until(lambda: not lives(child))


def test_a_program_that_ends_before_it_says_something_fails_the_test_with_its_output(start):
    with pytest.raises(AssertionError, match="ended without 'never'") as failed:
        start("-c", "print('only this')").says("never")
    assert "only this" in str(failed.value)
