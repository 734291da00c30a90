"""`interlock run`, as a person or cron types it: real processes, signals, terminals, kills."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import pexpect
import pytest
import redis

from harness.clock import machine_time, stood_still
from harness.modes import wait_until as until
from harness.processes import lives, parent_of, state_of
from harness.proxy import Proxy
from harness.topology import serve_long
from interlock import Interlock
from interlock.cli import app
from interlock.cli.run.runner import Runner
from interlock.cli.run.supervisor import received, send
from interlock.embedded import Server
from interlock.testing import BreakableServer

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="a server of valkey-9.1")
INTERLOCK = Path(sys.executable).with_name("interlock")
# Says its id, notes SIGTERM, and ends only by SIGKILL.
STUBBORN = "echo $$; trap 'echo TERM' TERM; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def server():
    with BreakableServer() as made:
        yield made


@pytest.fixture(autouse=True)
def empty(server):
    """The tests use the same names for locks of several kinds."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


@pytest.fixture
def locks(server):
    with Interlock(server.url) as made:
        yield made


@pytest.fixture
def run(server):
    """Starts `interlock run WORDS...`, as cron does: no terminal, no input, hardly any environment."""
    with contextlib.ExitStack() as ends:

        def start(*words, **options):
            kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
            environment = {**kept, "INTERLOCK_URL": server.url, **options.pop("environment", {})}
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(
                [*options.pop("as_user", ()), INTERLOCK, "run", *words], env=environment, start_new_session=True,
                **{"text": True, **streams, **options},
            )  # fmt: skip
            ends.callback(end, process)
            return process

        yield start


def end(process) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


class Given:
    """A lease that somebody has granted, and that is not lost."""

    fence = 7

    def __init__(self):
        self.lost = threading.Event()

    def remaining(self) -> float:
        return 30.0


@pytest.fixture
def given():
    """Such a lease. It is lost at the end of the test: so the runner's thread that waits for that ends, too."""
    lease = Given()
    yield lease
    lease.lost.set()
    until(lambda: all(thread.name != "interlock-run-loss" for thread in threading.enumerate()))


def ended(process, within: float = 60.0):
    """Its exit status, and what it wrote."""
    written, errors = process.communicate(timeout=within)
    return process.returncode, written, errors


def test_the_command_runs_under_the_lock_and_finds_its_name_and_fence(run, locks):
    process = run(
        "a", "--", "sh", "-c", "echo $INTERLOCK_NAME $INTERLOCK_FENCE; read line; exit 7", stdin=subprocess.PIPE
    )
    name, fence = process.stdout.readline().split()
    state = locks.lock("a").inspect()
    assert (name, int(fence)) == ("a", state.fence)
    assert state.holder.startswith("interlock-run@")
    assert ended(process) == (7, "", "")
    assert not locks.lock("a").inspect().held


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["a", "--", "true"], 0),
        (["a", "-c", "exit 5"], 5),
        (["a", "--", "sh", "-c", "kill -9 $$"], 137),
        (["a", "--", "sh", "-c", "kill -TERM $$"], 143),
        (["a", "--", "no-such-command"], 127),
        (["a", "--", "/etc/passwd"], 126),
        (["a"], 64),
        (["--url", "redis://127.0.0.1:1", "-n", "a", "--", "true"], 69),
    ],
)
def test_the_exit_status_says_what_happened(run, words, status):
    code, _, errors = ended(run(*words))
    assert code == status
    assert errors.startswith("interlock: ") == (status in {64, 69, 126, 127}), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a", "true"], "behind --"),
        (["--", "true"], "Missing argument"),
        (["a", "-c", "true", "--", "true"], "behind -- or with -c"),
        (["-n", "-w", "1", "a", "--", "true"], "give one of them"),
        (["-s", "-x", "a", "--", "true"], "do not go together"),
        (["-s", "a", "b", "--", "true"], "takes one name"),
        (["a", "--", ""], "behind --"),
        (["--ttl", "0", "a", "--", "true"], "--ttl must be at least 0.01 and at most 30 seconds"),
        (["--ttl", "31", "a", "--", "true"], "--ttl must be at least 0.01 and at most 30 seconds"),
        (["--ttl", "3", "--grace", "2", "a", "--", "true"], "half of the ttl"),
        (["--once", "a", "--", "true"], "--at-most"),
        (["--key", "x", "a", "--", "true"], "belong to --once"),
        (["--url", "nonsense", "a", "--", "true"], "nonsense"),
        (["a\nb", "--", "true"], "control character"),
    ],
)
def test_bad_options_start_nothing_and_say_what_is_wrong(monkeypatch, capsys, words, says):
    monkeypatch.setenv("INTERLOCK_URL", "redis://127.0.0.1:1")
    monkeypatch.setattr("sys.argv", ["interlock", "run", *words])
    assert app.run() == 64
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("holder", "other", "busy"),
    [
        (["a"], ["a"], True),
        (["-s", "a"], ["-s", "a"], False), (["-s", "a"], ["-x", "a"], True),
        (["--limit", "2", "a"], ["--limit", "2", "a"], False), (["a", "b"], ["b", "c"], True),
    ],
)  # fmt: skip
def test_who_excludes_whom(run, holder, other, busy):
    held = run(*holder, "-c", "echo in; cat", stdin=subprocess.PIPE)
    assert held.stdout.readline() == "in\n"
    assert ended(run("-n", *other, "--", "echo", "in")) == ((75, "", "") if busy else (0, "in\n", ""))
    assert ended(held)[0] == 0


