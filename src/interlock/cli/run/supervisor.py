"""The supervisor of `interlock run`: a process that ends the command before its lease can end.

Theory. Three processes take part. The *runner* holds the lease, and renews it. The *supervisor* is a program that the
runner starts: one thread, no connection, no lock, so nothing but its own death can delay it for long. The *command* is
a child of the supervisor, in a process group of its own. After each renewal the runner tells the supervisor until when
the lease certainly lasts, on a clock that both have. The supervisor needs nothing else: when that time comes near it
ends the command, whether the runner renews in vain, was stopped, or was killed.

Rules.
(a) SIGTERM goes to the command's process group `grace` seconds before the deadline; SIGKILL goes to it before the
    deadline, also if the command itself has ended and has left others in its group.
(b) The deadline that arrived last counts, however late it arrived: the runner sends only later and later ones.
(c) The supervisor alone waits for the command, so a signal never reaches another process with a reused id.
(d) If the supervisor dies, Linux kills the command (PR_SET_PDEATHSIG), and the runner kills the group.
(e) No signal of a terminal or of a service manager ends the supervisor: it ends when the command has.
(f) The supervisor runs before all other processes of the machine, if the system allows that (root, CAP_SYS_NICE): else
    busy processes can delay it. The command runs as the user started it.
(g) The supervisor waits for nobody: it prints nothing, and drops a message that the runner has no room for.
(h) A process of the group that has become another user's (sudo) gets no signal from this one, and `killpg` says nothing
    of that if it reaches any other process. So the supervisor looks who is left. It tells the runner, again and again,
    and the command has ended only when those processes have.

This file is a program, since a fork of the runner would have the runner's command line: `pkill -9 -f 'interlock run'`
would kill both, and nobody would end what the command has started. The file imports nothing of this package and little
of the standard library, so the supervisor has started before the runner has connected. Its arguments are two
descriptors: a socket that keeps the bounds of the messages (see `Word`), and a pipe with what the supervisor has to
know from the start (see `Setup`), which may be long.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the import of typing would cost a tenth of the start
    from collections.abc import Callable, Mapping
    from typing import Any, Final, Literal, NoReturn, TypeAlias

    Word: TypeAlias = Literal[
        # from the runner
        "begin",  # until, environment: start the command under a lease that lasts until then
        "until",  # until: the lease lasts until then
        "lost",  # the lease is lost: end the command now
        "signal",  # number: send it to the command
        # from the supervisor
        "forked",  # pid: of the process that becomes the command
        "failed",  # status, text: the command could not be started
        "stopped",  # number: the signal that stopped the command
        "ending",  # processes: the supervisor has sent SIGTERM, since the deadline is near, but these did not get it
        "unreached",  # number, processes: these live, and did not get this signal
        "ended",  # code: the exit status, or -n after signal n
    ]
    Detail: TypeAlias = int | float | str | dict[bytes, bytes]  # no signal.Signals, which marshal does not take
    Setup: TypeAlias = tuple[
        list[bytes],  # the command and its arguments
        dict[bytes, bytes],  # its environment
        float,  # grace: seconds from SIGTERM to the deadline
        int,  # the clock of the deadlines
        bool,  # whether the command gets the terminal
        list[int],  # the signals that are blocked for the command
    ]

__all__ = ["Reminder", "out_of_reach", "received", "send"]

CANNOT_EXECUTE: Final = 126  # the statuses of the shell for a command that was found but is no program, ...
NOT_FOUND: Final = 127  # ... or was not found
LONGEST_SLEEP: Final = (
    0.5  # seconds: the timers of a process stand still while the machine sleeps, the deadline does not
)
MAX_MESSAGE: Final = 65536  # bytes: as many names as are allowed, of 512 bytes, and their fences
KILL_MARGIN: Final = 1.0  # seconds from SIGKILL to the deadline, a quarter of the grace at most
MAX_UNREACHED: Final = 10  # processes that are named
MAX_LINE: Final = 200  # bytes of a command line
FIRST_PAUSE: Final = 1.0  # seconds until a thing is said again, and twice as long each time, ...
LONGEST_PAUSE: Final = 30.0  # ... up to so long
PR_SET_PDEATHSIG: Final = 1
FOREVER: Final = float("inf")
IGNORED: Final = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGQUIT",
        "SIGTSTP",
        "SIGTTIN",
        "SIGTTOU",
        "SIGPIPE",
        "SIGUSR1",
        "SIGUSR2",
    )
)
RESTORED: Final = (*IGNORED, signal.SIGCHLD)  # for the command
HARMLESS: Final = (signal.SIGCONT, signal.SIGWINCH)  # nobody has to know whom they did not reach


def send(end: int, word: Word, *details: Detail) -> None:
    """Send a message. Raises OSError if nobody is there to hear it, or if it is too long."""
    message = marshal.dumps([word, *details])
    if len(message) > MAX_MESSAGE:
        raise OSError(errno.EMSGSIZE, f"a message of {len(message)} bytes is too long: {word}")
    os.write(end, message)


def received(end: int) -> tuple[Word, list[Any]]:
    """The next message. Raises EOFError if the other process has ended."""
    message = b""
    for _ in range(2):
        try:
            message = os.read(end, MAX_MESSAGE)
            break
        except ConnectionResetError:  # it ended with messages unread: those that it had sent are still here
            continue
    if not message:
        raise EOFError
    word, *details = marshal.loads(message)
    return word, details


def out_of_reach(group: int) -> dict[bytes, bytes]:
    """The living processes of a group that this user may not signal: of each id the command line.

    Without /proc, or if it hides the processes of other users, only the first process of the group is looked at.
    """
    numbers = {group}
    with contextlib.suppress(OSError):
        numbers |= {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (pathlib starts late)
    found: dict[bytes, bytes] = {}
    for number in sorted(numbers):
        try:
            # The session, too: the command's id, once it is free, may become that of a stranger and his group.
            if os.getpgid(number) == group and os.getsid(number) == os.getsid(0):
                os.kill(number, 0)
        except PermissionError:
            if not _read(number, "stat").rpartition(b")")[2].startswith((b" Z", b" X")) and len(found) < MAX_UNREACHED:
                found[b"%d" % number] = _read(number, "cmdline").replace(b"\0", b" ").strip()[:MAX_LINE]
        except ProcessLookupError:
            pass
    return found


def _read(number: int, name: str) -> bytes:
    try:
        with open(f"/proc/{number}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:  # no /proc, or the process has ended
        return b""


class Reminder:
    """When to say a thing: at once, and again after longer and longer pauses."""

    def __init__(self) -> None:
        self.at = -FOREVER
        self.pause = FIRST_PAUSE

    def is_due(self, now: float) -> bool:
        """Whether to say it now; then the next pause begins."""
        if now < self.at:
            return False
        self.at, self.pause = now + self.pause, min(2 * self.pause, LONGEST_PAUSE)
        return True


class _Command:
    """The supervisor's side: the command, and what became of it."""

    def __init__(self, runner: int, setup: Setup) -> None:
        self.runner: int | None = runner
        self.argv, self.environment, self.grace, self.clock, has_terminal, self.blocked = setup
        self.terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC) if has_terminal else None
        self.until = FOREVER
        self.kill_at = FOREVER
        self.pid = 0
        self.code: int | None = None  # of the command, when it has ended
        self.is_ending = False
        self.is_killed = False
        self.unreached = 0  # the last signal from the runner that did not reach all of the group
        self.reminder = Reminder()

    def supervise(self) -> None:
        """Run the command to its end."""
        self.run_as_started = _run_first()
        self.kill_with_parent = _death_signal()
        self.ignored = [each for each in RESTORED if signal.getsignal(each) == signal.SIG_IGN]  # as under nohup
        self.woken, wake = os.pipe()
        for end in (self.woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _ignore)  # a function of Python: only that writes to the wakeup descriptor
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)  # from the start until now all were blocked
        while True:
            ends: list[Any] = [self.woken] if self.runner is None else [self.woken, self.runner]
            readable, _, _ = select.select(ends, [], [], self._sleep())
            if self.woken in readable:
                os.read(self.woken, 4096)
            if self.runner in readable:
                self._heed()
            if self.pid == 0:
                if self.runner is None:
                    return
                continue
            if self._has_ended():
                return
            self._keep_the_promise()

    # The runner

    def _heed(self) -> None:
        """Do what the runner says. A runner that has died says nothing more, and the last deadline stands."""
        assert self.runner is not None
        try:
            word, details = received(self.runner)
        except EOFError:
            self.runner = None
            return
        match word:
            case "begin":
                self.until, environment = details
                self._start(environment)
            case "until":
                (self.until,) = details
            case "lost" if self.pid:
                self._end()
            case "signal" if self.pid:
                self._pass_on(details[0])
            case _:
                pass

    def _say(self, word: Word, *details: Detail) -> None:
        if self.runner is not None:
            with contextlib.suppress(OSError):  # it has died, or is stopped and has no room left
                send(self.runner, word, *details)

    # The command

    def _start(self, environment: Mapping[bytes, bytes]) -> None:
        failed, failing = os.pipe()  # the command's exec closes `failing`
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._become_the_command(failing, environment, supervisor)
        self._say("forked", self.pid)
        os.close(failing)
        with os.fdopen(failed, "rb") as said:
            number, _, text = said.read().partition(b" ")
        if not number:
            return
        os.waitpid(self.pid, 0)
        self.pid = 0
        status = NOT_FOUND if int(number) in {errno.ENOENT, errno.ENOTDIR} else CANNOT_EXECUTE
        self._say("failed", status, text.decode(errors="replace"))

    def _become_the_command(self, failing: int, environment: Mapping[bytes, bytes], parent: int) -> NoReturn:
        try:
            os.setpgid(0, 0)
            if self.terminal is not None:
                os.tcsetpgrp(self.terminal, os.getpid())  # SIGTTOU is still ignored
            signal.set_wakeup_fd(-1)
            for number in RESTORED:
                signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
            self.run_as_started()
            self.kill_with_parent()
            if os.getppid() == parent:  # else the supervisor died before that, and nobody would end the command
                os.execvpe(self.argv[0], self.argv, {**self.environment, **environment})
        except OSError as error:
            os.write(failing, f"{error.errno} {error.strerror}".encode())
        finally:
            os._exit(CANNOT_EXECUTE)

    def _send(self, number: int) -> None:
        """Send a signal to the command's group. The command is not yet waited for, so its id is its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _pass_on(self, number: int) -> None:
        self._send(number)
        if number not in HARMLESS and (processes := out_of_reach(self.pid)):
            self.unreached = number
            self._say("unreached", number, processes)

    def _has_ended(self) -> bool:
        """Whether the command has ended, and with it all that a signal should have ended; then the runner knows."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):
                self._say("stopped", os.WSTOPSIG(status))
                return False
            self.code = os.waitstatus_to_exitcode(status)
            if self.is_ending:
                self._send(signal.SIGKILL)  # to what the command has left in its group
        if (self.is_ending or self.unreached) and out_of_reach(self.pid):
            return False
        self._say("ended", self.code)
        return True

    # The promise

    def _now(self) -> float:
        return time.clock_gettime(self.clock)

    def _sleep(self) -> float | None:
        if self.pid == 0:
            return None
        if self.is_killed:
            return LONGEST_SLEEP
        due = min(self.kill_at, self._kill_by()) if self.is_ending else self.until - self.grace
        return max(0.0, min(LONGEST_SLEEP, due - self._now()))

    def _kill_by(self) -> float:
        """When the command must be killed: before the deadline, by a part of the grace."""
        return self.until - min(KILL_MARGIN, self.grace / 4)

    def _keep_the_promise(self) -> None:
        now = self._now()
        if not self.is_ending and now >= self.until - self.grace:
            self._end()
        self._kill_in_time()
        is_awaited = self.is_ending or self.code is not None
        if is_awaited and self.reminder.is_due(now) and (processes := out_of_reach(self.pid)):
            self._say("unreached", self.unreached, processes)

    def _kill_in_time(self) -> None:
        if self.is_ending and self._now() >= min(self.kill_at, self._kill_by()):
            self._send(signal.SIGKILL)
            self.is_killed = True

    def _end(self) -> None:
        """Ask the command to end, once."""
        if self.is_ending:
            return
        self.is_ending = True
        self.kill_at = self._now() + self.grace
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # a stopped command handles no SIGTERM
        self._kill_in_time()  # before a look at all processes of the machine
        self.reminder.is_due(self._now())
        self._say("ending", out_of_reach(self.pid))


def _death_signal() -> Callable[[], object]:
    """A function that makes Linux kill the calling process when its parent dies; elsewhere it does nothing."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    import ctypes  # noqa: PLC0415 (not for others)

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_first() -> Callable[[], None]:
    """Let this process run before all others, if the system allows that. Returns a function that undoes it."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        if policy not in {os.SCHED_FIFO, os.SCHED_RR}:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:  # an ordinary user
        pass
    return lambda: os.sched_setscheduler(0, policy, parameters)


def _ignore(number: int, frame: object) -> None:
    """Handle a signal that only has to wake the loop."""


def main() -> None:
    """Be the supervisor of the runner that has started this process."""
    try:
        runner, told = (int(descriptor) for descriptor in sys.argv[1:])
        for descriptor in (runner, told):
            os.set_inheritable(descriptor, False)
        os.set_blocking(runner, False)
        with os.fdopen(told, "rb") as setup:
            command = _Command(runner, marshal.load(setup))
        command.supervise()
    finally:  # also after an error: its traceback would wait for a reader of stderr, and nobody would end the command
        os._exit(0)


if __name__ == "__main__":
    main()
