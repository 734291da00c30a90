"""The commands for people on call: what they show of each kind, how they end, and what they do to hostile names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from harness.topology import Sentinels
from interlock import Interlock, LeaseLost
from interlock._client import core
from interlock.cli import app
from interlock.compat.redis_py import Lock as RedisPyLock
from interlock.embedded import Server

pytestmark = pytest.mark.runs_on(
    "its own servers", modes="threads", starts="servers of valkey-9.1, sentinels, a cluster, a quorum of them"
)
INTERLOCK = Path(sys.executable).with_name("interlock")


@pytest.fixture(scope="module")
def server():
    with Server() as made:
        yield made


@pytest.fixture
def client(server):
    with redis.Redis.from_url(server.url, decode_responses=True) as made:
        made.flushall()
        yield made


@pytest.fixture
def locks(server, client):
    with Interlock(server.url, label="billing") as made:
        yield made


@pytest.fixture
def others(server, client):
    with Interlock(server.url) as made:
        yield made


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


@pytest.fixture
def shown(interlock):
    """The object of `interlock show WORDS... --json`."""

    def run(*words):
        _, written, _ = interlock("show", *words, "--json")
        return json.loads(written)

    return run


@contextlib.contextmanager
def waiting(lockable):
    """A thread that waits for this, and gives it back at once."""
    thread = threading.Thread(target=lambda: lockable.acquire(timeout=30).release(), name="waits")
    thread.start()
    until(lambda: lockable.inspect().waiting)
    yield
    thread.join()


def until(condition, within: float = 20.0) -> None:
    """Wait for a condition, not for a time."""
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit, f"not so within {within} s"
        time.sleep(0.01)


# show


def test_show_says_who_holds_a_lock_since_when_and_who_waits(locks, others, interlock, shown):
    with locks.lock("a").acquire() as lease, contextlib.ExitStack() as ends:
        ends.enter_context(waiting(others.lock("a")))
        ends.callback(lease.release)
        found = shown("a")
        status, written, errors = interlock("show", "a")
    assert (status, errors) == (0, "")
    (holder,), (waiter,) = found["holders"], found["waiters"]
    assert (found["name"], found["key"], found["kind"], found["state"]) == ("a", "lock:a", "lock", "held")
    assert (holder["token"], holder["fence"]) == (lease.token, lease.fence)
    assert (holder["label"], holder["pid"], holder["caller"]) == ("billing", os.getpid(), "MainThread")
    assert 0 <= holder["since"] < 10 and 20 < holder["remaining"] <= 30
    assert (waiter["pid"], waiter["caller"], found["waiting"]) == (os.getpid(), "waits", 1)
    for text in (
        "held for",
        f"billing@{holder['host']}, process {os.getpid()}",
        "unless its process renews it",
        "waits",
    ):
        assert text in written
    assert "\x1b" not in written  # no terminal, no colours


def test_show_knows_each_kind_by_the_name_alone(locks, client, shown):
    kept = [
        locks.rlock("lock", owner="me").acquire(),
        locks.rwlock("rwlock").write().acquire(),
        locks.semaphore("semaphore", 3).acquire(permits=2),
        locks.election("election").campaign(),
    ]
    locks.latch("latch", 3).count_down()
    locks.once("once", at_most=9, at_least=5).run(lambda _: None)
    party = threading.Thread(target=locks.barrier("barrier", 2).wait, args=(30,))
    party.start()
    until(lambda: locks.barrier("barrier", 2).inspect().arrived)
    for kind in ("lock", "rwlock", "semaphore", "election", "once", "latch", "barrier"):
        assert shown(kind)["kind"] == kind
    assert shown("lock")["holders"][0]["owner"] == "me"
    assert shown("rwlock")["holders"][0]["side"] == "write"
    assert [shown("semaphore")[each] for each in ("used", "limit", "holding")] == [2, 3, 1]
    assert shown("election")["holders"][0]["fence"] == kept[3].term
    once = shown("once")
    assert once["state"] == "free" and 0 < once["next_run"] <= 5 and once["last_run"]["by"].startswith("billing@")
    assert [shown("latch")[each] for each in ("state", "left", "count")] == ["counting", 2, 3]
    assert [shown("barrier")[each] for each in ("state", "waiting", "parties")] == ["waiting", 1, 2]
    locks.barrier("barrier", 2).wait(10)
    party.join()
    client.delete("{lock:once}{record}")  # it ends before the note of a run that is kept for a month
    assert shown("once")["kind"] == "once"
    for lease in kept:
        lease.release()
    assert [shown(kind)["state"] for kind in ("lock", "rwlock", "semaphore", "election")] == ["free"] * 4


def test_show_of_a_key_of_another_library_says_whose_it_is(locks, client, interlock, shown):
    client.set("lock:theirs", "their value", px=60_000)
    client.hset("lock:data", "a", "b")
    client.set("{lock:later}{record}", "9 lock with words of a later version", px=60_000)
    theirs = shown("theirs")
    assert (theirs["kind"], theirs["holders"][0]["token"], theirs["holders"][0]["host"]) == (
        "plain key", "their value", None,
    )  # fmt: skip
    assert "a client of another library" in interlock("show", "theirs")[1]
    for name, says in (("data", "data of something else"), ("later", "another version")):
        status, written, _ = interlock("show", name)
        assert status == 1 and says in written
    with RedisPyLock(client, "ours", timeout=30):  # the drop-in says who has the key
        ours = shown("ours", "--prefix", "")
    assert (ours["kind"], ours["holders"][0]["pid"]) == ("plain key", os.getpid())
    assert locks.lock("theirs").inspect().held  # nothing was changed


def test_show_lists_the_first_waiters_and_all_of_them_if_asked(client, locks, interlock, shown):
    with locks.lock("a"):
        client.zadd("{lock:a}{queue}", {f"h/{n}/t/{n:032x}": n for n in range(150)})
        assert "and 140 more: --all" in interlock("show", "a")[1]
        assert (len(shown("a")["waiters"]), shown("a")["waiting"]) == (100, 150)
        assert len(shown("a", "--all")["waiters"]) == 150
        assert "h, process 149, t" in interlock("show", "a", "--all")[1]


def test_show_of_an_unknown_name_a_bad_name_and_a_server_that_is_away(interlock, client, monkeypatch):
    assert not client.keys()
    monkeypatch.setattr(core, "RETRY_FOR", 0.2)
    status, written, _ = interlock("show", "nothing [bold]")
    assert status == 1 and written == (
        "nothing [bold]: the server has nothing under the key 'lock:nothing [bold]': nobody holds it or waits\n"
    )
    status, written, _ = interlock("show", "nothing", "--json")
    assert status == 1 and json.loads(written)["kind"] is None
    for name in ("a\x1b[31m", "", "a}b", "x" * 600):
        status, written, errors = interlock("show", name)
        assert status == 64 and not written and "\x1b" not in errors and errors.startswith("interlock: ")
    status, _, errors = interlock("show", "a", "--url", "redis://127.0.0.1:1")
    assert status == 69 and "redis://127.0.0.1:1" in errors
    assert interlock("show")[0] == 64


def test_what_others_wrote_moves_no_cursor_and_is_no_markup(locks, client, interlock, shown):
    name = "a [red]b[/] \u202e \u2028"  # it changes the direction, and ends a line
    client.set(f"lock:{name}", "\x1b[2J\x07 [bold]x[/] \x9b31m \u202e", px=60_000)
    status, written, _ = interlock("show", name)
    assert status == 0 and "[bold]x[/]" in written and "[red]b[/]" in written
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\u2028"} & {*written}
    assert shown(name)["holders"][0]["token"].startswith("\x1b[2J")
    with pytest.raises(LeaseLost), locks.lock("r"):
        locks.lock("r").revoke("[red]\x9b31m\u202e")
        _, written, _ = interlock("show", "r")
    assert "revoked: [red]" in written and not {"\x9b", "\u202e"} & {*written}


def test_show_on_a_cluster_behind_sentinels_and_on_a_quorum(shown, server_pool):
    with contextlib.ExitStack() as ends:
        group = ends.enter_context(Sentinels(replicas=1))
        members = [ends.enter_context(Server()).url for _ in range(3)]
        for urls in ([server_pool.cluster("valkey-9.1").url], [group.url], members):
            made = ends.enter_context(Interlock(*urls) if len(urls) == 1 else Interlock.quorum(urls))
            words = [word for url in urls for word in ("--url", url)]
            with made.lock("a") as lease:
                found = shown("a", *words)
                assert (found["kind"], [each["token"] for each in found["holders"]]) == ("lock", [lease.token])
            assert shown("nothing", *words)["kind"] is None
            with made.election("e"):
                assert shown("e", *words)["kind"] == "election"


def test_show_in_a_process_of_its_own_colours_nothing_but_a_terminal(server, locks):
    environment = {"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url, "LC_ALL": "C"}
    with locks.lock("ü"):
        run = [INTERLOCK, "show", "ü"]
        ended = subprocess.run(run, env=environment, capture_output=True, check=True, encoding="utf-8", timeout=60)
    assert "process" in ended.stdout and "\x1b" not in ended.stdout
