"""The command line: `scripts/soak`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from soak import turns
from soak.lanes import Lanes, table

if TYPE_CHECKING:
    from collections.abc import Sequence

ABOUT = """\
Run every net for hours: the whole suite with --full, all planted bugs, and for the rest of the time the simulator and
the random histories with fresh seeds, half of the cores each. The seeds continue where the last soak ended. At the end
it prints one table.
"""
EXAMPLES = """\
examples:
  scripts/soak --hours 8                        a night
  scripts/soak --hours 0.5 --without test,plants  fresh seeds only
  scripts/soak --hours 2 --only cluster           the nets with this text in their name

exit status: 0 all is well, 1 something failed (the command that repeats it is printed), 2 wrong usage, 130 interrupted
The next seeds are kept in .soak.json; delete the file to begin anew.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "scripts/soak", description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--hours", type=float, required=True, help="for how long; what has begun then runs to its end")
    made.add_argument("--without", metavar="STEPS", default="", help="leave out, with commas: test, plants")
    made.add_argument("--only", metavar="TEXT", default="", help="only nets with this text in their name")
    made.add_argument(
        "--lanes", type=int, metavar="N", default=os.cpu_count() or 1, help="so many at a time (one a core)"
    )
    made.add_argument("--kept", type=Path, help="a directory for the output of what failed (a new one)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything. Returns the exit status."""
    made = parser()
    said = made.parse_args(arguments)
    left_out = {each for each in said.without.split(",") if each}
    if unknown := left_out - {"test", "plants"}:
        made.error(f"argument --without: {min(unknown)!r} is neither test nor plants")
    if said.hours <= 0 or said.lanes < 1:
        made.error("argument --hours or --lanes: a number above 0 is needed")
    first = [
        each for each in turns.once() if said.only in each.title and not any(part in each.title for part in left_out)
    ]
    rest = [each for each in turns.endless() if said.only in each.title]
    if not first and not rest:
        made.error(f"argument --only: {said.only!r} is in the name of no net")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts its background commands with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    lanes, interrupted = Lanes(said.kept or Path(tempfile.mkdtemp(prefix="interlock-soak-")), say), False
    try:
        lanes.run_once(first)
        lanes.run(groups(rest, said.lanes), began + 3600 * said.hours)
    except KeyboardInterrupt:
        lanes.stop()
        interrupted = True
    print("\n" + table([*first, *rest]))
    if interrupted:
        return 130
    return int(any(net.failed for net in (*first, *rest)))


def groups(nets: Sequence[turns.Net], lanes: int) -> list[list[turns.Net]]:
    """Return the nets that take turns in each lane: half of the lanes play histories, the other half simulates."""
    histories = [net for net in nets if net.title.startswith("histories")]
    others = [net for net in nets if net not in histories]
    if lanes == 1 or not histories or not others:
        return [list(nets)[lane::lanes] for lane in range(lanes)]
    half = lanes // 2
    return [
        *(histories[lane::half] for lane in range(half)),
        *(others[lane :: lanes - half] for lane in range(lanes - half)),
    ]


if __name__ == "__main__":
    sys.exit(main())
