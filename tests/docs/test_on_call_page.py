"""docs/on-call.md: what its commands print is what they print, on the scene that the page tells of."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from harness.modes import wait_until
from interlock import AcquireTimeout, Interlock
from interlock.cli import app, show
from interlock.embedded import Server
from interlock.primitives import deadlocks

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="a server of valkey-9.1")
PAGE = Path(__file__).parents[2] / "docs" / "on-call.md"
# Of a console block: the command, and what the page says it prints.
SHOWN = re.findall(r"^```console\n\$ interlock (.*?)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)

# A program, which holds the first name and then takes the others. It says when it has the first one.
PROGRAM = """
import sys, time
from interlock import Interlock
locks = Interlock(sys.argv[1], label=sys.argv[2])
def work(first, *more):
    with locks.lock(first):
        print(first, flush=True)
        if not more:
            time.sleep(100)
        sys.stdin.readline()
        work(*more)
work(*sys.argv[3:])
"""


@pytest.fixture
def scene(tmp_path):
    """The URL of a server on which everything goes on that the page tells of."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(Server())
        before = ends.enter_context(Interlock(server.url))
        before.lock("account:7").acquire().release()
        server.stop()
        server.start()
        with pytest.raises(AcquireTimeout, match="quarantine"):
            before.lock("account:7").acquire(timeout=0.1)

        def start(*words, holds=True):
            process = subprocess.Popen(
                [sys.executable, program, server.url, *words], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            ends.enter_context(process)  # closes its pipes, and waits for its end
            ends.callback(process.kill)
            assert not holds or process.stdout.readline()
            return process

        client = ends.enter_context(redis.Redis.from_url(server.url))
        client.set("lock:report", "1")
        stopped = start("nightly", "nightly")
        start("billing", "stock:42")
        start("shop", "stock:42", holds=False)
        transfers = [start("orders", "account:1", "account:2"), start("refunds", "account:2", "account:1")]
        for process in transfers:
            process.stdin.write("\n")
            process.stdin.flush()
        said = {("nightly", 0), ("stock:42", 1), ("account:1", 1), ("account:2", 1)}

        def is_known():
            things = before.ls()
            # A deadlock counts once the reports show that all of it was true at one moment.
            is_said = {(each.name, len(each.waiters)) for each in things} == said
            # The server knows a waiter at once, and its line of code when its process has reported it.
            has_lines = all(party.place for each in things for party in (*each.holders, *each.waiters))
            return is_said and has_lines and deadlocks.find(things, min_wait=0)

        wait_until(is_known, within=60)
        stopped.send_signal(signal.SIGSTOP)
        yield server.url


def general(text):
    """The text without what differs from run to run and from machine to machine."""
    for what, instead in (
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", "TIME"),
        (r"\b\S+@[\w.-]+/\d+/\w+(/[0-9a-f]{32})?", "TOKEN"),
        (r"@[\w.-]+", "@HOST"),
        (r"(?:/[\w.-]+)+\.py:\d+", "LINE"),
        (r"redis://[\w.:-]+\d(/\d)?|unix://[\w/.-]+|redis\.internal:\d+|127\.0\.0\.1:\d+|localhost:\d+", "SERVER"),
        (r"\d+ (?:d|h|min)(?: \d+ (?:h|min|s))?|\d+(?:\.\d+)? ?m?s\b", "SPAN"),
        (r"\d+", "N"),
        (r"(?<=\S) +", " "),  # between columns
    ):
        text = re.sub(what, instead, text)
    return [line.rstrip() for line in text.strip().splitlines()]


def test_each_command_prints_what_the_page_shows(scene, monkeypatch, capsys):
    """In the order of the page."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(deadlocks.find, "__defaults__", (0.0,))  # of waits that have just begun, too
    assert len(SHOWN) > 6
    for words, printed in SHOWN:
        monkeypatch.setenv("INTERLOCK_URL", "redis://localhost:1" if words == "doctor" else scene)
        monkeypatch.setattr(show, "SILENT_AFTER", -1 if "nightly" in words else 60)  # it has just been stopped
        sooner = ["--grace", "0.1"] if words.startswith("revoke") else []
        monkeypatch.setattr(sys, "argv", ["interlock", *shlex.split(words), *sooner])
        began = time.monotonic()
        app.run()
        out, errors = capsys.readouterr()
        seen, expected = general(out + errors), general(printed)
        if words.startswith("top"):  # which of two in a circle is the first?
            seen, expected = sorted(seen), sorted(expected)
        assert seen == expected, words
        if words.endswith("--force"):
            held_for = float(re.search(r"held by shop@.* for ([\d.]+) s", out)[1])
            assert held_for <= time.monotonic() - began + 0.1  # since it is held, not since it was awaited
