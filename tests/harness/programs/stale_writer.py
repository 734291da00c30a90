"""A late writer, as a process of its own: it is stopped between `ensure()` and its write.

    python stale_writer.py KIND PLACE URL

It acquires, reads, calls ensure(), and stops itself (SIGSTOP). Continued, it writes, first with the guard, then without
it, and prints the result of each write: one JSON a line. test_fence.py uses the stores below, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
from functools import partial
from pathlib import Path

import interlock
from interlock.fence import dbapi, files, redis


class Store:
    """One text that a lock protects: `guarded(lease, text)` writes it under the fence, `plain(text)` without."""

    def __init__(self, place: str) -> None:
        self.place = place


class Dbapi(Store):
    """A row; `whole` guards the transaction, else the row has the fence itself."""

    def __init__(self, whole: bool, connect, mark: str, place: str) -> None:
        super().__init__(place)
        self.whole, self.connect, self.mark = whole, connect, mark

    @contextlib.contextmanager
    def transaction(self):
        with contextlib.closing(self.connect(self.place)) as connection:
            yield connection
            connection.commit()

    def make(self) -> None:
        with self.transaction() as connection:
            cursor = connection.cursor()
            cursor.execute("DROP TABLE IF EXISTS paper")
            cursor.execute("DROP TABLE IF EXISTS interlock_fence")
            cursor.execute("CREATE TABLE paper (id INTEGER PRIMARY KEY, words TEXT, fence BIGINT)")
            cursor.execute("INSERT INTO paper VALUES (1, 'first', NULL)")
            dbapi.create(connection)

    def read(self) -> str:
        with self.transaction() as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT words FROM paper WHERE id = 1")
            return cursor.fetchone()[0]

    def guarded(self, lease, text: str) -> None:
        with self.transaction() as connection:
            if self.whole:
                dbapi.guard(connection, lease)
                connection.cursor().execute(f"UPDATE paper SET words = {self.mark} WHERE id = 1", (text,))
            else:
                assert dbapi.update(connection, lease, "paper", {"words": text}, {"id": 1}) == 1

    def plain(self, text: str) -> None:
        with self.transaction() as connection:
            connection.cursor().execute(f"UPDATE paper SET words = {self.mark} WHERE id = 1", (text,))


class Alchemy(Store):
    """A row, over SQLAlchemy."""

    def __init__(self, whole: bool, place: str) -> None:
        import sqlalchemy as sa

        super().__init__(place)
        self.whole, self.engine = whole, sa.create_engine(place, poolclass=sa.NullPool)
        self.metadata = sa.MetaData()
        self.paper = sa.Table(
            "paper", self.metadata, sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("words", sa.Text), sa.Column("fence", sa.BigInteger),
        )  # fmt: skip

    def make(self) -> None:
        from interlock.fence import sqlalchemy

        sqlalchemy.fence_table(self.metadata)
        self.metadata.drop_all(self.engine)
        self.metadata.create_all(self.engine)
        with self.engine.begin() as connection:
            connection.execute(self.paper.insert().values(id=1, words="first"))

    def read(self) -> str:
        with self.engine.begin() as connection:
            return connection.execute(self.paper.select()).one().words

    def _write(self, text: str):
        return self.paper.update().where(self.paper.c.id == 1).values(words=text)

    def guarded(self, lease, text: str) -> None:
        from interlock.fence import sqlalchemy

        with self.engine.begin() as connection:
            if self.whole:
                sqlalchemy.guard(connection, lease)
                connection.execute(self._write(text))
            else:
                assert sqlalchemy.update(connection, lease, self._write(text)) == 1

    def plain(self, text: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(self._write(text))


class Redis(Store):
    """A key, written through the client library."""

    def __init__(self, place: str) -> None:
        import redis

        super().__init__(place)
        self.client = redis.Redis.from_url(place, decode_responses=True)

    def make(self) -> None:
        self.client.set("users:{paper}", "first")

    def read(self) -> str:
        with self.client:
            return self.client.get("users:{paper}")

    def guarded(self, lease, text: str) -> None:
        with self.client:
            command = ("SET", "users:{paper}", text)
            redis.execute(self.client, lease, [command], keys=["users:{paper}"], fence_key="users:{paper}:fence")

    def plain(self, text: str) -> None:
        with self.client:
            self.client.set("users:{paper}", text)


class File(Store):
    def make(self) -> None:
        Path(self.place).write_text("first")

    def read(self) -> str:
        return Path(self.place).read_text()

    def guarded(self, lease, text: str) -> None:
        files.write(self.place, lease, text)

    def plain(self, text: str) -> None:
        Path(self.place).write_text(text)


def postgres(place: str):
    import psycopg

    return psycopg.connect(place)


KINDS = {
    "sqlite-guard": partial(Dbapi, True, sqlite3.connect, "?"),
    "sqlite-update": partial(Dbapi, False, sqlite3.connect, "?"),
    "postgres-guard": partial(Dbapi, True, postgres, "%s"),
    "postgres-update": partial(Dbapi, False, postgres, "%s"),
    "sqlalchemy-sqlite-guard": partial(Alchemy, True),
    "sqlalchemy-sqlite-update": partial(Alchemy, False),
    "sqlalchemy-postgres-guard": partial(Alchemy, True),
    "sqlalchemy-postgres-update": partial(Alchemy, False),
    "redis": Redis,
    "file": File,
}


def main(kind: str, place: str, url: str) -> None:
    store = KINDS[kind](place)
    with interlock.Interlock(url) as locks:
        lease = locks.lock("paper", ttl=1).acquire(10)
        text = store.read() + ", then the late one's"
        lease.ensure()
        say({"fence": lease.fence, "text": text})
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            store.guarded(lease, text)
            say({"refused": None})
        except interlock.LeaseLost as error:
            say({"refused": str(error)})
        sys.stdin.readline()  # told to do it without the guard
        store.plain(text)
        say({"written": text})


def say(what) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
