"""A private MariaDB for the tests: Debian's binaries, a directory of its own, a unix socket, gone at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pymysql
import pytest

from harness.postgres import UNPACKED, WATCHER, _somebody

ENDS = WATCHER.replace("-INT", "-TERM")  # a SIGINT does not end it


def root() -> Path | None:
    """Where `usr/sbin/mariadbd` and what belongs to it are."""
    return next((each for each in (Path("/"), UNPACKED) if (each / "usr/sbin/mariadbd").exists()), None)


class MariaDB:
    """A running server with an empty database: `with MariaDB(...) as server: create_engine(server.url)`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = Path(tempfile.mkdtemp(prefix="interlock-db-"))
        self.socket = self.folder / "sock"
        self.url = f"mariadb+pymysql://interlock@/test?unix_socket={self.socket}&charset=utf8mb4"
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> MariaDB:
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
        if self.root == UNPACKED:
            options["env"]["LD_LIBRARY_PATH"] = ":".join(map(str, UNPACKED.glob("usr/lib/*-linux-gnu*")))
        if os.geteuid() == 0:
            who = _somebody()
            os.chown(self.folder, who.pw_uid, who.pw_gid)
            options |= {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        data, share = self.folder / "data", self.root / "usr/share/mysql"
        server = [
            self.root / "usr/sbin/mariadbd", "--no-defaults", f"--datadir={data}", f"--lc-messages-dir={share}",
            f"--character-sets-dir={share}/charsets", f"--tmpdir={self.folder}", "--skip-grant-tables",
            "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M",
            "--innodb-stats-persistent=OFF",
        ]  # fmt: skip
        data.mkdir()
        if os.geteuid() == 0:
            os.chown(data, who.pw_uid, who.pw_gid)
        # No system tables: nobody logs in by them, and InnoDB makes its files by itself.
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", ENDS, self.folder, *server, "--skip-networking", f"--socket={self.socket}"],
                stdin=subprocess.PIPE, stdout=log, stderr=log, **options,
            )  # fmt: skip
        end = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < end, "MariaDB did not start in 60 s: " + (self.folder / "log").read_text()
            assert self.process.poll() is None, "MariaDB ended: " + (self.folder / "log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:  # PyMySQL leaves its own open
            probe.connect(str(self.socket))
            with pymysql.connect(unix_socket=str(self.socket), user="interlock", connect_timeout=5) as connection:
                connection.cursor().execute("CREATE DATABASE IF NOT EXISTS test")
            return True
        return False


@contextlib.contextmanager
def running():
    """A running server; skips the test, with the reason, if this machine lacks MariaDB, and fails it in CI."""
    found = root()
    if found is None:
        reason = "MariaDB is not installed (Debian: apt-get install mariadb-server-core)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with MariaDB(found) as server:
        yield server
