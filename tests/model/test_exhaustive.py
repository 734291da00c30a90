"""Every order of events of a quorum's protocol, within bounds. See simulator.exhaustive."""

import pytest

pytest.importorskip("lupa")

from interlock.primitives import scripts as _scripts
from simulator.exhaustive import SUITE, Bounds, Design, search
from simulator.exhaustive.__main__ import main
from simulator.exhaustive.clients import World
from simulator.exhaustive.node import NOTHING, Lua, StoredLock, identity_stamp

BOTH, LAST, NEXT = "both hold the lock", "this fence is no higher", "a new client a fence that is no higher"


def planted(old, new):
    """A change of lock.lua that is really made."""
    assert _scripts.load("lock").source.count(old) == 1
    return lambda source: source.replace(old, new)


def at_once():
    return planted("if IDENTITY == '-' or recorded", "if true or recorded")


@pytest.mark.rule(5, 7, 10)
@pytest.mark.parametrize("name", SUITE)
def test_no_order_of_events_breaks_a_promise(name):
    found = search(SUITE[name])
    assert found.complete, "\n".join([found.broken, *found.story])
    assert not found.broken
    assert found.states > 100_000, "the bounds leave too little to look at"


@pytest.mark.rule(7)
def test_a_restarted_server_that_nobody_knew_waits_if_it_is_suspected():
    assert not search(Bounds(ticks=2, restarts=1), Design(previous="?")).broken


BUGS = {
    "a majority of one": (BOTH, Bounds(), Design(majority=1)),
    "one round only": (NEXT, Bounds(skews=(0, 0, 2)), Design(agreed=False)),
    "validity from the majority on": (BOTH, Bounds(), Design(counted_from="majority")),
    "validity checked before the second round": (BOTH, Bounds(skews=(0, 0, 2)), Design(counted_from="vote")),
    "renewed by one": (BOTH, Bounds(renewals=1), Design(renewals_needed=1)),
    "answers to what was asked before": (BOTH, Bounds(asks=1), Design(forgets_replies=False)),
    "a restarted server votes at once": (BOTH, Bounds(restarts=1), Design(lua=at_once())),
    "one without its last writes votes at once": (BOTH, Bounds(restarts=1, tail=1), Design(lua=at_once())),
    "one that forgot goes on counting": (
        NEXT,
        Bounds(starts=3, restarts=1, tail=1),
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
                "if call('GET', LOCK) ~= token or not read_record() then return {NOT_FOUND} end",
                "read_record() kind = kind or 'lock'",
            )
        ),
    ),
    "a release frees whoever has it": (
        BOTH,
        Bounds(ticks=1, starts=3, faults=1),
        Design(lua=planted("if not holder or holder == token or holder == '!' .. token then", "if true then")),
    ),
    "a marker for ever": (
        "a new client would never get the lock",
        Bounds(restarts=1),
        Design(lua=planted("math.max(0, math.ceil(since + ", "math.max(1000, math.ceil(since + ")),
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
    "a restarted server that nobody knew or suspects": (BOTH, Bounds(restarts=1), Design(previous="-")),
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
    lua, known = Lua(), identity_stamp(0, 0, -3, b"*")
    vote = (b"acquire", b"A1", b"2999", b"2999", b"0", b"-", b"0", b"", b"lock", known)
    stored, (code, _) = lua.run(NOTHING, 0, vote)
    assert (code, stored) == (1, StoredLock(b"A1", 2999, 0, known[:25], b"2999", holder_noted=True))
    assert lua.run(stored.after_tick(), 0, vote)[0].fence == -1_000_000
    assert lua.run(stored, 0, (b"release", b"A1", b"0", known))[0].holder == b""
    assert lua.run(stored, 0, vote) == lua.run(stored, 0, vote)
    assert lua.runs == 4


def test_names_do_not_matter():
    """States that differ by the names of clients and servers only are one, and what can follow is the same."""
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
    assert main(["--only", "renewals"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("renewals: ")
    assert out.endswith("no promise is broken\n")
    assert main(["--only", "renewals", "--most", "1000"]) == 0
    assert capsys.readouterr().out.endswith("no promise is broken so far\n")
    with pytest.raises(SystemExit):
        main(["--only", "renewal of what"])
    assert "is in the name of none of: late messages" in capsys.readouterr().err
