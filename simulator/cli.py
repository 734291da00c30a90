"""The simulator from the command line: many seeds with a summary; or one seed, its trace, its smallest failing part."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from . import batch, coverage
from .invariants import claims
from .profiles import ALL, BY_NAME, CROWDS, EVERY, RELAXED, SIDE_BY_SIDE, SNAPSHOTS, VOTERS, WORLDS, Profile, profile_of
from .shrinking import shrink
from .simulation import simulate
from .subjects import SUBJECTS, subject_of, subjects_of

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRESS_INTERVAL: Final = 10.0  # seconds between two lines of progress, if this is no terminal
SECONDS_OF_A_MINUTE: Final = 60.0
FRESH_SEEDS: Final = 1000  # seeds for each second since 1970: with --minutes a batch begins at the seed of its moment
EPILOG: Final = """\
words:
  seed      a number that determines one run: every delay, every fault, every action of a worker
  subject   the synchronizer that the workers of a run use
  profile   a mixture of faults: which ones strike, and how often
  world     a set of profiles for one kind of servers. one: one server that stays; servers: one address, behind which
            servers restart and fail over; quorum: 3 or 5 independent servers
  Without --subject and --profile each seed chooses both, so that the seeds of a world take turns with all of them.
  With --world all the seeds take turns with all profiles of all worlds, and with those that no seed chooses.

subjects:
  {subjects}

profiles of each world:
{profiles}

profiles that no seed chooses, for --profile:
{by_name}

examples:
  scripts/simulate                                        300 seeds of the world "one"
  scripts/simulate --seeds 2000 --world servers           servers that restart and fail over
  scripts/simulate --seeds 500 --subject semaphore        one synchronizer
  scripts/simulate --seeds 2000 --profile chaos --jobs 1  one profile, in one process
  scripts/simulate --seeds 100000                         a night's work, on all cores; Ctrl-C prints the summary
  scripts/simulate --minutes 60                           seeds that were never run, for an hour, of all profiles
The last line of a summary is for programs: "summary:", then name=value. `next` is the first seed that did not run.
If a run breaks a rule, its seed is printed, and you go on with that seed:
  scripts/simulate --seed 143 --trace                     every event of the run
  scripts/simulate --seed 143 --trace --match c1/w0       only events of worker 0 of client 1, and all faults
  scripts/simulate --seed 143 --shrink                    the smallest part of the run that still breaks the rule

