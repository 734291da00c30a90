"""Steps that the tests of several topologies share."""

from __future__ import annotations

import asyncio
import time

import redis

from harness.matrix import required
from harness.modes import until
from harness.servers import Missing


def started(kind, *args, **options):
    """A topology of this kind; skips the test if this machine lacks its servers."""
    try:
        return kind(*args, **options)
    except Missing as missing:
        required(str(missing))
        raise


async def met(locks):
    """Make a client meet all primaries of its cluster: from then on it is a witness of their restarts."""
    await (await locks.lock("hello", ttl=1).acquire()).release()
    server = locks._session.server
    await until(
        lambda: all(member is not None and member.history.identity_at_map for member in {*server.slots.serving})
    )


async def handed_over(lockable, other, heard):
    """Hold a lock until `other` waits, release it, and fail unless `other` gets it."""
    lease = await lockable.acquire()
    waiting = asyncio.ensure_future(other.acquire())
    await until(heard)
    await until(lambda: waits(lockable))
    await lease.release()
    await (await asyncio.wait_for(waiting, 30)).release()


async def last_write(server, refusal: str) -> float:
    """Write to a server until it refuses with this error. Returns when the last write that it took was sent."""
    last = time.monotonic()
    with redis.Redis.from_url(server.url) as plain:

        def refuses() -> bool:
            nonlocal last
            sent = time.monotonic()
            try:
                plain.set("users:a", 1)
            except redis.ResponseError as error:
                assert refusal in str(error)
                return True
            last = sent  # and not when the reply was read: this process may have had no time for that
            return False

        await until(refuses)
    return last


async def waits(lockable):
    """Whether one waiter stands in the queue."""
    return (await lockable.inspect()).waiting == 1
