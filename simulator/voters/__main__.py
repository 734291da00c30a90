"""The search of the quorum's voters from the command line: `python -m simulator.voters --help`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from .search import search
from .worlds import FULL, OUTSIDE, PLANTS, SUITE

if TYPE_CHECKING:
    from .search import Found
    from .worlds import World


def main(argv: list[str] | None = None) -> int:
    """Run the searches, and print the results. Returns the exit status: 1 if a promise of the right rule is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator.voters",
        description="Search every order of events of a small model of who may vote in a quorum, within bounds.",
        epilog="Each search prints one line, and the shortest story of a broken promise if there is one.\n"
        "exit status: 0 no promise of the right rule is broken, 1 one is; with --plants: 1 a wrong rule breaks none",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--full", action="store_true", help="wider bounds: minutes, and gigabytes of memory")
    parser.add_argument("--plants", action="store_true", help="search wrong rules, and what the rule does not promise")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only searches with this text in their name")
    parser.add_argument("--steps", metavar="N", type=int, default=10**9, help="end a search after so many steps")
    parser.add_argument("--faults", metavar="N", type=int, help="so many faults, in place of those of the search")
    parser.add_argument("--seconds", metavar="N", type=float, default=1e9, help="end a search after so long")
    parser.add_argument(
        "--most", metavar="N", type=int, default=8_000_000, help="end a search after so many states (8,000,000)"
    )
    chosen = parser.parse_args(argv)
    plants: dict[str, World] = {name: (rule, bounds) for name, (_, rule, bounds) in PLANTS.items()}
    worlds = {**plants, **OUTSIDE} if chosen.plants else FULL if chosen.full else SUITE
    wanted = {name: world for name, world in worlds.items() if chosen.only in name}
    if not wanted:
        parser.error(f"argument --only: {chosen.only!r} is in the name of none of: {', '.join(worlds)}")
    status = 0
    for name, (rule, bounds) in wanted.items():
        wider = bounds if chosen.faults is None else bounds._replace(faults=chosen.faults)
        found = search(rule, wider, steps=chosen.steps, seconds=chosen.seconds, most=chosen.most, say=_show_progress)
        sys.stdout.write(f"{name}: {describe(found)}\n")
        sys.stdout.flush()
        status |= bool(found.broken) != chosen.plants
    return status


def _show_progress(text: str) -> None:
    """Show how far a search is, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}\r")
        sys.stderr.flush()


def describe(found: Found) -> str:
    """Return the result of a search as text; the events of a story have numbers."""
    result = "no promise is broken" if found.complete else "no promise is broken so far"
    if found.broken:
        *events, broken = found.story
        result = "\n".join(["", *(f"{number:>4}  {event}" for number, event in enumerate(events, 1)), f"  {broken}"])
    numbers = f"{found.states:,} states, {found.transitions:,} steps, depth {found.steps}, {found.seconds:.1f} s of CPU"
    return f"{numbers}: {result}"


if __name__ == "__main__":
    sys.exit(main())
