"""The simulator from the command line: many seeds and a summary; or one, its trace and its smallest story."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from . import batch
from .profiles import ALL, BY_NAME, RELAXED, SIDE_BY_SIDE, SNAPSHOTS, WORLDS, profile_of
from .shrinking import shrink
from .simulation import simulate
from .subjects import SUBJECTS, subject_of

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRESS_INTERVAL: Final = 10.0  # seconds between two lines of progress, if this is no terminal
EPILOG: Final = """\
subjects:
  {subjects}
profiles:
{profiles}
  Without --subject and --profile they take turns by seed; only by name: revoked, ended by hand; flush and clock,
  outside the promise.

examples:
  scripts/simulate                                        300 seeds
  scripts/simulate --seeds 100000                         a night's work, on all cores; Ctrl-C sums up
  scripts/simulate --seeds 2000 --profile chaos --jobs 1  one kind of weather, in one process
  scripts/simulate --seeds 500 --subject semaphore        one kind of primitive
  scripts/simulate --seeds 2000 --world servers           servers that restart and fail over
  scripts/simulate --seed 143 --trace                     all that happened in one run
  scripts/simulate --seed 143 --trace --match c1/w0       ... what has this text in it, and all faults
  scripts/simulate --seed 143 --shrink                    the smallest part of it that still breaks the rule

Exit status: 0 no rule was broken, 1 one was, 2 wrong arguments, 130 interrupted. docs/simulator.md tells more.
"""


def print_lines(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _profiles() -> str:
    """Those of each world."""
    groups = WORLDS | {"relaxed": RELAXED, "side by side": SIDE_BY_SIDE, "snapshots": SNAPSHOTS, "by name": BY_NAME}
    return "\n".join(f"  {group}: {', '.join(profiles)}" for group, profiles in groups.items())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"simulate: {message}. See scripts/simulate --help\n")


def _number(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            number = int(text.replace("_", ""))
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed, not {text!r}")
        return number

    return parsed


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="scripts/simulate",
        description="Run the real core and the real Lua against every kind of fault, on a virtual clock.\n"
        "A seed is one run, always the same. Rules that must hold are watched at every instant.",
        epilog=EPILOG.format(subjects=", ".join(SUBJECTS), profiles=_profiles()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    many = parser.add_argument_group("many seeds")
    many.add_argument("--seeds", type=_number(1), metavar="N", help="how many runs (300)")
    many.add_argument("--first", type=_number(0), metavar="SEED", help="the first seed of them (0)")
    many.add_argument("--jobs", type=_number(1), metavar="N", help="how many processes (one per core)")
    many.add_argument("--json", type=Path, metavar="FILE", help="write the summary there, too")
    one = parser.add_argument_group("one seed")
    one.add_argument("--seed", type=_number(0), metavar="SEED", help="only this one")
    one.add_argument("--trace", action="store_true", help="print all that happened in it")
    one.add_argument("--match", metavar="TEXT", help="only lines of the trace with this in it, faults and violations")
    one.add_argument("--shrink", action="store_true", help="find the smallest part of it that breaks the same rule")
    parser.add_argument("--world", metavar="NAME", default="one", help="of which kind the profiles are (see below)")
    parser.add_argument("--subject", metavar="NAME", help="which primitive (see below)")
    parser.add_argument("--profile", metavar="NAME", help="which faults (see below)")
    chosen = parser.parse_args(argv)
    if chosen.profile is not None and chosen.profile not in ALL:
        known = ", ".join(repr(name) if " " in name else name for name in ALL)
        parser.error(f"there is no profile {chosen.profile!r}; there are {known}")
    if chosen.world not in WORLDS:
        parser.error(f"there is no world {chosen.world!r}; there are {', '.join(WORLDS)}")
    if chosen.subject is not None and chosen.subject not in SUBJECTS:
        parser.error(f"there is no subject {chosen.subject!r}; there are {', '.join(SUBJECTS)}")
    single, several = ("trace", "match", "shrink"), ("seeds", "first", "jobs", "json")
    for name in several if chosen.seed is not None else single:
        if getattr(chosen, name) not in {None, False}:
            wrong = "can't be used with" if chosen.seed is not None else "needs"
            parser.error(f"--{name} {wrong} --seed")
    return chosen


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments say; 1 if a rule was broken."""
    chosen = _arguments(argv)
    try:
        return _run_one(chosen) if chosen.seed is not None else _run_many(chosen)
    except ImportError as missing:
        sys.stderr.write(f"simulate: {missing}\n")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # who read it has seen enough
        return 1


