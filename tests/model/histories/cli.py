"""scripts/histories: the command line."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING

from harness.servers import KINDS as SERVERS
from harness.servers import Missing
from interlock.errors import Unavailable
from model.histories import faults
from model.histories.history import OtherCopy, Verdict, play
from model.histories.lines import clock, shown
from model.histories.settings import KINDS, MODES, PHASES, STYLES, TOPOLOGIES, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MOST_LINES = 60  # of a violation
FAULT = "fault: "  # before the name of a fault in the counts
TRIES = 3  # a phase that comes about in none of so many has a broken rig, and not only a busy machine

ABOUT = """\
Random histories on real servers. Worker processes (threads and asyncio) use locks at random while faults strike; each
proves by passing ensure() calls when it believed in which lease; then everything is healed, and the checker judges:
nobody believed beside another one, fences grew, losses were told, cancellations balanced, nobody hung, nothing is left.
"""
EXAMPLES = f"""\
examples:
  scripts/histories                                            4 histories on each topology, 15 s of faults each
  scripts/histories --topology sentinel --histories 50         one topology for longer
  scripts/histories --minutes 30 --json summary.json           as many as fit into half an hour; the sums for a program
  scripts/histories --topology single --seed 7 --histories 1   what seed 7 chooses (real timing differs from run to run)
  scripts/histories --faults kill,stop,partition --kinds lock  some faults and kinds only; --faults none for none
  scripts/histories --phases lost-grant --faults none          one phase, again and again
  scripts/histories --report /tmp/histories                    keep the lines of every process, also when all is well

kinds    {", ".join(KINDS)}
styles   {", ".join(STYLES)}   (crossed: entered in one thread or task, left in another)
faults   {", ".join(faults.NAMES)}
phases   {", ".join(PHASES)}

