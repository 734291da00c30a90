"""Objects of SQLAlchemy's ORM that refuse an older holder: the mixin `FencedRow`, and `claim`.

Theory. `claim()` stores the fence in the object's row and then reads the row, in one transaction: from the claim to the
commit nobody else changes the row, and after it no older holder does. The object keeps the fence. Each flush that
changes or deletes the object claims its row again, for the flush may belong to a later transaction.

Rules. (a) Claim, then change: a claim reads the row anew. (b) A flush raises ConfigError for an object that nobody has
claimed, and a bulk UPDATE or DELETE of its class does so always: what is not guarded must not look as if it were.
(c) An error in a flush rolls the session's transaction back; StaleFence is one. (d) The guard sees the changes of the
ORM's unit of work only: not Core statements on the session's connection, `bulk_update_mappings`, `bulk_save_objects`
and cascades of the database. `sqlalchemy.guard` and `sqlalchemy.update` are for those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast, overload

from sqlalchemy import BigInteger, Column, event, inspect
from sqlalchemy.orm import Mapped, Mapper, ORMExecuteState, Session, mapped_column, object_session

from interlock.errors import ConfigError

from . import Fenced, fence_of
from .sqlalchemy import _MYSQL, claim_row

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["FencedRow", "claim"]

_CLAIM: Final = "_interlock_claim"


class _Claim(NamedTuple):
    """What an object keeps of the lease under which it was claimed."""

    name: str
    fence: int


class FencedRow:
    """A mixin for a declarative class: a column `fence`, a BIGINT that may be null, and objects that must be claimed.

    A row whose fence is null, such as one from before the column, counts as older than any fence. New objects need no
    claim.
    """

    fence: Mapped[int | None] = mapped_column(BigInteger)


RowT = TypeVar("RowT", bound=FencedRow)


@overload
def claim(session: Session, lease: Fenced, target: type[RowT], identity: object) -> RowT | None: ...
@overload
def claim(session: Session, lease: Fenced, target: RowT) -> RowT: ...
def claim(session: Session, lease: Fenced, target: type[RowT] | RowT, identity: object = None) -> RowT | None:
    """Refuse older holders of the lock for this row from now on, then read it. Returns the object, or None.

    `claim(session, lease, Account, 7)` is for the primary key 7 (a tuple, if the key has several columns), and
    `claim(session, lease, account)` for an object that you have loaded: its changes of before are flushed first, and
    refused unless it was claimed. Raises StaleFence if a newer holder has claimed the row: roll back; ConfigError for a
    class without FencedRow, AUTOCOMMIT or another database. With an AsyncSession: `await session.run_sync(claim, ...)`.
    """
    fence = fence_of(lease)
    loaded = None if isinstance(target, type) else target
    mapper = _fenced_mapper(lease, type(target) if loaded is not None else target)
    if loaded is not None:
        session.flush()
        identity = inspect(loaded).identity
        if identity is None:
            raise ConfigError(
                f"lock {lease.name!r}: {loaded!r} has no row yet: add and flush it first; it needs no claim"
            )
    key = cast("tuple[object, ...]", identity) if isinstance(identity, tuple) else (identity,)
    connection = session.connection(bind_arguments={"mapper": mapper})
    if not _claim_row(connection, lease, mapper, key):
        return None
    # MySQL would read as of the transaction's first read. PostgreSQL can't lock what outer joins load beside.
    locks = connection.dialect.name in _MYSQL or None
    found = cast("RowT | None", session.get(mapper.class_, key, populate_existing=True, with_for_update=locks))
    if found is not None:
        setattr(found, _CLAIM, _Claim(lease.name, fence))
    return found


def _fenced_mapper(lease: Fenced, kind: object) -> Mapper[Any]:
    mapper = cast("Mapper[Any] | None", inspect(kind, raiseerr=False))
    if not isinstance(mapper, Mapper) or not issubclass(mapper.class_, FencedRow):
        raise ConfigError(
            f"lock {lease.name!r}: {kind!r} is no mapped class with the mixin FencedRow, so it has no fence"
        )
    return mapper


def _claim_row(connection: Connection, lease: Fenced, mapper: Mapper[Any], key: tuple[object, ...]) -> bool:
    fences = cast("Column[int]", mapper.columns["fence"])
    columns = mapper.primary_key
    if any(column.table is not fences.table for column in columns):
        raise ConfigError(
            f"{mapper.class_.__name__}: FencedRow belongs to the base class, whose table has the primary key"
        )
    if len(columns) != len(key):
        raise ConfigError(
            f"{mapper.class_.__name__} has a primary key of {len(columns)} columns, and {key!r} has {len(key)}"
        )
    row = [column == value for column, value in zip(columns, key, strict=True)]
    return claim_row(connection, lease, fences, row, f"table {fences.table}, row {key!r},")


def _before_change(mapper: Mapper[Any], connection: Connection, target: FencedRow) -> None:
    """Claim the row of an object that this flush changes or deletes."""
    session = object_session(target)
    is_deleted = session is not None and target in session.deleted
    if session is not None and not is_deleted and not session.is_modified(target, include_collections=False):
        return
    claimed: _Claim | None = getattr(target, _CLAIM, None)
    if claimed is None:
        raise ConfigError(
            f"{target!r} was changed without a claim, so no fence would guard it: claim(session, lease, object) under "
            "its lock, then change it"
        )
    key = inspect(target).identity
    assert key is not None  # it has a row
    if _claim_row(connection, claimed, mapper, key):  # else the ORM finds out
        target.fence = claimed.fence


def _before_bulk(state: ORMExecuteState) -> None:
    if not (state.is_update or state.is_delete):
        return
    for mapper in state.all_mappers:
        if issubclass(mapper.class_, FencedRow):
            raise ConfigError(
                f"an UPDATE or DELETE of {mapper.class_.__name__} in bulk compares no fences: "
                "interlock.fence.sqlalchemy.update(session.connection(), lease, update(table).where(...).values(...)) "
                "does, or claim and change each object"
            )


event.listen(FencedRow, "before_update", _before_change, propagate=True)
event.listen(FencedRow, "before_delete", _before_change, propagate=True)
event.listen(Session, "do_orm_execute", _before_bulk)
