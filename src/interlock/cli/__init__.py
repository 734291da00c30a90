"""The command line: `interlock demo`, `interlock server`. Everything it needs comes with the extra `cli`.

This module stays light, because each worker process of the demo imports it; the commands are in `app`.
"""

from __future__ import annotations

import sys

from interlock.cli.exit_status import EX_UNAVAILABLE

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits with 0, with what the command says, or with 64 after a bad option."""
    try:
        from interlock.cli.app import run  # noqa: PLC0415  # only here can its absence be told kindly
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        print("interlock: the command line needs typer and rich: pip install 'interlock[cli]'", file=sys.stderr)
        sys.exit(EX_UNAVAILABLE)
    sys.exit(run())
