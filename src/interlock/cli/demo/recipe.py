"""A ladder: the recipes that people write for one thing, from none at all to interlock, and why each of them fails.

A recipe says what goes wrong with it, as a sentence that may be used only if this was seen: its `sign` is what must
have been seen (see `Account`). A recipe that got through unharmed is told so. The last rung has no flaw to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.cli.demo.scenario import Result

__all__ = ["Recipe", "Recipes", "why"]

R = TypeVar("R", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class Recipe(Generic[R]):
    """A named way to do it, and the sentence that explains its result."""

    name: str
    title: str
    event: str  # what must have been seen ...
    flaw: str  # ... to say this
    run: R


class Recipes(dict[str, Recipe[R]]):
    """Recipes by name, in the order in which people come upon them."""

    def recipe(self, name: str, title: str, *, event: str = "", flaw: str = "") -> Callable[[R], R]:
        """Make a function the next rung."""

        def register(run: R) -> R:
            self[name] = Recipe(name, title, event, flaw, run)
            return run

        return register


def why(recipe: Recipe[Any], result: Result) -> str:
    """Explain a result in a sentence, by what was seen."""
    events = result.events
    if recipe.event and events[recipe.event]:
        return recipe.flaw.format_map(events) + result.addition(recipe.event)
    if not result.correct:
        return result.failure
    if not recipe.event:
        shown = [f"{text} ({events[event]}x)" for event, text in result.strengths.items() if events[event]]
        return ", ".join(shown) or result.uneventful
    return "nothing went wrong in this run"
