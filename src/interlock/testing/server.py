"""A server that a test may kill, start again, pause and empty."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from interlock._protocol.info import parse_info
from interlock._quarantine.voter import RECORD_TTL, VoterRecord, voter_key
from interlock.embedded import Server, _ask, _processes
from interlock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from interlock._connect.address import Address

__all__ = ["BreakableServer", "restart_server", "server_down", "server_paused"]

START_TIMEOUT: Final = 10.0  # seconds
ANSWER_TIMEOUT: Final = 5.0  # seconds that a running server may take to empty or to save itself


class BreakableServer(Server):
    """A private server (see `interlock.embedded.Server`) that a test may kill, start again, pause and empty.

    Without `config` the server stores nothing on disk, so after `restart()` it is empty, like a cache. With
    `config={"appendonly": "yes", "appendfsync": "always"}` it then has every write that it acknowledged.

    `quorum_prefix` says that it is one of the servers of an `Interlock.quorum(..., prefix=quorum_prefix)`, in database
    0. Then it counts at once after its start and after `reset()`, since no client can have had a lease there; a server
    of a quorum that nobody vouches for counts `max_ttl` after a client first reached it. After `restart()` it does so,
    too.
    """

    def __init__(
        self,
        *,
        binary: str | Path | None = None,
        config: Mapping[str, str] | None = None,
        quorum_prefix: str | None = None,
    ) -> None:
        super().__init__(binary=binary, config=config)
        self._quorum_prefix = quorum_prefix
        self._command: Sequence[str | Path] = ()
        self._was_launched = False
        self._was_restarted = False  # since the last reset()
        self._is_paused = False

    @property
    def running(self) -> bool:
        """Whether the server was started, and neither killed nor stopped since. A paused server runs, too."""
        return self in _processes and _processes[self][-1].poll() is None

    def kill(self) -> None:
        """End the server as a crash does (SIGKILL). Its directory stays."""
        process = _processes[self][-1]
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        self._is_paused = False

    def restart(self, *, keep_data: bool = False, timeout: float = START_TIMEOUT) -> None:
        """Kill the server if it runs, start it again at the same address, and wait until it has loaded its keys.

        With `keep_data` the new process has all keys of the old one; else those that its `config` makes it store. To
        clients it is another server in both cases, so quarantines begin. Raises `Unavailable` if the server does not
        come up within `timeout` seconds, or if it was killed before and so has no data to keep.
        """
        home = self._started()
        if keep_data:
            self._save()
        if self.running:
            self.kill()
        watcher, dead = _processes[self]
        _processes[self].remove(dead)
        self.socket.unlink(missing_ok=True)
        self._was_restarted = True
        self._run(home, self._command, watcher.pid, time.monotonic() + timeout)
        (home / "dump.rdb").unlink(missing_ok=True)  # what a later process must not find

    def pause(self) -> None:
        """Stop the server's process (SIGSTOP): it answers nothing until `resume()`, and its connections stay open."""
        self._is_paused = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        os.kill(self.pid, signal.SIGCONT)
        self._is_paused = False

    def reset(self, *, timeout: float = START_TIMEOUT) -> None:
        """Make the server as it was at its start, whatever a test has done to it: it runs, answers and is empty.

        If it was restarted, each Interlock of this process forgets that, so no quarantine reaches the next test. With
        `quorum_prefix` the server counts at once. Raises `Unavailable` if the server does not come up, or does not
        answer; `ConfigError` in a child after a fork.
        """
        if self not in _processes:
            if self._home is not None and self._home.exists():
                raise ConfigError(
                    "this server belongs to the process that started it before a fork, and its faults do, too. Start a "
                    "server in each process that runs tests: with unittest, in setUpClass"
                )
            self.start(timeout=timeout)
        if self._is_paused and self.running:
            self.resume()
        if self._was_restarted or not self.running:
            from interlock._quarantine.server_histories import forget_servers  # noqa: PLC0415 (with redis-py, not needed before)

            if self.running:
                self.kill()
            forget_servers(self._is_at)  # no client can have met the next process yet
            self.restart(timeout=timeout)
            forget_servers(self._is_at)  # a handshake with the former process may have noted that only now
            self._was_restarted = False
        self._command_or_raise("FLUSHALL")
        self._vouch()

    def _launch(self, home: Path, binary: Path, deadline: float) -> None:
        super()._launch(home, binary, deadline)
        if not self._was_launched:  # a second start is a restart for those who knew the first process
            self._was_launched = True
            self._vouch()

    def _vouch(self) -> None:
        """Let a server of a quorum count from now on, for clients with any max_ttl."""
        if self._quorum_prefix is None:
            return
        info = _ask(self._started(), b"INFO replication", time.monotonic() + ANSWER_TIMEOUT)
        replid = parse_info(info).get("master_replid")
        if replid is None:
            raise Unavailable("a server of a quorum must answer INFO, which this private server does not")
        record = VoterRecord(replid, since_ms=0, longest_ms=0).encode()
        self._command_or_raise("SET", voter_key(self._quorum_prefix), record, "EX", str(round(RECORD_TTL)))

    def _save(self) -> None:
        """Write a snapshot, which the next process loads."""
        if not self.running:
            raise Unavailable(
                "the server was killed, so it has no data to keep: call restart(keep_data=True) while it runs, or make "
                'it store its keys by config={"appendonly": "yes", "appendfsync": "always"}'
            )
        self._command_or_raise("SAVE")

    def _command_or_raise(self, *command: str) -> None:
        words = [word.encode() for word in command]
        packed = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        reply = None if self._is_paused else _ask(self._started(), packed, time.monotonic() + ANSWER_TIMEOUT)
        if reply != b"+OK\r\n":
            state = "is paused: call resume() first" if self._is_paused else f"replied {reply!r}"
            raise Unavailable(f"{command[0]} on the private server failed: the server {state}")

    def _is_at(self, address: Address) -> bool:
        """Whether this address leads to this server."""
        return is_at(self, address)

    def _run(self, home: Path, command: Sequence[str | Path], group: int, deadline: float) -> None:
        self._command = command
        super()._run(home, command, group, deadline)


