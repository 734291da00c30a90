"""The state of the server after each script: holders and waiters. S2 to S6, S12, and half of S11."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.server import ServerError
from interlock.primitives.audit import AUDIT_KEY
from interlock.primitives.codes import GRANTED, QUARANTINE, QUEUED
from interlock.primitives.messages import lost_identity, parse_acquire
from interlock.primitives.registry import INDEX
from simulator.commands import Hash, ZSet
from simulator.messages import answers, requests
from simulator.subjects.subject import live_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from simulator.coroutines import Task
    from simulator.server import Server
    from simulator.server_group import Host, ServerGroup
    from simulator.sim_pool import SimPool
    from simulator.subjects import Reading, ResourceModel, Share

    from .attempts import Attempt, Attempts
    from .trace import Trace

IDENTITY_LENGTH: Final = 25  # characters
MAX_FREE_TIME: Final = 1.3  # seconds within which a live waiter must get a free resource: a heartbeat and a trip
# seconds within which the holder of a revoked lease must know so, if its client is subscribed and runs
REVOCATION_TIME: Final = 1.0
FOR_PEOPLE: Final = {INDEX.encode(), AUDIT_KEY.encode()}  # the first keys of scripts that grant nothing
WAKE_TIME: Final = 0.05  # seconds within which a client must know of a handover or of news, if there is no fault


@dataclass
class Seen:
    """The state of one resource in the server after the last script."""

    resource: ResourceModel
    holders: dict[bytes, Share] = field(default_factory=dict[bytes, "Share"])
    fence: int = 0
    fences: dict[bytes, int] = field(default_factory=dict[bytes, int])  # the fence of each grant, if clocks are set
    arrivals: dict[bytes, tuple[int, float]] = field(default_factory=dict[bytes, tuple[int, float]])
    head: bytes | None = None  # the next waiter, in the quiet phase
    head_since: float = 0.0  # since when it is the head
    room_since: float | None = None  # since when there has been room for the head
    # since when each waiter should know its news
    news_due: dict[Hashable, float] = field(default_factory=dict["Hashable", float])
    quarantine_until: float = 0.0  # lost leases may last until then
    lost_by: int = 0  # the host that first served after the loss
    restarted_on: Host | None = None  # the host that granted to a client which remembered nothing
    fences_ahead: bool = False  # of the clock, since a person has ended a quarantine
    loss_recorded: bool = True  # whether the record shows that there may be lost leases


class ServerState:
    """The states of all resources."""

    def __init__(self, trace: Trace, group: ServerGroup, attempts: Attempts, *, quiet: bool, trusted: bool) -> None:
        self.trace = trace
        self.group = group
        self.attempts = attempts
        self.quiet = quiet  # whether there is no fault of any kind
        self.trusted = trusted  # whether the server never loses data, and its clock is never set
        self.quiet_since = math.inf
        self.seen: dict[bytes, Seen] = {}
        self.on_handover: Callable[[Task], None] = lambda _task: None  # called in the moment of a handover
        self.grants = 0
        self.slowest = 0.0  # seconds from when there was room for a live waiter to its grant, in the quiet phase
        self.longest_quarantine = math.inf  # seconds
        self.excused = 0  # grants to clients that remembered nothing, by servers that had lost all
        self.on_grant: Callable[[], None] = lambda: None  # called in the moment of a grant
        # called with the key of a resource whose fences count no more
        self.on_fences_lost: Callable[[bytes], None] = lambda _key: None
        self.pools: dict[str, SimPool] = {}  # by process
        self.granted_at: dict[bytes, float] = {}  # when the server granted each token last
        self._arrived = 0

    @property
    def server(self) -> Server:
        """The server of the primary."""
        return self.group.primary.server

    def watch(self, resource: ResourceModel) -> None:
        """Watch a resource that workers will use."""
        self.seen[resource.key] = Seen(resource)

    def _exempt_forced(self, seen: Seen, token: bytes) -> None:
        """Note a lease revoked by force: other leases of the same owner, whose `ensure()` may pass, end with it."""
        resource = seen.resource
        if token.startswith(b"quarantine:"):
            seen.quarantine_until, seen.fences_ahead = 0.0, True
        for other, each in self.attempts.known.items():
            if each.resource is resource:
                all_of_them = token == b"taken-over" or token.startswith(b"quarantine:")
                each.exempt |= all_of_them or resource.owner_of(other) == resource.owner_of(token)

    def note_new_primary(self, *, lossy: bool, quarantine_time: float, other_clock: bool) -> None:
        """Note that another process serves now.

        If that process lost data (`lossy`), it may grant nothing for `quarantine_time` seconds.
        """
        server = self.server
        server.read_clock()
        for seen in self.seen.values():
            resource = seen.resource
            seen.holders = resource.read(server).holders
            seen.arrivals.clear()
            self._note_arrivals(seen, seen.holders, server.find(resource.queue, ZSet) or {})
            seen.head, seen.room_since, seen.news_due = None, None, {}
            if lossy and seen.fences_ahead:
                self._forget_fences(seen)
            if lossy:
                seen.quarantine_until = max(seen.quarantine_until, self.trace.world.now + quarantine_time)
                seen.lost_by = self.group.primary.number
                seen.loss_recorded = self._record_shows_loss(seen)
            if lossy or other_clock:  # the times beside a lease are those of the earlier clock
                resource.note_data_loss(server)
        for attempt in self.attempts.known.values():
            attempt.cleared = False

    def _forget_fences(self, seen: Seen) -> None:
        """Excuse lower fences: the server has lost grants that were ahead of its clock, and takes its clock."""
        seen.fence, seen.fences_ahead = 0, False
        for attempt in self.attempts.known.values():
            attempt.exempt |= attempt.resource is seen.resource
        self.on_fences_lost(seen.resource.key)

    def _start_over(self, seen: Seen) -> None:
        """Excuse a grant despite lost leases: no client that knew of these took part, and no record shows them."""
        self.excused += 1
        self.trace.note("%s: no record and no client knows of lost leases", seen.resource.name)
        seen.quarantine_until, seen.fence, seen.restarted_on = 0.0, 0, self.group.primary
        for attempt in self.attempts.known.values():
            attempt.exempt |= attempt.resource is seen.resource

    def executed(self, host: Host, sender: str, keys: Sequence[bytes], args: Sequence[bytes], reply: Any) -> None:
        """Check the rules after a script."""
        if keys[0] in FOR_PEOPLE:
            self._check_ttls(host.server, keys, args[0])
            return
        args = args[:-1]  # without the identity stamp
        trace, asked, code = self.trace, requests(keys, args), _code(reply)
        verb, token = asked[0][1][:2]
        where = "" if host is self.group.primary else f" {host.number}"
        trace.note("server%s runs %s's %s %s -> %s", where, sender, verb.decode(), token.decode(), reply)
        if isinstance(reply, ServerError):
            if not may_fail(host, str(reply)):
                trace.violated(10, f"{verb.decode()} of {sender} failed: {reply}")
            return
        trace.served(sender, verb, token.rpartition(b"/")[0], keys[0], code if isinstance(code, int) else 0)
        self._check_ttls(host.server, keys, verb)
        self._note_reply(host, keys, args, code)
        if verb == b"revoke" and code == 1:
            self._note_revocation(self.seen[keys[0]], token, host, force=args[2] == b"1")
        if host is not self.group.primary:
            self._executed_on_isolated(host.server, asked, answers(args, reply))
            return
        self._check_replies(asked, answers(args, reply))
        by = {words[1] for _, words in asked}
        for key in keys:
            if key in self.seen:
                self._check_resource(self.seen[key], verb, by, sender=sender)

    def _check_ttls(self, server: Server, keys: Sequence[bytes], verb: bytes) -> None:
        """Check S3."""
        if not server.data.keys() <= server.expires.keys():
            self.trace.violated(3, f"{server.data.keys() - server.expires.keys()} have no TTL after {verb!r}")
        for key in keys:
            if key in self.seen:
                self._check_record(self.seen[key], server, verb)

    def _check_record(self, seen: Seen, server: Server, verb: bytes) -> None:
        """Check the second half of S3: else the next grant after the end of the record has a lower fence."""
        name = seen.resource.keys[1]
        record: bytes | None = server.find(name, bytes)
        if seen.resource.has_leases and record is not None:
            ahead = int(record.split()[2]) / 1000 - server.expires.get(name, math.inf)
            if ahead > 0:
                self.trace.violated(3, f"after {verb!r} the record of {name!r} ends {ahead:.0f} ms before its fence")

    def _note_revocation(self, seen: Seen, token: bytes, host: Host, *, force: bool) -> None:
        """Note the revocation of a lease, or the end of a quarantine by hand."""
        if force:
            self._check_quarantine_named(seen, token, host)
            self._exempt_forced(seen, token.removeprefix(b"!"))
        if host is self.group.primary and self.attempts.clean:
            since, lease = self.trace.world.now, token.removeprefix(b"!")
            self.trace.world.at(since + REVOCATION_TIME, lambda: self._check_holder_knows(lease, since, since))

    def _check_quarantine_named(self, seen: Seen, token: bytes, host: Host) -> None:
        """Check S13: a revoke that ends a quarantine names that of this server, not of an earlier one."""
        here = f">{host.facts().identity}>".encode()
        quarantined = host is self.group.primary and self.trace.world.now < seen.quarantine_until
        if quarantined and token.startswith(QUARANTINE) and here not in token:
            self.trace.violated(13, f"{token!r} ends the quarantine of another server")

    def _check_holder_knows(self, token: bytes, revoked_at: float, since: float) -> None:
        """Check S8: the holder of a lease that was revoked knows of that, a second after it could know, `since`."""
        attempt = self.attempts.known.get(token)
        if attempt is None or not attempt.process.alive or attempt.process.paused_until > since:
            return
        if self.granted_at.get(token, 0.0) > revoked_at:
            return  # another grant: the one that was revoked was a handover that its waiter had not confirmed
        pushes_lost_until = self.pools[attempt.process.name].pushes_lost_until
        if pushes_lost_until > since:  # the client missed the push, and asks when subscribed again
            self.trace.world.at(
                pushes_lost_until + REVOCATION_TIME,
                lambda: self._check_holder_knows(token, revoked_at, pushes_lost_until),
            )
        elif attempt.certain():
            self.trace.violated(8, f"{token!r} was revoked {self.trace.world.now - revoked_at:.3f} s ago, and is held")

    def _note_reply(self, host: Host, keys: Sequence[bytes], args: Sequence[bytes], code: object) -> None:
        """Note the meaning of a reply for its attempt."""
        verb, token = args[:2]
        attempt = self.attempts.known.get(token.removeprefix(b"!"))
        if attempt is None:
            return
        if verb == b"release":
            attempt.cleared = host is self.group.primary
        elif verb == b"acquire" and code == QUEUED:
            self.attempts.note_queued(token, attempt)
        elif verb == b"acquire" and code == GRANTED:
            attempt.confirmed = True
        elif verb == b"execute" and code == GRANTED:
            holders = self.seen[keys[0]].resource.read(host.server).holders
            self.attempts.note_execution(args[4].decode(), token, holds=token in holders and not holders[token].revoked)

    def _check_replies(self, asked: Sequence[tuple[Sequence[bytes], Sequence[bytes]]], replies: Sequence[Any]) -> None:
        """Check S12. A quarantine refuses all attempts in the same way."""
        for (of, words), answer in zip(asked, replies, strict=False):
            seen = self.seen.get(of[0])
            if seen is None or not self.trusted or (words[0] == b"acquire" and lost_identity(parse_acquire(answer))):
                continue
            if wrong := seen.resource.check_reply(self.server, words, answer, seen.holders):
                verb, token = words[:2]
                self.trace.violated(12, f"{verb.decode()} of {token!r} was answered with {answer}: {wrong}")

    def _check_resource(self, seen: Seen, verb: bytes, by: Collection[bytes], *, sender: str) -> None:
        resource, server = seen.resource, self.server
        reading = resource.read(server)
        holders = reading.holders
        present: dict[bytes, float] = server.find(resource.queue, ZSet) or {}
        if verb != b"renew" and (present or seen.arrivals):
            self._note_arrivals(seen, holders, present)
        if verb in {b"reserve", b"acquire"}:
            self._note_new_fences(seen, holders, by)
        new = _new(seen, holders)
        if seen.quarantine_until > self.trace.world.now:
            first = min(host.number for host in self.pools[sender].known_hosts)
            self._check_quarantine(seen, new, fresh=first >= seen.lost_by)
        if new:
            new.sort(key=lambda token: holders[token].fence)
            self._check_grants(seen, new, reading, present, by if verb == b"acquire" else ())
        for token in holders:
            if token not in present:
                seen.arrivals.pop(token, None)  # granted: if this token queues again, it is a new arrival
            attempt = self.attempts.known.get(token)
            if attempt is not None and attempt.cleared and self.trusted:
                self.trace.violated(5, f"{token!r} holds {resource.key!r} after the server ran its release")
        # In a quarantine another machine's clock may count, by which a lease may end earlier.
        if self.trusted and seen.quarantine_until <= self.trace.world.now:
            self._check_none_given_up(seen, holders)
        if present:
            self._check_none_waits_for_itself(resource, holders, present)
        self._watch_head(seen, reading, present)
        seen.holders = holders
        self._news_due(seen)

    def _note_new_fences(self, seen: Seen, holders: dict[bytes, Share], by: Collection[bytes]) -> None:
        """Note a new fence of a lease that is alive: that is no new grant.

        A holder reserves fences for those to which it passes its lease; and whoever confirms a handover to another
        server than the one that handed over gets a new one.
        """
        alive = live_shares(seen.holders, self.server, surely=True)
        for token, share in holders.items():
            if token in alive and token in by:
                seen.fence = max(seen.fence, share.fence)  # `Leases` checks those that callers get
                seen.holders[token] = share

    def _check_none_given_up(self, seen: Seen, holders: dict[bytes, Share]) -> None:
        """Check S1 in the server: it has every lease for which `ensure()` would pass."""
        resource = seen.resource
        owners = {resource.owner_of(token) for token in holders}
        for token in seen.holders.keys() - holders.keys():
            attempt = self.attempts.known.get(token)
            if attempt is None or attempt.exempt or resource.owner_of(token) in owners:
                continue
            if attempt.certain():
                self.trace.violated(
                    1, f"ensure() passes for {token!r}, and the server has ended that lease of {resource.key!r}"
                )

    def _check_none_waits_for_itself(
        self, resource: ResourceModel, holders: dict[bytes, Share], present: dict[bytes, float]
    ) -> None:
        """Check S4 in the queue."""
        alive = live_shares(holders, self.server, surely=True)
        for token in present:
            if resource.waits_for_itself(token, alive):
                self.trace.violated(4, f"{token!r} stands in the queue, and may wait there for a lease of its client")

    # An isolated primary

    def _executed_on_isolated(
        self, server: Server, asked: Sequence[tuple[Sequence[bytes], Sequence[bytes]]], replies: Sequence[Any]
    ) -> None:
        """Note the grants of a script on an isolated primary, where only the leases in clients count."""
        for (of, words), answer in zip(asked, replies, strict=False):
            if words[0] == b"acquire" and answer[0] == GRANTED:
                self._grant_on_isolated(self.seen[of[0]], words[1], server)

    def _grant_on_isolated(self, seen: Seen, token: bytes, server: Server) -> None:
        """Note a grant by the isolated primary, which does not know the leases that the new primary granted anew."""
        resource = seen.resource
        if seen.restarted_on is self.group.primary:
            self.attempts.known[token].exempt = True
        resource.note_grant(token, resource.read(server))

    # S13

    def _record_shows_loss(self, seen: Seen) -> bool:
        """Whether the record shows that leases may be lost: by a grant, or by an identity that a client remembered."""
        record: bytes | None = self.server.find(seen.resource.keys[1], bytes)
        if record is None:
            return False
        _, _, fence, granted_by, *_ = record.split()
        return int(fence) > 0 or self._is_of_earlier_host(seen, granted_by)

    def _is_of_earlier_host(self, seen: Seen, identity: bytes) -> bool:
        """Whether this identity is that of a host before the loss."""
        process = identity.decode().lstrip("@").partition(":")[0] if identity != b"-" else ""
        return any(
            host.number < seen.lost_by and host.run_id.startswith(process) for host in self.group.hosts if process
        )

    def _is_of_this_host(self, seen: Seen, identity: bytes) -> bool:
        """Whether this is an identity of the primary: its first replica changes it, and a client may hear that late."""
        process = self.group.primary.facts().identity.encode().partition(b":")[0]
        return identity.partition(b":")[0] == process and not self._is_of_earlier_host(seen, identity)

    def _check_quarantine(self, seen: Seen, new: list[bytes], *, fresh: bool) -> None:
        """Check S13 for a script that ran while lost leases may last. `fresh`: its sender started later."""
        for token in live_shares(seen.holders, self.server, surely=True):
            mark, _, evidence = token.partition(b":")
            seen.loss_recorded |= mark == b"quarantine" and self._is_of_earlier_host(seen, evidence)
        if not seen.loss_recorded and self._record_shows_loss(seen):
            record: bytes = self.server.find(seen.resource.keys[1], bytes)
            seen.loss_recorded = True
            host = self.group.primary
            facts_show_loss = host.loaded and not host.promoted  # by its facts: it is young, and began with saved keys
            if fresh and not facts_show_loss and self._is_of_this_host(seen, record.split()[3]):
                self._start_over(seen)
        if new and seen.quarantine_until:
            left = seen.quarantine_until - self.trace.world.now
            self.trace.violated(13, f"{new} granted {left:.3f} s before the lost leases end")

    # The order of arrival

    def _note_arrivals(self, seen: Seen, holders: dict[bytes, Share], present: dict[bytes, float]) -> None:
        for token in [token for token in seen.arrivals if token not in present and token not in holders]:
            del seen.arrivals[token]
        for token in sorted(present, key=present.__getitem__) if len(present) > 1 else present:
            # With another score the same token has arrived again.
            if token not in seen.arrivals or seen.arrivals[token][1] != present[token]:
                self._arrived += 1
                seen.arrivals[token] = self._arrived, present[token]

    def _check_order(
        self, seen: Seen, token: bytes, holders: dict[bytes, Share], present: dict[bytes, float], by: Collection[bytes]
    ) -> None:
        """Check S6. A waiter that lost its subscription gets no push, so others may overtake it meanwhile.

        The waiter that asks gets the reply: nobody may overtake that one.
        """
        server = self.server
        waiters: dict[bytes, bytes] = server.find(seen.resource.waiters, Hash) or {}
        owner = seen.resource.owner_of
        same = (arrived for each, (arrived, _) in seen.arrivals.items() if owner(each) == owner(token))
        mine = min(same, default=self._arrived + 1)
        for other in present:
            if other in waiters and other in seen.arrivals and seen.arrivals[other][0] < mine and other not in holders:
                alive, _, subscribed, channel, *_ = waiters[other].split()
                is_reachable = other in by or subscribed != b"1" or server.subscribers(channel)
                if int(alive) > server.now_ms and is_reachable:
                    self.trace.violated(6, f"{token!r} overtook {other!r}")

    # Grants

    def _check_grants(
        self, seen: Seen, tokens: list[bytes], reading: Reading, present: dict[bytes, float], by: Collection[bytes]
    ) -> None:
        resource, holders, before = seen.resource, reading.holders, live_shares(seen.holders, self.server, surely=False)
        self.on_grant()
        for token in tokens:
            self.grants += 1
            self.granted_at[token] = self.trace.world.now
            if self._was_granted_before(seen, token, holders[token].fence):
                continue
            self._check_fence(seen, token, holders[token].fence)
            resource.note_grant(token, reading)
            if present and not resource.may_skip_queue(token, before):
                self._check_order(seen, token, holders, present, by)
            if token == seen.head:
                since = seen.room_since if seen.room_since is not None else self._free_since(seen, reading)
                self._check_wait(seen, max(since, seen.head_since))
            if (attempt := self.attempts.known.get(token)) is not None:
                left_ms = holders[token].ends - self.server.micros / 1000
                longest = attempt.ttl_ms if token in by else attempt.handover_ttl_ms
                if left_ms > longest + 1 and not resource.may_skip_queue(token, [*before, *present]):
                    self.trace.violated(3, f"{token!r} was granted {left_ms:.0f} ms: it asked for {longest}")
                if attempt.queued_at is not None:
                    self._note_handover(resource, token, attempt)
        if len(holders) > 1 and self.trusted and (why := resource.exclusion_error(holders)):
            self.trace.violated(1, f"in the server {resource.key!r} is {why}")

    def _was_granted_before(self, seen: Seen, token: bytes, fence: int) -> bool:
        """Whether this lease had ended before the server's clock was set back, which made the lease alive again."""
        if self.trusted:
            return False
        before = seen.fences.get(token)
        seen.fences[token] = fence
        return before == fence

    def _check_fence(self, seen: Seen, token: bytes, fence: int) -> None:
        """Check S2."""
        if fence <= seen.fence:
            self.trace.violated(2, f"{token!r} got the fence {fence} after {seen.fence}")
        seen.fence = max(seen.fence, fence)

    def _note_handover(self, resource: ResourceModel, token: bytes, waiter: Attempt) -> None:
        """Note a handover to a waiter, which the server pushes."""
        if self.quiet:
            self.trace.world.at(self.trace.world.now + WAKE_TIME, lambda: self._check_woken(resource, token, waiter))
        self.on_handover(waiter.task)

    def _check_woken(self, resource: ResourceModel, token: bytes, waiter: Attempt) -> None:
        self.server.read_clock()
        if not waiter.ended and not waiter.confirmed and token in resource.read(self.server).holders:
            self.trace.violated(
                4, f"a handover gave {token!r} {resource.name} {WAKE_TIME} s ago, and its client does not know"
            )

    # S4: the next waiter gets a free resource

    def _watch_head(self, seen: Seen, reading: Reading, present: dict[bytes, float]) -> None:
        """In the quiet phase: note the next waiter, and since when there has been room for that waiter."""
        now = self.trace.world.now
        if now <= self.quiet_since or not self.trusted:
            return
        head = self._head(seen, reading, present)
        if head != seen.head:
            seen.head, seen.head_since, seen.room_since = head, now, None
        if head is None:
            return
        resource, room = seen.resource, reading.room
        wanted = resource.permits_wanted(head)
        marker = next((token for token in reading.holders if token.startswith(b"quarantine:")), None)
        link = self.pools[self.attempts.known[head].process.name].connection
        if link is None or link.host is not self.group.primary:
            room = 0
        elif in_quarantine(link.stamp.text, self.server, resource, marker) and now < self._latest_end(link.host):
            room = 0  # by what the client knows; but that may be wrong, so the latest possible end counts, too
        elif marker:
            room = reading.limit  # the head knows that the quarantine is over
        if room < wanted <= reading.limit:
            seen.room_since = None
        elif seen.room_since is None:
            seen.room_since = max(seen.head_since, self._free_since(seen, reading))

    def _latest_end(self, host: Host) -> float:
        """Return until when a quarantine of this host may last: by its beginning as clients may know it at worst."""
        met = [pool.known_hosts[host] for pool in self.pools.values() if host in pool.known_hosts]
        return max(host.since, *met, -math.inf) + self.longest_quarantine

    def _head(self, seen: Seen, reading: Reading, present: dict[bytes, float]) -> bytes | None:
        """Return the first live waiter in the queue or, if the server has lost all waiters, the oldest."""
        queued = self.attempts.queued[seen.resource.key]
        waiting = [
            token
            for token, attempt in queued.items()
            if attempt.process.awake and not attempt.confirmed and token not in reading.holders
        ]
        if not waiting:
            return None
        return min(waiting, key=lambda token: (present.get(token, math.inf), queued[token].queued_at or 0.0))

    def _free_since(self, seen: Seen, reading: Reading) -> float:
        """Return when, since the last check, the leases ended that left no room for the next waiter; else now."""
        now, server = self.trace.world.now, self.server
        assert seen.head is not None
        room = reading.limit - sum(share.permits for share in seen.holders.values())
        for share in sorted(seen.holders.values(), key=lambda share: share.ends):
            when = now + (share.ends - server.micros / 1000) / 1000
            room += share.permits
            if when >= now:
                break
            if room >= seen.resource.permits_wanted(seen.head):
                return when
        return now

    def _check_wait(self, seen: Seen, since: float) -> None:
        waited = self.trace.world.now - since
        self.slowest = max(self.slowest, waited)
        if waited > MAX_FREE_TIME:
            self.trace.violated(4, f"{seen.head!r} was next and {seen.resource.key!r} was free for {waited:.3f} s")

    def _news_due(self, seen: Seen) -> dict[Hashable, str]:
        """Note the waiters that should know their news, and since when."""
        due, now = seen.resource.news_due(self.server, self.attempts.queued[seen.resource.key]), self.trace.world.now
        if due or seen.news_due:
            new = due.keys() - seen.news_due.keys()
            seen.news_due = {who: seen.news_due.get(who, now) for who in due}
            if new and self.quiet:
                self.trace.world.at(now + WAKE_TIME, lambda: self._check_news(seen, now))
        return due

    def _check_news(self, seen: Seen, since: float) -> None:
        self.server.read_clock()
        for who, what in self._news_due(seen).items():
            if seen.news_due[who] == since:
                self.trace.violated(4, f"{what}: no news within {WAKE_TIME} s")

    def sweep(self) -> None:
        """Report overdue events."""
        now = self.trace.world.now
        if now <= self.quiet_since or not self.trusted:
            return
        self.server.read_clock()
        for seen in self.seen.values():
            reading = seen.resource.read(self.server)
            self._watch_head(seen, reading, self.server.find(seen.resource.queue, ZSet) or {})
            if seen.room_since is not None and now - seen.room_since > MAX_FREE_TIME:
                self.trace.violated(
                    4,
                    f"{seen.head!r} is next, and {seen.resource.key!r} has had room for it since {seen.room_since:.3f}",
                )
                seen.room_since = now
            for who, what in self._news_due(seen).items():
                since = max(seen.news_due[who], self.quiet_since)
                if now - since > MAX_FREE_TIME:
                    self.trace.violated(4, f"{what}: no news since {since:.3f}")
                    seen.news_due[who] = now


