"""The options of `interlock run`, and what they mean for the lease."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from interlock._api.interlock import MONTH
from interlock._protocol.names import MIN_TTL, duration
from interlock._protocol.timing import DEFAULT_TTL, MAX_TTL
from interlock.cli.escape import safe
from interlock.cli.exit_status import EX_TEMPFAIL
from interlock.cli.options import TIME, Prefix, Urls, connect
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, Unavailable
from interlock.primitives.once import Skipped
from interlock.threads import Once

from .runner import Interrupted, Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.threads import Interlock

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

MAX_SAID: Final = 200  # characters of the command
MAX_GRACE: Final = 5.0  # seconds, of the default
CAP_KILL: Final = 5  # Linux's number of the right to signal the processes of all users
MAX_NAMES: Final = 100  # of 512 bytes each. They must fit into one variable (128 KB on Linux), and one message

EPILOG = """\b
interlock run stock -- ./import.py             one at a time on all machines; waits
interlock run -n backup -- backup.sh /srv      does nothing if it runs elsewhere
interlock run -w 2.5 stock -c 'sort <in >out'  waits 2.5 s, runs a shell
interlock run --limit 5 api -- ./fetch.py      at most five at a time
interlock run -s files -- ./read.sh            readers; -x: the one writer
interlock run --once --at-most 3600 nightly -- ./nightly.sh

Exit status: that of the command, 128 + n if signal n ended it; 75 (or CODE of -E) if the lock is busy, 76 if the lease
was lost, 77 if it was lost and the command worked on, since this user may not end it, 69 if no server answers, 64 for a
bad option, 126 or 127 if the command cannot be run.

