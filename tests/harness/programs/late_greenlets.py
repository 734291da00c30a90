"""A process in which gevent or eventlet replaces `threading` after interlock was imported, as users do by mistake.

    python late_greenlets.py gevent|eventlet imported|made|used|held URL

Before that it has imported interlock; made an Interlock and asked the server something; used a lock; or holds one. Then
greenlets work under locks. Says OK, and how often a greenlet that does nothing else ran meanwhile; or a ConfigError.
"""

import faulthandler
import importlib
import sys
import time
import warnings

from interlock import ConfigError, Interlock

library, before, url = sys.argv[1:]
faulthandler.dump_traceback_later(20, exit=True)  # a frozen process says where it stands
locks = None if before == "imported" else Interlock(url)
if before == "made":
    locks.ping()
if before == "used":
    locks.lock("before").acquire().release()
if before == "held":
    held = locks.lock("before").acquire()

warnings.simplefilter("ignore")  # of a patch that comes late
greenlets = importlib.import_module(library)
if library == "gevent":
    importlib.import_module("gevent.monkey").patch_all()
else:
    greenlets.monkey_patch()
if locks is None:
    locks = Interlock(url)
count = turns = 0


def section() -> None:
    global count  # noqa: PLW0603
    for _ in range(10):
        with locks.lock("a", ttl=1.5):
            seen = count
            greenlets.sleep(0.001)
            count = seen + 1


def turn() -> None:
    global turns  # noqa: PLW0603
    while True:
        turns += 1
        greenlets.sleep(0.01)


def ended(greenlet) -> object:
    return greenlet.get() if library == "gevent" else greenlet.wait()


greenlets.spawn(turn)
try:
    for each in [greenlets.spawn(section) for _ in range(10)]:
        ended(each)
except ConfigError as error:
    if before == "held":
        assert held.release()  # what is held is given back all the same
    locks.close()
    print(error, flush=True)
    sys.exit(0)
assert count == 100
lease = locks.lock("b", ttl=0.6).acquire()  # renewed by a greenlet
waiting = greenlets.spawn(locks.lock("b").acquire)
until = time.monotonic() + 1.5
while time.monotonic() < until:
    greenlets.sleep(0.01)
lease.ensure()
while [(len(each.holders), each.waiting) for each in locks.ls()] != [(1, 1)]:
    greenlets.sleep(0.01)
assert lease.release()
assert ended(waiting).release()
assert turns > 50, turns  # it ran in the 1.5 s above
locks.close()
print("OK", flush=True)
