"""Fences: the data refuses a late writer, in SQL databases, Redis and files."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
import redis
import redis.asyncio
import sqlalchemy as sa

import interlock
import interlock.aio
from harness import postgres
from harness.clock import machine_time
from harness.modes import until
from harness.processes import PROGRAMS, state_of
from harness.programs.stale_writer import KINDS
from interlock import ConfigError, LeaseLost, LockError, Unavailable
from interlock.fence import StaleFence, dbapi, files, sqlalchemy
from interlock.fence import redis as guarded
from interlock.primitives.scripts import load

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


class Mark(NamedTuple):
    """The part of a lease that travels with a write: name and fence."""

    name: str
    fence: int


OLD, NEW = Mark("paper", 1_700_000_000_000_000), Mark("paper", 1_700_000_000_000_001)


@pytest.fixture(scope="module")
def cluster():
    with postgres.running() as server:
        yield server


# A holder that was stopped between `ensure()` and its write


async def line(process) -> dict:
    text = await process.stdout.readline()
    assert text, "the process ended"
    return json.loads(text)


@rule(7)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_late_write_is_refused_by_the_data(kind, server, clean, tmp_path, request):
    place = {
        "redis": server.url,
        "sqlalchemy-sqlite": f"sqlite:///{tmp_path}/data",
        "postgres": "postgres" in kind and request.getfixturevalue("cluster").conninfo,
        "sqlalchemy-postgres": "postgres" in kind and request.getfixturevalue("cluster").url,
    }.get(kind.removesuffix("-guard").removesuffix("-update"), str(tmp_path / "data"))
    store = KINDS[kind](place)
    store.make()
    late = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAMS / "stale_writer.py"), kind, place, server.url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        old = await line(late)  # it is sure of its lease, and stops
        await until(lambda: state_of(late.pid) == "T")
        async with interlock.aio.Interlock(server.url) as locks, locks.lock("paper", timeout=20) as lease:
            assert lease.fence > old["fence"]
            store.guarded(lease, store.read() + ", then the newer one's")
            store.guarded(lease, store.read() + ", twice")
        late.send_signal(signal.SIGCONT)
        refused = (await line(late))["refused"]
        assert refused, "the late write was let through"
        for said in ("'paper'", str(old["fence"]), str(lease.fence), "acquire the lock again"):
            assert said in refused
        assert store.read() == "first, then the newer one's, twice"
        # The control: without the guard the same process does the damage, so it was not the lock that held it.
        late.stdin.write(b"\n")
        assert (await line(late))["written"] == store.read() == "first, then the late one's"
    finally:
        with contextlib.suppress(ProcessLookupError):
            late.kill()
        late.stdin.close()
        await late.wait()
        late._transport.close()
    clean.delete("users:{paper}")


# SQL


class Database:
    """SQLite or PostgreSQL, over the DB-API."""

    def __init__(self, kind: str, place: str) -> None:
        self.kind, self.place, self.open = kind, place, []

    def connect(self, **options):
        if self.kind == "sqlite":
            made = sqlite3.connect(self.place, timeout=20, check_same_thread=False, **options)
        else:
            made = psycopg.connect(self.place, **options)
        self.open.append(made)
        return made

    def ask(self, connection, text: str):
        cursor = connection.cursor()
        cursor.execute(text)
        return cursor.fetchall() if cursor.description else None

    def rows(self):
        with contextlib.closing(self.connect()) as connection:
            return self.ask(connection, 'SELECT id, words, fence FROM "order" ORDER BY id')


@pytest.fixture(params=["sqlite", "postgres"])
def database(request, tmp_path):
    place = str(tmp_path / "db") if request.param == "sqlite" else request.getfixturevalue("cluster").conninfo
    made = Database(request.param, place)
    connection = made.connect()
    made.ask(connection, 'DROP TABLE IF EXISTS "order"')
    made.ask(connection, "DROP TABLE IF EXISTS interlock_fence")
    made.ask(connection, 'CREATE TABLE "order" (id INTEGER PRIMARY KEY, words TEXT, kind TEXT, fence BIGINT)')
    made.ask(
        connection, "INSERT INTO \"order\" VALUES (1, 'one', 'a', NULL), (2, 'two', 'a', 0), (3, 'three', NULL, 5)"
    )
    dbapi.create(connection)
    dbapi.create(connection)  # it may be there
    connection.commit()
    yield made
    for each in made.open:
        each.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


@rule(7)
def test_the_same_fence_passes_every_time_and_only_older_fences_are_refused(database):
    connection = database.connect()
    for lease in (OLD, OLD, NEW, NEW):
        dbapi.guard(connection, lease)
        dbapi.guard(connection, lease)  # twice in one transaction, too
        connection.commit()
    with pytest.raises(StaleFence, match=rf"'paper'.* fence {NEW.fence} .* older {OLD.fence}.*[Aa]cquire") as caught:
        dbapi.guard(connection, OLD)
    assert caught.value.public_text == "the work under 'paper' was interrupted, and may be incomplete"
    connection.rollback()
    dbapi.guard(connection, Mark("another lock", 1))
    connection.commit()
    assert database.ask(connection, "SELECT name, fence FROM interlock_fence ORDER BY name") == [
        ("another lock", 1), ("paper", NEW.fence),
    ]  # fmt: skip


@rule(7)
def test_a_newer_transaction_waits_for_the_older_one_and_reads_its_writes(database, pool):
    older, newer = database.connect(), database.connect()
    dbapi.guard(older, OLD)
    database.ask(older, "UPDATE \"order\" SET words = 'by the old one' WHERE id = 1")
    waiting = pool.submit(dbapi.guard, newer, NEW)
    _blocked(database, waiting)
    older.commit()
    waiting.result(20)
    assert database.ask(newer, 'SELECT words FROM "order" WHERE id = 1') == [("by the old one",)]
    newer.commit()


@rule(7)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_older_transaction_waits_for_the_newer_one_and_is_refused_if_that_one_committed(database, pool, end):
    older, newer = database.connect(), database.connect()
    dbapi.guard(older, OLD)
    older.commit()
    dbapi.guard(newer, NEW)
    waiting = pool.submit(dbapi.guard, older, OLD)
    _blocked(database, waiting)
    getattr(newer, end)()
    if end == "commit":
        with pytest.raises(LeaseLost):
            waiting.result(20)
    else:
        waiting.result(20)
    older.rollback()


def _blocked(database, waiting) -> None:
    """Wait until a transaction is blocked. SQLite does not show that, so there wait for a moment."""
    if database.kind == "sqlite":
        time.sleep(0.1)
    else:
        with psycopg.connect(database.place, autocommit=True) as watcher:
            end = time.monotonic() + 20
            while not watcher.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                assert time.monotonic() < end
                assert not waiting.done()
                time.sleep(0.01)
    assert not waiting.done()


@rule(7)
@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_with_snapshot_isolation_a_transaction_that_waited_is_repeated_and_then_refused(cluster, pool, level):
    database = Database("postgres", cluster.conninfo)
    newer, older = database.connect(), database.connect()
    newer.isolation_level = older.isolation_level = level
    dbapi.create(newer)
    newer.execute("DELETE FROM interlock_fence")
    newer.commit()
    for _ in range(2):  # with no row first, then with one
        dbapi.guard(newer, NEW)
        waiting = pool.submit(dbapi.guard, older, OLD)
        _blocked(database, waiting)
        newer.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            waiting.result(20)
        older.rollback()
        with pytest.raises(LeaseLost):
            dbapi.guard(older, OLD)
        older.rollback()
    # A snapshot from before the newer one's commit is no way around it, either.
    older.execute("SELECT 1")
    dbapi.guard(newer, Mark("paper", NEW.fence + 1))
    newer.commit()
    with pytest.raises((LeaseLost, psycopg.errors.SerializationFailure)):
        dbapi.guard(older, NEW)
    older.rollback()
    newer.close()
    older.close()


def test_a_transaction_that_was_refused_leaves_nothing(database):
    with contextlib.closing(database.connect()) as newer:
        dbapi.guard(newer, NEW)
        newer.commit()
    with pytest.raises(LeaseLost), database.connect() as older:
        database.ask(older, "UPDATE \"order\" SET words = 'before the guard'")
        dbapi.guard(older, OLD)
    assert [row[1] for row in database.rows()] == ["one", "two", "three"]


@rule(7)
def test_rows_may_have_a_fence_of_their_own(database):
    connection = database.connect()
    assert dbapi.update(connection, OLD, "order", {"words": "ONE"}, {"id": 1}) == 1  # null is older
    assert dbapi.update(connection, OLD, "order", {"words": "1"}, {"id": 1, "words": "ONE"}) == 1  # again
    assert dbapi.update(connection, NEW, "order", {}, {"id": 1}) == 1  # before reading
    connection.commit()
    with pytest.raises(LeaseLost, match=rf"'paper'.* fence {NEW.fence} .* older {OLD.fence}.*[Aa]cquire"):
        dbapi.update(connection, OLD, "order", {"words": "late"}, {"id": 1})
    connection.rollback()
    assert dbapi.update(connection, NEW, "order", {"words": None}, {"kind": None}) == 1
    assert dbapi.update(connection, NEW, "order", {"words": "x"}, {"id": 99}) == 0  # no such row
    connection.commit()
    assert database.rows() == [(1, "1", NEW.fence), (2, "two", 0), (3, None, NEW.fence)]


@rule(7)
def test_a_guard_of_rows_takes_all_rows_or_none(database):
    connection = database.connect()
    assert dbapi.update(connection, NEW, "order", {}, {"id": 2}) == 1
    with pytest.raises(LeaseLost):
        dbapi.update(connection, OLD, "order", {"words": "late"}, {"kind": "a"})
    connection.commit()  # even if the error is ignored
    assert database.rows()[:2] == [(1, "one", None), (2, "two", NEW.fence)]
    assert dbapi.update(connection, NEW, "order", {"words": "both"}, {"kind": "a"}) == 2
    connection.commit()


@rule(7)
@pytest.mark.parametrize("last", [1, 2])
def test_a_guard_of_rows_takes_all_or_none_beside_a_newer_holder(database, pool, last):
    """The newer holder has one of the rows, and has not committed when the older one begins."""
    older, newer = database.connect(), database.connect()
    dbapi.update(newer, NEW, "order", {"words": "newer"}, {"id": last})
    waiting = pool.submit(dbapi.update, older, OLD, "order", {"words": "late"}, {"kind": "a"})
    _blocked(database, waiting)
    newer.commit()
    with pytest.raises(LeaseLost):
        waiting.result(20)
    older.commit()
    assert [row[1] for row in database.rows()[:2]] == (["newer", "two"] if last == 1 else ["one", "newer"])


@rule(7)
@pytest.mark.parametrize("over", ["dbapi", "sqlalchemy"])
def test_a_row_that_is_inserted_in_between_is_never_overwritten(cluster, pool, over):
    """Somebody inserts it after the rows were locked, and a newer holder takes it before the older one's UPDATE."""
    database = Database("postgres", cluster.conninfo)
    newer, other = database.connect(), database.connect(autocommit=True)
    other.execute("DROP TABLE IF EXISTS paper")
    other.execute("CREATE TABLE paper (id INTEGER, words TEXT, fence BIGINT)")
    reached = threading.Event()

    class Slow(psycopg.Cursor):
        def execute(self, text, *args, **options):
            if text.startswith("UPDATE"):
                other.execute("INSERT INTO paper VALUES (1, 'added', 0)")
                dbapi.update(newer, NEW, "paper", {"words": "newer"}, {"id": 1})
                reached.set()
            return super().execute(text, *args, **options)

    def late() -> None:
        if over == "dbapi":
            with database.connect(cursor_factory=Slow) as older:
                dbapi.update(older, OLD, "paper", {"words": "late"}, {"id": 1})
            return
        engine = sa.create_engine(cluster.url, connect_args={"cursor_factory": Slow}, poolclass=sa.NullPool)
        table = sa.Table("paper", sa.MetaData(), *(sa.Column(each, sa.BigInteger) for each in ("id", "words", "fence")))
        table.c.words.type = sa.Text()
        with engine.begin() as older:
            sqlalchemy.update(older, OLD, table.update().where(table.c.id == 1).values(words="late"))

    waiting = pool.submit(late)
    assert reached.wait(20)
    _blocked(database, waiting)
    newer.commit()
    with pytest.raises(LeaseLost):
        waiting.result(20)
    assert other.execute("SELECT words FROM paper").fetchall() == [("newer",)]
    for each in database.open:
        each.close()


