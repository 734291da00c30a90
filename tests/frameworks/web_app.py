"""The app that test_web_servers.py runs in each web server: an Interlock at module level, as users write it.

BEFORE says what the module does with it, before the server forks if the server loads it first: `made`, nothing;
`used`, a lock is held and released; `held`, a lease is held for good.
"""

from __future__ import annotations

import json
import os
import time

import redis

from interlock import Interlock

URL = os.environ["INTERLOCK_URL"]
TTL = 1.5
IMPORTED_IN = os.getpid()
BEFORE = os.environ.get("BEFORE", "made")

locks = Interlock(URL)
if BEFORE != "made":
    locks.lock("before").acquire().release()
held = locks.lock("master", ttl=TTL).acquire() if BEFORE == "held" else None
kept = []


def section(name, client):
    """Read, wait, write: two that do this at once lose one of both."""
    with locks.lock(name, ttl=TTL, timeout=30) as lease:
        count = int(client.get(f"users:count:{name}") or 0)
        time.sleep(0.002)
        client.set(f"users:count:{name}", count + 1)
        return lease


def long(name, client):
    """Hold it for twice its ttl."""
    with locks.lock(name, ttl=TTL, timeout=30) as lease:
        time.sleep(2 * TTL)
        lease.ensure()
        return lease


def hold(name, client):
    """Hold it until the test says go."""
    with locks.lock(name, ttl=TTL, timeout=30) as lease:
        client.rpush("users:held", os.getpid())
        while not client.exists("users:go"):
            time.sleep(0.02)
        return lease


def keep(name, client):
    """Hold it after the answer, too."""
    kept.append(locks.lock(name, ttl=TTL, timeout=30).acquire())
    return kept[-1]


def inherit(name, client):
    """What a worker can do with the lease of the process that forked it."""
    state, released = str(held.state), held.release()
    client.set("users:inherited", json.dumps([state, released, locks.lock("master").try_acquire() is None]))
    return section(name, client)


WORK = {each.__name__: each for each in (section, long, hold, keep, inherit)}


def application(environ, start_response):
    work, name = environ["PATH_INFO"].strip("/").split("/")
    client = redis.Redis.from_url(URL)
    try:
        lease = WORK[work](name, client)
    finally:
        client.close()
    answer = {"fence": lease.fence, "token": lease.token, "pid": os.getpid(), "imported_in": IMPORTED_IN}
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
