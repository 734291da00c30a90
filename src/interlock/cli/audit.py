"""`interlock audit`: who revoked what, whom, when, why, and with what result."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.text import Text

from interlock._people.revocation import audit as audited
from interlock._protocol.run_to_end import run
from interlock.cli.options import TIME, AsJson, Urls, connect
from interlock.cli.output import console, print_json, print_rows, safe
from interlock.primitives.kinds import kind_named

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
UNKNOWN: Final = "unknown: the process that revoked has said nothing since it asked"
EPILOG = """\b
interlock audit                 the last twenty revocations on this server
interlock audit stock:42 -n 3
interlock audit --json | jq -r '.[] | [.at, .name, .by, .reason] | @tsv'

The server keeps about the last thousand, for 90 days after the last one. Its clock says when.

Exit status: 0 (also if there is none), 64 for a bad option, 69 if no server answers."""


@app.command("audit", epilog=EPILOG)
def audit(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only those of this name.")] = None,
    *,
    number: Annotated[int, typer.Option("-n", "--number", metavar="N", min=1, max=2000, help="The last N.")] = 20,
    url: Urls = None,
    as_json: AsJson = False,
) -> int:
    """Say who revoked what, whom, when, why, and with what result; the newest first."""
    with connect(url, "lock:", "interlock audit") as locks:
        found = run(audited(locks._session.core, name, number))
    if as_json:
        print_json([asdict(each) | {"at": each.at.isoformat()} for each in found])
        return 0
    out = console()
    if not found:
        print("nobody has revoked anything" + (f" named {safe(name)}" if name is not None else ""))
    for each in found:
        at = each.at.astimezone()
        out.print(Text.assemble((f"{at:{TIME}}", "dim"), "  ", (safe(each.name), "bold"), f"  {safe(each.kind)}"))
        whom = ", ".join(each.holders) or ("nobody" if kind_named(each.kind).has_holders else "its waiters")
        more = f", and {each.holding - len(each.holders)} more" if each.holding > len(each.holders) else ""
        print_rows(
            out,
            [
                ("by", each.by),
                ("from", whom + more),
                ("reason", each.reason),
                ("result", ("by force: " if each.forced else "") + (each.result or UNKNOWN)),
            ],
        )
    return 0
