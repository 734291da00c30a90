"""`interlock doctor`: its checks on facts, and the command on real servers that are set up badly."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis

from harness.modes import wait_until
from harness.topology import Sentinels, serve_long
from harness.topology.group import ask
from interlock import AcquireTimeout, Interlock, LockError
from interlock._doctor.checks import Level, findings, of_callers
from interlock._doctor.facts import Facts, ServerFacts
from interlock.cli import app
from interlock.cli.doctor.trial import _not_acquired
from interlock.embedded import Server
from interlock.primitives.deadlocks import find
from interlock.primitives.registry import Listed, Party

pytestmark = pytest.mark.runs_on(
    "its own servers", modes="threads", starts="servers of valkey-9.1, sentinels, a cluster, a quorum of them"
)
GOOD = {"redis_version": "7.2.4", "uptime_in_seconds": "86400", "role": "master", "connected_slaves": "1"}
SAFE = {"maxmemory": "0", "maxmemory-policy": "noeviction", "appendonly": "yes", "min-replicas-to-write": "1"}


def server(url="redis://a/0", info=(), settings=(), **more) -> ServerFacts:
    return ServerFacts(url, info=GOOD | dict(info), settings=SAFE | dict(settings), **more)


def judged(facts: Facts) -> dict[Level, str]:
    """The texts of the findings by level."""
    found = findings(facts)
    return {level: "; ".join(f"{each.subject} {each.text}" for each in found if each.level is level) for level in Level}


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (server(), Level.OK, "Redis 7.2.4, up 24 h"),
        (server(info={"valkey_version": "8.1.0"}), Level.OK, "Valkey 8.1.0"),
        (server(info={"redis_version": "6.0.9"}), Level.DANGER, "too old"),
        (ServerFacts("redis://a/0", error="refused"), Level.DANGER, "does not answer: refused"),
        (ServerFacts("redis://a/0"), Level.WARNING, "refuses INFO"),
        (server(settings={"maxmemory": "9", "maxmemory-policy": "allkeys-lru"}), Level.DANGER, "evicts locks"),
        (server(settings={"maxmemory-policy": "allkeys-lru"}), Level.NOTE, "would evict"),
        (server(info={"used_memory": "95"}, settings={"maxmemory": "100"}), Level.WARNING, "95%"),
        (server(info={"uptime_in_seconds": "20"}), Level.NOTE, "for 10 s more"),
        (server(info={"uptime_in_seconds": "20", "master_replid2": "1f"}), Level.NOTE, "for at least 10 s more"),
        (server(info={"rdb_last_bgsave_status": "err"}), Level.DANGER, "cannot write to its disk"),
        (server(settings={"appendonly": "no"}), Level.NOTE, "no log of its writes"),
        (server(info={"role": "slave"}), Level.DANGER, "read-only replica"),
        (server(settings={"min-replicas-to-write": "2"}), Level.DANGER, "has 1 replicas"),
        (server(latency=0.2), Level.WARNING, "200 ms for a round trip"),
        (server(clock=-90), Level.NOTE, "90 s behind"),
    ],
)
def test_each_fact_about_one_server_has_its_finding(facts, level, says):
    assert says in judged(Facts("server", [facts]))[level]


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (Facts("cluster", [server(info={"connected_slaves": "0"})]), Level.WARNING, "has no replica"),
        (Facts("quorum", [server("redis://a/0"), server("redis://b/0")]), Level.WARNING, "no more failures than 1"),
        (
            Facts("quorum", [server(), ServerFacts("redis://b/0", error="x"), ServerFacts("redis://c/0", error="x")]),
            Level.DANGER, "1 of 3 answer: no lock",
        ),
        (
            Facts("quorum", [server(info={"run_id": "1"}), server(info={"run_id": "1"}), server(info={"run_id": "2"})]),
            Level.DANGER, "2 of its URLs lead to one server",
        ),
        (
            Facts("quorum", [server(), server(), server()], hosts=["localhost", "127.0.0.1", "b"]),
            Level.WARNING, "2 of its servers run on this machine",
        ),
        (Facts("quorum", [server(info={"connected_slaves": "1"})] * 3), Level.DANGER, "must be independent"),
        (
            Facts("sentinel", [server(settings={"min-replicas-to-write": "0"})], [ServerFacts("s")]),
            Level.DANGER, "goes on granting when it is cut off",
        ),
        (
            Facts("sentinel", [server()], [ServerFacts("s")] * 3, [{"num-slaves": "0"}]),
            Level.WARNING, "know no replica",
        ),
        (Facts("sentinel", [server()], [ServerFacts("s", error="x")] * 3), Level.DANGER, "no majority answers"),
    ],
)  # fmt: skip
def test_each_fact_about_several_servers_has_its_finding(facts, level, says):
    assert says in judged(facts)[level]


REPLID, NOW = "a" * 40, 1_000_000  # ms
RECORDS = {
    "": (Level.WARNING, "has no voter record: it counts 30 s after a client first reaches it"),
    f"1 {REPLID} 970000 30000": (Level.OK, "counts"),
    f"1 {REPLID} 980000 30000 a word of later": (Level.WARNING, "abstains for 10 s more"),
    f"1 {REPLID} 970000 40000": (Level.WARNING, "abstains for 10 s more"),
    f"1 {REPLID} 980000 9": (Level.WARNING, "abstains for 10 s more"),
    f"1 {'b' * 40} 0 40000": (Level.WARNING, "it counts 40 s after a client next reaches it"),
    f"1 {REPLID} 1000001 30000": (Level.WARNING, "it counts 30 s after a client next reaches it"),
    f"2 {REPLID} 0 0": (Level.DANGER, "can't be read"),
    f"1 {REPLID} 0 {10**400}": (Level.DANGER, "can't be read"),
}


@pytest.mark.parametrize("record", RECORDS)
def test_each_server_of_a_quorum_counts_or_not_and_the_doctor_says_why(record):
    level, says = RECORDS[record]
    one = server(info={"master_replid": REPLID}, voter_record=record, now_ms=NOW)
    found = judged(Facts("quorum", [one] * 3))
    assert says in found[level]
    assert ("0 of its 3 servers count now" in found[Level.WARNING]) == (level is not Level.OK)


def test_a_server_of_a_quorum_that_refuses_info_is_a_danger_once():
    found = judged(Facts("quorum", [ServerFacts("redis://a/0")]))
    assert "refuses INFO, so it can't judge itself" in found[Level.DANGER] and "INFO" not in found[Level.WARNING]


def test_the_age_of_a_server_of_a_quorum_says_nothing_of_a_quarantine():
    assert "quarantine" not in judged(Facts("quorum", [server(info={"uptime_in_seconds": "20"})]))[Level.NOTE]


def test_servers_that_are_set_up_well_have_no_warning():
    alone = {"connected_slaves": "0", "master_replid": REPLID}
    free, counts = {"min-replicas-to-write": "0"}, {"voter_record": f"1 {REPLID} 0 0", "now_ms": NOW}
    for facts in (
        Facts("server", [server()]),
        Facts("cluster", [server(), server()]),
        Facts(
            "quorum", [server(info={"run_id": each} | alone, settings=free, **counts) for each in "abc"], hosts=[*"abc"]
        ),
        Facts("sentinel", [server()], [ServerFacts("s")] * 3, [{"num-slaves": "2"}]),
    ):
        found = judged(facts)
        assert not found[Level.DANGER] and not found[Level.WARNING], found


# The callers


def said(caller, seconds=60.0, ago=1.0, *, lasting=True):
    return Party(
        token="t", fence=1, host="web", pid=7, label="", caller=caller, place=f"{caller}.py:1", seconds=seconds,
        reported_ago=ago, trace_id="", caller_id=caller, permits=1, limit=1, lasting=lasting,
    )  # fmt: skip


def a_ring(**more):
    return [
        Listed("lock", "a", "lock:", (said("A", **more),), (said("B"), said("C"))),
        Listed("lock", "b", "lock:", (said("B"),), (said("A"),)),
    ]


@pytest.mark.parametrize(
    ("things", "level", "says"),
    [
        (a_ring(), Level.DANGER, ["2 callers wait for each other, for 60 s, and 1 more behind them: ", "multi()",
         "web/7/A holds lock 'a' since A.py:1 and waits for lock 'b' at A.py:1", "since B.py:1", "interlock revoke"]),
        (a_ring(lasting=False), Level.WARNING, ["2 callers probably wait for each other"]),
        ([Listed("lock", "a", "lock:", (said("A"),), (said("A"),))], Level.DANGER, ["a caller waits for itself"]),
        ([Listed("lock", name, "lock:", (said("A", ago=21),), ()) for name in "ab"], Level.WARNING,
         ["web/7 holds lock 'a' since A.py:1 and 1 more, and has said nothing for 21 s", "interlock show a"]),
        ([Listed("lock", "a; b", "lock:", (said("A", ago=21),), ())], Level.WARNING, ["interlock show 'a; b' says"]),
    ],
)  # fmt: skip
def test_callers_that_are_stuck_and_processes_that_are_silent_have_findings(things, level, says):
    (found,) = of_callers(things)
    assert found.level == level
    assert all(words in f"{found.subject} {found.text} {found.advice}" for words in says), found


def test_callers_that_work_have_none():
    assert list(of_callers([Listed("lock", "a", "lock:", (said("A"),), (said("B"),))])) == []


# The command


def test_a_master_that_does_not_answer_is_not_said_to_refuse_config_get():
    assert "CONFIG GET" not in judged(Facts("sentinel", [ServerFacts("redis://a/0", error="refused")]))[Level.WARNING]


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs `interlock doctor WORDS...`: its exit status and its findings, as text of each level."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["interlock", "doctor", "--json", *words])
        status = app.run()
        found = json.loads(capsys.readouterr().out)
        return status, {
            level: "; ".join(f"{each['text']} → {each['advice']}" for each in found if each["level"] == level)
            for level in Level
        }

    return run


def test_the_doctor_tries_a_lock_and_leaves_nothing_that_lasts(doctor, monkeypatch):
    with Server() as server, redis.Redis.from_url(server.url) as client:
        monkeypatch.setenv("INTERLOCK_URL", server.url)
        status, found = doctor()
        assert status == 0
        assert "handed over by push" in found[Level.OK] and "Valkey 9.1" in found[Level.OK]
        assert all(client.pttl(key) > 0 for key in client.scan_iter())
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "volatile-ttl")
        status, found = doctor()
        assert status == 1 and "noeviction" in found[Level.DANGER]


def test_the_doctor_names_both_lines_of_a_deadlock(doctor, monkeypatch):
    monkeypatch.setattr("interlock._people.registry.REPORT_INTERVAL", 0.1)
    monkeypatch.setattr("interlock.primitives.deadlocks.MIN_TOGETHER", 0.02)
    monkeypatch.setattr("interlock._doctor.checks.find", partial(find, min_wait=0.0))
    ready = threading.Barrier(2)

    def nested(first, second):
        with contextlib.suppress(LockError), first:
            ready.wait()
            second.acquire()

    with Server() as server, Interlock(server.url) as locks, ThreadPoolExecutor(2) as pool:
        a, b = locks.lock("a"), locks.lock("b")
        for each in ((a, b), (b, a)):
            pool.submit(nested, *each)
        try:
            wait_until(lambda: sum(len(each.waiters) for each in locks.ls()) == 2)
            wait_until(lambda: "wait for each other" in doctor("--url", server.url)[1][Level.DANGER])
            status, found = doctor("--url", server.url)
        finally:
            locks.close()
    assert status == 1
    assert found[Level.DANGER].count("test_doctor.py:") == 4


def test_missing_rights_show(doctor, monkeypatch):
    monkeypatch.setattr("interlock._client.waiting.HEARTBEAT_INTERVAL", 0.1)  # a poll may be as fast as a push
    with Server() as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "mute", "on", ">secret", "~*", "resetchannels", "+@all", "-publish")
        url = server.url.replace("unix://", "unix://mute:secret@")
        status, found = doctor("--url", url)
        assert (status, "by a poll" in found[Level.WARNING]) == (0, True), found
        assert doctor("--strict", "--url", url)[0] == 1
        assert "rights" not in found[Level.NOTE]
        client.execute_command("ACL", "SETUSER", "mute", "-xadd", "-hdel")
        found = doctor("--url", url)[1][Level.NOTE]
        assert "→ Give its user mute the rights +xadd" in found and "→ Give its user mute the rights +hdel" in found
        client.execute_command("ACL", "SETUSER", "mute", "resetkeys", "~lock:*", "~{lock:*")
        found = doctor("--url", url)[1][Level.NOTE]
        assert "rights ~{interlock:processes}* +hdel" in found and "rights +xadd ~{interlock:audit}" in found
        assert not client.keys("{interlock:*")  # it has tried them, and written nothing
        client.execute_command("ACL", "SETUSER", "mute", "-set")
        status, found = doctor("--url", url)
        assert status == 1 and "cannot be acquired" in found[Level.DANGER]
        assert "secret" not in str(found)


def test_it_connects_once_for_the_facts_and_as_a_client_for_the_trial(doctor):
    with Server() as server, redis.Redis.from_url(server.url) as client:
        before = client.info("stats")["total_connections_received"]
        assert doctor("--url", server.url)[0] == 0
        # Of the trial: one for each of two threads, and one for the pushes.
        assert client.info("stats")["total_connections_received"] - before <= 1 + 3


def test_a_server_that_is_not_there_and_a_wrong_password(doctor):
    status, found = doctor("--url", "redis://127.0.0.1:1")
    assert status == 1 and "refused" in found[Level.DANGER]
    with Server() as server:
        status, found = doctor("--url", server.url.replace("unix://", "unix://me:wrong@"))
        assert status == 1 and "wrong" not in found[Level.DANGER].replace("is wrong", "")
        assert found[Level.DANGER].startswith("can't be used: the user name or password of 'me' is wrong")
        assert found[Level.DANGER].endswith("→ ")  # the error itself has the way out


def test_what_is_no_server_and_what_speaks_no_tls_is_named(doctor):
    with socket.create_server(("127.0.0.1", 0)) as web, ThreadPoolExecutor(1) as pool:

        def answer():
            while True:
                try:
                    connection, _ = web.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)
                    connection.sendall(b"<html>400\r\n")

        pool.submit(answer)
        port = web.getsockname()[1]
        assert "Something else than Redis" in doctor("--url", f"redis://127.0.0.1:{port}")[1][Level.DANGER]
        web.shutdown(socket.SHUT_RDWR)
    assert "speak TLS" in doctor("--url", f"rediss://127.0.0.1:{port}")[1][Level.DANGER]


def test_one_cause_is_one_finding_and_the_log_stays_silent(doctor, capsys):
    with Server() as server:
        urls = [word for host in ("/", "/./") for word in ("--url", server.url.replace("unix:///", f"unix://{host}"))]
        status, found = doctor(*urls)
        assert status == 1 and "are the same server" in found[Level.DANGER] and Level.NOTE in found
        assert "same server" not in found[Level.NOTE]
    assert not capsys.readouterr().err


def test_sentinels_a_cluster_and_a_quorum(doctor, server_pool, monkeypatch):
    with Sentinels(replicas=1) as group:
        status, found = doctor("--url", group.url)
        assert status == 1 and "min-replicas-to-write 1" in found[Level.DANGER]
    status, found = doctor("--url", server_pool.cluster("valkey-9.1").url)
    assert "handed over by push" in found[Level.OK]
    with Server() as a, Server() as b, Server() as c:
        serve_long(a, b, c)
        status, found = doctor(*(word for each in (a, b, c) for word in ("--url", each.url)))
        assert (status, "3 of its servers run on this machine" in found[Level.WARNING]) == (0, True), found
        # Two servers of three that were emptied: nobody knows what the third one has granted.
        for each in (a, b):
            ask(each, "FLUSHALL")
        monkeypatch.setattr("interlock.cli.doctor.trial.TIMEOUT", 0.5)
        status, found = doctor("--url", a.url, "--url", b.url, "--url", "unix:///no-such-socket")
        assert status == 1 and "does not answer" in found[Level.DANGER]
        assert "cannot be acquired" in found[Level.WARNING] + found[Level.DANGER]


def test_a_quarantine_is_a_wait():
    error = AcquireTimeout("lock 'a' is in quarantine for 10 s more, since. Wait; or .revoke()")
    error.quarantined = True
    found = _not_acquired(error)
    assert found.level is Level.WARNING
    assert found.text == "cannot be acquired yet: lock 'a' is in quarantine for 10 s more, since"


def test_what_people_read_names_the_server_and_the_way_out(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["interlock", "doctor", "--url", "redis://127.0.0.1:1/[bold]"])
    assert app.run() == 64
    monkeypatch.setattr("sys.argv", ["interlock", "doctor", "--url", "redis://127.0.0.1:1/3"])
    assert app.run() == 1
    written = capsys.readouterr().out
    assert "danger   redis://127.0.0.1:1/3 does not answer" in written and "→ Start it" in written
    assert "\x1b" not in written