def is_at(server: Server, address: Address) -> bool:
    """Whether this address leads to this private server."""
    given = address.parameters
    if address.kind == "unix":
        return str(given.get("path", "")) == str(server.socket)
    port = server._config.get("port", "0")
    is_local = str(given.get("host", "localhost")) in {"localhost", "127.0.0.1", "::1"}
    return address.kind == "tcp" and is_local and port != "0" and str(given.get("port", 6379)) == port


def restart_server(server: BreakableServer, *, keep_data: bool = False, timeout: float = START_TIMEOUT) -> None:
    """Kill the server, start it again at the same address, and wait until it serves; `timeout` in seconds.

    Without `keep_data` the server has forgotten all leases: their holders learn that with their next renewal. With it
    the leases go on. In both cases the quarantine is that of a real restart: whoever knew the server before grants
    itself nothing for `max_ttl`, so give `Interlock(max_ttl=1)` to a test that acquires again. Raises `Unavailable`.
    """
    server.restart(keep_data=keep_data, timeout=timeout)


@contextlib.contextmanager
def server_down(server: BreakableServer) -> Generator[None]:
    """In this `with` there is no server: connecting is refused at once. After it, the server runs again, and is empty.

    As after `restart_server()`, a quarantine follows. Raises `Unavailable` if the server does not come up again.
    """
    server.kill()
    try:
        yield
    finally:
        if not server.running:
            server.restart()


@contextlib.contextmanager
def server_paused(server: BreakableServer) -> Generator[None]:
    """In this `with` the server answers nothing, and its connections stay open. Nothing is lost: it goes on after it.

    That is what a server that hangs, or a network that drops packets, looks like to a client.
    """
    server.pause()
    try:
        yield
    finally:
        if server.running:
            server.resume()