The command finds INTERLOCK_NAME and INTERLOCK_FENCE in its environment: send the fence with what it writes. If the
lease cannot be renewed, the command gets SIGTERM before the lease ends, and SIGKILL if it is still there then: also if
this process was stopped or killed meanwhile."""


@dataclass(frozen=True)
class Choice:
    """Which lease the options ask for."""

    names: Sequence[str]
    shared: bool
    exclusive: bool
    limit: int | None
    ttl: float
    fair: bool
    once: bool
    at_least: float
    at_most: float | None
    key: str | None

    def check(self) -> None:
        """Raise ConfigError for options that do not go together."""
        kinds = {"-s": self.shared, "-x": self.exclusive, "--limit": self.limit is not None, "--once": self.once}
        if len(self.names) > MAX_NAMES:
            raise ConfigError(
                f"{len(self.names)} names are too many: a run takes {MAX_NAMES} at most. Take one lock for all of what "
                "the command changes, or let it change less at a time"
            )
        given = [option for option, is_given in kinds.items() if is_given]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} and {given[1]} do not go together: each asks for another kind of lock")
        if given and len(self.names) > 1:
            raise ConfigError(f"{given[0]} takes one name, not {len(self.names)}: several names are several locks")
        if self.once and self.at_most is None:
            raise ConfigError("--once needs --at-most SECONDS: how long the command may take")
        if not self.once and (self.at_least or self.at_most is not None or self.key is not None):
            raise ConfigError("--at-least, --at-most and --key belong to --once")
        if self.once and self.fair:
            raise ConfigError("--fair is for those who wait, and nobody waits for --once")

    def lockable(self, locks: Interlock) -> Any:
        """What is to be acquired. Raises ConfigError."""
        (name, *more), ttl = self.names, self.ttl
        if self.shared:
            return locks.rwlock(name, ttl=ttl).read()
        if self.exclusive:
            return locks.rwlock(name, ttl=ttl).write()
        if self.limit is not None:
            return locks.semaphore(name, self.limit, ttl=ttl)
        lock = locks.lock(name, ttl=ttl, fair=self.fair)
        return locks.multi(lock, *(locks.lock(each, ttl=ttl, fair=self.fair) for each in more)) if more else lock


@app.command("run", epilog=EPILOG)
def run(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="The lock; several names (up to 100): all of them or none.")
    ],
    *,
    nonblock: Annotated[
        bool, typer.Option("-n", "--nonblock", help="Do not wait: exit with 75 if it is busy.")
    ] = False,
    wait: Annotated[float | None, typer.Option("-w", "--wait", metavar="SECONDS", help="Wait so long at most.")] = None,
    exclusive: Annotated[
        bool, typer.Option("-x", "--exclusive", help="As the one writer of a read-write lock.")
    ] = False,
    shared: Annotated[bool, typer.Option("-s", "--shared", help="As one of the readers of a read-write lock.")] = False,
    conflict: Annotated[
        int,
        typer.Option("-E", "--conflict-exit-code", metavar="CODE", min=0, max=255, help="Exit status if it is busy."),
    ] = EX_TEMPFAIL,
    command: Annotated[
        str | None, typer.Option("-c", "--command", metavar="TEXT", help="A command for the shell.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Let N run at a time: a semaphore.")] = None,
    ttl: Annotated[
        float, typer.Option(metavar="SECONDS", help="When the lock of a machine that died is free. Renewed meanwhile.")
    ] = DEFAULT_TTL,
    grace: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="From SIGTERM to the end of the lease. Default: 5 s, or a third of ttl."),
    ] = None,
    fair: Annotated[bool, typer.Option("--fair", help="Strict order of arrival.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Run on one machine only; elsewhere exit with 0.")] = False,
    at_least: Annotated[float, typer.Option(metavar="SECONDS", help="--once: no other run begins so soon.")] = 0.0,
    at_most: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="--once: how long the command may take.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="TEXT", help="--once: once for each TEXT, such as a date.")] = None,
    url: Urls = None,
    prefix: Prefix = "lock:",
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what happens, on stderr.")] = False,
) -> int:
    """Run a command under a lock, as flock(1) does, on all machines that share a server."""
    ttl = duration(ttl, "--ttl", minimum=MIN_TTL, maximum=MAX_TTL)
    choice = Choice(names, shared, exclusive, limit, ttl, fair, once, at_least, at_most, key)
    choice.check()
    argv = _argv(command, context.obj)
    _refuse_what_cannot_be_ended(argv[0])
    if wait is not None and nonblock:
        raise ConfigError("-n does not wait, and -w waits: give one of them")
    timeout = 0.0 if nonblock else wait if wait is None else duration(wait, "--wait")

    def tell(text: str) -> None:
        if verbose:
            print(f"interlock: {safe(text)}", file=sys.stderr, flush=True)

    with connect(url, prefix, "interlock run", registry=True) as locks:
        # No argument, and no text for a shell: they may be secret, and all users of the server read this.
        locks._session.registry.place = f"interlock run {f'-- {argv[0]}'[:MAX_SAID] if command is None else '-c'}"
        lockable = None if once else choice.lockable(locks)
        try:
            with Runner(argv, names, _grace(grace, min(at_most or ttl, ttl))) as runner:
                status = _run_once(locks, choice, runner, tell) if once else _run(lockable, timeout, runner, ttl, tell)
        except AcquireTimeout as busy:
            tell(_in_words_of_a_shell(str(busy), names))
            return conflict
        except Interrupted as interrupted:
            return interrupted.status
    runner.die_as_the_command()
    return status


def _in_words_of_a_shell(text: str, names: Sequence[str]) -> str:
    """The text of an error, with commands as the way out instead of methods."""
    name = shlex.quote(names[0]) if len(names) == 1 else "NAME"
    shown = text.replace("see .inspect()", f"see `interlock show {name}`")
    forced = f"`interlock revoke {name} --reason 'I know' --force`"
    return shown.replace('.revoke("I know", force=True)', forced)


def _argv(command: str | None, words: list[str] | None) -> list[str]:
    """The command and its arguments. Raises ConfigError."""
    if (command is None) == (not words or not words[0]):
        example = "interlock run stock -- ./import.py --all"
        raise ConfigError(f"say what to run, behind -- or with -c, as in: {example}")
    return words or [os.environ.get("SHELL") or "/bin/sh", "-c", str(command)]


def _refuse_what_cannot_be_ended(program: str) -> None:
    """Raise ConfigError for a program that may become another user's, as sudo does, if this user may not signal that.

    What is known before: the setuid bit. The kernel ignores it on scripts, and under the mount option nosuid.
    """
    found = shutil.which(program)
    if found is None or _may_signal_all_users():
        return
    path = Path(found)
    try:
        status, file_system = path.stat(), os.statvfs(path)
    except OSError:  # it has gone: the command cannot be run
        return
    if not status.st_mode & stat.S_ISUID or status.st_uid in {os.getuid(), os.geteuid()}:
        return
    if file_system.f_flag & os.ST_NOSUID or _is_script(path):
        return
    raise ConfigError(
        f"{path} becomes user {status.st_uid} (setuid), whose processes user {os.geteuid()} may not signal: after a "
        "loss nobody would end the command, and it would work on beside the next holder. Give interlock the same "
        "rights, as in: sudo interlock run --url URL NAME -- COMMAND"
    )


def _may_signal_all_users() -> bool:
    try:
        (rights,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:")]
        return bool(int(rights.split()[1], 16) >> CAP_KILL & 1)
    except (OSError, ValueError):  # not Linux
        return os.geteuid() == 0


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:  # it may be run, and not be read
        return False


def _grace(grace: float | None, ttl: float) -> float:
    if grace is None:
        return min(MAX_GRACE, ttl / 3)
    if not 0 < grace <= ttl / 2:
        raise ConfigError(
            f"--grace must be more than 0 and at most half of the ttl ({ttl / 2:g} s), not {grace:g}: the lease is "
            "renewed when a third of its ttl has passed"
        )
    return grace


def _run(lockable: Any, timeout: float | None, runner: Runner, ttl: float, tell: Any) -> int:
    lease = lockable.acquire(timeout=timeout)
    try:
        tell(f"acquired {lease.name}, fence {lease.fence}")
        return runner.run(lease, ttl)
    finally:
        with contextlib.suppress(Unavailable):  # the command has ended under the lease, which then ends by itself
            lease.release()


def _why_skipped(skipped: Skipped) -> str:
    if skipped.started is None:
        return f"{skipped.name!r} is in quarantine" if skipped.quarantined else f"{skipped.name!r} runs elsewhere"
    started, ended = (f"{at.astimezone():{TIME}}" if at else "" for at in (skipped.started, skipped.ended))
    return f"{skipped.by or 'somebody'} " + (
        f"ran it from {started} to {ended}" if ended else f"runs it since {started}"
    )


class _Failed(Exception):  # noqa: N818 (a state of the run)
    """The command of a --once has failed, so it has not run for its key."""


def _run_once(locks: Interlock, choice: Choice, runner: Runner, tell: Any) -> int:
    assert choice.at_most is not None
    once = Once(
        locks,
        *locks._once(
            choice.names[0],
            at_most=choice.at_most,
            at_least=choice.at_least,
            key=choice.key,
            keep=MONTH,
            ttl=choice.ttl,
        ),
    )
    status = 0

    def work(lease: Any) -> None:
        nonlocal status
        status = runner.run(lease, choice.ttl)
        if status:
            raise _Failed

    try:
        ran = once.run(work)
        if isinstance(ran, Skipped):
            tell(f"skipped: {_why_skipped(ran)}")
    except (_Failed, LeaseLost):
        return status
    return status