exit status: 0 no run broke a rule, 1 a run did, 2 wrong arguments, 130 interrupted
docs/simulator.md explains worlds, profiles and traces. simulator/invariants/__init__.py lists the rules.
"""


def print_lines(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _names(groups: dict[str, dict[str, Profile]]) -> str:
    """List the names of the profiles of each group, one group a line."""
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
        description="Simulate clients of interlock on a virtual clock, under many kinds of faults. After every step\n"
        "the simulator checks the rules that a lock must keep. The algorithm and the Lua scripts are the real ones.\n"
        "A seed is one run, the same each time.",
        epilog=EPILOG.format(
            subjects=", ".join(SUBJECTS),
            profiles=_names(WORLDS),
            by_name=_names(
                {
                    "the server breaks its promises": RELAXED,
                    "beside a later version": SIDE_BY_SIDE,
                    "crowds in each process": CROWDS,
                    "restored snapshots": SNAPSHOTS,
                    "servers of a quorum that lose data": VOTERS,
                    "one question each": BY_NAME,
                }
            ),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    many = parser.add_argument_group("many seeds")
    many.add_argument("--seeds", type=_number(1), metavar="N", help="the number of runs (default: 300)")
    many.add_argument(
        "--minutes", type=_number(1), metavar="N",
        help="run as many seeds as fit into N minutes; of the world all, unless --world or --profile says otherwise",
    )  # fmt: skip
    many.add_argument(
        "--first", type=_number(0), metavar="SEED",
        help="the first seed (default: 0; with --minutes one that was never run)",
    )  # fmt: skip
    many.add_argument("--jobs", type=_number(1), metavar="N", help="the number of processes (default: one per core)")
    many.add_argument("--json", type=Path, metavar="FILE", help="also write the summary to this file")
    one = parser.add_argument_group("one seed")
    one.add_argument("--seed", type=_number(0), metavar="SEED", help="run only this seed")
    one.add_argument("--trace", action="store_true", help="print every event of the run")
    one.add_argument("--match", metavar="TEXT", help="print only events with this text, faults, and violations")
    one.add_argument(
        "--shrink", action="store_true", help="find the smallest part of the run that breaks the same rule"
    )
    parser.add_argument(
        "--world",
        metavar="NAME",
        help="the kind of servers: one, servers, quorum; or all (default: that of the profile, or one)",
    )
    parser.add_argument("--subject", metavar="NAME", help="the synchronizer to use (default: by seed)")
    parser.add_argument("--profile", metavar="NAME", help="the mixture of faults (default: by seed)")
    chosen = parser.parse_args(argv)
    if chosen.profile is not None and chosen.profile not in ALL:
        known = ", ".join(repr(name) if " " in name else name for name in ALL)
        parser.error(f"there is no profile {chosen.profile!r}; there are {known}")
    if chosen.world not in {None, EVERY, *WORLDS}:
        parser.error(f"there is no world {chosen.world!r}; there are {', '.join(WORLDS)} and {EVERY}")
    if chosen.minutes is not None and chosen.world is chosen.profile is None:
        chosen.world = EVERY
    if chosen.subject is not None and chosen.subject not in SUBJECTS:
        parser.error(f"there is no subject {chosen.subject!r}; there are {', '.join(SUBJECTS)}")
    world = ALL[chosen.profile].world if chosen.profile else chosen.world or "one"
    own = chosen.profile is not None and (ALL[chosen.profile].subjects or chosen.world == EVERY)
    subjects = [chosen.subject] if chosen.subject else subjects_of(world if own else chosen.world or world)
    for each in sorted({*subjects} - {*subjects_of(world)}):
        known = ", ".join(subjects_of(world))
        parser.error(f"no check can judge a {each} under {chosen.profile or world!r}; checks can judge {known}")
    single, several = ("trace", "match", "shrink"), ("seeds", "minutes", "first", "jobs", "json")
    for name in several if chosen.seed is not None else single:
        if getattr(chosen, name) not in {None, False}:
            wrong = "can't be used with" if chosen.seed is not None else "needs"
            parser.error(f"--{name} {wrong} --seed")
    if chosen.seeds is not None and chosen.minutes is not None:
        parser.error("--seeds can't be used with --minutes")
    return chosen


def main(argv: list[str] | None = None) -> int:
    """Run the seeds that the arguments name. Returns the exit status: 1 if a run broke a rule."""
    chosen = _arguments(argv)
    try:
        return _run_one(chosen) if chosen.seed is not None else _run_many(chosen)
    except ImportError as missing:
        sys.stderr.write(f"simulate: {missing}\n")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader closed the pipe, as `head` does
        return 1


# One seed


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
        print_lines(*shrunk.story, "", "every event of this run:", *_matching(shrunk.report.lines, chosen.match))
        return 1
    if chosen.trace or chosen.match is not None:
        print_lines(*_matching(report.lines, chosen.match))
    _print_failures(tally)
    _print_figures(tally, None)
    return int(bool(tally.broken))


def _matching(trace: list[str], text: str | None) -> list[str]:
    return [line for line in trace if not text or text in line or "FAULT" in line or "VIOLATION" in line]


# Many seeds


def _run_many(chosen: argparse.Namespace) -> int:
    from .progress import Progress  # noqa: PLC0415 (it imports rich, if rich is installed)

    seeds, seconds, first = chosen.seeds or 300, None, chosen.first or 0
    jobs = min(chosen.jobs or os.cpu_count() or 1, -(-seeds // batch.SHARE))
    if chosen.minutes is not None:
        seeds, seconds, jobs = None, chosen.minutes * SECONDS_OF_A_MINUTE, chosen.jobs or os.cpu_count() or 1
        if chosen.first is None:  # no machine runs so many seeds a second, so nobody has run these
            first = int(time.time() * FRESH_SEEDS)
    simulate(first, "no faults")  # fail here if a package is missing, and not in every process
    started = time.perf_counter()
    shares = batch.Shares(first, seeds, seconds)
    with Progress(seeds, seconds, PROGRESS_INTERVAL) as progress:

        def report(part: batch.Tally) -> None:
            if part.failures:
                with progress.bar_hidden():
                    _print_failures(part)
            progress.advance(part)

        tally, cut_short = batch.run(shares, batch.Kind(chosen.world, chosen.profile, chosen.subject), jobs, report)
    took = time.perf_counter() - started
    _print_figures(tally, took)
    if cut_short:
        missing = f"{seeds - tally.runs} of {seeds} runs are missing" if seeds else f"{tally.runs} runs have ended"
        print_lines(f"{cut_short}: {missing}")
    print_lines(summary(tally, first, shares.next, took))
    if chosen.json:
        chosen.json.write_text(json.dumps(_as_json(tally, took, cut_short), indent=1) + "\n", encoding="utf-8")
    return 1 if tally.broken else 0 if not cut_short else 130 if cut_short == "interrupted" else 1


def summary(tally: batch.Tally, first: int, following: int, took: float) -> str:
    """Sum up a batch in one line, for programs."""
    return (
        f"summary: first={first} next={following} runs={tally.runs} broken_runs={tally.broken} "
        f"violations={tally.violations} seconds={took:.1f} runs_per_s={tally.runs / took:.1f} "
        f"events={tally.events} events_per_s={tally.events / took:.0f}"
    )


def _print_failures(tally: batch.Tally) -> None:
    """Print the broken rules, and the commands that repeat each run."""
    for failure in tally.failures:
        seed, profile, subject, _ = failure
        again = f"scripts/simulate --seed {seed}"
        if (subject, profile) != (subject_of(seed), profile_of(seed).name):
            again += f' --subject {subject} --profile "{profile}"'
        print_lines(f"seed {seed} ({subject}, {profile}):", *(f"  {text}" for text in failure.texts))
        print_lines(f"  every event: {again} --trace", f"  only what the failure needs: {again} --shrink")


def _print_figures(tally: batch.Tally, took: float | None) -> None:
    """Print the sums over all runs."""
    speed = f", {took:.1f} s ({tally.runs / took:.1f} runs/s)" if took else ""
    print_lines(
        f"{tally.runs} runs, {len(tally.interleavings)} distinct interleavings, {tally.virtual / 3600:.1f} virtual h, "
        f"{tally.events} events, {tally.scripts} scripts, {tally.grants} grants{speed}",
        "subjects: " + ", ".join(f"{name} {tally.subjects[name]}" for name in SUBJECTS if tally.subjects[name]),
        "what happened: " + ", ".join(f"{name} {count}" for name, count in sorted(tally.counts.items()) if count),
        *coverage.lines(tally.pairs),
        *claims.lines(tally.transitions),
        f"longest wait of a live waiter for a free resource in the quiet phase: {tally.slowest:.3f} s",
        f"{tally.broken} of {tally.runs} runs broke a rule" if tally.broken else "no rule was broken",
    )


def _as_json(tally: batch.Tally, took: float, cut_short: str | None) -> dict[str, Any]:
    return {
        **{
            key: value
            for key, value in vars(tally).items()
            if key not in {"interleavings", "failures", "pairs", "transitions"}
        },
        "pairs": {f"{event} while {state}": count for (state, event), count in sorted(tally.pairs.items())},
        "transitions": {f"{event} in {state}": count for (state, event), count in sorted(tally.transitions.items())},
        "interleavings": len(tally.interleavings),
        "failures": [failure._asdict() for failure in tally.failures],
        "seconds": took,
        "cut_short": cut_short,
    }
