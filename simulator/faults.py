"""Faults that strike from outside: cancellations, pauses, crashes, closings, and the faults of servers.

Theory. The run draws all strikes before it begins: for each one the time, the kind, and numbers that choose the victim
at that time. So no strike depends on another one, and a plan can leave out each of them.

A *scheduled* cancellation, pause, crash or close sets a trap. The trap springs at one of the next awaits of its victim:
before the victim sends, when the victim has parked, when it is about to wake, or in the moment in which the server
hands it what it waits for (see coroutines.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock.errors import LockError

from . import later
from .clients import CLOSER
from .coroutines import Task, Trap
from .coverage import OF_A_PROCESS
from .invariants.attempts import WORKERS
from .outage_kinds import KINDS, MAX_LAG
from .outages import Outages
from .sim_pool import IO_TIMEOUT
from .strikes import strikes

if TYPE_CHECKING:
    from collections.abc import Callable

    from .parts import Client, Run
    from .server import Server
    from .strikes import Strike
    from .subjects import ResourceModel

MAX_CLIENTS: Final = 6  # with so many clients, the simulator restores no further client twice


class Faults:
    """The faults of one run."""

    def __init__(self, run: Run, until: float) -> None:
        self.run = run
        self._until = until
        self._cut_until = self._full_until = 0.0
        self.outages = [Outages(run, network) for network in run.networks]
        run.monitor.server_state.on_grant = self._granted
        for strike in strikes(run.world.chance, run.profile, until):
            run.world.at(strike.when, lambda strike=strike: self._strike(strike))  # type: ignore[misc]

    def _granted(self) -> None:
        for each in self.outages:
            each.granted()

    def end(self) -> None:
        """End the faults, since the quiet phase begins."""
        for network in self.run.networks:
            network.cut_off = network.group.primary.server.full = False
            network.one_way.clear()
        for client in self.run.clients:
            for task in client.process.tasks:
                task.traps.clear()

    def _strike(self, strike: Strike) -> None:
        run = self.run
        client = run.clients[int(strike.client * len(run.clients))]
        worker = client.workers[int(strike.victim * len(client.workers))]
        kind = strike.kind.removeprefix("scheduled ")
        # A background task of a session is never cancelled, and no server grants it anything.
        victim = worker if kind == "cancel" or strike.point == "handover" else self._choose_task(client, strike)
        if not run.record.happens(
            run.world.now, strike.kind, strike.name, self._describe(strike, client, worker, victim)
        ):
            return
        actions: dict[str, Callable[[], None]] = {
            "cancel": lambda: self._cancel(worker),
            "pause": lambda: self._pause(client, strike),
            "crash": lambda: self.crash(client, strike),
            "close": lambda: self._close(client, strike),
            "snapshot": lambda: self._snapshot(strike),
        }
        if kind != strike.kind:
            self._schedule(victim, strike, actions[kind])
        elif kind in actions:
            if kind != "snapshot":  # which chooses a victim of its own
                run.record.meets(kind, client.process)
            actions[kind]()
        else:
            run.record.meets(kind, client.process if kind in OF_A_PROCESS else None)
            self._server(strike, client)

    def _choose_task(self, client: Client, strike: Strike) -> Task:
        """Choose a worker, a background task of the session, or the closer if there is one."""
        others = [task for task in client.process.tasks if task.label.startswith((WORKERS, CLOSER)) and not task.ended]
        victims = [*client.workers, *others]
        return victims[int(strike.spare * len(victims))]

    def _schedule(self, victim: Task, strike: Strike, action: Callable[[], None]) -> None:
        def springs() -> None:
            self.run.record.counts[f"{strike.kind} struck at {strike.point}"] += 1
            self.run.trace.note("%s strikes at %s: %s", strike.name, strike.point, victim.name)
            self.run.record.meets(strike.kind.removeprefix("scheduled "), victim.process)
            action()

        at_handover = strike.point == "handover"
        victim.traps[strike.point] = Trap(0 if at_handover else strike.skips, strike.coin and not at_handover, springs)

    def _describe(self, strike: Strike, client: Client, worker: Task, victim: Task) -> str:
        """Describe the victim of a strike for people."""
        lasts = f" for {strike.seconds:.3g} s"
        whom = {
            "cancel": worker.name,
            "pause": client.name + lasts,
            "crash": client.name,
            "close": client.name,
            "break subscription": client.name,
            "revoke": f"{self._resource(strike).name} by {client.name}",
            "force": f"{self._resource(strike).name} by {client.name}",
            "cut off": lasts.strip(),
            "out of memory": lasts.strip(),
            "one way": f"{client.name} {'sends' if strike.coin else 'hears'} nothing" + lasts,
        }
        if strike.kind.startswith("scheduled"):
            return f"{victim.name} at {strike.point}" + lasts * (strike.kind == "scheduled pause")
        return whom.get(strike.kind, "")

    def _resource(self, strike: Strike) -> ResourceModel:
        resources: list[ResourceModel] = self.run.subject.resources
        return resources[int(strike.resource * len(resources))]

    @staticmethod
    def _cancel(worker: Task) -> None:
        if worker.in_section:
            worker.cancel()

    # Processes

    def crash(self, client: Client, strike: Strike) -> None:
        """End a process at once; another process replaces it."""
        if not client.process.alive:
            return
        client.process.alive = False
        self.run.trace.note("%s is dead", client.name)
        if strike.spare < 0.7:  # else its host is gone, so the server does not notice the crash
            for server in client.servers:
                self.run.world.at(self.run.world.now + 0.001 * strike.spare, server.pool.end_subscription)
        self.run.replace(client, strike.number)

    def _snapshot(self, strike: Strike) -> None:
        """Freeze a client that holds nothing and waits for nothing, and restore two clients from its snapshot."""
        idle = [client for client in self.run.clients if client.process.awake and client.idle]
        if not idle or len(self.run.clients) == MAX_CLIENTS:
            return
        client = idle[int(strike.spare * len(idle))]
        self.run.record.meets("snapshot", client.process)
        self.run.record.counts["restored twice"] += 1
        client.process.alive = False
        self.run.trace.note("%s is frozen, and two processes are restored from its snapshot", client.name)
        if strike.victim < 0.7:  # else the server keeps its connections open for a while, without a reader
            for server in client.servers:
                self.run.world.at(self.run.world.now + 0.001 * strike.victim, server.pool.end_subscription)
        self.run.restore_twice(client, strike.number)

    def _pause(self, client: Client, strike: Strike) -> None:
        """Pause a client until the end of the fault phase at most, even if the trap springs late."""
        client.process.pause(min(strike.seconds, max(0.0, self._until - self.run.world.now)))

    def _close(self, client: Client, strike: Strike) -> None:
        client.close()
        if strike.coin and client.closing is not None:  # a further fault strikes the closing task
            stops = self._pause if strike.victim < 0.5 else self.crash
            client.closing.traps[strike.point] = Trap(0, True, lambda: stops(client, strike))
        self.run.world.at(self.run.world.now + 2.0, lambda: self.crash(client, strike))

    # The server, and the way to it

    def _server(self, strike: Strike, client: Client) -> None:
        run, world = self.run, self.run.world
        number = int(strike.resource * len(run.networks))
        network = run.networks[number]
        match strike.kind:
            case kind if kind in KINDS:
                for struck in range(number, number + self._struck(strike)):
                    self.outages[struck % len(self.outages)].strike(strike)
            case "one way":
                way = client.process.base, strike.coin
                network.one_way[way] = max(network.one_way.get(way, 0.0), world.now + min(strike.seconds, 2 * MAX_LAG))
            case "break subscription":
                noticed_after = 0.001 if strike.spare < 0.5 else (strike.spare - 0.5) * 2 * IO_TIMEOUT
                client.servers[number].pool.break_subscription(noticed_after)
            case "revoke" | "force":
                client.process.spawn(self._revoke(strike, client), f"person{strike.number}")
            case "cut off":
                network.cut_off, self._cut_until = True, max(self._cut_until, world.now + strike.seconds)
                world.at(self._cut_until, self._end_what_is_over)
            case "out of memory":
                network.group.primary.server.full = True
                self._full_until = max(self._full_until, world.now + strike.seconds)
                world.at(self._full_until, self._end_what_is_over)
            case _:
                self._alter(network.group.primary.server, strike)

    def _struck(self, strike: Strike) -> int:
        """Return how many servers the fault strikes at once: one, a majority, or all."""
        if strike.breadth >= self.run.profile.together:
            return 1
        number = len(self.outages)
        return number if strike.breadth < self.run.profile.together / 3 else number // 2 + 1

    def _alter(self, server: Server, strike: Strike) -> None:
        """Change the scripts, the data or the clock of a server."""
        match strike.kind:
            case "script flush":
                server.known_scripts.clear()
            case "flush all":
                server.data.clear()
                server.expires.clear()
            case "later version":
                for network in self.run.networks:
                    later.add(network.group.primary.server.data)
            case "clock step":
                server.skew += (1 if strike.victim < 0.5 else -1) * 10 * strike.seconds
            case _:
                raise AssertionError(strike.kind)

    def _end_what_is_over(self) -> None:
        now = self.run.world.now
        for network in self.run.networks:
            network.cut_off &= now < self._cut_until
            network.group.primary.server.full &= now < self._full_until

    async def _revoke(self, strike: Strike, client: Client) -> None:
        subject = self.run.subject
        try:
            done = await subject.revoke(client.locks, self._resource(strike), force=strike.kind == "force")
        except LockError:
            done = False
        self.run.record.counts[f"{strike.kind}: done" if done else f"{strike.kind}: nothing to do"] += 1
