"""A process whose threads are greenlets: gevent has patched everything before interlock was imported.

    python greenlets.py URL PROXY_URL HOLD_FILE

Says OK when every check held.
"""

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import gevent  # noqa: E402

from interlock import Interlock, LeaseState, Unavailable  # noqa: E402

url, proxied, hold = sys.argv[1:]
count = inside = 0


def section(locks) -> None:
    global count, inside  # noqa: PLW0603
    for _ in range(20):
        with locks.lock("a", ttl=2):
            inside += 1
            assert inside == 1
            gevent.sleep(0.001)
            inside -= 1
            count += 1


with Interlock(url) as locks, Interlock(url) as others:
    greenlets = [gevent.spawn(section, one) for one in (locks, others) * 5]
    gevent.joinall(greenlets, raise_error=True)
    assert count == 200

    lease = locks.lock("a", ttl=0.6).acquire()  # renewed by a greenlet
    waiting = gevent.spawn(others.lock("a").acquire, 20)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        gevent.sleep(0.01)
    lease.ensure()
    assert lease.state is LeaseState.HELD

    while [(len(each.holders), each.waiting) for each in locks.ls()] != [(1, 1)]:
        gevent.sleep(0.01)
    killed = gevent.spawn(others.lock("a").acquire)  # it is killed while it waits: nothing stays behind
    while not others._session.core.cohorts.by_key["lock:a"].waiting:
        gevent.sleep(0.01)
    killed.kill()
    while others._session.core.cohorts.by_key["lock:a"].waiting:
        gevent.sleep(0.01)
    assert lease.release()
    assert waiting.get(timeout=10).release()

with Interlock(proxied) as locks:  # a socket of gevent's does not heed the kernel's timeout
    locks.lock("b").acquire().release()
    Path(hold).touch()
    while Path(hold).exists():
        gevent.sleep(0.01)
    started = time.monotonic()
    try:
        locks.lock("b").acquire(timeout=0.5)
    except Unavailable:
        assert time.monotonic() - started < 3
    else:
        raise AssertionError
    Path(hold).touch()
    while Path(hold).exists():
        gevent.sleep(0.01)
print("OK", flush=True)
