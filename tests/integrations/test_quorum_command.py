"""`interlock quorum`: what it shows, what an operator may state, and that it writes to all servers or to none."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
import redis

from harness.modes import wait_until
from harness.servers import Node
from harness.topology.group import ask, info
from interlock import AcquireTimeout, Interlock
from interlock._quarantine.voter import VoterRecord, voter_key
from interlock.cli import app
from interlock.cli.quorum import command
from interlock.cli.quorum.members import Member, look_at

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1, a cluster of them")
starts_each = pytest.mark.runs_on(
    "its own servers", modes="threads", starts="servers of valkey-9.1, valkey-8.1, redis-8.2, redis-7.0 and redis-6.2"
)
ROOT = Path(__file__).parents[2]
INTERLOCK = str(Path(sys.executable).with_name("interlock"))
VOTER = "{lock:}{voter}"


@pytest.fixture
def three():
    """A new quorum."""
    with contextlib.ExitStack() as ends:
        nodes = [ends.enter_context(Node()) for _ in range(3)]
        yield SimpleNamespace(nodes=nodes, urls=[node.url for node in nodes])


@pytest.fixture
def quorum(monkeypatch, capsys):
    """Runs `interlock quorum WORDS...` in this process: its exit status, its object, and its errors."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["interlock", "quorum", *words, "--json"])
        status = app.run()
        written, errors = capsys.readouterr()
        return status, json.loads(written) if written else None, errors

    return run


@pytest.fixture
def asked(monkeypatch, quorum):
    """The same at a terminal: somebody says yes, after this has happened."""

    def run(happens, *words):
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)

        def confirm(*_, **__):
            happens()
            return True

        monkeypatch.setattr("typer.confirm", confirm)
        return quorum(*words)

    return run


def records(servers):
    return [ask(node, "GET", VOTER) for node in servers.nodes]


def states(found):
    return [each.get("state") for each in found["members"]]


def is_granted(servers, **options) -> bool:
    with Interlock.quorum(servers.urls, **options) as locks:
        try:
            locks.lock("a").acquire(timeout=0).release()
        except AcquireTimeout as error:
            assert error.quarantined
            return False
        return True


def grant(node, name="x", fence=7, value="t"):
    """What a server has of a name that was granted there."""
    ask(node, "SET", f"{{lock:{name}}}{{record}}", f"1 lock {fence} - 30000 - {value} -", "PX", 60000)
    ask(node, "SET", f"lock:{name}", value, "PX", 60000)


# show


def test_show_says_which_servers_count_and_changes_nothing(three, quorum):
    new, served, abstains = three.nodes
    clock = int(ask(new, "TIME")[0]) * 1000
    for node, since in ((served, clock - 40_000), (abstains, clock - 10_000)):
        ask(node, "SET", VOTER, VoterRecord(info(node)["master_replid"], since, 30_000).encode(), "PX", 60_000)
    before = records(three)
    status, found, errors = quorum("show", *three.urls)
    assert (status, states(found), errors) == (0, ["new", "counts", "abstains"], "")
    assert 15 < found["members"][2]["wait"] <= 20
    assert [each["since"] for each in found["members"]] == [None, clock / 1000 - 40, clock / 1000 - 10]
    assert states(quorum("show", *three.urls, "--max-ttl", "3600")[1]) == ["new", "abstains", "abstains"]
    served.restart(keep_data=True)
    assert states(quorum("show", *three.urls)[1]) == ["new", "changed", "abstains"]
    assert records(three) == before


def test_what_show_says_is_what_clients_find(three, quorum):
    assert not is_granted(three, max_ttl=0.5)
    _, found, _ = quorum("show", *three.urls, "--max-ttl", "0.5")
    assert {*states(found)} <= {"abstains", "counts"}
    wait_until(lambda: states(quorum("show", *three.urls, "--max-ttl", "0.5")[1]) == ["counts"] * 3)
    assert is_granted(three, max_ttl=0.5)


def test_people_get_a_table(three, monkeypatch, capsys):
    three.nodes[2].kill()
    monkeypatch.setattr("sys.argv", ["interlock", "quorum", "show", *three.urls])
    assert app.run() == 69
    written, errors = capsys.readouterr()
    assert written.count("has no voter record: it counts 30 s after a client first reaches it") == 2
    assert "can't be asked" in written and f"interlock: {three.urls[2]} can't be asked: " in errors


