"""What the pages say of the recorded run: `scripts/bench --again --write` puts it there, and a test compares.

A page has two sorts of marks:

  <!--=ROW/CONTENDER/WHAT-->1.1<!--/-->   one figure within a sentence. WHAT is median, ratio (interlock / contender),
                                          p50, p99, max, share (what the caller gets that is served least) or check
                                          (then CONTENDER is the name of the check). ROW#2: the row's second table.
  <!--goals-->...<!--/goals-->            a block of lines: a key of BLOCKS.
  <!--plot-NAME-->...<!--/plot-NAME-->    a picture of plots.py.
"""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

import picture
import plots
import record
import report
from checkouts import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from record import Recorded

PAGES: Final = [
    ROOT / name
    for name in ("README.md", "README.zh.md", "docs/benchmarks.md", "docs/performance.md", "docs/internals/goals.md")
]
FIGURE: Final = re.compile(r"(<!--=([\w-]+)(?:#(\d))?/([^/>]+)/(\w+)-->)[^<]*(<!--/-->)")
BLOCK: Final = re.compile(r"(<!--(goals|run|picture|plot-[a-z-]+)-->\n).*?(<!--/\2-->)", re.DOTALL)
TAIL: Final = ("p50", "p99", "max")


def write(numbers: Mapping[str, Any]) -> None:
    """Write the record, and of it what each page says, and the pictures."""
    record.write(numbers)
    for page in PAGES:
        text = page_with(page.read_text(encoding="utf-8"), numbers, page.parent)
        page.write_text(text, encoding="utf-8")
    outcomes = record.outcomes_of(numbers)
    for path, svg in picture.files(outcomes).items():
        path.write_text(svg, encoding="utf-8")
    plots.write(outcomes)


def page_with(page: str, numbers: Mapping[str, Any], folder: Path = ROOT) -> str:
    """The page of this folder with the figures of these numbers. Raises LookupError if they lack one."""
    outcomes = record.outcomes_of(numbers)
    way = os.path.relpath(plots.FOLDER, folder)  # pathlib has no ../ before Python 3.12

    def block(name: str) -> str:
        if name in BLOCKS:
            return BLOCKS[name](outcomes, about(numbers))
        return plots.markup(outcomes, name.removeprefix("plot-"), way)

    page = FIGURE.sub(lambda found: f"{found[1]}{_figure(outcomes, *found.group(2, 3, 4, 5))}{found[6]}", page)
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", page)


def _figure(outcomes: Sequence[Recorded], row: str, number: str | None, name: str, what: str) -> str:
    outcome = [each for each in outcomes if each.row == row][int(number or 1) - 1]
    if what == "check":
        return next(check.value for check in outcome.checks if check.what == name)
    if what == "share":
        return picture.least(outcome.starving[name])
    if what in TAIL:
        times = outcome.tail(name)
        if times is None:
            raise LookupError(f"{row}: {name} has no latencies")
        return picture.time(times[TAIL.index(what)], outcome.latency_unit)
    return picture.rounded({"median": outcome.median, "ratio": outcome.ratio}[what](name))


def about(numbers: Mapping[str, Any]) -> str:
    """With what the run was made."""
    return ", ".join(f"{key} {value}" for key, value in numbers["about"].items())


def _run(outcomes: Sequence[Recorded], ran_with: str) -> str:
    """What the command printed."""
    printed = io.StringIO()
    console = Console(width=112, file=printed)
    for outcome in outcomes:
        report.show(console, outcome)
    console.print(f"\n{ran_with}", highlight=False)
    lines = [line.rstrip() for line in printed.getvalue().strip().splitlines()]
    return "\n".join(["```", *lines, "```"])


def _goals(outcomes: Sequence[Recorded], ran_with: str) -> str:
    return report.markdown(outcomes, f"Measured by `scripts/bench`: {ran_with}.")


def _picture(outcomes: Sequence[Recorded], ran_with: str) -> str:  # noqa: ARG001 (as the others)
    return picture.markup(outcomes)


BLOCKS: Final[dict[str, Callable[[Sequence[Recorded], str], str]]] = {
    "goals": _goals, "run": _run, "picture": _picture,
}  # fmt: skip
