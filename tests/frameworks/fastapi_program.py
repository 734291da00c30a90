"""The app that test_fastapi_servers.py starts twice, with uvicorn. What its endpoints do is in lists of the server."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import redis
from fastapi import BackgroundTasks, FastAPI, Request
from fastapi.responses import StreamingResponse

from interlock.contrib.fastapi import Lease, answers, interlocked, leading, locked

URL = os.environ["INTERLOCK_URL"]
GO = Path(os.environ["GO"])
TTL = 2.0
data = redis.asyncio.Redis.from_url(URL, decode_responses=True)
blocking = redis.Redis.from_url(URL, decode_responses=True)

ForName = Annotated[Lease, locked("{name}", ttl=TTL, timeout=None)]
Tried = Annotated[Lease, locked("{name}", ttl=TTL, timeout=1)]


@asynccontextmanager
async def mine(_: FastAPI):
    try:
        yield {"mine": "a state of my own"}
    finally:
        await data.aclose()


async def work(lease):
    """Write who leads, again and again, as long as the server has this lease."""
    while True:
        lease.ensure()
        await lease.execute("RPUSH", "users:ticks", f"{os.getpid()} {lease.fence}")
        await asyncio.sleep(0.02)


class Thing:
    """Started and stopped; the starts and stops of all processes are in one list."""

    async def start(self):
        await data.rpush("users:thing", f"start {os.getpid()}")

    def stop(self):
        blocking.rpush("users:thing", f"stop {os.getpid()}")


leaders = [leading(work, name="work", ttl=TTL), leading(Thing(), name="thing", ttl=TTL)]
app = FastAPI(
    lifespan=interlocked(URL, mine, *(leaders if "LEADING" in os.environ else ())), exception_handlers=answers()
)


@app.post("/add/{name}")
async def add(name: str, lease: ForName):
    """Read, wait, write: two that do this at once lose one of both."""
    before = int(await data.get(f"users:sum:{name}") or 0)
    await asyncio.sleep(0.001)
    await data.set(f"users:sum:{name}", before + 1)
    return lease.fence


@app.post("/add_in_thread/{name}")
def add_in_thread(name: str, lease: ForName):
    before = int(blocking.get(f"users:sum:{name}") or 0)
    time.sleep(0.001)
    lease.ensure()
    blocking.set(f"users:sum:{name}", before + 1)
    return lease.fence


@app.post("/hold/{name}")
async def hold(name: str, lease: ForName):
    """Hold it until the file `name` is there.

    Not until a key is there: the client waits in asyncio.wait_for, which in Python 3.11 may swallow a cancellation.
    And no await lies between what a test sees and the try, where a cancellation would leave no trace.
    """
    blocking.rpush(f"users:log:{name}", f"began {os.getpid()}")
    try:
        while not (GO / name).exists():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        await data.rpush(f"users:log:{name}", f"cancelled {os.getpid()}")
        raise
    return lease.fence


@app.post("/hold_in_thread/{name}")
def hold_in_thread(name: str, lease: ForName):
    blocking.rpush(f"users:log:{name}", f"began {os.getpid()}")
    while not (GO / name).exists() and not lease.lost:
        time.sleep(0.01)
    blocking.rpush(f"users:log:{name}", f"lost {os.getpid()}" if lease.lost else f"ended {os.getpid()}")
    return lease.fence


@app.post("/try/{name}")
async def try_it(name: str, lease: Tried):
    return lease.fence


@app.post("/body/{name}")
async def body(name: str, request: Request, lease: ForName):
    """The endpoint itself reads the body, piece by piece."""
    return {"size": sum([len(piece) async for piece in request.stream()]), "mine": request.state.mine}


def answered(lease: Lease, name: str, background: BackgroundTasks) -> StreamingResponse:
    def after() -> None:
        blocking.rpush(f"users:log:{name}", f"background {lease.state}")

    async def pieces():
        for number in range(3):
            await asyncio.sleep(0.01)
            yield f"{number} {lease.state}\n"

    background.add_task(after)
    return StreamingResponse(pieces(), background=background)


@app.post("/stream/{name}")
async def stream(name: str, background: BackgroundTasks, lease: ForName):
    return answered(lease, name, background)


if "OLD" not in os.environ:

    @app.post("/stream_under_lock/{name}")
    async def stream_under_lock(
        name: str,
        background: BackgroundTasks,
        lease: Annotated[Lease, locked("{name}", scope="request", ttl=TTL, timeout=None)],
    ):
        return answered(lease, name, background)
