"""`interlock ls`: what all processes hold and wait for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from interlock.cli.lookup import look_at_all
from interlock.cli.options import AsJson, OnlyPrefix, Pattern, Urls, connect
from interlock.cli.output import callers, console, moves, print_json, print_table, span

if TYPE_CHECKING:
    from interlock.primitives.registry import Listed, Party

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

EPILOG = """\b
interlock ls                     everything that a process holds or waits for
interlock ls 'stock:*'           a pattern as in a shell: * ? [abc]
interlock ls --json | jq -r '.[] | select(.waiters != []) | .name'

Processes say which names they use, when something has changed and every few seconds; the server says who holds these
names and who waits. It does not list names that only clients of other libraries use, or only processes whose Interlock
has registry=False, and sections that end within a second or two. MOVES: N/s, the waiters that the server serves in a
second. STUCK: others wait, and nobody was granted it for ten times as long as usual (30 s, if nobody knows).

Exit status: 0 (also if there is nothing), 64 for a bad option, 69 if no server answers."""


@app.command("ls", epilog=EPILOG)
def ls(
    pattern: Pattern = "*",
    *,
    prefix: OnlyPrefix = None,
    url: Urls = None,
    as_json: AsJson = False,
) -> int:
    """List what processes hold and wait for: by name, with the holder, since when, and where in its code."""
    with connect(url, "lock:", "interlock ls") as locks:
        found = [each for each in look_at_all(locks, pattern) if prefix is None or each.prefix == prefix]
    if as_json:
        print_json([asdict(each) for each in found])
        return 0
    if not found:
        print("no process says that it holds anything or waits" + ("" if pattern == "*" else " for such a name"))
        return 0
    # A prefix of its own is worth a column only where it says something.
    has_prefixes = prefix is None and any(each.prefix != "lock:" for each in found)
    heads = ["NAME", "KIND", "HOLDER", "FOR", "WAITING", "MOVES", "AT"]
    rows = [_row(each) for each in found]
    if has_prefixes:
        heads = ["PREFIX", *heads]
        rows = [[each.prefix, *row] for each, row in zip(found, rows, strict=True)]
    print_table(console(), heads, rows)
    return 0


def _row(listed: Listed) -> list[str]:
    holders = listed.holders
    first = holders[0] if holders else None
    more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
    handover = "" if first is None or first.confirmed else "handing over to "
    return [
        listed.name,
        listed.kind,
        "-" if first is None else f"{handover}{first.who}{more}",
        "-" if first is None else span(first.seconds),
        callers(listed.processes, listed.waiting),
        moves(listed.motion, listed.handovers, listed.unchanged),
        "" if first is None else _where(first),
    ]


def _where(party: Party) -> str:
    if party.gone:
        return f"{party.place} (its process has ended)"
    silent = f" (its process has not reported for {span(party.reported_ago)})" if party.is_silent else ""
    return f"{party.place}{silent}"
