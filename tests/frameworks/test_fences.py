"""Fences in the SQLAlchemy ORM, MySQL's relative MariaDB and an object store: the data refuses a late writer.

A holder is a process that really stops between its check of the lease and its write. The control lets the same process
write without the guard.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from harness import mariadb, postgres
from harness.commands import Command
from harness.modes import wait_until
from harness.processes import state_of
from interlock import ConfigError, Interlock, LeaseLost
from interlock.fence import StaleFence, sqlalchemy
from interlock.fence.sqlalchemy_orm import FencedRow, claim

EXAMPLE = Path(__file__).parents[2] / "examples" / "fences"
pytestmark = pytest.mark.runs_on("valkey-9.1")


class Mark(NamedTuple):
    """The part of a lease that travels with a write: name and fence."""

    name: str
    fence: int


OLD, NEW = Mark("paper", 1_700_000_000_000_000), Mark("paper", 1_700_000_000_000_001)


class Base(DeclarativeBase):
    pass


class Account(FencedRow, Base):
    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    kind: Mapped[str] = mapped_column(sa.String(20), default="account")
    entries: Mapped[list[Entry]] = relationship(lazy="joined")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "account"}  # noqa: RUF012


class Savings(Account):
    __tablename__ = "savings"

    id: Mapped[int] = mapped_column(sa.ForeignKey("account.id"), primary_key=True)
    rate: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_identity": "savings"}  # noqa: RUF012


class Entry(Base):
    """A row without a fence."""

    __tablename__ = "entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int | None] = mapped_column(sa.ForeignKey("account.id"))


class Pair(FencedRow, Base):
    __tablename__ = "pair"

    left: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    right: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    words: Mapped[str | None] = mapped_column(sa.String(20))


sqlalchemy.fence_table(Base.metadata)


@pytest.fixture(scope="module")
def cluster():
    with postgres.running() as server:
        yield server


@pytest.fixture(scope="module")
def maria():
    with mariadb.running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/data.db"
    return request.getfixturevalue("cluster" if request.param == "postgres" else "maria").url


@pytest.fixture
def engine(url):
    made = sa.create_engine(url)
    if made.dialect.name == "sqlite":  # the driver begins transactions late and ends them early otherwise
        sa.event.listen(made, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        sa.event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    Base.metadata.drop_all(made)
    Base.metadata.create_all(made)
    with Session(made) as session:
        session.add_all([Account(id=7, balance=100), Account(id=8, balance=100), Savings(id=9, rate=1)])
        session.commit()
    yield made
    made.dispose()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


def row(engine, identity=7):
    with engine.connect() as connection:
        table = Account.__table__
        return tuple(connection.execute(sa.select(table.c.balance, table.c.fence).where(table.c.id == identity)).one())


# A holder that was stopped between its check and its write

LATE = """
import json, os, signal, sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from frameworks.test_fences import Account, sqlalchemy, claim
from interlock import Interlock, LeaseLost
from interlock.fence import StaleFence

def says(**words):
    print(json.dumps(words), flush=True)

server, url = sys.argv[1:]
engine = sa.create_engine(url)
with Interlock(server) as locks, Session(engine, expire_on_commit=False) as session:
    lease = locks.lock("account:7", ttl=1).acquire()
    account = claim(session, lease, Account, 7)
    session.commit()  # it has claimed its row, and goes on to think
    lease.ensure()
    os.kill(os.getpid(), signal.SIGSTOP)
    refused = []
    for guarded in ("flush", "claim", "guard"):
        try:
            if guarded == "flush":
                account.balance = 1
                session.flush()
            elif guarded == "claim":
                claim(session, lease, Account, 7)
            else:
                with engine.begin() as connection:
                    sqlalchemy.guard(connection, lease)
        except StaleFence as error:
            refused.append(str(error))
            session.rollback()
    says(refused=refused, lost=bool(lease.lost))
    sys.stdin.readline()
    with engine.begin() as connection:  # the control: the same write, past the guard
        connection.execute(Account.__table__.update().where(Account.__table__.c.id == 7).values(balance=1))
    says(written=True)
