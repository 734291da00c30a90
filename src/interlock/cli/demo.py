"""`interlock demo`: the flash sale, held once under each recipe of the ladder, and the table of what came of it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import secrets
import signal
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from interlock import embedded
from interlock.cli.crew import Crew
from interlock.cli.recipes import RECIPES, Recipe, why
from interlock.cli.sale import Sale, Wire, plan

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from interlock.cli.sale import Ask

__all__ = ["EPILOG", "demo"]

_TTL = 0.25  # seconds: short, as the whole ladder waits for some fifty of them ...
_TTL_CALM = 1.0  # ... but without faults no hiccup of the machine should outlast one
_PATIENCE = 9  # standstills; the plan's six faults make about as many

EPILOG = "\n\n".join(
    [
        "The ladder:",
        "\b\n" + "\n".join(f"  {recipe.name:<13} {recipe.title}" for recipe in RECIPES.values()),
        "Exit status: 0 if interlock sold exactly all tickets, 1 if not, 64 for a bad option, 69 without a server.",
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
            raise typer.BadParameter(f"{name!r} is none of {', '.join(RECIPES)}", param_hint="--only")
    return [recipe for recipe in RECIPES.values() if not names or recipe.name in names]


def demo(
    *,
    tickets: Annotated[int, typer.Option(min=1, help="Tickets in stock.")] = 40,
    processes: Annotated[int, typer.Option(min=1, help="Processes that sell.")] = 4,
    buyers: Annotated[int, typer.Option(min=1, help="Buyers (threads) in each process.")] = 3,
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

    A shop has N tickets. P processes with T buyers each buy until they are sold out; a sale reads the stock,
    thinks for a moment and writes it back, so two who do it at once sell the same ticket. On top come a process
    that is killed, one that is stopped for a while, slow buyers and a declined card, at moments that the seed
    plans: the same for all.

    Each recipe then shows what it is worth: tickets sold twice (oversold), tickets left over because buyers waited in
    vain (lost sales), and the time it took. A last column says why.
    """
    recipes = _chosen(only or [])
    faults_by_entry = plan(tickets, seed) if faults is Faults.PLANNED else {}
    calm = not faults_by_entry
    ttl = _TTL_CALM if calm else _TTL
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, and tidies up
    with _server(url) as (where, ask, prefix), Crew(processes) as crew, _screen(rows) as progress:
        for number, recipe in enumerate(recipes, 1):
            task = progress.add_task(f"{number}/{len(recipes)} {recipe.name:<12}", total=tickets)
            sale = Sale(
                recipe=recipe.name,
                url=where,
                prefix=f"{prefix}{recipe.name}:",
                tickets=tickets,
                buyers=buyers,
                ttl=ttl,
                patience=math.inf if calm else _PATIENCE,
                faults=faults_by_entry,
            )
            account = crew.run(sale, ask, functools.partial(_advance, progress, task))
            progress.remove_task(task)
            rows.append(
                Row(
                    name=recipe.name,
                    sold=account.sold,
                    oversold=account.oversold,
                    lost_sales=account.lost_sales,
                    seconds=round(account.seconds, 2),
                    why=why(recipe, account),
                )
            )
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
    else:
        luck = "no faults" if calm else f"faults of seed {seed}"
        title = f"{tickets} tickets, {processes} processes x {buyers} buyers, locks of {ttl} s, {luck}"
        Console().print(_table(rows, title))
    return int(any(row.name == "interlock" and row.sold != tickets for row in rows))


def _advance(progress: Progress, task: TaskID, sold: int) -> None:
    progress.update(task, completed=sold)


@contextlib.contextmanager
def _server(url: str | None) -> Generator[tuple[str, Ask, str]]:
    """The server to use, a connection to it, and a prefix for keys, of which none is left in the end."""
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(embedded.Server()).url
        wire = stack.enter_context(contextlib.closing(Wire(url)))
        prefix = f"interlock-demo:{secrets.token_hex(4)}:"
        try:
            yield url, wire.ask, prefix
        finally:
            cursor = b"0"
            while True:
                cursor, keys = wire.ask("SCAN", cursor, "MATCH", f"*{prefix}*", "COUNT", 1000)
                if keys:
                    wire.ask("DEL", *keys)
                if cursor == b"0":
                    break


@contextlib.contextmanager
def _screen(rows: Sequence[Row]) -> Generator[Progress]:
    """A bar for the sale that is on, above the rows so far; nothing where there is no terminal."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("sold"),
        console=console,
        expand=True,
    )
    if not console.is_terminal:
        yield progress
        return
    with Live(get_renderable=lambda: Group(progress, _table(rows)), console=console, transient=True):
        yield progress


def _table(rows: Sequence[Row], title: str | None = None) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("recipe", style="bold")
    for name in ("sold", "oversold", "lost", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for row in rows:
        table.add_row(
            row.name,
            str(row.sold),
            Text(str(row.oversold), style="bold red" if row.oversold else ""),
            Text(str(row.lost_sales), style="yellow" if row.lost_sales else ""),
            f"{row.seconds:.1f}",
            Text.assemble((RECIPES[row.name].title, "dim"), "\n", row.why),
        )
    return table
