"""gevent and eventlet replace `threading` after interlock was imported: it works, or the error names the line.

Where they come first, see `faults/test_processes.py`; in web servers, `test_web_servers.py`.
"""

from __future__ import annotations

import functools
import threading
from importlib.util import find_spec

import pytest

from harness.processes import PROGRAMS
from interlock import Interlock

PROGRAM = PROGRAMS / "late_greenlets.py"


@pytest.fixture
def say(start, server, clean):
    """Run the program; what it says."""

    def said(library: str, before: str) -> str:
        if find_spec(library) is None:  # an import of eventlet would warn
            pytest.skip(f"{library} is not installed")
        command = start("-W", "ignore", PROGRAM, library, before, server.url)
        assert command.ended() == 0, command.output
        return command.output.splitlines()[-1]

    return said


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize("before", ["imported", "made"])
def test_a_patch_before_the_first_lock_comes_in_time(say, library, before):
    assert say(library, before) == "OK"


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize("before", ["used", "held"])
def test_a_patch_after_the_first_lock_is_an_error_that_names_the_line(say, clean, library, before):
    said = say(library, before)
    lines = PROGRAM.read_text().splitlines()
    line = lines.index(f'if before == "{before}":') + 2
    assert f"{library} has replaced `threading` after this Interlock was first used, at {PROGRAM}:{line}" in said
    assert not clean.exists("lock:before")


def test_a_profiler_that_replaces_locks_is_no_library_of_greenlets(server, clean, monkeypatch):
    with Interlock(server.url) as locks, Interlock(server.url) as unused:
        locks.lock("a").acquire().release()
        monkeypatch.setattr(threading, "Lock", functools.partial(threading.Lock))
        session = unused._session
        assert unused.lock("a").acquire().release()
        assert unused._session.core is session.core  # nothing was made anew under the hands of other threads
        assert locks.lock("a").acquire().release()
