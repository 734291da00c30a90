"""How outcomes are shown: tables for a terminal, and the table of goals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table

from goals import BEFORE
from measure import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from measure import Outcome

PAGE = "docs/internals/goals.md"
ALL_GOALS = "goals-that-are-missed-and-why"
SHARED = {  # the section of a row that has none of its own
    **dict.fromkeys(("waiters", "leases", "import"), "waiters-leases-import"),
    **dict.fromkeys(("crowds", "holders", "arrivals"), "crowds-holders-arrivals"),
    **dict.fromkeys(("registry", "observers"), "registry-observers"),
    **dict.fromkeys(("contended-tasks", "semaphore", "primitives", "primitive-tasks", "shards", "failover"), ALL_GOALS),
    **dict.fromkeys(("quorum", "quorum-contended", "quorum-handover"), "quorum"),
}


def why(row: str) -> str:
    """Where the docs say why goals of this row are missed."""
    return f"{PAGE}#{SHARED.get(row, row)}"


def show(console: Console, outcome: Outcome) -> None:
    """A table of each outcome: ours, then all other contenders with what ours is in comparison."""
    console.print(f"\n[bold]{outcome.row}[/]  {outcome.what}, {outcome.unit}", highlight=False)
    block = Table(box=None, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    headings = [("", 30), ("median", 7), ("ratio", 7), ("middle half", 14), ("goal", 8), ("", 6)]
    if outcome.latencies:
        headings[4:4] = [("p50", 7), ("p99", 7), ("max", 9)]
    for heading, width in headings:
        block.add_column(heading, width=width, justify="right" if heading else "left", no_wrap=True)
    for name in sorted(outcome.samples, key=lambda name: name != outcome.ours):
        block.add_row(*_line(outcome, name))
    blank = [""] * (5 if outcome.latencies else 2)
    for check in outcome.checks:
        block.add_row(f"  {check.what}", check.value, *blank, check.goal, _verdict(check.met))
    console.print(block)
    for name, remark in outcome.remarks.items():
        console.print(f"  [dim]{name}: {remark}[/]", highlight=False)
    notes = [f"p50, p99 and max: of {outcome.latency}, in {outcome.latency_unit}."] if outcome.latencies else []
    if outcome.note:
        notes.append(outcome.note)
    if notes:
        console.print(Padding(f"[dim]{' '.join(notes)}[/]", (0, 0, 0, 2)), highlight=False)
    if outcome.is_missed():
        console.print(f"  [red]missed[/]: {why(outcome.row)} says why", highlight=False)


def _line(outcome: Outcome, name: str) -> list[str]:
    tail = outcome.tail(name)
    times = [shown(each) for each in tail] if tail else [""] * (3 if outcome.latencies else 0)
    if name == outcome.ours:
        return [f"  {name}", f"[bold]{_median(outcome, name)}[/]", "", "", *times, "", ""]
    low, high = outcome.spread(name)
    verdicts = [verdict for verdict in outcome.verdicts() if verdict.against == name]
    return [
        f"  {name}", _median(outcome, name), f"{short(outcome.ratio(name))} ×", f"{short(low)} to {short(high)}",
        *times, ", ".join(str(verdict.goal) for verdict in verdicts),
        _verdict(all(verdict.met for verdict in verdicts) if verdicts else None),
    ]  # fmt: skip


def _median(outcome: Outcome, name: str) -> str:
    return shown(outcome.median(name))


def short(ratio: float) -> str:
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.2f}" if ratio >= 0.01 else "<0.01"


def _verdict(met: bool | None) -> str:
    return "" if met is None else "[green]met[/]" if met else "[red]missed[/]"


# The table of goals


HEAD = "| row | interlock | compared with | ratio | goal |"


def markdown(outcomes: Iterable[Outcome], about: str) -> str:
    """The table of goals: a line for each goal, and for each peer that is fast because others starve."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for outcome in outcomes:
        lines += _markdown_lines(outcome)
    return "\n".join([*lines, "", about])


def _markdown_lines(outcome: Outcome) -> list[str]:
    ours = f"`{outcome.row}`: {outcome.what} | {_cell(outcome, outcome.ours)}"
    found = [
        f"{_cell(outcome, each.against)} | {short(each.ratio)} × | {_goal(outcome, str(each.goal), each.met)}"
        for each in outcome.verdicts()
    ]
    for name, share in outcome.starving.items():
        starves = f"{_cell(outcome, name)}; starves: a thread gets {share:.0%} of an equal share"
        found.append(f"{starves} | {short(outcome.ratio(name))} × | ")
    found += [
        f"{check.what}: {check.value} | | {_goal(outcome, check.goal, check.met)}"
        for check in outcome.checks
        if check.met is not None
    ]
    return [f"| {ours if not i else ' | '} | {line} |" for i, line in enumerate(found)]


def _goal(outcome: Outcome, goal: str, met: bool) -> str:
    return f"{goal} {'met' if met else f'[missed](#{SHARED.get(outcome.row, outcome.row)})'}"


def _cell(outcome: Outcome, name: str) -> str:
    """What a contender did, with its longest latency beside it."""
    label = outcome.remarks.get(name, name).partition(";")[0] if name == BEFORE else name
    text = f"{_median(outcome, name)} {outcome.unit}" if name == outcome.ours else f"{label}: {_median(outcome, name)}"
    tail = outcome.tail(name)
    return text + (f"; p99 {shown(tail[1])}, longest {shown(tail[2])} {outcome.latency_unit}" if tail else "")
