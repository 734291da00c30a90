"""What happens in a run: faults while it storms, then calm, and the ashes.

In the storm, workers take locks while the faults of the profile strike. In the calm that follows they go on for a
while; now everything must come to its turn. Then all end, the longest TTL passes, and nothing may be left.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from interlock.primitives.lock import lock

from .clients import Client
from .invariants import Monitor
from .network import CALM, IO_TIMEOUT, LATEST, Network
from .scheduler import Task, World
from .server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._core import Primitive

    from .profiles import Profile

STORM: Final = 12.0  # seconds with faults
CALM_WORK: Final = 4.0  # seconds for which workers go on in the calm
PATIENCE: Final = 180.0  # seconds until everybody must have ended
ASHES: Final = 400.0  # seconds after which no TTL is left


class Run:
    """One simulation."""

    def __init__(self, seed: int, profile: Profile, lua: Callable[[str], str]) -> None:
        self.profile = profile
        self.counts: Counter[str] = Counter()
        self.world = world = World(seed)
        self.server = Server(lambda: world.now)
        self.network = Network(world, self.server, self.counts)
        self.monitor = Monitor(
            world, self.server, self.counts,
            clean=profile.clean, quiet=profile.clean and not profile.rates, trusted=profile.trusted,
        )  # fmt: skip
        self.network.executed = self.monitor.executed
        self.over = False
        world.failed = self._failed
        self.locks = [self._lock(f"n{i}", lua) for i in range(world.random.choice((1, 1, 2)))]
        self.network.weather = profile.weather
        self.clients = [Client(self, f"c{i}") for i in range(world.random.choice((2, 3, 3, 4)))]
        self.graves: list[Client] = []

    def _lock(self, name: str, lua: Callable[[str], str]) -> Primitive:
        primitive = lock(name, "lock:")
        source = lua(primitive.script.source)
        if source != primitive.script.source:
            sha = hashlib.sha1(source.encode()).hexdigest()  # noqa: S324 (Redis names them so)
            primitive = primitive._replace(script=primitive.script._replace(source=source, sha=sha))
        self.monitor.watch(primitive)
        return primitive

    def _failed(self, task: Task, error: Exception) -> None:
        self.monitor.violated(10, f"{task.process.name}/{task.name} raised {error!r}")

    # Faults

    def _strike(self) -> None:
        rates, world = self.profile.rates, self.world
        if not rates or world.now > STORM:
            return
        self._fault(world.random.choices(list(rates), list(rates.values()))[0])
        self._next_strike()

    def _next_strike(self) -> None:
        if self.profile.rates:
            self.world.at(
                self.world.now + self.world.random.expovariate(sum(self.profile.rates.values())), self._strike
            )

    def _fault(self, kind: str) -> None:
        random, world = self.world.random, self.world
        client = random.choice(self.clients)
        task = random.choice(client.workers)
        seconds = min(STORM - world.now, random.choice((random.expovariate(1 / 0.3), random.uniform(0.5, 8.0))))
        match kind:
            case "cancel":
                task.cancel()
            case "ambush cancel":
                task.ambush = task.cancel
            case "pause":
                client.process.pause(seconds)
            case "ambush pause":
                random.choice((task, client.process.tasks[-1])).ambush = lambda: client.process.pause(seconds)
            case "crash":
                self._crash(client)
            case "ambush crash":
                task.ambush = lambda: self._crash(client)
            case "close":
                self._close(client)
            case "ambush close":
                random.choice((task, client.process.tasks[-1])).ambush = lambda: self._close(client)
            case "script flush":
                self.server.known.clear()
            case "deafen":
                client.port.deafen()
            case "revoke":
                self._revoke(random.choice(self.locks))
            case "cut off":
                self.network.cut_off = True
                world.at(world.now + seconds, self._reconnected)
            case "flush all":
                self.server.data.clear()
                self.server.expires.clear()
            case "clock step":
                self.server.skew += random.choice((-1, 1)) * random.expovariate(1 / 5.0)
            case _:
                raise AssertionError(kind)
        self.counts[kind] += 1
        self.monitor.note(f"FAULT {kind}: {client.process.name}/{task.name}")

    def _reconnected(self) -> None:
        self.network.cut_off = False

    def _crash(self, client: Client) -> None:
        if not client.process.alive:
            return
        client.process.alive = False
        self.monitor.note(f"{client.process.name} is dead")
        self.graves.append(client)
        if self.world.random.random() < 0.7:  # else its host is gone, and the server does not hear of it
            self.world.at(self.world.now + self.network.trip(), client.port.buried)
        index = self.clients.index(client)
        self.clients[index] = Client(self, f"{client.name.partition('.')[0]}.{len(self.graves)}")

    def _close(self, client: Client) -> None:
        client.close()
        self.world.at(self.world.now + 2.0, lambda: self._crash(client))

    def _revoke(self, primitive: Primitive) -> None:
        keys = [key.encode() for key in primitive.keys]
        holder = self.server.find(keys[0], bytes)
        if holder and not holder.startswith(b"!"):
            args = [b"revoke", holder, b"0", b"by a person"]
            reply = self.server.eval(primitive.script.source, keys, args)
            self.monitor.executed("person", keys, args, reply)

    # The course of it

    def go(self) -> None:
        """From the storm to the ashes."""
        world = self.world
        world.at(0.0, self.monitor.sweep)
        self._next_strike()
        world.run(STORM)
        self.network.weather = CALM
        self.network.cut_off = False
        for client in self.clients:
            for task in client.process.tasks:
                task.ambush = None
        self.monitor.note("CALM")
        # What is late may still come, and what waits for it waits on; the promises count from then on.
        stormy = bool(self.profile.weather.late)
        self.monitor.calm_since = world.now + (LATEST if stormy else 0.0) + IO_TIMEOUT + 1.0
        world.run(STORM + CALM_WORK + (LATEST + IO_TIMEOUT if stormy else IO_TIMEOUT))
        self.over = True
        deadline = world.now + PATIENCE
        while world.now < deadline and not self._ended():
            world.run(world.now + 1.0)
        for client in self.clients:
            for task in client.workers:
                if not task.ended:
                    self.monitor.violated(4, f"{client.name}/{task.name} never ended")
        world.run(world.now + ASHES)
        self._ashes()

    def _ended(self) -> bool:
        return all(task.ended for client in self.clients for task in client.workers)

    def _ashes(self) -> None:
        self.server.purge_all()
        if self.server.data and self.profile.trusted:
            self.monitor.violated(5, f"in the end the server still has {self.server.data!r}")
        for client in self.clients:
            session = client.session
            for what, left in (
                ("waiters", session.waiters.expected),
                ("rooms", session.waiters.rooms),
                ("undos", session.undo.jobs),
                ("leases", list(session.renewal._all())),
            ):
                if left and not session.core.closed:
                    self.monitor.violated(5, f"in the end {client.name} still has {what}: {left!r}")
