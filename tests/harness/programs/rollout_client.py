"""One process of a fleet that shares locks while it goes over from a library to interlock's drop-in for it.

    python rollout_client.py LIBRARY old|new|broken|careless threads|asyncio URL FOLDER SEED

Its callers acquire locks, work under them for some milliseconds, and release them, until stdin ends. Now and then a
caller kills its own process in the middle of a section, or stands still there until the lock has expired. `FOLDER/log`
gets a line in JSON for each event, which no crash takes back.

The check that nothing of a lock library has a part in: in its section a caller holds the flock of a file, which the
kernel gives to one caller at a time, and takes back when a process dies. A section that finds this flock taken is an
overlap, unless the other section has lasted longer than its lock, which expires: `read_log` of harness/rollout.py sees
that by the times in the log.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import logging
import os
import random
import signal
import sys
import threading
import time

import redis
import redis.asyncio
import redis.lock

LIBRARY, SIDE, MODE, URL, FOLDER, SEED = sys.argv[1:]
NAMES = ("stock:1", "stock:2", "stock:3")
CALLERS = 2
TTL = 1  # second: what a crash costs the others
BOUND = 15.0  # seconds that a caller waits for a lock; longer is a stall
WORK = 0.008  # seconds of a section, at most
REST = 0.06  # seconds between two sections, at most
CRASHES = 0.01  # of the sections
PAUSES = (
    0.1 if SIDE == "careless" else 0.01
)  # of the sections, in which the process stands still until its lock has expired
IMPATIENT = 0.2  # of the attempts, which wait for GLANCE seconds at most
GLANCE = 0.03

chance = random.Random(SEED)
log = os.open(os.path.join(FOLDER, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
ended = threading.Event()
client = (redis if MODE == "threads" else redis.asyncio).Redis.from_url(URL)


def write(event: str, **details) -> None:
    """One line, which the kernel appends whole."""
    line = {"event": event, "side": SIDE, "mode": MODE, "pid": os.getpid(), "at": time.monotonic(), **details}
    os.write(log, json.dumps(line).encode() + b"\n")


async def value(result):
    """The result of a call: at once in threads, awaited in asyncio."""
    return await result if inspect.isawaitable(result) else result


async def rest(seconds: float) -> None:
    if MODE == "threads":
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


class RedisPy:
    """redis-py's Lock, or the drop-in for it."""

    key = "{}"

    def __init__(self, name: str) -> None:
        if SIDE == "new":
            from interlock.compat import redis_py

            kind = redis_py.Lock if MODE == "threads" else redis_py.AsyncLock
        else:
            kind = redis.lock.Lock if MODE == "threads" else redis.asyncio.lock.Lock
        self.lock = client.lock(name, timeout=TTL, blocking_timeout=BOUND, lock_class=kind)

    async def acquire(self) -> bool:
        return await value(self.lock.acquire())

    async def glance(self) -> bool:
        """Acquire, or give up soon: by a timeout or, as the original can't do it well, by a cancellation."""
        if SIDE == "old" or MODE == "threads" or chance.random() < 0.5:
            return await value(self.lock.acquire(blocking_timeout=GLANCE))
        try:
            async with asyncio.timeout(GLANCE):
                return await self.lock.acquire()
        except TimeoutError:
            return False

    @property
    def token(self) -> bytes:
        return self.lock.local.token

    async def release(self) -> None:
        await value(self.lock.release())


class Broken(RedisPy):
    """What the check must see: a lock that anybody gets at any time."""

    async def acquire(self) -> bool:
        self.lock.local.token = os.urandom(16)
        return await value(client.set(self.lock.name, self.lock.local.token, ex=TTL))


class Careless(RedisPy):
    """Likewise: a lock whose release deletes the key, whoever holds the lock by then."""

    async def release(self) -> None:
        await value(client.delete(self.lock.name))


