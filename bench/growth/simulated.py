"""What the simulator counts: clients on a virtual clock, with the real algorithm and the real Lua, and no machine.

So the counts depend on no processor: they say which messages the protocol sends, not what these cost.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.primitives.lock import lock_resource
from simulator.profiles import Profile
from simulator.scenario import Run
from simulator.simulation import _isolated, _tear_down
from simulator.subjects.lock import LockModel, LockSubject

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from growth.model import Load
    from simulator.workers import Worker

SETTLE = 5.0  # virtual seconds after which all clients wait, and are subscribed


def count(crowd: Load, seconds: float, seed: int = 1) -> dict[str, float]:
    """Script calls a second, by verb, of these clients."""
    counted: Counter[str] = Counter()

    class Turn(NamedTuple):
        async def play(self, worker: Worker) -> None:
            number = int(worker.task.process.name.removeprefix("c"))
            lock = worker.locks.lock(f"n{number % crowd.names}", ttl=crowd.ttl, fair=True)
            while not run.ending:
                async with lock:
                    await run.clients[number].server.runtime.sleep_until(worker.task.process.clock() + crowd.hold)

    class Subject(LockSubject):
        def __init__(self, _random: Random) -> None:
            self.resources = [LockModel(lock_resource(f"n{i}", "lock:")) for i in range(crowd.names)]

        def turn(self, _random: Random) -> Any:
            return Turn()

    def executed(_host: object, _sender: str, _keys: Sequence[bytes], args: Sequence[bytes], _reply: object) -> None:
        counted[args[0].decode()] += 1

    profile = Profile("growth", clients=(crowd.clients,), workers=(1,), fault_phase=SETTLE + seconds)
    with _isolated() as begin:
        run = Run(seed, profile, Subject, str, None, begin)
        # The rules are checked elsewhere; here each check would look at all.
        run.world.after_step = lambda _process: None
        for network in run.networks:
            network.executed = executed
        run.world.run(SETTLE)
        counted.clear()
        run.world.run(SETTLE + seconds)
        run.ending = True
        _tear_down(run)
    return {verb: number / seconds for verb, number in counted.items()}
