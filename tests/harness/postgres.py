"""A private PostgreSQL for the tests: Debian's binaries, a directory of its own, a unix socket, gone at the end."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

# Our end of the pipe closes however we end, SIGKILL included; then this stops the server ("fast": it ends sessions).
WATCHER = '"$@" & cat >/dev/null; kill -INT $!; wait $!; rm -rf "$0"'
UNPACKED = Path(__file__).parents[2] / ".venv" / "debian"  # where Debian's packages may be unpacked, not installed


def binaries() -> Path | None:
    """The directory of initdb and postgres; the newest version if there are several."""
    found = [Path(tool).parent for tool in [shutil.which("initdb")] if tool]
    if pg_config := shutil.which("pg_config"):
        asked = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        found += [Path(asked.stdout.strip())] if asked.returncode == 0 else []
    for root in (Path("/"), UNPACKED):
        versions = root.glob("usr/lib/postgresql/*/bin")
        found += sorted(versions, key=lambda path: float(path.parent.name), reverse=True)
    return next((path for path in found if (path / "initdb").exists() and (path / "postgres").exists()), None)


class Postgres:
    """A running cluster: `with Postgres(...) as server: psycopg.connect(server.conninfo)`."""

    def __init__(self, tools: Path) -> None:
        self.tools = tools
        self.folder = Path(tempfile.mkdtemp(prefix="interlock-pg-"))
        self.conninfo = f"host={self.folder} port=5432 user=interlock dbname=postgres"
        self.url = f"postgresql+psycopg://interlock@/postgres?host={self.folder}&port=5432"
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Postgres:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        options: dict = {"cwd": self.folder, "env": dict(os.environ, LC_ALL="C")}
        if self.tools.is_relative_to(UNPACKED):
            options["env"]["LD_LIBRARY_PATH"] = ":".join(map(str, UNPACKED.glob("usr/lib/*-linux-gnu*")))
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            who = _somebody()
            os.chown(self.folder, who.pw_uid, who.pw_gid)
            options |= {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        data = self.folder / "data"
        made = subprocess.run(
            [self.tools / "initdb", "-D", data, "-U", "interlock", "-E", "UTF8", "--locale=C", "--auth=trust", "-N"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        settings = {
            "listen_addresses": "", "unix_socket_directories": self.folder, "port": 5432, "fsync": "off",
            "autovacuum": "off", "max_connections": 20, "shared_buffers": "16MB", "log_min_messages": "fatal",
        }  # fmt: skip
        with (self.folder / "log").open("wb") as log:
            server = [self.tools / "postgres", "-D", data, *(f"--{name}={value}" for name, value in settings.items())]
            self.process = subprocess.Popen(
                ["sh", "-c", WATCHER, self.folder, *server], stdin=subprocess.PIPE, stdout=log, stderr=log, **options
            )
        end = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < end, "PostgreSQL did not start in 30 s: " + (self.folder / "log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.conninfo, connect_timeout=5).close()
            return True
        return False


def _somebody() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("no user but root to run PostgreSQL as")


@contextlib.contextmanager
def running():
    """A running server; skips the test, with the reason, if this machine lacks PostgreSQL, and fails it in CI."""
    tools = binaries()
    if tools is None:
        reason = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with Postgres(tools) as server:
        yield server
