"""Who is measured: interlock and its peers, one small adapter each.

A contender is a context manager that holds the lock, made by `lock()` of `Clients` or `AsyncClients`: so the loops
around it are the same for all. Peers run in the best setting that their documentation names, and renew nothing, while
interlock renews, as it always does:

- redis-py's Lock, threads and asyncio: `sleep=0.1`, the default, and `sleep=0.001` where locks are contended.
- python-redis-lock: `expire=30`; it waits by BLPOP.
- redis-fifo-lock (asyncio): `FifoLock(...).hold`, its queue with a lease.
- pottery's Redlock over one server, or over the servers of a quorum.
- aioredlock (asyncio), over its own client aioredis 1.3; with a lock_timeout, so without its watchdog. It gives up
  after 3 tries by default, so `retry_count` is high here.

A peer that is not installed is left out, and the output says so.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio

import interlock
import interlock.aio
from goals import (
    AIOREDLOCK,
    BLPOP,
    EAGER,
    EAGER_ASYNCIO,
    FAIR,
    FIFO,
    ONE_SERVER,
    OURS,
    POTTERY,
    REDIS_ASYNCIO,
    REDIS_PY,
    THREE,
    UNCONFIRMED,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

TTL = 30.0
MODULES = {BLPOP: "redis_lock", POTTERY: "pottery", FIFO: "redis_fifo_lock", AIOREDLOCK: "aioredlock"}


def present(*contenders: str) -> tuple[str, ...]:
    """Those of them that this machine and this version of interlock have."""
    return tuple(name for name in contenders if _is_here(name))


def missing() -> list[str]:
    """The peers that are not installed."""
    return [name for name in MODULES if not _is_here(name)]


def _is_here(contender: str) -> bool:
    if contender == UNCONFIRMED:
        return "confirm" in inspect.signature(interlock.Interlock.lock).parameters
    return contender not in MODULES or find_spec(MODULES[contender]) is not None


def _options(contender: str) -> dict[str, Any]:
    """What `lock(...)` is given for one of ours."""
    return {FAIR: {"fair": True}, UNCONFIRMED: {"confirm": False}}.get(contender, {})


class Clients:
    """The clients of one process, made when they are asked for. Ended by `close()`.

    With several servers, they are a quorum: pottery and `THREE` use all of them, all others the first.
    """

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self.path = paths[0]
        self._ours: interlock.Interlock | None = None
        self._quorum: interlock.Interlock | None = None
        self._peers: list[redis.Redis] = []

    def lock(self, contender: str, name: str) -> AbstractContextManager[Any]:
        """A lock for one thread, which that thread can enter again and again."""
        if contender in {OURS, FAIR, UNCONFIRMED, ONE_SERVER}:
            self._ours = self._ours or interlock.Interlock(f"unix://{self.path}")
            return self._ours.lock(name, ttl=TTL, **_options(contender))
        if contender == THREE:
            self._quorum = self._quorum or interlock.Interlock.quorum([f"unix://{path}" for path in self.paths])
            return self._quorum.lock(name, ttl=TTL)
        self._peers = self._peers or [redis.Redis(unix_socket_path=path) for path in self.paths]
        return _PEERS[contender](self._peers, name)

    def close(self) -> None:
        for client in (self._ours, self._quorum, *self._peers):
            if client is not None:
                client.close()


def _blpop(clients: list[redis.Redis], name: str) -> Any:
    import redis_lock

    return redis_lock.Lock(clients[0], name, expire=int(TTL))


def _pottery(clients: list[redis.Redis], name: str) -> Any:
    from pottery import Redlock

    return Redlock(key=name, masters={*clients}, auto_release_time=TTL)


_PEERS: dict[str, Callable[[list[redis.Redis], str], Any]] = {
    REDIS_PY: lambda clients, name: clients[0].lock(name, timeout=TTL),
    EAGER: lambda clients, name: clients[0].lock(name, timeout=TTL, sleep=0.001),
    BLPOP: _blpop,
    POTTERY: _pottery,
}


class AsyncClients:
    """The clients of one event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ours = interlock.aio.Interlock(f"unix://{path}")
        self._peer = redis.asyncio.Redis(unix_socket_path=path)
        self._aioredlock: Any = None

    def lock(self, contender: str, name: str) -> Callable[[], AbstractAsyncContextManager[Any]]:
        """The function that makes the lock of one task for one section."""
        if contender in {OURS, FAIR, UNCONFIRMED}:
            lock = self.ours.lock(name, ttl=TTL, **_options(contender))
            return lambda: lock
        if contender == FIFO:
            from redis_fifo_lock import FifoLock

            hold: Callable[[], AbstractAsyncContextManager[Any]] = FifoLock(
                self._peer, name, lease_ms=int(TTL * 1000)
            ).hold
            return hold
        if contender == AIOREDLOCK:
            return lambda: self._hold_aioredlock(name)
        lock_of_peer: Any = self._peer.lock(name, timeout=TTL, sleep=0.001 if contender == EAGER_ASYNCIO else 0.1)
        return lambda: lock_of_peer

    @asynccontextmanager
    async def _hold_aioredlock(self, name: str) -> AsyncIterator[None]:
        if self._aioredlock is None:
            from aioredlock import Aioredlock

            logging.getLogger("aioredlock").setLevel(logging.CRITICAL)  # each try that finds the lock held is an error
            self._aioredlock = Aioredlock([self.path], retry_count=1_000_000)
        async with await self._aioredlock.lock(name, lock_timeout=TTL):
            yield

    async def close(self) -> None:
        await self.ours.close()
        await self._peer.aclose()
        if self._aioredlock is not None:
            await self._aioredlock.destroy()


CONTENDED_PEERS = (REDIS_PY, EAGER, BLPOP, POTTERY)
CONTENDED_ASYNC_PEERS = (REDIS_ASYNCIO, EAGER_ASYNCIO, FIFO, AIOREDLOCK)
