"""A fleet goes over from a library to the drop-in, under load and with crashes: old and new share their locks."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

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


def run(server_pool, folder, library, kinds, seconds):
    """Let such a fleet work for so many seconds; what its log says, and the keys that it left."""
    with server_pool.spare(BASE) as node:
        fleet = Fleet(library, kinds, node.url, folder, library_path(library))
        try:
            fleet.run(seconds, random.Random(1), kill_every=1.0)
            ended = fleet.end(within=2 * BOUND)
        finally:
            fleet.kill()
    return read_log(folder / "log"), ended


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "kinds"),
    [
        ("redis-py", [("old", "threads"), ("old", "threads"), ("old", "asyncio"), ("old", "asyncio")]),
        ("python-redis-lock", [("old", "threads")] * 4),
    ],
)
def test_old_processes_alone_pass_the_check(server_pool, tmp_path, library, kinds):
    found, ended = run(server_pool, tmp_path, library, kinds, 5.0)
    assert ended == [0] * 4
    assert not found.wrong
    assert found.sections["old"] > 100
    assert found.expired <= 0.02 * found.sections["old"], "this machine is too slow for this test"


def test_the_check_sees_an_overlap(server_pool, tmp_path):
    found, _ = run(server_pool, tmp_path, "redis-py", [("old", "threads"), ("broken", "asyncio")], 2.0)
    assert any(text.startswith("overlap") for text in found.wrong)
