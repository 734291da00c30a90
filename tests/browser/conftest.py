"""What the tests of the live page share: a server, the page, a browser, and processes that hold and wait."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from harness.browser import AXE, Browser, binaries
from harness.commands import Command
from harness.matrix import required
from harness.servers import Missing
from interlock.testing import BreakableServer

INTERLOCK = Path(sys.executable).with_name("interlock")


@pytest.fixture(scope="session", autouse=True)
def tools():
    """Chromium, its driver, and axe-core."""
    try:
        binaries()
    except Missing as missing:
        required(str(missing))
    if not AXE.exists():
        required("axe-core; scripts/test browser fetches it")


@pytest.fixture(scope="module")
def locks_server():
    """A server of this module's tests."""
    with BreakableServer() as made:
        yield made


@pytest.fixture(scope="session")
def browser(tools):
    """A window that the tests share."""
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Start `interlock web`: `serve(url, "--allow-revoke")` returns the address that it prints, and the process."""
    with contextlib.ExitStack() as stack:

        def started(url, *words, **environment):
            folder = tmp_path_factory.mktemp("web")
            env = {key: value for key, value in os.environ.items() if key != "INTERLOCK_URL"} | environment
            argv = [str(INTERLOCK), "web", "--port", "0", "--url", url, *words]
            command = Command(argv, cwd=folder, log=folder / "log", env=env)
            stack.callback(command.kill_all)
            (address,) = command.says(r"http://\S+")
            return address, command

        yield started


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Start a process: `program(url, text)` runs this text, which has `locks`, and returns it once it is ready."""
    with contextlib.ExitStack() as stack:

        def started(url, text, label="shop"):
            folder = tmp_path_factory.mktemp("program")
            (folder / "work.py").write_text(
                "import random, sys, threading, time\nfrom interlock import Interlock, LockError\n"
                f"locks = Interlock({url!r}, label={label!r})\n{text}\nprint('ready', flush=True)\ntime.sleep(3600)\n"
            )
            command = Command([sys.executable, str(folder / "work.py")], cwd=folder, log=folder / "log")
            stack.callback(command.kill_all)
            command.says("ready")
            return command

        yield started


@pytest.fixture(scope="module")
def page(serve, locks_server):
    """The address of a page that only shows."""
    return serve(locks_server.url)[0]
