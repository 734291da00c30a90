"""`interlock top` as a person uses it, in a pseudo-terminal; and without one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pexpect
import pytest
import redis

from harness.clock import machine_time
from interlock import Interlock, LockError
from interlock.cli.top.data import Source
from interlock.embedded import Server
from interlock.testing import BreakableServer

pytestmark = pytest.mark.runs_on(
    "its own servers", modes="threads", starts="servers of valkey-9.1, a cluster, a quorum of them"
)
INTERLOCK = Path(sys.executable).with_name("interlock")
HERE = Path(__file__).name


@pytest.fixture(scope="module")
def server():
    with BreakableServer() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def held(server):
    """A lock that is held, and one that waits for it; two that wait for each other."""
    with Interlock(server.url, label="shop") as locks, pytest.MonkeyPatch.context() as patch:
        patch.setattr("interlock._people.registry.REPORT_INTERVAL", 0.2)
        ready = threading.Barrier(2)

        def nested(first, second):
            with contextlib.suppress(LockError), first:
                ready.wait()
                second.acquire()

        def waits():
            with contextlib.suppress(LockError):
                locks.lock("stock").acquire()

        a, b = locks.lock("account"), locks.lock("basket")
        lease = locks.lock("stock").acquire()
        threads = [
            threading.Thread(target=nested, args=(a, b)), threading.Thread(target=nested, args=(b, a)),
            threading.Thread(target=waits),
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        yield lease
        locks.close()
        for thread in threads:
            thread.join()


def of_a_new_terminal():
    """The attributes that a pseudo-terminal has at first."""
    ends = os.openpty()
    try:
        return termios.tcgetattr(ends[0])
    finally:
        for end in ends:
            os.close(end)


class Top:
    """`interlock top` in a pseudo-terminal: its screen, as a person sees it."""

    def __init__(self, server, *words, columns=100, lines=30, **environment) -> None:
        self.process = pexpect.spawn(
            str(INTERLOCK), ["top", "--interval", "0.3", *words], dimensions=(lines, columns), encoding="utf-8",
            env={"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url, "TERM": "xterm-256color",
                 "LANG": "C.UTF-8", **environment},
        )  # fmt: skip
        self.written, self.lines = "", lines
        self.before = of_a_new_terminal()  # this one may be taken over by now

    def read(self) -> None:
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            while True:
                self.written += self.process.read_nonblocking(100_000, timeout=0.05)

    @property
    def screen(self) -> str:
        """What was drawn last. A write to a terminal may arrive in parts: a part of a screen is none."""
        self.read()
        screens = [each for each in self.written.split("\x1b[H") if each.count("\n") >= self.lines - 1]
        drawn = screens[-1] if screens else ""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).replace("\r", "")

    def shows(self, *words, within=60.0) -> str:
        """The screen, once it has all of these."""
        limit = time.monotonic() + within
        while not all(word in (screen := self.screen) for word in words):
            assert time.monotonic() < limit, f"no {words} in:\n{screen}"
            time.sleep(0.01)
        return screen

    def resize(self, lines, columns) -> None:
        self.lines = min(lines, self.lines)
        self.process.setwinsize(lines, columns)

    def press(self, *keys) -> None:
        for key in keys:
            self.process.send(key)

    def ends(self) -> int:
        """Its exit status, once it has ended and has given the terminal back."""
        self.process.expect(pexpect.EOF, timeout=60)
        self.written += self.process.before
        self.process.wait()
        assert self.written.rstrip("^C\r\n").endswith("\x1b[?25h\x1b[?1049l"), repr(self.written[-80:])
        assert termios.tcgetattr(self.process.child_fd) == self.before
        self.process.close()
        assert "Traceback" not in self.written
        return self.process.exitstatus


@pytest.fixture
def top(server):
    with contextlib.ExitStack() as ends:

        def start(*words, **options):
            made = Top(server, *words, **options)
            ends.callback(made.process.close, force=True)
            return made

        yield start


def test_a_person_sees_who_holds_what_where_and_who_waits_for_whom(top, held):
    shown = top(columns=80, lines=24)
    screen = shown.shows("stock", "A DEADLOCK OF 2 CALLERS", "1 process in all", " clients")
    assert len(screen.splitlines()) <= 24
    assert max(map(len, screen.splitlines())) <= 80
    assert re.search(rf"stock +lock +\S+ +1p 1c \S+ +(?:STUCK +)?shop@\S+ +\S*{HERE}:\d+", screen)
    assert re.search(rf"holds account at \S*{HERE}:\d+", screen)
    assert re.search(rf"waits for account at \S*{HERE}:\d+", screen)
    shown.press("/", "stock", "\r")
    screen = shown.shows('filter "stock"', f"fence {held.fence}")
    assert not re.search("^(account|basket) +lock", screen, re.MULTILINE)
    shown.press("\r")
    screen = shown.shows("lease   ends in", "waiters, in order (1 process, 1 caller)", held.token)
    assert re.search(rf"1  shop@\S+, process \d+, Thread-\S+, for .*\n +at \S*{HERE}:\d+", screen)
    shown.press("\x1b")
    shown.shows("stuck first")
    shown.press("s")
    shown.shows("oldest first")
    shown.press("\x1b", "\x1b[B", "?")
    shown.shows("page up page down")
    shown.press("q")
    assert shown.ends() == 0


def test_ctrl_c_gives_the_terminal_back(top):
    shown = top("nothing*")
    shown.shows("no process says")
    shown.process.sendintr()
    assert shown.ends() == 130


def test_sigterm_gives_the_terminal_back(top):
    shown = top()
    shown.shows("stock")
    shown.process.kill(signal.SIGTERM)
    assert shown.ends() == 143


def test_a_terminal_that_changes_its_size(top):
    shown = top(columns=120, lines=40)
    shown.shows("stock")
    shown.resize(12, 60)
    limit = time.monotonic() + 60
    while len(screen := shown.shows("interlock top").splitlines()) > 12 or max(map(len, screen)) > 60:
        assert time.monotonic() < limit
        time.sleep(0.02)
    shown.press("q")
    assert shown.ends() == 0


def test_ctrl_z_suspends_it(server):
    """As typed in a shell that has jobs."""
    shell = pexpect.spawn(
        "bash", ["--norc", "--noediting", "-i"], timeout=60, encoding="utf-8", dimensions=(24, 80),
        env={"PATH": f"{INTERLOCK.parent}:{os.environ['PATH']}", "INTERLOCK_URL": server.url, "PS1": "ready> ",
             "TERM": "xterm", "LANG": "C.UTF-8"},
    )  # fmt: skip
    try:
        shell.expect_exact("ready> ")
        shell.sendline("interlock top")
        shell.expect_exact("stock")
        shell.sendcontrol("z")
        shell.expect_exact("\x1b[?1049l")
        shell.expect_exact("ready> ")
        shell.sendline("echo ech''o works")
        shell.expect_exact("echo works\r\n")
        shell.sendline("fg")
        shell.expect_exact("\x1b[?1049h")
        shell.expect_exact("stock")
        shell.send("q")
        shell.expect_exact("ready> ")
        shell.sendline("echo status $?")
        shell.expect_exact("status 0\r\n")
    finally:
        shell.close(force=True)


def test_without_colours(top):
    shown = top(NO_COLOR="1")
    shown.shows("stock")
    shown.press("q")
    assert shown.ends() == 0
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-7])m", shown.written)
    assert "\x1b[7m" in shown.written  # the selected row can be told from the others


def plain(server, *words, **environment):
    return subprocess.run(
        [INTERLOCK, "top", *words], env={"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def once_it_says(word, server, *words):
    """As plain(), once this word is in the output: a deadlock is only shown some seconds after it began."""
    limit = time.monotonic() + 60
    while word not in (done := plain(server, *words)).stdout:
        assert time.monotonic() < limit, done
    return done


def test_in_a_pipe_it_prints_one_snapshot(server):
    done = once_it_says("A DEADLOCK", server)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert re.search(rf"^stock +lock +\S+ +1p 1c \S+ +(?:STUCK +)?shop@\S+ +\S*{HERE}:\d+$", done.stdout, re.MULTILINE)
    assert "quit" not in done.stdout


def test_json(server):
    done = once_it_says('"members"', server, "st*", "--json")
    (thing,), (deadlock,) = (found := json.loads(done.stdout))["things"], found["deadlocks"]
    assert (thing["name"], thing["holders"][0]["label"]) == ("stock", "shop")
    assert {member["waits_for"]["name"] for member in deadlock["members"]} == {"account", "basket"}
    assert found["ping"] < 10


def test_it_counts_the_clients_over_the_connections_that_it_has(server, server_pool):
    with contextlib.ExitStack() as stack:
        urls = [server.url, *(stack.enter_context(Server()).url for _ in range(2))]
        own = {url: stack.enter_context(redis.Redis.from_url(url)) for url in urls}
        for named, asked in (([server.url], [server.url]), (urls, urls)):
            source = Source(named)
            stack.callback(source.close)
            source.gather()
            connected = [own[url].info("stats")["total_connections_received"] for url in asked]
            assert source.gather().clients == sum(own[url].info("clients")["connected_clients"] for url in asked)
            assert [own[url].info("stats")["total_connections_received"] for url in asked] == connected
        cluster = Source([server_pool.cluster("valkey-9.1").url])
        stack.callback(cluster.close)
        assert (cluster.gather().clients or 0) >= 3  # one of ours at each primary


def test_bad_input(server):
    for words, status in ((["--interval", "0"], 64), (["--url", "nonsense://"], 64)):
        done = plain(server, *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done


def test_a_server_that_goes_away_and_comes_back(top):
    with BreakableServer() as own, Interlock(own.url) as locks:
        lease = locks.lock("only").acquire()
        shown = top("--url", own.url)
        shown.shows("only", f"fence {lease.fence}")
        own.kill()
        shown.shows("the last answer is")
        screen = shown.shows("trying on")
        assert re.search("^only +lock", screen, re.MULTILINE)
        shown.press("s")
        shown.shows("oldest first")
        own.restart()
        limit = time.monotonic() + 60
        while "trying on" in shown.shows("interlock top"):
            assert time.monotonic() < limit
            time.sleep(0.05)
        shown.press("q")
        assert shown.ends() == 0


def test_it_quits_at_once_while_the_server_is_silent(top):
    with BreakableServer() as own:
        shown = top("--url", own.url)
        shown.shows("0 held")
        own.pause()
        shown.shows("the last answer is")
        started = machine_time()
        shown.press("q")
        assert shown.ends() == 0
        assert machine_time() - started < 5
        own.resume()
