"""The history of a server: the identities that a client met there, which show whether leases may have been lost.

Theory. A server that restarted, or a replica that took over, may have lost the last grants. The identity of the server
shows this: the process (run_id) and the history of its writes (master_replid). The client reads the identity in the
handshake of each connection, and a connection ends with the server's process. The client sends the identity with every
message, as the *identity stamp* (see decide_quarantine() in quarantine.lua). The scripts write the identity beside each
lock, so another identity there starts the quarantine of that lock. If a lock has no record, the client's own server
history is the evidence: the identity that the client met before.

Rules.
(a) A quarantine starts at the latest time at which the current identity can have begun. A process that never was a
    replica began with its start, if it started after the server before it had died. For a promoted process, the client
    only knows when it first met the identity. So it does for a spare: a process that may have started before the client
    last read something from an earlier server here (`answered_at`). The earlier one may have granted from then on,
    until its address led to the spare (ADR 58).
(b) The same process without a second replid has lost nothing: its replid changes when the first replica attaches.
(c) A client with a proof that no lease was lost (`least_lossless_ttl`) says so in its stamp, and the next grant renews
    the record. If the earlier server was in a quarantine, that quarantine goes on, and keeps its beginning. The
    settings that a server reports prove nothing: the settings may have been different before.
(d) Beside a new primary, an old primary that is cut off may go on for some seconds (`isolation_grace`) to grant locks
    that become free there. Until these seconds are over, a grant or a renewal of the new primary does not count
    (`old_primary`).
(e) An identity that returns has lost what the server in between granted: a server that follows another one, even for
    a moment, has another replid afterwards (ADR 29). It is known by its epoch, or by the identity met in between.
(f) A young process that began with keys may lack the newest names. To a client that met no earlier process there, this
    is evidence of a restart.

A server of a quorum judges itself (ADR 60), so it has a `MemberHistory`, which remembers nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.info import parse_info
from interlock._protocol.log import log
from interlock._protocol.timing import now
from interlock._quarantine.stamp import RETURNED, SPARE, IdentityStamp

if TYPE_CHECKING:
    from interlock._connect.address import Address
    from interlock._quarantine.identity import Facts

_NO_IDENTITY: Final = (
    "interlock: %s refuses INFO, or its reply has no run_id, so interlock can't notice a restart or failover that "
    "loses leases: there is no quarantine. Give this user the right +info, or pass quarantine=False"
)
_WAIT: Final = "for %.3g s it grants only names that it has granted since then. Every other name waits, used or not. %s"
_AVOID: Final = (
    "FAILOVER to a replica before a planned restart avoids this wait; a smaller max_ttl in all processes shortens it"
)
_SHORTEN: Final = "A smaller max_ttl in all processes shortens this wait"  # an embedded server has no replica
_REPLACED: Final = (
    "interlock: %s was restarted or replaced, and may have lost leases that are alive: unless a proof shows that it "
    f"lost none, {_WAIT}"
)
_RETURNED: Final = (
    "interlock: %s is the primary again, as it was before another server took over, and may lack the leases that the "
    f"other one granted: {_WAIT}"
)
_STARTED: Final = (
    "interlock: %s was started a moment ago with the keys of a snapshot or a log, which may lack leases that are "
    f"alive: {_WAIT}"
)


class ServerHistory:
    """The identities of the servers that one client met at one address, or as the primary that Sentinel names."""

    def __init__(self, quarantine_seconds: float | None, *, previous: str = "-") -> None:
        self.quarantine_seconds = quarantine_seconds  # seconds of the longest possible lease; None: no quarantine
        self.forget(previous)
        self.has_answered = False  # whether a server has ever answered a handshake here
        self._has_warned = False  # about a server that does not report its identity
        self._unsaid: deque[tuple[str, *tuple[object, ...]]] = deque()  # warnings that the log has not got yet
        self.address: Address
        self.display_url = ""  # of the server that `latest` is about
        # A node of a cluster: the identity that the client knew when it last asked for the map; else "".
        self.identity_at_map = ""
        self.replicas = 0  # the highest number of replicas that a server here ever had: replicas that are away count

    def forget(self, previous: str = "-") -> None:
        """Forget all identities but this one, as if nothing had been lost. "-": no server has answered."""
        self.stamps: dict[str, IdentityStamp] = {}
        self.latest = IdentityStamp(None, self.quarantine_seconds, previous)  # the one that was made last

    def count_replicas(self, replication: Any) -> int:
        """The highest number of replicas in the newest INFO reply and all earlier ones."""
        self.replicas = max(self.replicas, int(parse_info(replication).get("connected_slaves", 0)))
        return self.replicas

    def identify(
        self, facts: Facts | None, address: Address, isolation_grace: float = 0.0, epoch: int | None = None
    ) -> IdentityStamp:
        """Learn which server a new connection leads to, and return the stamp for messages to this server.

        `facts` is None if the server does not report its identity. For `isolation_grace` seconds, an old primary that
        is cut off may go on granting. `epoch`: that under which the sentinels name the server; None if none do.
        """
        self.has_answered = True
        if facts is None:
            if self.quarantine_seconds is not None and not self._has_warned:
                self._has_warned = True
                self._unsaid.append((_NO_IDENTITY, address.display_url))
            return IdentityStamp(None, self.quarantine_seconds, "-")
        stamp = self.stamps.get(facts.identity)
        if stamp is None:
            stamp = self._first_stamp(facts, address, isolation_grace)
        elif self._has_returned(stamp, epoch):
            stamp = self._stamp_of_returned(facts, address, isolation_grace, epoch)
        stamp.epoch = epoch
        stamp.answered_at = max(stamp.answered_at, now())  # its handshake, too, was read
        if stamp.met_at >= self.latest.met_at:  # else a late reply, or a thread that stood still
            self.latest, self.display_url = stamp, address.display_url
        self.replicas = max(self.replicas, facts.replicas)
        return stamp

    def _first_stamp(self, facts: Facts, address: Address, isolation_grace: float) -> IdentityStamp:
        """The stamp for an identity that this client meets for the first time."""
        before = self.latest  # read once, as `previous`: another event loop may change them meanwhile
        lost_before = before.previous
        previous = before.identity or lost_before
        if previous == "-":
            previous = address.previous_identity
        is_second_failover = lost_before != "-" and before.in_quarantine
        if is_second_failover:  # leases from before the first one may still be lost
            previous = lost_before
        stamp = self._make_stamp(facts, previous, isolation_grace)
        is_known = any(stamp.is_of_process(each) for each in list(self.stamps.values()))
        if is_known and not stamp.is_of_process(before) and not facts.promoted:  # it returns under another replid
            stamp.previous, stamp.since_ms = f"{RETURNED}{before.identity}", facts.now_ms
            stamp.lossless_from = []
        elif any(previous.startswith(each) for each in stamp.lossless_from):
            stamp.previous = "-"
        elif previous != "-" and not facts.promoted:
            self._find_beginning(stamp, before)
        if is_second_failover:
            stamp.predecessor = before.identity
        stamp.render()
        if facts.loaded and facts.least_age < (stamp.quarantine_seconds or 0):
            stamp.mark_untrusted()
        has_lost = stamp.in_quarantine
        # Event loops in other threads share this history without a mutex. The first of two stamps of one identity
        # counts: the second may have found this identity as the previous one.
        first = self.stamps.setdefault(facts.identity, stamp)
        if first is stamp and has_lost:
            self._warn(_STARTED if stamp.previous == "?" and facts.loaded else _REPLACED, address, stamp)
        return first

    def _find_beginning(self, stamp: IdentityStamp, before: IdentityStamp) -> None:
        """Decide from when the quarantine counts, if not from the start of the process, which never was a replica."""
        if stamp.is_of_process(before):
            stamp.since_ms = before.since_ms  # its quarantine goes on
        elif any(stamp.may_be_older_than(each) for each in list(self.stamps.values())):
            stamp.mark_spare()
        else:
            stamp.previous = stamp.previous.removeprefix(SPARE)  # `since` is that of a restart

    def _stamp_of_returned(
        self, facts: Facts, address: Address, isolation_grace: float, epoch: int | None
    ) -> IdentityStamp:
        """The stamp for an identity that this client has met before, and that another server replaced since then."""
        previous = f"{RETURNED}{self.latest.identity if epoch is None else epoch}"
        stamp = self._make_stamp(facts, previous, isolation_grace)
        stamp.since_ms, stamp.lossless_from = facts.now_ms, []  # not as old as its process
        stamp.render()
        self.stamps[facts.identity] = stamp
        if stamp.in_quarantine:
            self._warn(_RETURNED, address, stamp)
        return stamp

    def _make_stamp(self, facts: Facts, previous: str, isolation_grace: float) -> IdentityStamp:
        # The old primary obeys its own settings, which may allow a longer grace than those of the new server.
        stamp = IdentityStamp(
            facts, self.quarantine_seconds, previous, max(isolation_grace, self.latest.isolation_grace)
        )
        stamp.earlier_stamps = self.stamps
        return stamp

    def _has_returned(self, stamp: IdentityStamp, epoch: int | None) -> bool:
        """Whether another server was the primary since the stamp was made. A late connection has an older epoch."""
        if epoch is None or stamp.epoch is None:
            # A later stamp than `latest` is one that another thread has just made.
            return stamp is not self.latest and stamp.met_at <= self.latest.met_at
        return epoch > stamp.epoch or (epoch != stamp.epoch and stamp is not self.latest)

    def _warn(self, text: str, address: Address, stamp: IdentityStamp) -> None:
        left = stamp.latest_start + (stamp.quarantine_seconds or 0) - now()
        way_out = _SHORTEN if address.kind == "embedded" else _AVOID
        self._unsaid.append((text, address.display_url, left, way_out))

    def log_warnings(self) -> None:
        """Log what `identify` found. Not under the mutex that protects `identify`: a log handler may be slow."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                text, *values = self._unsaid.popleft()
                log.warning(text, *values)
