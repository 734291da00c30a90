"""The terminal of `interlock top`: takes it over, draws, reads keys, and gives it back as it was, whatever happens.

Rules. (a) The terminal is given back before anything else ends: by q, Ctrl-C, SIGTERM, SIGHUP or an error. (b) Ctrl-Z
gives it back, too, and takes it over again when the process goes on. (c) A signal handler only writes to a pipe; the
loop does the work. (d) While the screen is ours, nothing else writes to it: log records are dropped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group
from rich.live import Live

from interlock.cli.output import quiet
from interlock.cli.top.data import Gatherer
from interlock.cli.top.keys import keys
from interlock.cli.top.view import State, draw, press, settled

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

    from interlock.cli.top.data import Source

__all__ = ["show_live"]

REDRAW_INTERVAL: Final = 1.0  # seconds after which the screen is drawn again, since everything has grown older


class _Ended(BaseException):
    """A signal ends the program."""


def show_live(source: Source, interval: float) -> int:
    """Show the view until the person quits. Returns the exit status."""
    out = Console(highlight=False, markup=False, emoji=False)  # NO_COLOR leaves it the bar of the selected row
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)

    def wake() -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: the view has ended
            os.write(write_end, b"\0")

    gatherer = Gatherer(source, interval, wake)
    try:
        with quiet(), _signals(write_end), _Screen(out) as screen:
            gatherer.start()
            _Loop(screen, gatherer, read_end).run()
    except _Ended as ended:
        return 128 + int(ended.args[0])
    return 0


class _Screen:
    """The terminal, taken over."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.input = sys.stdin.fileno()
        self.before: list[Any] = []
        self.live: Live | None = None

    def __enter__(self) -> Self:
        self.before = termios.tcgetattr(self.input)
        try:
            tty.setcbreak(self.input)  # signals of keys stay
            # A Live of its own each time: it remembers where the cursor was.
            self.live = Live(
                console=self.out, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self.live.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            try:
                if self.live is not None:
                    self.live.stop()
            finally:
                termios.tcsetattr(self.input, termios.TCSADRAIN, self.before)

    def show(self, *lines: Any) -> None:
        """Draw these lines."""
        assert self.live is not None
        self.live.update(Group(*lines), refresh=True)

    def suspend(self) -> None:
        """Give the terminal back, stop this process as Ctrl-Z does, and go on once somebody lets it."""
        self.__exit__()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self.__enter__()


class _Loop:
    """Draws when there is something new, and does what keys say."""

    def __init__(self, screen: _Screen, gatherer: Gatherer, wakeups: int) -> None:
        self.screen = screen
        self.gatherer = gatherer
        self.wakeups = wakeups
        self.state = State()

    def run(self) -> None:
        """Until the person quits."""
        while not self.state.quits:
            snapshot = self.gatherer.latest
            self.state = settled(self.state, snapshot)
            width, height = self.screen.out.size
            self.screen.show(*draw(self.state, snapshot, width, height, time.monotonic()))
            ready, _, _ = select.select([self.screen.input, self.wakeups], [], [], REDRAW_INTERVAL)
            if self.wakeups in ready:
                self._heed(os.read(self.wakeups, 4096))
            if self.screen.input in ready:
                sent = os.read(self.screen.input, 4096)
                if not sent:
                    raise _Ended(signal.SIGHUP)
                for key in keys(sent):
                    self._press(key, height)

    def _press(self, key: str, height: int) -> None:
        before = self.state
        self.state = press(before, key, self.gatherer.latest, height)
        wanted = self.state.selected if self.state.page == "details" else None
        if (key == "r" and before.typing is None) or wanted != self.gatherer.details:
            self.gatherer.hurry(wanted)

    def _heed(self, sent: bytes) -> None:
        """Do what the signals ask for whose numbers these are."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in sent:
                raise _Ended(number)
        if signal.SIGTSTP in sent:
            self.screen.suspend()


@contextlib.contextmanager
def _signals(wakeups: int) -> Generator[None]:
    """Let signals write their numbers there, so that the loop wakes and handles them."""

    def handle(_number: int, _frame: FrameType | None) -> None: ...

    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH]
    before = [(number, signal.signal(number, handle)) for number in numbers]
    fd_before = signal.set_wakeup_fd(wakeups, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before:
            signal.signal(number, handler)
