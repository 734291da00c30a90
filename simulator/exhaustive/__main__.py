"""The exhaustive search from the command line: `python -m simulator.exhaustive --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import interlock

from . import FULL, SUITE, Found, search
from . import orders as _orders
from .stories import COHORT, FULL_COHORT, FULL_RESTARTS, RESTARTS

GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quorum": (SUITE, FULL),
    "restarts": (RESTARTS, FULL_RESTARTS),
    "cohort": (COHORT, FULL_COHORT),
}


def main(argv: list[str] | None = None) -> int:
    """Run the searches, and print the results. Returns the exit status: 1 if a promise is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator.exhaustive",
        description="Search every order of events, within bounds.\n"
        "  quorum    the quorum's protocol: two clients, three servers, late messages, copies, restarts\n"
        "  restarts  real clients of one server that restarts: slow messages, stops, the quarantine\n"
        "  cohort    threads of one real client that pass a lease on: renewals, commands, revocations\n"
        "The servers run the real Lua script.",
        epilog="Each search prints one line, and the shortest story of a broken promise if there is one.\n"
        "exit status: 0 no promise is broken, 1 one is",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("groups", metavar="GROUP", nargs="*", help=f"only these: {', '.join(GROUPS)}")
    parser.add_argument(
        "--full", action="store_true", help="search within wider bounds: many minutes, and gigabytes of memory"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="run only searches with this text in their name")
    parser.add_argument(
        "--most",
        metavar="N",
        type=int,
        default=10_000_000,
        help="end a search after so many states (default: 10,000,000)",
    )
    parser.add_argument(
        "--seconds", metavar="N", type=float, default=1e9, help="of restarts and cohort: end a search after so long"
    )
    chosen = parser.parse_args(argv)
    if unknown := [each for each in chosen.groups if each not in GROUPS]:
        parser.error(f"{unknown[0]!r} is none of: {', '.join(GROUPS)}")
    groups: list[str] = chosen.groups or list(GROUPS)
    full: bool = chosen.full
    wanted = [
        (group, name, bounds) for group in groups for name, bounds in GROUPS[group][full].items() if chosen.only in name
    ]
    if not wanted:
        names = [name for group in groups for name in GROUPS[group][full]]
        parser.error(f"argument --only: {chosen.only!r} is in the name of none of: {', '.join(names)}")
    sys.stderr.write(f"searching {Path(interlock.__file__).parent}\n")
    status = 0
    for group, name, bounds in wanted:
        if group == "quorum":
            found: Found | _orders.Found = search(bounds, most=chosen.most)
        else:
            found = _orders.search(bounds, most=chosen.most, most_seconds=chosen.seconds, say=_show_progress)
        sys.stdout.write(f"{group}, {name}: {describe(found)}\n")
        sys.stdout.flush()
        status |= bool(found.broken)
    return status


def _show_progress(text: str) -> None:
    """Show how far a search is, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}\r")
        sys.stderr.flush()


def describe(found: Found | _orders.Found) -> str:
    """Return the result of a search as text."""
    result = "no promise is broken" if found.complete else "no promise is broken so far"
    if found.broken:
        result = "\n".join(["", *found.story])
    depth = f"depth {found.depth}, " if isinstance(found, _orders.Found) else ""
    return f"{found.states:,} states, {found.transitions:,} steps, {depth}{found.seconds:.1f} s of CPU: {result}"


if __name__ == "__main__":
    sys.exit(main())
