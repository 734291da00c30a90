"""Random histories on real servers (histories/): the checker, on lines made by hand; a short one per topology.

scripts/histories runs the long ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from harness.matrix import required
from harness.older import last_of_days
from harness.processes import lives
from harness.servers import Missing
from harness.topology.group import ask
from interlock import AcquireTimeout, Interlock, Unavailable
from model.histories import cli, faults, history
from model.histories.checker import History, check
from model.histories.history import Verdict, play
from model.histories.late import Lateness
from model.histories.lines import Pen, clock, read
from model.histories.rigs import LOSSES, RIGS, Line
from model.histories.settings import ALL, KINDS, MODES, PHASES, PLAIN, TOPOLOGIES, Order, Settings, draw, draw_kept
from model.histories.store import StoreServer
from model.histories.worker import Process, Worker, drive

TESTS = Path(__file__).parents[1]


# The checker


def hold(
    h, got=1.0, oks=(), *, fence=1, name="a", asked=None, token=None, p="p0t", kind="lock", s="", timeout=None,
    weight=1, limit=1, group="", lost=None, untold=None, letting=None, let=None, how="with", ours=None, error="",
):  # fmt: skip
    """The lines of one hold."""
    asked = got - 0.5 if asked is None else asked
    about = {"p": p, "h": h}
    lines = [
        {"t": asked, "e": "ask", "s": s or f"{h}#", "name": name, "kind": kind, "weight": weight, "limit": limit,
         "group": group, "timeout": timeout, **about},
        {"t": got, "e": "got", "token": token or h, "fence": fence, **about},
        *({"t": t, "e": "ok", **about} for t in oks),
    ]  # fmt: skip
    if lost is not None:
        lines.append({"t": lost, "e": "lost", "why": "", **about})
    if untold is not None:
        lines.append({"t": untold, "e": "untold", "waited": 0, **about})
    if letting is not None:
        lines.append({"t": letting, "e": "letting", "how": how, **about})
    if let is not None:
        lines.append({"t": let, "e": "let", "ours": ours, "error": error, **about})
    return lines


def section(s, *, outcome="", cancels=(), cancelling=0, begun=0.0, ended: float | None = 5.0, p="p0a", style="with"):
    """The lines of one section."""
    lines = [{"t": begun, "e": "begin", "p": p, "s": s, "kind": "lock", "style": style, "timeout": None}]
    lines += [{"t": t, "e": "cancel", "p": p, "s": s} for t in cancels]
    if ended is not None:
        end = {"t": ended, "e": "end", "p": p, "s": s, "outcome": outcome, "cancelling": cancelling, "text": ""}
        lines.append(end)
    return lines


def controller(event, t=9.0, **about):
    return {"t": t, "p": "controller", "e": event, **about}


def broken(*parts, **options):
    """The checks that these lines break."""
    lines = [line for part in parts for line in (part if isinstance(part, list) else [part])]
    return sorted({violation.check for violation in check(History.of(lines, **options))})


OVERLAP = ["outlived", "overlap"]  # two that believe at one time, of which the later one was granted later


def test_sections_one_after_the_other_break_nothing():
    assert broken(
        hold("x", 1.0, [1.1, 1.9], fence=1, letting=2.0, let=2.1), hold("y", 2.2, [2.3, 2.4], fence=2, asked=0.5)
    ) == []  # fmt: skip


@pytest.mark.rule(5)
def test_two_that_believe_at_one_time_are_an_overlap():
    first, second = hold("x", 1.0, [1.1, 2.5], fence=1), hold("y", 1.5, [2.0, 3.0], fence=2)
    assert broken(first, second) == OVERLAP
    violation, _ = check(History.of([*first, *second]))
    assert "x (fence 1, until 2.5" in violation.text
    assert [line["h"] for line in violation.lines if line["e"] == "ok"] == ["x", "y", "x", "y"]


def test_a_single_passing_ensure_inside_another_belief_is_an_overlap():
    assert broken(hold("x", 1.0, [1.1, 2.5], fence=1), hold("y", 1.5, [2.0], fence=2)) == OVERLAP


def test_one_who_only_holds_and_does_not_believe_is_none():
    assert broken(hold("x", 1.0, [1.1, 1.2], fence=1), hold("y", 1.5, [2.0, 3.0], fence=2)) == []


def test_a_lease_that_shows_another_reply_in_place_of_its_fence_is_seen():
    assert broken(hold("x", 1.0, [1.1, 1.9], fence=[1, 2]), hold("y", 2.2, [2.3, 2.4], fence=2, asked=0.5)) == ["fence"]


def test_other_names_do_not_matter():
    assert broken(hold("x", 1.0, [1.1, 2.5], fence=1), hold("y", 1.5, [2.0], fence=2, name="b")) == []


def test_permits_are_counted():
    three = {"name": "pool", "kind": "semaphore", "limit": 3}
    fits = [hold("x", 1, [1.1, 2], fence=1, **three), hold("y", 1.1, [1.2, 2], fence=2, weight=2, **three)]
    assert broken(*fits) == []
    assert broken(*fits, hold("z", 1.6, [1.7, 1.8], fence=3, **three)) == ["overlap"]


def test_readers_share_and_a_writer_is_alone_but_may_go_on_as_a_reader():
    books = {"name": "books", "kind": "rwlock", "limit": ALL}
    reader = hold("x", 1, [1.1, 2], fence=1, **books)
    assert broken(reader, hold("y", 1.2, [1.3, 2], fence=2, **books)) == []
    writer = hold("w", 1.2, [1.3, 1.9], fence=2, weight=ALL, **books)
    assert broken(reader, writer) == OVERLAP
    goes_on = hold("r", 1.5, [1.6, 3.0], fence=3, group="w", **books)
    assert broken(writer, goes_on) == []
    assert broken(writer, goes_on, hold("v", 2.0, [2.1, 2.2], fence=4, weight=ALL, **books)) == OVERLAP


def test_an_owner_may_take_over_from_itself_and_from_nobody_else():
    mine = {"name": "mine", "kind": "owner"}
    first = hold("x", 1, [1.1, 2], fence=1, group="owner ann", **mine)
    assert broken(first, hold("y", 1.2, [1.3, 1.4], fence=2, group="owner ann", **mine)) == []
    assert broken(first, hold("y", 1.2, [1.3, 1.4], fence=2, group="owner bob", **mine)) == OVERLAP


def test_what_was_revoked_by_force_is_not_believed_any_more():
    first, second = hold("x", 1.0, [1.1, 2.5], fence=1), hold("y", 1.8, [1.9, 3.0], fence=2)
    forced = controller("revoked", 1.7, name="a", force=True, since=1.6, done=True)
    assert broken(first, second, forced) == []
    assert broken(first, second, forced | {"force": False}) == OVERLAP
    assert broken(first, second, forced | {"name": "b"}) == OVERLAP
    later = hold("z", 2.5, [2.6, 2.7], fence=3)
    assert broken(first, second, forced, later) == OVERLAP, "the next one is believed"


def test_with_a_stepped_clock_only_fences_are_checked():
    both = hold("x", 1.0, [1.1, 2.5], fence=1), hold("y", 1.5, [2.0, 3.0], fence=2)
    assert broken(*both, clock_stepped=True) == []
    assert broken(hold("x", fence=2), hold("y", 2.0, fence=1, asked=1.5), clock_stepped=True) == ["fence"]


@pytest.mark.rule(5)
def test_who_believes_after_a_later_grant_was_received_is_seen():
    late = hold("x", 1.0, [1.1, 2.5], fence=1)
    assert broken(late, hold("y", 2.0, fence=2)) == ["outlived"], "the later one need not believe"
    assert broken(late, hold("y", 2.6, fence=2)) == []
    assert broken(late, hold("y", 2.0, fence=2, name="b")) == []
    assert broken(late, hold("y", 2.0, fence=2), clock_stepped=True) == []
    assert broken(late, hold("y", 2.0, fence=2, group="x")) == [], "one writer that goes on as a reader"
    assert broken(late, hold("y", 2.0, fence=2, group="x"), hold("z", 2.2, fence=3)) == ["outlived"]
    forced = controller("revoked", 1.9, name="a", force=True, since=1.8, done=True)
    assert broken(late, hold("y", 2.0, fence=2), forced) == []
    pool = {"name": "pool", "kind": "semaphore", "limit": 3}
    two = hold("x", 1.0, [1.1, 2.5], fence=1, weight=2, **pool)
    assert broken(two, hold("y", 2.0, fence=2, **pool)) == []
    assert broken(two, hold("y", 2.0, fence=2, **pool), hold("z", 2.1, fence=3, weight=2, **pool)) == ["outlived"]


def wrote(h, since, until, *, accepted=True, p="p0t"):
    return {"t": since, "p": p, "e": "wrote", "h": h, "until": until, "accepted": accepted}


@pytest.mark.rule(7)
def test_a_stale_write_that_the_store_accepts_is_seen():
    first, second = hold("x", 1.0, [1.1, 1.2], fence=1), hold("y", 2.0, [2.1, 2.9], fence=2)
    assert broken(first, second, wrote("x", 1.3, 1.4), wrote("y", 2.2, 2.3)) == []
    assert broken(first, second, wrote("x", 2.1, 2.15), wrote("y", 2.2, 2.3)) == [], "nobody had written before it"
    assert broken(first, second, wrote("x", 3.0, 3.1), wrote("y", 2.2, 2.3)) == ["stale write"]
    assert broken(first, second, wrote("x", 3.0, 3.1), wrote("y", 2.2, 2.3), clock_stepped=True) == ["stale write"]
    assert broken(first, second, wrote("x", 3.0, 3.1, accepted=False), wrote("y", 2.2, 2.3)) == []
    assert broken(first, second, wrote("x", 2.2, 2.4), wrote("y", 2.3, 2.5)) == [], "at one time"


@pytest.mark.rule(5, 7)
def test_a_holder_that_the_store_refuses_is_seen():
    believer, refused = hold("x", 1.0, [1.1, 2.5], fence=1), wrote("x", 2.0, 2.1, accepted=False)
    assert broken(believer, refused) == ["refused write"]
    assert broken(believer, refused, clock_stepped=True) == []
    assert broken(hold("x", 1.0, [1.1, 1.9], fence=1), refused) == [], "it did not believe any more"
    forced = controller("revoked", 1.9, name="a", force=True, since=1.8, done=True)
    assert broken(believer, refused, forced) == []


@pytest.mark.rule(5, 7)
def test_a_write_beside_a_holder_that_has_written_is_seen():
    believer, other = hold("x", 1.0, [1.1, 2.5], fence=1), hold("y", 2.6, fence=2, asked=0.5)
    assert broken(believer, other, wrote("x", 1.2, 1.3), wrote("y", 2.0, 2.1)) == ["stale write"]
    assert broken(believer, other, wrote("y", 2.0, 2.1)) == [], "the believer had not written yet"
    assert broken(believer, other, wrote("x", 1.2, 1.3), wrote("y", 2.6, 2.7)) == []


@pytest.mark.rule(2, 7)
def test_a_lease_that_passes_on_after_a_later_grant_is_seen():
    first = hold("x", 1.0, [1.1], fence=5, token="t", letting=2.0, let=2.1, how="release", ours=False)
    passed = hold("y", 2.2, fence=6, token="t", asked=0.5)
    assert broken(first, passed) == []
    other = hold("z", 1.5, fence=900, asked=0.6, p="p1t")
    assert broken(first, passed, other) == ["fence"], "it was passed on at 2.0, and the later grant was there at 1.5"
    assert broken(first, passed, hold("z", 2.1, fence=900, asked=0.6, p="p1t")) == [], "it may have been granted later"
    forced = controller("revoked", 1.4, name="a", force=True, since=1.3, done=True)
    assert broken(first, passed, other, forced) == []
    assert broken(first, passed, other, clock_stepped=True) == []


@pytest.mark.rule(7)
def test_a_later_grant_with_a_lower_fence_is_seen():
    assert broken(hold("x", 1.0, fence=5), hold("y", 2.0, fence=4, asked=1.5)) == ["fence"]
    assert broken(hold("x", 1.0, fence=5), hold("y", 2.0, fence=4, asked=0.5)) == [], "it may have been granted first"
    assert broken(hold("x", 1.0, fence=5), hold("y", 1.1, fence=5, asked=0.9)) == ["fence"], "two have one fence"
    assert broken(hold("x", 1.0, fence=5, token="t"), hold("y", 2.0, fence=5, token="t")) == [], "one lease, seen twice"


@pytest.mark.rule(11)
def test_a_child_that_gets_what_its_parent_holds_is_seen():
    child = {"t": 1.2, "p": "p0t-f1", "e": "inherited", "h": "x", "passed": False, "ours": False, "error": ""}
    assert broken(hold("x", 1.0, [1.1]), child) == []
    assert broken(hold("x", 1.0, [1.1]), child | {"passed": True}) == ["inherited"]
    assert broken(hold("x", 1.0, [1.1]), child | {"ours": True}) == ["inherited"]
    assert broken(hold("x", 1.0, [1.1]), child | {"ours": None, "error": "RuntimeError()"}) == ["inherited"]


def test_an_rlock_that_is_entered_again_has_one_lease():
    again = {"t": 1.2, "p": "p0t", "e": "nested", "h": "x", "token": "x", "fence": 1}
    assert broken(hold("x", 1.0, fence=1), again) == []
    assert broken(hold("x", 1.0, fence=1), again | {"fence": 2}) == ["nested"]
    assert broken(hold("x", 1.0, fence=1), again | {"token": "y"}) == ["nested"]
    newer, older = again | {"token": "y", "fence": 3}, again | {"token": "y", "fence": 1}
    assert broken(hold("x", 1.0, fence=2, group="owner a"), newer) == [], "another caller of the owner took over"
    assert broken(hold("x", 1.0, fence=2, group="owner a"), older) == ["nested"]


@pytest.mark.rule(6)
def test_a_loss_that_nobody_is_told_of_is_seen():
    assert broken(hold("x", 1.0, [1.1], lost=2.0, untold=5.0)) == ["untold"]
    paused = controller("paused", 2.5, who="p0t", until=4.9)
    assert broken(hold("x", 1.0, [1.1], lost=2.0, untold=5.0), paused) == []
    assert broken(hold("x", 1.0, [1.1], lost=2.0, letting=2.1, let=2.2)) == ["untold"], (
        "`with` ended as if nothing were"
    )
    assert broken(hold("x", 1.0, [1.1], lost=2.0, letting=2.1, let=2.2, error="LeaseLost")) == []
    assert broken(hold("x", 1.0, [1.1], lost=2.0, letting=2.1, let=2.2, error="BodyError LeaseLost")) == [], "chained"
    assert broken(hold("x", 1.0, [1.1], lost=2.0, letting=2.1, let=2.2, error="BodyError")) == ["untold"]
    assert broken(hold("x", 1.0, [1.1], lost=2.0, letting=2.1, let=2.2, how="release", ours=False)) == []


def test_a_callback_that_runs_twice_is_seen():
    called = {"t": 2.0, "p": "p0t", "e": "on_lost", "h": "x"}
    assert broken(hold("x"), called) == []
    assert broken(hold("x"), called, called | {"t": 2.1}) == ["told twice"]


def test_a_release_that_says_ours_of_what_another_one_had_is_seen():
    other = hold("y", 2.0, [2.1], fence=2, asked=1.5)
    assert broken(hold("x", 1.0, [1.1], letting=2.5, let=2.6, how="release", ours=True), other) == ["false release"]
    assert broken(hold("x", 1.0, [1.1], letting=2.5, let=2.6), other) == ["false release"], "`with` ended in peace"
    assert broken(hold("x", 1.0, [1.1], letting=2.5, let=2.6, how="release", ours=False), other) == []
    assert broken(hold("x", 1.0, [1.1], letting=1.9, let=2.6, how="release", ours=True), other) == []


@pytest.mark.rule(6)
def test_cancellations_are_accounted_for():
    assert broken(section("s")) == []
    assert broken(section("s", outcome="CancelledError", cancels=[1.0], cancelling=1)) == []
    assert broken(section("s", outcome="BodyError", cancels=[1.0], cancelling=1)) == [], "the body turned it"
    assert broken(section("s", outcome="CancelledError")) == ["cancellation"], "nobody had asked for it"
    assert broken(section("s", outcome="LeaseLost", cancelling=1)) == ["cancellation"], "ours was not taken back"
    assert broken(section("s", outcome="CancelledError", cancels=[1.0])) == ["cancellation"], "the user's was"
    assert broken(section("s", outcome="LeaseLost", cancels=[1.0], cancelling=1)) == ["cancellation"], "swallowed"


def test_a_loss_may_cancel_a_task_in_whose_stead_another_one_leaves():
    lost = hold("a", p="p0a", s="s", lost=2.0, letting=2.1, let=2.2, error="CancelledError")
    assert broken(lost, section("s", style="crossed", outcome="CancelledError", cancelling=1)) == ["untold"]
    lost.append({"t": 2.1, "e": "on_lost", "p": "p0a", "h": "a"})
    crossed = section("s", style="crossed", outcome="CancelledError", cancelling=1)
    assert not broken(lost, crossed)
    itself = section("s", outcome="CancelledError", cancelling=1)
    assert broken(lost, itself) == ["cancellation", "untold"], "it leaves itself"
    assert broken(crossed) == ["cancellation"], "nothing was lost"
    twice = section("s", style="crossed", outcome="CancelledError", cancelling=2)
    assert broken(lost, twice) == ["cancellation"], "a scope cancels its task once"


def test_a_call_that_takes_too_long_is_seen():
    assert broken(hold("x", 9.0, asked=1.0, timeout=2.0)) == ["slow"]
    assert broken(hold("x", 9.0, asked=1.0, timeout=2.0), controller("paused", 2.0, who="p0t", until=8.0)) == []
    assert broken(hold("x", 9.0, asked=1.0, timeout=None)) == []
    assert broken(hold("x", 6.0, asked=1.0, timeout=0.0)) == ["slow"]
    assert broken(hold("x", 1.0, letting=2.0, let=20.0)) == ["slow"]
    assert broken(hold("x", 1.0, letting=2.0, let=20.0), patience=60.0) == []
    assert broken(section("s", outcome="CancelledError", cancels=[1.0], cancelling=1, ended=20.0)) == ["slow"]


@pytest.mark.rule(3)
def test_what_a_process_was_late_counts_once():
    late = controller("paused", 2.0, who="p0t", until=6.0)
    machine = controller("paused", 4.0, who="*", until=8.0)
    assert broken(hold("x", 9.0, asked=1.0, timeout=2.0), late) == []
    assert History.of([late, machine]).paused("p0t", 1.0, 9.0) == 6.0
    assert History.of([late, machine]).paused("p1t", 1.0, 5.0) == 1.0


def test_the_kernel_says_how_long_a_process_waited_for_a_processor():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    lateness, late, end = Lateness(), 0.0, time.monotonic() + 30
    try:
        while late < 0.05 and time.monotonic() < end:
            late += sum(lateness.grown(each.pid) for each in busy)
            time.sleep(0.02)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert late >= 0.05
    assert Lateness().grown(os.getpid()) == 0.0, "the first look at a process has nothing to compare with"


def test_who_never_ends_is_seen_unless_it_was_killed():
    assert broken(section("s", ended=None)) == ["hang"]
    assert broken(section("s", ended=None), controller("killed", who="p0a")) == []
    assert broken(controller("hung", who="p0a", text="")) == ["hang"]


@pytest.mark.rule(5)
def test_who_waits_for_a_lease_that_a_stepped_clock_has_stretched_does_not_hang():
    hung = [*section("s", ended=None), controller("hung", who="p0a", text="")]
    probe = controller("probe", name="a", took=9.0, error="AcquireTimeout: ...")
    stretched = controller("stretched", 5.0, name="a", seconds=3600.0)
    assert broken(hung, probe, clock_stepped=True) == ["hang", "no progress"]
    assert broken(hung, probe, stretched, clock_stepped=True) == []


def test_an_older_version_is_judged_for_what_all_versions_keep_together():
    older = controller("older", 0.0, who="p0t", version="49003b8")
    own = [*section("s", outcome="KeyError", p="p0t"), *hold("x", 1.0, [1.1, 2.5], lost=2.6, untold=9.0)]
    assert broken(own) == ["error", "untold"]
    assert broken(older, own) == []
    assert broken(older, own, hold("y", 1.5, [2.0, 2.1], fence=2, p="p1t")) == OVERLAP
    hung = controller("hung", who="p1t", text="")
    assert broken(older, hung) == ["hang"]
    assert broken(older, hung, controller("hung", 8.9, who="p0t", text="")) == [], "it may wait for the older one"


def test_errors_that_nobody_expects_are_seen():
    assert broken(section("s", outcome="KeyError")) == ["error"]
    assert broken(section("s", outcome="AcquireTimeout")) == []
    assert broken({"t": 1.0, "p": "p0a", "e": "logged", "text": "the worker failed"}) == ["error"]
    assert broken({"t": 1.0, "p": "p0a", "e": "unhandled", "text": "Task exception was never retrieved"}) == ["error"]
    assert broken(controller("died", who="p0t", text="exit status 1")) == ["error"]


@pytest.mark.rule(8, 9)
def test_what_is_left_in_the_server_and_names_that_nobody_gets_are_seen():
    assert broken(controller("left", key="lock:a", about="without a TTL")) == ["left"]
    assert broken(controller("probe", name="a", took=9.0, error="AcquireTimeout: ...")) == ["no progress"]
    assert broken(controller("probe", name="a", took=0.1, error="")) == []


def test_a_client_may_refuse_a_server_to_which_an_address_leads_for_a_while():
    misled, during = controller("misled", 2.0, until=4.0), section("s", outcome="ConfigError", begun=3.0)
    later = section("s", outcome="ConfigError", begun=8.0, ended=9.0)
    assert broken(during, misled) == []
    assert broken(during) == ["error"]
    assert broken(later, misled) == ["error"]
    assert broken(section("s", outcome="KeyError", begun=3.0), misled) == ["error"]


def test_of_one_kind_of_violation_a_few_are_reported():
    many = [line for n in range(50) for line in section(f"s{n}", outcome="KeyError")]
    assert len(check(History.of(many))) == 5


def test_the_lines_of_a_process_that_was_killed_are_read_up_to_the_last_whole_one(tmp_path):
    pen = Pen(tmp_path, "p0t")
    pen.write("start", mode="threads", pid=1)
    pen.write("ok", t=clock() - 5, h="x")
    pen.close()
    with (tmp_path / "p0t.jsonl").open("ab") as file:
        file.write(b'{"t": 1.0, "p"')
    assert [line["e"] for line in read(tmp_path)] == ["ok", "start"]


# What is drawn, and the command line


def test_a_seed_draws_the_same_turns_again():
    settings = Settings(seed=5).settled()
    one, same = ([draw(settings.random("p0t/w0"), settings, mode) for mode in MODES] for _ in range(2))
    assert one == same
    assert Settings.loads(settings.dumps()) == settings


def test_every_kind_style_and_fault_is_known():
    settings = Settings().settled()
    random = settings.random("turns")
    turns = [draw(random, settings, "asyncio") for _ in range(2000)]
    assert {turn.kind for turn in turns} == {*KINDS}
    assert {turn.style for turn in turns} == {*settings.styles}
    for topology in TOPOLOGIES:
        assert faults.of(topology).keys() <= {*faults.NAMES}
        assert all(fault.__doc__ for fault in faults.of(topology).values())


def test_half_of_the_processes_of_a_quorum_may_have_a_shorter_longest_ttl():
    settings = Settings(topology="quorum", max_ttl=3.0, shorter=1.0).settled()
    assert [settings.of(name).max_ttl for name in ("p0t", "p1a", "p2t", "p3a", "p10t")] == [3.0, 3.0, 1.0, 1.0, 1.0]
    random = settings.random("turns")
    assert max(draw(random, settings.of("p2t"), "threads").ttl for _ in range(500)) <= 1.0
    assert draw_kept(random, settings.of("p3a")).ttl == 1.0
    assert {Settings(topology="quorum", seed=seed).settled().shorter > 0 for seed in range(50)} == {True, False}
    assert {Settings(topology="sentinel", seed=seed).settled().shorter for seed in range(50)} == {0.0}


def test_wrong_usage_is_refused_with_what_is_possible(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--faults", "earthquake"])
    assert ended.value.code == 2
    assert "'earthquake' is not one of kill, stop" in capsys.readouterr().err


def test_a_phase_that_never_comes_about_is_an_error():
    def verdict(topology, **counts):
        counts = Counter({f"phase: {name.replace('_', ', ')}": number for name, number in counts.items()})
        return Verdict(Settings(topology=topology), "", counts, [], "", 0.0)

    vain = [verdict("cluster", **{"late-reply_absent": number}) for number in (1, 2)]
    assert cli.never_came(vain) == [("cluster", "late-reply", 3)]
    assert cli.never_came([*vain, verdict("cluster", **{"late-reply": 1})]) == []
    assert cli.never_came([*vain[:1], verdict("sentinel", **{"late-reply_absent": 2})]) == []


class Echo(socketserver.ThreadingUnixStreamServer):
    """A server that answers with what it gets."""

    daemon_threads = True

    class _Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(BrokenPipeError):  # its client has left
                while data := self.request.recv(4096):
                    self.request.sendall(data)

    def __init__(self, path):
        super().__init__(str(path), self._Handler)


@pytest.fixture
def line(tmp_path):
    with Echo(tmp_path / "server") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with Line(str(tmp_path / "server")) as made:
            yield made
        server.shutdown()
        thread.join()


class Client:
    """Asks through a line as the process with this id."""

    def __init__(self, line, pid):
        self.pid = pid
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(line.path)
        self.socket.settimeout(30)

    def send(self, verb, name):
        self.socket.sendall(f"{verb} lock:{name} host/{self.pid}/thread/f00".encode())
        return time.monotonic()

    def took(self, verb, name):
        since = self.send(verb, name)
        assert self.socket.recv(4096)
        return time.monotonic() - since

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def has_answer(self):
        return bool(select.select([self.socket], [], [], 0.0)[0])


def test_a_line_holds_back_the_replies_of_one_process_and_verb_and_name(line):
    with Client(line, 7) as one, Client(line, 8) as other:
        one.took("acquire", "a")
        line.hold_back(7, "renew", "a", 0.3)
        one.took("renew", "b")
        one.took("acquire", "a")
        assert not line.caught.is_set()
        since = one.send("renew", "a")
        other.took("renew", "a")
        assert not one.has_answer() or time.monotonic() - since >= 0.3
        assert line.caught.is_set()
        assert line.late == 0.0
        assert one.socket.recv(4096)
        assert time.monotonic() - since >= 0.3
        assert line.late >= 0.3
        line.let_go()
        line.caught.clear()
        one.took("renew", "a")
        assert not line.caught.is_set()


def test_a_line_knows_of_no_late_reply_to_a_client_that_has_left(line):
    with Client(line, 7) as one:
        line.hold_back(7, "renew", "a", 0.3)
        one.send("renew", "a")
        assert line.caught.wait(30)
    with Client(line, 7) as other:
        other.took("renew", "b")
        assert line.late == 0.0, "what it held back was about another name"
        other.took("renew", "a")
        assert line.late >= 0.3


def test_a_line_slows_all_replies_to_a_process_and_tells_of_those_to_one_verb(line):
    with Client(line, 7) as one:
        line.slow_down(7, 0.05, verb="renew", name="a")
        one.took("acquire", "a")
        assert line.late == 0.0
        one.took("renew", "a")
        assert line.late > 0.0
        line.let_go()


def test_a_line_keeps_the_requests_of_a_muted_process_until_it_is_let_go(line):
    with Client(line, 7) as one, Client(line, 8) as other:
        line.mute(7)
        one.send("release", "a")
        other.took("release", "a")
        assert not one.has_answer()
        line.let_go()
        assert one.socket.recv(4096).startswith(b"release lock:a host/7/")


# Short histories: on every topology, and of clients that are broken

# What passes at any time and on a busy machine; scripts/histories runs the rest.
SHORT = Settings(
    seed=3, seconds=1.0, processes=2, workers=3, pace=0.4, max_ttl=1.5, tls=False,
    kinds=tuple(kind for kind in KINDS if kind != "owner"),  # two of one process may take over from each other
    phases=(), older=(),
    faults=("kill", "stop", "client-kill", "script-flush", "restart-killed", "handover", "migrate", "server-stop"),
)  # fmt: skip


def played(settings, directory):
    try:
        verdict = play(settings, directory)
    except Missing as missing:
        required(f"no server for it here: {missing}")
        raise
    assert not verdict.spoiled
    return verdict


@pytest.mark.rule(1, 5, 6, 7, 8, 9)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_short_history_breaks_no_promise(topology, tmp_path):
    counts = Counter()
    for attempt in range(8):  # on a busy machine little happens in one; each has faults at other moments
        verdict = played(SHORT.but(topology=topology, seed=3 + attempt), tmp_path / f"history-{attempt}")
        assert [f"{each.check}: {each.text}" for each in verdict.violations] == []
        counts += verdict.counts
        if counts["granted"] > 5 and counts["ensure() passed"] > 20:
            return
    pytest.fail(f"hardly anything has happened: {counts}")


@pytest.mark.rule(3, 6)
@pytest.mark.parametrize("topology", ["single", "sentinel"])
def test_a_history_in_which_all_connections_fall_silent_breaks_no_promise(topology, tmp_path):
    verdict = played(SHORT.but(topology=topology, faults=("silence",), phases=(), seconds=4.0, seed=5), tmp_path)
    assert [f"{each.check}: {each.text}" for each in verdict.violations] == []
    assert verdict.counts["fault: silence"]


@pytest.mark.rule(11)
@pytest.mark.parametrize("mode", MODES)
def test_the_child_of_a_fork_without_hooks_is_a_process_of_its_own(mode, tmp_path):
    forks = SHORT.but(forks=True, faults=(), phases=(), modes=(mode,), seconds=4.0, pace=0.4, seed=5)
    verdict = played(forks, tmp_path)
    assert [f"{each.check}: {each.text}" for each in verdict.violations] == []
    assert verdict.counts["fault: fork"]
    lines = read(tmp_path)
    children = {line["child"]: line["pid"] for line in lines if line["e"] == "fork"}
    started = {line["p"]: line["pid"] for line in lines if line["e"] == "start"}
    assert children
    assert children.items() <= started.items()
    assert not any(lives(pid) for pid in children.values())
    assert {line["p"] for line in lines if line["e"] == "ask"} & {*children}


BEHIND_LINES = Settings(phases=("late-reply",), tls=False, seed=3, max_ttl=1.0)


def by_another_way(node):
    """The clients of this server, without those of its unix socket (lines and the tests use that) and without its own
    link to a primary."""
    clients = [dict(field.split("=", 1) for field in line.split()) for line in ask(node, "CLIENT", "LIST").splitlines()]
    return [client["addr"] for client in clients if not {*"UM"} & {*client["flags"]}]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_connection_of_a_client_leads_through_a_line_also_after_a_failover(topology, tmp_path):
    rig = RIGS[topology](BEHIND_LINES.but(topology=topology), tmp_path)
    try:
        rig.start()
        many = isinstance(rig.target, list)
        clients = [(Interlock.quorum if many else Interlock)(rig.target, max_ttl=1) for _ in range(2)]
        old, new = clients
        passed_through(rig, old)
        if topology in {"sentinel", "cluster"}:
            before = rig.holder_of("lock:a")
            before.kill()
            assert rig.await_primary(before, "lock:a", 30.0) is not before
            passed_through(rig, old)
        passed_through(rig, new)
        with socket.create_connection(("127.0.0.1", rig.holder_of("lock:a").port)):
            assert by_another_way(rig.holder_of("lock:a")), "it would be seen"
        for line in rig.lines:
            line.refuse = True
            line.cut()
        for client in clients:
            with pytest.raises((Unavailable, AcquireTimeout)):
                client.lock("a", ttl=1).acquire(timeout=0.3)
            client.close()
    finally:
        rig.stop()


def passed_through(rig, client):
    """A client acquires the lock, and each request for that went through a line."""
    before = [line.requests for line in rig.lines]
    with client.lock("a", ttl=1, timeout=60):
        asked = [line for line, number in zip(rig.lines, before, strict=True) if line.requests > number]
        assert {*rig.lines_to("lock:a")} <= {*asked}
        assert not [other for node in rig.nodes if node.running for other in by_another_way(node)]


CHEAP = {("sentinel", "late-reply"), ("cluster", "slow-renewals")}  # the rest is run with --full only


@pytest.mark.rule(2, 5, 6, 10)
@pytest.mark.parametrize(
    ("topology", "phase"),
    [
        pytest.param(topology, phase, marks=() if (topology, phase) in CHEAP else pytest.mark.full)
        for topology, phase in product(TOPOLOGIES, PHASES)
    ],
)
def test_each_phase_comes_about_and_breaks_no_promise(topology, phase, tmp_path):
    settings = SHORT.but(topology=topology, phases=(phase,), faults=(), processes=3, max_ttl=None)
    for attempt in range(4):
        verdict = played(settings.but(seed=attempt), tmp_path / f"history-{attempt}")
        assert [f"{each.check}: {each.text}" for each in verdict.violations] == []
        if verdict.counts[f"phase: {phase}"]:
            return
    pytest.fail("the moment did not come")


@pytest.mark.rule(1, 7, 10)
@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=() if loss in {"re-seeded-old", "all-flushed"} else pytest.mark.full) for loss in LOSSES],
)
def test_a_quorum_whose_servers_lose_what_they_have_breaks_no_promise(loss, tmp_path):
    settings = SHORT.but(topology="quorum", faults=(loss, "script-flush"), processes=4, seconds=6.0, shorter=0.0)
    for attempt in range(8):
        verdict = played(settings.but(seed=attempt), tmp_path / f"history-{attempt}")
        assert [f"{each.check}: {each.text}" for each in verdict.violations] == []
        if verdict.counts[f"fault: {loss}"]:
            return
    pytest.fail("the loss did not come about")


@pytest.mark.full
@pytest.mark.rule(1, 5, 7)
@pytest.mark.parametrize("day", [0, -1])
def test_a_history_of_two_versions_breaks_no_promise(day, tmp_path):
    if not (versions := last_of_days()):
        required("no commits of earlier days here")
    settings = SHORT.but(older=(versions[day],), processes=4, seconds=2.0)
    for attempt in range(4):
        verdict = played(settings.but(seed=attempt), tmp_path / f"history-{attempt}")
        assert [f"{each.check}: {each.text}" for each in verdict.violations] == []
        if 5 < verdict.counts["granted: to older versions"] < verdict.counts["granted"] - 5:
            return
    pytest.fail("one of the versions got hardly anything")


PLANTED = {  # what is broken -> what the checker must say
    "believes": ("overlap", {}),
    "shares": ("overlap", {}),
    "backwards": ("refused write", {}),
    "unguarded": ("stale write", {"phases": ("stopped-holder",)}),
    "afterwards": ("outlived", {"phases": ("late-reply",)}),
    "forgets": ("outlived", {"phases": ("lost-grant",), "max_ttl": 2.0}),
    "counts": ("outlived", {"topology": "quorum", "phases": ("lost-grant",), "max_ttl": 2.0}),
    "passes": ("false release", {"phases": ("stopped-holder",)}),
    "uncounted": ("cancellation", {"phases": ("stopped-holder",), "modes": ("asyncio",)}),
}


ALWAYS = {"believes", "shares", "forgets", "counts", "uncounted"}  # the rest is run with --full only


@pytest.mark.parametrize(
    "plant", [pytest.param(plant, marks=() if plant in ALWAYS else pytest.mark.full) for plant in PLANTED]
)
def test_the_checker_reports_a_broken_client(plant, tmp_path):
    expected, changes = PLANTED[plant]
    settings = SHORT.but(plant=plant, kinds=("lock",), seconds=0.5, faults=(), max_ttl=1.0).but(**changes)
    for attempt in range(8):  # a busy machine may give its workers no time to show it, and so they get more and more
        longer = settings.but(seed=attempt, seconds=settings.seconds * 2 ** (attempt // 2))
        verdict = played(longer, tmp_path / f"history-{attempt}")
        if found := [violation for violation in verdict.violations if violation.check == expected]:
            assert all(violation.lines for violation in found)
            return
    pytest.fail("the checker found nothing")


def test_a_lease_that_a_failing_body_drops_is_kept_by_nobody(tmp_path, monkeypatch):
    """Else its process renews it for ever, and others hang."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(logging.getLogger("interlock"), "handlers", [])
    store = StoreServer("valkey-9.1")
    try:
        store.start(tmp_path)
        (tmp_path / "settings").write_text(SHORT.settled().dumps())
        (tmp_path / "target").write_text(json.dumps(store.node.url))
        process = Process(tmp_path, "p0t")
        process.locks = process.open()
        drive(Worker(process, "w0").obey(Order(0, PLAIN.but(style="dropped", fails=True, names=("c",)))))
        process.locks.close()
        process.pen.close()
    finally:
        store.stop()
    assert [line["outcome"] for line in read(tmp_path) if line["e"] == "end"] == ["BodyError"]
    assert not process.held


