"""What the tests of the frameworks share: programs that a test starts, and that end with it.

A server: the fixture `node` of tests/conftest.py is one for this test alone, `node.tcp_url` its URL; `server.url` is
one that tests share, on a unix socket. A port that is free: `harness.servers.free_ports()`. To wait for a condition:
`harness.modes.wait_until`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from harness.commands import Command, python

if TYPE_CHECKING:
    from pathlib import Path

collect_ignore = ["django_project"]  # a project of its own, whose tests test_django.py runs by its manage.py


@pytest.fixture
def start(tmp_path):
    """Start a program of Python: `start("-m", "uvicorn", ..., env={...})` is a running Command."""
    with contextlib.ExitStack() as stack:
        number = 0

        def started(*args: str | Path, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> Command:
            nonlocal number
            number += 1
            command = Command(python(*args), cwd=cwd, log=tmp_path / f"program_{number}.log", env=env)
            stack.callback(command.kill_all)
            return command

        yield started
