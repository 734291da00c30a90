"""The course of a run: the fault phase, the quiet phase, and the drain.

In the *fault phase* workers use the resources while the faults of the profile strike. In the *quiet phase* workers go
on for a while without faults, and every waiter must get its turn. In the *drain* all workers end and the longest TTL
passes; then servers and clients must be empty.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from interlock.primitives.audit import AUDIT_KEY

from .chance import CLIENT, GROUPS
from .clients import Client
from .faults import Faults
from .invariants import Monitor, Trace
from .network import NO_FAULTS, Network
from .plan import Plan, Record
from .scheduler import World
from .server_group import VOTER_KEY, ServerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from . import parts
    from .coroutines import Task
    from .profiles import Profile
    from .subjects import Subject

DRIFT: Final = 0.008  # how much faster or slower the clocks of several servers run: leases allow for 0.01
END_TIMEOUT: Final = 180.0  # seconds until all workers must have ended
SETTLE_TIME: Final = 10.0  # seconds after that in which clients must report lost leases
DRAIN_TIME: Final = 400.0  # seconds after which no other TTL is left
LASTING_KEYS: Final = (AUDIT_KEY.encode(), VOTER_KEY)  # for 90 days


class Run:
    """One simulation."""

    def __init__(
        self,
        seed: int,
        profile: Profile,
        subject: type[Subject],
        lua: Callable[[str], str],
        plan: Plan | None,
        begin: Callable[[World], None],
    ) -> None:
        self.profile = profile
        self.world = world = World(seed)
        begin(world)
        self.trace = Trace(world)
        self.trace.plan = plan
        self.record = Record(plan, self.trace.note)
        self.groups = list(self._groups())
        self.networks = [Network(world, group, self.record, lua) for group in self.groups]
        self.monitor = Monitor(self.trace, world, self.groups, self.record, profile)
        self.monitor.server_state.on_handover = lambda task: task.pass_point("handover")
        for network in self.networks:
            network.weather = profile.weather
            network.executed = self.monitor.server_state.executed
            network.answered = self.monitor.passing.note_reply
        self.faults_end = profile.fault_phase
        self.quiet_from = math.inf
        self.ending = False
        self.execute_count = 0
        world.failed = self._failed
        random = world.chance.stream(CLIENT)
        self.subject = subject(random)
        for resource in self.subject.resources:
            resource.max_ttl, resource.usage = min(resource.max_ttl, profile.max_ttl), profile.usage
            self.monitor.watch(resource)
        self.clients: list[parts.Client] = [Client(self, f"c{i}") for i in range(random.choice(profile.clients))]
        self.dead_clients: list[parts.Client] = []

    def _groups(self) -> Iterator[ServerGroup]:
        profile, random = self.profile, self.world.chance.stream(GROUPS)
        number = random.choice(profile.servers)
        for i in range(number):
            offset, rate = (random.uniform(-1, 1) * each for each in (profile.skew, DRIFT if number > 1 else 0.0))
            group = ServerGroup(self.world, f"s{i}" if i else "", offset=offset, rate=1 + rate)
            group.promotes = profile.promotes
            if number > 1:
                group.has_served_for_long(profile.max_ttl)
            yield group

    @property
    def gap(self) -> float:
        """Seconds between two sections of a worker, on average."""
        if self.world.now < self.faults_end:
            return 0.01 if self.profile.crowded else 0.1
        return self.profile.idle if self.world.now < self.quiet_from else 0.3

    def _failed(self, task: Task, error: Exception) -> None:
        self.trace.violated(10, f"{task.name} raised {error!r}")

    def replace(self, client: parts.Client, strike: int) -> None:
        """Replace a dead process by a new one. The strike that killed the process is in the name of the new one."""
        self.dead_clients.append(client)
        name = f"{client.name.partition('~')[0]}~{strike}"
        self.clients[self.clients.index(client)] = Client(self, name)

    def restore_twice(self, client: parts.Client, strike: int) -> None:
        """Replace a process by two that are restored from its snapshot."""
        self.dead_clients.append(client)
        base, at = client.name.partition("~")[0], self.clients.index(client)
        self.clients[at : at + 1] = [Client(self, f"{base}~{strike}{which}", client) for which in "ab"]

    def go(self) -> None:
        """Run all phases, or until the break of the rule that the plan looks for."""
        world, ends = self.world, self.faults_end
        faults = Faults(self, ends)
        world.at(0.0, self.monitor.sweep)
        world.run(ends)
        if world.stopped:
            return
        for network in self.networks:
            network.weather = NO_FAULTS
        faults.end()
        self.trace.note("QUIET PHASE")
        # Late messages may still arrive, and calls may wait for them. The quiet phase begins after the last of these.
        self.quiet_from = world.now + self.profile.aftermath
        self.monitor.server_state.quiet_since = self.quiet_from + 1.0
        world.run(ends + self.profile.aftermath + self.profile.quiet_phase)
        self.ending = True
        deadline = world.now + END_TIMEOUT
        while world.now < deadline and not self._all_ended() and not world.stopped:
            world.run(world.now + 1.0)
        for client in self.clients:
            for task in client.workers:
                if task.in_section:
                    self.trace.violated(4, f"{task.name} never ended")
        world.run(world.now + SETTLE_TIME)
        self.monitor.sweeping = False
        world.run(world.now + DRAIN_TIME)
        self._check_drained()

    def _all_ended(self) -> bool:
        """Whether no worker uses a resource any more."""
        return not any(task.in_section for client in self.clients for task in client.workers)

    def _check_drained(self) -> None:
        for group in self.groups:
            server = group.primary.server
            server.purge_all()
            left_keys = {key: value for key, value in server.data.items() if key not in LASTING_KEYS}
            if left_keys and self.profile.trusted:
                self.trace.violated(5, f"in the end the server still has {left_keys!r}")
        for client in self.clients:
            session = client.session
            for what, left in (
                ("waiters", session.waiters.registered),
                ("local queues", session.waiters.queues),
                ("undos", session.undo.jobs),
                ("releases", session.owed),
                ("leases", list(session.book.all())),
            ):
                if left and not session.core.requests.closed:
                    self.trace.violated(5, f"in the end {client.name} still has {what}: {left!r}")
