"""Guards for Django's ORM: a model whose rows have a fence, and the guard of `dbapi` for a whole transaction.

Theory. A row of a `FencedModel` keeps the highest fence that it has seen. `claim()` is the guard: one UPDATE stores the
fence of a lease if the row has no higher one, and locks the row until the transaction ends; then it reads the row anew.
`save()` and `delete()` begin with the same UPDATE, so a holder that was stopped meanwhile changes nothing.

Rules. (a) Claim, then read, then write: see `interlock.fence`. (b) The fence of a write is that of the lease by which
the instance was claimed; else of the lease of its own name, "app.model:pk", in whose `with` the thread is; else what
was stored when the instance was read. So also a writer without a lease is refused if a holder has claimed the row since
it was read; but such a writer leaves no fence behind. (c) A refusal marks the transaction for rollback. (d) What goes
past `save()`, such as `QuerySet.update()` and `bulk_update()`, goes past the guard: `update()` here is the guarded one.

Any database of Django will do for the rows; `guard()` needs PostgreSQL or SQLite, as `dbapi` does.
"""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final, NamedTuple, cast

from asgiref.sync import sync_to_async
from django.db import connections, router, transaction
from django.db.migrations import RunSQL
from django.db.models import BigIntegerField, Max, Model, Q, QuerySet

from interlock._api import inside
from interlock.contrib.django.names import name_of
from interlock.errors import ConfigError

from . import Fenced, dbapi, fence_of, stale_fence_error

__all__ = ["FencedModel", "create_table", "guard", "update"]

COLUMN: Final = "fence"
_atomic: Final[Any] = transaction.atomic


class _Mark(NamedTuple):
    """The name and the fence of a lease; fence 0: of no lease."""

    name: str
    fence: int


class FencedModel(Model):
    """A model whose rows refuse the writes of older holders: `class Order(FencedModel)`, and a migration."""

    fence: Any = BigIntegerField(null=True, editable=False)
    _claimed: _Mark | None = None

    class Meta:
        """No table of its own."""

        abstract = True

    def save(self, *args: Any, **options: Any) -> None:
        """As `Model.save()`, if no newer holder has claimed the row. Raises StaleFence, and rolls back."""
        options |= zip(("force_insert", "force_update", "using", "update_fields"), args, strict=False)
        if self.pk is None or options.get("force_insert"):
            super().save(**options)
            return
        using = options.get("using") or router.db_for_write(type(self), instance=self)
        with _atomic(using=using, savepoint=False):
            mark = _mark_of(self)
            _store_fence(self, using, mark)
            self.fence = mark.fence or None
            if not self._state.adding:
                options["force_update"] = True  # else a row that somebody has deleted would come back
            super().save(**options)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:
        """As `Model.delete()`, if no newer holder has claimed the row. Raises StaleFence, and rolls back."""
        database = using or router.db_for_write(type(self), instance=self)
        with _atomic(using=database, savepoint=False):
            _store_fence(self, database, _mark_of(self))
            return super().delete(using=database, keep_parents=keep_parents)

    def claim(self, lease: Fenced) -> None:
        """Refuse older holders of this row from now on, and read it anew. Then change it, and save() it.

        The row stays locked until the transaction ends. Raises StaleFence, and rolls back, if a newer holder has
        claimed the row; DoesNotExist if the row is gone.
        """
        mark = _Mark(lease.name, fence_of(lease))
        using = router.db_for_write(type(self), instance=self)
        with _atomic(using=using, savepoint=False):
            _store_fence(self, using, mark)
            self.refresh_from_db(using=using)
        self._claimed = mark

    async def aclaim(self, lease: Fenced) -> None:
        """As `claim()`, for `async def` views; then `asave()`. Each is a transaction of its own."""
        await sync_to_async(self.claim)(lease)


def update(queryset: QuerySet[Any], lease: Fenced, /, **values: object) -> int:
    """As `queryset.update(**values)`, which also stores the fence in each of the rows: all of them or none.

    Without `values` it stores only the fence: do that before you read the rows to decide. Returns the number of rows; 0
    means that no row matches, never a refusal. Raises StaleFence, and rolls back, if any of the rows has a newer fence.
    """
    fence = fence_of(lease)
    model: Any = queryset.model
    if not any(field.name == COLUMN for field in model._meta.get_fields()):
        raise ConfigError(
            f"lock {lease.name!r}: {model._meta.label} has no field {COLUMN!r}: derive it from FencedModel"
        )
    if COLUMN in values:
        raise ConfigError(f"lock {lease.name!r}: {COLUMN!r} is the column of the fence: leave it out of the values")
    # The rows are changed first, and then looked at: the change waits for a newer holder that has not committed yet.
    with _atomic(using=queryset.db, savepoint=False):
        changed = queryset.filter(_not_newer(fence)).update(**values, **{COLUMN: fence})
        newest = queryset.filter(**{f"{COLUMN}__gt": fence}).order_by().aggregate(newest=Max(COLUMN))["newest"]
        if newest is not None:
            raise stale_fence_error(lease, newest, f"table {model._meta.db_table}")
    return changed


def guard(lease: Fenced, using: str = "default", *, table: str = dbapi.TABLE) -> None:
    """Refuse this transaction if a newer holder of the lock has guarded one; from now on, refuse older holders.

    Call it as the first statement in `atomic`. `table` is made by `create_table()` in a migration; `using` is an alias
    of DATABASES, of PostgreSQL or SQLite. Raises StaleFence, which rolls back; ConfigError outside of `atomic`.
    """
    connection: Any = connections[using]
    connection.ensure_connection()
    with transaction.mark_for_rollback_on_error(using=using), connection.wrap_database_errors:
        dbapi.guard(connection.connection, lease, table=table)


def create_table(table: str = dbapi.TABLE) -> RunSQL:
    """The operation of a migration that creates the table of `guard()`: `operations = [create_table()]`."""
    name = dbapi._quote(table)
    return RunSQL(
        f"CREATE TABLE IF NOT EXISTS {name} (name TEXT NOT NULL PRIMARY KEY, fence BIGINT NOT NULL)",
        f"DROP TABLE {name}",
    )


def _mark_of(instance: FencedModel) -> _Mark:
    """With which fence this instance is written: see rule (b)."""
    if instance._claimed is not None:
        return instance._claimed
    name: str = cast("Any", instance)._meta.label_lower
    with contextlib.suppress(ConfigError):  # it was not saved yet, and has a key that no other process knows
        name = name_of(instance)
    for entered in inside.leases_of(threading.current_thread()):
        leases: dict[Any, Any] = getattr(entered, "_leases", {None: entered})  # of a multi
        for lease in leases.values():
            if lease.name == name:
                return _Mark(name, fence_of(lease))
    return _Mark(name, instance.fence or 0)


def _store_fence(instance: FencedModel, using: str, mark: _Mark) -> None:
    """Store this fence in the row of this instance, and lock the row. Raises StaleFence if the row has a newer one."""
    row = type(instance)._base_manager.using(using).filter(pk=instance.pk)
    if row.filter(_not_newer(mark.fence)).update(**{COLUMN: mark.fence or None}):
        return
    newest = row.values_list(COLUMN, flat=True).first()
    if newest is not None and newest > mark.fence:
        raise stale_fence_error(mark, newest, f"table {cast('Any', instance)._meta.db_table}")


def _not_newer(fence: int) -> Any:
    return Q((f"{COLUMN}__isnull", True)) | Q((f"{COLUMN}__lte", fence))
