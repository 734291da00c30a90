"""`scripts/bench`: the numbers of interlock, measured here and now, side by side with the floor and the peers."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import facts
import pages
import plots
import record
import report
from checkouts import BASELINE, find
from contenders import missing
from interlock.embedded import Server
from measure import Bench, Outcome
from rows import ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USUAL = [name for name, row in ROWS.items() if row.usual]
EX_USAGE = 64
PACKAGES = ("redis", "hiredis", "python-redis-lock", "redis-fifo-lock", "pottery", "aioredlock")

ABOUT = """\
Measures interlock against the floor (its own messages, packed before, over bare
connections), against its peers and against an older version of itself, all in
one run on a private server, and says which goals are met.
"""
MORE = f"""\
examples:
  scripts/bench                            the usual rows, in about eight minutes
  scripts/bench uncontended handover       only these rows
  scripts/bench all                        every row there is
  scripts/bench --list                     what each row measures, and its goal
  scripts/bench --write                    also record the run, and write its figures and pictures into the pages
  scripts/bench --again --write            write the figures and pictures of the recorded run again
  scripts/bench --again --plots            draw the pictures of the recorded run again (docs/benchmarks/)
  scripts/bench server-time --before PATH  against another checkout, or a commit
  scripts/bench registry observers         what reports to the registry, metrics and traces cost a pair
  scripts/bench --quick all                every line of code once; the numbers mean nothing
  scripts/bench growth                     curves: 10 to 10,000 waiters, locks, readers (growth --help)
  scripts/bench mixed                      old and new locks on one key, as during a migration (mixed --help)
  scripts/bench outages                    what callers wait when servers fail or are restarted (outages --help)

How to read it: in each round every contender has one short slice, in
alternating order. `median` is over the rounds. `ratio` is interlock divided by
that contender, as the median of the ratios within a round; their middle half
stands beside it. Absolute numbers change with the machine and the minute;
ratios less. Nothing else should run meanwhile. A missed goal points to the
section of {report.PAGE} that says why it is missed.

Exit status: 0 whatever the timings say; 1 if something broke (a lock that did
not exclude, a lease that was lost); 64 for bad options.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"bench: {message}. See --help", file=sys.stderr)
        sys.exit(EX_USAGE)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def _options() -> argparse.Namespace:
    parser = Parser(
        prog="scripts/bench", description=ABOUT, epilog=MORE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names out of --list, or all; else the usual ones")
    parser.add_argument("--list", action="store_true", help="say what each row measures, and its goal")
    parser.add_argument(
        "--before", default=BASELINE, metavar="PATH",
        help=f"the checkout, or the commit, that runs beside this one ({BASELINE})",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print the table of goals instead")
    parser.add_argument("--write", action="store_true", help="record the run, and write its figures into the pages")
    parser.add_argument("--again", action="store_true", help="measure nothing: show the recorded run")
    parser.add_argument(
        "--plots", nargs="?", type=Path, const=plots.FOLDER, metavar="DIR",
        help="draw the run there, each picture in light and dark; without DIR in docs/benchmarks/",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all numbers there; - is the standard output")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="rounds of each row (as many as it needs)")
    parser.add_argument("--quick", action="store_true", help="one round of each, far too small to mean anything")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in {*ROWS, "all"}]:
        parser.error(f"there is no row {', '.join(unknown)}. The rows are {', '.join(ROWS)}")
    if options.rows:
        options.rows = [name for name in ROWS if name in options.rows or "all" in options.rows]
    if options.write and (options.rows or options.quick):
        parser.error("--write needs the usual rows, all of them, and not --quick")
    if str(options.plots) in ROWS:
        parser.error(f"--plots {options.plots} would draw in a folder of that name: name the rows before it")
    if options.plots == plots.FOLDER and not (options.again or options.write):
        parser.error("--plots needs a folder for a run that is not recorded; or --write, which records it, or --again")
    options.rows = options.rows or USUAL
    return options


def list_rows(console: Console) -> None:
    """What each row measures, and its goal."""
    for name, row in ROWS.items():
        mark = "" if row.usual else " [dim](not usual)[/]"
        console.print(f"[bold]{name}[/]{mark}\n  {row.measures}", highlight=False)
        console.print(f"  goal: {row.goal(name) or 'none'}", highlight=False)


def measure(options: argparse.Namespace, console: Console) -> tuple[list[Outcome], dict[str, object]]:
    """Run the rows on a private server. What came of them, and with what they ran."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="interlock-bench-") as unpacked, Server() as server, Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=console, transient=True, auto_refresh=False,
    ) as progress:  # fmt: skip
        bar = progress.add_task("")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)
            progress.refresh()

        before = find(options.before, Path(unpacked))
        if before is None and options.before != BASELINE:
            sys.exit(f"bench: {options.before} is neither a checkout of interlock (with src/) nor a commit of this one")
        about = facts.about(str(server.socket), *PACKAGES)
        path = str(server.socket)
        bench = Bench(path, rounds=options.rounds, quick=options.quick, before=before, tell=tell)
        for run in dict.fromkeys(ROWS[name].run for name in options.rows):
            outcomes += [outcome for outcome in run(bench) if outcome.row in options.rows]
    if before is None:
        about["no such commit here, so nothing is compared with"] = BASELINE
    if options.quick:
        about["a quick run, whose numbers mean nothing:"] = "yes"
    if absent := missing():
        about["not installed, so left out:"] = " and ".join(absent)
    return outcomes, about


def main() -> None:
    if sys.argv[1:2] == ["growth"]:
        from growth import command

        command.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["outages"]:
        import outages

        outages.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["mixed"]:
        import mixed

        mixed.main(sys.argv[2:])
        return
    options = _options()
    console = Console(stderr=options.json == "-" or options.markdown, width=None if sys.stdout.isatty() else 112)
    if options.list:
        list_rows(console)
        return
    if options.again:
        numbers = record.read()
        outcomes: Sequence[Outcome] = [each for each in record.outcomes_of(numbers) if each.row in options.rows]
    else:
        outcomes, about = measure(options, console)
        numbers = record.as_json(outcomes, about)
    _show(options, console, outcomes, numbers)
    _write(options, outcomes, numbers)
    if broken := [outcome.row for outcome in outcomes if outcome.broken]:
        sys.exit(f"bench: {', '.join(broken)}: a lock did not exclude, or a lease was lost")


def _show(
    options: argparse.Namespace, console: Console, outcomes: Sequence[Outcome], numbers: Mapping[str, Any]
) -> None:
    ran_with = pages.about(numbers)
    if options.markdown:
        print(report.markdown(outcomes, f"Measured by `scripts/bench`: {ran_with}."))
        return
    for outcome in outcomes:
        report.show(console, outcome)
    console.print(f"\n{ran_with}", style="dim", highlight=False)


def _write(options: argparse.Namespace, outcomes: Sequence[Outcome], numbers: Mapping[str, Any]) -> None:
    """Write the files that the options name."""
    if options.write:
        pages.write(numbers)
    if options.plots:
        plots.write(outcomes, options.plots)
    if options.json == "-":
        print(record.text_of(numbers), end="")
    elif options.json:
        Path(options.json).write_text(record.text_of(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