def _code(reply: Any) -> object:
    """Return the code with which a reply begins; return a reply without a code unchanged."""
    try:
        return reply[0]
    except (TypeError, IndexError):
        return reply


def may_fail(host: Host, error: str) -> bool:
    """Whether scripts may fail with this error there."""
    refuses = bool(host.refusal) or host.replicates is not None
    return refuses or error.startswith("NOSCRIPT") or (host.server.full and error.startswith("OOM"))


def _new(seen: Seen, holders: dict[bytes, Share]) -> list[bytes]:
    """Return the tokens of the leases that were granted since the last check."""
    return [
        token
        for token, share in holders.items()
        if not share.revoked and (token not in seen.holders or seen.holders[token].fence != share.fence)
    ]


def in_quarantine(stamp: str, server: Server, resource: ResourceModel, marker: bytes | None) -> bool:
    """Whether the server may grant nothing yet to a client with this identity stamp, by the rules of quarantine.lua.

    S4 needs the answer, since a grant must happen in time.
    """
    if not resource.has_leases:
        return False
    record: bytes | None = server.find(resource.keys[1], bytes)
    words = (record or b"1 - 0 - 0").decode().split()
    if len(words) < 5:
        return False  # of a latch or a barrier, which have no leases to lose
    fence, granted_by, last_ttl = int(words[2]), words[3], int(words[4])
    if marker is not None and granted_by == "-":
        granted_by = marker.decode().partition(":")[2]
    here, has_returned = stamp[:IDENTITY_LENGTH], stamp[IDENTITY_LENGTH : IDENTITY_LENGTH + 1] == "*"
    if len(stamp) < IDENTITY_LENGTH or (granted_by == here and not has_returned):
        return False
    since, wait, grace, previous, *lossless_from = stamp[IDENTITY_LENGTH + 1 :].split()
    lost, successor, known = [*granted_by.split(">"), "", ""][:3]
    is_older = has_returned and record is not None and fence < int(since) * 1000 and lost != previous
    is_older |= successor == here and previous.startswith("@") and not lost.startswith("@")  # it was a spare
    if granted_by == "-" or is_older:
        lost, successor, known = previous, "", ""
    if lost in {"-", here}:
        return False
    known_since, _, known_wait = known.partition("+")
    if successor == here:
        since = min(since, known_since, key=int) if lost == previous or not lost.startswith("@") else known_since
    for each in lossless_from:
        identity, _, least = each.partition("/")
        if lost.startswith(identity) and int(least or 0) <= last_ttl:
            return False
    longest = max(int(wait), last_ttl, int(known_wait or 0))
    return int(since) + longest + int(grace) > server.micros / 1000
