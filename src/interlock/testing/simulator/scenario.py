"""What happens in a run: clients with workers, faults while it storms, then calm, and the end.

A run has three parts. In the storm, workers take locks, hold, write, and let go in every way, while faults of the
profile strike. In the calm that follows, they go on for a while; now everything must come to its turn. Then all
end, the longest TTL passes, and nothing may be left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from interlock import _session
from interlock._lease import BaseLease
from interlock._session import Session
from interlock._undo import COURTESY
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, LockError, Unavailable
from interlock.primitives.lock import lock

from .invariants import Monitor
from .network import CALM, IO_TIMEOUT, LATEST, Network, SimPort, SimSignal, Weather, current
from .scheduler import Cancelled, Process, Task, World
from .server import Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._core import Grant, Primitive

STORM: Final = 12.0  # seconds with faults
CALM_WORK: Final = 4.0  # seconds for which workers go on in the calm
PATIENCE: Final = 180.0  # seconds until everybody must have ended
ASHES: Final = 400.0  # seconds after which no TTL is left
SLACK: Final = 0.1  # seconds that code may take beyond its timeout


@dataclass(frozen=True)
class Profile:
    """What may go wrong; the rates are per second, of all clients together."""

    name: str
    weather: Weather = CALM
    rates: dict[str, float] = field(default_factory=dict[str, float])
    trusted: bool = True  # the server loses no data, and its clock is not set

    @property
    def clean(self) -> bool:
        """Whether whatever ended must be gone within a second."""
        return self.weather.clean and self.trusted and "cut off" not in self.rates


_ROUGH: Final = Weather(
    slow=0.03, late=0.01, lost=0.02, unanswered=0.02, doubled=0.03, refused=0.01, replica=0.003, reset=0.5,
    push_lost=0.1, push_doubled=0.1,
)  # fmt: skip
_CANCEL: Final = {"cancel": 2.0, "ambush cancel": 2.0}
_PAUSE: Final = {"pause": 0.4, "ambush pause": 0.4}
_CRASH: Final = {"crash": 0.15, "ambush crash": 0.2, "close": 0.05, "ambush close": 0.2}
_SERVER: Final = {"script flush": 0.3, "deafen": 0.3, "revoke": 0.2}

PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile("calm"),
        Profile("cancel", rates=_CANCEL | _SERVER),
        Profile("pause", rates=_PAUSE | _CANCEL),
        Profile("crash", rates=_CRASH | _SERVER),
        Profile("loss", weather=_ROUGH),
        Profile("lossy cancel", weather=_ROUGH, rates=_CANCEL | {"cut off": 0.1}),
        Profile("chaos", weather=_ROUGH, rates=_CANCEL | _PAUSE | _CRASH | _SERVER | {"cut off": 0.1}),
    )
}
# Faults outside the promise. Fences (unless both strike), TTLs, telling and renewal hold; exclusion may not.
RELAXED: Final = {
    profile.name: profile
    for profile in (
        Profile("flush", weather=_ROUGH, rates=_CANCEL | {"flush all": 0.3}, trusted=False),
        Profile("clock", weather=_ROUGH, rates=_CANCEL | {"clock step": 0.3}, trusted=False),
    )
}


class Client:
    """One process with a session and its workers."""

    def __init__(self, run: Run, name: str) -> None:
        random = run.world.random
        self.run = run
        self.name = name
        self.process = Process(
            run.world, name, offset=random.uniform(0, 1e6), rate=1 + random.uniform(-1e-4, 1e-4)
        )
        self.port = SimPort(self.process, run.network)
        self.session = self.port.sink = Session(self.port, None, self._where, 60.0, lambda: self.port)
        self.session.me = name
        _session._sessions.discard(self.session)  # it never was a part of this real process
        monitor, process = run.monitor, self.process
        self.port.sending = lambda key, args: monitor.sending(process, key, args)
        self.workers = [self.process.spawn(self._work(), f"w{i}") for i in range(random.choice((1, 2, 2, 3)))]
        self.closing: Task | None = None

    def _where(self) -> str:
        return current(self.run.world).name

    async def _sleep(self, seconds: float) -> None:
        await self.port.wait(SimSignal(), self.port.now() + seconds)

    async def _work(self) -> None:
        random = self.run.world.random
        while not self.run.over and not self.session.core.closed:
            try:
                await self._sleep(random.expovariate(1 / 0.1))
                await self._section(random.choice(self.run.locks))
            except Cancelled:
                self.run.counts["cancellation came through"] += 1

    async def _section(self, primitive: Primitive) -> None:
        random, port, core = self.run.world.random, self.port, self.session.core
        task, pauses = current(self.run.world), self.process.pauses
        task.subject = None
        ttl = random.choice((0.25, 0.5, 1.0, 2.0, 2.0, 5.0, 5.0))
        timeout = random.choice((None, None, 0, random.uniform(0.01, 0.3), random.uniform(0.1, 3.0)))
        renews = random.random() < 0.7
        max_hold = random.uniform(0.1, 3.0) if random.random() < 0.15 else None
        started, got = port.now(), False
        try:
            lease = await core.acquire(
                primitive, self._hold, ttl=ttl, timeout=timeout, renews=renews, max_hold=max_hold
            )
            got = True
        except AcquireTimeout:
            self.run.counts["acquire timed out"] += 1
            return
        except Unavailable:
            self.run.counts["acquire unavailable"] += 1
            return
        except LeaseLost:
            self.run.counts["acquire revoked"] += 1
            return
        except ConfigError:
            if not core.closed:
                raise
            return
        finally:
            self.run.monitor.ended(task, with_lease=got)
            bound = (IO_TIMEOUT if timeout == 0 else timeout + COURTESY if timeout else float("inf")) + SLACK
            took = port.now() - started
            if took > bound and pauses == self.process.pauses:
                self.run.monitor.violated(4, f"acquire(timeout={timeout}) took {took:.3f} s")
        if random.random() < 0.04:
            self.run.counts["lease dropped"] += 1
            return
        error: BaseException | None = None
        try:
            await self._hold_it(lease, random.expovariate(1 / 0.15) if random.random() < 0.85 else ttl * 1.5)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._end(lease, error)

    def _hold(self, grant: Grant) -> BaseLease:
        lease = BaseLease(self.session, grant, self.run.monitor.told)
        self.run.monitor.leased(self.process, grant)
        return lease

    async def _hold_it(self, lease: BaseLease, seconds: float) -> None:
        random, monitor, world = self.run.world.random, self.run.monitor, self.run.world
        until = self.port.now() + seconds
        while self.port.now() < until:
            try:
                lease.ensure()
            except LeaseLost:
                self.run.counts["ensure raised"] += 1
                if random.random() < 0.5:
                    return
            else:
                grant = lease._grant
                monitor.wrote(grant, sure=True)
                world.at(world.now + self.run.network.trip(), lambda grant=grant: monitor.wrote(grant, sure=False))  # type: ignore[misc]
            if random.random() < 0.05:
                try:
                    await self.session.extend(lease._grant, random.uniform(0.1, 6.0))
                    self.run.counts["extended"] += 1
                except (LeaseLost, Unavailable):
                    self.run.counts["extend failed"] += 1
                except ConfigError:
                    if not self.session.core.closed:
                        raise
            await self._sleep(min(random.expovariate(1 / 0.1), until - self.port.now() + 0.001))

    async def _end(self, lease: BaseLease, error: BaseException | None) -> None:
        core, grant = self.session.core, lease._grant
        try:
            if error is None and self.run.world.random.random() < 0.3:
                if not await core.release(grant):
                    self.run.counts["release came too late"] += 1
            else:
                await core.leave(grant, error)
        except LeaseLost:
            self.run.counts["leave raised LeaseLost"] += 1
        except Unavailable:
            self.run.counts["release unavailable"] += 1
        except ConfigError:
            if not core.closed:
                raise

    def close(self) -> None:
        """End it as a program does, releasing all."""
        if self.closing is None and self.process.alive:
            self.closing = self.process.spawn(self._close(), "closer")

    async def _close(self) -> None:
        pauses = self.process.pauses
        await self.session.close()
        await self._sleep(0.1)
        if pauses == self.process.pauses:
            self.run.monitor.closed(self.process)


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
        self.generation = 0

    def _lock(self, name: str, lua: Callable[[str], str]) -> Primitive:
        primitive = lock(name, "lock:")
        source = lua(primitive.script.source)
        if source != primitive.script.source:
            primitive = primitive._replace(script=primitive.script._replace(source=source, sha=sha1(source)))
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
            self.world.at(self.world.now + self.world.random.expovariate(sum(self.profile.rates.values())), self._strike)

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
        self.graves = [*getattr(self, "graves", []), client]
        self.generation += 1
        index = self.clients.index(client)
        self.clients[index] = Client(self, f"{client.name.partition('.')[0]}.{self.generation}")

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


def sha1(text: str) -> str:
    """The name of a script."""
    import hashlib  # noqa: PLC0415

    return hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 (Redis names them so)


__all__ = ["PROFILES", "RELAXED", "LockError", "Profile", "Run"]
_unused: Any = LockError
