"""Recipes: the ways in which people solve one task, from no lock at all to interlock, and the flaw of each.

A recipe has a sentence about its flaw. The demo prints the sentence only if the run has shown the flaw: if the event
that the recipe names was counted (see `Result.explain`). The last recipe, interlock, has no flaw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recipe", "Recipes"]

R = TypeVar("R", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class Recipe(Generic[R]):
    """A named way to solve the task, and the sentence about its flaw."""

    name: str
    title: str
    event: str  # the event that shows the flaw; "" for interlock
    flaw: str  # the sentence, with `{event}` for the number of such events
    run: R


class Recipes(dict[str, Recipe[R]]):
    """Recipes by name, from the most naive to interlock."""

    def recipe(self, name: str, title: str, *, event: str = "", flaw: str = "") -> Callable[[R], R]:
        """Add the decorated function as the next recipe."""

        def register(run: R) -> R:
            self[name] = Recipe(name, title, event, flaw, run)
            return run

        return register
