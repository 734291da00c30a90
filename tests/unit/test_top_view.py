"""What `interlock top` draws for a snapshot, a state and a size, and what keys do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len

from harness.pictures import COLUMNS, TOP, svg, words_of
from interlock.cli.lookup import Holder, View, Waiter
from interlock.cli.top.data import Snapshot
from interlock.cli.top.keys import keys
from interlock.cli.top.view import HELP, HELP_PAGE, State, draw, press, rows_of, settled
from interlock.primitives.deadlocks import find, name_of
from interlock.primitives.registry import Listed, Party


def party(host, caller="MainThread", place="app/main.py:1", seconds=10.0, *, label="", ago=0.4, fence=None, number=0):
    return Party(
        token="t", fence=fence, host=host, pid=4711, label=label, caller=caller, place=place, seconds=seconds,
        reported_ago=ago, trace_id="", caller_id=f"{host}/{caller}/{number}", permits=1, limit=1, lasting=True,
    )  # fmt: skip


def counted(row: Listed) -> Listed:
    """The row with what follows from its waiters."""
    motion = {"stock:42": ("stuck", None, 40.0), "account:7": ("stuck", None, 41.2), "api": ("moves", 12.0, 0.4)}
    moves, handovers, unchanged = motion.get(row.name, ("", None, None))
    return replace(
        row, waiting=len(row.waiters), processes=len({each.process for each in row.waiters}), motion=moves,
        handovers=handovers, unchanged=unchanged,
    )  # fmt: skip


def a_snapshot() -> Snapshot:
    """A shop with a deadlock, waiters, a dead process, and names that mean harm. docs/top.md shows it."""
    pay, ship = ("web-1", "Thread-3"), ("web-2", "Thread-9")
    things = (
        Listed("lock", "account:7", "lock:", (party(*pay, "/srv/shop/pay.py:31", 41.2, label="shop", fence=17),),
               (party(*ship, "/srv/shop/ship.py:60", 38, label="shop"),)),
        Listed("lock", "stock:42", "lock:", (party(*ship, "/srv/shop/ship.py:58", 40, label="shop", fence=18),),
               (party(*pay, "/srv/shop/pay.py:33", 39, label="shop"),
                *(party(f"web-{i}", "Thread-1", "/srv/shop/stock.py:81", 30 - i) for i in (3, 4, 5)))),
        Listed("semaphore", "api", "lock:", tuple(party(f"job-{i}", place="/srv/jobs/fetch.py:12", seconds=3.1)
               for i in (1, 2, 3)), (party("job-4", place="/srv/jobs/fetch.py:12", seconds=1.2),)),
        Listed("rwlock", "catalogue", "lock:", (party("web-1", "Thread-7", "/srv/shop/search.py:9", 0.8),), ()),
        Listed("election", "scheduler", "lock:", (party("cron-1", place="/srv/jobs/cron.py:20", seconds=93_784),), ()),
        Listed("once", "nightly", "jobs:", (party("cron-2", place="/srv/jobs/report.py:44", seconds=187, ago=21),), ()),
    )  # fmt: skip
    things = tuple(map(counted, things))
    return Snapshot(
        "redis://locks:6379/0",
        taken_at=0.0,
        ping=0.0004,
        things=things,
        deadlocks=tuple(find(things)),
        processes=10,
        clients=24,
    )


def drawn(state=None, snapshot=None, width=80, height=24, now=0.0):
    snapshot = a_snapshot() if snapshot is None else snapshot
    lines = draw(settled(state or State(), snapshot), snapshot, width, height, now)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    return [line.plain.rstrip() for line in lines]


def after(*pressed, snapshot=None, state=None):
    snapshot = a_snapshot() if snapshot is None else snapshot
    state = settled(state or State(), snapshot)
    for key in pressed:
        state = settled(press(state, key, snapshot, 24), snapshot)
    return state


def picture_lines():
    """The lines of the pictures in the docs."""
    snapshot = a_snapshot()
    return draw(settled(State(), snapshot), snapshot, COLUMNS, 28, 0.0)


def test_the_coloured_picture_in_the_docs_is_what_it_draws():
    """If not: PYTHONPATH=tests:tests/unit python -m harness.pictures."""
    assert words_of(TOP.read_text()) == words_of(svg(picture_lines()))


def test_on_eighty_columns_and_twenty_four_lines_everything_that_matters_is_there():
    lines = drawn(after("down", "down"))
    assert len(lines) == 24
    text = "\n".join(lines)
    for words in (
        "redis://locks:6379/0", "6 held; 6 processes, 6 callers wait; 10 processes (1 silent) in all; stuck first",
        "A DEADLOCK OF 2 CALLERS, for 38 s; 3 more wait behind it", "holds stock:42 at /srv/shop/ship.py:58",
        "waits for account:7 at /srv/shop/ship.py:60", "waits for stock:42 at /srv/shop/pay.py:33",
        "stock:42   lock", "4p 4c 39s   STUCK", "1p 1c 1.2s  12/s", "q quit",
    ):  # fmt: skip
        assert words in text, words
    assert lines[-7].startswith("─")
    assert lines[-6:-1] == [
        "api  semaphore",
        "  held by job-1/4711/MainThread for 3.1 s, and by 2 more",
        "    at /srv/jobs/fetch.py:12",
        "  awaited by job-4/4711/MainThread for 1.2 s, of 1 process, 1 caller",
        "    at /srv/jobs/fetch.py:12",
    ]


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (80, 24), (1, 1), (300, 100)])
@pytest.mark.parametrize("pressed", [(), ("enter",), ("?",), ("/", "x")])
def test_no_size_is_too_small(size, pressed):
    drawn(after(*pressed), width=size[0], height=size[1])


def test_rows_are_sorted_by_what_is_stuck_by_age_and_by_name():
    def names(state):
        return [row.name for row in rows_of(state, a_snapshot())]

    assert names(State())[:3] == ["stock:42", "account:7", "api"]
    assert names(after("s"))[:2] == ["scheduler", "nightly"]
    assert names(after("s", "s")) == sorted(names(State()))
    assert after("s", "s", "s") == after()


def test_what_is_stuck_stands_first_then_what_may_be_then_what_moves():
    names = ["moves", "free", "old", "stuck", "young"]
    waiting = {"moves": 16, "free": 0, "old": 2, "stuck": 12, "young": 5}
    motion = {"moves": "moves", "stuck": "stuck"}
    rows = tuple(
        Listed("lock", name, "lock:", (party("h"),), (party("w"),) if waiting[name] else (), waiting[name],
               motion=motion.get(name, ""), unchanged=9.0 if name == "old" else 1.0)
        for name in names
    )  # fmt: skip
    snapshot = replace(a_snapshot(), things=rows)
    assert [row.name for row in rows_of(State(), snapshot)] == ["stuck", "old", "young", "moves", "free"]


def test_a_handover_under_way_is_drawn_as_one():
    on_its_way = replace(party("web-1"), confirmed=False)
    row = Listed("lock", "a", "lock:", (on_its_way,), (party("web-2"),), waiting=1, processes=1)
    text = "\n".join(drawn(snapshot=replace(a_snapshot(), things=(row,), deadlocks=()), width=120))
    assert text.count("handing over to web-1/4711/MainThread") == 2


def test_no_line_of_the_help_wraps_on_eighty_columns():
    assert max(map(len, HELP_PAGE.splitlines())) <= 80
    assert len(HELP) + len("  1000-1020 of 2000") <= 80
    assert len(HELP_PAGE.splitlines()) <= 24 - 3


def test_the_selection_follows_its_row_and_ends_at_the_ends():
    state = after("j")
    assert state.selected.name == "account:7"
    assert after("s", state=state).selected == state.selected
    assert after("up", "k", "home").index == 0
    assert after(*["down"] * 99).selected == after("end").selected == after("G").selected
    left = replace(a_snapshot(), things=a_snapshot().things[1:])
    gone = settled(state, left)
    assert gone.selected == name_of(rows_of(gone, left)[1])
    assert settled(state, replace(left, things=())).selected is None


def test_the_filter_is_typed_and_applies_while_it_is_typed():
    state = after("/", "S", "t", "o", "c", "x", "backspace")
    assert [row.name for row in rows_of(state, a_snapshot())] == ["stock:42"]
    assert drawn(state)[-1] == "/Stoc_"
    state = after("enter", state=state)
    assert (state.filter, state.typing) == ("Stoc", None)
    assert 'filter "Stoc"' in drawn(state, width=120)[1]
    assert after("escape", state=state).filter == ""
    assert after("/", "x", "escape", state=state).filter == "Stoc"
    assert after("/", "clear", "q", state=state).typing == "q"
    assert [row.name for row in rows_of(State(filter="report.py"), a_snapshot())] == ["nightly"]
    assert "no row has this text" in "\n".join(drawn(State(filter="nonsense")))


def test_q_quits_from_every_page():
    for pressed in ((), ("enter",), ("?",)):
        assert after(*pressed, "q").quits
    assert not after("/", "q").quits


def test_details_show_what_the_server_says_and_all_waiters():
    holder = Holder("t", "web-2", 4711, "Thread-9", since=40, place="/srv/shop/ship.py:58", fence=18, remaining=21.0)
    waiters = [Waiter(f"w{i}", f"web-{i}", 4711, "Thread-1", since=30 - i, place="/srv/stock.py:81") for i in (3, 4, 5)]
    view = View("stock:42", "lock:stock:42", "lock", "held", [holder], 1, waiters, 3, 3)
    snapshot = replace(a_snapshot(), details=view)
    state = after("enter", snapshot=snapshot)
    text = "\n".join(drawn(state, snapshot))
    for words in ("ends in 21 s", "fence   18", "/srv/shop/ship.py:58", "waiters, in order (3 processes, 3 callers)"):
        assert words in text
    assert text.count("/srv/stock.py:81") == 3
    state = after("end", snapshot=snapshot, state=state)
    assert "web-5, process 4711, Thread-1, for 25 s" in "\n".join(drawn(state, snapshot, height=10))
    assert after("escape", snapshot=snapshot, state=state).page == "list"
    assert "asking the server" in "\n".join(drawn(state, a_snapshot()))


def test_it_ages_between_two_snapshots_and_says_that_the_server_is_away():
    snapshot = replace(a_snapshot(), error="no answer from redis://locks:6379/0 for 5 s")
    lines = drawn(snapshot=snapshot, now=60.0)
    assert lines[1].startswith("no answer for 1 min, trying on: no answer from redis://locks")
    assert any(line.startswith("stock:42") and "1m40" in line for line in lines)
    slow = drawn(snapshot=replace(a_snapshot(), interval=2.0), now=5.0)
    assert slow[1] == "the last answer is 5.0 s old; asking again"
    never = Snapshot("redis://locks:6379/0", error="no answer")
    assert drawn(snapshot=never)[1] == "no answer, trying on: no answer"
    assert "asking" in drawn(snapshot=Snapshot("redis://locks:6379/0"))[1]


def test_words_of_others_do_nothing_to_the_terminal():
    evil = "[red]x[/red]\x1b[2J\n\u202e"
    things = tuple(
        Listed(kind, evil, evil, (party(evil, evil, evil, label=evil),), (party(evil, evil, evil),))
        for kind in ("lock", "rwlock")
    )
    snapshot = replace(a_snapshot(), things=things, deadlocks=tuple(find(things)), error=evil)
    assert snapshot.deadlocks
    for pressed in ((), ("enter",), ("/", "x")):
        for line in draw(after(*pressed, snapshot=snapshot), snapshot, 200, 40, 0.0):
            assert line.plain.isprintable()
            assert ("[red]" in line.plain) == ("[/red]" in line.plain)


def test_wide_characters_keep_the_columns():
    row = Listed("lock", "日本語の名前:とても長い名前", "lock:", (party("ホスト"),), ())
    lines = drawn(snapshot=replace(a_snapshot(), things=(row,), deadlocks=()), width=60)
    head, cells = lines[2:4]
    assert cell_len(cells[: cells.index("10s")]) == head.index("HELD")


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        (b"jq", ["j", "q"]),
        (b"\x1b[A\x1bOB\x1b[5~", ["up", "down", "page up"]),
        (b"\x1b", ["escape"]),
        (b"\r\x7f\x15", ["enter", "backspace", "clear"]),
        (b"\x1b[200~\x1b[1;5C\x01\x00", []),
        ("ä\x1b[Bß".encode(), ["ä", "down", "ß"]),
        (b"\xff\xc3", []),
    ],
)
def test_keys(sent, names):
    assert list(keys(sent)) == names
