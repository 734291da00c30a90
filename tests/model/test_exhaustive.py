"""Every order of events, within bounds: of a quorum's protocol, and of real processes. See simulator.exhaustive."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("lupa")

from interlock.primitives import scripts as _scripts
from plants.plant import PROJECT, Change, Plant
from simulator.exhaustive import SUITE, Bounds, Design, orders, search
from simulator.exhaustive.__main__ import main
from simulator.exhaustive.automaton import Automaton
from simulator.exhaustive.clients import World
from simulator.exhaustive.column import COPIES, GHOST, LAGS
from simulator.exhaustive.fingerprint import PASSED_OVER, Walk, _slots_of
from simulator.exhaustive.isolation import isolated
from simulator.exhaustive.node import HERE, NOTHING, USED, Lua, StoredLock
from simulator.exhaustive.process import ACQUIRES, IDLE, Input, Process, Shape
from simulator.exhaustive.stories import COHORT, FULL_COHORT, FULL_RESTARTS, RESTARTS
from simulator.exhaustive.wire import Host

BOTH, LAST, NEXT = "both hold the lock", "this fence is no higher", "a new client a fence that is no higher"


def planted(old, new):
    """A change of lock.lua that is really made."""
    assert _scripts.load("lock").source.count(old) == 1
    return lambda source: source.replace(old, new)


def at_once():
    return planted("math.max(0, since + longest - now_ms)", "0")


# With --full only: each takes as long as the other three together.
LONG = {
    "clocks far apart", "three attempts", "restart without the last write", "restart without data",
    "re-seeded from another", "restart without data, re-grants",
}  # fmt: skip


@pytest.mark.rule(5, 7, 10)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in SUITE])
def test_no_order_of_events_breaks_a_promise(name):
    found = search(SUITE[name])
    assert found.complete, "\n".join([found.broken, *found.story])
    assert not found.broken
    assert found.states > (1000 if SUITE[name].ticks == 1 else 100_000), "the bounds leave too little to look at"


LATE_REGRANT = SUITE["a re-grant that comes late"]
LAGGING = Bounds(restarts=1, ways=(LAGS,), tail=1)
BUGS = {
    "a majority of one": (BOTH, Bounds(), Design(majority=1)),
    "one round only": (NEXT, Bounds(skews=(0, 0, 2)), Design(agreed=False)),
    "validity from the majority on": (BOTH, Bounds(), Design(counted_from="majority")),
    "validity checked before the second round": (BOTH, Bounds(skews=(0, 0, 2)), Design(counted_from="vote")),
    "renewed by one": (BOTH, Bounds(renewals=1), Design(renewals_needed=1)),
    "answers to what was asked before": (BOTH, Bounds(asks=1), Design(forgets_replies=False)),
    "a restarted server votes at once": (BOTH, Bounds(restarts=1), Design(lua=at_once())),
    "one without its last writes votes at once": (BOTH, LAGGING, Design(lua=at_once())),
    "one that forgot goes on counting": (
        NEXT,
        Bounds(starts=3, restarts=1, ways=(LAGS,), tail=1),
        Design(lua=planted("fence > 0 and recorded == IDENTITY and", "fence > 0 and")),
    ),
    "a server's first fence is 1": (
        NEXT,
        Bounds(restarts=1),
        Design(lua=planted("or math.max(fence + 1, now_us)", "or fence + 1")),
    ),
    "the agreed fence is taken from anybody": (
        LAST,
        Bounds(ticks=1, skews=(0, 0, 2)),
        Design(
            lua=planted(
                "if abstains_ms > 0 or call('GET', LOCK) ~= token or not read_record() then return {NOT_FOUND} end",
                "read_record() kind = kind or 'lock'",
            )
        ),
    ),
    "a release frees whoever has it": (
        BOTH,
        Bounds(ticks=1, starts=3, faults=1),
        Design(lua=planted("if not holder or holder == token or holder == '!' .. token then", "if true then")),
    ),
    "an abstention for ever": (
        "a new client would never get the lock",
        Bounds(restarts=1),
        Design(lua=planted("math.max(0, since + longest - now_ms)", "longest")),
    ),
    "a server that is re-seeded votes at once": (
        BOTH,
        Bounds(restarts=1, ways=(COPIES,)),
        Design(lua=planted("known_replid == replid and", "known_replid and")),
    ),
    "a token that a copy has brought has the vote": (
        BOTH,
        Bounds(restarts=1, ways=(COPIES,), asks=1, ticks=1),
        Design(lua=planted("(IN_QUORUM or holder ~= token) and apply", "holder ~= token and apply")),
    ),
    "a re-grant that no tombstone stops": (
        GHOST,
        LATE_REGRANT,
        Design(lua=planted("if call('ZSCORE', TOMBSTONES, token) or not read_record() or", "if not read_record() or")),
    ),
    "a re-grant in another abstention": (
        GHOST,
        LATE_REGRANT,
        Design(lua=planted("if named_abstention ~= abstention or holder", "if abstains_ms == 0 or holder")),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    broken, bounds, design = BUGS[bug]
    found = search(bounds, design, most=1_000_000)
    assert broken in found.broken, (bug, found.broken, found.states)
    assert found.story[-1] == f"broken: {found.broken}"


OUTSIDE = {
    "clocks further apart than a restarted server waits": (NEXT, Bounds(restarts=1, skews=(0, 0, 5)), Design()),
    "who gives back goes on under the same token, and the release comes late": (
        BOTH,
        Bounds(ticks=0, asks=1, faults=1),
        Design(releases_votes=True),
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_the_protocol_does_not_promise_is_really_not_kept(case):
    """So these assumptions are needed, and the search would tell."""
    broken, bounds, design = OUTSIDE[case]
    assert broken in search(bounds, design, most=1_000_000).broken


def test_a_release_that_comes_in_its_order_may_be_followed_by_the_same_token():
    assert not search(Bounds(ticks=1, asks=1), Design(releases_votes=True)).broken


def test_the_shortest_story():
    found = search(Bounds(), Design(majority=1))
    assert found.story == [
        "  A asks for votes as A1",
        "  X gets A1's vote: [1, 0]",
        "  B asks for votes as B1",
        "  Y gets B1's vote: [1, 0]",
        "  A holds the lock, fence 0",
        "  B holds the lock, fence 0",
        "broken: B and A both hold the lock",
    ]


def test_a_node_is_the_real_lua():
    lua = Lua()
    vote = (b"acquire", b"A1", b"2999", b"2999", b"0", b"-", b"0", b"", b"lock")
    stored, (code, _) = lua.run(USED, 0, vote)
    assert (code, stored) == (1, StoredLock(b"A1", 2999, 0, HERE, b"2999", True, served=3, is_voter=True))
    assert lua.run(stored.after_tick(), 0, vote)[0].fence == -1_000_000
    assert lua.run(stored, 0, (b"release", b"A1", b"0"))[0].holder == b""
    assert lua.run(stored, 0, vote) == lua.run(stored, 0, vote)
    assert lua.runs == 4


def test_a_node_that_has_lost_its_data_abstains():
    lua = Lua()
    vote = (b"acquire", b"A1", b"2999", b"2999", b"0", b"-", b"0", b"", b"lock")
    for lost in (NOTHING, USED.elsewhere(), lua.run(USED, 0, vote)[0].elsewhere()):
        stored, reply = lua.run(lost, 0, vote)
        assert reply[0] != 1
        assert (stored.served, stored.is_voter) == (0, True)
        for _ in range(3):
            stored = stored.after_tick()
        assert lua.run(stored, 0, vote)[1][0] == 1


def test_names_do_not_matter():
    """States that differ only by the names of clients and servers are one, and have the same next states."""
    world = World(Bounds(), Design())
    one = world.first_state()
    for what in ("A asks", "Y A1", "Z A1", "A holds"):
        one = next(after for who, event, after, _ in world.next_states(one) if f"{who} {event.what}".startswith(what))
    other = world.first_state()
    for what in ("B asks", "Z B1", "X B1", "B holds"):
        other = next(
            after for who, event, after, _ in world.next_states(other) if f"{who} {event.what}".startswith(what)
        )
    assert one != other
    assert world.canonical(one) == world.canonical(other)
    assert {world.canonical(after) for *_, after, _ in world.next_states(one)} == {
        world.canonical(after) for *_, after, _ in world.next_states(other)
    }


def test_the_command_line(capsys):
    assert main(["cohort", "--only", "release()"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cohort, a stopped process, release(): ")
    assert out.endswith("no promise is broken\n")
    assert main(["quorum", "--only", "renewals", "--most", "1000"]) == 0
    assert capsys.readouterr().out.endswith("no promise is broken so far\n")
    with pytest.raises(SystemExit):
        main(["--only", "renewal of what"])
    assert "is in the name of none of: late messages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["quorums"])
    assert "'quorums' is none of: quorum, restarts, cohort" in capsys.readouterr().err


# Real processes: one server that restarts, and a cohort


def stories(suite, full):
    """The searches of the suite, and those of --full."""
    return [
        *(pytest.param(bounds, id=name) for name, bounds in suite.items()),
        *(pytest.param(bounds, id=f"{name}, wider", marks=pytest.mark.full) for name, bounds in full.items()),
    ]


def check_orders(bounds, most_seconds=60):
    """Search. A search of --full may end before it has seen everything: its bounds are wide."""
    found = orders.search(bounds, most_seconds=most_seconds)
    assert not found.broken, "\n".join(found.story)
    assert found.complete or found.seconds >= most_seconds
    assert found.ends > 50, "the bounds leave too few ends to look at"


@pytest.mark.rule(5, 7, 8, 10)
@pytest.mark.parametrize("bounds", stories(RESTARTS, FULL_RESTARTS))
def test_no_order_of_events_of_clients_and_a_server_that_restarts_breaks_a_rule(bounds):
    check_orders(bounds)


@pytest.mark.rule(2, 5, 7, 8)
@pytest.mark.parametrize("bounds", stories(COHORT, FULL_COHORT))
def test_no_order_of_events_of_a_cohort_breaks_a_rule(bounds):
    check_orders(bounds)


BOTH_HOLD = "A1 and B1 both hold the lock"
PLANTS = {
    "the quarantine is skipped": (
        "restarts", "a restart", BOTH_HOLD,
        ("primitives/quarantine.lua", "if IDENTITY == '-' or recorded", "if true or recorded"),
    ),
    "the quarantine counts from the last grant": (
        "restarts", "leases that are renewed", BOTH_HOLD,
        ("primitives/quarantine.lua", "math.ceil(since + wait", "math.ceil((fence and fence / 1000 or since) + wait"),
    ),
    "the quarantine counts from a second before the start": (
        "restarts", "a restart", BOTH_HOLD,
        ("_quarantine/identity.py", "max(0.0, self.uptime - 1)", "max(0.0, self.uptime + 1)"),
        # Else each server that restarts a second after it answered may be a spare, and counts from when it is met.
        ("_quarantine/server_history.py", "any(stamp.may_be_older_than(", "0 and any(stamp.may_be_older_than("),
    ),
    "a restart without data forgets the quarantine": (
        "restarts", "leases that are renewed", BOTH_HOLD,
        (
            "_quarantine/server_history.py",
            "before.identity or lost_before",
            'before.identity if facts.loaded else "-"',
        ),
    ),
    "the quarantine counts from the start of a replica": (
        "restarts", "a failover", BOTH_HOLD,
        ("_quarantine/stamp.py", "0 if facts.promoted else", "0 if False else"),
    ),
    "a release deletes whatever is there": (
        "restarts", "three fixed leases", BOTH_HOLD,
        ("primitives/lock.lua", "if not holder or holder == token or holder == '!' .. token then", "if true then"),
    ),
    "a tombstone is ignored": (
        "restarts", "two slow messages", "A/A1/A1.1 is left in the server",
        (
            "primitives/lock.lua",
            "if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end\n    if not holder then",
            "if not holder then",
        ),
    ),
    "a renewal grants again": (
        "restarts", "three acquires", "A/A1/A1.1 is left in the server",
        (
            "primitives/lock.lua",
            "elseif holder == lease_token then",
            "elseif not holder or holder == lease_token then call('SET', lock, lease_token, 'PX', ttl)",
        ),
    ),
    "the quarantine lasts half as long": (
        "restarts", "another try", BOTH_HOLD,
        (
            "primitives/quarantine.lua",
            "wait = math.max(wait, ttl or 0, tonumber(known_wait) or 0)",
            "wait = math.floor(math.max(wait, ttl or 0, tonumber(known_wait) or 0) / 2)",
        ),
    ),
    "the deadline counts from the reply": (
        "restarts", "a slow message", "A1 believes until 3996 ms, and the server frees at 2999 ms",
        ("_client/acquiring.py", "min(max_hold_until, sent + ttl", "min(max_hold_until, self.runtime.now() + ttl"),
    ),
    "a renewed deadline counts from the reply": (
        "restarts", "two slow messages", "A1 believes until 4996 ms, and the server frees at 3999 ms",
        ("_client/renewal.py", "extend_deadline(sent, _ttl_ms", "extend_deadline(now, _ttl_ms"),
    ),
    "a cancelled caller undoes nothing": (
        "restarts", "a cancellation", "A/A1/A1.1 is left in the server",
        ("_client/acquiring.py", "or not isinstance(error, LockError) else None", "else None"),
        ("_client/acquiring.py", "attempt.is_queued or attempt.in_doubt or", "attempt.is_queued or"),
    ),
    "a lease passes after its deadline": (
        "cohort", "release()", "a lease passed on after its deadline",
        (
            "_client/cohort.py",
            ("            and grant.reason_ended(now) is None\n"
            "            and hold.deadline - now >= hold.ttl / 2\n"),
            "",
        ),
    ),
    "a lease passes while a request is unanswered": (
        "cohort", "a command", "a lease passed on while a request about it was unanswered",
        ("_client/cohort.py", "            and hold.unanswered == 0\n", ""),
    ),
    "a command that is unanswered does not count": (
        "cohort", "a command", "a command of the section with fence 0 ran in a later section of the same lease",
        ("_client/holding.py", "            hold.unanswered += by\n", "            pass\n"),
    ),
    "nobody gives back a lease that ends before its section": (
        "cohort", "waiters whose time ends", "is left in the server",
        (
            "_client/turns.py",
            ("            grant.hold.claim.in_doubt = True  # a request of it may be on its way\n"
            "            self.giving_back.in_background(grant)\n"),
            "            self.giving_back.ends.book.remove(grant.hold)\n",
        ),
        ("_client/lease_ends.py", "        if grant.lease is None:  # its turn", "        if False:  # its turn"),
    ),
    "the record does not say which fences are reserved": (
        "cohort", "a lease passes", "the fence of A1 is no higher than one before",
        ("primitives/lock.lua", "fence = first_fence + number - 1", "fence = first_fence"),
    ),
    "a quarantine hands over": (
        "restarts", "a restart, a waiter", BOTH_HOLD,
        ("primitives/lock.lua", "  if apply_quarantine() then return nil, 0 end\n", ""),
    ),
    "a lease that passes leaves the book": (
        "cohort", "a slow message", "a lease that passed on is not in the book of renewals",
        (
            "_client/cohorts.py", "            grant.mark_released()\n",
            "            grant.mark_released()\n            self.book.remove(hold)\n",
        ),
    ),
}  # fmt: skip
# Found only by --full, or by a search that finds another of these bugs, too
RARE = {
    "the quarantine counts from the last grant", "a restart without data forgets the quarantine",
    "the quarantine lasts half as long", "the quarantine counts from the start of a replica",
    "a release deletes whatever is there", "a renewed deadline counts from the reply",
    "a tombstone is ignored", "a renewal grants again",
    "nobody gives back a lease that ends before its section", "a quarantine hands over",
    "the record does not say which fences are reserved",
}  # fmt: skip


@pytest.mark.parametrize(
    "plant", [pytest.param(plant, marks=pytest.mark.full if plant in RARE else ()) for plant in PLANTS]
)
def test_a_bug_that_is_planted_in_the_source_is_found(plant, tmp_path):
    group, story, broken, *changes = PLANTS[plant]
    source = Plant(plant, tuple(Change(*change) for change in changes), ()).plant(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "simulator.exhaustive", group, "--only", story, *["--full"] * (plant in RARE)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(PROJECT)])},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert f"searching {tmp_path}" in ran.stderr, ran.stderr
    assert ran.returncode == 1, ran.stdout
    assert re.search(rf"^broken: .*{re.escape(broken)}$", ran.stdout, re.MULTILINE), ran.stdout


def test_the_shortest_story_of_real_processes():
    found = orders.search(RESTARTS["a slow message"], planted("call('PEXPIRE', lock, ttl)", "redis.call('TIME')"))
    assert found.story == [
        "  A1 acquires",
        "  the server gets A's acquire A/A1/A1.1: [1, 0]",
        "  A gets the reply for A1",
        "    A1 holds the lock until 2996 ms, fence 0",
        "tick 1",
        "  A runs",
        "  the server gets A's renew A/A1/A1.1 2999: [1]",
        "  A gets the reply for worker-renewal",
        "    A1 holds the lock until 3996 ms",
        "broken: A1 believes until 3996 ms, and the server frees at 2999 ms",
    ]


def test_a_process_does_the_same_again():
    """So a state may be remembered by its inputs."""
    with isolated():
        automaton, host = Automaton("A", Shape()), Host()
        step = automaton.step(0, Input("acts", 0, host, "A1", ACQUIRES))
        automaton.step(step.after, Input("runs", 1, host))
        automaton.step(step.after, Input("breaks", 0, host, "A1"))
        assert len({repr(view) for view in automaton.views}) == len(automaton.views) == 4
        for state, view in enumerate(automaton.views):
            one, other = automaton._repeated(state), automaton._repeated(state)
            assert one.view() == other.view() == view
            assert one.fingerprint() == other.fingerprint()
            one.close()
            other.close()
        automaton.close()


def test_what_a_fingerprint_passes_over_is_a_field(monkeypatch):
    """After a rename the walk would no longer pass over it."""
    visit, fields = Walk._visit_object, {}

    def noted(walk, value, kind):
        slots = {name for each in kind.__mro__ for name in _slots_of(each)}
        fields.setdefault(kind.__name__, set()).update(slots, getattr(value, "__dict__", ()))
        visit(walk, value, kind)

    monkeypatch.setattr(Walk, "_visit_object", noted)
    orders.search(RESTARTS["a slow message"])
    stale = [f"{kind}.{name}" for kind, names in PASSED_OVER.items() for name in names - fields.get(kind, set())]
    assert stale == []


def test_processes_that_differ_have_other_fingerprints():
    with isolated():
        one, other, host = Process("A", Shape()), Process("A", Shape()), Host()
        assert one.fingerprint() == other.fingerprint()
        assert one.view().threads == (("A1", IDLE),)
        (request,), _ = one.take(Input("acts", 0, host, "A1", ACQUIRES))
        assert request.calls[0][1][:2] == (b"acquire", b"A/A1/A1.1")
        assert one.fingerprint() != other.fingerprint()
        other.take(Input("acts", 1, host, "A1", ACQUIRES))
        assert one.fingerprint() != other.fingerprint()
        one.close()
        other.close()
