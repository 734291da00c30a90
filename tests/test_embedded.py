"""The embedded server: real processes, really killed. Nothing sleeps: a test waits for what it is about."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types

import pytest

from interlock import embedded
from interlock.embedded import Server, shared_status, shared_url, stop_shared
from interlock.errors import ConfigError, Unavailable

START = "from interlock.embedded import *; print(shared_url(), flush=True)"
WAIT = "; import sys; sys.stdin.read()"


@pytest.fixture
def home(monkeypatch):
    """A runtime directory of our own; short, because it becomes part of a socket's path."""
    runtime = pathlib.Path(tempfile.mkdtemp(prefix="il-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    yield runtime / "interlock"
    if (runtime / "interlock" / "lock").exists():
        stop_shared()
    shutil.rmtree(runtime)


@contextlib.contextmanager
def python(code, **options):
    """Another process that runs `code`. Its output is read with `said()`; it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process):
    return process.stdout.readline().strip()


def path_of(url):
    return url.removeprefix("unix://")


@contextlib.contextmanager
def connected(url):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path_of(url))
        yield connection


def ask(connection, command):
    connection.sendall(command + b"\r\n")
    return connection.recv(4096)


def wait_for_the_end_of(connection):
    """The kernel closes a server's connections when it dies: no process id is looked at."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def nobody_listens(url):
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(path_of(url)) != 0


# The private server


def test_private_server_from_start_to_stop():
    with Server() as server:
        assert server.url == f"unix://{server.socket}"
        directory = server.socket.parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with connected(server.url) as connection:
            assert ask(connection, b"PING") == b"+PONG\r\n"
            assert f"process_id:{server.pid}\r\n".encode() in ask(connection, b"INFO server")
            server.stop()
            wait_for_the_end_of(connection)
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid_was if hasattr(server, "pid_was") else 2**22 + 1, 0)