def test_a_section_that_begins_in_the_drain_proves_its_belief_too(tmp_path):
    """After a restart the quarantine may last until the drain, and then a short history has no other sections."""
    settings = SHORT.but(kinds=("lock",), styles=("with",), faults=("restart-killed",), seconds=0.3, pace=0.01)
    for attempt in range(8):
        directory = tmp_path / f"history-{attempt}"
        played(settings.but(seed=attempt), directory)
        lines = read(directory)
        (drained,) = (line["t"] for line in lines if line["e"] == "drained")
        late = {line["h"] for line in lines if line["e"] == "got" and line["t"] > drained}
        assert late <= {line["h"] for line in lines if line["e"] in {"ok", "lost"}}
        if late:
            return
    pytest.fail("no section began in the drain")


def test_the_workers_test_the_copy_that_the_controller_has_imported(tmp_path):
    copy = tmp_path / "planted"
    shutil.copytree(history.IMPORTED, copy / "interlock", ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--topology", "single", "--histories", "1", "--processes", "2", "--faults", "none", "--seconds", "0.5"]
    options += ["--phases", "none", "--older", "none"]
    sums = tmp_path / "sums.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (copy, TESTS)))}
    command = [sys.executable, "-m", "model.histories", *options, "--report", tmp_path / "report", "--json", sums]
    ended = subprocess.run(
        [*map(str, command)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    started = [line["imported"] for line in read_all(tmp_path / "report") if line["e"] == "start"]
    assert started == [str(copy / "interlock")] * 2
    summed = json.loads(sums.read_text())
    assert summed["histories"] == 1
    assert summed["sections"] > 0
    assert f"histories 1, spoiled 0, sections {summed['sections']}, " in ended.stdout


def test_a_worker_that_imports_another_copy_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(history, "IMPORTED", tmp_path / "interlock")
    assert cli.main(["--topology", "single", "--histories", "1", "--processes", "1", "--report", str(tmp_path)]) == 4
    assert f"and this process has imported {tmp_path / 'interlock'}" in capsys.readouterr().err


def test_ctrl_c_ends_everything_and_sums_up(tmp_path):
    script = "import sys; from model.histories.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        "--topology",
        "single",
        "--seconds",
        "60",
        "--processes",
        "1",
        "--faults",
        "none",
        "--report",
        tmp_path,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    with process:
        end = time.monotonic() + 60
        while not (started := [line for line in read_all(tmp_path) if line["e"] == "got"]):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        (worker,) = {line["pid"] for line in read_all(tmp_path) if line["e"] == "start"}
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert started
    assert "stopped; so far:" in said
    assert not lives(worker)


def read_all(directory):
    return [line for each in directory.glob("*/") for line in read(each)]
