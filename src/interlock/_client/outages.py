"""What the log says of an outage: a line once a server has served no call for a second, and one when it serves again.

Theory. Each call notices by itself that the server is away, and hundreds may wait. So the first call to notice that
says it for all, and the first reply ends the outage. In a cluster that is so for each node; if another node takes over,
the reply to a call that had noticed the outage ends it, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._client.error_texts import seconds_text
from interlock._protocol.log import log
from interlock._protocol.timing import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock._protocol.server import Server

LOG_OUTAGE_AFTER: Final = 1.0  # seconds without a call that was served


class Outages:
    """The outages of one client that the log knows."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.since: dict[object, float] = {}  # by node: when it was first asked in vain

    def note(self, node: object, since: float, now: float, cause: object, goes_on: tuple[float, float]) -> None:
        """Note that this node has served no call since then, and why.

        `goes_on`: for how many seconds a call goes on that has a timeout, and one that has none.
        """
        if now - since < LOG_OUTAGE_AFTER:
            return
        with self.server.runtime.mutex:
            is_first = node not in self.since
            self.since.setdefault(node, since)
        if is_first:
            log.warning(
                "interlock: %s has served no call for %s (%s). %s",
                self._name(node),
                seconds_text(now - since),
                str(cause).rstrip(". "),
                _how_long(*goes_on),
            )

    def end(self, nodes: Iterable[object], now: float) -> None:
        """Note that these nodes serve calls again, or another node in their place."""
        for node in nodes:
            if (since := self.since.pop(node, None)) is not None:
                log.warning("interlock: %s serves calls again, after %s", self._name(node), seconds_text(now - since))

    def _name(self, node: object) -> str:
        return node if isinstance(node, str) else self.server.display_url


def _how_long(with_timeout: float, without: float) -> str:
    if with_timeout != FOREVER:
        return f"Calls go on for {with_timeout:g} s, within their timeouts"
    if without == FOREVER:
        return "Calls go on until it does, within their timeouts"
    return f"Calls with a timeout go on until its end, all others for {without:g} s"
