"""`interlock demo`: the flash sale, and the rush on an API. Each is held under every recipe of its ladder."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.demo import api_limit as rush
from interlock.cli.demo import flash_sale as shop
from interlock.cli.demo.lock_recipes import RECIPES
from interlock.cli.demo.runner import climb
from interlock.cli.demo.semaphore_recipes import SEMAPHORES

if TYPE_CHECKING:
    from interlock.cli.demo.recipe import Ladder

__all__ = ["app"]

_TTL = 0.25  # seconds: short, as a whole ladder waits for some fifty of them ...
_TTL_CALM = 1.0  # ... but without faults no hiccup of the machine should outlast one
_PATIENCE = 9  # standstills of a sale; the plan's six faults make about as many


class Faults(StrEnum):
    """Which faults a trial meets."""

    PLANNED = "planned"
    NONE = "none"


_Processes = Annotated[int, typer.Option(min=1, help="Processes.")]
_Faults = Annotated[Faults, typer.Option(help="What goes wrong: what the seed plans, or nothing (the control).")]
_Seed = Annotated[int, typer.Option(help="Of the plan: who meets which fault.")]
_Only = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this recipe; again, or a,b, for more.")]
_Url = Annotated[
    str | None, typer.Option(metavar="URL", help="Use this server, and leave nothing in it. Without: a private one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of the table.")]


def _epilog(ladder: Ladder[Any], good: str) -> str:
    rungs = "\n".join(f"  {recipe.name:<13} {recipe.title}" for recipe in ladder.values())
    status = f"Exit status: 0 if {good}, 1 if not, 64 for a bad option, 69 without a server."
    return f"The ladder:\n\n\b\n{rungs}\n\n{status}"


def _luck(faults: Faults, seed: int) -> str:
    return "no faults" if faults is Faults.NONE else f"faults of seed {seed}"


def sale(
    context: typer.Context,
    *,
    tickets: Annotated[int, typer.Option(min=1, help="Tickets in stock.")] = 40,
    processes: _Processes = 4,
    buyers: Annotated[int, typer.Option(min=1, help="Buyers (threads) in each process.")] = 3,
    faults: _Faults = Faults.PLANNED,
    seed: _Seed = 1,
    only: _Only = None,
    url: _Url = None,
    as_json: _Json = False,
) -> int:
    """Sell tickets under every well-known lock recipe, on a real server, and count who got one.

    A shop has N tickets. P processes with T buyers each buy until they are sold out; a sale reads the stock,
    thinks for a moment and writes it back, so two who do it at once sell the same ticket. On top come a process
    that is killed, one that is stopped for a while, slow buyers and a declined card, at moments that the seed
    plans: the same for all.

    Each recipe then shows what it is worth: tickets sold twice (oversold), tickets left over because buyers waited in
    vain (lost sales), and the time it took. A last column says why.
    """
    if context.invoked_subcommand is not None:
        return _nothing_before(context)
    calm = faults is Faults.NONE
    trial = shop.Sale(
        goal=tickets,
        clients=buyers,
        ttl=_TTL_CALM if calm else _TTL,
        patience=math.inf if calm else _PATIENCE,
        faults={} if calm else shop.plan(tickets, seed),
    )
    title = f"{tickets} tickets, {processes} processes x {buyers} buyers, locks of {trial.ttl} s, {_luck(faults, seed)}"
    return climb(trial, title, processes=processes, only=only or [], url=url, as_json=as_json)


def semaphore(
    *,
    calls: Annotated[int, typer.Option(min=1, max=100_000, help="Calls to be made.")] = 120,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Calls that the API takes at a time.")] = 5,
    processes: _Processes = 4,
    callers: Annotated[int, typer.Option(min=1, help="Callers (threads) in each process.")] = 3,
    faults: _Faults = Faults.PLANNED,
    seed: _Seed = 1,
    only: _Only = None,
    url: _Url = None,
    as_json: _Json = False,
) -> int:
    """Call an API that takes five calls at a time, under every well-known semaphore recipe, and count how many it had.

    P processes with T callers each make N calls; a call takes a permit, asks the API for a few pages and gives the
    permit back. The API itself notes every request. On top come a process that is killed, one that is stopped for a
    while, slow calls, callers that are slow while they take a permit, and two processes whose clocks are
    wrong by less than a permit's timeout: one is behind, one is ahead.

    Each recipe then shows what it is worth: the most calls that the API had at once, those that came in when it was
    full (too many), permits that nobody gets any more when all have left (leaked), and the time it took. A last column
    says why.
    """
    calm = faults is Faults.NONE
    ttl = _TTL_CALM if calm else _TTL
    trial = rush.Rush(
        goal=calls,
        limit=limit,
        clients=callers,
        ttl=ttl,
        patience=math.inf,
        faults={} if calm else rush.plan(calls, processes * callers, seed),
        clocks=() if calm else tuple(ttl * ahead for ahead in rush.CLOCKS),
    )
    title = (
        f"{calls} calls, {limit} at a time, {processes} processes x {callers} callers, permits of {ttl} s, "
        f"{_luck(faults, seed)}"
    )
    return climb(trial, title, processes=processes, only=only or [], url=url, as_json=as_json)


def _nothing_before(context: typer.Context) -> int:
    """Options before the name of a ladder would be lost."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"put it after {context.invoked_subcommand!r}", param_hint=parameter.opts[0])
    return 0


_SOLD = _epilog(RECIPES, "interlock sold exactly all tickets")
_MADE = _epilog(SEMAPHORES, "interlock made all calls, never too many at once, and leaked no permit")

app = typer.Typer(subcommand_metavar="[COMMAND [OPTIONS]]")
app.callback(invoke_without_command=True, epilog=_SOLD)(sale)  # `interlock demo` alone is the sale
app.command("sale", epilog=_SOLD, short_help="The flash sale: every lock recipe.")(sale)
app.command("semaphore", epilog=_MADE, short_help="Five calls at a time: every semaphore recipe.")(semaphore)
