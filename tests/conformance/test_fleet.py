"""A fleet of several versions at work on the same names, while its processes are killed and replaced.

Theory. Each older version is a wheel of an earlier commit, in processes of its own. All processes append what they do
to one stream in a server, whose order is the order of events, by one clock: `fleet_member.py`. A process that is killed
while it holds something is replaced by one of the other side, as in an upgrade that goes forth and back. With `--full`
the servers of the locks are killed, too: then both versions must respect a quarantine that the other one has begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.matrix import BASE, MODES
from harness.modes import SLACK, wait_until
from harness.older import FIRST, OLDER, ROOT, unpacked_wheel
from harness.processes import PROGRAMS
from harness.programs.fleet_member import LIMIT, TTL
from harness.topology import Independents

if TYPE_CHECKING:
    from harness.servers import Node

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")
NEWER = "newer"
NAMES = ("a", "b", "r", "w", "s")
WRITER = 1000  # what a writer weighs; every other section weighs one
UNSURE = {"lost", "unavailable", "error"}  # a section that ends so is not held against the others
CAPACITY = {"a": 1, "b": 1, "r": 1, "w": WRITER, "s": LIMIT}
# Seconds after a crash: the ttl, the second of the promise, a handover to a process that is killed, too.
LONGEST_GAP = TTL + 1 + TTL + SLACK


class Process:
    """A process of one version."""

    def __init__(self, version: str, packages: Path, mode: str, arguments: list[str]) -> None:
        self.version, self.mode, self.packages = version, mode, packages
        events, *rest = arguments
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "fleet_member.py"), events, mode, *rest],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(packages)},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_older(self) -> bool:
        return self.version != NEWER

    def check_started(self) -> None:
        place = Path(self.process.stdout.readline().decode().strip())
        assert place.is_relative_to(self.packages), f"{self.version} has imported {place}"

    def end(self) -> int:
        self.process.stdin.close()
        return self.process.wait(30)

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Fleet:
    """Processes of several versions; each is replaced when it is killed."""

    def __init__(self, client, arguments: list[str], packages: dict[str, Path]) -> None:
        self.client, self.arguments, self.packages = client, arguments, packages
        self.older = [version for version in packages if version != NEWER]
        self.running: list[Process] = []
        self.all: list[Process] = []
        self.killed: Counter[str] = Counter()

    def start(self, version: str, mode: str) -> None:
        process = Process(version, self.packages[version], mode, self.arguments)
        self.running.append(process)
        self.all.append(process)

    def holders(self, *, older: bool) -> list[Process]:
        """The running processes of a side that are inside a section now, by the newest events."""
        inside = {}
        for _id, event in reversed(self.client.xrevrange("users:fleet", count=60)):
            pid, _section, what, *_ = json.loads(event[b"event"])
            inside[pid] = what == "enter"
        return [each for each in self.running if each.is_older == older and inside.get(each.pid)]

    def kill_a_holder(self, *, older: bool) -> None:
        """SIGKILL to a process of this side; one of the other side takes its place."""
        wait_until(lambda: self.holders(older=older))
        victim = random.choice(self.holders(older=older) or [each for each in self.running if each.is_older == older])
        self.client.xadd("users:fleet", {"event": json.dumps([victim.pid, None, "killed"])})
        victim.process.send_signal(signal.SIGKILL)
        self.running.remove(victim)
        victim.discard()
        self.killed["older" if older else "newer"] += 1
        self.start(NEWER if older else random.choice(self.older), victim.mode)
        self.running[-1].check_started()

    def work(self, seconds: float, pause: float, servers: list[Node]) -> None:
        for each in self.running:
            each.check_started()
        wait_until(lambda: all(self.holders(older=older) for older in (True, False)))
        end, older = time.monotonic() + seconds, True
        # On a busy machine the time may be over before a holder of each version was killed.
        while time.monotonic() < end or (time.monotonic() < end + 60 and len(self.killed) < 2):
            self.kill_a_holder(older=older)
            older = not older
            time.sleep(random.uniform(0.5, 1.5) * pause)  # for work between two kills
            for server in random.sample(servers, min(1, len(servers))):
                server.kill()
                server.restart()
                time.sleep(LONGEST_GAP / 2)

    def end(self) -> None:
        for each in self.running:
            assert each.end() == 0

    def discard(self) -> None:
        for each in self.all:
            if each.process.returncode is None or not each.process.stdout.closed:
                each.discard()


class Findings:
    """What the events say: overlaps, fences that did not grow, stalls, errors, and who followed whom."""

    def __init__(self, events: list, version_of: dict[int, str], *, may_be_unavailable: bool = False) -> None:
        self.version_of, self.may_be_unavailable, self.now = version_of, may_be_unavailable, 0
        self.wrong: list[str] = []
        self.entered: Counter[tuple[str, bool]] = Counter()  # (kind, whether by an older version)
        self.handed_over: Counter[tuple[str, bool]] = Counter()  # (name, whether to an older version)
        self.lost = {(pid, section) for _when, pid, section, what, *_ in events if what in UNSURE}
        self.open: dict[str, dict] = {name: {} for name in NAMES}  # (pid, section) -> weight
        self.newest: dict[str, int] = defaultdict(int)  # the highest fence that has entered
        self.asked: dict[tuple, dict[str, int]] = {}
        self.last: dict[str, tuple[int, bool]] = {}  # when somebody entered last, ms; whether an older version
        dead: set[int] = set()
        for self.now, pid, section, what, *more in events:
            if what == "killed":
                dead.add(pid)
                for inside in self.open.values():
                    for key in [key for key in inside if key[0] == pid]:
                        del inside[key]
            elif pid not in dead:
                self.judge((pid, section), what, more)

    def judge(self, key: tuple, what: str, more: list) -> None:
        if what == "ask":
            self.asked[key] = dict(self.newest)
        elif what == "enter":
            self.enter(key, *more)
        elif what == "exit":
            for inside in self.open.values():
                inside.pop(key, None)
        elif what == "error" or (what == "unavailable" and not self.may_be_unavailable):
            self.wrong.append(f"{self.version_of[key[0]]}: {more[0]}")

    def enter(self, key: tuple, kind: str, fences: dict[str, int]) -> None:
        older = self.version_of[key[0]] != NEWER
        self.entered[kind, older] += 1
        for name, fence in fences.items():
            weight = WRITER if kind == "write" else 1
            is_alone = weight == CAPACITY[name]
            before = self.newest[name] if is_alone else self.asked[key].get(name, 0)
            if fence <= before:
                self.wrong.append(f"{kind} {name!r} of {self.version_of[key[0]]}: fence {fence} after {before}")
            self.newest[name] = max(self.newest[name], fence)
            when, last_older = self.last.get(name, (self.now, older))
            if self.now - when > 1000 * LONGEST_GAP:
                self.wrong.append(f"nobody entered {name!r} for {self.now - when} ms")
            if last_older != older:
                self.handed_over[name, older] += 1
            self.last[name] = self.now, older
            if key not in self.lost:
                inside = self.open[name]
                if sum(inside.values()) + weight > CAPACITY[name]:
                    beside = [(self.version_of[pid], section) for pid, section in inside]
                    self.wrong.append(f"{kind} {name!r} of {self.version_of[key[0]]} overlaps {beside}")
                inside[key] = weight


def run_fleet(
    client, arguments: list[str], packages: dict[str, Path], times: tuple[float, float], servers: list[Node]
) -> Findings:
    fleet = Fleet(client, arguments, packages)
    with contextlib.ExitStack() as stack:
        stack.callback(fleet.discard)
        for mode, older in zip(MODES, (fleet.older * 2)[:2], strict=True):
            fleet.start(NEWER, mode)
            fleet.start(older, mode)
        fleet.work(*times, servers)
        fleet.end()
    events = [
        (int(when.partition(b"-")[0]), *json.loads(event[b"event"])) for when, event in client.xrange("users:fleet")
    ]
    found = Findings(events, {each.pid: each.version for each in fleet.all}, may_be_unavailable=bool(servers))
    assert not found.wrong, found.wrong[:5]
    assert min(fleet.killed["older"], fleet.killed["newer"]) > 0, fleet.killed
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The packages of an older version, by its commit; each wheel is built once."""
    made = {}

    def get(commit: str) -> Path:
        if commit not in made:
            made[commit] = unpacked_wheel(commit, tmp_path_factory.mktemp(commit))
        return made[commit]

    return get


