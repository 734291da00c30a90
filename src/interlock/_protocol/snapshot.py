"""Copies of what other threads change meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


def snapshot(items: Iterable[T]) -> list[T]:
    """A list of a deque's or a set's items. Without the GIL, `list()` and `copy()` of these are several steps."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # another thread changed them meanwhile
            continue
