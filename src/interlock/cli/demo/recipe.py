"""A ladder: the recipes that people write for one thing, from none at all to interlock, and why each of them fails.

A recipe says what goes wrong with it, as a sentence that may be used only if this was seen: its `sign` is what must
have been seen (see `Account`). A recipe that got through unharmed is told so. The last rung has no flaw to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.cli.demo.scenario import Account

__all__ = ["Ladder", "Recipe", "why"]

R = TypeVar("R", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class Recipe(Generic[R]):
    """A named way to do it, and the sentence that explains its result."""

    name: str
    title: str
    sign: str  # what must have been seen ...
    flaw: str  # ... to say this
    run: R


class Ladder(dict[str, Recipe[R]]):
    """Recipes by name, in the order in which people come upon them."""

    def rung(self, name: str, title: str, *, sign: str = "", flaw: str = "") -> Callable[[R], R]:
        """Make a function the next rung."""

        def register(run: R) -> R:
            self[name] = Recipe(name, title, sign, flaw, run)
            return run

        return register


def why(recipe: Recipe[Any], account: Account) -> str:
    """Explain a result in a sentence, by what was seen."""
    seen = account.seen
    if recipe.sign and seen[recipe.sign]:
        return recipe.flaw.format_map(seen) + account.besides(recipe.sign)
    if not account.good:
        return account.otherwise
    if not recipe.sign:
        shown = [f"{text} ({seen[note]}x)" for note, text in account.virtues.items() if seen[note]]
        return ", ".join(shown) or account.calm
    return "nothing went wrong in this run"
