"""Clients: a process with a session, and workers that take locks, hold, write and let go in every way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock import _session
from interlock._core import COURTESY
from interlock._lease import BaseLease
from interlock._session import Session
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, Unavailable

from .network import IO_TIMEOUT, SimPort, SimSignal, current
from .scheduler import Cancelled, Process, Task

if TYPE_CHECKING:
    from interlock._core import Grant, Primitive

    from .scenario import Run

SLACK: Final = 0.1  # seconds that code may take beyond its timeout


class Client:
    """One process with a session and its workers."""

    def __init__(self, run: Run, name: str) -> None:
        random = run.world.random
        self.run = run
        self.name = name
        self.process = Process(run.world, name, offset=random.uniform(0, 1e6), rate=1 + random.uniform(-1e-4, 1e-4))
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
        lease = BaseLease(self.session, grant=grant, on_lost=self.run.monitor.told)
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