def test_names_of_tables_and_columns_are_checked_and_quoted(database):
    connection = database.connect()
    for wrong in ('x" SET words = 1 --', "", "a b", "a.b.c", "1st", "a;b", ".a"):
        for call in (
            lambda wrong=wrong: dbapi.guard(connection, OLD, table=wrong),
            lambda wrong=wrong: dbapi.create(connection, table=wrong),
            lambda wrong=wrong: dbapi.update(connection, OLD, wrong, {"words": "x"}, {"id": 1}),
            lambda wrong=wrong: dbapi.update(connection, OLD, "order", {wrong: "x"}, {"id": 1}),
            lambda wrong=wrong: dbapi.update(connection, OLD, "order", {"words": "x"}, {wrong: 1}),
            lambda wrong=wrong: dbapi.update(connection, OLD, "order", {"words": "x"}, {"id": 1}, column=wrong),
        ):
            with pytest.raises(ConfigError, match="no table or column"):
                call()
    for values, where in (({"words": "x"}, {}), ({"fence": 1}, {"id": 1})):
        with pytest.raises(ConfigError):
            dbapi.update(connection, OLD, "order", values, where)
    # A column that is not there is an error, and not a text that looks like one.
    with pytest.raises((sqlite3.OperationalError, psycopg.errors.UndefinedColumn)):
        dbapi.update(connection, OLD, "order", {"words": "x"}, {"nosuch": 1})
    connection.rollback()
    schema = "main" if database.kind == "sqlite" else "public"
    dbapi.create(connection, table=f"{schema}.other")
    dbapi.guard(connection, OLD, table=f"{schema}.other")
    assert dbapi.update(connection, OLD, f"{schema}.order", {"words": "x"}, {"id": 1}) == 1
    connection.rollback()


