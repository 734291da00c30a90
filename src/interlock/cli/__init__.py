"""The command line. The extra `cli` installs the libraries that it needs.

Each worker process of the demo imports this module, so it imports neither typer nor rich; `app` has the commands.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final

from interlock.cli.exit_status import EX_UNAVAILABLE, INTERRUPTED
from interlock.cli.stderr import wait_for_nobody

__all__ = ["main"]

WITHOUT_TYPER: Final = (
    "the command line needs typer and rich: pip install typer rich, or '.[cli]' in a checkout of interlock"
)


def main() -> None:
    """Run the command line, and exit with the command's status, or with 64 after a bad option."""
    _open_standard_streams()
    if sys.argv[1:2] == ["run"]:
        wait_for_nobody()
    try:
        sys.exit(_run())
    except KeyboardInterrupt:  # before or after `app.run`, which handles its own
        sys.exit(INTERRUPTED)


def _open_standard_streams() -> None:
    """Open the closed ones (`>&-` closes one): else a socket would get that number, and a command the socket."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    stdout: Any = sys.stdout
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="backslashreplace")  # a name may have characters that its encoding lacks


def _run() -> int:
    try:
        from interlock.cli.app import run  # noqa: PLC0415  # so that the message below can replace an ImportError
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        print(f"interlock: {WITHOUT_TYPER}", file=sys.stderr)
        return EX_UNAVAILABLE
    if signal.getsignal(signal.SIGINT) not in {signal.SIG_IGN, signal.default_int_handler}:  # that of `_interlock_cli`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