Exit status: 0 all is well; 1 a promise was broken (what, the seed, and the lines that show it are printed, and all
lines are kept); 2 wrong usage; 3 the servers of every history failed to get well, or a phase did not come about in
three tries or more; 4 a worker imported another copy of interlock. docs/histories.md tells more.
"""


def _some(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        if text == "none":
            return ()
        chosen = tuple(each.strip() for each in text.split(",") if each.strip())
        if unknown := [each for each in chosen if each not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return chosen

    return parse


def _commits(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(each.strip() for each in text.split(",") if each.strip())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "scripts/histories", description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--topology", choices=[*TOPOLOGIES, "all"], default="all")
    made.add_argument("--histories", type=int, default=4, help="of each topology (4)")
    made.add_argument("--minutes", type=float, help="as many histories as begin in this time, the topologies in turn")
    made.add_argument("--seconds", type=float, default=15.0, help="for which faults strike in each history (15)")
    made.add_argument("--seed", type=int, default=None, help="of the first history; the others follow (the time)")
    made.add_argument(
        "--faults", type=_some(faults.NAMES), default=None, help="only these, with commas (all); none: no faults"
    )
    made.add_argument(
        "--phases",
        type=_some(PHASES),
        default=None,
        help="only these (half of them, as the seed decides); none: no phases",
    )
    made.add_argument(
        "--older", type=_commits, default=None,
        help="commits whose version half of the processes run; none: no older version (the seed decides)",
    )  # fmt: skip
    made.add_argument("--max-ttl", type=float, default=None, help="seconds: the longest ttl (the seed decides)")
    made.add_argument("--kinds", type=_some(KINDS), default=KINDS, help="only these (all)")
    made.add_argument("--styles", type=_some(STYLES), default=STYLES, help="only these ways to enter and leave (all)")
    made.add_argument("--mode", choices=[*MODES, "both"], default="both")
    made.add_argument("--processes", type=int, default=4, help="worker processes (4)")
    made.add_argument("--workers", type=int, default=3, help="threads or tasks of each process (3)")
    made.add_argument("--pace", type=float, default=0.7, help="mean seconds between two faults (0.7)")
    made.add_argument("--server", choices=sorted(SERVERS), default="valkey-9.1")
    made.add_argument(
        "--tls", action=argparse.BooleanOptionalAction, default=None, help="always, or never (the seed decides)"
    )
    made.add_argument(
        "--forks", action="store_true", help="fork worker processes without Python's hooks, besides the other faults"
    )
    made.add_argument("--json", type=Path, help="a file for the sums, as JSON")
    made.add_argument("--report", type=Path, default=None, help="a directory for the lines of all histories")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the histories that the arguments choose. Returns the exit status."""
    said = parser().parse_args(arguments)
    first = int(time.time()) % 1_000_000 if said.seed is None else said.seed
    topologies = TOPOLOGIES if said.topology == "all" else (said.topology,)
    home = said.report or Path(tempfile.mkdtemp(prefix="interlock-histories-"))
    verdicts: list[Verdict] = []
    logging.getLogger("interlock").addHandler(logging.NullHandler())  # the controller's client warns of our own faults
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts its background commands with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    try:
        for topology, seed in _turns(topologies, first, said.histories, said.minutes):
            settings = Settings(
                topology=topology, seed=seed, seconds=said.seconds, faults=said.faults, kinds=said.kinds,
                styles=said.styles, modes=MODES if said.mode == "both" else (said.mode,), tls=said.tls,
                phases=said.phases, max_ttl=said.max_ttl, older=said.older,
                processes=said.processes, workers=said.workers, pace=said.pace, server=said.server,
                forks=said.forks,
            )  # fmt: skip
            if settings.used_kinds:
                _one(settings, home / f"{topology}-{seed}", verdicts, keep=said.report is not None)
    except KeyboardInterrupt:
        print("\nstopped; so far:")
    except Missing as missing:
        print(f"\nthis machine has no such server: {missing}", file=sys.stderr)
        return 2
    except LookupError as missing:
        print(f"\n{missing}", file=sys.stderr)
        return 2
    except OtherCopy as other:
        print(f"\n{other}", file=sys.stderr)
        return 4
    summary(verdicts)
    sums = sum_up(verdicts, time.monotonic() - began)
    if said.json is not None:
        said.json.write_text(json.dumps(sums, indent=2) + "\n")
    broken = [verdict for verdict in verdicts if verdict.violations]
    for verdict in broken:
        explain(verdict, home / f"{verdict.settings.topology}-{verdict.settings.seed}")
    print("\n" + ", ".join(f"{name} {number}" for name, number in sums.items() if not isinstance(number, dict)))
    if said.report is None and not broken:
        shutil.rmtree(home, ignore_errors=True)
    for topology, phase, tries in (never := never_came(verdicts)):
        print(f"{topology}: the phase {phase} never came about, in {tries} tries; so nothing was tested by it")
    if broken:
        return 1
    return 3 if never or (verdicts and all(verdict.spoiled for verdict in verdicts)) else 0


def _turns(topologies: Sequence[str], first: int, histories: int, minutes: float | None) -> Iterator[tuple[str, int]]:
    """Yield the topology and the seed of each history."""
    if minutes is None:
        yield from product(topologies, range(first, first + histories))
        return
    end = time.monotonic() + 60 * minutes
    for seed in count(first):
        for topology in topologies:
            if time.monotonic() >= end:
                return
            yield topology, seed


def _one(settings: Settings, directory: Path, verdicts: list[Verdict], *, keep: bool) -> None:
    title = f"{settings.topology:<8} seed {settings.seed}"
    terminal = sys.stdout.isatty()

    def say(text: str) -> None:
        if terminal:
            print(f"\r{title}: {text:<50}", end="", flush=True)

    number = count(1)
    while directory.exists():  # of an earlier run
        directory = directory.with_name(f"{settings.topology}-{settings.seed}.{next(number)}")
    began = time.monotonic()
    try:
        verdict = play(settings, directory, say)
    except (TimeoutError, Unavailable) as error:  # of the servers, which a busy machine may not bring up in time
        verdict = Verdict(settings, "", Counter(), [], f"the servers did not come up: {error}", clock())
    verdicts.append(verdict)
    print(
        f"{chr(13) * terminal}{title}: {verdict.counts['granted']} sections, {sum(_struck(verdict).values())} faults, "
        f"{verdict.counts['losses told']} losses told, {verdict.counts['cancellations']} cancellations, "
        f"{len(verdict.violations)} violations, {time.monotonic() - began:.0f} s"
        + f" ({verdict.about})" * bool(verdict.about) + f"; {verdict.spoiled}" * bool(verdict.spoiled),
        flush=True,
    )  # fmt: skip
    if struck := _struck(verdict):
        print("    " + ", ".join(f"{name} {number}" for name, number in struck.items()), flush=True)
    if not verdict.violations and not keep:
        shutil.rmtree(directory, ignore_errors=True)