def test_several_urls_are_a_quorum_and_the_prefix_is_that_of_the_programs(run):
    with Server() as a, Server() as b, Server() as c:
        serve_long(a, b, c, prefix="app:")
        urls = [word for each in (a, b, c) for word in ("--url", each.url)]
        assert ended(run(*urls, "--prefix", "app:", "a", "--", "true")) == (0, "", "")
        for each in (a, b, c):
            with redis.Redis.from_url(each.url) as client:
                assert client.exists("{app:a}{record}")


@pytest.mark.parametrize(
    ("words", "said"), [(["--", "sleep", "secret"], "interlock run -- sleep"), (["-c", "secret"], "interlock run -c")]
)
def test_others_read_the_command_and_none_of_its_arguments(server, monkeypatch, words, said):
    def acquired(lockable, *_):
        registry, lease = lockable._interlock._session.registry, lockable.acquire()
        places.append(registry.held_item(lease._grant, registry.runtime.now()).place)
        lease.release()
        return 0

    places: list[str] = []
    monkeypatch.setenv("INTERLOCK_URL", server.url)
    monkeypatch.setattr("interlock.cli.run.command._run", acquired)
    monkeypatch.setattr("sys.argv", ["interlock", "run", "a", *words])
    assert (app.run(), places) == (0, [said])


def test_a_busy_lock_gives_the_status_of_e_after_the_wait_and_verbose_says_who_has_it(run):
    held = run("a", "-c", "echo in; cat", stdin=subprocess.PIPE)
    held.stdout.readline()
    begin = time.monotonic()
    # Time enough to connect on a busy machine: without an answer of the server, the status would be another.
    code, _, errors = ended(run("-w", "3", "-E", "9", "--verbose", "a", "--", "true"))
    assert code == 9 and time.monotonic() - begin >= 3
    assert "held by interlock-run@" in errors
    assert "see `interlock show a`" in errors and ".inspect()" not in errors
    waiter = run("--verbose", "a", "--", "echo", "mine")
    assert ended(held)[0] == 0
    code, written, errors = ended(waiter)
    assert (code, written) == (0, "mine\n") and "fence" in errors


