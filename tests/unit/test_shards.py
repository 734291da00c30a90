"""A long run in pieces: each test is in one of them, and the table says what is missing."""

from __future__ import annotations

import pytest

from harness.shards import Shard, note

TESTS = [f"tests/unit/test_{file}.py::test_{name}[{case}]" for file in "abc" for name in range(40) for case in "xyz"]


def test_each_test_is_in_one_piece_together_with_its_combinations():
    pieces = [Shard(number, 7) for number in range(1, 8)]
    for nodeid in TESTS:
        (piece,) = (piece for piece in pieces if piece.has(nodeid))
        assert piece.has(nodeid.partition("[")[0] + "[another]")
    assert all(any(piece.has(nodeid) for nodeid in TESTS) for piece in pieces)


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/", "-1/4"])
def test_what_is_no_piece_is_refused(text):
    with pytest.raises(pytest.UsageError, match="as in 3/40"):
        Shard.parse(text)
    assert Shard.parse("4/4") == (4, 4)


def test_the_table_has_each_piece_that_ran_and_those_that_are_missing(tmp_path):
    notes = tmp_path / "notes"
    result = {"commit": "abc1234", "passed": 7, "failed": 0, "skipped": 1, "seconds": 3}
    note(Shard(3, 4), "full", result, notes)
    note(Shard(1, 4), "default", result, notes)
    head, first, third, missing = note(Shard(1, 4), "full", {**result, "failed": 2}, notes)
    assert head.split() == ["piece", "commit", "passed", "failed", "skipped", "seconds"]
    assert first.split() == ["1", "abc1234", "7", "2", "1", "3"]
    assert third.split()[0] == "3"
    assert missing == "missing: 2, 4"
