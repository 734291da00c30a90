"""Clients: a process with a session, and workers that take locks, hold, write and let go in every way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from interlock import _session
from interlock._core import COURTESY
from interlock._lease import BaseLease
from interlock._session import Session
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, Unavailable

from .chance import CLIENT, GAP, MESSAGE, SECTION
from .coroutines import Cancelled, Process, Task
from .network import Journey
from .plan import Section
from .port import IO_TIMEOUT, SimPort, SimSignal, current
from .terms import Terms, terms

if TYPE_CHECKING:
    from random import Random

    from interlock._core import Grant

    from .scenario import Run

CLOSER: Final = "closer"  # the coroutine that closes a session
SLACK: Final = 0.1  # seconds that code may take beyond its timeout


class Client:
    """One process with a session and its workers."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name
        self.process = process = Process(run.world, name)
        random = run.world.chance.stream(CLIENT, process.number)
        process.offset, process.rate = random.uniform(0, 1e6), 1 + random.uniform(-1e-4, 1e-4)
        self.port = SimPort(process, run.network)
        run.world.acting = process
        self.session = self.port.sink = Session(self.port, None, self._where, 60.0, lambda: self.port)
        self.session.me = name
        _session._sessions.discard(self.session)  # it never was a part of this real process
        attempts = run.monitor.attempts
        self.port.asked = attempts.asked
        self.port.sending = lambda key, args: attempts.sending(process, key, args)
        self.workers = [process.spawn(self._work(), f"w{i}") for i in range(random.choice((1, 2, 2, 3)))]
        self.closing: Task | None = None

    def _where(self) -> str:
        return current(self.run.world).label

    async def _sleep(self, until: float) -> None:
        await self.port.wait(SimSignal(), until)

    async def _work(self) -> None:
        run, world, task = self.run, self.run.world, current(self.run.world)
        planned, number = run.record.planned(task.name), 0
        while not self.session.core.closed:
            if planned is None:
                number += 1
                gap = 0.1 if world.now < run.storm_ends else 0.3
                clock = self.port.now() - gap * math.log(1 - world.chance.number(task.number, GAP, number))
            elif section := next(planned, None):
                number, clock = section.number, section.clock
            else:
                return
            await self._sleep(clock)
            if run.over:
                return
            random = world.chance.stream(task.number, SECTION, number)
            chosen = terms(random, run.locks)
            run.record.begins(Section(world.now, task.name, number, clock, str(chosen)))
            task.enter(number)
            try:
                await self._section(task, chosen, random)
            except Cancelled:
                run.record.counts["cancellation came through"] += 1
            task.leave()

    async def _section(self, task: Task, chosen: Terms, random: Random) -> None:
        port, core, pauses, counts = self.port, self.session.core, self.process.pauses, self.run.record.counts
        task.subject = None
        timeout, started, got = chosen.timeout, port.now(), False
        try:
            lease = await core.acquire(
                chosen.primitive,
                self._hold,
                ttl=chosen.ttl,
                timeout=timeout,
                renews=chosen.renews,
                max_hold=chosen.max_hold,
            )
            got = True
        except AcquireTimeout:
            counts["acquire timed out"] += 1
            return
        except Unavailable:
            counts["acquire unavailable"] += 1
            return
        except LeaseLost:
            counts["acquire revoked"] += 1
            return
        except ConfigError:
            if not core.closed:
                raise
            return
        finally:
            self.run.monitor.attempts.ended(task, with_lease=got)
            bound = (IO_TIMEOUT if timeout == 0 else timeout + COURTESY if timeout else math.inf) + SLACK
            took = port.now() - started
            if took > bound and pauses == self.process.pauses:
                self.run.story.violated(4, f"acquire(timeout={timeout}) took {took:.3f} s")
        if chosen.drops:
            counts["lease dropped"] += 1
            return
        error: BaseException | None = None
        try:
            await self._hold_it(lease, chosen, random)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._end(lease, chosen, error)

    def _hold(self, grant: Grant) -> BaseLease:
        lease = BaseLease(self.session, grant=grant, on_lost=self.run.monitor.leases.told)
        self.run.monitor.leases.leased(self.process, grant)
        return lease

    async def _hold_it(self, lease: BaseLease, chosen: Terms, random: Random) -> None:
        grant, until = lease._grant, self.port.now() + chosen.seconds
        while self.port.now() < until:
            try:
                lease.ensure()
            except LeaseLost:
                self.run.record.counts["ensure raised"] += 1
                if random.random() < 0.5:
                    return
            else:
                self.run.monitor.leases.wrote(grant, sure=True)
            does = random.random()
            if does < 0.05:
                await self._extend(grant, random.uniform(0.1, 6.0))
            elif does < 0.15:
                await self._execute(grant, given=does < 0.1)
            elif does > 0.7:
                self._write_late(grant)
            await self._sleep(self.port.now() + min(random.expovariate(1 / 0.1), until - self.port.now() + 0.001))

    def _write_late(self, grant: Grant) -> None:
        """To the resource that the lock protects: a write that comes when it comes."""
        world, leases = self.run.world, self.run.monitor.leases
        trip = self.run.network.trip(Journey(current(world), MESSAGE))
        world.at(world.now + trip, lambda: leases.wrote(grant, sure=False))

    async def _extend(self, grant: Grant, seconds: float) -> None:
        try:
            await self.session.extend(grant, seconds)
            self.run.record.counts["extended"] += 1
        except (LeaseLost, Unavailable):
            self.run.record.counts["extend failed"] += 1
        except ConfigError:
            if not self.session.core.closed:
                raise

    async def _execute(self, grant: Grant, *, given: bool) -> None:
        self.run.executes += 1
        operation, key = f"{grant.token}:{self.run.executes}", f"data:{grant.primitive.name}"
        answered, counts = self.run.monitor.attempts.answered, self.run.record.counts
        try:
            await self.session.execute(grant, "SET", (key, operation, "PX", 60000), [key] if given else None)
        except LeaseLost:
            counts["execute refused"] += 1
            answered(operation, ran=False)
        except Unavailable as error:
            counts["execute unavailable"] += 1
            if "it may have run" not in str(error):
                answered(operation, ran=False)
        except ConfigError:
            if not self.session.core.closed:
                raise
        else:
            counts["executed"] += 1
            answered(operation, ran=True)

    async def _end(self, lease: BaseLease, chosen: Terms, error: BaseException | None) -> None:
        core, grant, counts = self.session.core, lease._grant, self.run.record.counts
        try:
            if error is not None or chosen.leaves:
                await core.leave(grant, error)
            elif not await core.release(grant):
                counts["release came too late"] += 1
        except LeaseLost:
            counts["leave raised LeaseLost"] += 1
        except Unavailable:
            counts["release unavailable"] += 1
        except ConfigError:
            if not core.closed:
                raise

    def close(self) -> None:
        """End it as a program does, releasing all."""
        if self.closing is None and self.process.alive:
            self.closing = self.process.spawn(self._close(), CLOSER)

    async def _close(self) -> None:
        pauses = self.process.pauses
        await self.session.close()
        await self._sleep(self.port.now() + 0.1)
        if pauses == self.process.pauses:
            self.run.monitor.attempts.closed(self.process)