@pytest.fixture
def packages(wheel, commits):
    return {NEWER: ROOT / "src"} | {commit: wheel(commit) for commit in commits}


WORKERS = ["lock", "lock", "rlock", "rlock", "rwlock", "rwlock", "semaphore", "semaphore", "multi"]
each_older = pytest.mark.parametrize("commits", [[commit] for commit in OLDER], ids=[*OLDER])


@rule(1, 3, 7)
@pytest.mark.parametrize(
    ("commits", "times"),
    [
        pytest.param([FIRST, "5921bed"], (4, 0.8), id="short"),
        *(pytest.param([commit], (60, 2.0), id=commit, marks=pytest.mark.full) for commit in OLDER),
    ],
)
def test_a_fleet_of_two_versions_shares_names_while_its_processes_are_killed(server, clean, packages, times):
    found = run_fleet(clean, [server.url, ",".join(WORKERS), server.url], packages, times, [])
    for older in (True, False):
        assert all(found.entered[kind, older] > 5 for kind in {*WORKERS, "read", "write"} - {"rwlock"}), found.entered
        assert all(found.handed_over[name, older] > 2 for name in NAMES), found.handed_over


@rule(1, 7, 10)
@pytest.mark.full
@each_older
def test_a_fleet_of_two_versions_respects_one_quarantine(server, clean, node, packages):
    """The server of the locks is killed and starts without a key."""
    found = run_fleet(clean, [server.url, ",".join(WORKERS), node.url], packages, (60, 1.0), [node])
    for older in (True, False):
        assert all(found.handed_over[name, older] > 2 for name in NAMES), found.handed_over


