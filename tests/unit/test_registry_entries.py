"""The entries of the registry, without a server."""

from __future__ import annotations

import json

import pytest

from interlock.primitives.registry import (
    MAX_ENTRY,
    Item,
    ReadCall,
    ReadReply,
    encode_entry,
    listed,
    merge_read,
    parse_entry,
)
from interlock.primitives.votes import Votes


def test_the_silence_of_a_process_is_seen_in_its_entry():
    entry = encode_entry("1", [Item("lock", "a", "", "w@h/1/t/r", 7, "x.py:1", 2.0, "", "")], [])
    for later, silent in ((5.0, False), (20.0, True)):
        (found,) = listed([parse_entry("w@h/1", f"1000 {entry}".encode(), 1000 + later * 1000)])
        (holder,) = found.holders
        assert (holder.seconds, holder.reported_ago, holder.is_silent) == (2.0 + later, later, silent)
        assert (holder.label, holder.host, holder.pid, holder.caller) == ("w", "h", 1, "t")


@pytest.mark.parametrize(
    "item",
    [
        ["lock", "a", "", "t", float("inf"), "x.py:1", 0, "", ""],
        ["lock", "a", "", "t", 1, "x.py:1", 10**400, "", ""],
        ["lock", "a", "", "t", 1, "x.py:1", 0, "", "", float("-inf")],
        ["lock", "a", "", "t", 1, "x.py:1", 0, "", "", 1, float("inf")],
        ["lock", "a", "", "t", 1, "x.py:1", float("nan"), "", ""],
        ["lock", "a", "", "t", 1, "x.py:1", float("inf"), "", ""],
    ],
)
def test_numbers_that_are_none_make_no_entry(item):
    stored = json.dumps({"v": 1, "library": "9", "holds": [item], "waits": []})
    assert parse_entry("h/1", f"1000 {stored}".encode(), 2000) is None


def test_a_time_without_end_makes_no_entry():
    good = encode_entry("1", [Item("lock", "a", "", "t", 7, "x.py:1", 2.0, "", "")], [])
    assert parse_entry("h/1", f"1000 {good}".encode(), 2000) is not None
    for digits in 400, 4000, 5000:
        assert parse_entry("h/1", f"{'9' * digits} {good}".encode(), 2000) is None


def test_of_the_servers_of_a_quorum_the_one_with_the_newest_report_counts_for_each_session():
    def vote(now_ms, **ago):
        pairs = [(session.encode(), f"{now_ms - ms} {session} {ms}".encode()) for session, ms in ago.items()]
        return ReadReply(now_ms, [part for pair in pairs for part in pair])

    votes = [vote(1_000_000, a=50_000, b=1_000), vote(5_000_000, a=2_000), ReadReply(7_000, [b"c", b"nonsense"])]
    assert merge_read(Votes(ReadCall(), votes[:1], 2, 3), None) is None
    merged = merge_read(Votes(ReadCall(), votes, 0, 3), None)
    found = dict(zip(merged.entries[::2], merged.entries[1::2], strict=True))
    assert found == {
        b"a": b"%d a 2000" % (merged.now_ms - 2_000),
        b"b": b"%d b 1000" % (merged.now_ms - 1_000),
    }


def test_an_entry_is_never_large_and_keeps_the_oldest():
    items = [Item("lock", f"{i:02}" + "x" * 510, "lock:", "h/1/t/r", 7, "y" * 200, 99.0 - i, "", "") for i in range(50)]
    entry = encode_entry("1", items, items)
    assert 10_000 < len(entry) <= MAX_ENTRY
    found = listed([parse_entry("h/1", f"1000 {entry}".encode(), 1000)])
    assert [each.name for each in found] == [item.name for item in items[: len(found)]]
    huge = encode_entry("1", [items[0]._replace(place="z" * 100_000)], [])
    assert parse_entry("h/1", f"1000 {huge}".encode(), 1000).holds == []
