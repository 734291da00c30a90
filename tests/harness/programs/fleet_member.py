"""One process of a fleet of several versions: its workers enter sections of shared names until its stdin ends.

    PYTHONPATH=... python fleet_member.py URL_OF_THE_EVENTS threads|asyncio KIND,KIND... URL_OF_THE_LOCKS...

With several URLs of the locks, these are a quorum. There is a worker for each kind. It appends what it does to one
stream, `users:fleet`: JSON of [pid, section, what, ...]. The order of the stream is the order in which things happened.
The program uses only names that every version has, so that an old version can run it.

    ask          before an acquire               enter   inside; kind, and the fence by name
    exit         before the release              lost    the lease had ended before the `exit`, or there was none
    unavailable  no server answered              error   another exception of interlock
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import threading
import time

import redis

import interlock
import interlock.aio

TTL = 1.5  # seconds; of a cohort at least 1
PATIENCE = 20.0  # seconds until a waiter counts as stuck
LIMIT = 2  # permits of the semaphore


class Member:
    """What threads and tasks share."""

    def __init__(self, url: str, locks) -> None:
        self.locks = locks
        self.client = redis.Redis.from_url(url)
        self.sections = itertools.count()
        self.stopped = False
        self.pid = os.getpid()

    def made(self, kind: str):
        """The next lockable of a worker of this kind, and the kind of its section."""
        locks = self.locks
        if kind == "rwlock":
            kind = random.choice(["read", "read", "write"])
            return getattr(locks.rwlock("w", ttl=TTL), kind)(), kind
        if kind == "semaphore":
            return locks.semaphore("s", LIMIT, ttl=TTL), kind
        if kind == "multi":
            return locks.multi(locks.lock("a", ttl=TTL), locks.lock("b", ttl=TTL)), kind
        return getattr(locks, kind)({"lock": "a", "rlock": "r"}[kind], ttl=TTL), kind

    def tell(self, section: int, what: str, *more) -> None:
        self.client.xadd("users:fleet", {"event": json.dumps([self.pid, section, what, *more])})

    def entered(self, section: int, kind: str, lease) -> None:
        fences = dict(lease.fence) if kind == "multi" else {lease.name: lease.fence}
        self.tell(section, "enter", kind, fences)

    def leaving(self, section: int, lease) -> None:
        self.tell(section, "exit")
        lease.ensure()  # so the lease was alive at the `exit`

    def failed(self, section: int, error: BaseException) -> None:
        kinds = {interlock.LeaseLost: "lost", interlock.Unavailable: "unavailable"}
        self.tell(section, kinds.get(type(error), "error"), f"{type(error).__name__}: {error}")


def work(member: Member, kind: str) -> None:
    while not member.stopped:
        section, (made, entered) = next(member.sections), member.made(kind)
        member.tell(section, "ask")
        try:
            with made.acquire(timeout=PATIENCE) as lease:
                member.entered(section, entered, lease)
                if kind == "rlock":
                    with made.acquire(timeout=0) as again:
                        again.ensure()
                time.sleep(random.uniform(0, 0.004))
                member.leaving(section, lease)
        except interlock.LockError as error:
            member.failed(section, error)
        time.sleep(random.uniform(0, 0.008))


async def awork(member: Member, kind: str) -> None:
    while not member.stopped:
        section, (made, entered) = next(member.sections), member.made(kind)
        member.tell(section, "ask")
        try:
            async with await made.acquire(timeout=PATIENCE) as lease:
                member.entered(section, entered, lease)
                if kind == "rlock":
                    async with await made.acquire(timeout=0) as again:
                        again.ensure()
                await asyncio.sleep(random.uniform(0, 0.004))
                member.leaving(section, lease)
        except interlock.LockError as error:
            member.failed(section, error)
        await asyncio.sleep(random.uniform(0, 0.008))


def wait_for_end(member: Member) -> None:
    sys.stdin.read()
    member.stopped = True


def run(events: str, kinds: list[str], urls: list[str]) -> None:
    api = interlock.Interlock
    with api.quorum(urls, max_ttl=TTL) if len(urls) > 1 else api(urls[0], max_ttl=TTL) as locks:
        member = Member(events, locks)
        threads = [threading.Thread(target=work, args=(member, kind)) for kind in kinds]
        for thread in threads:
            thread.start()
        wait_for_end(member)
        for thread in threads:
            thread.join()


async def arun(events: str, kinds: list[str], urls: list[str]) -> None:
    api = interlock.aio.Interlock
    async with api.quorum(urls, max_ttl=TTL) if len(urls) > 1 else api(urls[0], max_ttl=TTL) as locks:
        member = Member(events, locks)
        async with asyncio.TaskGroup() as tasks:
            for kind in kinds:
                tasks.create_task(awork(member, kind))
            await asyncio.to_thread(wait_for_end, member)


def main(events: str, mode: str, kinds: str, *urls: str) -> None:
    print(interlock.__file__, flush=True)
    if mode == "threads":
        run(events, kinds.split(","), [*urls])
    else:
        asyncio.run(arun(events, kinds.split(","), [*urls]))


if __name__ == "__main__":
    main(*sys.argv[1:])