@rule(1, 7, 10)
@pytest.mark.full
@pytest.mark.runs_on(starts="a quorum")
@each_older
def test_a_fleet_of_two_versions_shares_a_quorum(server, clean, packages):
    """One server of the quorum after the other is killed and starts without a key."""
    with Independents(BASE, number=3) as quorum:
        kinds = [kind for kind in WORKERS if kind in {"lock", "rlock", "multi"}]
        found = run_fleet(clean, [server.url, ",".join(kinds), *quorum.urls], packages, (60, 1.0), quorum.nodes)
    for older in (True, False):
        assert all(found.handed_over[name, older] > 2 for name in "abr"), found.handed_over


def events_of(*steps):
    """Events of processes 1 (newer) and 2 (older), ten ms apart, from (pid, section, what, ...)."""
    return [(10 * i, *step) for i, step in enumerate(steps)]


ASKED = [(1, 0, "ask"), (2, 0, "ask")]
INSIDE = [*ASKED, (1, 0, "enter", "lock", {"a": 7})]
READING = [*ASKED, (1, 0, "enter", "read", {"w": 7})]


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        (events_of(*INSIDE, (2, 0, "enter", "lock", {"a": 8})), "overlaps [('newer', 0)]"),
        (events_of(*INSIDE, (1, 0, "exit"), (2, 0, "enter", "lock", {"a": 7})), "fence 7 after 7"),
        (events_of(*INSIDE, (1, 0, "exit"), (2, 0, "enter", "multi", {"a": 8, "b": 1})), None),
        (events_of(*INSIDE, (1, None, "killed"), (1, 0, "exit"), (2, 0, "enter", "lock", {"a": 8})), None),
        (events_of(*INSIDE, (2, 0, "enter", "lock", {"a": 8}), (1, 0, "exit"), (1, 0, "lost")), None),
        (events_of(*INSIDE, (1, 0, "error", "AcquireTimeout: x")), "newer: AcquireTimeout: x"),
        ([*events_of(*INSIDE, (1, 0, "exit")), (60_000, 2, 0, "enter", "lock", {"a": 8})], "for 59980 ms"),
        (events_of(*READING, (2, 0, "enter", "read", {"w": 5})), None),
        (events_of(*READING, (2, 1, "ask"), (2, 1, "enter", "read", {"w": 5})), "fence 5 after 7"),
        (events_of(*READING, (2, 0, "enter", "write", {"w": 9})), "overlaps"),
    ],
)
def test_the_checker_of_a_fleet_finds_what_it_looks_for(events, wrong):
    found = Findings(events, {1: NEWER, 2: FIRST}).wrong
    assert not found if wrong is None else wrong in found[0] and len(found) == 1
