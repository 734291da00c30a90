"""The exhaustive search from the command line: `python -m simulator.exhaustive --help`."""

from __future__ import annotations

import argparse
import sys

from . import FULL, SUITE, Found, search


def main(argv: list[str] | None = None) -> int:
    """Search, and tell; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator.exhaustive",
        description="Every order of events of a quorum's protocol, within bounds.",
        allow_abbrev=False,
    )
    parser.add_argument("--full", action="store_true", help="wider bounds: many minutes, and gigabytes of memory")
    parser.add_argument("--only", metavar="TEXT", default="", help="only searches with this in their name")
    parser.add_argument("--most", metavar="N", type=int, default=10_000_000, help="states of one search (10,000,000)")
    chosen = parser.parse_args(argv)
    status = 0
    for name, bounds in (FULL if chosen.full else SUITE).items():
        if chosen.only in name:
            found = search(bounds, most=chosen.most)
            sys.stdout.write(f"{name}: {describe(found)}\n")
            sys.stdout.flush()
            status |= bool(found.broken)
    return status


def describe(found: Found) -> str:
    """What was found, for people."""
    result = "no promise is broken" if found.complete else "no promise is broken so far"
    if found.broken:
        result = "\n".join(["", *found.story])
    return f"{found.states:,} states, {found.transitions:,} steps, {found.seconds:.1f} s of CPU: {result}"


if __name__ == "__main__":
    sys.exit(main())
