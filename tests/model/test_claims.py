"""The table of claims (`_client/claim.py`): its shape, and its copy in the record of the decision."""

from __future__ import annotations

from pathlib import Path

from interlock._client.claim import LATE, TABLE, Event, State, state_after

ADR = Path(__file__).parents[2] / "docs/adr/0061-one-claim-one-table.md"
WITH_SOMETHING = {State.QUEUED, State.OFFERED, State.HELD, State.PASSING}


def test_each_state_has_a_row_and_each_event_a_place():
    assert set(TABLE) == set(State)
    assert {event for row in TABLE.values() for event in row} | LATE == set(Event)


def test_each_state_can_be_reached_and_left_behind():
    def reached(first):
        found = {first}
        while more := {after for state in found for after in TABLE[state].values()} - found:
            found |= more
        return found

    assert reached(State.NEW) == set(State)
    assert all(State.GONE in reached(state) for state in State)


def test_what_the_server_may_have_is_given_back_or_runs_out():
    """Only a latch or barrier that was passed, and a fork, have nothing to give back."""
    to_nothing = {event for state in WITH_SOMETHING for event, after in TABLE[state].items() if after is State.GONE}
    assert to_nothing == {Event.PASSED, Event.FORKS}


def test_a_message_that_came_late_changes_nothing():
    for state in State:
        for event in LATE - TABLE[state].keys():
            assert state_after(state, event) is state
    assert state_after(State.GONE, Event.GRANTED) is None


def test_the_record_of_the_decision_has_the_same_table():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in ADR.read_text().splitlines() if "|" in line
    ]
    (head,) = [row for row in rows if row[0] == "event"]
    said = {row[0]: row[1:-1] for row in rows if row[0] in Event.__members__}
    assert [*said] == [*Event.__members__]
    states = [State[name] for name in head[1:-1]]
    assert states == [*State]
    for event in Event:
        for state, cell in zip(states, said[event.name], strict=True):
            after = TABLE[state].get(event)
            expected = "late" if event in LATE else ""
            if after is not None:
                expected = "=" if after is state else after.name
            assert cell == expected, f"{event.name} in {state.name}"
