"""The guards of `dbapi` for SQLAlchemy Core, on PostgreSQL and SQLite. `dbapi` says what they promise, and why.

With an AsyncConnection, call a guard through `run_sync`: `await connection.run_sync(guard, lease)`. With a Session,
give its connection: `guard(session.connection(), lease)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import BigInteger, Column, Connection, MetaData, Table, Text, Update, exists, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from interlock.errors import ConfigError

from . import Fenced, fence_of, stale_fence_error
from .dbapi import TABLE, autocommits

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, FromClause

__all__ = ["fence_table", "guard", "update"]

_DIALECTS: Final = ("postgresql", "sqlite")


def fence_table(metadata: MetaData, *, name: str = TABLE, schema: str | None = None) -> Table:
    """Define the table that `guard()` uses; `metadata.create_all()` creates it with the other tables."""
    return Table(
        name, metadata, Column("name", Text, primary_key=True), Column("fence", BigInteger, nullable=False),
        schema=schema,
    )  # fmt: skip


_TABLE: Final = fence_table(MetaData())


def guard(connection: Connection, lease: Fenced, *, table: Table | None = None) -> None:
    """Refuse this transaction if a newer holder of the lock has guarded one; from now on, refuse older holders.

    Call this as the first statement of a transaction. `table` comes from `fence_table()`; the default is the table of
    `dbapi.create()`. Raises StaleFence if the table has a newer fence, ConfigError for AUTOCOMMIT or another database.
    """
    fence = fence_of(lease)
    dialect = _checked_dialect(connection)
    rows = _TABLE if table is None else table
    new = (postgresql.insert(rows) if dialect == "postgresql" else sqlite.insert(rows)).values(
        name=lease.name, fence=fence
    )
    insert = new.on_conflict_do_update(
        index_elements=[rows.c.name],
        set_={"fence": new.excluded.fence},
        where=rows.c.fence <= new.excluded.fence,
    )
    # SQLAlchemy keeps the rowcount of an INSERT only on request.
    if connection.execute(insert, execution_options={"preserve_rowcount": True}).rowcount == 1:
        return
    newest = connection.execute(select(rows.c.fence).where(rows.c.name == lease.name)).scalar() or 0
    if newest > fence:
        raise stale_fence_error(lease, newest, f"table {rows.fullname}")
    if newest < fence:
        raise ConfigError(
            f"lock {lease.name!r}: table {rows.fullname} did not store the fence: is there a trigger on the table?"
        )


def update(connection: Connection, lease: Fenced, statement: Update, *, column: str = "fence") -> int:
    """Run an UPDATE that also stores the fence in each of its rows: all of them or none.

    `statement` is `sqlalchemy.update(table).where(...).values(...)`; update() adds `column`, a BigInteger of that
    table, to the values. A row whose fence is null counts as older than any fence.

    Returns the number of rows; 0 means that no row matches, never a refusal. Raises StaleFence if any of the rows has a
    newer fence, ConfigError without `where` or such a column, for AUTOCOMMIT or another database.
    """
    fence = fence_of(lease)
    table, where = cast("FromClause", statement.table), statement.whereclause
    if where is None or not isinstance(statement.table, Table):
        raise ConfigError(f"lock {lease.name!r}: update() needs a statement on one table, with .where(...)")
    if column not in table.c:
        raise ConfigError(f"lock {lease.name!r}: table {table} has no column {column!r} for the fence")
    dialect = _checked_dialect(connection)
    fences: ColumnElement[int] = table.c[column]
    if dialect != "sqlite":  # see dbapi.update
        connection.execute(select(fences).where(where).with_for_update(of=fences)).close()
    newer = exists(select(fences).where(where, fences > fence).correlate(None))
    guarded = statement.values({column: fence}).where(or_(fences.is_(None), fences <= fence), ~newer)
    result = connection.execute(guarded)
    changed = len(result.all()) if result.returns_rows else result.rowcount
    if changed == 0:
        newest = connection.execute(select(func.max(fences)).where(where)).scalar()
        if newest is not None and newest > fence:
            raise stale_fence_error(lease, newest, f"table {table}")
    return changed


def _checked_dialect(connection: Connection) -> str:
    dialect = connection.dialect.name
    if dialect not in _DIALECTS:
        raise ConfigError(f"the guards do not support {dialect}, only {' and '.join(_DIALECTS)}")
    if not connection.in_transaction():
        connection.begin()  # as the first statement would; some engines send BEGIN only at that moment
    # For asyncpg only the execution options show it, not the driver's connection.
    is_autocommit = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    if is_autocommit or autocommits(connection.connection.driver_connection):
        raise ConfigError(
            "the connection is in AUTOCOMMIT mode, so the guard would end before the write: use a "
            "transaction, or another isolation level"
        )
    return dialect
