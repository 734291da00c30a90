"""What a fork leaves in the child, with Python's hooks and without them (uWSGI, any extension in C).

Not here: what a child sees of a lease, and workers that are forked before they work (test_processes.py), Sentinel, a
cluster and a quorum (`topologies/test_fork_with_topologies.py`), web servers (`frameworks/test_web_servers.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.processes import PROGRAMS
from harness.unseen import HOW
from interlock._protocol import forks
from interlock._session import fork_and_exit

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", modes="threads")

CASES = {
    "many-threads": "the client begins anew once",
    "at-exit": "nothing of the parent is given back",
    "tasks-at-exit": "the same for a lease of asyncio",
    "finalized": "a lease of the parent that is dropped is not given back",
    "kinds": "each kind of lock",
    "in-handler": "a wait of the parent goes on in the parent alone",
    "same-loop": "an event loop of the parent is refused",
    "servers": "a private server stays with the parent",
    "drop-ins": "connections of the child",
    "created-only": "tokens and the registry name the child",
    "closing": "the client begins anew although another thread closes the parent's",
    "before-write": "a request of the parent is not written once more",
    "election": "a child that returns from a leader's work does not campaign",
    "goes-on-in-loop": "a child in the running loop of its parent takes no reply from it",
    "renewed-drop-in": "a release waits for no thread of the parent",
}


def said(server, *args: str) -> str:
    """What harness/programs/forked.py prints."""
    command = [sys.executable, str(PROGRAMS / "forked.py"), *args, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@rule(1, 11)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_a_child_has_nothing_of_its_parent_and_works_by_itself(server, clean, case, how):
    assert said(server, case, how) == "OK\n"


@rule(11)
@pytest.mark.parametrize("case", ["many-threads", "at-exit", "kinds"])
def test_the_process_id_tells_where_the_kernel_clears_no_page(server, clean, case):
    assert said(server, "by-id", case, "unseen") == "OK\n"


@rule(11)
def test_each_child_finds_out_by_itself_and_its_parent_is_not_disturbed(server):
    assert said(server, "finds-out", "os.fork") == "OK\n"


@rule(11)
def test_a_child_with_the_process_id_of_its_parent_finds_out_too(server):
    if os.geteuid() != 0:
        pytest.skip("only root may make a pid namespace")
    assert said(server, "same-id", "os.fork") == "OK\n"


def test_a_page_that_takes_any_advice_is_not_relied_on(monkeypatch):
    """As the pages of an emulator that follows no advice."""

    class Page:
        def __init__(self, *_args, **_options): ...
        def madvise(self, _advice): ...
        def close(self): ...

    monkeypatch.setattr(forks.mmap, "mmap", Page)
    assert isinstance(forks._known(), forks.KnownById)


def test_an_interrupt_in_the_middle_resets_everything_once_more(monkeypatch):
    """And a signal handler in the middle that resets everything is the end of it."""
    calls, known = [], forks.KnownById()
    monkeypatch.setattr(forks, "KNOWN", known)
    monkeypatch.setattr(forks, "count", 0)

    def interrupted() -> None:
        calls.append("first")
        if len(calls) == 1:
            raise KeyboardInterrupt

    def handler() -> None:
        calls.append("second")
        if calls.count("second") == 1:
            forks.notice()

    monkeypatch.setattr(forks, "_callbacks", [interrupted, handler, lambda: calls.append("third")])
    with pytest.raises(KeyboardInterrupt):
        forks.notice()
    assert not known[0]
    forks.notice()
    assert known[0]
    assert calls == ["first", "first", "second", "first", "second", "third"]
    forks.notice()
    assert len(calls) == 6


def test_a_client_that_cannot_be_reset_keeps_no_other_from_it(monkeypatch, caplog):
    """As in a child that may open no more files: the others must not go on with the parent's sockets."""

    class Session:
        def __init__(self, error) -> None:
            self.error, self.is_reset = error, False

        def reset_after_fork(self) -> None:
            if self.error is not None:
                raise self.error
            self.is_reset = True

    sessions = [Session(OSError("no more files")), Session(None)]
    monkeypatch.delitem(sys.modules, "multiprocessing.util", raising=False)
    monkeypatch.setattr(fork_and_exit, "open_sessions", sessions)
    fork_and_exit._after_fork()
    assert [each.is_reset for each in sessions] == [False, True]
    assert "could not reset a client" in caplog.text
