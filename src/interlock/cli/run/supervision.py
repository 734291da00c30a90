"""The runner's side of the supervisor: starts it, and talks to it."""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import CLOCK

from .supervisor import received, send

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .supervisor import Detail, Setup, Word

__all__ = ["Supervisor"]

PROGRAM: Final = Path(__file__).with_name("supervisor.py")


class Supervisor:
    """The process that ends the command before its lease can end."""

    def __init__(self, argv: Sequence[str], grace: float, *, has_terminal: bool) -> None:
        """Start the supervisor. `has_terminal`: whether the command is to get the terminal."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told, tell = os.pipe()
        for descriptor in (theirs.fileno(), told):
            os.set_inheritable(descriptor, True)
        mine = [sys.executable, "-I", "-S", str(PROGRAM), str(theirs.fileno()), str(told)]
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        # In a group of its own, no key of the terminal reaches it. With all signals blocked, none ends it before it
        # ignores them.
        self.pid = os.posix_spawn(mine[0], mine, os.environ, setpgroup=0, setsigmask=signal.valid_signals())
        theirs.close()
        os.close(told)
        words = [os.fsencode(word) for word in argv]
        setup: Setup = (words, dict(os.environb), grace, CLOCK, has_terminal, blocked)
        with contextlib.suppress(BrokenPipeError), os.fdopen(tell, "wb") as pipe:  # `hear` says that it has died
            pipe.write(marshal.dumps(setup))

    def begin(self, until: float, environment: Mapping[str, str]) -> None:
        """Let it start the command, with these additional variables. Raises OSError if the message is too long."""
        variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        with contextlib.suppress(ConnectionError):  # it has died: `hear` says so
            send(self.socket.fileno(), "begin", until, variables)

    def say(self, word: Word, *details: Detail) -> None:
        """Send a message. A supervisor that has ended hears nothing: `hear` says so."""
        with contextlib.suppress(OSError):
            send(self.socket.fileno(), word, *details)

    def hear(self, within: float) -> tuple[Word, list[Any]] | None:
        """The next message, or None if there is none in so many seconds. Raises EOFError if the supervisor has died."""
        if not select.select([self.socket], [], [], within)[0]:
            return None
        return received(self.socket.fileno())

    def close(self) -> None:
        """Wait for the end of the supervisor: of one without a command at once, else when the command has ended."""
        self.socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