@pytest.mark.parametrize("words", [[], ["--fair"], ["--ttl", "9"], ["-w", "20"]])
def test_a_run_that_had_to_wait_for_its_lock_runs_its_command_to_the_end(run, server, locks, words):
    """Over a link on which the confirmation of a handover takes longer than the start of a command."""
    held = run("a", "-c", "echo in; cat", stdin=subprocess.PIPE)
    held.stdout.readline()
    command = "trap 'echo TERM' TERM; echo in; read line; echo got $line"
    with Proxy(server.socket) as proxy:
        waiter = run(*words, "--url", proxy.url, "a", "-c", command, stdin=subprocess.PIPE)
        until(lambda: locks.lock("a").inspect().waiting == 1)
        asked = proxy.requests
        until(lambda: proxy.requests >= asked + 3)  # heartbeats, too
        proxy.delay = 0.05
        assert ended(held)[0] == 0
        assert waiter.stdout.readline() == "in\n"
        with redis.Redis.from_url(server.url) as client:
            until(lambda: client.pttl("lock:a") > 5000)  # no longer that of a handover
        written, errors = waiter.communicate("it", timeout=60)
    assert (waiter.returncode, written, errors) == (0, "got it\n", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_passed_on_and_the_command_decides(run, name):
    number = name.removeprefix("SIG")
    process = run("a", "-c", f"trap 'echo {number}; exit 4' {number}; echo in; while :; do sleep 0.05; done")
    process.stdout.readline()
    process.send_signal(getattr(signal, name))
    assert ended(process)[:2] == (4, f"{number}\n")


def test_a_signal_to_one_that_waits_ends_it_and_leaves_nothing(run, locks):
    held = run("a", "-c", "echo in; cat", stdin=subprocess.PIPE)
    held.stdout.readline()
    waiter = run("a", "--", "echo", "mine")
    until(lambda: locks.lock("a").inspect().waiting == 1)
    waiter.send_signal(signal.SIGTERM)
    assert ended(waiter) == (128 + signal.SIGTERM, "", "")
    until(lambda: locks.lock("a").inspect().waiting == 0)
    assert ended(held)[0] == 0


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_command_ends_before_the_lease_though_its_runner_is_killed_or_stopped(run, server, how):
    """The command writes the time as long as it works. On a busy machine this test may hear late of its end."""
    for ttl in ("2", "8", "24"):
        before = stood_still()
        process = run("--ttl", ttl, "a", "-c", STUBBORN.replace("sleep", "date +%s.%N; sleep"))
        pid = int(process.stdout.readline())
        process.send_signal(getattr(signal, how))
        lease_ends = 0.0
        with redis.Redis.from_url(server.url) as client:
            while lives(pid):
                lease_ends = max(lease_ends, client.pexpiretime("lock:a") / 1000)
                time.sleep(0.002)  # a test that takes all of a processor keeps it from the supervisor
        process.send_signal(signal.SIGCONT)
        code, written, _ = ended(process)
        assert how == "SIGKILL" or code == 76
        times = [float(line) for line in written.split() if line != "TERM"]
        # The supervisor kills 0.125 s before the end of a lease of 2 s, if it runs then.
        assert times[-1] < lease_ends or stood_still() - before > 0.1, (times[-1], lease_ends)
        if "TERM" in written and times[-1] < lease_ends:  # the command may be too slow to write that
            return
    pytest.fail("no supervisor has ended its command in time, with SIGTERM first")


def test_the_command_ends_with_its_group_before_the_lease_though_the_server_is_silent(run, server):
    words = ["--ttl", "2", "a", "-c", 'sh -c "$JOB" & exec sleep 60']
    process = run(*words, environment={"JOB": STUBBORN})
    pid = int(process.stdout.readline())  # of what the command has left behind
    server.pause()
    try:
        code, _, errors = ended(process)
        assert code == 76 and "not renewed" in errors
        until(lambda: not lives(pid))
    finally:
        server.resume()


def test_a_revoked_lease_ends_the_command_at_once(run, locks):
    process = run("--ttl", "20", "--grace", "0.5", "a", "-c", STUBBORN)
    pid = int(process.stdout.readline())
    begin = machine_time()
    assert locks.lock("a").revoke("it is stuck")
    code, written, errors = ended(process)
    assert (code, written) == (76, "TERM\n")
    assert "it is stuck" in errors and not lives(pid)
    assert machine_time() - begin < 10


def test_a_supervisor_that_is_killed_takes_the_command_and_its_children_with_it(run, locks):
    process = run("a", "-c", 'echo $$; sh -c "$JOB" & exec sleep 60', environment={"JOB": STUBBORN})
    command, child = int(process.stdout.readline()), int(process.stdout.readline())
    supervisor = parent_of(command)
    assert supervisor != process.pid
    os.kill(supervisor, signal.SIGKILL)
    code, _, errors = ended(process)
    assert not lives(child), "somebody else may have the lock, and the child runs on"
    assert code == 69 and "supervisor" in errors
    until(lambda: not lives(command))
    assert not locks.lock("a").inspect().held


def test_the_supervisor_runs_before_all_others_and_the_command_as_the_user_started_it(run):
    """If the system allows it to this user: what a process may do that tries the same shows that."""
    first = "os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
    tried = subprocess.run([sys.executable, "-c", f"import os; {first}"], stderr=subprocess.DEVNULL, check=False)
    process = run("a", "--", "sh", "-c", "echo $$; exec sleep 60", preexec_fn=lambda: os.nice(5))
    command = int(process.stdout.readline())
    policy = os.SCHED_RR if tried.returncode == 0 else os.SCHED_OTHER
    assert os.sched_getscheduler(parent_of(command)) == policy
    assert os.sched_getscheduler(command) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, command) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def test_a_stopped_command_is_ended_too(run):
    process = run("--ttl", "2", "a", "-c", "echo $$; kill -STOP $$; echo never")
    pid = int(process.stdout.readline())
    process.kill()
    until(lambda: not lives(pid))


