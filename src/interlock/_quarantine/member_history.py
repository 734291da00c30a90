"""What a client knows of one server of a quorum: which process answers now, and nothing of its past (ADR 60)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock._quarantine.server_history import ServerHistory
from interlock._quarantine.stamp import IdentityStamp
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from interlock._connect.address import Address
    from interlock._quarantine.identity import Facts


class MemberStamp(IdentityStamp):
    """The stamp for the messages to one server of a quorum, which judges itself: voter.lua reads it."""

    __slots__ = ()

    def __init__(self, facts: Facts | None, quarantine_seconds: float | None) -> None:
        super().__init__(facts, quarantine_seconds, "-")

    def render(self) -> None:
        """Build the text, in the layout that message.lua describes beside STAMP."""
        if self.facts is None or self.quarantine_seconds is None:
            self.text = "+"
        else:
            self.text = f"{self.identity}+ {int(self.quarantine_seconds * 1000)}"


class MemberHistory(ServerHistory):
    """The stamps of one server of a quorum."""

    def identify(
        self,
        facts: Facts | None,
        address: Address,
        isolation_grace: float = 0.0,  # noqa: ARG002 (see ServerHistory)
        epoch: int | None = None,  # noqa: ARG002
    ) -> IdentityStamp:
        """See ServerHistory. Raises ConfigError: a server that refuses INFO can neither judge nor be told apart."""
        self.has_answered = True
        if facts is None and self.quarantine_seconds is not None:
            raise ConfigError(
                f"{address.display_url} does not count in its quorum: it refuses INFO, or its reply has no run_id, so "
                "nothing says whether it has lost leases. Give this user the right +info, or pass quarantine=False"
            )
        self.latest, self.display_url = MemberStamp(facts, self.quarantine_seconds), address.display_url
        return self.latest
