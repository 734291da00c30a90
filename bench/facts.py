"""With what a benchmark ran: the commit, Python, the cores, the server, the client libraries."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import redis

from checkouts import ROOT


def about(path: str, *packages: str) -> dict[str, object]:
    """The facts, of the server at this socket, and the versions of those packages that are installed."""
    server = redis.Redis(unix_socket_path=path)
    info = server.info("server")
    server.close()
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        **({"commit": commit} if commit else {}),
        "Python": platform.python_version(), "cores": os.cpu_count(),
        info.get("server_name", "redis"): info.get("valkey_version", info["redis_version"]),
        **_versions(packages),
    }  # fmt: skip


def _versions(packages: tuple[str, ...]) -> dict[str, object]:
    found: dict[str, object] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
