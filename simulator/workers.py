"""Workers: coroutines that use resources as a program does, and release them in every way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

from interlock._client.waiting import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from interlock._protocol.timing import ANSWER_COUNTS_FOR, TRY_FOR, UNDO_GRACE
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, LockError, Unavailable

from .chance import MESSAGE
from .network import Journey
from .sim_pool import IO_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from interlock import aio

    from .coroutines import Task
    from .parts import Client
    from .usage import Usage

T = TypeVar("T")
SLACK: Final = 0.1  # seconds that code may take beyond its timeout


class Worker:
    """What a turn uses to call the API: counts each exception that the API may raise, and passes others on."""

    def __init__(self, client: Client, task: Task) -> None:
        self.client = client
        self.task = task
        self.run = client.run
        self.session = client.session
        self.locks: aio.Interlock = client.locks
        self.known_limits = client.known_limits
        self.now = client.server.runtime.now
        self.random: Random  # of the turn

    def options(self, usage: Usage) -> dict[str, Any]:
        """Return the options of a synchronizer for this use."""

        def on_lost(lease: Any) -> None:
            self.run.monitor.leases.note_loss(lease)
            self.client.start_foreign_code(self.task)

        return {
            "ttl": min(usage.ttl, self.session.max_ttl), "timeout": usage.timeout, "renew": usage.renews,
            "max_hold": usage.max_hold,
            "on_lost": on_lost,
        }  # fmt: skip

    def count(self, what: str) -> None:
        """Count an event for the summary."""
        self.run.record.counts[what] += 1

    def violated(self, rule: int, text: str) -> None:
        """Report the break of a rule by this worker."""
        self.run.trace.violated(rule, f"{self.task.name}: {text}")

    async def sleep(self, until: float) -> None:
        """Sleep until this time of the process's own clock."""
        await self.client.server.runtime.sleep_until(until)

    async def take(self, acquire: Callable[[], Awaitable[T]], usage: Usage) -> T | None:
        """Acquire a lease, or return None if the API raised an exception that it may raise.

        Passes ConfigError on, unless the session is closed, or two addresses of a quorum lead to one server.
        """
        lease = await self.call(acquire, usage.timeout, self._tokens)
        for grant in self.run.subject.grants(lease) if lease is not None else ():
            self.run.monitor.leases.note_lease(self.client.process, grant)
        return lease

    def _tokens(self, lease: Any) -> list[str]:
        return [grant.token for grant in self.run.subject.grants(lease)]

    async def call(
        self,
        call: Callable[[], Awaitable[T]],
        timeout: float | None,
        tokens: Callable[[T], list[str]] = lambda _: [],
        what: str = "acquire",
        undo_graces: int = 1,
    ) -> T | None:
        """Return the result of a call that may wait for `timeout` seconds; None if it raised an exception that it may.

        `tokens` maps the result to the attempts that became leases: no other attempt of the call may leave anything. A
        call that timed out may wait for so many `undo_graces` on top.
        """
        task, pauses, started = self.task, self.client.process.pauses, self.now()
        task.attempts, kept = [], list[bytes]()
        try:
            result = await call()
            kept = [token.encode() for token in tokens(result)]
        except AcquireTimeout:
            self.count(f"{what} timed out")
            if pauses == self.client.process.pauses:
                self._check_refusal(what, undo_graces)
        except Unavailable:
            self.count(f"{what} unavailable")
        except LeaseLost:
            self.count(f"{what} revoked")
        except ConfigError as error:
            self._check_config_error(what, error)
        except LockError as error:
            self.count(f"{what} failed: {type(error).__name__}")
        else:
            return result
        finally:
            self.run.monitor.attempts.note_end(task, kept)
            if pauses == self.client.process.pauses:
                self._check_duration(what, timeout, undo_graces, self.now() - started)
        return None

    def _check_duration(self, what: str, timeout: float | None, undo_graces: int, took: float) -> None:
        """Check S4: the timeout bounds the call."""
        bound = math.inf if timeout is None else timeout + undo_graces * UNDO_GRACE
        if timeout == 0:
            bound += TRY_FOR if what in {"acquire", "wait"} else IO_TIMEOUT
        if took > bound + SLACK:
            self.run.trace.violated(4, f"{what}(timeout={timeout}) took {took:.3f} s")

    def _check_refusal(self, what: str, undo_graces: int) -> None:
        """Check S4: a call raises AcquireTimeout only if a server has answered lately."""
        # The longest silence begins before the first heartbeat is due. A round for other waiters has no reply then, so
        # this heartbeat waits for the end of that round. In the end the undo takes its time.
        longest = HEARTBEAT_INTERVAL + HEARTBEAT_TIMEOUT + ANSWER_COUNTS_FOR + undo_graces * UNDO_GRACE + SLACK
        now, answered_at = self.client.process.world.now, max(server.pool.answered_at for server in self.client.servers)
        lately_paused = now - self.client.process.paused_until < longest  # so was the caller for which this one waits
        if now - answered_at > longest and not lately_paused and not self._own_section():
            self.violated(4, f"{what} timed out, and no server has answered for {now - answered_at:.3f} s")

    def _own_section(self) -> bool:
        """Whether this process itself holds a lock, and so needs no answer to know that it is held."""
        return any(cohort.section is not None for cohort in self.session.core.cohorts.by_key.values())

    async def hold(self, lease: Any, usage: Usage, inside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Hold the lease for a while, run `inside`, and release the lease."""
        if usage.drops:
            self.count("lease dropped")
            self.client.start_foreign_code(self.task)  # as a finalizer may
            return
        error: BaseException | None = None
        self.client.start_foreign_code(self.task, lease)
        try:
            await self.work_under(lease, usage.hold_time)
            if inside is not None:
                await inside()
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await self.let_go(lease, exits=usage.exits, error=error)
            finally:
                error = None  # else the traceback would keep this frame alive, and the frame the lease

    async def work_under(self, lease: Any, seconds: float) -> None:
        """Work under the lease: call ensure(), write, extend, execute."""
        random, until = self.random, self.now() + seconds
        while self.now() < until:
            try:
                lease.ensure()
            except LeaseLost:
                self.count("ensure raised")
                if random.random() < 0.5:
                    return
            else:
                for grant in self.run.subject.grants(lease):
                    self.run.monitor.beliefs.check_ensured(self.client.process, grant)
                    self.run.monitor.leases.check_write(grant, sure=True)
            choice = random.random()
            if choice < 0.05:
                await self._extend(lease, min(random.uniform(0.1, 6.0), self.session.max_ttl))
            elif choice < 0.15 and len(self.run.networks) == 1:
                await self._execute(lease, with_keys=choice < 0.1)
            elif choice > 0.7:
                self._write_late(lease)
            await self.sleep(self.now() + min(random.expovariate(1 / 0.1), until - self.now() + 0.001))

    def _write_late(self, lease: Any) -> None:
        """Write to the protected data over a network that delays the write."""
        world, leases, grant = self.run.world, self.run.monitor.leases, self.run.subject.grants(lease)[0]
        trip = self.run.networks[0].trip(Journey(self.task, MESSAGE))
        world.at(world.now + trip, lambda: leases.check_write(grant, sure=False))

    async def use_beside(self, lease: Any) -> None:
        """Use a lease of another task once, as a second thread may."""
        self.count("used by a second task")
        if self.random.random() < 0.5 and len(self.run.networks) == 1:
            await self._execute(lease, with_keys=True)
        else:
            await self._extend(lease, min(self.random.uniform(0.1, 2.0), self.session.max_ttl))

    def _check_config_error(self, what: str, error: ConfigError) -> None:
        """Raise the error again, unless the session is closed, or an address of a quorum leads to another server."""
        if "are the same server" in str(error):
            self.count(f"{what} refused: the quorum has a server twice")
        elif not self.session.core.requests.closed:
            raise error

    async def _extend(self, lease: Any, seconds: float) -> None:
        attempts, token = self.run.monitor.attempts, self.run.subject.leases(lease)[0].token.encode()
        attempts.unanswered[token] += 1
        is_answered = True
        try:
            await lease.extend(seconds)
            self.count("extended")
        except (LeaseLost, Unavailable) as error:
            is_answered = error.__cause__ is None
            self.count("extend failed")
        except ConfigError:
            if not self.session.core.requests.closed:
                raise
        except BaseException:  # cancelled: the request may be on its way
            is_answered = False
            raise
        finally:
            attempts.unanswered[token] -= is_answered

    async def _execute(self, lease: Any, *, with_keys: bool) -> None:
        self.run.execute_count += 1
        lease = self.run.subject.leases(lease)[0]
        operation, key = f"{lease.token}:{self.run.execute_count}", f"data:{lease.name}"
        attempts, token = self.run.monitor.attempts, lease.token.encode()
        note_outcome = attempts.note_outcome
        attempts.unanswered[token] += 1
        is_answered = True
        try:
            await lease.execute("SET", key, operation, "PX", 60000, keys=[key] if with_keys else None)
        except LeaseLost:
            self.count("execute refused")
            note_outcome(operation, ran=False)
        except Unavailable as error:
            self.count("execute unavailable")
            if "it may have run" not in str(error):
                note_outcome(operation, ran=False)
            else:
                is_answered = error.__cause__ is None  # by an error, after which the server does nothing more
        except ConfigError:
            if not self.session.core.requests.closed:
                raise
        except BaseException:  # cancelled: the command may be on its way
            is_answered = operation not in attempts.operations
            raise
        else:
            self.count("executed")
            note_outcome(operation, ran=True)
        finally:
            attempts.unanswered[token] -= is_answered

    async def let_go(self, lease: Any, *, exits: bool, error: BaseException | None = None) -> None:
        """Release the lease: as a `with` does (`exits`), or by release()."""
        self.run.record.meets("section ends", self.client.process)
        try:
            if error is not None or exits:
                await lease.__aexit__(type(error) if error else None, error, None)
            elif not await lease.release():
                self.count("release came too late")
        except LeaseLost:
            self.count("with raised LeaseLost")
        except Unavailable:
            self.count("release unavailable")
        except ConfigError:
            if not self.session.core.requests.closed:
                raise
