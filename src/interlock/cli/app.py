"""The commands by name. A command that fails prints one line to stderr, and its exit status says why it failed."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from interlock import __version__
from interlock.cli.demo.commands import app as demo
from interlock.cli.exit_status import EX_UNAVAILABLE, EX_USAGE, INTERRUPTED
from interlock.cli.run.command import EPILOG as RUN_EPILOG
from interlock.cli.run.command import run as run_command
from interlock.cli.server import app as server
from interlock.errors import ConfigError, LockError

__all__ = ["app", "run"]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # plain text: a pager can search it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(demo, name="demo", short_help="Every lock and semaphore recipe on a real server.")
app.add_typer(server, name="server", short_help="Start, stop or describe the embedded server.")
app.command("run", epilog=RUN_EPILOG)(run_command)


@app.callback(invoke_without_command=True)
def interlock(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Distributed locks on Redis and Valkey: queued, renewed, fenced, woken by push."""
    if version:
        print(f"interlock {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run() -> int:
    """Run the command that `sys.argv` names, and return its exit status."""
    logging.basicConfig(format="interlock: %(message)s")
    words, command = sys.argv[1:], None
    if words[:1] == ["run"] and "--" in words:  # what stands behind it is not ours to read
        end = words.index("--")
        words, command = words[:end], words[end + 1 :]
    try:
        status = app(words, prog_name="interlock", standalone_mode=False, obj=command)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except ConfigError as error:
        return _complain(str(error), EX_USAGE)
    except LockError as error:
        return _complain(str(error), EX_UNAVAILABLE)
    except Exception as error:
        # A usage error: some versions of typer define its class, others take it from click.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _complain(message(), EX_USAGE)
    return status if isinstance(status, int) else 0


def _complain(message: str, status: int) -> int:
    """Print an error on one line, and return the exit status."""
    print(f"interlock: {' '.join(message.split())}", file=sys.stderr)
    return status
