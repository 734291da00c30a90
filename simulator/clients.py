"""Clients: processes with a session, through which their workers use the public API for asyncio."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Final

from interlock import aio
from interlock._quarantine.member_history import MemberHistory
from interlock._quarantine.server_history import ServerHistory
from interlock._quarantine.voter import voter_key
from interlock._servers.quorum import QuorumServer
from interlock._session.open_sessions import open_sessions
from interlock._session.session import Session

from .chance import CLIENT, FOREIGN, GAP, SECTION
from .coroutines import Cancelled, Process, Task
from .plan import Section
from .server_group import ServerGroup
from .sim_runtime import SimRuntime, current
from .sim_server import SimServer
from .workers import Worker

if TYPE_CHECKING:
    from interlock._protocol.server import Server

    from . import parts

CLOSER: Final = "closer"  # the coroutine that closes a session


class SimInterlock(aio.Interlock):
    """The API over the session of a simulated process."""

    def __init__(self, session: Session) -> None:
        super().__init__("redis://nowhere")
        self._simulated = session

    @property
    def _session(self) -> Session:
        return self._simulated


class Client:
    """One process with a session and its workers."""

    def __init__(self, run: parts.Run, name: str, original: parts.Client | None = None) -> None:
        """Start a new process, or restore one from a snapshot of `original`, with the same data."""
        self.run = run
        self.name = name
        self.process = process = Process(run.world, name)
        random = run.world.chance.stream(CLIENT, process.number)
        process.offset, process.rate = random.uniform(0, 1e6), 1 + random.uniform(-1e-4, 1e-4)
        if original is not None:
            process.offset, process.rate = original.process.offset, original.process.rate
        max_ttl = run.profile.max_ttl_of(process.number)
        history = MemberHistory if len(run.networks) > 1 else ServerHistory
        runtime = SimRuntime(process)
        self.servers = [
            SimServer(process, each, history(max_ttl), runtime, run.profile.isolation_grace) for each in run.networks
        ]
        quorum = QuorumServer(self.servers, runtime, ServerGroup.display_url, voter_key("lock:"))
        self.server: Server = quorum if len(self.servers) > 1 else self.servers[0]
        run.monitor.server_state.pools[name] = self.servers[0].pool
        run.world.acting = process
        self.session = self.server.push_handler = Session(
            self.server, None, self._task_label, max_ttl, lambda: self.server, registry=False
        )
        self.session.core.process_id = name
        open_sessions.discard(self.session)  # keep it out of the sessions of the real process
        self.locks = SimInterlock(self.session)
        # About half of the clients leave their sections without waiting for the replies to their releases. No client
        # does so in a quorum, nor under "snapshot", where it would hide the one planted bug that nearly no seed finds.
        waits = len(self.servers) > 1 or run.profile.name == "snapshot"
        self.locks.confirm = waits or process.number % 2 == 0
        self.known_limits: dict[str, Any] = {}  # the limits of semaphores, as its workers know them
        if original is not None:
            self._restore(original)
        attempts = run.monitor.attempts
        attempts.sessions[process] = self.session
        run.monitor.claims.watch(process, self.session)
        for server in self.servers:
            server.on_call = attempts.check_renewals
            server.pool.on_send = lambda keys, args: attempts.note_request(process, keys, args)
            server.pool.on_push = self._note_push
            server.pool.on_subscribed = lambda: attempts.note_subscription(process)
        self.workers = [process.spawn(self._work(), f"w{i}") for i in range(random.choice(run.profile.workers))]
        self.closing: Task | None = None

    def _note_push(self, payload: bytes) -> None:
        verb = payload.partition(b" ")[0].decode()
        self.run.record.meets(f"push {verb}", self.process)
        self.run.monitor.beliefs.note_push(self.process, payload)

    def start_foreign_code(self, beside: Task, lease: Any = None) -> None:
        """Perhaps start code that the worker does not know of (`Profile.foreign`): it takes a turn, or uses `lease`."""
        run, number = self.run, self.run.world.chance.number
        if not run.profile.foreign or run.ending or self.session.core.requests.closed:
            return
        key = beside.next_key(FOREIGN)
        if number(*key, 0) >= run.profile.foreign:
            return
        uses, delay = lease is not None and number(*key, 1) < 0.5, -0.02 * math.log(1 - number(*key, 2))
        name = f"{beside.label}#{beside.era}-foreign{key[-1]}"
        self.process.spawn(self._foreign_code(lease if uses else None, delay), name)

    async def _foreign_code(self, lease: Any, delay: float) -> None:
        run, task = self.run, current(self.run.world)
        worker = Worker(self, task)
        worker.random = run.world.chance.stream(task.number, SECTION)
        await self.server.runtime.sleep_until(self.server.runtime.now() + delay)
        run.record.counts["foreign code"] += 1
        run.record.meets("foreign code", self.process)
        task.enter(1)
        try:
            if lease is not None:
                await worker.use_beside(lease)
            else:
                await run.subject.turn(worker.random).play(worker)
        finally:
            task.leave()

    def _restore(self, original: parts.Client) -> None:
        mine, copied = self.session, original.session
        mine.core.process_id, mine.channel = copied.core.process_id, copied.channel
        self.known_limits = copy.copy(original.known_limits)
        for server, other in zip(self.servers, original.servers, strict=True):
            vars(server.history).update(vars(copy.deepcopy(other.history)))
            if other.pool.listens:
                server.pool.resubscribe()

    @property
    def idle(self) -> bool:
        """Whether the client holds nothing, waits for nothing, and has nothing to give back."""
        session = self.session
        return not (
            any(task.in_section for task in self.process.tasks)
            or session.book.held() or session.ends.dropped or session.waiters.registered
            or session.core.cohorts.by_key
            or session.owed or session.undo.jobs or session.unread_releases.left
            or session.core.requests.closed
        )  # fmt: skip

    def _task_label(self, _: object) -> tuple[str, None]:
        return current(self.run.world).label, None

    async def _work(self) -> None:
        run, world, task = self.run, self.run.world, current(self.run.world)
        planned, number = run.record.planned(task.name), 0
        worker = Worker(self, task)
        while not self.session.core.requests.closed:
            if planned is None:
                number += 1
                clock = self.server.runtime.now() - run.gap * math.log(
                    1 - world.chance.number(task.number, GAP, number)
                )
            elif section := next(planned, None):
                number, clock = section.number, section.clock
            else:
                return
            await self.server.runtime.sleep_until(clock)
            if run.ending:
                return
            worker.random = world.chance.stream(task.number, SECTION, number)
            turn = run.subject.turn(worker.random)
            run.record.begins(Section(world.now, task.name, number, clock, str(turn)))
            task.enter(number)
            try:
                await turn.play(worker)
            except Cancelled:
                run.record.counts["turn cancelled"] += 1
            task.cancels = 0
            task.leave()

    def close(self) -> None:
        """Close the session as a program does, and release all leases."""
        if self.closing is None and self.process.alive:
            self.closing = self.process.spawn(self._close(), CLOSER)

    async def _close(self) -> None:
        pauses = self.process.pauses
        await self.session.close()
        await self.server.runtime.sleep_until(self.server.runtime.now() + 0.1)
        if pauses == self.process.pauses:
            self.run.monitor.attempts.note_close(self.process)
