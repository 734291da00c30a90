"""Locks in a Django project: `locks` of the settings, until the commit, on commands. Needs `interlock[django]`.

    INSTALLED_APPS = [..., "interlock.contrib.django"]
    INTERLOCK = {"default": {"URL": "redis://localhost:6379/0"}}

locks        the Interlock of the alias "default" in this process; `locks["other"]` that of another alias
alocks       the same for asyncio, for `async def` views
single       a management command that one machine runs, and the others skip
name_of      the name under which a model instance is locked
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("django") is None:
    raise ModuleNotFoundError(
        "interlock.contrib.django needs Django: pip install 'django>=4.2', or '.[django]' in a checkout of interlock",
        name="django",
    )

from .aliases import alocks, locks
from .names import name_of
from .single import single

__all__ = ["alocks", "locks", "name_of", "single"]