def test_an_autocommit_connection_is_refused_unless_a_transaction_was_begun(database):
    if database.kind == "sqlite":
        every = [database.connect(isolation_level=None)]
        if sys.version_info >= (3, 12):
            every.append(database.connect(autocommit=True))
    else:
        every = [database.connect(autocommit=True)]
    for connection in every:
        for call in (
            lambda: dbapi.guard(connection, OLD),
            lambda: dbapi.update(connection, OLD, "order", {"words": "x"}, {"id": 1}),
        ):
            with pytest.raises(ConfigError, match="autocommit"):
                call()
        database.ask(connection, "BEGIN")
        dbapi.guard(connection, OLD)
        database.ask(connection, "ROLLBACK")
    assert database.rows()[0] == (1, "one", None)
    if sys.version_info >= (3, 12) and database.kind == "sqlite":
        dbapi.guard(database.connect(autocommit=False), OLD)
    if database.kind == "postgres":
        with every[0].transaction():
            dbapi.guard(every[0], OLD)


def test_the_error_for_an_asyncio_connection_names_the_way_out():
    class Asynchronous:
        async def commit(self): ...

    with pytest.raises(ConfigError, match="run_sync"):
        dbapi.guard(Asynchronous(), OLD)


STYLES = {
    "qmark": lambda text: text,
    "named": lambda text: text,
    "numeric": lambda text: re.sub(r":\d+", "?", text),  # they stand in order
    "format": lambda text: text.replace("%s", "?"),
    "pyformat": lambda text: re.sub(r"%\((\w+)\)s", r":\1", text),
}


