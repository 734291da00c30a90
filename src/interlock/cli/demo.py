"""`interlock demo`: the flash sale, held once under each recipe of the ladder, and the table of what came of it."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from interlock import embedded
from interlock.cli.crew import Crew
from interlock.cli.recipes import RECIPES, Recipe, why
from interlock.cli.sale import Sale, Wire, plan

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from interlock.cli.sale import Ask, Fault

__all__ = ["EPILOG", "demo"]

_TTL = 0.35  # seconds: short, as the whole ladder waits for some fifty of them ...
_TTL_CONTROL = 1.0  # ... but in the control no hiccup of the machine should outlast one
_PATIENCE = 10.0  # TTLs without a sale, in sum; interlock and `lua` need about five to get through the plan

EPILOG = "\n\n".join(
    [
        "The ladder, by name:",
        *(f"[bold]{recipe.name}[/]  {recipe.title}" for recipe in RECIPES.values()),
        "Exit status: 0 if interlock sold exactly all tickets, 1 if not, 64 for bad options, 69 if a server is not"
        " to be had.",
    ]
)


class Faults(StrEnum):
    """Which faults a sale meets."""

    PLANNED = "planned"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table, and of `--json`."""

    name: str
    sold: int
    oversold: int
    lost_sales: int
    seconds: float
    why: str


def _chosen(only: Sequence[str]) -> list[Recipe]:
    names = [name.strip() for names in only for name in names.split(",")]
    for name in names:
        if name not in RECIPES:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(RECIPES)}", param_hint="--only"
            )
    return [recipe for recipe in RECIPES.values() if not names or recipe.name in names]


def demo(
    *,
    tickets: Annotated[int, typer.Option(min=1, help="Tickets in stock.")] = 40,
    processes: Annotated[int, typer.Option(min=1, help="Processes that sell.")] = 4,
    buyers: Annotated[int, typer.Option(min=1, help="Buyers (threads) in each process.")] = 4,
    faults: Annotated[
        Faults, typer.Option(help="What goes wrong: what the seed plans, or nothing (the control).")
    ] = Faults.PLANNED,
    seed: Annotated[int, typer.Option(help="Of the plan: which buyer meets which fault.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this recipe; again, or a,b, for more.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Use this server, and leave nothing in it. Without: a private one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of the table.")] = False,
) -> int:
    """Sell tickets under every well-known lock recipe, on a real server, and count who got one.

    A shop has N tickets. P processes with T buyers each buy until they are sold out; a sale reads the stock, thinks for
    a moment and writes it back, so two who do it at once sell the same ticket. On top come a process that is killed, one
    that is stopped for a while, slow buyers and a declined card, at moments that the seed plans: the same for all.

    Each recipe then shows what it is worth: tickets sold twice (oversold), tickets left over because buyers waited in
    vain (lost sales), and the time it took. A last column says why.
    """
    recipes = _chosen(only or [])
    planned = plan(tickets, seed) if faults is Faults.PLANNED else {}
    rows: list[Row] = []
    progress_console = Console(stderr=True)
    with (
        _server(url) as where,
        Crew(processes) as crew,
        Progress(
            TextColumn("{task.fields[place]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("sold · [bold]{task.description}"),
            console=progress_console,
            transient=True,
            expand=True,
            disable=not progress_console.is_terminal,
        ) as progress,
        contextlib.closing(Wire(where)) as wire,
    ):
        pass
    return 0
