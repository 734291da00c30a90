"""The election: one candidate leads, and observers watch the leader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import LockError
from interlock.primitives.election import election_resource
from simulator.usage import Usage, draw_usage

from .lock import LockModel
from .subject import ResourceModel, Subject, Turn

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from random import Random

    from interlock import aio
    from simulator.coroutines import Process
    from simulator.server import Server

    from .seen import Attempt, Worker


class Observer:
    """A process that observes, and the leader that it saw last: (token, term), or None if nobody leads."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.leader: object = "nothing yet"
        self.term = 0


class ElectionModel(LockModel):
    """A lock, and the observers of its holder."""

    def __init__(self, name: str) -> None:
        super().__init__(election_resource(name, "lock:"))
        self.observers: dict[int, Observer] = {}  # the current observers, by number
        self.observer_count = 0
        self.lossy = False  # the server lost data: terms may be lost, and an earlier leader may appear again

    def note_data_loss(self, _server: Server) -> None:
        """See ResourceModel."""
        self.lossy = True

    def news_due(self, server: Server, _queued: Mapping[bytes, Attempt]) -> dict[Hashable, str]:
        """Return each observer that saw another leader than the current one."""
        if not self.observers:
            return {}
        holders = self.read(server).holders
        truth = next(((token.decode(), share.fence) for token, share in holders.items()), None)
        return {
            (number, truth): f"{observer.process.name} observes the leader {observer.leader}, and the leader is {truth}"
            for number, observer in self.observers.items()
            if observer.process.awake and observer.leader != truth
        }


class Campaigning(NamedTuple):
    """Campaign, lead, and perhaps resign."""

    usage: Usage
    resigns: bool

    def __str__(self) -> str:
        return self.usage.describe("election") + ", having resigned" * self.resigns

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        election = worker.locks.election(self.usage.resource.name, **worker.options(self.usage))
        lease = await worker.take(election.campaign, self.usage)
        if lease is None:
            return
        worker.count("leader elected")

        async def resign() -> None:
            if await worker.call(election.resign, None, what="resign"):
                worker.count("leader resigned")

        await worker.hold(lease, self.usage, resign if self.resigns else None)


class Observing(NamedTuple):
    """Ask for the leader, then observe changes of the leader for a while."""

    resource: ElectionModel
    seconds: float

    def __str__(self) -> str:
        return f"election({self.resource.name!r}).observe() for {self.seconds:.3g} s"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        election, resource = worker.locks.election(self.resource.name), self.resource
        await worker.call(election.leader, 0, what="leader")
        resource.observer_count += 1
        number, observer = resource.observer_count, Observer(worker.client.process)
        resource.observers[number] = observer
        task = worker.client.process.spawn(self._watch(worker, election, number, observer), f"{worker.task.label}.eye")
        task.enter(worker.task.era)
        try:
            await worker.sleep(worker.now() + self.seconds)
        finally:
            task.cancel()
            resource.observers.pop(number, None)

    def _terms_must_grow(self, worker: Worker) -> bool:
        """Whether an observer must see growing terms. Several servers also report terms without an agreement."""
        return worker.run.profile.trusted and not self.resource.lossy and len(worker.run.networks) == 1

    async def _watch(self, worker: Worker, election: aio.Election, number: int, observer: Observer) -> None:
        resource = self.resource
        try:
            async for leader in election.observe():
                worker.count("change of leader observed")
                seen = (leader.token, leader.term) if leader else None
                worker.run.trace.note("%s observes the leader %s", worker.task.name, seen)
                if seen == observer.leader:
                    worker.violated(12, f"an observer got the leader {seen} twice")
                if leader and leader.term < observer.term and self._terms_must_grow(worker):
                    worker.violated(2, f"an observer got the term {leader.term} after {observer.term}")
                observer.leader, observer.term = seen, leader.term if leader else observer.term
        except LockError as error:
            worker.count(f"observe failed: {type(error).__name__}")
        finally:
            resource.observers.pop(number, None)


class ElectionSubject(Subject):
    """See Interlock.election."""

    kind = "election"

    def new_resource(self, name: str, _random: Random, /) -> ElectionModel:
        """See Subject."""
        return ElectionModel(name)

    def lockable(self, locks: aio.Interlock, resource: ResourceModel) -> aio.Election:
        """See Subject."""
        return locks.election(resource.name)

    def turn(self, random: Random) -> Turn:
        """See Subject."""
        chosen: Any = draw_usage(random, self.resources)
        if random.random() < 0.25:
            return Observing(chosen.resource, random.expovariate(1 / 2.0))
        return Campaigning(chosen, random.random() < 0.3)
