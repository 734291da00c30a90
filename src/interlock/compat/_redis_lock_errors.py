"""The errors of `redis_lock`: python-redis-lock's own if it is installed, else classes of the same names and bases.

So `except redis_lock.NotAcquired` catches what the drop-in raises.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any, TypeVar

ErrorT = TypeVar("ErrorT", bound=RuntimeError)
_original: Any = None
with contextlib.suppress(ImportError):
    _original = import_module("redis_lock")


def _or_original(ours: type[ErrorT]) -> type[ErrorT]:
    """python-redis-lock's class of this name, or ours."""
    original: type[ErrorT] = getattr(_original, ours.__name__, ours)
    return original


@_or_original
class AlreadyAcquired(RuntimeError):  # noqa: N818 (here and below: the names are python-redis-lock's)
    """The key has the id of this lock already."""


@_or_original
class NotAcquired(RuntimeError):  # noqa: N818
    """The key does not have the id of this lock: it was not acquired, or it has expired."""


@_or_original
class AlreadyStarted(RuntimeError):  # noqa: N818
    """The renewal of this lock runs already. Only kept for code that names this class: nothing here raises it."""


@_or_original
class TimeoutNotUsable(RuntimeError):  # noqa: N818
    """A timeout was given to a call that does not wait."""


@_or_original
class InvalidTimeout(RuntimeError):  # noqa: N818
    """The timeout is negative."""


@_or_original
class TimeoutTooLarge(RuntimeError):  # noqa: N818
    """The timeout is longer than the expire of a lock without renewal."""


@_or_original
class NotExpirable(RuntimeError):  # noqa: N818
    """The key has no time at which it expires."""
