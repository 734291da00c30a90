"""The tests of the libraries that interlock has drop-ins for, from their sdists, on themselves and on the drop-ins.

`scripts/test` unpacks the sdists; nothing of them is copied into this repository. Each suite runs in a pytest of its
own, in the folder that it comes from.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from harness.matrix import BASE, required
from harness.processes import PROGRAMS
from harness.servers import find

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.runs_on("its own servers", starts="a server of valkey-9.1")

ORIGINALS = Path(sys.prefix, "originals")


@dataclass(frozen=True)
class Suite:
    """The tests of one library: where they stand, and what a drop-in replaces in them."""

    folder: str  # of the unpacked sdist; `*` stands for the version
    modules: tuple[str, ...]
    options: tuple[str, ...] = ()  # for pytest
    takes_url: bool = False  # of a server; else the tests start one of their own
    path: str = ""  # of the library in `folder`, if it is not installed
    replaced: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by module: each name, and the drop-in's
    left_out: Mapping[str, str] = field(default_factory=dict)  # patterns of tests, each with the reason
    fails: Mapping[str, str] = field(default_factory=dict)  # tests that a drop-in can't pass, each with the reason
    at_least: int = 0  # so many tests run

    def found(self) -> Path:
        """Its unpacked folder; skips the test if there is none."""
        for folder in ORIGINALS.glob(self.folder):
            return folder
        required(f"the sdist {self.folder} could not be downloaded; scripts/test tries it")
        raise AssertionError


SUITES = {
    "redis-py": Suite(
        folder="redis-*",
        modules=("tests/test_lock.py", "tests/test_asyncio/test_lock.py"),
        takes_url=True,
        replaced={
            "redis.lock": {"Lock": "interlock.compat.redis_py:Lock"},
            "redis.asyncio.lock": {"Lock": "interlock.compat.redis_py:AsyncLock"},
        },
        fails=dict.fromkeys(
            (
                "tests.test_lock.TestLock.test_blocking_timeout",
                "tests.test_lock.TestLock.test_context_manager_blocking_timeout",
                "tests.test_asyncio.test_lock.TestLock.test_blocking_timeout",
            ),
            "it counts the sleeps of the original between two looks at the key; a waiter of the drop-in is woken",
        ),
        at_least=92,
    ),
    "python-redis-lock": Suite(
        folder="python_redis_lock-*",
        modules=("tests/test_redis_lock.py",),
        options=("-n", "6"),
        path="src",
        left_out={
            "*decode_responses=True-decode_responses=*": "their fixture has this parameter, and does not use it",
            "*eventlet*": "eventlet is not maintained, so it is not installed here",
            "test_signal_expiration*": "this races with the server's clock: the original fails it now and then, too",
        },
        at_least=83,
    ),
}  # fmt: skip


def outcomes(suite: Suite, url: str, *, of_drop_in: bool) -> dict[str, list[str]]:
    """Run the suite. By test without its parameters: the outcome of each run of it, "" for a success."""
    folder, environment = suite.found(), {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    with tempfile.TemporaryDirectory() as scratch:
        # python-redis-lock's tests start `redis-server` themselves.
        Path(scratch, "redis-server").symlink_to(find(BASE))
        report = Path(scratch, "report.xml")
        environment |= {
            "PATH": os.pathsep.join([scratch, os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, (PROGRAMS, ORIGINALS / "plugins", folder / suite.path))),
            "ORIGINALS": json.dumps(
                {"replaced": suite.replaced if of_drop_in else {}, "left_out": [*suite.left_out]},
                default=dict,
            ),
        }  # fmt: skip
        options = [f"--redis-url={url}"] if suite.takes_url else []
        ran = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-p", "run_originals", "-p", "no:cacheprovider", "-p", "no:anyio",
                f"--basetemp={scratch}/t", f"--junitxml={report}", *suite.options, *options, *suite.modules,
            ],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert report.exists(), ran.stdout + ran.stderr
        return read_report(report)


def read_report(report: Path) -> dict[str, list[str]]:
    """What the file of JUnit's form says."""
    found = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        name = re.sub(r"\[.*", "", f"{case.get('classname')}.{case.get('name')}")
        found[name].append("\n".join(child.text or child.tag for child in case if child.tag != "system-out"))
    return found


@pytest.mark.parametrize("library", ["redis-py", pytest.param("python-redis-lock", marks=pytest.mark.full)])
def test_an_original_passes_its_own_tests(server_pool, library):
    """So the way in which this module runs them is right."""
    suite = SUITES[library]
    ran = outcomes(suite, server_pool.node(BASE).tcp_url, of_drop_in=False)
    assert sum(map(len, ran.values())) >= suite.at_least
    assert not {name: texts for name, texts in ran.items() if any(texts)}


@pytest.mark.parametrize("library", ["redis-py"])
def test_a_drop_in_passes_the_tests_of_its_original(server_pool, library):
    """All but those that look at the original's inside, each of which must fail: else its reason is out of date."""
    suite = SUITES[library]
    ran = outcomes(suite, server_pool.node(BASE).tcp_url, of_drop_in=True)
    assert sum(map(len, ran.values())) >= suite.at_least
    failed = {name: texts for name, texts in ran.items() if any(texts)}
    surprises = [f"{name}:\n{max(texts)}" for name, texts in failed.items() if name not in suite.fails]
    assert not surprises, "\n\n".join(surprises)
    assert {name for name, texts in failed.items() if all(texts)} == {*suite.fails}