"""


def test_a_late_write_is_refused_and_without_the_guard_it_is_not(engine, url, server, clean):
    late = subprocess.Popen(
        [sys.executable, "-c", LATE, server.url, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: state_of(late.pid) == "T" or late.poll() is not None, 60)
        with Interlock(server.url) as locks, locks.lock("account:7", timeout=30) as lease, Session(engine) as session:
            claim(session, lease, Account, 7).balance -= 10
            sqlalchemy.guard(session.connection(), lease)
            session.commit()
        late.send_signal(signal.SIGCONT)
        said = json.loads(late.stdout.readline())
        assert len(said["refused"]) == 3
        assert all(f"fence {lease.fence} of a newer holder" in each for each in said["refused"])
        assert row(engine) == (90, lease.fence)
        print(file=late.stdin, flush=True)
        assert json.loads(late.stdout.readline()) == {"written": True}
        assert row(engine)[0] == 1
    finally:
        late.kill()
        late.communicate()


# The ORM


def test_a_claim_reads_the_row_and_refuses_older_holders_from_then_on(engine):
    with Session(engine) as session:
        account = claim(session, OLD, Account, 7)
        account.balance -= 10
        session.commit()
        account.balance -= 10  # in the next transaction, under the same claim
        session.commit()
        assert claim(session, NEW, Account, 99) is None
        session.rollback()
        savings = claim(session, OLD, session.get(Account, 9))
        savings.rate = 2
        session.commit()
    assert row(engine) == (80, OLD.fence)
    assert row(engine, 9)[1] == OLD.fence
    with Session(engine) as session:
        assert session.get(Savings, 9).rate == 2


def test_a_flush_of_an_older_holder_raises_and_rolls_everything_back(engine):
    with Session(engine, expire_on_commit=False) as older, Session(engine) as newer:
        account = claim(older, OLD, Account, 7)
        older.commit()
        claim(newer, NEW, Account, 7).balance = 50
        newer.commit()
        older.add(Entry(id=1))
        account.balance = 1
        with pytest.raises(StaleFence, match=f"row \\(7,\\), has seen fence {NEW.fence}"):
            older.commit()
        assert issubclass(StaleFence, LeaseLost)
        assert not older.in_transaction() or not older.is_active or older.rollback() is None
        older.rollback()
        with pytest.raises(StaleFence):
            claim(older, OLD, Account, 7)
        older.rollback()
        account = older.get(Account, 7)
        older.delete(account)
        with pytest.raises(StaleFence):
            older.flush()
        older.rollback()
        assert older.get(Entry, 1) is None
    assert row(engine) == (50, NEW.fence)


def test_a_holder_that_comes_later_waits_for_the_transaction_and_reads_what_it_wrote(engine, pool):
    if engine.dialect.name == "sqlite":
        pytest.skip("the second writer waits in SQLite's own busy handler, and then has to begin anew")
    with Session(engine) as older, Session(engine) as newer:
        newer.connection()
        account = claim(older, OLD, Account, 7)
        account.balance = 60
        older.flush()
        waiting = pool.submit(claim, newer, NEW, Account, 7)
        wait_until(lambda: blocked(engine))
        older.commit()
        assert waiting.result(30).balance == 60
        newer.commit()


def blocked(engine) -> bool:
    """Whether a transaction waits for a lock."""
    question = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mariadb": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }
    with engine.connect() as connection:
        return connection.exec_driver_sql(question[engine.dialect.name]).scalar() > 0


def test_what_nobody_has_claimed_is_not_written(engine):
    with Session(engine) as session:
        account = session.get(Account, 7)
        account.balance = 1
        with pytest.raises(ConfigError, match="was changed without a claim"):
            session.flush()
        session.rollback()
        session.delete(session.get(Account, 8))
        with pytest.raises(ConfigError, match="was changed without a claim"):
            session.flush()
        session.rollback()
        account = session.get(Account, 7)
        account.entries.append(Entry(id=5))  # a row of another table, which has no fence
        session.commit()
    assert row(engine) == (100, None)


def test_changes_in_bulk_are_refused(engine):
    with sessionmaker(engine)() as session:
        for bulk in (
            lambda: session.execute(sa.update(Account).values(balance=1)),
            lambda: session.execute(sa.delete(Account).where(Account.id == 7)),
            lambda: session.query(Account).update({"balance": 1}),
            lambda: session.execute(sa.update(Savings).values(rate=5)),
            lambda: session.execute(sa.update(Account), [{"id": 7, "balance": 1}]),
        ):
            with pytest.raises(ConfigError, match="in bulk compares no fences"):
                bulk()
        session.rollback()
        session.execute(sa.update(Entry).values(account_id=None))  # of a class without fences
        table = Account.__table__
        statement = sa.update(table).where(table.c.id.in_([7, 8])).values(balance=1)
        assert sqlalchemy.update(session.connection(), OLD, statement) == 2
        session.commit()
    assert row(engine) == (1, OLD.fence)


def test_new_objects_need_no_claim_and_keys_may_have_several_columns(engine):
    with Session(engine) as session:
        session.add_all([Account(id=1), Pair(left=1, right=2, fence=OLD.fence)])
        session.commit()
        claim(session, NEW, Pair, (1, 2)).words = "newer"
        session.commit()
        with pytest.raises(StaleFence):
            claim(session, OLD, Pair, (1, 2))
        session.rollback()
        new = Account(id=2)
        for wrong, said in (
            (lambda: claim(session, NEW, Pair, 1), "primary key of 2 columns"),
            (lambda: claim(session, NEW, Entry, 1), "no mapped class with the mixin FencedRow"),
            (lambda: claim(session, NEW, new), "has no row yet"),
            (lambda: claim(session, Mark("paper", 0), Account, 7), "a fence is a whole number"),
        ):
            with pytest.raises(ConfigError, match=said):
                wrong()


def test_an_autocommit_session_is_refused(engine):
    whole = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    for each in (engine.execution_options(isolation_level="AUTOCOMMIT"), whole):
        with Session(each) as session, pytest.raises(ConfigError, match="AUTOCOMMIT"):
            claim(session, OLD, Account, 7)
    whole.dispose()


async def test_an_async_session_claims_through_run_sync(tmp_path):
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/data.db")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session:
        session.add(Account(id=7, balance=100))
        await session.commit()
        account = await session.run_sync(claim, NEW, Account, 7)
        account.balance = 90
        await session.commit()
        with pytest.raises(StaleFence):
            await session.run_sync(claim, OLD, Account, 7)
    await engine.dispose()


# Core on MariaDB: the same as on PostgreSQL and SQLite, of which tests/integrations/test_fence.py has more


@pytest.fixture
def shop(maria):
    made = sa.create_engine(maria.url)
    Base.metadata.drop_all(made)
    Base.metadata.create_all(made)
    with made.begin() as connection:
        connection.execute(
            Account.__table__.insert(), [{"id": number, "balance": 0, "kind": "account"} for number in (1, 2, 3)]
        )
    yield made
    made.dispose()


def test_mariadb_guards_a_transaction(shop):
    for lease in (OLD, OLD, NEW, NEW):
        with shop.begin() as connection:
            sqlalchemy.guard(connection, lease)
            sqlalchemy.guard(connection, lease)
    with shop.begin() as connection:
        with pytest.raises(StaleFence, match=rf"fence {NEW.fence} of a newer holder.* older {OLD.fence}"):
            sqlalchemy.guard(connection, OLD)
        sqlalchemy.guard(connection, Mark("Paper", 1))  # another lock than "paper"
        sqlalchemy.guard(connection, Mark("päper", 1))


def test_mariadb_makes_an_older_transaction_wait_and_then_refuses_it(shop, pool):
    with shop.connect() as older, shop.connect() as newer:
        older.execute(sa.text("SELECT * FROM account")).all()  # a snapshot of before
        sqlalchemy.guard(newer, NEW)
        waiting = pool.submit(sqlalchemy.guard, older, OLD)
        wait_until(lambda: blocked(shop))
        newer.commit()
        with pytest.raises(StaleFence):
            waiting.result(30)
        older.rollback()
        # A snapshot from before the newer one's commit is no way around it, either.
        older.execute(sa.text("SELECT * FROM interlock_fence")).all()
        sqlalchemy.guard(newer, Mark("paper", NEW.fence + 1))
        newer.commit()
        with pytest.raises(StaleFence):
            sqlalchemy.guard(older, NEW)


def test_mariadb_changes_all_rows_or_none(shop):
    table = Account.__table__

    def change(lease, where, **values):
        with shop.begin() as connection:
            return sqlalchemy.update(connection, lease, table.update().where(where).values(**values))

    assert change(NEW, table.c.id == 2, balance=5) == 1
    assert change(NEW, table.c.id == 2, balance=5) == 1  # nothing to change, and it matches
    with pytest.raises(StaleFence):
        change(OLD, table.c.id < 3, balance=1)
    assert row(shop, 1) == (0, None)
    assert change(NEW, table.c.id < 3, balance=7) == 2
    assert change(NEW, table.c.id == 99, balance=7) == 0


def test_mariadb_refuses_a_row_that_a_newer_holder_adds_in_between(shop):
    """Only without gap locks: at READ COMMITTED."""
    table = Account.__table__
    level = shop.execution_options(isolation_level="READ COMMITTED")
    reached = threading.Event()

    def add(_connection, _cursor, statement, *_):
        if statement.startswith("UPDATE") and not reached.is_set():
            reached.set()
            with shop.begin() as other:
                other.execute(table.insert().values(id=4, balance=3, kind="account", fence=NEW.fence))

    sa.event.listen(shop, "before_cursor_execute", add)
    with pytest.raises(StaleFence), level.begin() as connection:
        sqlalchemy.update(connection, OLD, table.update().where(table.c.id > 2).values(balance=1))
    assert reached.is_set()
    assert (row(shop, 3), row(shop, 4)) == ((0, None), (3, NEW.fence))


# An object store


WRITER = """
import json, os, signal, sys
import objects
from interlock import Interlock
from interlock.fence import StaleFence

