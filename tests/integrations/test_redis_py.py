"""The oldest redis-py and hiredis that pyproject.toml allows, in a process of its own. All other tests have the newest.

`scripts/test` installs them into a directory of .venv, beside the packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.matrix import BASE, MODES, required
from harness.processes import PROGRAMS

pytestmark = pytest.mark.runs_on("its own servers", starts="servers of valkey-9.1 and redis-7.0, sentinels, a cluster")

OLDEST = Path(sys.prefix, "oldest")
PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
PINNED = [dependency.replace(">=", "==") for dependency in PYPROJECT["project"]["dependencies"]]


def urls_of(server_pool, way: str) -> tuple[list[str], list[str]]:
    """What the program uses, and what a server must refuse."""
    if way == "one server":
        node = server_pool.node(BASE)
        refused = [url.replace("://", "://nobody:wrong@") for url in (node.url, node.tcp_url)]
        return [node.url, node.tcp_url], refused
    if way == "tls":
        url = server_pool.node("redis-7.0").tls_url
        # A certificate of an unknown authority; the certificate of another host.
        return [url], [url.partition("?")[0], url.replace("127.0.0.1", "0.0.0.0")]
    return [server_pool.primary(BASE).watched if way == "sentinel" else server_pool.cluster(BASE).url], []


@pytest.mark.parametrize("mode_name", MODES)
@pytest.mark.parametrize("way", ["one server", "tls", "sentinel", "cluster"])
def test_interlock_works_with_the_oldest_redis_py(server_pool, way, mode_name):
    if not OLDEST.is_dir():
        required(f"{' and '.join(PINNED)} could not be installed; scripts/test tries it")
    used, refused = urls_of(server_pool, way)
    ran = subprocess.run(
        [sys.executable, "-X", "dev", PROGRAMS / "redis_versions.py", mode_name, *used, "--refused", *refused],
        env=os.environ | {"PYTHONPATH": str(OLDEST)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    version, *lines = ran.stdout.splitlines()
    assert f"redis=={version.removeprefix('redis-py ')}".startswith(PINNED[0])
    assert [line.partition(":")[0] for line in lines] == ["used"] * 2 * len(used) + ["refused"] * len(refused)
    if way == "tls":
        assert "is not trusted" in lines[-2]
        assert re.search(r"is not trusted .*0\.0\.0\.0", lines[-1])
    assert "ResourceWarning" not in ran.stderr
