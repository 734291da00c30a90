"""Tries a lock of the doctor's own, so that missing rights and dead channels show."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from interlock._doctor.checks import Finding, Level, of_callers
from interlock.errors import AcquireTimeout, LockError, Unavailable

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from interlock.threads import Interlock

__all__ = ["try_it"]

TIMEOUT: Final = 5.0  # seconds for the trial


def try_it(locks: Interlock, *, denied: bool) -> list[Finding]:
    """Try a lock, and ask for what processes say. `denied`: the facts say already that this user may not ask that."""
    try:
        found = [_try_a_lock(locks)]
    except Unavailable as error:  # a further question has the same answer
        return [_not_acquired(error)]
    except LockError as error:
        found = [_not_acquired(error)]
    try:
        found += of_callers(locks.ls())
    except LockError as error:
        if not (denied or str(error) in found[0].text):
            text = f"of what processes hold and wait for can't be read: {error}"
            found.append(Finding(Level.NOTE, "the registry", text))
    return found


def _not_acquired(error: LockError) -> Finding:
    if isinstance(error, AcquireTimeout) and error.quarantined:
        text, _, _ = str(error).partition(". Wait;")  # the rest is advice for programmers
        return Finding(Level.WARNING, "a lock", f"cannot be acquired yet: {text}", "Wait so long")
    return Finding(Level.DANGER, "a lock", f"cannot be acquired: {error}", "Mend that first")


def _try_a_lock(locks: Interlock) -> Finding:
    """Hand over a lock of a new name from one caller to another one. Its keys expire by themselves."""
    # A fair one: else the second caller waits in this process, and not in the server.
    lock = locks.lock(f"interlock-doctor-{secrets.token_hex(6)}", ttl=10, timeout=TIMEOUT, fair=True)

    def wait() -> float:
        with lock:
            return time.monotonic()

    def hand_over(pool: Executor) -> float:
        with lock:
            waiting = pool.submit(wait)
            while not waiting.done() and not lock.inspect().waiting:
                time.sleep(0.01)
            time.sleep(0.3)  # until the waiter is subscribed
            released = time.monotonic()
        return waiting.result() - released

    with ThreadPoolExecutor(1, "interlock-doctor") as pool:
        handover = hand_over(pool)
        if not locks._session.waiters.pushes:  # the waiter may have subscribed too late for the first
            handover = hand_over(pool)
    if not locks._session.waiters.pushes:
        return Finding(
            Level.WARNING, "a lock", f"is handed over by a poll, after {handover:.1f} s, and not by a push",
            "Give its user the rights +subscribe and +publish, and the channels &interlock:*",
        )  # fmt: skip
    return Finding(Level.OK, "a lock", f"is acquired, and handed over by push in {handover * 1000:.1f} ms")
