"""The simulator from the command line: many seeds and a summary, or the trace of one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from . import PROFILES, RELAXED, Report, simulate


def main() -> int:
    """Run what the arguments say; 1 if a rule was broken."""
    parser = argparse.ArgumentParser(
        prog="simulate",
        description="Run the real core and the real lock.lua against every kind of fault, on a virtual clock.",
    )
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="how many runs (300)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed of them (0)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="only this one")
    parser.add_argument("--profile", choices=[*PROFILES, *RELAXED], help="which faults (one after the other)")
    parser.add_argument("--trace", action="store_true", help="print all that happened in it (with --seed)")
    parser.add_argument("--match", default="", metavar="TEXT", help="only lines of the trace with this in it")
    chosen = parser.parse_args()
    if chosen.seed is not None:
        report = simulate(chosen.seed, chosen.profile)
        if chosen.trace:
            say(*(line for line in report.trace if chosen.match in line or "FAULT" in line or "VIOLATION" in line))
        reports = [report]
    else:
        reports = []
    started = time.perf_counter()
    for seed in range(chosen.first, chosen.first + chosen.seeds) if chosen.seed is None else ():
        reports.append(simulate(seed, chosen.profile))
        if reports[-1].violations:
            tell(reports[-1])
    took = time.perf_counter() - started
    if chosen.seed is not None and reports[0].violations:
        tell(reports[0])
    summarize(reports, took if chosen.seed is None else 0.0)
    return int(any(report.violations for report in reports))


def tell(report: Report) -> None:
    """What was broken, and how to see it again."""
    say(f"seed {report.seed} ({report.profile}):")
    say(*(f"  {violation}" for violation in report.violations[:5]))
    say(f'  again: scripts/simulate --seed {report.seed} --profile "{report.profile}" --trace')


def summarize(reports: list[Report], took: float) -> None:
    """What was seen."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts += report.counts
    broken = sum(bool(report.violations) for report in reports)
    say(
        f"{len(reports)} runs, {len({report.interleaving for report in reports})} distinct interleavings, "
        f"{sum(report.events for report in reports)} events, {sum(report.scripts for report in reports)} scripts, "
        f"{sum(report.grants for report in reports)} grants" + (f", {took:.1f} s" if took else ""),
        "what happened: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
        f"slowest grant of a free lock to a live waiter in calm: {max(report.slowest for report in reports):.3f} s",
        f"{broken} runs broke a rule" if broken else "no rule was broken",
    )


def say(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


sys.exit(main())
