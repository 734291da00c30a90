"""The oldest redis-py and hiredis that pyproject.toml allows, in a process of its own. All other tests have the newest.

`scripts/test` installs them into a directory of .venv, beside the packages.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.matrix import BASE, MODES, WAYS, required
from harness.processes import PROGRAMS

pytestmark = pytest.mark.runs_on("its own servers", starts="servers of valkey-9.1 and redis-7.0, sentinels, a cluster")

OLDEST = [Path(sys.prefix, "oldest", name) for name in ("redis", "hiredis")]
PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
PINNED = [dependency.replace(">=", "==") for dependency in PYPROJECT["project"]["dependencies"]]


def urls_of(server_pool, way: str) -> tuple[list[str], list[str]]:
    """What the program uses, and what a server must refuse."""
    if way == "one server":
        node = server_pool.node(BASE)
        refused = [url.replace("://", "://nobody:wrong@") for url in (node.url, node.tcp_url)]
        return [node.url, node.tcp_url], refused
    if way == "tls":
        url = WAYS["tls"](server_pool.node("redis-7.0"), "")
        # A certificate of an unknown authority; the certificate of another host.
        return [url], [url.partition("?")[0], url.replace("127.0.0.1", "0.0.0.0")]
    return [server_pool.primary(BASE).watched if way == "sentinel" else server_pool.cluster(BASE).url], []


def program(mode_name: str, *arguments: str) -> list[str]:
    """What the program printed, over the oldest redis-py and hiredis."""
    if not all(map(Path.is_dir, OLDEST)):
        required(f"{' and '.join(PINNED)} could not be installed; scripts/test tries it")
    ran = subprocess.run(
        [sys.executable, "-X", "dev", PROGRAMS / "redis_versions.py", mode_name, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, OLDEST))},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "ResourceWarning" not in ran.stderr
    version, *lines = ran.stdout.splitlines()
    assert f"redis=={version.removeprefix('redis-py ')}".startswith(PINNED[0])
    return lines


@pytest.mark.parametrize("mode_name", MODES)
@pytest.mark.parametrize("way", ["one server", "tls", "sentinel", "cluster"])
def test_interlock_works_with_the_oldest_redis_py(server_pool, way, mode_name):
    used, refused = urls_of(server_pool, way)
    lines = program(mode_name, *used, "--refused", *refused, "--silent")
    assert [line.partition(":")[0] for line in lines] == ["used"] * 2 * len(used) + ["refused"] * len(refused)
    if way == "tls":
        assert "is not trusted" in lines[-2]
        assert re.search(r"is not trusted .*0\.0\.0\.0", lines[-1])


@pytest.mark.parametrize("mode_name", MODES)
def test_a_silent_server_ends_no_handshake_of_the_oldest_redis_py_late(tmp_path, mode_name):
    """redis-py 5 forgets the timeout of a blocking unix socket."""
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(str(tmp_path / "silent"))
        unix.listen()
        urls = [f"unix://{tmp_path}/silent", f"redis://127.0.0.1:{tcp.getsockname()[1]}"]
        assert program(mode_name, "--refused", "--silent", *urls) == ["silent: True"] * 2