@pytest.mark.parametrize("style", STYLES)
def test_every_paramstyle_works(style, monkeypatch):
    """A driver of each style, made of sqlite3."""
    driver = types.ModuleType("driver")
    driver.paramstyle = style
    monkeypatch.setitem(sys.modules, "driver", driver)

    class Cursor(sqlite3.Cursor):
        def execute(self, text, parameters=()):
            assert style in {"named", "pyformat"} or not isinstance(parameters, dict)
            return super().execute(STYLES[style](text), parameters)

    class Connection(sqlite3.Connection):
        def cursor(self):
            return super().cursor(Cursor)

    Connection.__module__ = "driver.inside"
    with contextlib.closing(sqlite3.connect(":memory:", factory=Connection)) as connection:
        dbapi.create(connection)
        dbapi.guard(connection, NEW)
        with pytest.raises(LeaseLost):
            dbapi.guard(connection, OLD)
        connection.execute("CREATE TABLE t (a, b, fence BIGINT)")
        connection.execute("INSERT INTO t VALUES (1, 2, NULL)")
        assert dbapi.update(connection, NEW, "t", {"a": 3}, {"a": 1, "b": 2}) == 1
        with pytest.raises(LeaseLost):
            dbapi.update(connection, OLD, "t", {"a": 4}, {"a": 3, "b": 2})
        driver.paramstyle = "other"
        with pytest.raises(ConfigError, match="qmark"):
            dbapi.guard(connection, NEW)
        dbapi.guard(connection, NEW, paramstyle=style)


def test_a_fence_must_be_a_number():
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for wrong in ("1", 1.0, True, 0, -1, 2**53, None):
            with pytest.raises(ConfigError, match="'paper'"):
                dbapi.guard(connection, Mark("paper", wrong))


# SQLAlchemy


@pytest.fixture
def engine(database):
    url = f"sqlite:///{database.place}"
    if database.kind == "postgres":
        url = "postgresql+psycopg://?" + database.place.replace(" ", "&")
    made = sa.create_engine(url)
    yield made
    made.dispose()


ORDER = sa.Table(
    "order", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("words", sa.Text),
    sa.Column("kind", sa.Text), sa.Column("fence", sa.BigInteger),
)  # fmt: skip
WRITE = ORDER.update().values(words="written")


@rule(7)
def test_sqlalchemy_guards_a_transaction(engine):
    with engine.begin() as connection:
        sqlalchemy.guard(connection, OLD)
        sqlalchemy.guard(connection, OLD)
    sent = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    with engine.begin() as connection:
        sqlalchemy.guard(connection, NEW)
    assert len(sent) == 1, "it costs one statement"
    with pytest.raises(LeaseLost, match=rf"'paper'.* fence {NEW.fence} .* older {OLD.fence}"), engine.begin() as begun:
        begun.execute(WRITE)
        sqlalchemy.guard(begun, OLD)
    with engine.begin() as connection:
        dbapi.guard(connection.connection, NEW, paramstyle="pyformat" if engine.name == "postgresql" else "qmark")
        assert connection.execute(sa.select(ORDER.c.words).where(ORDER.c.id == 1)).scalar() == "one"
        table = sqlalchemy.fence_table(sa.MetaData(), name="other_fence")
        table.create(connection)
        sqlalchemy.guard(connection, OLD, table=table)
        connection.rollback()


