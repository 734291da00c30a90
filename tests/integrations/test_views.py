"""What people on call see is true: a queue that moves, one that is stuck, the dead, and names that are like others."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import redis

from harness.modes import wait_until
from interlock import AcquireTimeout, Interlock
from interlock._people import machine, motion
from interlock._people.motion import MOVES, STUCK, Motions
from interlock._protocol.run_to_end import run
from interlock.cli import app
from interlock.cli.lookup import look, look_at_all
from interlock.cli.output import callers, safe
from interlock.cli.top.data import Source
from interlock.cli.top.view import State, rows_of
from interlock.embedded import Server
from interlock.primitives.view import HANDING_OVER, View

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1")

# Threads that take a lock again and again, that hold it, or that wait for it.
PROGRAM = """
import sys, threading, time
from interlock import Interlock
url, what, name, number = sys.argv[1:]
locks = Interlock(url, label=what)
def work():
    if what == "moves":
        while True:
            with locks.lock(name):
                time.sleep(0.002)
    with locks.lock(name):
        print("holds", flush=True)
        time.sleep(1000)
threads = [threading.Thread(target=work, daemon=True) for _ in range(int(number))]
for thread in threads:
    thread.start()
print("begun", flush=True)
for thread in threads:
    thread.join()
"""


@pytest.fixture(scope="module")
def server():
    with Server() as made:
        yield made


@pytest.fixture
def locks(server):
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    with Interlock(server.url, registry=False) as made:
        yield made


@pytest.fixture
def start(server, tmp_path):
    """Starts a process that does this with a lock, in so many threads; and ends it with the test."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with contextlib.ExitStack() as ends:

        def begin(what, name, number):
            words = [sys.executable, program, server.url, what, name, str(number)]
            process = subprocess.Popen(words, text=True, stdout=subprocess.PIPE)
            ends.enter_context(process)
            ends.callback(process.kill)
            assert process.stdout.readline()
            return process

        yield begin


@pytest.fixture
def interlock(server, monkeypatch, capsys):
    """Runs `interlock WORDS...` in this process: its exit status, what it printed, and its errors."""
    monkeypatch.setenv("INTERLOCK_URL", server.url)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["interlock", *words])
        status = app.run()
        return status, *capsys.readouterr()

    return run


def named(found, name):
    return next((each for each in found if each.name == name), None)


def test_a_queue_that_moves_has_one_holder_in_every_sample(locks, start):
    for _ in range(4):
        start("moves", "busy", 4)
    wait_until(lambda: (found := named(locks.ls(), "busy")) and found.waiting >= 12)
    for _ in range(300):
        found = named(locks.ls(), "busy")
        assert len(found.holders) == 1
        assert found.waiting >= 3 and 3 <= found.processes <= 4
        view = look(locks, "busy")
        assert len(view.holders) == view.holding == 1
        assert (view.state == HANDING_OVER) is not view.holders[0].confirmed
        tokens = [each.token for each in (*view.holders, *view.waiters)]
        assert len(set(tokens)) == len(tokens)  # nobody waits for what the same token holds
    assert (found.motion, view.motion) == (MOVES, MOVES)
    assert look_at_all(locks)[0].handovers > 0


def test_a_handover_under_way_is_shown_as_that(locks, server, interlock):
    """To a waiter that never confirms: for three seconds the lock is on its way."""
    token = "web@h/1/Thread-7/" + "0" * 32
    with Interlock(server.url) as other, other.lock("a", ttl=30).acquire() as lease:
        wait_until(lambda: named(locks.ls(), "a"))  # its process has told of it
        core, resource = locks._session.core, lease._grant.resource
        wants = ("30000", "3000", "0", "-", "inf", "", "lock")
        run(core.requests.query(resource, "acquire", token, *wants))
        assert [each.token for each in look(locks, "a").waiters] == [token]
        lease.release()
        view, (listed,) = look(locks, "a"), locks.ls()
        shown, lines, screen = (interlock(*words)[1] for words in (("show", "a"), ("ls",), ("top", "--once")))
    assert (view.state, view.holders[0].token, view.waiting) == (HANDING_OVER, token, 0)
    assert [(each.token, each.confirmed) for each in listed.holders] == [(token, False)]
    assert re.search("state +handing over", shown)
    assert "to     web@h, process 1, Thread-7" in shown
    assert "handing over to web@h/1/Thread-7" in lines
    assert "handing over to web@h/1/Thread-7" in screen


