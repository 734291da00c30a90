"""A fleet goes over from a library to the drop-in, under load and with crashes: old and new share their locks."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest
import redis

from harness.matrix import BASE, required
from harness.rollout import Fleet, read_log

pytestmark = pytest.mark.runs_on("its own servers", starts="a server of valkey-9.1")

BOUND = 15.0  # seconds that a caller waits for a lock: BOUND of programs/rollout_client.py


def library_path(library: str) -> list[Path]:
    """Where the library is, if it is not installed."""
    if library == "redis-py":
        return []
    for folder in Path(sys.prefix, "originals").glob("python_redis_lock-*"):
        return [folder / "src"]
    required("the sdist of python-redis-lock could not be downloaded; scripts/test tries it")
    raise AssertionError


def run(server_pool, folder, library, phases):
    """Let a fleet work through phases, each a number of seconds and the kinds of its processes.

    Returns what the log says, and how often a process was stopped for longer than its locks last.
    """
    chance, (_, kinds), ended = random.Random(1), phases[0], []
    with server_pool.spare(BASE) as node:
        fleet = Fleet(library, kinds, node.url, folder, library_path(library))
        try:
            for seconds, kinds in phases:
                for i, kind in enumerate(kinds):
                    if fleet.running[i][0] != kind:
                        ended.append(fleet.deploy(i, kind, within=2 * BOUND))
                fleet.run(seconds, chance, every=1.0, stop_for=1.3)
            ended += fleet.end(within=2 * BOUND)
            with redis.Redis.from_url(node.url) as client:
                assert not [key for key in client.scan_iter() if client.ttl(key) == -1], "keys without a TTL"
        finally:
            fleet.kill()
    found = read_log(folder / "log")
    harm = f"killed: {fleet.killed}, stopped: {fleet.stopped}, paused in a section: {found.pauses}"
    print(found, harm, f"too late: {found.expired}")
    assert {*ended} <= {0, -signal.SIGKILL}  # it crashed after it was asked to end
    return found, fleet.stopped.total() + found.pauses


OLD = {
    "redis-py": [("old", "threads"), ("old", "asyncio"), ("old", "threads"), ("old", "asyncio"), ("old", "threads")],
    "python-redis-lock": [("old", "threads")] * 5,
}


def new(kinds):
    return [("new", mode) for _, mode in kinds]


@pytest.mark.parametrize(
    ("library", "seconds"),
    [
        ("redis-py", 6), ("python-redis-lock", 4),
        *(pytest.param(library, 60, marks=pytest.mark.full) for library in OLD),
    ],
)  # fmt: skip
def test_a_fleet_goes_over_process_by_process(server_pool, tmp_path, library, seconds):
    """First all are old, then three of five are new, then all: no two are inside at once, and nobody waits long."""
    old = OLD[library]
    phases = [(seconds / 8, old), (seconds * 3 / 4, [*old[:2], *new(old[2:])]), (seconds / 8, new(old))]
    found, stops = run(server_pool, tmp_path, library, phases)
    assert not found.wrong
    for side in ("old", "new"):
        assert found.sections[side] > 3 * seconds
        assert found.longest[side] < BOUND
    assert found.expired <= 0.02 * found.sections.total() + 8 * stops, "this machine is too slow for this test"


@pytest.mark.full
def test_old_processes_alone_pass_the_check(server_pool, tmp_path):
    found, _ = run(server_pool, tmp_path, "redis-py", [(3.0, [("old", "threads"), ("old", "asyncio")])])
    assert not found.wrong
    assert found.sections["old"] > 5


@pytest.mark.parametrize(("planted", "seconds"), [("broken", 2), pytest.param("careless", 20, marks=pytest.mark.full)])
def test_the_check_sees_an_overlap(server_pool, tmp_path, planted, seconds):
    kinds = [("old", "threads"), (planted, "asyncio"), ("old", "asyncio"), (planted, "threads")]
    for i in range(5):  # on a busy machine the processes may have met too seldom in this time
        folder = tmp_path / str(i)
        folder.mkdir()
        found, _ = run(server_pool, folder, "redis-py", [(seconds, kinds)])
        if any(text.startswith("overlap") for text in found.wrong):
            return
    pytest.fail("two processes overlapped, and the check did not see it")
