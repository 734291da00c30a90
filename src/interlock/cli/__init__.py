"""The command line: `interlock demo`, `interlock server`. The extra `cli` installs the libraries that it needs.

Each worker process of the demo imports this module, so it imports neither typer nor rich; `app` has the commands.
"""

from __future__ import annotations

import sys

from interlock.cli.exit_status import EX_UNAVAILABLE

__all__ = ["main"]


def main() -> None:
    """Run the command line, and exit with the command's status, or with 64 after a bad option."""
    try:
        from interlock.cli.app import run  # noqa: PLC0415  # so that the message below can replace an ImportError
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        print("interlock: the command line needs typer and rich: pip install 'interlock[cli]'", file=sys.stderr)
        sys.exit(EX_UNAVAILABLE)
    sys.exit(run())