def test_every_command_counts_the_same_processes_and_callers(locks, start, interlock, server):
    start("holds", "a", 1).stdout.readline()
    for number in (5, 4, 3):
        start("waits", "a", number)
    said = "3 processes, 12 callers"
    wait_until(lambda: (found := named(locks.ls(), "a")) and found.waiting == 12)  # each reports itself when it can
    assert said in interlock("ls")[1]
    assert f"waiters, in order ({said})" in interlock("show", "a")[1]
    assert f"1 held; {said} wait" in interlock("top", "--once")[1]
    assert "3p 12c" in interlock("top", "--once")[1]
    (thing,) = json.loads(interlock("top", "--json")[1])["things"]
    shown = json.loads(interlock("show", "a", "--json")[1])
    assert [each["waiting"] for each in (thing, shown)] == [12, 12]
    assert [each["processes"] for each in (thing, shown)] == [3, 3]
    assert "said" not in shown["holders"][0]


def test_the_dead_do_not_wait_and_a_dead_holder_is_told_as_dead(locks, start, interlock):
    holder, *waiters = start("holds", "a", 1), start("waits", "a", 4), start("waits", "a", 2)
    assert holder.stdout.readline() == "holds\n"
    wait_until(lambda: named(locks.ls(), "a") is not None)  # a process reports itself some time after it holds
    wait_until(lambda: named(locks.ls(), "a").waiting == 6)
    waiters[0].send_signal(signal.SIGKILL)
    wait_until(lambda: named(locks.ls(), "a").waiting == 2, within=10)
    waiters[1].send_signal(signal.SIGKILL)  # and nobody has asked for its status yet
    wait_until(lambda: named(locks.ls(), "a").waiting == 0, within=10)
    assert look(locks, "a").waiting == 0
    wait_until(lambda: named(locks.ls(), "a").holders[0].place)
    holder.kill()
    wait_until(lambda: named(locks.ls(), "a").holders[0].gone, within=10)
    assert "its process has ended; its lease ends in" in interlock("show", "a")[1]
    assert "(its process has ended)" in interlock("ls")[1]
    with redis.Redis.from_url(locks._session.server.display_url) as client:
        client.delete("lock:a")  # its lease is over
    assert named(locks.ls(), "a") is None


def test_a_process_of_another_machine_is_not_taken_for_dead(monkeypatch):
    ended = subprocess.Popen(["true"])
    assert ended.wait() == 0
    here = machine.this_machine()
    assert here
    assert machine.is_gone(here, ended.pid)
    assert not machine.is_gone(here, 1)  # of another user, perhaps
    assert not machine.is_gone("", ended.pid) and not machine.is_gone(f"{here}1", ended.pid)


def test_what_is_stuck_stands_above_what_is_busy(locks, start, interlock, monkeypatch, server):
    monkeypatch.setattr(motion, "UNKNOWN_STUCK", 1.0)
    for _ in range(4):
        start("moves", "busy", 4)
    start("holds", "stuck", 1).stdout.readline()
    start("waits", "stuck", 12)
    source = Source([server.url])

    def is_told():
        found = {each.name: each for each in source.gather().things}
        names = {"busy", "stuck"}
        return names <= set(found) and found["busy"].waiting > 11 and found["stuck"].motion == STUCK and found

    told = list[Any]()
    try:
        wait_until(lambda: told.append(is_told()) or told[-1])
        assert told[-1]["busy"].motion == MOVES and told[-1]["busy"].handovers > 1
        assert [row.name for row in rows_of(State(), source.gather())] == ["stuck", "busy"]
    finally:
        source.close()
    lines = [line.split() for line in interlock("top", "--once")[1].splitlines()]
    assert [words[0] for words in lines[3:5]] == ["stuck", "busy"]
    assert "STUCK" in lines[3] and "STUCK" not in lines[4]
    assert "stuck " in interlock("show", "stuck")[1]


def view(at, granted, *, waiting=1, departed=0, kind="lock"):
    return View(
        "a", "lock:a", kind, "held", holding=1, waiting=waiting, departed=departed, fence=int(granted * 1e6), now=at
    )


