"""The tests of the libraries that interlock has drop-ins for, from their sdists, on themselves and on the drop-ins.

`scripts/test` unpacks the sdists; nothing of them is copied into this repository. Each suite runs in a pytest of its
own, in the folder that it comes from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from harness.matrix import BASE, required
from harness.processes import PROGRAMS
from harness.servers import KINDS, find

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

pytestmark = pytest.mark.runs_on("its own servers", starts="servers of every kind")

ORIGINALS = Path(sys.prefix, "originals")


@dataclass(frozen=True)
class Suite:
    """The tests of one library: where they stand, and what a drop-in replaces in them."""

    folder: str  # of the unpacked sdist; `*` stands for the version
    modules: tuple[str, ...]
    options: tuple[str, ...] = ()  # for pytest
    takes_url: bool = False  # of a server; else the tests start one of their own
    path: str = ""  # of the library in `folder`, if it is not installed; a module of its name in drop_ins replaces it
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
                "tests/test_lock.py::TestLock::test_blocking_timeout",
                "tests/test_lock.py::TestLock::test_context_manager_blocking_timeout",
                "tests/test_asyncio/test_lock.py::TestLock::test_blocking_timeout",
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
        fails={"tests/test_redis_lock.py::test_simple_auto_renewal": "it reads the log of the renewing thread"},
        at_least=83,
    ),
}  # fmt: skip


Outcomes = dict[str, str]  # by id of a test: the text of its failure, "" for a success


def run_suite(suite: Suite, url: str, *, of_drop_in: bool) -> tuple[Outcomes, list[str]]:
    """Run the tests of a library on itself, or on the drop-in: the outcomes, and the failures that nobody expects.

    Their limits of time are for a machine at rest. So what fails beside others runs once more, alone.
    """
    expected = suite.fails if of_drop_in else {}
    ran = run_tests(suite, url, [*suite.options, *suite.modules], of_drop_in=of_drop_in)
    assert len(ran) >= suite.at_least
    if again := [test for test, failure in ran.items() if failure and name_of(test) not in expected]:
        ran |= run_tests(suite, url, again, of_drop_in=of_drop_in)
    return ran, [f"{test}:\n{ran[test]}" for test in again if ran[test]]


def name_of(test: str) -> str:
    """The name of a test without its parameters."""
    return test.partition("[")[0]


def run_tests(suite: Suite, url: str, arguments: list[str], *, of_drop_in: bool) -> Outcomes:
    """Run pytest in the folder of the library, with these arguments."""
    folder, environment = suite.found(), {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    library = PROGRAMS / "drop_ins" if suite.path and of_drop_in else folder / suite.path
    with tempfile.TemporaryDirectory() as scratch:
        # python-redis-lock's tests start `redis-server` themselves.
        Path(scratch, "redis-server").symlink_to(find(BASE))
        report = Path(scratch, "report.xml")
        environment |= {
            "PATH": os.pathsep.join([scratch, os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, (PROGRAMS, ORIGINALS / "plugins", library))),
            "ORIGINALS": json.dumps(
                {"replaced": suite.replaced if of_drop_in else {}, "left_out": [*suite.left_out]}, default=dict
            ),
        }
        ran = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-p", "run_originals", "-p", "no:cacheprovider", "-p", "no:anyio",
                f"--basetemp={scratch}/t", f"--junitxml={report}", *([f"--redis-url={url}"] if suite.takes_url else []),
                *arguments,
            ],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert report.exists(), ran.stdout + ran.stderr
        return dict(read_report(report, suite.modules))


def read_report(report: Path, modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What the file of JUnit's form says: the id of each test, and the text of its failure."""
    for case in ET.parse(report).iter("testcase"):
        place = case.get("classname")
        (module,) = (each for each in modules if f"{place}.".startswith(each.removesuffix("py").replace("/", ".")))
        classes = place[len(module.removesuffix(".py")) + 1 :].split(".")
        failures = (child.text or child.tag for child in case if child.tag not in {"system-out", "system-err"})
        yield "::".join(filter(None, [module, *classes, case.get("name")])), "\n".join(failures)


@pytest.mark.full
@pytest.mark.parametrize("library", ["redis-py", "python-redis-lock"])
def test_an_original_passes_its_own_tests(server_pool, library):
    """So the way in which this module runs them is right."""
    _, surprises = run_suite(SUITES[library], server_pool.node(BASE).tcp_url, of_drop_in=False)
    assert not surprises, "\n\n".join(surprises)


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        ("redis-py", BASE),
        pytest.param("python-redis-lock", BASE, marks=pytest.mark.full),
        *(pytest.param("redis-py", kind, marks=pytest.mark.full) for kind in KINDS if kind != BASE),
    ],
)
def test_a_drop_in_passes_the_tests_of_its_original(server_pool, library, kind):
    """All but those that look at the original's inside, each of which must fail: else its reason is out of date."""
    suite = SUITES[library]
    ran, surprises = run_suite(suite, server_pool.node(kind).tcp_url, of_drop_in=True)
    assert not surprises, "\n\n".join(surprises)
    passed = {name_of(test) for test, failure in ran.items() if not failure}
    assert {*map(name_of, ran)} - passed == {*suite.fails}
