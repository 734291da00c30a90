"""The outages of the serving process: it restarts, or another one takes over, with or without the last writes.

Theory. A lossy outage loses all writes after an *image* of the keys: a snapshot, a disk that lags, a replica that lags.
The fault takes the image when it strikes. The process ends a little later, or in the moment of one of the next grants,
which only the client of that grant then knows. A while after that the next process starts with the image.

Rule. One outage at a time: a fault that strikes during another outage does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .outage_kinds import ISOLATION_GRACE, MAX_DOWNTIME, MAX_LAG, MAX_MOVE, MAX_PAUSE, MAX_SKEW
from .server import READONLY
from .server_group import AGE, EMPTY, NOREPLICAS, Host

if TYPE_CHECKING:
    from collections.abc import Callable

    from .network import Network
    from .parts import Run
    from .server_group import Image, ServerGroup
    from .strikes import Strike


class Outages:
    """The outages of one group."""

    def __init__(self, run: Run, network: Network) -> None:
        self.run = run
        self.network = network
        self.group: ServerGroup = network.group
        self._busy = False
        self._at_grant: Callable[[], None] | None = None
        self._grants = 0

    def strike(self, strike: Strike) -> None:
        """Begin an outage of one of the `KINDS`."""
        group = self.group
        if self._busy:
            return
        match strike.kind:
            case "restart":
                self._end_soon(strike, lambda: self._restart(strike, None))
            case "restart with old keys":
                image = group.primary.server.image()
                self._end_soon(strike, lambda: self._restart(strike, image))
            case "restart without keys" | "spare" as kind:
                up = AGE if kind == "spare" else 0.0
                self._end_soon(strike, lambda: self._restart(strike, EMPTY, up=up))
            case "failover":
                image = group.primary.server.image()
                self._end_soon(strike, lambda: self._failover(strike, image))
            case "planned failover":
                self._planned_failover(strike)
            case "primary isolated":
                self._isolated(strike)
            case "primary paused":
                self._paused(strike)
            case _:
                self._strike_living(strike)

    def _end_soon(self, strike: Strike, action: Callable[[], None]) -> None:
        """End the process when the lag is over, or earlier, at one of the next grants."""
        world, group, before = self.run.world, self.group, self.group.primary
        self._busy = True

        def act() -> None:
            if group.primary is before and before.alive:
                self._at_grant = None
                action()

        if strike.coin:
            self._at_grant, self._grants = act, strike.skips // 2
        world.at(world.now + min(strike.seconds, MAX_LAG), act)

    def granted(self) -> None:
        """Note a grant in this moment."""
        if self._at_grant is not None:
            self._grants -= 1
            if self._grants < 0:
                self._at_grant()

    def _end(self, host: Host, *, resets: bool) -> None:
        self.run.trace.note("server %d is dead", host.number)
        host.alive = False
        host.subscribed.clear()
        self.group.resets = resets
        for link in sorted(host.links, key=lambda link: link.process.name):
            self.network.reset_connection(link, 0.001)

    def _after_downtime(self, strike: Strike, action: Callable[[], None]) -> None:
        world = self.run.world
        world.at(world.now + 0.01 + strike.spare * (MAX_DOWNTIME - 0.01), action)

    def _make_primary(self, host: Host, *, lossy: bool, isolation_grace: float = 0.0) -> None:
        """Make this host the primary."""
        other = host.server.skew != self.group.primary.server.skew
        self.group.primary, self.group.reachable, host.lost_data = host, True, lossy
        run = self.run
        run.trace.note(
            "server %d is the primary now, %s%s", host.number, host.facts().identity, ": data is lost" * lossy
        )
        run.record.meets("new primary", None)
        run.monitor.note_new_primary(
            lossy=lossy, quarantine_time=run.profile.max_ttl + isolation_grace, other_clock=other
        )
        self._busy = False

    def _restart(self, strike: Strike, image: Image | None, *, up: float = 0.0) -> None:
        """Start another process. A spare has run for `up` seconds by then; the address did not lead there."""
        group, old = self.group, self.group.primary
        self._end(old, resets=strike.victim < 0.7)
        group.reachable = False

        def start() -> None:
            group.resets = True
            host = group.new_host(up=up, skew=old.server.skew)
            if image is not None and image is not EMPTY and strike.resource < 0.5:
                host.replid2 = old.replid  # newer servers take their history from a snapshot
            host.load(old.server.image() if image is None else image)
            self._make_primary(host, lossy=image is not None)

        self._after_downtime(strike, start)

    def _failover(self, strike: Strike, image: Image) -> None:
        group, old = self.group, self.group.primary
        self._end(old, resets=strike.victim < 0.5)
        group.reachable = False

        def promote() -> None:
            host = self._promote(strike, old, image)
            self._make_primary(host, lossy=True)
            if strike.victim < 0.3:  # the machine of the old primary is up again, and replicates the new primary
                follower = group.new_host()
                follower.replid, follower.replicates, follower.refusal = host.replid, host, READONLY

        self._after_downtime(strike, promote)

    def _promote(self, strike: Strike, old: Host, image: Image) -> Host:
        skew = old.server.skew + (strike.resource - 0.5) * 2 * MAX_SKEW
        host = self.group.new_host(up=1e5 * strike.spare, skew=max(-MAX_SKEW, min(MAX_SKEW, skew)))
        host.replid2, host.promoted = old.replid, True
        host.load(image)
        return host

    def _planned_failover(self, strike: Strike) -> None:
        """FAILOVER: the old primary stops writing until the replica has all writes, so no lease is lost.

        But if the clock of the replica is ahead, leases end too early there.
        """
        self._busy = True
        old = self.group.primary
        host = self._promote(strike, old, old.server.image())
        old.refusal = READONLY

        def replicate() -> None:
            old.replicates, old.replid, old.replid2 = host, host.replid, host.replid2

        self.run.world.at(self.run.world.now + strike.victim * strike.spare, replicate)
        self._make_primary(host, lossy=host.server.skew > old.server.skew)

    def _isolated(self, strike: Strike) -> None:
        """Isolate the primary from its replicas, and promote one of them. Some clients still reach only the old one."""
        run, old = self.run, self.group.primary
        self._busy = True
        bases = [client.process.base for client in run.clients]
        first = int(strike.client * len(bases))
        image, lag = old.server.image(), min(strike.seconds, MAX_LAG)

        def promote() -> None:
            old.reachable_by = {bases[first], bases[int(strike.victim * len(bases))]}
            for link in sorted(old.links, key=lambda link: link.process.name):
                if not old.reached_by(link.process):
                    self.network.reset_connection(link, 0.001)
            host = self._promote(strike, old, image)
            self._make_primary(host, lossy=True, isolation_grace=MAX_LAG)
            self._busy = True
            world = run.world
            world.at(world.now + MAX_LAG * (0.5 + strike.spare / 2), lambda: refuse(NOREPLICAS))
            world.at(world.now + MAX_LAG * (1 + strike.spare), heal)

        def refuse(text: str) -> None:
            old.refusal = text

        def heal() -> None:
            refuse(READONLY)
            old.replicates, old.reachable_by, old.replid = self.group.primary, None, self.group.primary.replid
            self._busy = False

        run.world.at(run.world.now + lag, promote)

    def _paused(self, strike: Strike) -> None:
        """Stop the primary's machine and promote a replica. Later the machine goes on and notices nothing at first."""
        world, old = self.run.world, self.group.primary
        self._busy, old.paused, self.group.reachable = True, True, False
        image = old.server.image()
        self.run.trace.note("server %d stands still", old.number)

        def promote() -> None:
            host = self._promote(strike, old, image)
            self._make_primary(host, lossy=True, isolation_grace=MAX_LAG)
            self._busy = True
            world.at(world.now + (MAX_PAUSE - MAX_DOWNTIME) * (0.5 + strike.victim / 2), resume)

        def resume() -> None:
            self.run.trace.note("server %d goes on", old.number)
            old.paused, delayed, old.delayed = False, old.delayed, []
            for each in delayed:
                each()
            world.at(world.now + ISOLATION_GRACE * strike.client, step_down)

        def step_down() -> None:
            old.refusal, old.replicates, old.replid = READONLY, self.group.primary, self.group.primary.replid
            self._busy = False

        self._after_downtime(strike, promote)

    # Faults that need not end the process. All but the first one strike servers of a quorum

    def _strike_living(self, strike: Strike) -> None:
        group, image = self.group, self.group.primary.server.image()
        if strike.kind == "first replica":
            if not group.primary.facts().promoted:
                group.primary.replid = group.new_replid()
            return
        actions: dict[str, Callable[[], None]] = {
            "emptied": self._emptied,
            "re-seeded by a member": lambda: self._reseeded_by_a_member(strike),
            "re-seeded by its replica": lambda: self._reseeded_by_its_replica(strike, image),
            "address moved": lambda: self._moved(strike),
        }
        self._end_soon(strike, actions[strike.kind])

    def _note_loss(self) -> None:
        """Note that the server goes on, and has lost data."""
        host, run = self.group.primary, self.run
        host.lost_data = True
        run.trace.note("%s has lost data, and is %s now", self.group.name or "s0", host.facts().identity)
        run.monitor.note_new_primary(lossy=True, quarantine_time=run.profile.max_ttl, other_clock=False)
        self._busy = False

    def _emptied(self) -> None:
        """FLUSHALL."""
        self.group.primary.server.data.clear()
        self.group.primary.server.expires.clear()
        self._note_loss()

    def _reseeded_by_a_member(self, strike: Strike) -> None:
        """REPLICAOF of another server of the quorum, and soon REPLICAOF NO ONE. No connection ends."""
        others = [each for each in self._others() if each.primary.replicates is None]
        if not others:
            self._busy = False
            return
        other = others[int(strike.client * len(others))]
        other.primary.had_replica |= strike.resource < 0.7
        other.primary.attach_replica()
        self._reseeded(strike, other.primary, other.primary.server.image)

    def _reseeded_by_its_replica(self, strike: Strike, image: Image) -> None:
        """The same, of its own replica, which lags: it has been promoted for that."""
        replica = self.group.new_host(up=AGE)
        replica.load(image)
        self._reseeded(strike, replica, lambda: image)

    def _reseeded(self, strike: Strike, source: Host, image: Callable[[], Image]) -> None:
        """Give the server the keys of another one. It refuses writes meanwhile."""
        world, host, seconds = self.run.world, self.group.primary, strike.spare * MAX_DOWNTIME
        host.follow(source)

        def copied() -> None:
            host.copy_keys(image(), source.replid)
            self.run.monitor.note_new_primary(lossy=True, quarantine_time=0.0, other_clock=False)

        def ended() -> None:
            host.follow_nobody()
            self._note_loss()

        world.at(world.now + 0.001 + seconds * strike.victim, copied)
        world.at(world.now + 0.002 + seconds, ended)

    def _moved(self, strike: Strike) -> None:
        """Let the address lead to another server of the quorum, then to its own one: that of before, or a new one.

        The old one is dead, or serves the connections that it has.
        """
        world, group, old = self.run.world, self.group, self.group.primary
        if not self._others():
            self._busy = False
            return
        group.leads_to = self._others()[int(strike.client * len(self._others()))]
        self.run.trace.note("%s leads to %s now", group.name or "s0", group.leads_to.name or "s0")
        if strike.victim < 0.5:
            self._end(old, resets=True)

        def back() -> None:
            group.leads_to = None
            if old.alive:
                self._busy = False
            else:
                host = group.new_host(skew=old.server.skew)
                host.load(old.server.image() if strike.resource < 0.5 else EMPTY)
                self._make_primary(host, lossy=strike.resource >= 0.5)

        world.at(world.now + 0.1 + strike.spare * MAX_MOVE, back)

    def _others(self) -> list[ServerGroup]:
        """The other members, if none of their addresses leads elsewhere."""
        groups = [network.group for network in self.run.networks if network.group is not self.group]
        return [] if any(each.leads_to for each in groups) else [each for each in groups if each.primary.alive]
