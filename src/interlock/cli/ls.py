"""`interlock ls`: what all processes hold and wait for, as they say themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from interlock.cli.options import AsJson, OnlyPrefix, Pattern, Urls, connect
from interlock.cli.output import console, print_json, print_table, span

if TYPE_CHECKING:
    from interlock.primitives.registry import Listed, Party

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

EPILOG = """\b
interlock ls                     everything that a process holds or waits for
interlock ls 'stock:*'           a pattern as in a shell: * ? [abc]
interlock ls --json | jq -r '.[] | select(.waiters != []) | .name'

Each process says this itself, when something has changed and every few seconds; one that has died is listed for a
minute more. It does not list clients of other libraries, processes whose Interlock has registry=False, and sections
that end within a second or two. `interlock show NAME` asks the lock itself.

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
        found = [each for each in locks.ls(pattern) if prefix is None or each.prefix == prefix]
    if as_json:
        print_json([asdict(each) for each in found])
        return 0
    if not found:
        print("no process says that it holds anything or waits" + ("" if pattern == "*" else " for such a name"))
        return 0
    # A prefix of its own is worth a column only where it says something.
    has_prefixes = prefix is None and any(each.prefix != "lock:" for each in found)
    heads = ["NAME", "KIND", "HOLDER", "FOR", "WAITERS", "AT"]
    rows = [_row(each) for each in found]
    if has_prefixes:
        heads = ["PREFIX", *heads]
        rows = [[each.prefix, *row] for each, row in zip(found, rows, strict=True)]
    print_table(console(), heads, rows)
    return 0


def _row(listed: Listed) -> list[str]:
    holders, waiters = listed.holders, listed.waiters
    first = holders[0] if holders else None
    more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
    return [
        listed.name,
        listed.kind,
        "-" if first is None else f"{first.who}{more}",
        "-" if first is None else span(first.seconds),
        str(len(waiters)),
        "" if first is None else _where(first),
    ]


def _where(party: Party) -> str:
    silent = f" (its process has not reported for {span(party.reported_ago)})" if party.is_silent else ""
    return f"{party.place}{silent}"
