"""`scripts/bench`: the numbers of DESIGN section 5, measured here and now, side by side with floor and peers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import redis
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import crowds
import engines
import rows
from interlock.embedded import Server
from measure import Bench, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS: dict[int, Callable[[Bench], Iterator[Outcome]]] = {
    1: rows.alone,
    2: rows.tasks,
    3: crowds.crowded,
    4: crowds.crowded,
    5: crowds.handover,
    6: crowds.waiting,
    7: crowds.holding,
    8: rows.imports,
    9: rows.synchronizers,
    10: rows.synchronizer_tasks,
    11: crowds.waiting_elsewhere,
    12: crowds.beside,
    13: crowds.arriving,
    14: engines.cluster,
    15: engines.scaling,
    16: engines.quorums,
    17: engines.failover,
}
USUAL = [number for number in ROWS if number != 7]  # that one takes longer than all the others
EX_USAGE = 64
PEERS = ("redis", "hiredis", "python-redis-lock", "redis-fifo-lock", "pottery")

ABOUT = """\
Measures interlock against the floor (the same messages, packed before, over
bare connections) and against its peers, all in one run on a private server, and
says which goals are met.
"""
MORE = """\
rows:
  1  threads, one lock, nobody else
  2  asyncio, 100 tasks on 100 locks
  3  4 processes x 8 threads on one lock (measured together with 4)
  4  the same with fair=True
  5  handover between 2 processes
  6  10,000 waiters on one lock
  7  100,000 leases held by one process (only if asked for: 90 s)
  8  import interlock
  9  threads, every primitive alone, against the lock
 10  the same with asyncio, 100 tasks
 11  10,000 waiters on a semaphore, a read-write lock, and in an election
 12  10,000 holders of a semaphore, and of a read-write lock
 13  10,000 who wait at a latch, and at a barrier
 14  a cluster against one server
 15  one, two and three shards
 16  quorums of 3 and 5 against one server, and pottery's Redlock
 17  a failover of Sentinel

In each round every contender has a short slice, in alternating order. Shown is
the median over the rounds; a ratio compares what ran in the same round: it is
the median of the rounds' own ratios, with their middle half behind it. Absolute
numbers change with the machine and the minute; ratios less. Nothing else should
run meanwhile.

Exit status: 0 whatever the timings say; 1 if something broke (a lock that did
not exclude, a lease that was lost); 64 for bad options.
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"bench: {message}. See --help", file=sys.stderr)
        sys.exit(EX_USAGE)


def _rows(text: str) -> list[int]:
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = [0]
    if not set(wanted) <= set(ROWS):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers out of {', '.join(map(str, ROWS))}")
    return sorted(set(wanted))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def _options() -> argparse.Namespace:
    parser = Parser(
        prog="scripts/bench", description=ABOUT, epilog=MORE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=_rows, default=USUAL, metavar="N,N", help="only these rows (all but 7)")
    parser.add_argument("--rounds", type=_positive, metavar="N", help="rounds of each row (as many as it needs)")
    parser.add_argument("--quick", action="store_true", help="a short look, in two or three minutes")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there; - is the standard output")
    return parser.parse_args()


def main() -> None:
    options = _options()
    shown = Console(stderr=options.json == "-")
    outcomes: list[Outcome] = []
    with Server() as server, Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=shown, transient=True, auto_refresh=False,
    ) as progress:  # fmt: skip
        bar = progress.add_task("")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)
            progress.refresh()

        about = _about(str(server.socket))
        bench = Bench(str(server.socket), rounds=options.rounds, quick=options.quick, tell=tell)
        for row in dict.fromkeys(ROWS[number] for number in options.rows):
            outcomes += [outcome for outcome in row(bench) if outcome.number in options.rows]
    for outcome in outcomes:
        show(shown, outcome)
    shown.print("\n" + ", ".join(f"{key} {value}" for key, value in about.items()), style="dim", highlight=False)
    if options.json:
        text = json.dumps({"about": about, "rows": [outcome.as_json() for outcome in outcomes]}, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
    if broken := [str(outcome.number) for outcome in outcomes if outcome.broken]:
        sys.exit(f"bench: row {', '.join(broken)}: a lock did not exclude, or a lease was lost")


def _about(path: str) -> dict[str, object]:
    server = redis.Redis(unix_socket_path=path)
    info = server.info("server")
    server.close()
    return {
        "Python": platform.python_version(), "cores": os.cpu_count(),
        info.get("server_name", "redis"): info.get("valkey_version", info["redis_version"]),
        **{peer: version(peer) for peer in PEERS},
    }  # fmt: skip


def show(console: Console, outcome: Outcome) -> None:
    """A block for each row: ours, then everybody else with what ours is in comparison."""
    console.print(f"\n[bold]{outcome.number}  {outcome.what}[/], {outcome.unit}", highlight=False)
    block = Table(box=None, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading, width in (("", 30), ("median", 7), ("ratio", 7), ("middle half", 14), ("goal", 8), ("", 6)):
        block.add_column(heading, width=width, justify="right" if heading else "left", no_wrap=True)
    for name in sorted(outcome.samples, key=lambda name: name != outcome.ours):
        _line(block, outcome, name)
    for check in outcome.checks:
        block.add_row(f"  {check.what}", check.value, "", "", check.goal, _verdict(check.met))
    console.print(block)
    for name, remark in outcome.remarks.items():
        console.print(f"  [dim]{name}: {remark}[/]", highlight=False)
    if outcome.note:
        console.print(Padding(f"[dim]{outcome.note}[/]", (0, 0, 0, 2)), highlight=False)


def _line(result: Table, outcome: Outcome, name: str) -> None:
    median = outcome.median(name)
    shown = f"{median:,.0f}" if median >= 1000 else f"{median:.3g}"
    label = f"  {name}"
    if name == outcome.ours:
        result.add_row(label, f"[bold]{shown}[/]")
        return
    ratio, (low, high) = outcome.ratio(name), outcome.spread(name)
    goals = outcome.goals_of(name)
    result.add_row(
        label, shown, f"{_short(ratio)} ×", f"{_short(low)} to {_short(high)}", ", ".join(map(str, goals)),
        _verdict(all(goal.met(ratio) for goal in goals) if goals else None),
    )  # fmt: skip


def _short(ratio: float) -> str:
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.2f}" if ratio >= 0.01 else "<0.01"


def _verdict(met: bool | None) -> str:
    return "" if met is None else "[green]met[/]" if met else "[red]missed[/]"


if __name__ == "__main__":
    main()
