"""The command `interlock doctor`."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.text import Text

from interlock._doctor.checks import Finding, Level, by_level, findings
from interlock._protocol.names import duration
from interlock._protocol.timing import MAX_TTL
from interlock.cli.options import AsJson, Prefix, Urls, connect, require_url
from interlock.cli.output import console, print_json, quiet, safe

from .trial import try_it

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
COLOURS: Final = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.DANGER: "bold red"}
FOUND: Final = 1  # the exit status if anything is a danger

EPILOG = """\b
interlock doctor                                  the server of $INTERLOCK_URL
interlock doctor --url redis+sentinel://h1,h2,h3/0?service=mymaster
interlock doctor --url redis://a --url redis://b --url redis://c     a quorum

Exit status: 0, or 1 if anything is a danger (with --strict: or a warning), 64 for a bad option. It changes nothing, but
for a lock of its own name, which expires."""


@app.command("doctor", epilog=EPILOG)
def doctor(
    *,
    url: Urls = None,
    prefix: Prefix = "lock:",
    max_ttl: Annotated[float, typer.Option(metavar="SECONDS", help="The max_ttl of your Interlock.")] = MAX_TTL,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
    as_json: AsJson = False,
) -> int:
    """Say what endangers locks on these servers, and what to set."""
    from interlock._doctor.facts import ask  # noqa: PLC0415  # imports redis-py, which --help does without

    max_ttl = duration(max_ttl, "--max-ttl")
    urls = url or []
    require_url(*urls)
    with quiet():  # what the log would say is a finding
        facts = ask(urls, prefix)
        found = findings(facts, max_ttl=max_ttl, prefix=prefix)
        if 2 * sum(not server.error for server in facts.servers) > len(facts.servers):
            with connect(urls, prefix, "interlock doctor") as locks:
                found += try_it(locks, denied=any("registry" in server.missing for server in facts.servers))
    found = by_level(found)
    if as_json:
        print_json([finding.as_json() for finding in found])
    else:
        _print(found)
    bad = {Level.DANGER, Level.WARNING} if strict else {Level.DANGER}
    return FOUND if any(finding.level in bad for finding in found) else 0


def _print(found: list[Finding]) -> None:
    out = console()
    for finding in found:
        level = (f"{finding.level:<8}", COLOURS[finding.level])
        out.print(Text.assemble(level, f" {safe(finding.subject)} {safe(finding.text)}"))
        if finding.advice:
            out.print(Text(f"{'':<9}→ {safe(finding.advice)}"))
