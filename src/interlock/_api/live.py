"""How many Interlocks of this process use one server: a program that makes one for each call gets a warning."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from interlock._protocol.snapshot import snapshot

from .misuse_warnings import warn_of_many_interlocks

if TYPE_CHECKING:
    from interlock._session.session import Session

MANY: Final = 12
# An Interlock of asyncio has a session for each loop; what stands here tells the Interlocks apart.
_maker_of: Final[weakref.WeakKeyDictionary[Session, object]] = weakref.WeakKeyDictionary()


def note(session: Session, maker: object) -> None:
    """Note which Interlock has made this session: `maker` is an object of that Interlock alone."""
    _maker_of[session] = maker


def look(url: str) -> None:
    """Warn, once, if this new Interlock is one of many for this server that are in use and were not closed."""
    in_use = {
        id(maker)
        for session, maker in snapshot(_maker_of.items())
        if session.server.display_url == url
        and not session.core.requests.closed
        and any(worker.started for worker in session.workers)
    }
    if len(in_use) >= MANY - 1:
        warn_of_many_interlocks(url, len(in_use) + 1)