def test_once_runs_once_for_each_key_and_a_failure_is_repeated(run):
    words = ["--once", "--at-most", "20", "--key", "today", "nightly", "--"]
    assert ended(run(*words, "false"))[0] == 1
    assert ended(run(*words, "echo", "ran")) == (0, "ran\n", "")
    code, written, errors = ended(run("--verbose", *words, "echo", "again"))
    assert (code, written) == (0, "")
    assert re.fullmatch(
        r"interlock: skipped: interlock-run@\S+ ran it from [-\d]+ [:\d]+ \S+ to [-\d]+ [:\d]+ \S+\n", errors
    )


def test_once_takes_the_ttl_that_it_is_given(run, server):
    words = ["--once", "--at-most", "20", "--ttl", "2", "nightly", "--", "sh", "-c", "echo began; read line"]
    process = run(*words, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "began\n"
    with redis.Redis.from_url(server.url) as client:
        assert 0 < client.pttl("lock:nightly") <= 2000
    assert ended(process)[0] == 1  # read found no line


def test_a_command_that_nohup_protects_stays_protected(run, server):
    ran = subprocess.run(
        ["sh", "-c", 'trap "" HUP; exec "$0" run a -c "kill -HUP \\$\\$; echo alive"', INTERLOCK],
        env={"PATH": os.environ["PATH"], "INTERLOCK_URL": server.url}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "alive\n")


def test_the_last_word_of_a_supervisor_that_did_not_hear_the_runner_counts():
    runner, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with runner:
        send(runner.fileno(), "until", 1.0)
        send(supervisor.fileno(), "ended", 3)
        supervisor.close()
        assert received(runner.fileno()) == ("ended", [3])
        with pytest.raises(EOFError):
            received(runner.fileno())


# A stderr that takes nothing


@contextlib.contextmanager
def full_pipe(path):
    """The descriptor of a named pipe that has no room left, and that nobody reads."""
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"x")
    writing = os.open(path, os.O_WRONLY)  # that one waits
    yield writing
    os.close(writing)
    os.close(end)


@pytest.fixture(params=["a full disk", "closed", "a full pipe", "a pipe without a reader"])
def deaf(request, tmp_path):
    """Such a stderr: for Popen, and in the words of a shell."""
    match request.param:
        case "a full disk":
            with open("/dev/full", "w") as full:
                yield {"stderr": full}, "2>/dev/full"
        case "closed":
            yield {"stderr": None, "preexec_fn": lambda: os.close(2)}, "2>&-"
        case "a full pipe":
            with full_pipe(tmp_path / "pipe") as end:
                yield {"stderr": end}, f"2>{tmp_path}/pipe"
        case _:
            reading, writing = os.pipe()
            os.close(reading)
            yield {"stderr": writing}, "2> >(exec true)"
            os.close(writing)


def test_a_command_runs_though_nobody_takes_what_interlock_says(run, server, locks, deaf):
    """That it acquired the lock, and a warning of the library, which is printed while it connects."""
    options, _ = deaf
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert "allkeys-lru" in ended(run("--verbose", "a", "--", "true"))[2]
            process = run("--verbose", "a", "-c", "echo in; cat; exit 7", stdin=subprocess.PIPE, **options)
            assert process.stdout.readline() == "in\n"
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "0")
    assert locks.lock("a").inspect().held
    assert ended(process)[0] == 7
    assert not locks.lock("a").inspect().held


@pytest.mark.parametrize(("words", "code"), [(["-n", "a", "--", "true"], 75), (["b", "--", "/none"], 127), (["a"], 64)])
def test_the_exit_status_comes_though_nobody_takes_the_message(run, deaf, words, code):
    options, _ = deaf
    held = run("a", "-c", "echo in; cat", stdin=subprocess.PIPE)
    held.stdout.readline()
    assert ended(run("--verbose", *words, **options))[0] == code
    assert ended(held)[0] == 0


