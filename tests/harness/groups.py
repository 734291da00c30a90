"""What tests of topologies share."""

from __future__ import annotations

import asyncio

from harness.matrix import required
from harness.modes import until
from harness.servers import Missing


def started(kind, *args, **options):
    """A topology, or a skip."""
    try:
        return kind(*args, **options)
    except Missing as missing:
        required(str(missing))
        raise


async def met(locks):
    """Once it has met all primaries, it is a witness of what they do."""
    await (await locks.lock("hello", ttl=1).acquire()).release()
    server = locks._session.server
    await until(lambda: all(member is not None and member.history.identity_at_map for member in {*server._map}))


async def handed_over(lockable, other, heard):
    """It goes to who waits, by push."""
    lease = await lockable.acquire()
    waiting = asyncio.ensure_future(other.acquire())
    await until(heard)
    await until(lambda: waits(lockable))
    await lease.release()
    await (await asyncio.wait_for(waiting, 30)).release()


async def waits(lockable):
    return (await lockable.inspect()).waiting == 1