@rule(7)
def test_sqlalchemy_guards_rows(engine, database):
    with engine.begin() as connection:
        assert sqlalchemy.update(connection, OLD, WRITE.where(ORDER.c.id == 1)) == 1
        assert sqlalchemy.update(connection, NEW, ORDER.update().where(ORDER.c.id == 2)) == 1  # the fence alone
        assert sqlalchemy.update(connection, NEW, WRITE.where(ORDER.c.id == 99)) == 0
        assert sqlalchemy.update(connection, OLD, WRITE.where(ORDER.c.id == 1).returning(ORDER.c.id)) == 1
    with engine.begin() as connection:
        with pytest.raises(LeaseLost, match=rf"'paper'.* fence {NEW.fence} .* older {OLD.fence}"):
            sqlalchemy.update(connection, OLD, ORDER.update().where(ORDER.c.kind == "a").values(words="late"))
        connection.commit()
    assert database.rows()[:2] == [(1, "written", OLD.fence), (2, "two", NEW.fence)]
    with engine.begin() as connection:
        assert sqlalchemy.update(connection, NEW, WRITE.where(ORDER.c.kind == "a", ORDER.c.id > 0)) == 2


@rule(7)
def test_sqlalchemy_takes_all_rows_or_none_beside_a_newer_holder(engine, database, pool):
    newer = database.connect()
    dbapi.update(newer, NEW, "order", {"words": "newer"}, {"id": 2})
    with engine.connect() as older:
        late = ORDER.update().where(ORDER.c.kind == "a").values(words="late")
        if database.kind == "sqlite":
            older.exec_driver_sql("PRAGMA busy_timeout = 20000")
            older.rollback()
        waiting = pool.submit(sqlalchemy.update, older, OLD, late)
        _blocked(database, waiting)
        newer.commit()
        with pytest.raises(LeaseLost):
            waiting.result(20)
        older.commit()
    assert [row[1] for row in database.rows()[:2]] == ["one", "newer"]


@rule(7)
def test_sqlalchemy_takes_all_rows_or_none_if_a_subquery_selects_them(engine, database):
    shelf = sa.Table(
        "shelf", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("top", sa.Boolean)
    )
    late = ORDER.update().where(ORDER.c.id == shelf.c.id, shelf.c.top).values(words="late")
    with engine.begin() as connection:
        shelf.drop(connection, checkfirst=True)
        shelf.create(connection)
        connection.execute(shelf.insert(), [{"id": 1, "top": True}, {"id": 2, "top": True}, {"id": 3, "top": False}])
        sqlalchemy.update(connection, NEW, ORDER.update().where(ORDER.c.id == 2))
        with pytest.raises(LeaseLost):
            sqlalchemy.update(connection, OLD, late)
        assert sqlalchemy.update(connection, NEW, late) == 2
    assert [row[1] for row in database.rows()] == ["late", "late", "three"]


def test_sqlalchemy_errors_say_what_is_wrong(engine):
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(ConfigError, match="AUTOCOMMIT"):
            sqlalchemy.guard(connection, OLD)
        with pytest.raises(ConfigError, match="AUTOCOMMIT"):
            sqlalchemy.update(connection, OLD, WRITE.where(ORDER.c.id == 1))
    whole = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with whole.connect() as connection, pytest.raises(ConfigError, match="AUTOCOMMIT"):
        sqlalchemy.guard(connection, OLD)
    whole.dispose()
    with engine.connect() as connection:
        with pytest.raises(ConfigError, match="where"):
            sqlalchemy.update(connection, OLD, WRITE)
        with pytest.raises(ConfigError, match="no column 'nosuch'"):
            sqlalchemy.update(connection, OLD, WRITE.where(ORDER.c.id == 1), column="nosuch")


