"""The runner of `interlock run`: acquires the lease, renews it while the command runs, and passes signals on.

Rules. (a) The lease is released only after the command has ended, whatever the runner meets meanwhile. No print of the
runner waits or raises (see `cli.stderr`). (b) A signal that arrives before the command has started ends the wait, and
leaves nothing in the queue. Later signals go to the command, which decides. (c) The runner tells the supervisor only
deadlines that it has read from the lease, counted from before it read them. (d) On a terminal the command is a job of
its own: what stops the command (Ctrl-Z) stops the runner, too, and what continues the runner continues the command. The
command gets the terminal at once. In a pipeline it gets the terminal only when it reads or sets it, since another
process of the pipeline may need it (`| less`). (e) The runner says of each process that it can't end that it works on,
until that process has ended: with the lock as long as there is one, and without it after a loss.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from interlock._protocol.timing import now as boottime
from interlock.cli.escape import safe
from interlock.cli.exit_status import EX_LOST, EX_NOPERM, EX_UNAVAILABLE
from interlock.cli.stderr import drain

from .supervision import Supervisor
from .supervisor import Reminder, out_of_reach

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

__all__ = ["Interrupted", "Runner"]

PASSED_ON: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
LONGEST_TICK: Final = 1.0  # seconds between two deadlines that the supervisor hears
LONGEST_KILL: Final = 1.0  # seconds: a zombie that nobody reaps stays in its group for ever
POLL: Final = 0.1  # seconds between two looks at a process that is no child


class Interrupted(BaseException):  # as KeyboardInterrupt: no handler of errors may take it for one
    """A signal arrived before the command had started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class Held(Protocol):
    """What the runner needs of a lease: of one lock, or of several."""

    @property
    def fence(self) -> Any: ...
    @property
    def lost(self) -> threading.Event: ...
    def remaining(self) -> float: ...


