"""The log of grants and releases, at the level DEBUG.

The hot path does not ask for the level, since even that takes time. Instead the log observes the locks while its level
is DEBUG: `look()` compares the two when a session begins, with each new connection, and about once a second while
leases are held. So the records begin and end up to a second after the level was changed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from interlock._people import observer
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log

if TYPE_CHECKING:
    from interlock._client.grant import Attempt, Grant
    from interlock._people.observer import Outcome


class GrantLog(observer.Observer):
    """Logs grants, refusals and releases. What endangers a lease is logged elsewhere, with or without an observer."""

    def acquired(self, grant: Grant, waited: float) -> None:
        """See Observer."""
        log.debug("%s: acquired in %.3g s", grant.resource, waited, extra=grant.log_fields)

    def not_acquired(self, attempt: Attempt, outcome: Outcome, waited: float, error: BaseException) -> None:  # noqa: ARG002 (others need it)
        """See Observer."""
        log.debug(
            "%s: not acquired in %.3g s: %s",
            attempt.resource,
            waited,
            outcome.value,
            extra=lock_fields(attempt.resource, token=attempt.token),
        )

    def released(self, grant: Grant, held: float) -> None:
        """See Observer."""
        log.debug("%s: released after %.3g s", grant.resource, held, extra=grant.log_fields)


GRANT_LOG: Final = GrantLog()


def look() -> None:
    """Log grants and releases from now on, or log them no more, as the level of the log says."""
    logs = log.isEnabledFor(logging.DEBUG)
    if logs != (GRANT_LOG in observer.observers):
        (observer.observe if logs else observer.stop_observing)(GRANT_LOG)