def test_the_doctor_says_the_same(three, quorum, monkeypatch, capsys):
    def doctor():
        words = [word for url in three.urls for word in ("--url", url)]
        monkeypatch.setattr("sys.argv", ["interlock", "doctor", *words, "--json"])
        assert app.run() == 0
        found = json.loads(capsys.readouterr().out)
        return {level: [each["text"] for each in found if each["level"] == level] for level in ("ok", "warning")}

    monkeypatch.setattr("interlock.cli.doctor.trial.TIMEOUT", 0.5)
    warned = doctor()["warning"]
    assert warned.count("has no voter record: it counts 30 s after a client first reaches it") == 3
    assert any("0 of its 3 servers count now" in each for each in warned)
    assert sum("abstains for" in each for each in doctor()["warning"]) == 3, "its own trial was the first client"
    assert quorum("new", *three.urls, "--yes")[0] == 0
    found = doctor()["ok"]
    assert found.count("counts") == 3 and any("handed over by push" in each for each in found)


# new


def test_a_new_quorum_counts_at_once(three, quorum):
    assert not is_granted(three)  # a program has come before the operator, and starts the clocks
    assert not is_granted(three)
    status, found, errors = quorum("new", *three.urls, "--yes")
    assert (status, found["result"], found["written"], errors) == (0, "written", three.urls, "")
    assert is_granted(three)
    for node in three.nodes:
        assert ask(node, "TTL", VOTER) > 80 * 86_400
    status, found, _ = quorum("new", *three.urls, "--yes")
    assert (status, found["result"], found["written"]) == (0, "nothing to do", [])


def test_the_record_is_for_one_prefix_and_for_the_longest_max_ttl(three, quorum):
    assert quorum("new", *three.urls, "--yes", "--prefix", "app:", "--max-ttl", "60")[0] == 0
    assert records(three) == [None] * 3
    assert is_granted(three, prefix="app:", max_ttl=60)
    assert not is_granted(three, prefix="app:", max_ttl=600), "a longer lease may have been lost"
    assert quorum("new", *three.urls, "--yes", "--prefix", "app:", "--max-ttl", "60")[0] == 75, "it was granted lately"
    words = ["new", *three.urls, "--yes", "--prefix", "app:", "--max-ttl", "60", "--nobody-at-work"]
    assert quorum(*words)[0] == 0
    for node in three.nodes:
        record = VoterRecord.parse(ask(node, "GET", voter_key("app:")))
        assert record.longest_ms == 600_000, "the longest that it has seen is kept"
    assert is_granted(three, prefix="app:", max_ttl=600)


def test_a_person_is_asked(three):
    for answer, status, written in (("n", 1, 0), ("y", 0, 3)):
        asked = pexpect.spawn(INTERLOCK, ["quorum", "new", *three.urls], encoding="utf-8", timeout=30)
        asked.expect("Nobody has had a lease of this quorum within the last 30 s")
        assert "has no voter record" in asked.before
        asked.sendline(answer)
        asked.expect(pexpect.EOF)
        asked.close()
        assert asked.exitstatus == status
        assert sum(each is not None for each in records(three)) == written


@pytest.mark.parametrize("words", ["new", "adopt --max-ttl 0.1"])
def test_a_script_must_say_yes(three, quorum, words):
    wait_until(lambda: all(int(info(node, "server")["uptime_in_seconds"]) >= 2 for node in three.nodes))
    status, found, errors = quorum(*words.split(), *three.urls)
    assert (status, found) == (64, None)
    assert "Never in a start script, a compose file or a Helm hook" in errors
    assert records(three) == [None] * 3
    assert quorum(*words.split(), *three.urls, "--yes")[0] == 0


def test_a_quorum_in_use_is_not_new(three, quorum):
    """Two servers count, and the third one was replaced: it may have forgotten the lease that the others have."""
    assert quorum("new", *three.urls, "--yes")[0] == 0
    with Interlock.quorum(three.urls) as locks:
        lease = locks.lock("a").acquire(timeout=5)
        three.nodes[2].restart()
        status, found, _ = quorum("new", *three.urls, "--yes")
        assert (status, found["result"], found["written"]) == (75, "refused", [])
        assert "has 1 lease that is alive" in found["refused"][three.urls[0]]
        assert "counts by itself" in found["refused"][three.urls[0]]
        lease.release()
        status, found, _ = quorum("new", *three.urls, "--yes")
        assert (status, "has granted 1 name within the last minutes" in found["refused"][three.urls[0]]) == (75, True)
        status, found, _ = quorum("new", *three.urls, "--yes", "--nobody-at-work")
        assert (status, found["written"]) == (0, three.urls[2:])


