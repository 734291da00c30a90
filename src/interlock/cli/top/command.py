"""The command `interlock top`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from interlock._protocol.names import duration
from interlock.cli.options import AsJson, OnlyPrefix, Pattern, Urls  # noqa: TC001 (typer reads the annotations)
from interlock.cli.output import console, print_json
from interlock.cli.top.data import Source

if TYPE_CHECKING:
    from rich.console import Console

    from interlock.cli.top.data import Snapshot

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
MIN_INTERVAL: Final = 0.2  # seconds
MAX_INTERVAL: Final = 86400.0
PLAIN_WIDTH: Final = 200  # columns of a snapshot that no terminal shows: nothing is cut off that a person could read

EPILOG = """\b
interlock top                    everything, live; q ends it, ? explains the keys
interlock top 'stock:*'          a pattern as in a shell: * ? [abc]
interlock top --once             one snapshot as plain text; so without a terminal, too
interlock top --json | jq '.deadlocks'

The server says who holds and who waits; processes say where in their code, some seconds late. `interlock ls --help`
says what is missing. Callers that wait for each other stand at the top, then what is stuck.

Exit status: 0, 64 for a bad option, 69 if no server answers (only without a live view, which waits for it), 130 after
Ctrl-C. It changes nothing."""


@app.command("top", epilog=EPILOG)
def top(
    pattern: Pattern = "*",
    *,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two questions to the server.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot as plain text, and end.")] = False,
    prefix: OnlyPrefix = None,
    url: Urls = None,
    as_json: AsJson = False,
) -> int:
    """Show what is held and awaited, live: who, for how long, where in the code, and who waits for whom."""
    interval = duration(interval, "--interval", minimum=MIN_INTERVAL, maximum=MAX_INTERVAL)
    source = Source(url or (), pattern, prefix)
    out = console(soft_wrap=False)
    try:
        if as_json:
            print_json(source.gather().as_json())
        elif once or not sys.stdin.isatty() or not out.is_terminal or out.is_dumb_terminal:
            _print(out, source.gather())
        else:
            from interlock.cli.top.screen import show_live  # noqa: PLC0415  # it needs a terminal, which others lack

            return show_live(source, interval)
    finally:
        source.close()
    return 0


def _print(out: Console, snapshot: Snapshot) -> None:
    from interlock.cli.top.view import State, draw, rows_of  # noqa: PLC0415  # --json draws nothing

    width = out.width if out.is_terminal else PLAIN_WIDTH
    rows = rows_of(State(), snapshot)
    members = sum(1 + sum(2 + len(each.holds) for each in found.members) for found in snapshot.deadlocks)
    lines = draw(State(), snapshot, width, len(rows) + 2 * members + 8, snapshot.taken_at)
    text = [line for line in lines[:-1] if line.plain]  # the last line explains keys
    for line in text:
        out.print(line, no_wrap=True, crop=False, soft_wrap=True)
