"""A program over the redis-py and hiredis that stand first on PYTHONPATH: every way to a server that redis-py carries.

    python redis_versions.py threads|asyncio URL ... --refused [URL ...] --silent [URL ...]

For each URL, and for the client that redis-py makes of it, the program acquires a lock, contends for it, keeps it by
renewals, hands it over by a push, revokes it by a push, and releases it. A server must refuse each URL after
`--refused`, in a way that interlock can explain. The URLs after `--silent` accept connections and answer nothing; an
acquire must end in its time all the same. It prints the version of redis-py, and what it has done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

import interlock
import interlock.aio
from interlock._client import waiting

waiting.HEARTBEAT_INTERVAL = 1000.0  # seconds: a waiter that gets no push waits until its acquire times out
NAME = f"redis-py/{os.getpid()}"  # the server may have records of other kinds under plain names
TTL = 3.0  # seconds: the first renewal is after a third of it
PUSHED = 5.0  # seconds: without a push, the holder learns of a revocation after a third of the default ttl, 10 s

mode, *urls = sys.argv[1:]
library, api = (redis, interlock) if mode == "threads" else (redis.asyncio, interlock.aio)


async def call(function, *args):
    """The result of a blocking function or a coroutine function: the same steps in both modes."""
    return await (asyncio.to_thread(function, *args) if mode == "threads" else function(*args))


def client_of(url: str):
    parts = urlsplit(url)
    scheme = parts.scheme.partition("+")[2]
    if scheme == "cluster":
        return library.RedisCluster(parts.hostname, int(parts.netloc.partition(",")[0].rpartition(":")[2]))
    if scheme == "sentinel":
        sentinels = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in parts.netloc.split(","))]
        return library.sentinel.Sentinel(sentinels).master_for(parse_qs(parts.query)["service"][0])
    return library.Redis.from_url(url)


async def close(client) -> None:
    closing = getattr(client, "aclose", client.close)()
    if closing is not None:
        await closing


async def use(target) -> None:
    holder, waiter = api.Interlock(target, try_for=5), api.Interlock(target, try_for=5)
    lease = await call(holder.lock(NAME, ttl=TTL).acquire)
    assert await call(waiter.lock(NAME).try_acquire) is None
    first_deadline = time.monotonic() + lease.remaining()
    while time.monotonic() + lease.remaining() < first_deadline + TTL / 6:
        lease.ensure()  # else no renewal was in time
        await asyncio.sleep(0.02)

    waiting = asyncio.ensure_future(call(waiter.lock(NAME).acquire, 20))
    while not (await call(holder.lock(NAME).inspect)).waiting:
        lease.ensure()
        assert not waiting.done()
    assert await call(lease.release)
    lease = await waiting

    await call(holder.lock(NAME).revoke, "this test")
    if mode == "threads":
        assert await asyncio.to_thread(lease.lost.wait, PUSHED)
    else:
        await asyncio.wait_for(lease.lost.wait(), PUSHED)
    assert not await call(lease.release)
    lease = await call(holder.lock(NAME).acquire, 5)
    assert await call(lease.release)
    await call(holder.close)
    await call(waiter.close)


async def refuse(url: str) -> None:
    locks = api.Interlock(url, try_for=5)
    try:
        await call(locks.lock(NAME).try_acquire)
    except interlock.ConfigError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError(url)
    await call(locks.close)


async def be_patient(url: str) -> None:
    locks, started = api.Interlock(url, try_for=0.5), time.monotonic()
    try:
        await asyncio.wait_for(call(locks.lock(NAME).try_acquire), 10)
    except interlock.Unavailable:
        print(f"silent: {time.monotonic() - started < 5}")
    await call(locks.close)


async def main() -> None:
    places = [urls.index("--refused"), urls.index("--silent")]
    accepted, refused, silent = urls[: places[0]], urls[places[0] + 1 : places[1]], urls[places[1] + 1 :]
    print(f"redis-py {redis.__version__}")
    for url in accepted:
        await use(url)
        print(f"used: {url}")
        client = client_of(url)
        await use(client)
        await close(client)
        print(f"used: {type(client).__name__}")
    for url in refused:
        await refuse(url)
    for url in silent:
        await be_patient(url)


asyncio.run(main())