def test_names_that_wait_for_the_new_quorum_are_no_objection(three, quorum):
    assert not is_granted(three)
    grant(three.nodes[0], name="y", fence=0, value="!quarantine:@?>a>1+2")
    status, found, errors = quorum("new", *three.urls, "--yes")
    assert (status, errors) == (0, "")
    assert found["members"][0]["names"] == 2 and not any(each["granted"] for each in found["members"])


def harm(kind, node, others):
    """Make a server one that can be in no quorum; returns what interlock says of it."""
    if kind == "a replica":
        ask(node, "REPLICAOF", "127.0.0.1", others[0].port)
        return "is a replica"
    if kind == "silent":
        node.kill()
        return "can't be asked"
    if kind == "a later version":
        ask(node, "SET", VOTER, "2 x", "PX", 60_000)
    else:
        ask(node, "LPUSH", VOTER, "x")
        ask(node, "PEXPIRE", VOTER, 60_000)
    return f"delete the key {VOTER}"


@pytest.mark.parametrize("kind", ["a replica", "silent", "a later version", "another type"])
@pytest.mark.parametrize("verb", ["new", "adopt"])
def test_one_server_that_is_not_as_it_must_be_stops_all(three, quorum, verb, kind):
    wait_until(lambda: all(int(info(node, "server")["uptime_in_seconds"]) >= 2 for node in three.nodes))
    says = harm(kind, three.nodes[1], [three.nodes[0]])
    status, found, _ = quorum(verb, *three.urls, "--yes", "--max-ttl", "0.1")
    assert (status, found["result"]) == (69 if kind == "silent" else 64, "refused")
    assert [*found["refused"]] == three.urls[1:2] and says in found["refused"][three.urls[1]]
    assert [ask(node, "EXISTS", VOTER) for node in (three.nodes[0], three.nodes[2])] == [0, 0]


def test_a_server_has_one_vote(three, quorum):
    first = three.nodes[0]
    status, found, _ = quorum("new", *three.urls, first.tcp_url, "--yes")
    assert status == 64 and f"is the same server as {first.url}" in found["refused"][first.tcp_url]
    assert records(three) == [None] * 3
    status, _, errors = quorum("new", first.url, first.url, "--yes")
    assert status == 64 and "twice" in errors


def test_the_least_rights_are_enough_but_to_look_for_names(three, quorum):
    (line,) = re.findall(r"^(ACL SETUSER.*)$", (ROOT / "docs/acl.md").read_text(), re.MULTILINE)
    for node in three.nodes:
        ask(node, *line.split())
    urls = [url.replace("unix://", "unix://locks:password@") for url in three.urls]
    assert states(quorum("show", *urls)[1]) == ["new"] * 3
    status, found, _ = quorum("new", *urls, "--yes")
    assert status == 75 and "give it the right +scan" in found["refused"][three.urls[0]]
    ask(three.nodes[0], "ACL", "SETUSER", "locks", "+scan")
    assert [*quorum("new", *urls, "--yes")[1]["refused"]] == three.urls[1:]
    assert quorum("new", *urls, "--yes", "--nobody-at-work")[0] == 0
    assert is_granted(three)


