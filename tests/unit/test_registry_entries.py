"""The entries of the registry, without a server."""

from __future__ import annotations

import json

import pytest

from interlock._protocol.tokens import Process
from interlock.primitives.registry import (
    MAX_ENTRY,
    MAX_READ,
    Item,
    ReadCall,
    ReadReply,
    encode_entry,
    group_by_name,
    merge_read,
    parse_entry,
    party_of,
)
from interlock.primitives.votes import Votes

PROCESS = Process("", "h", 1)


def test_the_silence_of_a_process_is_seen_in_its_entry():
    entry = encode_entry("1", [Item("lock", "a", "", f"w@h/1/t/{0:032x}", 7, "x.py:1", 2.0, "", "")], [])
    for later, silent in ((5.0, False), (20.0, True)):
        (found,) = group_by_name([parse_entry(Process("w", "h", 1), f"1000 {entry}".encode(), 1000 + later * 1000)])
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
        ["lock", "a", "", "t", 1, "x.py:1", -1.0, "", ""],
        ["lock", "a", "", "t", 1, "x.py:1", 1e11, "", ""],
        ["lock", "a", "", "t", 1 << 63, "x.py:1", 0, "", ""],
        ["lock", "a", "", "t", -1, "x.py:1", 0, "", ""],
        ["lock", "a", "", "t", 1, "x.py:1", 0, "", "", -1],
        ["lock", "a", "", "t", 1, "x.py:1", 0, "", "", 1, 1 << 64],
        ["lock", "a", "", "t", 1, "x.py:1", 0, "", "", 1, 1, "no"],
        "lock, a",
        {"kind": "lock"},
    ],
)
def test_numbers_that_are_none_make_no_entry(item):
    stored = json.dumps({"v": 1, "library": "9", "holds": [item], "waits": []})
    assert parse_entry(PROCESS, f"1000 {stored}".encode(), 2000) is None


def test_a_time_without_end_makes_no_entry():
    good = encode_entry("1", [Item("lock", "a", "", "t", 7, "x.py:1", 2.0, "", "")], [])
    assert parse_entry(PROCESS, f"1000 {good}".encode(), 2000) is not None
    for digits in 400, 4000, 5000:
        assert parse_entry(PROCESS, f"{'9' * digits} {good}".encode(), 2000) is None


def test_an_entry_is_never_read_that_is_much_larger_than_those_of_this_version():
    good = json.dumps({"v": 1, "library": "9", "holds": [], "waits": []})
    for size, found in ((MAX_READ - 100, True), (MAX_READ, False)):
        entry = parse_entry(PROCESS, f"1000 {good}{' ' * size}".encode(), 2000)
        assert (entry is not None) == found


def test_if_the_clock_of_the_server_was_set_back_a_dead_process_is_not_alive_until_then():
    entry = encode_entry("1", [Item("lock", "a", "", "t", 7, "x.py:1", 2.0, "", "")], [])
    for set_back, ago in ((20, 20.0), (3600, None)):
        said = parse_entry(PROCESS, f"{set_back * 1000} {entry}".encode(), 0)
        assert [party.reported_ago for _, party in said.holds] == ([ago] if ago else [])
    votes = [ReadReply(0, [b"s", b"3600000 old"]), ReadReply(90_000, [b"s", b"85000 new"])]
    assert merge_read(Votes(ReadCall(), votes, 0, 3), None).entries == [b"s", b"85000 new"]


def test_a_caller_is_the_same_whatever_the_labels_of_its_interlocks():
    item = Item("lock", "a", "", "t", 7, "x.py:1", 2.0, "", "7f")
    one, other, elsewhere = (
        party_of(Process(*words), item, 0) for words in (("a", "h", 1), ("b", "h", 1), ("a", "h", 2))
    )
    assert one.caller_id == other.caller_id != elsewhere.caller_id


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
    found = group_by_name([parse_entry(PROCESS, f"1000 {entry}".encode(), 1000)])
    assert [each.name for each in found] == [item.name for item in items[: len(found)]]
    huge = encode_entry("1", [items[0]._replace(place="z" * 100_000)], [])
    assert parse_entry(PROCESS, f"1000 {huge}".encode(), 1000).holds == []
