"""`interlock demo`: runs the flash sale and the API limit, each under every recipe."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.demo import api_limit, flash_sale
from interlock.cli.demo.lock_recipes import LOCK_RECIPES
from interlock.cli.demo.runner import run_scenarios
from interlock.cli.demo.semaphore_recipes import SEMAPHORE_RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.cli.demo.recipe import R, Recipe, Recipes

__all__ = ["app"]

_TTL = 0.25  # seconds: short, since all recipes together wait for some fifty TTLs
_TTL_WITHOUT_FAULTS = 1.0  # seconds: longer than a busy machine delays a client, so that no TTL expires
_MAX_STALLS = 9  # stalls of a sale; the six faults of a plan cause about as many


class Faults(StrEnum):
    """Which faults the demo injects."""

    PLANNED = "planned"
    NONE = "none"


_Processes = Annotated[int, typer.Option(min=1, help="Processes.")]
_Faults = Annotated[Faults, typer.Option(help="Inject the faults that the seed plans, or none (the control).")]
_Seed = Annotated[int, typer.Option(help="Seed of the plan: which client meets which fault.")]
_Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Run only this recipe. Repeat the option, or write a,b, for more."),
]
_Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Use this server, and delete the keys of the demo afterwards. Default: a private server."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of the table.")]


def _epilog(recipes: Recipes[Any], example: str, correct: str) -> str:
    recipe_lines = "\n".join(f"  {recipe.name:<13} {recipe.title}" for recipe in recipes.values())
    status = f"Exit status: 0 if {correct}, 1 if not, 64 for a bad option, 69 if no server answers."
    return f"The recipes:\n\n\b\n{recipe_lines}\n\n\b\n{example}\n\n{status}"


def _faults_label(faults: Faults, seed: int) -> str:
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
    """Sell tickets under every well-known lock recipe, on a real server, and count the tickets sold.

    A shop has N tickets. P processes with T buyers each buy until the tickets are sold out. A sale reads the stock,
    pauses for a moment and writes the stock back, so two buyers who do this at once sell the same ticket. The demo also
    kills a process, stops another for a while, slows buyers down and declines a card, at moments that the seed plans.
    Every recipe meets the same faults.

    The table shows for each recipe: tickets sold twice (oversold), tickets left over because buyers waited in vain
    (lost), and the time. The last column explains the result.
    """
    if context.invoked_subcommand is not None:
        return _reject_options_before(context)
    without_faults = faults is Faults.NONE
    ttl = _TTL_WITHOUT_FAULTS if without_faults else _TTL
    scenarios = [
        flash_sale.FlashSale(
            recipe=recipe,
            goal=tickets,
            clients=buyers,
            ttl=ttl,
            max_stalls=math.inf if without_faults else _MAX_STALLS,
            faults={} if without_faults else flash_sale.plan(tickets, seed),
        )
        for recipe in _choose(LOCK_RECIPES, only)
    ]
    title = (
        f"{tickets} tickets, {processes} processes x {buyers} buyers, locks of {ttl} s, {_faults_label(faults, seed)}"
    )
    return run_scenarios(scenarios, title, processes=processes, url=url, as_json=as_json)


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
    """Call an API that takes five calls at a time, under every well-known semaphore recipe, and count its open calls.

    P processes with T callers each make N calls. A call takes a permit, requests a few pages from the API and releases
    the permit. The API logs every request. The demo also kills a process, stops another for a while, slows down calls
    and callers that take a permit, and sets the clocks of two processes wrong by less than a permit's timeout: one
    behind, one ahead.

    The table shows for each recipe: the most calls that were open at once, the calls that began while the API was full
    (too many), the permits that nobody can take any more when all callers have finished (leaked), and the time. The
    last column explains the result.
    """
    without_faults = faults is Faults.NONE
    ttl = _TTL_WITHOUT_FAULTS if without_faults else _TTL
    scenarios = [
        api_limit.ApiLimit(
            recipe=recipe,
            goal=calls,
            limit=limit,
            clients=callers,
            ttl=ttl,
            max_stalls=math.inf,
            faults={} if without_faults else api_limit.plan(calls, processes * callers, seed),
            clock_offsets=() if without_faults else tuple(ttl * ahead for ahead in api_limit.CLOCK_OFFSETS),
        )
        for recipe in _choose(SEMAPHORE_RECIPES, only)
    ]
    title = (
        f"{calls} calls, {limit} at a time, {processes} processes x {callers} callers, permits of {ttl} s, "
        f"{_faults_label(faults, seed)}"
    )
    return run_scenarios(scenarios, title, processes=processes, url=url, as_json=as_json)


def _choose(recipes: Recipes[R], only: Sequence[str] | None) -> list[Recipe[R]]:
    """The recipes that `--only` names, or all of them."""
    names = [name.strip() for names in only or [] for name in names.split(",")]
    for name in names:
        if name not in recipes:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(recipes)}", param_hint="--only")
    return [recipe for recipe in recipes.values() if not names or recipe.name in names]


def _reject_options_before(context: typer.Context) -> int:
    """Refuse options before a subcommand, which typer would ignore."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"put it after {context.invoked_subcommand!r}", param_hint=parameter.opts[0])
    return 0


_SALE_EPILOG = _epilog(LOCK_RECIPES, "interlock demo --only setnx,lua,interlock", "interlock sold exactly all tickets")
_SEMAPHORE_EPILOG = _epilog(
    SEMAPHORE_RECIPES,
    "interlock demo semaphore --limit 3",
    "interlock made all calls, never too many at once, and leaked no permit",
)

app = typer.Typer(subcommand_metavar="[COMMAND [OPTIONS]]", rich_markup_mode=None, add_completion=False)
app.callback(invoke_without_command=True, epilog=_SALE_EPILOG)(sale)  # `interlock demo` alone is the sale
app.command("sale", epilog=_SALE_EPILOG, short_help="The flash sale: every lock recipe.")(sale)
app.command("semaphore", epilog=_SEMAPHORE_EPILOG, short_help="Five calls at a time: every semaphore recipe.")(
    semaphore
)
