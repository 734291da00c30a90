"""The exhaustive search from the command line: `python -m simulator.exhaustive --help`."""

from __future__ import annotations

import argparse
import sys

from . import FULL, SUITE, Found, search


def main(argv: list[str] | None = None) -> int:
    """Run the searches, and print the results. Returns the exit status: 1 if a promise is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator.exhaustive",
        description="Search every order of events of the quorum's protocol, within bounds: two clients,\n"
        "three servers, late messages, copies, restarts. The servers run the real Lua script.",
        epilog="Each search prints one line, and the shortest story of a broken promise if there is one.\n"
        "exit status: 0 no promise is broken, 1 one is",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    chosen = parser.parse_args(argv)
    searches = FULL if chosen.full else SUITE
    wanted = [name for name in searches if chosen.only in name]
    if not wanted:
        parser.error(f"argument --only: {chosen.only!r} is in the name of none of: {', '.join(searches)}")
    status = 0
    for name in wanted:
        found = search(searches[name], most=chosen.most)
        sys.stdout.write(f"{name}: {describe(found)}\n")
        sys.stdout.flush()
        status |= bool(found.broken)
    return status


def describe(found: Found) -> str:
    """Return the result of a search as text."""
    result = "no promise is broken" if found.complete else "no promise is broken so far"
    if found.broken:
        result = "\n".join(["", *found.story])
    return f"{found.states:,} states, {found.transitions:,} steps, {found.seconds:.1f} s of CPU: {result}"


if __name__ == "__main__":
    sys.exit(main())
