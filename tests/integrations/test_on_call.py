"""The commands for people on call: what they show of each kind, how they end, and what they do to hostile names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pexpect
import pytest
import redis

from harness.modes import wait_until as until
from harness.topology import Sentinels, serve_long
from interlock import Interlock, LeaseLost, Unavailable
from interlock._client import retries
from interlock.cli import app, revoke, wait
from interlock.cli.lookup import View, glance, look
from interlock.cli.output import console, print_table
from interlock.cli.wait import Place, Progress
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


@pytest.fixture(autouse=True)
def client(server):
    """A plain client of the server, which is empty: the tests use the same names for locks of several kinds."""
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


# show


def test_show_says_who_holds_a_lock_since_when_and_who_waits(locks, others, interlock, shown):
    began = time.monotonic()
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
    took = time.monotonic() - began + 0.1  # the server rounds
    assert 0 <= holder["since"] <= took and 30 - took <= holder["remaining"] <= 30
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
    locks.once("once", at_most=90, at_least=60).run(lambda _: None)
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
    assert once["state"] == "free" and 0 < once["next_run"] <= 60 and once["last_run"]["by"].startswith("billing@")
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
        tokens = {f"h/{n}/t/{n:032x}": n for n in range(150)}
        client.zadd("{lock:a}{queue}", tokens)
        client.hset("{lock:a}{waiters}", mapping=dict.fromkeys(tokens, f"{int(time.time() * 1000) + 60_000} 3000 0 -"))
        assert "and 140 more: --all" in interlock("show", "a")[1]
        assert (len(shown("a")["waiters"]), shown("a")["waiting"]) == (100, 150)
        assert len(shown("a", "--all")["waiters"]) == 150
        assert "h, process 149, t" in interlock("show", "a", "--all")[1]


def test_show_of_an_unknown_name_a_bad_name_and_a_server_that_is_away(interlock, client, monkeypatch):
    assert not client.keys()
    monkeypatch.setattr(retries, "RETRY_FOR", 0.2)
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


def three_members(ends):
    """The URLs of three servers of a quorum."""
    servers = [ends.enter_context(Server()) for _ in range(3)]
    serve_long(*servers)
    return [server.url for server in servers]


def test_show_on_a_cluster_behind_sentinels_and_on_a_quorum(shown, server_pool):
    with contextlib.ExitStack() as ends:
        group = ends.enter_context(Sentinels(replicas=1))
        members = three_members(ends)
        for urls in ([server_pool.cluster("valkey-9.1").url], [group.url], members):
            made = ends.enter_context(Interlock(*urls) if len(urls) == 1 else Interlock.quorum(urls))
            words = [word for url in urls for word in ("--url", url)]
            # Names of this test alone: other tests have used the cluster, and a name keeps its kind for a while.
            with made.lock("shown lock") as lease:
                found = shown("shown lock", *words)
                assert (found["kind"], [each["token"] for each in found["holders"]]) == ("lock", [lease.token])
            assert shown("nothing", *words)["kind"] is None
            with made.election("shown election"):
                assert shown("shown election", *words)["kind"] == "election"


def test_show_in_a_process_of_its_own_colours_nothing_but_a_terminal(server, locks):
    environment = {"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url, "LC_ALL": "C"}
    with locks.lock("ü"):
        run = [INTERLOCK, "show", "ü"]
        ended = subprocess.run(run, env=environment, capture_output=True, check=True, encoding="utf-8", timeout=60)
    assert "process" in ended.stdout and "\x1b" not in ended.stdout


# Where in the code, as the processes say themselves


def test_show_says_where_in_its_code_the_holder_is_and_when_its_process_was_heard_of(locks, client, interlock, shown):
    began = time.monotonic() - 0.1  # the server rounds
    with locks.lock("a"):
        until(lambda: shown("a")["holders"][0]["place"])
        (holder,) = shown("a")["holders"]
        assert "test_on_call.py:" in holder["place"] and holder["reported_ago"] < time.monotonic() - began
        assert f"at {holder['place']}" in interlock("show", "a")[1]
        # The process falls silent: its entry is not written again, and says when it was.
        process, session = holder["token"].rsplit("/", 2)[0], None
        locks._session.registry.refused_until = float("inf")
        key = next(key for key in client.keys("{interlock:processes}*") if key.endswith(process))
        for session, entry in client.hgetall(key).items():
            written, _, text = entry.partition(" ")
            client.hset(key, session, f"{int(written) - 40_000} {text}")
        _, written, _ = interlock("show", "a")
    assert session is not None
    assert re.search(r"has not reported for ([4-9]\d|\d+ min).*: it may be dead; its lease ends in \d", written)


def test_a_registry_entry_that_is_hostile_or_of_another_version_harms_nobody(locks, client, interlock, shown):
    with locks.semaphore("s", 2).acquire(), locks.semaphore("s", 2).acquire():
        until(lambda: all(each["place"] for each in shown("s")["holders"]))
        locks._session.registry.refused_until = float("inf")  # it writes no more
        place = json.dumps(shown("s")["holders"][0]["place"])
        (key,) = client.keys("{interlock:processes}:*")
        ((session, entry),) = client.hgetall(key).items()
        for hostile in (entry.replace(place, '"\\u001b[2J\\u202e[red]:1"'), "1 {", '9 {"v": 99}', "\x1b[2J", "7"):
            client.hset(key, session, hostile)
            for words in (("show", "s"), ("ls",)):
                status, written, errors = interlock(*words)
                assert (status, errors) == (0, "") and not {"\x1b", "\u202e"} & {*written}
            assert shown("s")["holding"] == 2


# ls


def test_ls_lists_what_processes_hold_and_wait_for_by_pattern_and_prefix(server, locks, others, interlock):
    assert interlock("ls") == (0, "no process says that it holds anything or waits\n", "")
    with Interlock(server.url, prefix="app:") as app_locks, contextlib.ExitStack() as ends:
        lease = locks.lock("stock:1").acquire()
        ends.enter_context(app_locks.semaphore("jobs", 3).acquire())
        ends.enter_context(locks.lock("[red]x\u202e").acquire())
        ends.enter_context(waiting(others.lock("stock:1")))
        ends.callback(lease.release)
        until(lambda: len(listed := json.loads(interlock("ls", "--json")[1])) == 3 and listed[-1]["waiters"])
        _, written, _ = interlock("ls")
        only, mine, none = (interlock("ls", *words)[1] for words in (("stock:*",), ("--prefix", "app:"), ("nothing*",)))
    head, *lines = written.splitlines()
    assert head.split() == ["PREFIX", "NAME", "KIND", "HOLDER", "FOR", "WAITING", "MOVES", "AT"] and len(lines) == 3
    (stock,) = (line for line in lines if "stock:1" in line)
    assert f"/{os.getpid()}/MainThread" in stock and "billing@" in stock and "test_on_call.py:" in stock
    assert "[red]x\\u202e" in written and "\u202e" not in written
    assert [len(text.splitlines()) for text in (only, mine, none)] == [2, 2, 1] and "PREFIX" not in only
    assert "for such a name" in none


# wait


def test_wait_ends_when_the_lock_is_free_and_acquires_nothing(locks, interlock, monkeypatch):
    assert interlock("wait", "a") == (0, "", "")  # nobody has ever held it
    lease = locks.lock("a").acquire()
    status, _, errors = interlock("wait", "a", "-w", "0.1")
    assert status == 75 and re.search(r"a is not free after \S+ s: held by billing@", errors)
    looks = []

    def looked(*words):
        looks.append(words)
        if len(looks) == 4:
            lease.release()
        return glance(*words)

    monkeypatch.setattr(wait, "glance", looked)
    status, written, errors = interlock("wait", "a", "--json")
    assert status == 0 and not errors and json.loads(written)["free"] and json.loads(written)["waited"] >= 0.2
    assert len(looks) == 4
    assert not locks.lock("a").inspect().held


def test_words_of_others_do_not_flood_the_terminal(client, interlock, capsys):
    client.set("lock:big", "A" * 100_000)
    client.set("lock:empty", "")
    client.rpush("lock:list", "x")
    status, written, _ = interlock("show", "big")
    assert status == 0 and len(written) < 2000 and "... (100000 characters)" in written
    assert len(interlock("wait", "big", "-w", "0")[2]) < 1000
    assert interlock("revoke", "big", "--reason", "r", "--force", "--yes")[0] == 0
    assert len(interlock("audit")[1]) < 3000
    for name in ("empty", "list"):
        known = f"{name}: the key 'lock:{name}' is data of something else: interlock can't say who holds it\n"
        assert interlock("show", name)[:2] == (1, known)
        assert interlock("revoke", name, "--reason", "r", "--force")[0] == 1
    print_table(console(), ["NAME", "KIND"], [["n" * 500, "lock"], ["short", "lock"]])
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [11, 506, 11]


def test_the_last_run_of_a_once_has_times_for_people(locks, interlock):
    locks.once("o", at_most=60, at_least=60).run(lambda _: None)
    written = interlock("show", "o")[1]
    assert re.search(r"last run +by billing@\S+, from [-\d]+ [:\d]+ \S+ to [-\d]+ [:\d]+ \S+\n", written)


def test_a_holder_of_no_text_is_every_holder_and_refused(locks, interlock):
    with locks.semaphore("s", 2).acquire(), locks.semaphore("s", 2).acquire():
        status, written, errors = interlock("revoke", "s", "--reason", "r", "--holder", "")
    assert (status, written) == (64, "") and "--holder needs a text" in errors


def test_a_server_that_goes_away_leaves_it_said_that_the_holder_was_asked(locks, interlock, monkeypatch):
    monkeypatch.setattr(revoke, "glance", lambda *_: (_ for _ in ()).throw(Unavailable("no answer")))
    with pytest.raises(LeaseLost), locks.lock("a").acquire():
        status, written, errors = interlock("revoke", "a", "--reason", "r")
    assert (status, written) == (69, "")
    assert "was asked to give it back, and nobody knows whether it has: no answer" in errors


def test_a_lease_that_the_server_has_lost_was_not_given_back(locks, interlock, monkeypatch):
    after = View("a", "lock:a", "lock", "quarantine", quarantine=59.0)
    monkeypatch.setattr(revoke, "glance", lambda *_: after)
    with pytest.raises(LeaseLost), locks.lock("a").acquire():
        views = iter([look(locks, "a")])
        monkeypatch.setattr(revoke, "look", lambda *_: next(views, after))
        status, written, errors = interlock("revoke", "a", "--reason", "r")
    assert (status, written) == (1, "") and "gave it back" not in errors
    assert "has lost the lease: it may still be at work. Now it is in quarantine for 59 s more" in errors


def test_wait_and_revoke_read_the_registry_once_for_a_holder_and_not_with_each_look(
    locks, others, client, interlock, monkeypatch
):
    def reads():
        return client.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"]

    monkeypatch.setattr(Progress, "is_on", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr("interlock.cli.wait.ASK_PLACE_INTERVAL", 3600)
    first, place = locks.lock("a").acquire(), Place(locks)
    view = glance(locks, "a", 1)
    before = reads()
    for _ in range(3):
        place.added_to(view)
    assert reads() == before + 1
    first.release()
    with pytest.raises(LeaseLost), others.lock("a").acquire():
        place.added_to(glance(locks, "a", 1))
        assert reads() == before + 2
        interlock("wait", "a", "-w", "1")  # once for its line on the terminal, once for its message
        assert reads() == before + 4
        interlock("revoke", "a", "--reason", "r", "--grace", "0.3")  # once for the holder that it shows
        assert reads() == before + 5


def test_wait_knows_when_each_kind_is_free(locks, interlock):
    locks.latch("l", 2).count_down()
    assert "1 of 2 have yet to count down" in interlock("wait", "l", "-w", "0")[2]
    locks.latch("l", 2).count_down()
    with locks.semaphore("s", 2).acquire():
        assert interlock("wait", "s", "-w", "0")[0] == 0
        with locks.semaphore("s", 2).acquire():
            assert interlock("wait", "s", "-w", "0")[0] == 75
    with locks.rwlock("w").read():
        assert "reads" in interlock("wait", "w", "-w", "0")[2]
    assert [interlock("wait", name, "-w", "0")[0] for name in "lsw"] == [0, 0, 0]
    for words in (("a", "-w", "-1"), ("a", "-w", "x"), ("a\x07",)):
        assert interlock("wait", *words)[0] == 64


def killed_holder(server, client, ttl=30):
    """The number of a process that was killed while it held the lock `a`."""
    code = f"import time; from interlock import Interlock; Interlock().lock('a', ttl={ttl}).acquire(); time.sleep(60)"
    environment = {"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    until(lambda: client.exists("lock:a"))
    process.kill()
    process.wait()
    return process.pid


def test_wait_outlives_a_holder_that_was_killed(server, client, interlock):
    killed_holder(server, client, ttl=1)
    assert interlock("wait", "a", "-w", "20")[0] == 0


# revoke


@pytest.fixture
def holder(locks):
    """Makes a thread that holds what it gets until it is revoked, and then as long as its event says."""
    with contextlib.ExitStack() as ends:

        def hold(lockable, go=None):
            held = threading.Event()

            def work():
                with contextlib.suppress(LeaseLost), lockable.acquire() as lease:
                    held.set()
                    lease.ended.wait(30)  # revoked, or the Interlock is closed
                    if go is not None:
                        go.wait(30)

            thread = threading.Thread(target=work)
            thread.start()
            ends.callback(thread.join)
            assert held.wait(20)

        yield hold
        locks.close()


def audited(interlock, *words):
    return json.loads(interlock("audit", *words, "--json")[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda locks: locks.lock("a"),
        lambda locks: locks.election("a"),
        lambda locks: locks.semaphore("a", 2),
        lambda locks: locks.rwlock("a").write(),
    ],
    ids=["lock", "election", "semaphore", "rwlock"],
)
def test_revoke_asks_the_holder_and_waits_until_it_has_gone(locks, holder, interlock, make):
    holder(make(locks))
    status, written, errors = interlock("revoke", "a", "--reason", "it hangs", "--grace", "60")
    assert (status, errors) == (0, "") and "gave it back after" in written and "Now it is free" in written
    (entry,) = audited(interlock)
    assert (entry["name"], entry["reason"], entry["forced"], entry["holding"]) == ("a", "it hangs", False, 1)
    assert entry["result"].startswith("released after") and entry["by"].startswith("interlock-revoke-by-")


def test_revoke_names_the_way_out_if_the_holder_stays_and_force_takes_it(locks, others, holder, interlock):
    stays = threading.Event()
    holder(locks.lock("a"), stays)
    status, written, errors = interlock("revoke", "a", "--reason", "it hangs", "--grace", "0.3")
    assert (status, written) == (75, "") and "still holds it" in errors and "use --force" in errors
    assert "revoked: it hangs (by interlock-revoke-by-" in interlock("show", "a")[1]
    with waiting(others.lock("a")):
        status, written, _ = interlock("revoke", "a", "--reason", "now", "--force", "--grace", "0", "--json")
    taken = json.loads(written)
    assert (status, taken["result"], len(taken["holders"])) == (0, "taken", 1)
    assert "its former holder may still be at work" in taken["text"]
    stays.set()
    forced, asked = audited(interlock, "a")[0], audited(interlock, "a")[-1]
    assert (forced["forced"], forced["result"], asked["result"]) == (True, "revoked", "not released within 0.3 s")
    text = interlock("audit", "a", "-n", "1")[1]
    assert "by force: revoked" in text and "now" in text and taken["holders"][0] in text


def test_revoke_of_one_holder_of_several_leaves_the_others(locks, others, holder, interlock):
    holder(locks.semaphore("s", 2))
    with others.semaphore("s", 2).acquire() as mine:
        status, _, errors = interlock("revoke", "s", "--reason", "x")
        assert status == 64 and "has 2 holders: say which" in errors
        status, _, _ = interlock("revoke", "s", "--reason", "x", "--holder", "billing@", "--grace", "60")
        assert status == 0
        assert [each.token for each in others.semaphore("s", 2).inspect().holders] == [mine.token]
        assert "nobody to revoke; held by" in interlock("revoke", "s", "--reason", "x", "--holder", "nobody")[2]


def test_revoke_never_takes_it_from_somebody_who_came_later(locks, others, interlock, monkeypatch):
    first = locks.lock("a").acquire()
    real, later = revoke.Revoke._agreed, []

    def agreed(self, *words):  # while the person thinks, the holder changes
        first.release()
        later.append(others.lock("a").acquire())
        return real(self, *words)

    monkeypatch.setattr(revoke.Revoke, "_agreed", agreed)
    status, _, errors = interlock("revoke", "a", "--reason", "x", "--force", "--grace", "0")
    assert status == 1 and "had gone before, so nobody was revoked. Now it is held by" in errors
    later[0].ensure()
    assert later[0].release()
    assert [each["result"] for each in audited(interlock)] == ["nothing: its holder had gone"]


def test_what_is_not_to_be_revoked_gets_a_line_and_loses_nothing(locks, client, interlock):
    lease = locks.lock("held").acquire()
    client.set("lock:theirs", "their value")
    client.hset("lock:data", "a", "b")
    for words, status, says in (
        (("free", "--reason", "x"), 1, "nobody holds it"),
        (("data", "--reason", "x"), 1, "is data of something else"),
        (("theirs", "--reason", "x"), 75, "can't be asked"),
        (("held",), 64, "--reason"),
        (("held", "--reason", " "), 64, "needs a reason"),
        (("held", "--reason", "x", "--grace", "-1"), 64, "--grace"),
        (("he\x1bld", "--reason", "x"), 64, "control character"),
    ):
        found, _, errors = interlock("revoke", *words)
        assert (found, says in errors, "\x1b" in errors) == (status, True, False), errors
    status, written, _ = interlock("revoke", "held", "--reason", "x", "--force", "--dry-run")
    assert status == 0 and "held is held by" in written and "may still be at work" in written
    lease.ensure()
    assert lease.release() and client.get("lock:theirs") == "their value"
    assert audited(interlock) == [] and "nobody has revoked anything" in interlock("audit")[1]
    status, written, _ = interlock("revoke", "theirs", "--reason", "x", "--force")
    assert status == 0 and "was taken from their value" in written and not client.exists("lock:theirs")


def test_revoke_breaks_latches_and_barriers_and_ends_a_quarantine_by_force(locks, client, interlock):
    locks.latch("l", 2).count_down()
    assert interlock("revoke", "l", "--reason", "x")[0] == 0
    assert locks.latch("l", 2).inspect().revoked
    assert interlock("revoke", "l", "--reason", "x")[0] == 1
    record = "1 lock 1700000000000000 another-server:its-history 60000 - - -"
    client.set("{lock:q}{record}", record, px=60_000)
    status, _, errors = interlock("revoke", "q", "--reason", "x")
    assert status == 75 and "in quarantine for" in errors
    assert "in quarantine for" in interlock("wait", "q", "-w", "0")[2]
    status, written, _ = interlock("revoke", "q", "--reason", "all have been stopped", "--force")
    assert status == 0 and "quarantine has been ended. Now it is free" in written
    assert audited(interlock, "q")[0]["holders"] == ["!quarantine:"]


def test_a_holder_that_was_killed_is_revoked_by_force(server, client, interlock):
    pid = killed_holder(server, client)
    status, written, _ = interlock("revoke", "a", "--reason", "it was killed", "--force", "--grace", "0.2")
    assert status == 0 and f"process {pid}" in written and not client.exists("lock:a")


def test_a_holder_in_asyncio_and_one_in_a_thread_are_told_by_whom_and_why(server, interlock):
    in_asyncio = (
        "import asyncio; from interlock.aio import Interlock\n"
        "async def main():\n"
        "    async with Interlock() as locks, locks.lock('a'): print('in', flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    in_thread = (
        "from interlock import Interlock\n"
        "with Interlock() as locks, locks.lock('a') as lease: print('in', flush=True); lease.lost.wait(60)"
    )
    environment = {"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url}
    for code in (in_asyncio, in_thread):
        with subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == "in\n", process.communicate()[1]
            status, written, _ = interlock("revoke", "a", "--reason", "the disk is full", "--grace", "60")
            _, errors = process.communicate(timeout=60)
        assert status == 0 and f"process {process.pid}" in written
        assert "LeaseLost" in errors and "the disk is full (by interlock-revoke-by-" in errors


def test_revoke_on_a_quorum_asks_and_takes(interlock):
    with contextlib.ExitStack() as ends:
        urls = three_members(ends)
        made = ends.enter_context(Interlock.quorum(urls))
        words = [word for url in urls for word in ("--url", url)]
        lease = made.lock("a").acquire()
        status, _, errors = interlock("revoke", "a", "--reason", "x", "--grace", "0", *words)
        assert status == 75 and "still holds it" in errors
        assert interlock("revoke", "a", "--reason", "y", "--force", "--grace", "0", *words)[0] == 0
        assert not made.lock("a").inspect().held and not lease.release()
        assert [each["reason"] for each in audited(interlock, "a", *words)] == ["y", "x"]
        assert len(audited(interlock, "--url", urls[0])) == 2


# A terminal


@pytest.fixture
def terminal(server):
    """Runs `interlock WORDS...` on a terminal."""
    made = []

    def spawn(*words, **environment):
        terminal_of = {"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url, "TERM": "xterm", **environment}
        made.append(
            pexpect.spawn(
                str(INTERLOCK), list(words), timeout=60, encoding="utf-8", dimensions=(24, 100), env=terminal_of
            )
        )
        return made[-1]

    yield spawn
    for each in made:
        each.close(force=True)


def test_on_a_terminal_revoke_asks_first(locks, holder, terminal):
    holder(locks.lock("a"))
    shell = terminal("revoke", "a", "--reason", "it hangs")
    shell.expect(r"a is held by\s+billing@.*Revoke it\? \[y/N\]: ")
    shell.sendline("n")
    shell.expect("nobody was revoked")
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.exitstatus == 1 and locks.lock("a").inspect().held
    shell = terminal("revoke", "a", "--reason", "it hangs")
    shell.expect("Revoke it")
    for _ in range(4):  # as a person would: input() loses a Ctrl-C that arrives between its prompt and its read
        shell.sendintr()
        if shell.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=5) == 0:
            break
    shell.close()
    assert shell.exitstatus == 130 and locks.lock("a").inspect().revoked is None
    shell = terminal("revoke", "a", "--reason", "it hangs", "--grace", "60")
    shell.expect("Revoke it")
    shell.sendline("y")
    shell.expect("gave it back after")
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.exitstatus == 0


def test_on_a_terminal_wait_shows_who_holds_it_and_show_has_colours_unless_no_color_is_set(locks, terminal):
    lease = locks.lock("a").acquire()
    shell = terminal("wait", "a")
    shell.expect("waiting for .* s: held by billing@")
    lease.release()
    shell.expect(pexpect.EOF)
    with locks.lock("a"):
        coloured, plain = terminal("show", "a"), terminal("show", "a", NO_COLOR="1")
        assert "\x1b[33mheld" in coloured.read()
        assert "\x1b[3" not in plain.read()


def test_revoke_does_not_say_that_a_silent_holder_gave_it_back(locks, interlock):
    for ttl in (1, 5, 25):  # on a slow machine the lease may end before it is revoked
        lease = locks.lock("a", ttl=ttl, renew=False).acquire()
        status, written, _ = interlock("revoke", "a", "--reason", "it is silent", "--grace", "60")
        if status == 0:
            break
    assert status == 0 and "did not give it back, but its lease ended after" in written
    assert "its lease ended after" in interlock("audit", "a")[1]
    assert lease.lost.is_set()
