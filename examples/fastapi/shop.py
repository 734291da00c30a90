"""A shop on several processes: two orders of one item come one after the other, and one process takes deliveries."""

import asyncio
import contextlib
import os
import secrets
import sqlite3
from typing import Annotated

from fastapi import FastAPI, HTTPException, Request
from fastapi.security import HTTPBasic

from interlock.contrib import web
from interlock.contrib.fastapi import Interlock, Lease, answers, interlocked, leading, locked, responses

LOCKS = os.environ.get(
    "INTERLOCK_URL", "embedded://"
)  # embedded: a Valkey of your own, for all processes of yours here
STOCK = os.environ.get("SHOP_STOCK", "stock.db")
ADMIN = os.environ.get("SHOP_ADMIN", "")  # "name:password" of the person who may look at /locks/; without it, nobody


def query(sql: str, *values: object) -> list[tuple[int]]:
    with contextlib.closing(sqlite3.connect(STOCK, timeout=5)) as stock, stock:
        stock.execute("CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, pieces INTEGER)")
        return stock.execute(sql, values).fetchall()


async def pieces_of(item: str) -> int:
    rows = await asyncio.to_thread(query, "SELECT pieces FROM stock WHERE item = ?", item)
    return rows[0][0] if rows else 0


async def take_deliveries(lease: Lease) -> None:
    """The job of one process of all: it runs while that process leads, and is cancelled at the end of that."""
    while True:
        lease.ensure()
        await asyncio.to_thread(query, "INSERT OR IGNORE INTO stock VALUES ('apples', 10), ('pears', 10)")
        await asyncio.sleep(1)


login = HTTPBasic()


async def admin(request: Request) -> str:
    """Who asks for the page of the locks. 401 for everybody but the admin, whereupon a browser asks for a password."""
    person = await login(request)
    if person and ADMIN and secrets.compare_digest(f"{person.username}:{person.password}".encode(), ADMIN.encode()):
        return person.username
    raise HTTPException(401, headers={"WWW-Authenticate": "Basic"})


locks = Interlock(LOCKS)
app = FastAPI(
    lifespan=interlocked(locks, leading(take_deliveries, name="shop:deliveries", ttl=5)),
    exception_handlers=answers(),
    responses=responses(),
)
app.mount("/locks", web.app(locks, authorize=admin))


@app.get("/stock/{item}")
async def stock(item: str) -> int:
    return await pieces_of(item)


@app.post("/orders/{item}")
async def order(item: str, lease: Annotated[Lease, locked("stock:{item}", timeout=5)]) -> int:
    """Sell one piece. Returns how many are left."""
    left = await pieces_of(item) - 1
    if left < 0:
        raise HTTPException(409, "sold out")
    await asyncio.sleep(0.05)  # the payment
    lease.ensure()
    await asyncio.to_thread(query, "UPDATE stock SET pieces = ? WHERE item = ?", left, item)
    return left
