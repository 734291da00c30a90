"""What the doctor tries: a lock of its own, so that missing rights and dead channels show."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from interlock._client.revocation import audit
from interlock._protocol.run import run
from interlock.cli.options import connect
from interlock.errors import LockError

from .checks import Finding, Level, of_callers

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ask_the_callers", "read_the_audit", "try_a_lock"]

TIMEOUT: Final = 5.0  # seconds for the trial
SLOW_HANDOVER: Final = 0.5  # seconds: a push takes far less, the poll of a waiter about one second


def try_a_lock(urls: Sequence[str], prefix: str) -> Finding:
    """Acquire a lock of a new name twice, the second time behind the first. Its keys expire by themselves."""
    name = f"interlock-doctor-{secrets.token_hex(6)}"
    made = [connect(urls, prefix) for _ in range(2)]
    holder, waiter = made

    def wait() -> float:
        with waiter.lock(name, ttl=10, timeout=TIMEOUT):
            return time.monotonic()

    try:
        with ThreadPoolExecutor(1, "interlock-doctor") as pool:
            with holder.lock(name, ttl=10, timeout=TIMEOUT):
                waiting = pool.submit(wait)
                while not waiting.done() and not holder.lock(name).inspect().waiting:
                    time.sleep(0.01)
                time.sleep(0.3)  # until the waiter is subscribed
                released = time.monotonic()
            handover = waiting.result() - released
    except LockError as error:
        return Finding(Level.DANGER, "a lock", f"cannot be acquired: {error}", "Mend that first")
    finally:
        for locks in made:
            locks.close()
    if handover > SLOW_HANDOVER:
        return Finding(
            Level.WARNING, "a lock", f"is handed over by a poll, after {handover:.1f} s, and not by a push",
            "Give its user the rights +subscribe and +publish, and the channels &interlock:*",
        )  # fmt: skip
    return Finding(Level.OK, "a lock", f"is acquired, and handed over by push in {handover * 1000:.1f} ms")


def read_the_audit(urls: Sequence[str], prefix: str) -> Finding | None:
    """Look whether this user may use the audit of revocations; None if it may."""
    with connect(urls, prefix) as locks:
        try:
            run(audit(locks._session.core, most=1))
        except LockError as error:
            return Finding(
                Level.NOTE, "the audit", f"of revocations can't be read: {error}",
                "Give its user the keys ~{interlock:audit} and the rights +xadd +xrevrange",
            )  # fmt: skip
    return None


def ask_the_callers(urls: Sequence[str], prefix: str) -> list[Finding]:
    """What processes say of themselves, and whether this user may read that."""
    with connect(urls, prefix) as locks:
        try:
            return list(of_callers(locks.ls()))
        except LockError as error:
            return [Finding(
                Level.NOTE, "the registry", f"of what processes hold and wait for can't be read: {error}",
                "Give its user the keys ~{interlock:processes}*",
            )]  # fmt: skip
