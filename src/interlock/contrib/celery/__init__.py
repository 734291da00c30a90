"""Celery: tasks under a lock, tasks that are queued once, a beat that only one machine runs. Needs `interlock[celery]`.

app.conf.interlock_url = "redis://localhost:6379/0"

@app.task(bind=True, max_retries=None)
@locked("pay:{user_id}", busy="retry")
def pay(self, user_id): ...

@app.task(base=Unique, unique="report:{day}", at_most=3600)
def report(day): ...

celery -A app beat -S interlock.contrib.celery:Beat
"""

# pyright: reportMissingTypeStubs=false, reportUnusedImport=false

from __future__ import annotations

try:
    import celery  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "celery":
        raise
    raise ModuleNotFoundError(
        "interlock.contrib.celery needs Celery: pip install celery, or '.[celery]' in a checkout of interlock",
        name="celery",
    ) from error

from interlock.contrib._tasks import current_lease, is_skipped

from .beat import Beat
from .settings import locks_of
from .tasks import locked
from .unique import Unique

__all__ = ["Beat", "Unique", "current_lease", "is_skipped", "locked", "locks_of"]
