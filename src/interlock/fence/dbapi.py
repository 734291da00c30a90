"""Guards in SQL, over a DB-API connection: PostgreSQL (psycopg, psycopg2, pg8000) and SQLite (sqlite3).

Theory. `guard()` keeps a row for each lock, and either raises the fence in that row to this lease's fence or refuses.
The row stays locked until the transaction ends. So everything that the transaction reads and writes, in any table, is
one atomic step against all other holders: an older holder waits for the commit and is then refused; a newer holder
waits, and reads what the transaction wrote. `update()` stores the fence in the data's own rows instead, for statements
that touch nothing else.

Rules. (a) Call both in a transaction; on an autocommit connection the database would release the row lock before the
next statement, so the guard raises ConfigError. (b) Call `guard()` first, then read what you need to decide, then
write. (c) After StaleFence roll back: the database may have applied other statements of the transaction. (d) If a
transaction calls several guards, call them in the same order everywhere, for example sorted by name, as with any row
locks.

Isolation. PostgreSQL, READ COMMITTED (its default): every statement after `guard()` sees what was committed before
it. REPEATABLE READ and SERIALIZABLE are right, too; a transaction that has waited for another holder's transaction gets
the database's own serialization failure (SQLSTATE 40001) instead of a reply, and must be repeated as a whole. SQLite:
the guard takes the only write lock, so any mode is right; a transaction that reads before the guard may get "database
is locked", and must be repeated. A holder that is stopped inside its transaction makes others wait: set
`idle_in_transaction_session_timeout` and `lock_timeout` in PostgreSQL, `timeout=` in sqlite3.connect.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from typing import TYPE_CHECKING, Final, LiteralString, Protocol, cast

from interlock.errors import ConfigError

from . import Fenced, fence_of, stale_fence_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Connection", "Cursor", "create", "guard", "update"]

TABLE: Final = "interlock_fence"
_MARKS: Final = {
    "qmark": "?", "numeric": ":{0}", "named": ":p{0}", "format": "%s", "pyformat": "%(p{0})s",
}  # fmt: skip
Row = tuple[object, ...]


class Cursor(Protocol):
    """What the guards need of a driver's cursor."""

    @property
    def rowcount(self) -> int:
        """Rows that the last statement changed."""
        ...

    def execute(self, operation: LiteralString, parameters: Row | dict[str, object], /) -> object:
        """Run a statement."""
        ...

    def fetchone(self) -> Sequence[object] | None:
        """The next row."""
        ...

    def close(self) -> object:
        """Close the cursor."""
        ...


class Connection(Protocol):
    """What the guards need of a driver's connection (PEP 249)."""

    def cursor(self) -> Cursor:
        """Open a cursor."""
        ...

    def commit(self) -> object:
        """End the transaction."""
        ...


def create(connection: Connection, *, table: str = TABLE) -> None:
    """Create the table that `guard()` uses, if it does not exist: once, when you set up your database. You commit.

    Any other table with `name`, a unique text, and `fence`, a BIGINT, serves as well.
    """
    _Statement(connection, None).run(
        f"CREATE TABLE IF NOT EXISTS {_quote(table)} (name TEXT NOT NULL PRIMARY KEY, fence BIGINT NOT NULL)"
    )


def guard(connection: Connection, lease: Fenced, *, table: str = TABLE, paramstyle: str | None = None) -> None:
    """Refuse this transaction if a newer holder of the lock has guarded one; from now on, refuse older holders.

    Call this as the first statement of every transaction of the holder: no other holder can then change what the
    transaction reads and writes until it commits. The table knows a lock by its name, so locks of different servers or
    prefixes need a `table` each. The default of `paramstyle` (PEP 249) is the driver module's.

    Raises StaleFence if the table has a newer fence, ConfigError for an autocommit connection, and the driver's errors.
    """
    fence = fence_of(lease)
    statement = _checked_statement(connection, paramstyle)
    rows = _quote(table)
    mark = statement.mark
    changed = statement.run(
        f"INSERT INTO {rows} AS held (name, fence) VALUES ({mark(lease.name)}, {mark(fence)}) "  # noqa: S608 (quoted)
        "ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE held.fence <= excluded.fence"
    )[0]
    if changed == 1:
        return
    statement = _Statement(connection, paramstyle)
    row = statement.run(f"SELECT fence FROM {rows} WHERE name = {statement.mark(lease.name)}", fetch=True)[1]  # noqa: S608
    newest = int(cast("int", row[0])) if row else 0
    if newest > fence:
        raise stale_fence_error(lease, newest, f"table {table}")
    if newest < fence:
        raise ConfigError(
            f"lock {lease.name!r}: table {table} did not store the fence: is there a trigger or a rule on the table?"
        )


