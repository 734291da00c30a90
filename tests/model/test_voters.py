"""Every order of events of a model of who may vote in a quorum, within bounds: see simulator.voters and ADR 60."""

import pytest

from simulator.voters import Bounds, Rule, search
from simulator.voters.__main__ import main
from simulator.voters.rules import EMPTY, FAULTS
from simulator.voters.run import rolling_restart
from simulator.voters.world import STALE, World
from simulator.voters.worlds import FULL, LOWER_FENCE, OUTSIDE, PLANTS, RIGHT, SUITE


def check(rule, bounds, seconds=60):
    """Search. A search of --full may end before it has seen everything: its bounds are wide."""
    found = search(rule, bounds, seconds=seconds, most=8_000_000)
    assert not found.broken, "\n".join(found.story)
    assert found.complete or found.seconds >= seconds
    return found


@pytest.mark.parametrize("name", SUITE)
def test_no_order_of_events_breaks_a_promise(name):
    assert check(*SUITE[name]).states > 2_000, "the bounds leave too little to look at"


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_no_order_of_events_within_wider_bounds_breaks_a_promise(name):
    check(*FULL[name])


@pytest.mark.parametrize("plant", PLANTS)
def test_a_wrong_rule_is_found(plant):
    broken, rule, bounds = PLANTS[plant]
    found = search(rule, bounds, most=200_000)
    assert found.broken == broken, (plant, found)
    assert found.story[-1] == f"broken: {broken}"


@pytest.mark.parametrize("plant", PLANTS)
def test_the_right_rule_has_no_story_where_a_wrong_one_is_found(plant):
    _, _, bounds = PLANTS[plant]
    assert not search(RIGHT, bounds, steps=9, most=20_000).broken


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_the_rule_does_not_promise_is_really_not_kept(case):
    """So these assumptions are needed, and the search would tell."""
    assert search(*OUTSIDE[case], most=200_000).broken


def test_a_story_is_told_with_the_same_names_throughout():
    found = search(Rule(missing_waits=False), Bounds(kinds=(EMPTY,)))
    assert found.story == [
        "A asks as A1; X gets A1's acquire: granted",
        "Y gets A1's acquire: granted; A holds the lock for 2",
        "B asks as B1; Z gets B1's acquire: granted",
        "X restarts empty",
        "X gets B1's acquire: granted; B holds the lock for 2",
        "broken: both hold the lock",
    ]


def test_names_do_not_matter():
    """States that differ only by the names of clients and members are one, and have the same next states."""
    world = World(RIGHT, Bounds(kinds=(EMPTY,)))
    one = other = world.first_state()
    for text in ("A asks as A1; X", "Z gets A1's acquire", "B asks as B1; Y"):
        one = next(each.after for each in world.next_states(one) if each.text.startswith(text))
    for text in ("B asks as B1; X", "Y gets B1's acquire", "A asks as A1; Z"):
        other = next(each.after for each in world.next_states(other) if each.text.startswith(text))
    assert one != other
    assert world.canonical(one) == world.canonical(other)
    assert {world.canonical(each.after) for each in world.next_states(one)} == {
        world.canonical(each.after) for each in world.next_states(other)
    }


def test_each_member_that_is_left_alone_votes_again():
    world = World(RIGHT, Bounds(kinds=FAULTS, skews=(0, 1, 2)))
    states, seen = [world.first_state()], set()
    while states:
        for each in world.next_states(states.pop()):
            if (after := world.canonical(each.after)) not in seen:
                seen.add(after)
                states.append(after)
    members = world.members
    numbers = [
        number for number, each in enumerate(members.all) if each.reach and not each.is_replica and not each.data.queue
    ]
    assert len(numbers) > 1000
    assert all(map(members.votes_after_quiet, numbers))


def test_a_lease_outlives_a_rolling_restart():
    run = rolling_restart(RIGHT)
    assert not run.broken
    assert run.story.count("X restarts empty") + run.story.count("Z restarts empty") == 2
    assert "A releases A1" in run.story
    assert run.is_holder(1), run.story[-5:]


def test_without_re_grants_a_lease_ends_at_the_second_restart():
    run = rolling_restart(Rule())
    assert "Y restarts empty" in run.story
    assert "A releases A1" not in run.story


def test_a_re_grant_with_a_lower_fence_is_found():
    run = rolling_restart(LOWER_FENCE)
    assert run.is_holder(1)
    assert run.broken == STALE


def test_the_command_line(capsys):
    assert main(["--only", "each fault", "--steps", "5", "--faults", "2"]) == 0
    assert capsys.readouterr().out.endswith("no promise is broken so far\n")
    assert main(["--plants", "--only", "written after"]) == 0
    assert "   4  X restarts empty\n" in capsys.readouterr().out
    assert main(["--plants", "--only", "written after", "--faults", "0"]) == 1
    with pytest.raises(SystemExit):
        main(["--only", "no such search"])
    assert "is in the name of none of: each fault" in capsys.readouterr().err