class PythonRedisLock:
    """python-redis-lock's Lock, or the drop-in for it."""

    key = "lock:{}"

    def __init__(self, name: str) -> None:
        if SIDE == "new":
            from interlock.compat.redis_lock import Lock
        else:
            from redis_lock import Lock

            logging.getLogger("redis_lock").addHandler(logging.NullHandler())  # it warns of each glance
        self.lock = Lock(client, name, expire=TTL)

    async def acquire(self) -> bool:
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            if self.lock.acquire(timeout=TTL):  # a longer one is refused
                return True
        return False

    async def glance(self) -> bool:
        return self.lock.acquire(blocking=False)

    @property
    def token(self) -> bytes:
        return self.lock.id.encode()

    async def release(self) -> None:
        self.lock.release()


PLANTED = {"broken": Broken, "careless": Careless}
LOCKS = {"redis-py": RedisPy, "python-redis-lock": PythonRedisLock}


async def one_section(name: str) -> None:
    lock = PLANTED.get(SIDE, LOCKS[LIBRARY])(name)
    began = time.monotonic()
    if chance.random() < IMPATIENT:
        try:
            if not await lock.glance():
                return
        except redis.ConnectionError as error:  # the drop-ins give a call that does not wait a second, I/O included
            write("late", lock=name, error=repr(str(error)))
            return
    elif not await lock.acquire():
        write("stall", lock=name, waited=time.monotonic() - began)
        return
    waited = time.monotonic() - began
    if await is_inside(lock, name, waited):
        try:
            await lock.release()
        except Exception as error:
            write("late", lock=name, error=repr(error))


def is_alone(guard: int) -> bool:
    """Take the flock, if nobody has it."""
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def is_inside(lock, name: str, waited: float) -> bool:
    """Do the work of a section; whether there is something to release after it."""
    asked = time.monotonic()
    key = lock.key.format(name)
    stored, left = await value(client.pipeline().get(key).pttl(key).execute())
    if stored != lock.token:  # this process was stopped for longer than the lock lasts, or the library lies
        write("not stored", lock=name, stored=repr(stored), token=repr(lock.token))
        return True
    until = asked + left / 1000
    guard = os.open(os.path.join(FOLDER, f"{name}.guard"), os.O_RDWR | os.O_CREAT)
    try:
        if not is_alone(guard):
            write("overlap", lock=name, until=until)
            while not is_alone(guard):  # the other one's lock has expired, if all is well
                if time.monotonic() > until - WORK:
                    return True
                await rest(0.002)
        write("enter", lock=name, asked=asked, until=until, waited=waited)
        await rest(chance.random() * WORK)
        if chance.random() < CRASHES:
            write("crash", lock=name)
            os.kill(os.getpid(), signal.SIGKILL)
        if chance.random() < PAUSES:
            write("pause", lock=name)
            time.sleep(1.3 * TTL)
        write("leave", lock=name)
    finally:
        os.close(guard)  # this gives the flock back, before the lock is released
    return True


async def caller() -> None:
    while not ended.is_set():
        await one_section(chance.choice(NAMES))
        await rest(chance.random() * REST)


def run_in_thread() -> None:
    """Run a coroutine that never suspends, since everything in it blocks."""
    try:
        caller().send(None)
    except StopIteration:
        return
    except BaseException as error:
        write("error", error=f"{type(error).__name__}: {error}", cause=repr(error.__cause__))
        raise


async def run_in_loop() -> None:
    try:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
    except BaseException as error:
        write("error", error=f"{type(error).__name__}: {error}", cause=repr(error.__cause__))
        raise
    finally:
        await client.aclose()


def wait_for_end() -> None:
    sys.stdin.buffer.read()
    ended.set()


threading.Thread(target=wait_for_end, daemon=True).start()
write("ready")
if MODE == "threads":
    threads = [threading.Thread(target=run_in_thread) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
else:
    asyncio.run(run_in_loop())
