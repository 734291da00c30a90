"""An older version of interlock and this one, side by side on one name of each kind.

Theory. The older one is a wheel of an earlier commit, and runs in a process of its own; this one runs here. Each does
in turn what the other one then has to understand. A change of what the scripts store that breaks this breaks every
fleet which is upgraded host by host: docs/adr/0010-records-that-may-grow.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from harness.matrix import BASE
from harness.modes import wait_until as until
from harness.older import FIRST, OLDER, unpacked_wheel
from harness.processes import PROGRAMS
from harness.programs.neighbour import SHORT, Neighbour

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")
ROOT = Path(__file__).parents[2]
KINDS = ("lock", "rlock", "read", "write", "semaphore", "multi", "election")
every_kind = pytest.mark.parametrize("kind", KINDS)
both_ways = pytest.mark.parametrize("first", ["older", "newer"])


class Older:
    """The process of the older version, with the methods of Neighbour; each gives a future."""

    def __init__(self, source: Path, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "neighbour.py"), url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(source)},
        )  # fmt: skip
        self.pool = ThreadPoolExecutor(1)  # one command at a time

    def __getattr__(self, method):
        return lambda *args: self.pool.submit(self.say, method, *args)

    def say(self, *command):
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["result"]

    def end(self) -> None:
        self.process.stdin.close()  # it leaves as processes do: it gives back what it has
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.pool.shutdown()


class Newer:
    """This version, with the methods of Older."""

    def __init__(self, url: str) -> None:
        self.neighbour = Neighbour(url)
        self.pool = ThreadPoolExecutor(8)

    def __getattr__(self, method):
        return lambda *args: self.pool.submit(getattr(self.neighbour, method), *args)

    def end(self) -> None:
        self.neighbour.close()
        self.pool.shutdown()


@pytest.fixture(
    scope="module", params=[FIRST, *(pytest.param(each, marks=pytest.mark.full) for each in OLDER if each != FIRST)]
)
def source(request, tmp_path_factory):
    """Where the packages of an older version are."""
    return unpacked_wheel(request.param, tmp_path_factory.mktemp("older"))


@pytest.fixture(scope="module")
def older(source, server_pool):
    made = Older(source, server_pool.node(BASE).url)
    assert Path(made.where().result()).is_relative_to(source)
    yield made
    made.end()


@pytest.fixture
def sides(clean, older, server):
    """Both versions, by name."""
    newer = Newer(server.url)
    assert Path(newer.where().result()).is_relative_to(ROOT)
    yield {"older": older, "newer": newer}
    newer.end()


def ordered(sides, first):
    """The two versions, the one named `first` in front."""
    return sides[first], sides["newer" if first == "older" else "older"]


@pytest.fixture
def watcher(server):
    """A client of this version that looks on while the two sides are at work."""
    made = Neighbour(server.url)
    yield made
    made.close()


@rule(1, 7)
@pytest.mark.parametrize("kind", ["lock", "rlock", "rwlock", "semaphore", "multi", "election"])
def test_sections_of_both_versions_exclude_each_other(sides, clean, kind):
    sections = 100 if kind in {"lock", "rlock"} else 12  # a cohort has up to 64, one after another
    # A side that still connects would contend with nobody: so it has connected before.
    for each in [side.work(kind, "first", 1) for side in sides.values()]:
        each.result(60)
    for each in [side.work(kind, "a", sections) for side in sides.values()]:
        counts = each.result(60)
        assert counts == {"sections": 2 * sections, "together": 0, "older": 0, "errors": []}
    order = clean.lrange("users:order:a", 0, -1)
    assert sum(one != other for one, other in pairwise(order)) > 3, "they did not contend"


@rule(1, 3)
@every_kind
@both_ways
def test_each_version_hands_over_to_the_other(sides, watcher, kind, first):
    one, other = ordered(sides, first)
    blocked_by = "write" if kind == "read" else kind
    lease = one.take(blocked_by, "a").result(20)
    waiting = other.take(kind, "a")
    held = {"holders": [lease["token"]], "fence": lease["fence"], "waiting": 1, "revoked": []}
    until(lambda: watcher.seen(kind, "a") == held)
    assert one.seen(kind, "a").result(20) == held
    assert one.give("a").result(20)
    following = waiting.result(20)
    assert following["fence"] > lease["fence"]
    assert [one.seen(kind, "a").result(20), other.seen(kind, "a").result(20)] == [
        {"holders": [following["token"]], "fence": following["fence"], "waiting": 0, "revoked": []}
    ] * 2
    assert other.give("a").result(20)
    assert watcher.seen(kind, "a")["holders"] == []


@rule(6)
@every_kind
@both_ways
def test_each_version_revokes_what_the_other_holds(sides, kind, first):
    one, other = ordered(sides, first)
    other.take(kind, "a", SHORT).result(20)
    assert one.revoke(kind, "a").result(20)
    assert other.lost("a").result(30)
    assert not other.give("a").result(20)
    lease = other.take(kind, "a", SHORT).result(20)
    assert one.revoke(kind, "a", True).result(20)
    following = one.take(kind, "a").result(20)
    assert following["fence"] > lease["fence"]
    assert other.lost("a").result(30)
    assert not other.give("a").result(20)
    assert one.seen(kind, "a").result(20)["holders"] == [following["token"]]
    assert one.give("a").result(20)


@every_kind
@both_ways
def test_each_version_reads_why_the_other_revoked(sides, watcher, kind, first):
    one, other = ordered(sides, first)
    watcher.take(kind, "a")
    ends = watcher.locks._session.ends
    lose, ends.lose = ends.lose, lambda *_: None  # it does not hear of it, and gives nothing back
    assert one.revoke(kind, "a").result(20)
    for side in (one, other):
        (why,) = side.seen(kind, "a").result(20)["revoked"]
        assert why.removeprefix("!").startswith("for maintenance (by ")
    ends.lose = lose
    watcher.give("a")  # else it drops a lease, of which it may not know that it is revoked


@both_ways
def test_both_versions_keep_to_one_limit(sides, first):
    one, other = ordered(sides, first)
    assert [one.limit("a", 3).result(20), other.limit("a").result(20)] == [3, 3]


@rule(3)
@both_ways
def test_a_latch_opens_for_both_versions(sides, watcher, first):
    one, other = ordered(sides, first)
    for name, waiting, working in (("a", one, other), ("b", other, one)):
        through = waiting.opened(name)
        until(lambda name=name: watcher.left(name) == 2)
        assert [working.counts(name).result(20), watcher.counts(name)] == [1, 0]
        assert through.result(20)


@rule(3)
@both_ways
def test_both_versions_meet_at_a_barrier_round_after_round(sides, watcher, first):
    one, other = ordered(sides, first)
    for _ in range(3):
        early = one.arrives("a")
        until(lambda: watcher.arrived("a") == 1)
        assert [other.arrives("a").result(20), early.result(20)] == [1, 0]
        one, other = other, one


@rule(8)
@both_ways
def test_each_version_skips_a_job_that_the_other_ran(sides, first):
    one, other = ordered(sides, first)
    done = one.runs("a").result(20)
    assert done["ran"]
    assert other.runs("a").result(20) == {"ran": False, "by": done["by"], "last": done["by"]}