def test_a_name_is_stuck_after_ten_times_its_usual_holds_and_after_five_seconds():
    motions = Motions()
    assert motions.note(view(100.0, 99.9)).motion == ""
    assert motions.needs_another_look(view(100.0, 99.9))
    seen = motions.note(view(102.0, 101.9, departed=20))
    assert (seen.motion, seen.handovers) == (MOVES, 10)  # its holds last 0.1 s
    assert motions.note(view(104.0, 101.9, departed=20)).motion == MOVES  # less than five seconds
    stuck = motions.note(view(107.0, 101.9, departed=20))
    assert (stuck.motion, stuck.handovers) == (STUCK, None)
    assert stuck.unchanged == pytest.approx(5.1)
    assert motions.note(view(108.0, 107.9, departed=21)).motion == MOVES
    slow = Motions()
    slow.note(view(100.0, 99.0))
    assert slow.note(view(104.0, 103.0, departed=1)).motion == MOVES  # its holds last 4 s
    assert slow.note(view(142.0, 103.0, departed=1)).motion == MOVES
    assert slow.note(view(144.0, 103.0, departed=1)).motion == STUCK


def test_a_name_of_which_nobody_has_seen_a_hold_end_is_stuck_after_half_a_minute():
    motions = Motions()
    assert motions.note(view(100.0, 80.0)).motion == ""
    assert motions.note(view(111.0, 80.0)).motion == STUCK
    assert motions.note(view(112.0, 80.0, waiting=0)).motion == ""  # nobody waits
    assert Motions().note(view(200.0, 80.0, kind="election")).motion == ""  # a leader is expected to stay


def test_a_name_that_passes_on_in_one_process_moves_without_a_number():
    motions = Motions()
    motions.note(view(100.0, 99.9))
    seen = motions.note(view(102.0, 101.9))
    assert (seen.motion, seen.handovers) == (MOVES, None)


def test_a_name_that_nobody_uses_has_its_near_names(locks, interlock):
    locks.once("nightx", at_most=5, key="k2").run(lambda _: None)
    locks.lock("stock:42").acquire().release()
    status, written, _ = interlock("show", "nightx")
    assert status == 1
    assert written.endswith("nobody holds it or waits. In use: nightx:key=k2\n")
    assert interlock("show", "stokc:42")[1].endswith("In use: stock:42\n")
    assert json.loads(interlock("show", "nightx", "--json")[1])["near"] == ["nightx:key=k2"]
    assert "In use" not in interlock("show", "something else")[1]


def test_characters_that_a_terminal_may_take_for_something_else_are_escaped():
    for character in "\ue000\U000f0000\u0378\u202e\u2066\u200b\x1b\x9b\ud800\u2028\U0010fffe":
        assert safe(f"a{character}b") == f"a{character.encode('unicode_escape').decode()}b"
    assert safe("grün 東京 🔒") == "grün 東京 🔒"


def test_processes_and_callers_are_said_in_the_same_words():
    assert [callers(0, 0), callers(1, 1), callers(1, 12), callers(3, 12)] == [
        "-", "1 process, 1 caller", "1 process, 12 callers", "3 processes, 12 callers",
    ]  # fmt: skip


def test_the_doctor_lists_prefixes_and_databases_in_use(server, locks, interlock):
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    host, _, _ = server.url.partition("?")
    locks.lock("stock:42").acquire().release()
    assert "ok       " in (line := next(each for each in interlock("doctor")[1].splitlines() if "names of" in each))
    assert "db 0: 1 name beginning with 'lock:'" in line
    with Interlock(f"{host}?db=3", prefix="app:") as elsewhere:
        elsewhere.lock("stock:42").acquire().release()
        elsewhere.lock("stock:{43}").acquire().release()
    _, written, _ = interlock("doctor")
    assert "note" in next(each for each in written.splitlines() if "names of interlock" in each)
    assert "db 3: 2 names beginning with 'app:'" in written
    assert "You look at db 0 and the prefix 'lock:'" in written


def test_a_timeout_names_one_holder_and_no_deadlock_of_a_caller_with_itself(locks, start, server):
    """Of 260 timeouts in a queue that moves, nine said that a caller waits for itself."""
    for _ in range(2):
        start("moves", "busy", 6)
    with Interlock(server.url) as ours:
        texts, end = list[str](), time.monotonic() + 8

        def tries():
            while time.monotonic() < end:
                try:
                    ours.lock("busy", fair=True).acquire(timeout=1.05).release()
                except AcquireTimeout as error:
                    assert not error.deadlock, str(error)
                    texts.append(str(error))

        threads = [threading.Thread(target=tries) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not any("deadlock" in text.lower() for text in texts)