def test_sqlalchemy_guards_if_an_event_sends_begin(tmp_path):
    """As SQLAlchemy's manual says for SQLite: the driver is in autocommit mode, and an event handler sends BEGIN."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/db")
    sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with engine.connect() as connection:
        sqlalchemy.fence_table(sa.MetaData()).create(connection)
        connection.commit()
        sqlalchemy.guard(connection, OLD)
        connection.rollback()
        sqlalchemy.guard(connection, OLD)
        connection.commit()
    engine.dispose()


async def test_an_asyncio_lease_guards_with_run_sync(server, clean, database):
    pytest.importorskip("greenlet")
    driver = "sqlite+aiosqlite" if database.kind == "sqlite" else "postgresql+psycopg"
    if database.kind == "sqlite":
        pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import create_async_engine

    place = f"/{database.place}" if database.kind == "sqlite" else "?" + database.place.replace(" ", "&")
    engine = create_async_engine(f"{driver}://{place}")
    async with interlock.aio.Interlock(server.url) as locks, locks.lock("paper") as lease:
        async with engine.begin() as connection:
            await connection.run_sync(sqlalchemy.guard, lease)
            assert await connection.run_sync(sqlalchemy.update, lease, WRITE.where(ORDER.c.id == 1)) == 1
        with pytest.raises(LeaseLost):
            async with engine.begin() as connection:
                await connection.run_sync(sqlalchemy.guard, Mark("paper", lease.fence - 1))
        options = {"isolation_level": "AUTOCOMMIT"}
        async with engine.execution_options(**options).connect() as connection:
            with pytest.raises(ConfigError):
                await connection.run_sync(sqlalchemy.guard, lease)
    await engine.dispose()
    assert database.rows()[0] == (1, "written", lease.fence)


# Redis

PAPER = {"keys": ["users:{paper}", "users:{paper}:log"], "fence_key": "users:{paper}:fence"}


@pytest.fixture(params=["redis", "redis-decoded", "valkey", "redis-asyncio", "redis-asyncio-decoded"])
def execute(request, server, clean):
    """execute(), over each kind of client."""
    library = redis
    if request.param == "valkey":
        library = pytest.importorskip("valkey")
    decode = request.param.endswith("decoded")
    if "asyncio" not in request.param:
        client = getattr(library, "Valkey" if request.param == "valkey" else "Redis").from_url(
            server.url, decode_responses=decode
        )
        yield lambda *args, **kwargs: guarded.execute(client, *args, **kwargs)
        client.close()
        return

    async def whole(*args, **kwargs):
        async with redis.asyncio.Redis.from_url(server.url, decode_responses=decode) as client:
            return await guarded.aexecute(client, *args, **kwargs)

    yield lambda *args, **kwargs: asyncio.run(whole(*args, **kwargs))


@rule(7)
@pytest.mark.runs_on("each server in both modes")
def test_redis_runs_commands_only_under_the_newest_fence(execute, clean):
    clean.script_flush()  # a server that does not know the script
    commands = [("SET", "users:{paper}", 1), ("GET", "users:{paper}"), ("RPUSH", "users:{paper}:log", b"a", 2.5)]
    ok, one, length = execute(OLD, commands, **PAPER)
    assert (ok, one, length) in {(b"OK", b"1", 1 + 1), ("OK", "1", 1 + 1)}
    assert execute(OLD, [("GET", "nosuch{paper}")], **PAPER) == [None]  # the same fence again
    assert execute(NEW, [], **PAPER) == []  # refuse older ones from now on
    with pytest.raises(LeaseLost, match=rf"'paper'.*users:{{paper}}:fence.* fence {NEW.fence} .* older {OLD.fence}"):
        execute(OLD, [("SET", "users:{paper}", "late"), ("DEL", "users:{paper}:log")], **PAPER)
    assert clean.get("users:{paper}") == b"1"
    assert clean.llen("users:{paper}:log") == 2
    assert clean.get("users:{paper}:fence") == b"%d" % NEW.fence
    clean.delete(*PAPER["keys"])


@rule(9)
@pytest.mark.runs_on("each server in both modes")
def test_a_fence_in_redis_has_a_ttl_that_is_never_shortened(execute, clean):
    execute(OLD, [], **PAPER)
    assert guarded.WEEK - 60 < clean.ttl(PAPER["fence_key"]) <= guarded.WEEK
    execute(OLD, [], **PAPER, keep=5)
    assert clean.ttl(PAPER["fence_key"]) > 60
    clean.delete(PAPER["fence_key"])
    execute(OLD, [], **PAPER, keep=5)
    assert 0 < clean.ttl(PAPER["fence_key"]) <= 5


@pytest.mark.runs_on("each server in both modes")
def test_redis_undoes_nothing_so_the_error_says_which_commands_ran(execute, clean):
    clean.set("users:{paper}", "text")
    commands = [("RPUSH", "users:{paper}:log", "a"), ("INCR", "users:{paper}"), ("RPUSH", "users:{paper}:log", "b")]
    with pytest.raises(guarded.Incomplete, match=r"'paper': command 2 of 3 \(INCR\) failed: .*integer") as caught:
        execute(OLD, commands, **PAPER)
    assert isinstance(caught.value, LockError)
    assert caught.value.failed == 2
    assert caught.value.replies == [1]
    assert clean.llen("users:{paper}:log") == 1
    with pytest.raises(guarded.Incomplete, match="command 1 of 1"):
        execute(OLD, [("NOSUCH", "x")], **PAPER)
    clean.delete(*PAPER["keys"])


@pytest.mark.runs_on("each server in both modes")
def test_a_fence_key_of_another_type_raises_a_clear_error(execute, clean):
    clean.rpush(PAPER["fence_key"], "x")
    clean.expire(PAPER["fence_key"], 60)
    with pytest.raises(ConfigError, match=r"users:\{paper\}:fence holds no fence.*WRONGTYPE"):
        execute(OLD, [("SET", "users:{paper}", 1)], **PAPER)
    clean.set(PAPER["fence_key"], "words", ex=60)
    with pytest.raises(ConfigError, match="words"):
        execute(OLD, [("SET", "users:{paper}", 1)], **PAPER)
    assert not clean.exists("users:{paper}")


@pytest.mark.runs_on("each server in both modes")
def test_redis_without_memory_runs_nothing(execute, clean):
    clean.config_set("maxmemory", 1)
    try:
        with pytest.raises(Unavailable, match="nothing was run"):
            execute(OLD, [("DEL", "users:{paper}")], **PAPER)
    finally:
        clean.config_set("maxmemory", 0)


def test_redis_arguments_are_checked_first(execute):
    for wrong in (
        {"commands": ["SET"]}, {"commands": [()]}, {"commands": [["DEL"] * 7001]}, {"keys": "users:{paper}"},
        {"keys": [PAPER["fence_key"]]}, {"keep": 0}, {"keep": float("inf")},
    ):  # fmt: skip
        arguments = {"commands": [("GET", "users:{paper}")], **PAPER, **wrong}
        with pytest.raises(ConfigError):
            execute(OLD, arguments.pop("commands"), **arguments)
    execute(OLD, [["DEL", *["users:{paper}"] * 6999]], **PAPER)


async def test_a_redis_client_of_the_other_mode_is_refused(redis_client):
    async with redis.asyncio.Redis() as client:
        with pytest.raises(ConfigError, match="aexecute"):
            guarded.execute(client, OLD, [], **PAPER)
    with pytest.raises(ConfigError, match="execute"):
        await guarded.aexecute(redis_client, OLD, [], **PAPER)
    with redis_client.pipeline() as pipeline, pytest.raises(ConfigError, match="pipeline"):
        guarded.execute(pipeline, OLD, [], **PAPER)


def test_the_reply_codes_are_the_same_in_lua_and_python():
    source = load("guard", "interlock.fence").source
    names, numbers = re.search(r"^local (DONE[A-Z_, ]+) = ([\d, ]+)$", source, re.MULTILINE).groups()
    for name, number in zip(names.split(", "), numbers.split(", "), strict=True):
        assert getattr(guarded, name) == int(number)
        assert f"{{{name}, " in source.split("\nlocal ")[0]


# Files


@pytest.fixture
def paper(tmp_path):
    made = tmp_path / "paper"
    made.write_bytes(b"first")
    yield made
    assert not [each for each in os.listdir(tmp_path) if each.endswith(".new")], "a draft was left"


@rule(7)
def test_a_file_is_replaced_only_under_the_newest_fence(paper):
    files.write(paper, OLD, b"one")
    files.write(paper, OLD, "zwölf")
    assert paper.read_text() == "zwölf"
    files.guard(paper, NEW)
    with pytest.raises(LeaseLost, match=rf"'paper'.*paper.fence .*{NEW.fence} .* older {OLD.fence}"):
        files.write(paper, OLD, b"late")
    with pytest.raises(LeaseLost):
        files.guard(paper, OLD)
    assert paper.read_text() == "zwölf"
    assert Path(f"{paper}.fence").read_bytes() == b"%020d\n" % NEW.fence
    with files.replacing(paper, NEW) as new:
        new.write(paper.read_bytes() + b"!")
    with files.replacing(str(paper), NEW, encoding="latin-1") as new:
        new.write(paper.read_text() + "\r\n")
    assert paper.read_bytes() == "zwölf!\r\n".encode("latin-1")


@rule(7)
def test_a_newer_holder_that_writes_during_the_draft_prevails(paper):
    with pytest.raises(LeaseLost), files.replacing(paper, OLD) as new:
        new.write(b"late")
        files.write(paper, NEW, b"newer")
    assert paper.read_bytes() == b"newer"


@rule(7)
def test_a_replacement_under_an_older_fence_is_refused_before_its_body(paper):
    with files.replacing(paper, NEW) as new:
        with pytest.raises(LeaseLost):
            files.write(paper, OLD, b"late")
        new.write(b"newer")
    with pytest.raises(LeaseLost), files.replacing(paper, OLD):
        pytest.fail("the body was begun")


def test_a_body_that_raises_leaves_the_file_unchanged(paper):
    with pytest.raises(ZeroDivisionError), files.replacing(paper, OLD) as new:
        new.write(b"half")
        raise ZeroDivisionError
    assert paper.read_bytes() == b"first"


def test_a_replaced_file_keeps_owner_and_permissions_and_links_are_followed(paper, tmp_path):
    paper.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(paper, 1, 1)
    link = tmp_path / "link"
    link.symlink_to(paper.name)
    files.write(link, OLD, b"x")
    assert link.is_symlink()
    assert paper.read_bytes() == b"x"
    assert stat.S_IMODE(paper.stat().st_mode) == 0o640
    assert os.geteuid() != 0 or paper.stat().st_uid == 1
    made = tmp_path / "made"  # a new one is as open() would make it
    files.write(made, OLD, b"x")
    (tmp_path / "plain").write_bytes(b"")
    assert made.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("found", [b"garbage", b"123", b"%020d" % 1, b"%020d\nmore" % 1, b"\0" * 20 + b"1"])
def test_a_garbled_fence_file_raises_an_error(paper, found):
    Path(f"{paper}.fence").write_bytes(found)
    with pytest.raises(ConfigError, match="holds no fence"):
        files.write(paper, OLD, b"x")
    assert paper.read_bytes() == b"first"


@pytest.mark.parametrize("found", [b"", b"\0" * 21])
def test_a_fence_file_without_a_number_counts_as_no_fence(paper, found):
    Path(f"{paper}.fence").write_bytes(found)
    files.write(paper, OLD, b"x")
    assert Path(f"{paper}.fence").read_bytes() == b"%020d\n" % OLD.fence


CHILD = """
import os, signal, sys, collections
from interlock.fence import files
lease = collections.namedtuple("Lease", "name fence")("paper", int(sys.argv[2]))
real = os.replace
def stopped(*args):
    print("here", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    real(*args)
if sys.argv[3] == "rename":
    os.replace = stopped
with files.replacing(sys.argv[1], lease) as new:
    new.write(b"half")
    new.flush()
    if sys.argv[3] == "body":
        stopped()
"""


@contextlib.contextmanager
def child(path, lease, where: str):
    """A process that is stopped in the body, or with the flock, right before the rename."""
    command = [sys.executable, "-c", CHILD, str(path), str(lease.fence), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"here\n"
            end = time.monotonic() + 10
            while state_of(process.pid) != "T":
                assert time.monotonic() < end
            yield process
        finally:
            process.kill()
            process.wait()


@rule(7)
@pytest.mark.parametrize("where", ["body", "rename"])
def test_a_writer_that_is_killed_changes_nothing_and_blocks_nobody(paper, where, tmp_path):
    with child(paper, OLD, where) as process:
        assert paper.read_bytes() == b"first"
        process.kill()
        process.wait()
    assert paper.read_bytes() == b"first"
    drafts = [each for each in tmp_path.iterdir() if each.name.endswith(".new")]
    assert [each.read_bytes() for each in drafts] == [b"half"]  # as the module says
    for each in drafts:
        each.unlink()
    files.write(paper, OLD, b"the same holder again")
    files.write(paper, NEW, b"newer")
    assert paper.read_bytes() == b"newer"


@rule(7)
def test_a_writer_that_is_stopped_with_the_flock_makes_others_wait_for_a_bounded_time(paper):
    with child(paper, OLD, "rename") as process:
        begun, machine = time.monotonic(), machine_time()
        with pytest.raises(Unavailable, match=r"'paper'.*locked for 0.3 s.*Nothing was written"):
            files.write(paper, NEW, b"newer", timeout=0.3)
        assert time.monotonic() - begun >= 0.3 and machine_time() - machine < 5
        assert paper.read_bytes() == b"first"
        process.send_signal(signal.SIGCONT)
        files.write(paper, NEW, b"newer")  # waits for its end
    assert paper.read_bytes() == b"newer"


def test_a_fence_file_that_is_removed_while_it_is_locked_is_made_again(paper, monkeypatch):
    path, real, removed = Path(f"{paper}.fence"), fcntl.flock, []

    def flock(file, how) -> None:
        if not removed:
            removed.append(path.unlink())
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    files.guard(paper, OLD)
    assert path.read_bytes() == b"%020d\n" % OLD.fence


@rule(7)
def test_after_many_writers_at_once_the_newest_has_written_last(paper, pool):
    refused = []

    def writer(first: int) -> None:
        for fence in range(first, 200, 4):
            try:
                files.write(paper, Mark("paper", fence), str(fence))
            except LeaseLost:
                refused.append(fence)

    seen, done = [], threading.Event()

    def reader() -> None:
        while not done.is_set():
            seen.append(int(paper.read_text()))

    files.write(paper, Mark("paper", 1), "1")
    reading = pool.submit(reader)
    for each in [pool.submit(writer, first) for first in (2, 3, 4)]:
        each.result(30)
    done.set()
    reading.result(10)
    assert seen == sorted(seen)  # a reader sees whole files, and never an older one after a newer one
    assert int(paper.read_text()) == 199
    assert len(seen) > 1


# What is imported


def test_the_other_fences_need_no_sqlalchemy():
    code = """
import sys
sys.modules["sqlalchemy"] = None  # not installed
import interlock, interlock.aio
assert not [name for name in sys.modules if name.startswith("interlock.fence")]
import interlock.fence, interlock.fence.dbapi, interlock.fence.redis, interlock.fence.files
try:
    import interlock.fence.sqlalchemy
except ImportError:
    print("as it should be")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "as it should be"
