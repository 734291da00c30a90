"""The commands by name. A command that fails prints one line to stderr, and its exit status says why it failed."""

from __future__ import annotations

import json
import logging
import signal
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from interlock import __version__
from interlock.cli.escape import discard_output, safe
from interlock.cli.exit_status import EX_IOERR, EX_UNAVAILABLE, EX_USAGE, INTERRUPTED
from interlock.cli.options import AsJson  # noqa: TC001 (typer reads the annotations)
from interlock.errors import ConfigError, LockError

__all__ = ["app", "run"]

PROGRAM: Final = "interlock"
A_QUORUM: Final = "--url for each server of a quorum"  # for people at a shell, in place of the API's words
MODULES: Final = {  # by command, in the order of the help: imported when the command is named
    "run": ("interlock.cli.run.command", "Run a command under a lock, as flock does, on many machines."),
    "ls": ("interlock.cli.ls", "List what processes hold and wait for, and where in their code."),
    "top": ("interlock.cli.top.command", "Show what is held and awaited, live, and who waits for whom."),
    "show": ("interlock.cli.show", "Say who holds a name, since when and where, and who waits."),
    "web": ("interlock.cli.web.command", "Serve the live page: every lock of a fleet in a browser."),
    "wait": ("interlock.cli.wait", "Wait until nobody holds a name, without acquiring it."),
    "revoke": ("interlock.cli.revoke", "Take a name from its holder: ask, or with --force take it."),
    "audit": ("interlock.cli.audit", "Say who revoked what, whom, when and why."),
    "doctor": ("interlock.cli.doctor.command", "Say what endangers locks on your servers, and what to set."),
    "quorum": ("interlock.cli.quorum.command", "Say which servers of a quorum count, and let new ones count."),
    "demo": ("interlock.cli.demo.commands", "Every lock and semaphore recipe on a real server."),
    "server": ("interlock.cli.server", "Start, stop or describe the embedded server."),
    "completion": ("interlock.cli.completion.command", "Print the script that completes words in bash, zsh or fish."),
}


class Commands(TyperGroup):
    """Imports the module of a command when the command is named, so that each command starts fast."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (as click calls it)
        """The names, for the help."""
        return list(MODULES)

    def summaries(self) -> list[tuple[str, str]]:
        """The names with what each command does, without importing it."""
        return [(name, line) for name, (_, line) in MODULES.items()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command of this name, or None."""
        if cmd_name not in MODULES:
            return None
        module, help_line = MODULES[cmd_name]
        command = typer.main.get_command(import_module(module).app)
        command.name, command.short_help = cmd_name, help_line
        return command


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,  # plain text: a pager can search it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def interlock(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Distributed locks on Redis and Valkey: queued, renewed, fenced, woken by push."""
    if version:
        print(json.dumps({"version": __version__}) if as_json else f"interlock {__version__}")
        raise typer.Exit
    if as_json:
        raise ConfigError("--json stands behind its command, as in: interlock ls --json")
    if context.invoked_subcommand is None:
        print(context.get_help())


def run() -> int:
    """Run the command that `sys.argv` names, and return its exit status."""
    try:
        status = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `interlock ls | head -1`
        discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:  # a full disk, a terminal that is gone
        discard_output()
        return _complain(str(error), EX_IOERR)
    return status


def _run() -> int:
    words, command = sys.argv[1:], None
    if words[:1] == ["__complete"]:  # a shell, whose user has pressed Tab
        from interlock.cli.completion.answer import complete  # noqa: PLC0415

        complete(typer.main.get_command(app), words[1:])
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaped("interlock: %(message)s"))
    logging.basicConfig(handlers=[handler])
    if words[:1] == ["run"] and "--" in words:  # the words after it belong to the user's command
        end = words.index("--")
        words, command = words[:end], words[end + 1 :]
    try:
        status = app(words, prog_name=PROGRAM, standalone_mode=False, obj=command)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except ConfigError as error:
        return _complain(str(error).replace("Interlock.quorum([url, url, url])", A_QUORUM), EX_USAGE)
    except LockError as error:
        return _complain(str(error), EX_UNAVAILABLE)
    except Exception as error:
        # A usage error: some versions of typer define its class, others take it from click.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        text = message().replace(" (env var: 'None')", "")  # click 8.2 names a variable that there is not
        of = " ".join([PROGRAM, *(word for word in words[:1] if word in MODULES)])
        return _complain(f"{text}{'' if text.endswith(('.', '?')) else '.'} See `{of} --help`", EX_USAGE)
    return status if isinstance(status, int) else 0


def _complain(message: str, status: int) -> int:
    """Print an error on one line, and return the exit status."""
    print(f"interlock: {safe(' '.join(message.split()))}", file=sys.stderr)
    return status


class _Escaped(logging.Formatter):
    """Escapes the text of a record, of which others may have written a part: it stays one line, and moves no cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging calls it so)
        record.message = record.message.removeprefix("interlock: ")  # some records begin so, for the logs of users
        return safe(super().formatMessage(record))