def test_a_node_of_a_cluster_and_a_user_without_info(three, server_pool, quorum):
    node = server_pool.cluster("valkey-9.1").nodes[0]
    status, found, _ = quorum("new", node.tcp_url, "--yes")
    assert status == 64 and "is a node of a cluster" in found["refused"][node.tcp_url]
    ask(three.nodes[0], "ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "-info")
    url = three.urls[0].replace("unix://", "unix://mute:secret@")
    status, found, _ = quorum("new", url, "--yes")
    assert status == 64 and "refuses INFO" in str(found) and "secret" not in str(found)
    ask(three.nodes[0], "ACL", "SETUSER", "mute", "+info", "-eval", "-evalsha")
    status, found, _ = quorum("new", url, "--yes")
    assert (status, found["result"], found["written"]) == (75, "in part", []) and "eval" in str(found)


CHANGES = {
    "restarted": lambda node: node.restart(),
    "restarted with its data": lambda node: node.restart(keep_data=True),
    "emptied, and then reached": lambda node: (ask(node, "FLUSHALL"), ask(node, "SET", VOTER, "1 a 1 1", "PX", 9999)),
    "another max_ttl": lambda node: ask(node, "SET", VOTER, ask(node, "GET", VOTER) + "0", "PX", 60_000),
    "another version": lambda node: ask(node, "SET", VOTER, "2 x", "PX", 60_000),
    "another type": lambda node: (ask(node, "DEL", VOTER), ask(node, "LPUSH", VOTER, "x")),
    "the record is gone": lambda node: ask(node, "DEL", VOTER),
}


def dump(node):
    """What stands under the key, of whatever type."""
    with redis.Redis.from_url(node.url) as client:
        return client.dump(VOTER)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_while_a_person_thought_stays_as_it_is(three, asked, change):
    assert not is_granted(three)
    node, seen = three.nodes[1], []

    def happens():
        CHANGES[change](node)
        seen.append(dump(node))

    status, found, _ = asked(happens, "new", *three.urls)
    assert (found["result"], found["written"]) == ("refused", [])
    assert status == (64 if "type" in change or "version" in change else 75)
    assert [*found["refused"]] == three.urls[1:2]
    assert dump(node) == seen[0]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_the_last_look_stays_as_it_is(three, quorum, monkeypatch, change):
    """The message is late: the server was seen as it was, and is another one now."""
    assert not is_granted(three)
    write, seen = Member.state_that_it_counts, []

    def late(member):
        if member.url == three.urls[1]:
            CHANGES[change](three.nodes[1])
            seen.append(dump(three.nodes[1]))
        return write(member)

    monkeypatch.setattr(Member, "state_that_it_counts", late)
    status, found, _ = quorum("new", *three.urls, "--yes")
    assert (status, found["result"], found["written"]) == (75, "in part", three.urls[:1])
    assert "has changed meanwhile" in found["refused"][three.urls[1]]
    assert f"Written before: {three.urls[0]}" in found["text"]
    assert dump(three.nodes[1]) == seen[0]


def test_a_message_that_is_later_than_a_first_lease_can_be_writes_nothing(three):
    """A client came to a server without a record, and FLUSHALL has removed the record of the client and its lease."""
    member, *_ = look_at(three.urls, "lock:", 30.0)
    member.now_ms -= 2_001
    assert member.state_that_it_counts() == member.CHANGED
    member.now_ms += 60_000
    assert member.state_that_it_counts() == member.CHANGED, "its clock was set back"
    assert records(three) == [None] * 3


@pytest.mark.parametrize("prefix", ["lock:", "lock:{", "lock:{x"])
def test_new_looks_for_the_names_of_all_prefixes_that_share_the_record(three, quorum, prefix):
    """A hash tag may begin in the prefix and end in the name, so several prefixes have one voter record."""
    assert not is_granted(three)
    for node in three.nodes[:2]:
        ask(node, "DEL", VOTER)  # as if they had been emptied; the third one has the lease of a holder that lives
    ask(three.nodes[2], "SET", "lock:a", "somebody", "PX", 60_000)
    ask(three.nodes[2], "SET", "{lock:a}{record}", "1 lock 17 - 60000 - somebody -", "PX", 60_000)
    status, found, _ = quorum("new", *three.urls, "--yes", "--prefix", prefix)
    assert (status, found["written"]) == (75, [])


def test_a_server_that_is_gone_when_it_should_write(three, quorum, asked, monkeypatch):
    status, found, _ = asked(three.nodes[1].kill, "new", *three.urls)
    assert (status, found["written"], [*found["refused"]]) == (69, [], three.urls[1:2])
    three.nodes[1].restart()
    write = Member.state_that_it_counts

    def gone(member):
        if member.url == three.urls[1]:
            three.nodes[1].kill()
        return write(member)

    monkeypatch.setattr(Member, "state_that_it_counts", gone)
    status, found, _ = quorum("new", *three.urls, "--yes")
    assert (status, found["written"]) == (75, three.urls[:1])
    assert "did not say whether it has written it" in found["refused"][three.urls[1]]
    assert ask(three.nodes[2], "GET", VOTER) is None


def test_ctrl_c_in_the_middle_says_what_is_written(three, quorum, monkeypatch):
    write = Member.state_that_it_counts

    def interrupted(member):
        if member.url == three.urls[1]:
            raise KeyboardInterrupt
        return write(member)

    monkeypatch.setattr(Member, "state_that_it_counts", interrupted)
    status, found, errors = quorum("new", *three.urls, "--yes")
    assert (status, found) == (130, None)
    assert f"interrupted at {three.urls[1]}. Written before: {three.urls[0]}" in errors


# adopt


def test_servers_that_have_served_all_along_go_on_with_their_leases(three, quorum):
    for node in three.nodes:
        grant(node)
    wait_until(lambda: all(int(info(node, "server")["uptime_in_seconds"]) >= 3 for node in three.nodes))
    status, found, _ = quorum("adopt", *three.urls, "--yes", "--max-ttl", "1")
    assert (status, found["written"]) == (0, three.urls)
    with Interlock.quorum(three.urls, max_ttl=1) as locks:
        assert locks.lock("x").inspect().held
        locks.lock("y", ttl=1).acquire(timeout=0).release()


def test_a_young_server_is_left_out(three, quorum):
    status, found, _ = quorum("adopt", *three.urls, "--yes")
    assert status == 75 and all("Leave it out" in why for why in found["refused"].values())
    assert records(three) == [None] * 3


def test_a_server_that_a_client_has_reached_is_left_as_it_is(three, quorum):
    assert not is_granted(three)
    before = records(three)
    status, found, _ = quorum("adopt", *three.urls, "--yes")
    assert (status, found["result"], records(three)) == (0, "nothing to do", before)
    assert "a client has reached each of them" in found["text"]


def test_a_client_that_comes_first_wins(three, asked):
    wait_until(lambda: all(int(info(node, "server")["uptime_in_seconds"]) >= 3 for node in three.nodes))
    status, found, _ = asked(lambda: is_granted(three), "adopt", *three.urls, "--max-ttl", "1")
    assert (status, found["written"]) == (75, [])


@starts_each
@pytest.mark.parametrize("kind", ["valkey-9.1", "valkey-8.1", "redis-8.2", "redis-7.0", "redis-6.2"])
def test_what_a_server_tells_of_its_past(server_pool, quorum, kind):
    """Only one that had the data of another server is refused; one that has loaded its own is not."""
    with contextlib.ExitStack() as ends:
        promoted, loaded = (ends.enter_context(server_pool.spare(kind)) for _ in range(2))
        ask(promoted, "REPLICAOF", "127.0.0.1", loaded.port)
        wait_until(lambda: info(promoted)["master_link_status"] == "up")
        ask(promoted, "REPLICAOF", "NO", "ONE")
        ask(loaded, "SET", "a", "b")
        if kind != "redis-6.2":  # which may not tell the two apart
            wait_until(lambda: info(loaded, "persistence")["rdb_bgsave_in_progress"] == "0")
            loaded.restart(keep_data=True)
        wait_until(lambda: int(info(loaded, "server")["uptime_in_seconds"]) >= 3)
        words = ["adopt", promoted.url, loaded.url, "--yes", "--max-ttl", "1"]
        status, found, _ = quorum(*words)
        assert status == 75 and [*found["refused"]] == [promoted.url]
        assert "has had the data of another server" in found["refused"][promoted.url]
        status, found, _ = quorum(*words, "--promoted-earlier")
        assert (status, found["written"]) == (0, [promoted.url, loaded.url])


# What is typed


def test_bad_options(quorum):
    for words, says in (
        ("new", "Missing argument 'URL'"), ("show redis://a --max-ttl 0", "--max-ttl must be at least 0.01"),
        ("show redis://a --prefix a}", "braces"), ("show redis+cluster://a", "a quorum needs single servers"),
        ("show redis+sentinel://a?service=x", "a quorum needs single servers"), ("show nonsense", "nonsense"),
    ):  # fmt: skip
        status, _, errors = quorum(*words.split())
        assert status == 64 and says in errors, errors


def test_no_text_says_that_a_start_script_may_run_it():
    for each in (command.new, command.adopt):
        assert "Never in a start script, a compose" in " ".join(each.__doc__.split())