class Runner:
    """One run of a command. Use it in a `with`, which gives the terminal back and ends the supervisor."""

    def __init__(self, argv: Sequence[str], names: Sequence[str], grace: float) -> None:
        """Start the supervisor. `grace`: seconds between SIGTERM and the deadline."""
        self.names = names
        self.is_running = self.is_ending = self.has_worked_on = False
        self.ended_by_key = 0
        self.terminal = _terminal()
        self.program = argv[0]
        self.command = 0  # the id of its process and group
        is_alone = os.isatty(0) and os.isatty(1)  # else the others of the pipeline may need the terminal
        self.supervisor = Supervisor(argv, grace, has_terminal=is_alone and self._has_terminal())
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name in PASSED_ON:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self.before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_command_terminal():
            self._take_terminal()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.supervisor.close()
        if self.terminal is not None:
            os.close(self.terminal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.is_running:
            raise Interrupted(number)
        self.supervisor.say("signal", number)

    def run(self, lease: Held, ttl: float) -> int:
        """Run the command under this lease, and return its exit status; EX_LOST or EX_NOPERM if the lease was lost."""
        fence = lease.fence
        fences = [fence[name] for name in self.names] if len(self.names) > 1 else [fence]
        names = {"INTERLOCK_NAME": "\n".join(self.names), "INTERLOCK_FENCE": "\n".join(map(str, fences))}
        self.is_running = True
        if (before := signal.getsignal(signal.SIGTSTP)) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._on_signal)
        until = _deadline(lease)
        try:
            self.supervisor.begin(until, names)
            threading.Thread(target=self._report_loss, args=(lease,), name="interlock-run-loss", daemon=True).start()
            return self._follow(lease, until, min(LONGEST_TICK, ttl / 10))
        except EOFError:
            print("interlock: the supervisor was killed, so the command gets SIGKILL, too", file=sys.stderr)
            self._kill_group()
            self._wait_for_the_unreached(lease)
            return EX_NOPERM if self.has_worked_on else EX_UNAVAILABLE
        except BaseException:  # the caller releases the lease, so the command must have ended
            self.supervisor.say("lost")
            self.supervisor.close()
            raise
        finally:
            signal.signal(signal.SIGTSTP, before)
            self.is_running = False

    def _report_loss(self, lease: Held) -> None:
        lease.lost.wait()
        self.supervisor.say("lost")

    def _follow(self, lease: Held, until: float, tick: float) -> int:
        while True:
            heard, newer = self.supervisor.hear(tick), _deadline(lease)
            is_lost = lease.lost.is_set()
            if newer > until and not is_lost:
                until = newer
                self.supervisor.say("until", until)
            match heard:
                case ("forked", [pid]):
                    self.command = pid
                case ("ended", [code]):
                    if self.has_worked_on:
                        return EX_NOPERM
                    return EX_LOST if is_lost or self.is_ending else self._status(code)
                case ("failed", [status, text]):
                    print(f"interlock: cannot run {safe(self.program)}: {safe(text)}", file=sys.stderr)
                    return int(status)
                case ("ending", [processes]):
                    self.is_ending = True
                    why = "is lost" if is_lost else f"ends in {max(0.0, until - boottime()):.1f} s and was not renewed"
                    what = "this user may not end all of it" if processes else "it gets SIGTERM, and then SIGKILL"
                    print(f"interlock: the lease {why}: the command has to end, and {what}", file=sys.stderr)
                    self._tell_of(processes, 0, is_lost=True)
                case ("unreached", [number, processes]):
                    self._tell_of(processes, number, is_lost=is_lost or self.is_ending)
                case ("stopped", [number]):
                    self._stop(lease, number)
                case _:
                    pass

    def _kill_group(self) -> None:
        """Kill what is left of the command's group, before anybody else gets the lock."""
        gone_by = boottime() + LONGEST_KILL
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while self.command and boottime() < gone_by:
                os.killpg(self.command, signal.SIGKILL)
                time.sleep(0.01)

    def _wait_for_the_unreached(self, lease: Held) -> None:
        """Wait until what this user may not kill has ended by itself. The lease is renewed meanwhile."""
        reminder = Reminder()
        while self.command and (processes := out_of_reach(self.command)):
            if reminder.is_due(boottime()):
                self._tell_of(processes, signal.SIGKILL, is_lost=lease.lost.is_set())
            time.sleep(POLL)

    def _tell_of(self, processes: Mapping[bytes, bytes], number: int, *, is_lost: bool) -> None:
        """Say that these processes did not get this signal, or after a loss that none ends them."""
        self.has_worked_on |= is_lost and bool(processes)
        name = signal.Signals(number).name if number else ""
        for pid, line in processes.items():
            who = f"process {int(pid)} ({safe(os.fsdecode(line) or self.program)})"
            print(
                f"interlock: {who} is another user's, so it gets no signal of this one and works on without the lock, "
                f"beside the next holder, until it ends. End it: sudo kill {int(pid)}"
                if is_lost
                else f"interlock: {name} did not reach {who}, which is another user's: it works on, and keeps the lock "
                f"until it ends. End it: sudo kill -{name.removeprefix('SIG')} {int(pid)}",
                file=sys.stderr,
            )

    # The terminal

    def _status(self, code: int) -> int:
        """The exit status for the end of the command, which a key of the terminal may have ended."""
        if -code in {signal.SIGINT, signal.SIGQUIT} and self._has_command_terminal():
            self.ended_by_key = -code
        return code if code >= 0 else 128 - code

    def die_as_the_command(self) -> None:
        """End this job's processes by the key that has ended the command: the terminal sent it to the command only.

        So a script that runs `interlock run` ends, too, as without it.
        """
        if self.ended_by_key:
            drain()
            signal.signal(self.ended_by_key, signal.SIG_DFL)
            os.killpg(0, self.ended_by_key)

    def _stop(self, lease: Held, number: int) -> None:
        """The command was stopped, by Ctrl-Z or because it reads in the background: stop this job as a whole.

        Linux drops the SIGTSTP of Ctrl-Z for a job that no shell could continue, as under `ssh -t HOST interlock run`.
        It stopped the command, whose parent is in this session; so the command goes on at once.
        """
        if self.terminal is None:
            return
        if number in {signal.SIGTTIN, signal.SIGTTOU} and self._has_terminal():  # it needs the terminal now
            self._set_foreground(self.command)
            self.supervisor.say("signal", int(signal.SIGCONT))
            return
        is_given = self._has_command_terminal()
        if is_given:
            self._take_terminal()
        left = max(0.0, lease.remaining())
        print(f"interlock: stopped; unless it goes on, the command is ended within {left:.0f} s", file=sys.stderr)
        drain()
        stop = signal.SIGTSTP if number == signal.SIGTSTP else signal.SIGSTOP
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, stop)  # returns when the shell continues this job
        signal.signal(signal.SIGTSTP, handler)
        if is_given and self._has_terminal():  # after `fg`, not after `bg`
            self._set_foreground(self.command)
        self.supervisor.say("signal", int(signal.SIGCONT))

    def _has_terminal(self) -> bool:
        """Whether this job is in the foreground of its terminal."""
        return self._foreground() == os.getpgrp()

    def _has_command_terminal(self) -> bool:
        return 0 < self.command == self._foreground()

    def _foreground(self) -> int:
        """The group in the foreground of the terminal; 0 if there is no terminal, or it has hung up."""
        if self.terminal is not None:
            with contextlib.suppress(OSError):
                return os.tcgetpgrp(self.terminal)
        return 0

    def _take_terminal(self) -> None:
        self._set_foreground(os.getpgrp())

    def _set_foreground(self, group: int) -> None:
        if self.terminal is None:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else it stops a process of the background
        with contextlib.suppress(OSError):
            os.tcsetpgrp(self.terminal, group)
        signal.signal(signal.SIGTTOU, before)


def _deadline(lease: Held) -> float:
    now = boottime()
    return now + lease.remaining()


def _terminal() -> int | None:
    """The terminal of this process, if it has one."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
