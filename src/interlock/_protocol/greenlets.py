"""Greenlets that run as threads, since gevent or eventlet has replaced `threading`.

Theory. What was made before the replacement waits for locks of the system. A greenlet that waits for such a lock stops
all others, and so itself, if one of these is to release it. A lock of the system also takes all greenlets for one
owner. So an Interlock for threads makes everything anew at its next use, if it has started no thread in this process
yet. If it has started one, its next use is an error: a thread of the system can't become a greenlet. From then on it
starts no thread either, since a greenlet would run it, in the thread of the system that starts it.
"""

from __future__ import annotations

import sys


def library_of_greenlets() -> str | None:
    """The library whose greenlets run as the threads of this process; None if these are threads of the system."""
    if (monkey := sys.modules.get("gevent.monkey")) is not None and monkey.is_module_patched("threading"):
        return "gevent"
    if (patcher := sys.modules.get("eventlet.patcher")) is not None and patcher.is_monkey_patched("thread"):
        return "eventlet"
    return None
