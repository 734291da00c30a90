"""What a client remembers of a server: under which identity it met it, and so whether leases may have been lost.

Theory. A server that restarted, or a replica that took over, may have lost the last grants. Its identity tells: the
process (run_id) and its history of writes (master_replid). We read it once, with the greeting of each connection, which
ends with the server's process; and send it with every message as the *identity stamp* (see quarantine_left() in
queue.lua). The scripts write it beside each lock, so another one there starts the quarantine of that lock. What no
record tells, the client's own memory does: the identity that it met before.

Rules.
 1. How long: from when this identity began at the latest. A process that never was a replica began with its start; for
    one that was promoted we only know since when we have known it.
 2. The same process without a second replid has lost nothing: the first replica that attaches changes its replid.
 3. Who has proof that nothing was lost (`least_lossless_ttl`) says so in its stamp, and its next grant renews the
    record. What a server says of its settings proves nothing: they may have been others before.
 4. Beside a new primary the old one, cut off, may go on to grant for some seconds (`isolation_grace`) what runs out
    there. Until these are over, what the new one confirms or renews counts for nothing yet (`old_primary`).
 5. A young process that began with keys may lack the newest names: to a client that knows of no process before it, that
    is evidence of one (`mark_untrusted`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.log import log
from interlock._protocol.timing import now
from interlock._quarantine.identity import Facts, parse_info
from interlock._quarantine.stamp import IdentityStamp

if TYPE_CHECKING:
    from interlock._connect.address import Address

_REPLACED: Final = (
    "interlock: %s has been restarted or replaced, and may have lost leases: unless it is proven that it lost none, "
    "locks that it has not granted since are granted in %.3g s. docs/failover.md says how to make restarts short"
)
_STARTED: Final = (
    "interlock: %s was started with the keys of a snapshot or a log, which may lack the newest leases: locks that it "
    "has not granted itself since are granted in %.3g s. docs/failover.md says how to make restarts short"
)


class ServerHistory:
    """The identities of the servers that one client met at one place: an address, or whom Sentinel names."""

    def __init__(self, quarantine_seconds: float | None, *, previous: str = "-", mark: str = " ") -> None:
        self.quarantine_seconds = quarantine_seconds  # seconds that the longest lease lasts; None: no quarantine
        self.mark = mark  # "+" for one server of a quorum
        self.stamps: dict[str, IdentityStamp] = {}
        self.latest = IdentityStamp(None, quarantine_seconds, previous, mark)
        self.previous = previous
        self._warned = False
        self.address: Address  # where that is
        self.known = (
            ""  # of a node of a cluster: under which identity it had been met before the map was asked for last
        )
        self.replicas = 0  # the most that a server had here: one that is missing is missing

    def count_replicas(self, replication: Any) -> int:
        """How many replicas there are, by the newest INFO and those before."""
        self.replicas = max(self.replicas, int(parse_info(replication).get("connected_slaves", 0)))
        return self.replicas

    def meet(self, found: Facts | None, address: Address, isolation_grace: float = 0.0) -> IdentityStamp:
        """A new connection leads to this server; an isolated primary there may be believed for so much longer."""
        if found is None:
            if self.quarantine_seconds is not None and not self._warned:
                self._warned = True
                log.warning(
                    "%s: INFO is refused, or tells no run_id, so a restart or failover that loses leases can't be "
                    "noticed: there is no quarantine. Give this user +info (docs/acl.md), or say quarantine=False",
                    address.display_url,
                )
            return IdentityStamp(None, self.quarantine_seconds, "-", self.mark)
        stamp = self.stamps.get(found.identity)
        if stamp is None:
            before = address.previous_identity if self.previous == "-" else self.previous
            if self.latest.in_quarantine:  # what came since may have come without loss, but not what is waited for
                before = self.latest.previous
            # The one before may go on for as long as it was told to: its settings need not be those of this one.
            stamp = IdentityStamp(
                found, self.quarantine_seconds, before, self.mark, max(isolation_grace, self.latest.isolation_grace)
            )
            if any(before.startswith(each) for each in stamp.lossless_from):
                stamp.previous = "-"
            stamp.render()
            stamp.earlier = self.stamps
            self.stamps[found.identity] = stamp
            if found.loaded and found.uptime < (stamp.quarantine_seconds or 0):
                stamp.mark_untrusted()
            if stamp.in_quarantine:
                log.warning(
                    _STARTED if stamp.previous == "?" else _REPLACED,
                    address.display_url,
                    stamp.began + (stamp.quarantine_seconds or 0) - now(),
                )
        self.latest, self.previous = stamp, stamp.identity
        self.replicas = max(self.replicas, found.replicas)
        return stamp
