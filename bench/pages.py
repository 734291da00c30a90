"""What the pages say of the recorded run: `scripts/bench --again --write` puts it there, and a test compares.

A page has two sorts of marks:

  <!--=ROW/CONTENDER/WHAT-->1.1<!--/-->   one figure within a sentence. WHAT is median, ratio (interlock / contender),
                                          p50, p99, max, share (what the caller gets that is served least) or check
                                          (then CONTENDER is the name of the check). ROW#2: the row's second table.
  <!--goals-->...<!--/goals-->            a block of lines: a key of BLOCKS.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

import picture
import record
import report
from checkouts import ROOT
from goals import AIOREDLOCK, BLPOP, EAGER, EAGER_ASYNCIO, FIFO, POTTERY, REDIS_ASYNCIO, REDIS_PY, UNCONFIRMED
from measure import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from record import Recorded

PAGES: Final = [
    ROOT / name
    for name in ("README.md", "README.zh.md", "docs/benchmarks.md", "docs/performance.md", "docs/internals/goals.md")
]
FIGURE: Final = re.compile(r"(<!--=([\w-]+)(?:#(\d))?/([^/>]+)/(\w+)-->)[^<]*(<!--/-->)")
BLOCK: Final = re.compile(r"(<!--(goals|run|peers|picture)-->\n).*?(<!--/\2-->)", re.DOTALL)
PEERS: Final = {REDIS_PY, EAGER, BLPOP, POTTERY, REDIS_ASYNCIO, EAGER_ASYNCIO, FIFO, AIOREDLOCK}
TAIL: Final = ("p50", "p99", "max")


def write(numbers: Mapping[str, Any]) -> None:
    """Write the record, and of it what each page says, and the pictures."""
    record.write(numbers)
    for page in PAGES:
        page.write_text(page_with(page.read_text(encoding="utf-8"), numbers), encoding="utf-8")
    for path, text in picture.files(record.outcomes_of(numbers)).items():
        path.write_text(text, encoding="utf-8")


def page_with(page: str, numbers: Mapping[str, Any]) -> str:
    """The page with the figures of these numbers. Raises LookupError if they lack one."""
    outcomes = record.outcomes_of(numbers)
    page = FIGURE.sub(lambda found: f"{found[1]}{_figure(outcomes, *found.group(2, 3, 4, 5))}{found[6]}", page)
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]](outcomes, about(numbers))}\n{found[3]}", page)


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


def _peers(outcomes: Sequence[Recorded], ran_with: str) -> str:
    """interlock beside each peer that did the same work."""
    lines = ["| work | by | median | p99 | longest | interlock beside it |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        peers = [name for name in outcome.samples if name in PEERS and outcome.ours != UNCONFIRMED]
        for name in [outcome.ours, *peers] if peers else ():
            is_ours = name == outcome.ours
            work = f"`{outcome.row}`: {outcome.what}" if is_ours else ""
            tail = outcome.tail(name)
            times = [picture.time(each, outcome.latency_unit) for each in tail[1:]] if tail else ["", ""]
            who = f"{name} (starves callers)" if name in outcome.starving else name
            ratio = "" if is_ours else f"{report.short(outcome.ratio(name))} ×"
            lines.append(
                f"| {work} | {who} | {shown(outcome.median(name))} {outcome.unit} | {' | '.join(times)} | {ratio} |"
            )
    return "\n".join([*lines, "", f"One run of `scripts/bench`: {ran_with}."])


def _picture(outcomes: Sequence[Recorded], ran_with: str) -> str:  # noqa: ARG001 (as the others)
    return picture.markup(outcomes)


BLOCKS: Final[dict[str, Callable[[Sequence[Recorded], str], str]]] = {
    "goals": _goals, "run": _run, "peers": _peers, "picture": _picture,
}  # fmt: skip