server, url = sys.argv[1:]
with Interlock(server) as locks:
    lease = locks.lock("stock", ttl=1).acquire()
    objects.change(url, lease, lambda old: {"left": 10})
    lease.ensure()
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        objects.change(url, lease, lambda old: {"left": old["left"] - 1})
    except StaleFence as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    sys.stdin.readline()
    import urllib.request
    urllib.request.urlopen(urllib.request.Request(url, b'{"left": 9}', method="PUT")).close()
    print("written", flush=True)
"""


@pytest.fixture
def objects(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    for name in ("objects", "store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import objects

    yield objects
    del sys.modules["objects"]


@pytest.fixture
def store(start):
    program = start("store.py", cwd=EXAMPLE)
    return program.says(r"http://\S+")[0]


def test_an_object_store_refuses_a_late_writer(objects, store, server, clean):
    url = f"{store}/stock"
    late = subprocess.Popen([sys.executable, "-c", WRITER, server.url, url], stdin=subprocess.PIPE, text=True,
                            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(EXAMPLE)})  # fmt: skip
    try:
        wait_until(lambda: state_of(late.pid) == "T" or late.poll() is not None, 60)
        with Interlock(server.url) as locks, locks.lock("stock", timeout=30) as lease:
            objects.change(url, lease, lambda old: {"left": old["left"] - 5})
            objects.change(url, lease, lambda old: {"left": old["left"] + 5})  # the very content that the late one read
        late.send_signal(signal.SIGCONT)
        assert f"fence {lease.fence} of a newer holder" in json.loads(late.stdout.readline())["refused"]
        assert objects.read(url)[1] == {"left": 10, "fence": lease.fence}
        print(file=late.stdin, flush=True)
        assert late.stdout.readline() == "written\n"
        assert objects.read(url)[1] == {"left": 9}  # the control
    finally:
        late.kill()
        late.communicate()


def test_many_writers_of_an_object_lose_no_change(objects, store, pool):
    url = f"{store}/count"

    def count():
        for _ in range(40):
            objects.change(url, NEW, lambda old: {"number": old.get("number", 0) + 1})

    for each in [pool.submit(count), pool.submit(count)]:
        each.result(60)
    assert objects.read(url)[1] == {"number": 80, "fence": NEW.fence}


def test_the_example_shows_a_refusal(tmp_path):
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    example = Command([sys.executable, "objects.py"], cwd=EXAMPLE, log=tmp_path / "log", env=env)
    try:
        assert example.ended(60) == 0
        assert "refused: " in example.output
        assert "the store has {'left': 9" in example.output
    finally:
        example.kill_all()
        subprocess.run(
            [sys.executable, "-m", "interlock", "server", "stop", "--force"], env={**os.environ, **env}, check=False
        )