def _struck(verdict: Verdict) -> dict[str, int]:
    """How often each fault struck."""
    return {
        name.removeprefix(FAULT): number for name, number in sorted(verdict.counts.items()) if name.startswith(FAULT)
    }


def never_came(verdicts: list[Verdict]) -> list[tuple[str, str, int]]:
    """The phases that came about in none of at least three tries: topology, phase, tries."""
    found: list[tuple[str, str, int]] = []
    for topology, phase in product(TOPOLOGIES, PHASES):
        counts = sum((each.counts for each in verdicts if each.settings.topology == topology), Counter[str]())
        if (tries := counts[f"phase: {phase}, absent"]) >= TRIES and not counts[f"phase: {phase}"]:
            found.append((topology, phase, tries))
    return found


def sum_up(verdicts: list[Verdict], seconds: float) -> dict[str, object]:
    """The sums of all histories: what --json writes."""
    counts = sum((verdict.counts for verdict in verdicts), Counter[str]())
    broken = Counter(violation.check for verdict in verdicts for violation in verdict.violations)
    return {
        "histories": len(verdicts),
        "spoiled": sum(bool(verdict.spoiled) for verdict in verdicts),
        "sections": counts["granted"],
        "sections a second": round(counts["granted"] / max(1.0, sum(each.settings.seconds for each in verdicts)), 1),
        "ensure() passed": counts["ensure() passed"],
        "phases": sum(
            number for name, number in counts.items() if name.startswith("phase: ") and not name.endswith("absent")
        ),
        "faults": sum(number for name, number in counts.items() if name.startswith("fault: ")),
        "losses told": counts["losses told"],
        "seconds": round(seconds, 1),
        "violations": broken.total(),
        "violations by check": dict(broken),
        "each history": {
            f"{verdict.settings.topology}, seed {verdict.settings.seed}": {
                "faults": _struck(verdict),
                "losses told": verdict.counts["losses told"],
                "violations": len(verdict.violations),
            }
            for verdict in verdicts
        },
    }


def summary(verdicts: list[Verdict]) -> None:
    """A table: what happened how often on which topology."""
    columns = [topology for topology in TOPOLOGIES if any(each.settings.topology == topology for each in verdicts)]
    counts = {topology: Counter[str]() for topology in columns}
    for verdict in verdicts:
        mine = counts[verdict.settings.topology]
        mine += Counter({name: number for name, number in verdict.counts.items() if number})
        mine["histories"] += 1
        mine["violations"] += len(verdict.violations)
        mine["servers that did not get well"] += bool(verdict.spoiled)
    head = ["histories", "asked", "granted", "ensure() passed", "losses seen", "losses told", "cancellations"]
    rest = sorted({name for each in counts.values() for name in each} - {*head, "violations"})
    print("\n" + " " * 32 + "".join(f"{topology:>10}" for topology in columns))
    for name in [*head, *rest, "violations"]:
        print(f"{name:<32}" + "".join(f"{counts[topology][name]:>10}" for topology in columns))


def explain(verdict: Verdict, directory: Path) -> None:
    """What was broken, and the lines that show it."""
    settings = verdict.settings
    print(f"\n{settings.topology}, seed {settings.seed}; all lines are in {directory}")
    for violation in verdict.violations:
        print(f"\n  VIOLATION ({violation.check}) {violation.text[:1500]}")
        for line in violation.lines[:MOST_LINES]:
            print("  " + shown(line, verdict.started)[:400])
