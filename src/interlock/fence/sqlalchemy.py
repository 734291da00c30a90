"""The guards of `dbapi` for SQLAlchemy Core, on PostgreSQL, SQLite, MySQL and MariaDB. `dbapi` says what they promise.

`sqlalchemy_orm` is for objects. With an AsyncConnection, call a guard through `run_sync`: `await
connection.run_sync(guard, lease)`. With a Session, give its connection: `guard(session.connection(), lease)`.

MySQL and MariaDB. The tables must be InnoDB's. REPEATABLE READ, the default, reads what was committed before the first
read of the transaction: so the guard comes first there, too. A deadlock (error 1213) ends the transaction, which must
be repeated as a whole. `update` raises StaleFence also for a row that somebody inserted after its first look; then roll
back, since it may have changed other rows. A holder that is stopped inside its transaction makes others wait: set
`innodb_lock_wait_timeout`, and `idle_transaction_timeout` in MariaDB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from sqlalchemy import BigInteger, Column, Connection, MetaData, Table, Text, Update, exists, func, or_, select
from sqlalchemy import update as sqlalchemy_update
from sqlalchemy.dialects import mysql, postgresql, sqlite

from interlock.errors import ConfigError

from . import Fenced, fence_of, stale_fence_error
from .dbapi import TABLE, autocommits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, FromClause, Select

__all__ = ["fence_table", "guard", "update"]

_MYSQL: Final = ("mysql", "mariadb")
_DIALECTS: Final = ("postgresql", "sqlite", *_MYSQL)
# A key of MySQL needs a length; and its default collation takes "A" for "a".
_NAME: Final = Text().with_variant(mysql.VARCHAR(255, charset="utf8mb4", collation="utf8mb4_bin"), *_MYSQL)


def fence_table(metadata: MetaData, *, name: str = TABLE, schema: str | None = None) -> Table:
    """Define the table that `guard()` uses; `metadata.create_all()` creates it with the other tables."""
    return Table(
        name, metadata, Column("name", _NAME, primary_key=True), Column("fence", BigInteger, nullable=False),
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
    if dialect in _MYSQL:
        _guard_mysql(connection, lease, fence, rows)
        return
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
    _compare(lease, fence, newest, rows)


def _guard_mysql(connection: Connection, lease: Fenced, fence: int, rows: Table) -> None:
    """Keep the higher fence, which locks the row; then read it as it is, not as of the transaction's first read."""
    new = mysql.insert(rows).values(name=lease.name, fence=fence)
    connection.execute(new.on_duplicate_key_update(fence=func.greatest(rows.c.fence, new.inserted.fence)))
    newest = connection.execute(select(rows.c.fence).where(rows.c.name == lease.name).with_for_update()).scalar() or 0
    _compare(lease, fence, newest, rows)


def _compare(lease: Fenced, fence: int, newest: int, rows: Table) -> None:
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
    is_mysql = dialect in _MYSQL
    if is_mysql:  # it can't look into the table that it updates, so look before and after
        _refuse_newer(connection, lease, fence, select(fences).where(where).with_for_update(), f"table {table}")
    elif dialect != "sqlite":  # see dbapi.update
        connection.execute(select(fences).where(where).with_for_update(of=fences)).close()
    guarded = statement.values({column: fence}).where(or_(fences.is_(None), fences <= fence))
    if not is_mysql:
        guarded = guarded.where(~exists(select(fences).where(where, fences > fence).correlate(None)))
    result = connection.execute(guarded)
    changed = len(result.all()) if result.returns_rows else result.rowcount
    if is_mysql:
        _refuse_newer(connection, lease, fence, select(fences).where(where).with_for_update(), f"table {table}")
    elif changed == 0:
        _refuse_newer(connection, lease, fence, select(func.max(fences)).where(where), f"table {table}")
    return changed


def claim_row(
    connection: Connection, lease: Fenced, fences: Column[int], row: Sequence[ColumnElement[bool]], place: str
) -> bool:
    """Store the fence in this one row, which locks it, or raise StaleFence. Returns whether there is such a row."""
    fence, dialect = fence_of(lease), _checked_dialect(connection)
    claimed = (
        sqlalchemy_update(fences.table).where(*row, or_(fences.is_(None), fences <= fence)).values({fences.name: fence})
    )
    if connection.execute(claimed).rowcount == 1:
        return True
    seen = select(fences).where(*row)
    newest = connection.execute(seen.with_for_update() if dialect in _MYSQL else seen).first()
    if newest is None:
        return False
    raise stale_fence_error(lease, newest[0] or 0, place)


def _refuse_newer(connection: Connection, lease: Fenced, fence: int, seen: Select[int], place: str) -> None:
    newest = max((each or 0 for each in connection.execute(seen).scalars()), default=0)
    if newest > fence:
        raise stale_fence_error(lease, newest, place)


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