def test_the_lock_stays_held_until_the_command_has_ended_though_nobody_takes_the_warning(run, server, deaf):
    options, _ = deaf
    command = f"exec 2>/dev/null; {STUBBORN}"  # the shell, too, says that a program was terminated
    process = run("--ttl", "6", "--grace", "3", "a", "-c", command, **options)
    pid = int(process.stdout.readline())
    with redis.Redis.from_url(server.url) as client:
        server.pause()
        try:
            assert process.stdout.readline() == "TERM\n"  # so the runner says that the command ends
        finally:
            server.resume()
        while client.exists("lock:a"):
            time.sleep(0.002)
        assert not lives(pid)
    assert ended(process)[0] == 76


def test_an_error_of_the_runner_ends_the_command_before_the_caller_releases(monkeypatch, tmp_path, given):
    with Runner(
        ["sh", "-c", f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; {STUBBORN}"], ["a"], 0.5
    ) as it:

        def fail(*_):
            until((tmp_path / "pid").exists)
            raise ValueError("any error")

        monkeypatch.setattr(it, "_follow", fail)
        with pytest.raises(ValueError, match="any error"):
            it.run(given, 30.0)
        assert not lives(int((tmp_path / "pid").read_text()))


def test_no_signal_ends_a_supervisor_that_is_just_starting(given):
    with Runner(["sh", "-c", "exit 3"], ["a"], 0.5) as it:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            os.kill(it.supervisor.pid, number)
        assert it.run(given, 30.0) == 3


# Many names, long arguments


MOST = [f"{number:03d}" + "\u20ac\\" * 127 + "x" for number in range(100)]  # of 512 bytes


def test_as_many_names_as_are_allowed_of_any_length(run):
    assert {len(name.encode()) for name in MOST} == {512}
    code, written, errors = ended(run(*MOST, "-c", 'echo "$INTERLOCK_NAME"; echo "$INTERLOCK_FENCE" | wc -w'))
    assert (code, errors) == (0, "")
    assert written.split("\n") == [*MOST, "100", ""]


def test_more_names_are_refused_before_anything_is_acquired(run, server):
    code, written, errors = ended(run("--verbose", *MOST, "one-more", "--", "true"))
    assert (code, written) == (64, "")
    assert "101 names" in errors and "100 at most" in errors
    with redis.Redis.from_url(server.url) as client:
        assert not client.keys()


def test_a_message_that_is_too_long_ends_the_run_and_is_no_silence(tmp_path):
    with Runner(["true"], ["a"], 1.0) as it, pytest.raises(OSError, match="too long: begin"):
        it.supervisor.begin(0.0, {"INTERLOCK_NAME": "x" * 100_000})


def test_arguments_and_an_environment_as_long_as_the_system_takes(run):
    words = [f"{number:02d}" + "x" * 30_000 for number in range(30)]
    code, written, errors = ended(run("a", "--", "sh", "-c", 'echo $# "${30}"', "sh", *words))
    assert (code, written, errors) == (0, f"30 {words[-1]}\n", "")


def test_arguments_that_are_no_text_arrive_as_they_were(run):
    assert ended(run("a", "--", "printf", "%s", b"\xff\xfe", text=False)) == (0, b"\xff\xfe", b"")


# Both processes, killed by their name


def processes_of_session(session: int) -> dict[int, str]:
    """The command lines of the processes of a session, by id, as `pgrep -f` reads them."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(each.name)
            if os.getsid(pid) == session and lives(pid):
                found[pid] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.mark.parametrize("pattern", ["interlock run", "interlock.run"])
def test_kill_9_by_the_command_line_leaves_a_supervisor_that_ends_the_command_and_its_children(run, pattern):
    words = ["--ttl", "2", "a", "--", "sh", "-c", 'sh -c "$CHILD" & echo $!; exec sleep 60']
    process = run(*words, environment={"CHILD": "trap '' TERM; while :; do sleep 0.05; done"})
    child = int(process.stdout.readline())
    for pid, line in processes_of_session(process.pid).items():
        if re.search(pattern, line):  # as pkill -9 -f
            os.kill(pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    until(lambda: not lives(child))


def test_the_supervisor_has_a_name_of_its_own_and_nothing_of_the_commands(run):
    process = run("a", "-c", "echo $$; exec sleep 60")
    supervisor = parent_of(int(process.stdout.readline()))
    line = processes_of_session(process.pid)[supervisor]
    assert "supervisor.py" in line and "sleep" not in line and "interlock run" not in line


# A user who may not signal all of the command


USER = 65534  # any that is not root
DAC_OVERRIDE = 1  # the capability to read everything: the sources, and the socket of the server


@pytest.fixture
def as_user():
    """The words before a command that run it as a user without rights, but one who may read every file."""
    rights = int(re.search(r"CapBnd:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
    if os.geteuid() != 0 or not rights >> DAC_OVERRIDE & 1:
        pytest.skip("needs root, with CAP_DAC_OVERRIDE, to start processes of other users")
    who = f"setpriv --reuid={USER} --regid={USER} --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override"
    return *who.split(), "env", "PYTHONDONTWRITEBYTECODE=1"


@pytest.fixture
def sudo():
    """A program that runs a command as root, whoever starts it: setpriv with the setuid bit."""
    with tempfile.TemporaryDirectory() as folder:  # a folder of pytest is closed to other users
        if os.statvfs(folder).f_flag & os.ST_NOSUID:
            pytest.skip(f"{folder} is on a file system where the setuid bit has no effect")
        made = Path(folder) / "like-sudo"
        shutil.copy(shutil.which("setpriv"), made)
        made.chmod(0o4755)
        made.parent.chmod(0o755)
        yield f"{made} --reuid=0 --regid=0 --clear-groups"


ALONE, BEHIND = "echo $$; exec {} sleep 600", "{} sleep 600 & echo $!; wait"
SHAPES = pytest.mark.parametrize("shape", [ALONE, BEHIND], ids=["the command", "another process of its group"])


class WorksOn:
    """A run of which a process has become root's: that process ends only when a test ends it."""

    def __init__(self, process, said: Path) -> None:
        self.process = process
        self.said = said  # on stderr
        self.pid = int(process.stdout.readline())
        until(lambda: Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"sleep"))

    def lines(self) -> list[str]:
        """What was said of that process."""
        return [line for line in self.said.read_text().splitlines() if f"process {self.pid} " in line]

    def end(self) -> int:
        """End that process; then all has to end. Returns the exit status."""
        assert lives(self.pid) and self.process.poll() is None
        os.kill(self.pid, signal.SIGTERM)
        return ended(self.process)[0]


