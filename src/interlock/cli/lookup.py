"""What the server has under names, for commands: see `_people/views.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock._people.views import FIRST, LISTED, MOST
from interlock._protocol.run_to_end import run
from interlock.primitives.view import Holder, Party, View, Waiter

if TYPE_CHECKING:
    from interlock.primitives.registry import Listed
    from interlock.threads import Interlock

__all__ = ["LISTED", "MOST", "Holder", "Party", "View", "Waiter", "glance", "look", "look_at_all", "with_places"]


def look(locks: Interlock, name: str, most: int = FIRST, *, twice: bool = False) -> View:
    """See Views.look(). Raises Unavailable or ConfigError."""
    session = locks._session
    return run(session.views.look(session.core, name, locks.prefix, most, twice=twice))


def glance(locks: Interlock, name: str, most: int = FIRST) -> View:
    """See Views.glance(). Raises Unavailable or ConfigError."""
    session = locks._session
    return run(session.views.glance(session.core, name, locks.prefix, most))


def with_places(locks: Interlock, view: View) -> View:
    """See Views.with_reports()."""
    return run(locks._session.views.with_reports(view))


def look_at_all(locks: Interlock, pattern: str = "*") -> list[Listed]:
    """See Views.ls(): as the API's ls(), with a second look where that is needed. Raises Unavailable or ConfigError."""
    session = locks._session
    return run(session.views.ls(session.core, pattern, twice=True))