# One


def _run_one(chosen: argparse.Namespace) -> int:
    report = simulate(chosen.seed, chosen.profile, subject=chosen.subject, world=chosen.world)
    tally = batch.Tally()
    tally.add(report)
    if chosen.shrink:
        if not report.violations:
            print_lines(
                f"seed {chosen.seed} ({report.subject}, {report.profile}) breaks no rule: there is nothing to shrink"
            )
            return 0
        shrunk = shrink(chosen.seed, report.profile, subject=report.subject)
        print_lines(*shrunk.story, "", "all that happens in it:", *_matching(shrunk.report.lines, chosen.match))
        return 1
    if chosen.trace or chosen.match is not None:
        print_lines(*_matching(report.lines, chosen.match))
    _print_failures(tally)
    _print_summary(tally, None)
    return int(bool(tally.broken))


def _matching(trace: list[str], text: str | None) -> list[str]:
    return [line for line in trace if not text or text in line or "FAULT" in line or "VIOLATION" in line]


# Many


def _run_many(chosen: argparse.Namespace) -> int:
    from .progress import Progress  # noqa: PLC0415 (rich, where it is)

    seeds, first = chosen.seeds or 300, chosen.first or 0
    jobs = min(chosen.jobs or os.cpu_count() or 1, -(-seeds // batch.SHARE))
    simulate(first, "no faults")  # whatever is not installed is missed here, and not in every process
    started = time.perf_counter()
    with Progress(seeds, PROGRESS_INTERVAL) as progress:

        def report(part: batch.Tally) -> None:
            if part.failures:
                with progress.bar_hidden():
                    _print_failures(part)
            progress.advance(part)

        tally, cut_short = batch.run(
            first, seeds, batch.Kind(chosen.world, chosen.profile, chosen.subject), jobs, report
        )
    took = time.perf_counter() - started
    _print_summary(tally, took)
    if cut_short:
        print_lines(f"{cut_short}: {seeds - tally.runs} of {seeds} runs were not made, or not counted")
    if chosen.json:
        chosen.json.write_text(json.dumps(_as_json(tally, took, cut_short), indent=1) + "\n", encoding="utf-8")
    return 1 if tally.broken else 0 if not cut_short else 130 if cut_short == "interrupted" else 1


def _print_failures(tally: batch.Tally) -> None:
    """What was broken, and how to see it again."""
    for failure in tally.failures:
        seed, profile, subject, _ = failure
        again = f"scripts/simulate --seed {seed}"
        again += "" if subject == subject_of(seed) else f" --subject {subject}"
        again += "" if profile == profile_of(seed).name else f' --profile "{profile}"'
        print_lines(f"seed {seed} ({subject}, {profile}):", *(f"  {text}" for text in failure.texts))
        print_lines(f"  all of it: {again} --trace", f"  the core of it: {again} --shrink")


def _print_summary(tally: batch.Tally, took: float | None) -> None:
    """What was seen."""
    speed = f", {took:.1f} s ({tally.runs / took:.1f} runs/s)" if took else ""
    print_lines(
        f"{tally.runs} runs, {len(tally.interleavings)} distinct interleavings, {tally.virtual / 3600:.1f} virtual h, "
        f"{tally.events} events, {tally.scripts} scripts, {tally.grants} grants{speed}",
        "subjects: " + ", ".join(f"{name} {tally.subjects[name]}" for name in SUBJECTS if tally.subjects[name]),
        "what happened: " + ", ".join(f"{name} {count}" for name, count in sorted(tally.counts.items())),
        f"slowest grant of what was free to a live waiter in the quiet phase: {tally.slowest:.3f} s",
        f"{tally.broken} runs broke a rule" if tally.broken else "no rule was broken",
    )


def _as_json(tally: batch.Tally, took: float, cut_short: str | None) -> dict[str, Any]:
    return {
        **{key: value for key, value in vars(tally).items() if key not in {"interleavings", "failures"}},
        "interleavings": len(tally.interleavings),
        "failures": [failure._asdict() for failure in tally.failures],
        "seconds": took,
        "cut_short": cut_short,
    }
