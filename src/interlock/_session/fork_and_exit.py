"""What becomes of the sessions of a process that forks or exits: a child holds nothing, and an exit releases all."""

from __future__ import annotations

import atexit
import contextlib
import sys
from typing import TYPE_CHECKING, Final

from interlock._people import observer
from interlock._protocol.forks import KNOWN, after_fork, notice
from interlock._protocol.log import log
from interlock._protocol.run_to_end import run
from interlock._protocol.snapshot import snapshot
from interlock._session.open_sessions import open_sessions

if TYPE_CHECKING:
    from interlock._session.open_sessions import OpenSession, Sessions

CLOSE_TIMEOUT: Final = 1.0  # seconds that the releases of a close, or of an exit, may take together


def track(session: OpenSession) -> None:
    """Reset this session in a child after a fork, and release its leases when the process exits, until it is closed."""
    if not open_sessions:
        # Registered with the first session, not on import: so it runs before a private server of this process stops.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    open_sessions.add(session)


def _after_fork() -> None:
    observer.reset_after_fork()
    if util := sys.modules.get("multiprocessing.util"):
        # A child of multiprocessing exits without atexit, by its own finalizers, which it sets up after this call.
        util.register_after_fork(open_sessions, _finalize)
    for session in snapshot(open_sessions):
        try:
            session.reset_after_fork()
        except Exception:  # noqa: BLE001 (logged: the other sessions must not go on with the parent's sockets)
            log.exception("interlock: a child could not reset a client of its parent")


def _finalize(_: Sessions) -> None:
    sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=0)


def _at_exit() -> None:
    """Release all leases, within `CLOSE_TIMEOUT` for all sessions together. No thread can be started any more.

    Each session gets an equal share of the time that is left, so a silent server leaves enough time for the others.
    """
    if not KNOWN[0]:
        notice()  # what the parent holds stays with the parent
    sessions = snapshot(open_sessions)
    owed = [
        (session, attempts)
        for session in sessions
        if (attempts := session.stop_granting(announce=False)) or session.registry.has_entry
    ]
    end = owed[0][0].runtime.now() + CLOSE_TIMEOUT if owed else 0.0
    for left, (session, attempts) in zip(range(len(owed), 0, -1), owed, strict=True):
        with contextlib.suppress(Exception):  # the process exits, and its leases run out
            now = session.runtime.now()
            run(session.release_all(attempts, session.exit_connection(), now + max(0.0, end - now) / left))
    for session in sessions:
        session.reports.end()  # last: it runs code of a user


after_fork(_after_fork)
