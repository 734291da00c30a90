"""One side of two versions that use the same names: the methods that a process runs with its own interlock.

    PYTHONPATH=... python neighbour.py URL

One JSON command a line on stdin, [method, argument...] of `Neighbour`; one JSON answer a line on stdout. It uses only
names that every version has, so that an old version can run the same commands.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback

import redis

import interlock

TTL = 15.0  # seconds
SHORT = 3.0  # a version that misses a revocation hears of it with its next renewal
LIMIT = 2  # permits of the semaphores
WRITER = 1000  # what a writer weighs; everybody else weighs one


class Neighbour:
    """The commands."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.locks = interlock.Interlock(url, max_ttl=TTL)
        self.leases: dict = {}

    def made(self, kind: str, name: str, ttl: float = TTL):
        locks = self.locks
        if kind in {"read", "write"}:
            return getattr(locks.rwlock(name, ttl=ttl), kind)()
        if kind == "semaphore":
            return locks.semaphore(name, LIMIT, ttl=ttl)
        if kind == "multi":
            return locks.multi(locks.lock(name, ttl=ttl), locks.lock(f"{name}:2", ttl=ttl))
        return getattr(locks, kind)(name, ttl=ttl)

    def where(self):
        return interlock.__file__

    # Leases

    def take(self, kind, name, ttl=TTL):
        """Acquire; of a semaphore all permits, so that the next acquire has to wait."""
        made = self.made(kind, name, ttl)
        lease = made.acquire(permits=LIMIT, timeout=30) if kind == "semaphore" else made.acquire(timeout=30)
        self.leases[name] = lease
        first = lease[name] if kind == "multi" else lease
        return {"token": first.token, "fence": first.fence}

    def give(self, name):
        return self.leases.pop(name).release()

    def lost(self, name):
        return self.leases[name].lost.wait(20)

    def revoke(self, kind, name, force=False):
        return self.made(kind, name).revoke("for maintenance", force=force)

    def seen(self, kind, name):
        """The result of inspect(), in one form for all kinds."""
        state = self.made("lock" if kind == "multi" else kind, name).inspect()
        if hasattr(state, "holders"):
            tokens = [holder.token for holder in state.holders]
            revoked = [holder.revoked for holder in state.holders if holder.revoked is not None]
        else:
            tokens = [state.holder] if state.holder else []
            revoked = [] if state.revoked is None else [state.revoked]
        return {"holders": tokens, "fence": state.fence, "waiting": state.waiting, "revoked": revoked}

    # Sections

    def work(self, kind, name, sections=12, workers=2):
        """Let threads acquire the name again and again, as the other side does; how often they did, and errors."""
        counts = {"sections": 0, "together": 0, "older": 0, "errors": []}
        mutex = threading.Lock()

        def worker(number):
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.incr(f"users:ready:{name}")
                    while int(client.get(f"users:ready:{name}")) < 2 * workers:
                        time.sleep(0.001)
                    for i in range(sections):
                        self.section(kind, name, client, counts, mutex, reads=(number + i) % 2)
            except BaseException as error:
                traceback.print_exc()
                counts["errors"].append(repr(error))

        threads = [threading.Thread(target=worker, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counts

    def section(self, kind, name, client, counts, mutex, *, reads):
        if kind == "rwlock":
            kind = "read" if reads else "write"
        with self.made(kind, name).acquire(timeout=30) as lease:
            weight, most = (
                (1, LIMIT) if kind == "semaphore" else (1, WRITER - 1) if kind == "read" else (WRITER, WRITER)
            )
            inside = client.incrby(f"users:inside:{name}", weight)
            client.rpush(f"users:order:{name}", os.getpid())
            alone = weight == WRITER
            fence = (lease[name] if kind == "multi" else lease).fence
            before = int(client.getset(f"users:fence:{name}", fence) or 0) if alone else 0
            time.sleep(0.001)
            client.decrby(f"users:inside:{name}", weight)
            lease.ensure()
            with mutex:
                counts["sections"] += 1
                counts["together"] += inside > most
                counts["older"] += before >= fence

    # Those without leases

    def limit(self, name, limit=None):
        """Set the limit, if one is given; the limit now."""
        made = self.made("semaphore", name)
        if limit is not None:
            made.set_limit(limit)
        return made.inspect().limit

    def opened(self, name):
        self.locks.latch(name, 2).wait(30)
        return True

    def counts(self, name):
        return self.locks.latch(name, 2).count_down()

    def left(self, name):
        return self.locks.latch(name, 2).inspect().left

    def arrives(self, name):
        return self.locks.barrier(name, 2).wait(30)

    def arrived(self, name):
        return self.locks.barrier(name, 2).inspect().arrived

    def runs(self, name):
        """Run the job; who ran it, and whether this process did."""
        ran = self.locks.once(name, at_most=10, at_least=10).run(lambda _lease: None)
        return {"ran": bool(ran), "by": ran.by, "last": self.locks.once(name, at_most=10).inspect().last.by}

    def close(self):
        self.locks.close()
        return True


def main() -> None:
    neighbour = Neighbour(sys.argv[1])
    for line in sys.stdin:
        method, *args = json.loads(line)
        try:
            answer = {"result": getattr(neighbour, method)(*args)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
