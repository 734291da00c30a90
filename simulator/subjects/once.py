"""The once: work that runs once at a time, once in a while, or once for each key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock.aio import LeaseState, Ran, Skipped
from interlock.primitives.codes import BUSY, GRANTED
from interlock.primitives.once import once_resource

from .lock import LockModel
from .subject import Share, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from interlock import aio
    from simulator.server import Server

    from .seen import Worker


LONGER_THAN_A_RUN: Final = 100.0  # seconds: longer than workers are at work
SKIP_TIME: Final = 0.05  # seconds that a skipped run() may take, if there is no fault


class FailedError(Exception):
    """The work fails."""


class OnceModel(LockModel):
    """A lock, and when the next run may begin: by the releases that the server ran, not by the server's note."""

    release_writes = True

    def __init__(self, of: str, key: str | None, at_least: float, keep: float) -> None:
        super().__init__(once_resource(of, "lock:", key))
        self.of, self.key_of, self.at_least, self.keep = of, key, at_least, keep
        self.succeeded = False  # a run has succeeded, and the server certainly knows
        self.lossy = False  # the server lost data, or another clock counts now
        self._next_run_at = 0.0  # ms on the server's clock
        self._newest_run: tuple[bytes, int] = b"", 0  # the newest run, and when it began, in µs

    def note_data_loss(self, _server: Server) -> None:
        """See ResourceModel. The note of a run may be lost, too: a quarantine protects leases only."""
        self.lossy = True

    def check_reply(
        self, server: Server, args: Sequence[bytes], reply: Any, before: Mapping[bytes, Share]
    ) -> str | None:
        """Check that no run begins before the time that the last run has set."""
        if self.lossy:
            return None
        verb, token, *rest = args
        now, (last, began) = server.micros / 1000, self._newest_run
        if verb == b"acquire" and reply[0] == GRANTED and (token, reply[1]) != self._newest_run:
            self._newest_run = token, reply[1]
            if now < self._next_run_at - 1:
                return f"the next run may begin {self._next_run_at - now:.0f} ms later"
        elif verb == b"acquire" and reply[0] == BUSY and reply[5] != b"0" and now > self._next_run_at + 2:
            return "the server skips it, though the next run might begin"
        elif verb == b"release" and token == last and token in before:
            at_least, keep = map(float, rest[1:])
            revoked = before[token].revoked  # a revoked run counts as a run, but not as a success
            if not (reply[0] or revoked):
                return None
            # The end of a quarantine by hand moves the fence ahead of the clock. Then the server counts from now.
            started = min(began / 1000, now)
            self._next_run_at = max(self._next_run_at, started + at_least, 0 if revoked else now + keep)
        return None


class Running(NamedTuple):
    """Run the work, unless another worker runs it or did: for some seconds, and then succeed or fail."""

    resource: OnceModel
    at_most: float
    seconds: float
    fails: bool

    def __str__(self) -> str:
        key = f", key={self.resource.key_of!r}, keep={self.resource.keep:.3g}" if self.resource.key_of else ""
        limits = f"at_most={self.at_most:.3g}, at_least={self.resource.at_least:.3g}"
        end = ", then fail" * self.fails
        return f"once({self.resource.of!r}, {limits}{key}).run() for {self.seconds:.3g} s{end}"

    async def play(self, worker: Worker) -> None:
        """See Turn."""
        resource, leases = self.resource, list["aio.Lease"]()

        async def work(lease: aio.Lease) -> str:
            leases.append(lease)
            return await self._work(worker, lease)

        of, at_most = resource.of, min(self.at_most, worker.session.max_ttl)
        at_least = min(resource.at_least, at_most)
        if resource.key_of is None:
            once = worker.locks.once(of, at_most=at_most, at_least=at_least)
        else:
            once = worker.locks.once(of, at_most=at_most, at_least=at_least, key=resource.key_of, keep=resource.keep)
        started = worker.now()
        try:
            result = await worker.call(lambda: once.run(work), None, what="run")
        except FailedError:
            worker.count("run failed")
            return
        finally:
            for lease in leases:
                if lease.state is LeaseState.LOST:  # run() reports the loss by ending the work
                    worker.run.monitor.leases.note_loss(lease)
        if isinstance(result, Ran):
            self._check_ran(worker, result, begun=bool(leases))
        elif result is not None:
            self._check_skipped(worker, result, begun=bool(leases), took=worker.now() - started)

    async def _work(self, worker: Worker, lease: aio.Lease) -> str:
        worker.count("run begun")
        worker.run.monitor.leases.note_lease(worker.client.process, lease._grant)
        if self.resource.succeeded:
            worker.violated(12, f"{lease!r} belongs to a run for a key whose run has succeeded")
        await worker.work_under(lease, self.seconds)
        if self.fails:
            raise FailedError
        return lease.token

    def _check_ran(self, worker: Worker, result: Ran[str], *, begun: bool) -> None:
        resource = self.resource
        worker.count("run succeeded")
        if not begun or not result.value.endswith(result.by[-32:]):
            worker.violated(12, f"{result} was not run here")
        # Without faults the server ran the release before this line, so no run may begin for `keep` seconds.
        resource.succeeded |= (
            resource.key_of is not None and worker.run.monitor.server_state.quiet and resource.keep > LONGER_THAN_A_RUN
        )

    @staticmethod
    def _check_skipped(worker: Worker, result: Skipped, *, begun: bool, took: float) -> None:
        worker.count("run skipped")
        if begun or result:
            worker.violated(12, f"{result} was begun")
        started, ended = result.started, result.ended
        if started is not None and ended is not None and ended < started:
            worker.violated(12, f"{result} ended before it began")
        if took > SKIP_TIME and worker.run.monitor.server_state.quiet:
            worker.violated(4, f"{result} took {took:.3f} s")


class OnceSubject(Subject):
    """See Interlock.once."""

    kind = "once"

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.resources = [
            OnceModel("n0", None, 0.0, 1.0),
            OnceModel("n1", None, random.uniform(0.1, 1.0), 1.0),
            OnceModel("n0", "monday", random.choice((0.0, 0.5)), random.uniform(1.0, 3.0)),
            OnceModel("n0", "tuesday", 0.0, 300.0),
        ]

    def new_resource(self, name: str, _random: Random, /) -> OnceModel:
        """See Subject."""
        return OnceModel(name, None, 0.0, 1.0)

    def lockable(self, locks: aio.Interlock, resource: OnceModel) -> aio.Once:
        """See Subject."""
        return locks.once(resource.of, at_most=5.0, key=resource.key_of)

    def turn(self, random: Random) -> Running:
        """See Subject."""
        at_most = min(random.choice((0.3, 1.0, 2.0, 5.0)), self.resources[0].max_ttl)
        long = random.random() < 0.1
        return Running(
            random.choice(self.resources), at_most, at_most * 1.2 if long else random.expovariate(1 / 0.15),
            random.random() < 0.3,
        )  # fmt: skip
