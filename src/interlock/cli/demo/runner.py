"""Runs a scenario under each of its recipes, on a real server, and prints a table of the results."""

from __future__ import annotations

import contextlib
import functools
import secrets
import signal
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from interlock import embedded
from interlock.cli.demo.connection import BareConnection
from interlock.cli.demo.processes import Processes
from interlock.cli.output import console, print_json

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from interlock.cli.demo.connection import Execute
    from interlock.cli.demo.recipe import Recipe
    from interlock.cli.demo.scenario import Scenario

__all__ = ["run_scenarios"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table, and an object of `--json`."""

    recipe: Recipe[Any]
    numbers: dict[str, int]
    seconds: float
    why: str

    def as_json(self) -> dict[str, str | float]:
        """The object that `--json` prints."""
        return {"name": self.recipe.name, **self.numbers, "seconds": self.seconds, "why": self.why}


def run_scenarios(scenarios: Sequence[Scenario], title: str, *, processes: int, url: str | None, as_json: bool) -> int:
    """Run the scenarios one after the other, each under its recipe, and print their results.

    Returns 0 if interlock's result is correct, 1 if not. Raises ConfigError, Unavailable.
    """
    rows: list[Row] = []
    status = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM runs the clean-up that Ctrl-C runs
    with (
        _server(url) as (server_url, execute, prefix),
        Processes(processes) as workers,
        _progress_display(scenarios[0], rows) as progress,
    ):
        for number, scenario in enumerate(scenarios, 1):
            recipe = scenario.recipe
            task = progress.add_task(f"{number}/{len(scenarios)} {recipe.name:<12}", total=scenario.goal)
            located = replace(scenario, url=server_url, prefix=f"{prefix}{recipe.name}:")
            seconds = workers.run(located, execute, functools.partial(_advance, progress, task))
            result = located.result(execute, seconds)
            progress.remove_task(task)
            rows.append(Row(recipe, result.numbers(), round(seconds, 2), result.explain(recipe)))
            status |= recipe.name == "interlock" and not result.is_correct
    if as_json:
        print_json([row.as_json() for row in rows])
    else:
        console(soft_wrap=False).print(_table(scenarios[0], rows, title))
    return int(status)


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


@contextlib.contextmanager
def _server(url: str | None) -> Generator[tuple[str, Execute, str]]:
    """The URL of the server, a function that sends it commands, and a prefix; deletes all keys with it afterwards."""
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(embedded.Server()).url
        connection = stack.enter_context(contextlib.closing(BareConnection(url)))
        prefix = f"interlock-demo:{secrets.token_hex(4)}:"
        try:
            yield url, connection.execute, prefix
        finally:
            cursor = b"0"
            while True:
                cursor, keys = connection.execute("SCAN", cursor, "MATCH", f"*{prefix}*", "COUNT", 1000)
                if keys:
                    connection.execute("DEL", *keys)
                if cursor == b"0":
                    break


@contextlib.contextmanager
def _progress_display(scenario: Scenario, rows: Sequence[Row]) -> Generator[Progress]:
    """A progress bar of the scenario that runs, above the rows so far; without a terminal it shows nothing."""
    terminal = console(sys.stderr, soft_wrap=False)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn(scenario.done_label),
        console=terminal,
        expand=True,
    )
    if not terminal.is_terminal:
        yield progress
        return
    with Live(get_renderable=lambda: Group(progress, _table(scenario, rows)), console=terminal, transient=True):
        yield progress


def _table(scenario: Scenario, rows: Sequence[Row], title: str | None = None) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("recipe", style="bold")
    for heading in (*(column.heading for column in scenario.columns), "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("why")
    for row in rows:
        numbers = [(row.numbers[column.name], column.style) for column in scenario.columns]
        table.add_row(
            row.recipe.name,
            *[Text(str(number), style=style if number else "") for number, style in numbers],
            f"{row.seconds:.1f}",
            Text.assemble((row.recipe.title, "dim"), "\n", row.why),
        )
    return table
