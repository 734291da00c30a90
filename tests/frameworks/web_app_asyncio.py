"""The same as web_app.py for a server of ASGI: an asyncio Interlock at module level."""

from __future__ import annotations

import asyncio
import json
import os

import redis.asyncio

from interlock.aio import Interlock

URL = os.environ["INTERLOCK_URL"]
TTL = 1.5
IMPORTED_IN = os.getpid()

locks = Interlock(URL)
kept = []


async def use_before():
    await (await locks.lock("before").acquire()).release()


if os.environ.get("BEFORE", "made") != "made":
    asyncio.run(use_before())


async def section(name, client):
    async with locks.lock(name, ttl=TTL, timeout=30) as lease:
        count = int(await client.get(f"users:count:{name}") or 0)
        await asyncio.sleep(0.002)
        await client.set(f"users:count:{name}", count + 1)
        return lease


async def long(name, client):
    async with locks.lock(name, ttl=TTL, timeout=30) as lease:
        await asyncio.sleep(2 * TTL)
        lease.ensure()
        return lease


async def hold(name, client):
    async with locks.lock(name, ttl=TTL, timeout=30) as lease:
        await client.rpush("users:held", os.getpid())
        while not await client.exists("users:go"):
            await asyncio.sleep(0.02)
        return lease


async def keep(name, client):
    kept.append(await locks.lock(name, ttl=TTL, timeout=30).acquire())
    return kept[-1]


WORK = {each.__name__: each for each in (section, long, hold, keep)}


async def application(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            event = (await receive())["type"]
            if event == "lifespan.shutdown":
                await locks.close()
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return
    work, name = scope["path"].strip("/").split("/")
    async with redis.asyncio.Redis.from_url(URL) as client:
        lease = await WORK[work](name, client)
    answer = {"fence": lease.fence, "token": lease.token, "pid": os.getpid(), "imported_in": IMPORTED_IN}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
