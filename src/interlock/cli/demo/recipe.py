"""A ladder: the recipes that people write for one thing, from none at all to interlock, and why each of them fails.

A recipe says what goes wrong with it, as a sentence that may be used only if this was seen: its `sign` is what must
have been seen (see `Account`). A recipe that got through unharmed is told so. The last rung has no flaw to show.
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