@pytest.fixture
def works_on(run, as_user, sudo, tmp_path):
    """Starts a command as that user, of which a process becomes root's."""
    with contextlib.ExitStack() as ends, open(tmp_path / "stderr", "w") as stderr:

        def start(shape, *words):
            command = run(*words, "a", "-c", shape.format(sudo), as_user=as_user, stderr=stderr)
            made = WorksOn(command, tmp_path / "stderr")
            ends.callback(lambda: lives(made.pid) and os.kill(made.pid, signal.SIGKILL))
            return made

        yield start


def processor_time(pid: int) -> float:
    """The seconds of a processor that this process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_program_that_this_user_may_not_end_is_refused_before_the_lock(run, as_user, sudo, server):
    words = ["--verbose", "a", "--", *sudo.split(), "echo", "ran"]
    status, written, errors = ended(run(*words, as_user=as_user))
    assert (status, written) == (64, "")
    assert f"{sudo.split()[0]} " in errors and "sudo interlock run" in errors and "user 0" in errors
    with redis.Redis.from_url(server.url) as client:
        assert not client.keys()
    assert ended(run(*words))[:2] == (0, "ran\n"), "root may signal anything"


def test_a_program_of_ones_own_with_the_setuid_bit_is_run(run, as_user, sudo):
    program = sudo.split()[0]
    os.chown(program, USER, USER)
    os.chmod(program, 0o4755)  # the change of the owner has cleared the bit
    assert ended(run("a", "--", program, "echo", "ran", as_user=as_user))[:2] == (0, "ran\n")


@SHAPES
def test_what_a_loss_cannot_end_is_said_again_and_again_until_it_has_ended(works_on, run, locks, shape):
    it = works_on(shape, "--ttl", "3", "--grace", "0.2")
    command = it.pid if shape == ALONE else parent_of(it.pid)
    supervisor = parent_of(command)
    assert locks.lock("a").revoke("it is stuck")
    until(it.lines)
    line = it.lines()[0]
    assert "sleep 600" in line and "without the lock" in line and f"sudo kill {it.pid}" in line
    assert "gets SIGTERM" not in it.said.read_text()
    used = processor_time(supervisor)
    until(lambda: len(it.lines()) >= 4)
    assert ended(run("-w", "30", "a", "--", "true"))[0] == 0, "the next holder does not wait for it"
    assert shape == ALONE or not lives(command)
    assert processor_time(supervisor) - used < 0.5, "the supervisor spins"
    assert it.end() == 77


def test_what_a_silent_server_keeps_from_ending_is_said_too(works_on, server):
    it = works_on(ALONE, "--ttl", "2")
    server.pause()
    try:
        until(lambda: len(it.lines()) >= 3)
    finally:
        server.resume()
    assert "not renewed" in it.said.read_text()
    assert it.end() == 77


@SHAPES
def test_a_signal_that_does_not_reach_a_process_is_said_and_the_lock_kept_until_that_has_ended(works_on, locks, shape):
    it = works_on(shape)
    it.process.send_signal(signal.SIGTERM)
    until(lambda: len(it.lines()) >= (1 if shape == ALONE else 3))  # again, since the shell has ended
    line = it.lines()[0]
    assert "SIGTERM" in line and "sleep 600" in line and "keeps the lock" in line
    assert f"sudo kill -TERM {it.pid}" in line
    assert locks.lock("a").inspect().held
    assert it.end() == 128 + signal.SIGTERM
    assert not locks.lock("a").inspect().held


@SHAPES
def test_a_supervisor_that_is_killed_frees_no_lock_while_a_process_works_on(works_on, locks, shape):
    it = works_on(shape)
    os.kill(parent_of(it.pid if shape == ALONE else parent_of(it.pid)), signal.SIGKILL)
    until(lambda: len(it.lines()) >= 2)
    assert "keeps the lock" in it.lines()[0]
    assert locks.lock("a").inspect().held
    assert it.end() == 69
    assert not locks.lock("a").inspect().held


# Under a terminal


@pytest.fixture
def shell(server):
    """A shell with job control, on a terminal."""
    made = pexpect.spawn(
        "bash", ["--norc", "--noediting", "-i"], timeout=60, encoding="utf-8",
        env={
            "PATH": f"{INTERLOCK.parent}:{os.environ['PATH']}", "INTERLOCK_URL": server.url, "TERM": "dumb",
            "PS1": "ready> ",
        },
    )  # fmt: skip
    made.expect_exact("ready> ")
    yield made
    made.close(force=True)


def status(shell) -> int:
    """The exit status of the last command."""
    shell.expect_exact("ready> ")
    shell.sendline("echo status=$?=")
    shell.expect(r"status=(\d+)=")
    found = int(shell.match[1])
    shell.expect_exact("ready> ")
    return found


def test_ctrl_c_ends_the_command_and_leaves_nothing(shell, locks):
    shell.sendline("interlock run a -- sh -c 'echo in; exec sleep 100'")
    shell.expect(r"\nin")
    shell.sendintr()
    assert status(shell) == 130
    assert not locks.lock("a").inspect().held


def test_ctrl_c_while_it_waits_leaves_the_queue(shell, locks):
    with locks.lock("a"):
        shell.sendline("interlock run a -- true")
        until(lambda: locks.lock("a").inspect().waiting == 1)
        shell.sendintr()
        assert status(shell) == 130
        assert locks.lock("a").inspect().waiting == 0


def test_ctrl_z_stops_the_job_and_fg_continues_it(shell, locks):
    shell.sendline("interlock run --ttl 20 a -- sh -c 'echo in; read line; echo got $line'")
    shell.expect(r"\nin")
    shell.sendcontrol("z")
    shell.expect("stopped; unless it goes on")
    shell.expect("Stopped")
    shell.expect_exact("ready> ")
    shell.sendline("fg")
    shell.expect("interlock run")
    shell.sendline("it")
    shell.expect("got it")
    assert status(shell) == 0


def stopped_by_ctrl_z(shell, options, behind="") -> int:
    """The id of a command that was stopped as a person does it."""
    # A shell that is starting a program as Ctrl-Z arrives may not stop (vfork): so this one becomes the program.
    shell.sendline(f"interlock run {options} a -- sh -c 'echo $$; exec sleep 100' {behind}")
    shell.expect(r"\n(\d+)\r")
    pid = int(shell.match[1])
    shell.sendcontrol("z")
    shell.expect("Stopped")
    return pid


def test_ctrl_z_stops_the_job_though_nobody_takes_the_message(shell, deaf):
    _, words = deaf
    shell.sendline(f"interlock run --ttl 20 a -- sh -c 'echo in; read line; echo got $line' {words}")
    shell.expect(r"\nin")
    shell.sendcontrol("z")
    shell.expect("Stopped")
    shell.expect_exact("ready> ")
    shell.sendline("fg")
    shell.expect("interlock run")
    shell.sendline("it")
    shell.expect("got it")
    assert status(shell) == 0


def test_a_terminal_that_stops_those_who_write_in_the_background_does_not_stop_the_runner(shell, locks):
    """The command has the terminal, so the runner is in the background."""
    shell.sendline("stty tostop; interlock run --ttl 20 --grace 0.5 a -- sh -c 'echo in; exec sleep 100'")
    shell.expect(r"\nin")
    assert locks.lock("a").revoke("it is stuck")
    shell.expect("it is stuck")
    assert status(shell) == 76


def test_a_job_that_stays_stopped_is_ended_before_its_lease(shell, locks):
    pid = stopped_by_ctrl_z(shell, "--ttl 2")
    until(lambda: not lives(pid))
    shell.sendline("fg")
    shell.expect("SIGTERM")
    assert status(shell) == 76


def test_a_command_in_the_background_that_reads_waits_for_fg(shell):
    shell.sendline("interlock run --ttl 20 a -- sh -c 'read line; echo got $line' &")
    shell.expect_exact("ready> ")
    shell.expect("stopped; unless it goes on")
    shell.sendline("fg")
    shell.expect("interlock run")
    shell.sendline("it")
    shell.expect("got it")
    assert status(shell) == 0


def test_a_terminal_that_hangs_up_changes_no_exit_status(run):
    ours, theirs = os.openpty()

    def take_the_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = run("a", "-c", "echo in; read line; exit 3", stdin=theirs, stdout=theirs, preexec_fn=take_the_terminal)
    os.close(theirs)
    while b"in" not in os.read(ours, 100):
        pass
    os.close(ours)
    assert ended(process) == (3, None, "")


def test_ctrl_c_ends_the_script_around_it_too(shell, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("interlock run a -- sh -c 'echo in; exec sleep 100'\necho went on\n")
    shell.sendline(f"bash {script}; echo 'the end'")
    shell.expect(r"\nin")
    shell.sendintr()
    shell.expect_exact("ready> ")
    assert "went on" not in shell.before


def test_a_pager_reads_from_the_terminal_while_the_command_runs(shell, locks):
    pager = "sh -c 'read line; echo $line; read key </dev/tty; echo key $key; cat'"
    shell.sendline(f"interlock run a -- sh -c 'echo in; exec sleep 100' | {pager}")
    shell.expect(r"\nin")
    shell.sendline("it")
    shell.expect("key it")
    shell.sendintr()
    assert status(shell) != 0
    assert not locks.lock("a").inspect().held


def test_a_command_in_a_pipeline_has_the_terminal_when_it_reads(shell):
    shell.sendline("interlock run a -- sh -c 'read line; echo got $line' | cat")
    shell.sendline("it")
    shell.expect("got it")
    assert status(shell) == 0


def test_ctrl_z_and_fg_in_a_pipeline(shell, locks):
    pid = stopped_by_ctrl_z(shell, "--ttl 20", "| cat")
    until(lambda: state_of(pid) == "T")
    shell.sendline("fg")
    until(lambda: state_of(pid) == "S")
    shell.sendintr()
    assert status(shell) != 0
    assert not locks.lock("a").inspect().held


def test_ctrl_z_stops_nothing_that_no_shell_could_continue(server):
    """As under `ssh -t HOST interlock run ...`: no shell with jobs is on this terminal."""
    words = ["run", "a", "--", "sh", "-c", "echo in; read line; echo got $line"]
    alone = pexpect.spawn(
        str(INTERLOCK), words, timeout=20, encoding="utf-8", env={**os.environ, "INTERLOCK_URL": server.url}
    )
    try:
        alone.expect(r"in\r")
        alone.sendcontrol("z")
        alone.expect("stopped")
        alone.sendline("it")
        alone.expect("got it")
    finally:
        alone.close(force=True)


def test_a_script_has_the_terminal_back_after_a_command_that_cannot_be_executed(shell, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("interlock run a -- /nonexistent\nread line\necho got $line\n")
    shell.sendline(f"bash {script}")
    shell.expect("cannot run")
    shell.sendline("it")
    shell.expect("got it")