def update(
    connection: Connection,
    lease: Fenced,
    table: str,
    values: Mapping[str, object],
    where: Mapping[str, object],
    *,
    column: str = "fence",
    paramstyle: str | None = None,
) -> int:
    """Change the rows that equal all of `where` (None: is null), and store the fence in each of them: all or none.

    Without `values` update() stores only the fence: do that before you read the rows to decide. `column` is a BIGINT; a
    row whose fence is null counts as older than any fence. Spell tables and columns as the database stores them (in
    PostgreSQL plain names are lower case); a table may have its schema before it: "shop.account".

    Returns the number of rows; 0 means that no row matches, never a refusal. Raises StaleFence if any of the rows has a
    newer fence, ConfigError for an invalid name, no `where`, or an autocommit connection, and the driver's errors.
    """
    fence = fence_of(lease)
    if not where:
        raise ConfigError(f"lock {lease.name!r}: update() needs `where`, for example {{'id': 7}}")
    if column in values:
        raise ConfigError(f"lock {lease.name!r}: {column!r} is the column of the fence: leave it out of `values`")
    statement = _checked_statement(connection, paramstyle)
    rows, fences = _quote(table), _quote(column)

    def matching(alias: str, statement: _Statement) -> str:
        return " AND ".join(
            f"{alias}.{_quote(name)} " + ("IS NULL" if value is None else f"= {statement.mark(value)}")
            for name, value in where.items()
        )

    # PostgreSQL locks row by row, so this locks all rows before the comparison: then no row can get a newer fence
    # between the comparison of one row and the change of another. SQLite has one lock, and UPDATE takes it first.
    if not statement.is_sqlite:
        locking = _Statement(connection, paramstyle)
        locking.run(f"SELECT 1 FROM {rows} AS held WHERE {matching('held', locking)} FOR UPDATE")  # noqa: S608
    # NOT EXISTS makes it all or none. The condition before it is for rows that were inserted after the locking.
    mark = statement.mark
    sets = ", ".join(f"{_quote(name)} = {mark(value)}" for name, value in {**values, column: fence}.items())
    changed = statement.run(
        f"UPDATE {rows} AS held SET {sets} WHERE {matching('held', statement)} "  # noqa: S608
        f"AND (held.{fences} IS NULL OR held.{fences} <= {mark(fence)}) AND NOT EXISTS "
        f"(SELECT 1 FROM {rows} AS newer WHERE {matching('newer', statement)} AND newer.{fences} > {mark(fence)})"
    )[0]
    if changed == 0:
        search = _Statement(connection, paramstyle)
        query = f"SELECT max(held.{fences}) FROM {rows} AS held WHERE {matching('held', search)}"  # noqa: S608
        row = search.run(query, fetch=True)[1]
        if row and row[0] is not None and (newest := int(cast("int", row[0]))) > fence:
            raise stale_fence_error(lease, newest, f"table {table}")
    return changed


def autocommits(connection: object) -> bool:
    """Whether the next statement would be a transaction of its own, as far as the connection shows it."""
    if getattr(connection, "in_transaction", None) is True:  # sqlite3: after an explicit BEGIN
        return False
    if getattr(getattr(connection, "info", None), "transaction_status", 0) != 0:  # psycopg, psycopg2: not idle
        return False
    autocommit = getattr(connection, "autocommit", None)
    if autocommit is True or autocommit is False:
        return autocommit
    ask: Callable[[], object] | None = getattr(connection, "get_autocommit", None)  # PyMySQL, mysqlclient
    if ask is not None:
        return bool(ask())
    return getattr(connection, "isolation_level", "") is None  # sqlite3 before Python 3.12, and its legacy mode since


class _Statement:
    """One statement, with a placeholder in the driver's style for each value."""

    def __init__(self, connection: Connection, paramstyle: str | None) -> None:
        self._connection = connection
        self._style = _paramstyle(connection, paramstyle)
        self._values: list[object] = []

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is SQLite: pysqlite3 and sqlcipher3 are, too."""
        return any(
            "sqlite" in cls.__module__ or "sqlcipher" in cls.__module__ for cls in type(self._connection).__mro__
        )

    def mark(self, value: object) -> str:
        """A placeholder for this value. Call it in the order in which the placeholders stand in the text."""
        self._values.append(value)
        return _MARKS[self._style].format(len(self._values))

    def run(self, text: str, *, fetch: bool = False) -> tuple[int, Sequence[object] | None]:
        """Run the statement. Returns the number of changed rows, and the first row if `fetch`."""
        named = {f"p{number}": value for number, value in enumerate(self._values, 1)}
        parameters = named if self._style in {"named", "pyformat"} else tuple(self._values)
        with contextlib.closing(self._connection.cursor()) as cursor:
            # Not a literal, but as safe as one: names are quoted, values are parameters.
            cursor.execute(text, parameters)  # pyright: ignore[reportArgumentType]
            return cursor.rowcount, cursor.fetchone() if fetch else None


def _checked_statement(connection: Connection, paramstyle: str | None) -> _Statement:
    if inspect.iscoroutinefunction(connection.commit):
        raise ConfigError(
            "the connection is for asyncio: use interlock.fence.sqlalchemy with `run_sync`, or a connection for threads"
        )
    if autocommits(connection):
        raise ConfigError(
            "the connection is in autocommit mode, so the guard would end before the write: turn autocommit off, or "
            "begin a transaction first"
        )
    return _Statement(connection, paramstyle)


def _paramstyle(connection: object, style: str | None) -> str:
    if style is None:
        modules = [cls.__module__.split(".") for cls in type(connection).__mro__]
        names = [".".join(parts[:end]) for parts in modules for end in range(len(parts), 0, -1)]
        style = next(
            (declared for name in names if (declared := getattr(sys.modules.get(name), "paramstyle", None))), None
        )
    if style not in _MARKS:
        raise ConfigError(
            f"{type(connection).__module__}.{type(connection).__qualname__}: paramstyle {style!r} is none "
            f"of {', '.join(_MARKS)}. Give one of them: paramstyle='qmark', or give the driver's own connection"
        )
    return style


def _quote(name: str) -> str:
    """The name of a table or column, quoted for SQL."""
    parts = name.split(".")
    if len(parts) > 2 or not all(re.fullmatch(r"[^\W\d]\w{0,62}", part) for part in parts):
        raise ConfigError(f"{name!r} is no table or column: use letters, digits and _, or 'schema.table'")
    return ".".join(f'"{part}"' for part in parts)
