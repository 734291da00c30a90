"""Where the command `interlock` begins: beside the package, whose import takes a tenth of a second.

Ctrl-C during that import ends the process silently. As a KeyboardInterrupt it would be printed with its traceback, or
be swallowed by a callback of the import system.
"""

from __future__ import annotations

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line. See `interlock.cli.main`, which makes Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a background job of sh
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))
    from interlock.cli import main as command_line  # noqa: PLC0415

    command_line()
