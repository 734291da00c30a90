"""The entries of the registry, without a server."""

from __future__ import annotations

from interlock.primitives.registry import Item, encode_entry, listed, parse_entry


def test_the_silence_of_a_process_is_seen_in_its_entry():
    entry = encode_entry("1", [Item("lock", "a", "", "w@h/1/t/r", 7, "x.py:1", 2.0, "", "")], [])
    for later, silent in ((5.0, False), (20.0, True)):
        (found,) = listed([parse_entry("w@h/1", f"1000 {entry}".encode(), 1000 + later * 1000)])
        (holder,) = found.holders
        assert (holder.seconds, holder.reported_ago, holder.is_silent) == (2.0 + later, later, silent)
        assert (holder.label, holder.host, holder.pid, holder.caller) == ("w", "h", 1, "t")
