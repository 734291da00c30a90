"""A slow link on this machine: a process that forwards a unix socket, and holds every byte for a while, both ways.

Bytes that follow each other do not wait for each other: each direction has a thread that reads and stamps, and one that
sends when the time has come. The process ends when its stdin does.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Self


class SlowLink:
    """The process, for the length of a `with`. `path` is the unix socket of the far end."""

    def __init__(self, target: str, delay: float) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="interlock-bench-")
        self.path = str(Path(self._home.name, "link"))
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.path, target, str(delay)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the slow link failed with status {self._process.wait()}; see above")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._home.cleanup()


def forward(source: socket.socket, target: socket.socket, delay: float) -> None:
    """Start the two threads of one direction."""
    line: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def read() -> None:
        data = b"."
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            line.put((time.monotonic() + delay, data))

    def send() -> None:
        data = b"."
        while data:
            due, data = line.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                target.sendall(data)
            except OSError:
                break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    for work in (read, send):
        threading.Thread(target=work, daemon=True).start()


def main() -> None:
    path, target, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)

    def serve() -> None:
        while True:
            client, _ = listener.accept()
            server = socket.socket(socket.AF_UNIX)
            server.connect(target)
            forward(client, server, delay)
            forward(server, client, delay)

    threading.Thread(target=serve, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
