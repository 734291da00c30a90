"""A parent that works, then forks workers that all use the same Interlock, as gunicorn --preload does.

    python prefork.py URL threads|asyncio WORKERS ROUNDS os.fork|unseen

Each worker counts up in the server under the lock, without any other protection. Exits with 0 if all of them did.
"""

from __future__ import annotations

import asyncio
import os
import sys

import redis

from harness.unseen import hide_forks

hide_forks()

import interlock  # noqa: E402
import interlock.aio  # noqa: E402

url, mode, workers, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
locks = interlock.Interlock(url) if mode == "threads" else interlock.aio.Interlock(url)


def step(client) -> None:
    seen = int(client.get("users:count"))
    client.set("users:count", seen + 1)


def blocking(client) -> None:
    for _ in range(rounds):
        with locks.lock("count", ttl=5):
            step(client)


async def cooperative(client) -> None:
    async def one() -> None:
        for _ in range(rounds // 2):
            async with locks.lock("count", ttl=5):
                step(client)

    await asyncio.gather(one(), one())


def work() -> None:
    with redis.Redis.from_url(url) as client:
        if mode == "threads":
            blocking(client)
        else:
            asyncio.run(cooperative(client))


if mode == "threads":
    held = locks.lock("parent").acquire()  # so there are connections, a worker, and a lease to inherit
else:
    asyncio.run(cooperative(redis.Redis.from_url(url)))
children = []
for _ in range(workers):
    if child := os.fork():
        children.append(child)
        continue
    work()
    if mode == "threads":
        assert not held.release()  # the parent's
    sys.exit(0)  # an ordinary end, with all that runs at exit
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
if mode == "threads":
    held.ensure()
    assert held.release()
sys.exit(any(codes))
