"""asyncio: a loss cancels the bodies of its sections, and leaves all other cancellations alone.

Not here: a caller whose task is cancelled in an acquire or a release (test_network.py), a loop that cancels all tasks
(test_event_loops.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging

import anyio
import pytest

import interlock.aio
from harness.modes import until
from interlock import LeaseLost

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", modes="asyncio")


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "interlock")  # each loss is a warning


def lose(locks, lease) -> None:
    """Lose a lease, as the push of a revocation or the reply to a renewal does."""
    locks._session.ends.lose(lease._grant, "for the test")


def nothing_pends() -> bool:
    return not asyncio.current_task().cancelling() and not asyncio.current_task()._must_cancel


def held(clean) -> list[bytes]:
    """The keys that keep other clients out; records and tombstones do not."""
    return [
        key
        for key in clean.scan_iter(count=1000)
        if not key.endswith((b"{record}", b"{gone}")) and not key.startswith(b"{interlock:")
    ]


# A section that another task leaves

BY_ANOTHER_TASK = pytest.mark.parametrize("kind", ["lock", "multi"])


async def leave_elsewhere(thing, error) -> None:
    """Leave the section in a task of its own, with the error of the body."""
    leaving = asyncio.create_task(thing.__aexit__(type(error), error, None))
    await asyncio.wait([leaving])
    leaving.result()


async def lost_body(locks, lease, *, also=lambda: None) -> BaseException:
    """The error of a body whose lease is lost."""
    with pytest.raises(asyncio.CancelledError) as caught:
        lose(locks, lease["a"] if isinstance(lease, interlock.aio.MultiLease) else lease)
        also()
        await asyncio.sleep(30)
    return caught.value


def lockable(locks, kind):
    return locks.multi(locks.lock("a"), locks.lock("b")) if kind == "multi" else locks.lock("a")


@rule(6)
@BY_ANOTHER_TASK
async def test_a_lost_section_that_another_task_leaves_raises_the_loss_there(server, clean, kind):
    async with interlock.aio.Interlock(server.url) as locks:
        thing = lockable(locks, kind)
        error = await lost_body(locks, await thing.__aenter__())
        with pytest.raises(LeaseLost):
            await leave_elsewhere(thing, error)
        assert nothing_pends()
    assert not held(clean)


@rule(6)
@BY_ANOTHER_TASK
async def test_an_error_made_of_our_cancellation_leaves_none_if_another_task_leaves(server, clean, kind):
    async with interlock.aio.Interlock(server.url) as locks:
        thing = lockable(locks, kind)
        await lost_body(locks, await thing.__aenter__())
        error = ValueError("made of a CancelledError")
        await leave_elsewhere(thing, error)  # which raises nothing: the error goes on
        assert isinstance(error.__context__, LeaseLost)
        assert nothing_pends()


@rule(6)
@BY_ANOTHER_TASK
async def test_a_cancellation_beside_a_loss_goes_on_if_another_task_leaves(server, clean, kind):
    async with interlock.aio.Interlock(server.url) as locks:
        thing, here = lockable(locks, kind), asyncio.current_task()
        error = await lost_body(locks, await thing.__aenter__(), also=here.cancel)
        await leave_elsewhere(thing, error)  # which raises nothing: the CancelledError goes on
        assert here.cancelling() == 1
        here.uncancel()


@rule(6)
@BY_ANOTHER_TASK
async def test_a_loss_whose_cancellation_is_on_its_way_takes_no_cancellation_from_who_leaves(server, clean, kind):
    """The task that entered waits elsewhere, and learns of the loss there."""
    async with interlock.aio.Interlock(server.url) as locks:
        thing, entered, learned = lockable(locks, kind), asyncio.Event(), []

        async def enter() -> None:
            learned.append(await thing.__aenter__())
            entered.set()
            await asyncio.sleep(30)

        entering = asyncio.create_task(enter())
        await entered.wait()
        lose(locks, learned[0]["a"] if kind == "multi" else learned[0])
        with pytest.raises(LeaseLost):
            await thing.__aexit__(None, None, None)
        assert nothing_pends()
        await asyncio.wait([entering])
        assert entering.cancelled()


# The tasks that are inside one lease


@rule(6)
async def test_a_nested_section_is_cancelled_once_and_every_level_sees_the_loss(server, clean):
    seen: list[str] = []
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a")
        with pytest.raises(LeaseLost) as caught:
            async with lock as lease:
                try:
                    async with lock:
                        try:
                            async with lock:
                                lose(locks, lease)
                                await asyncio.sleep(30)
                        except LeaseLost:
                            seen.append("innermost")
                            raise
                except LeaseLost as error:
                    seen.append("inner")
                    inner = error
                    raise
        assert caught.value is inner
        assert isinstance(inner.__cause__, asyncio.CancelledError)
        assert seen == ["innermost", "inner"]
        assert nothing_pends()
        await until(lambda: not held(clean))
        async with lock:  # it is not taken for one that is inside still
            pass


@rule(6)
async def test_a_loss_cancels_only_the_innermost_level(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a")
        with pytest.raises(LeaseLost):
            async with lock as lease:
                async with lock:
                    await asyncio.sleep(0)
                lose(locks, lease)
                await asyncio.sleep(30)
        assert nothing_pends()
        await until(lambda: not held(clean))


@rule(6)
async def test_an_inner_level_that_swallows_the_cancellation_raises_the_loss(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a")
        with pytest.raises(LeaseLost):
            async with lock as lease:
                async with lock:
                    lose(locks, lease)
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(30)
                pytest.fail("the outer body goes on")
        assert nothing_pends()


@rule(6)
async def test_a_loss_cancels_all_tasks_of_an_owner(server, clean):
    """They share one lease, and each task has a body of its own."""
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a", owner="shop 7")
        inside: list = []

        async def one(depth: int):
            try:
                async with contextlib.AsyncExitStack() as stack:
                    for _ in range(depth):
                        lease = await stack.enter_async_context(lock)
                    inside.append(lease)
                    await asyncio.sleep(30)
            except LeaseLost:
                return nothing_pends()

        async def left():  # one that was inside, and is not any more
            async with lock:
                pass
            inside.append(None)
            await asyncio.sleep(0.1)
            return True

        tasks = [asyncio.ensure_future(one(1))]
        await until(lambda: inside)  # whoever comes with this word from now on has its lease
        tasks += [asyncio.ensure_future(each) for each in (one(2), left(), one(1))]
        await until(lambda: len(inside) == 4)
        lose(locks, inside[0])
        async with asyncio.timeout(20):
            assert await asyncio.gather(*tasks) == [True] * 4
        await until(lambda: not held(clean))


@rule(6)
async def test_a_task_that_ended_before_the_loss_is_not_cancelled_in_its_next_section(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        lock = locks.rlock("a", owner="shop 7")
        outer = await lock.acquire()
        async with lock:
            pass
        async with locks.lock("b"):
            lose(locks, outer)
            await asyncio.sleep(0)
        assert nothing_pends()
        assert not await outer.release()


@rule(6)
async def test_two_leases_that_are_lost_at_once_cancel_each_body_once(server, clean):
    """In an outage, say: the outer section raises LeaseLost, and the LeaseLost of the inner one is not swallowed."""
    async with interlock.aio.Interlock(server.url) as locks:
        with pytest.raises(LeaseLost, match="'a'"):
            async with locks.lock("a") as a, locks.lock("b") as b:
                lose(locks, a)
                lose(locks, b)
                await asyncio.sleep(30)
        assert nothing_pends()
        with pytest.raises(LeaseLost):
            async with locks.multi(locks.lock("a"), locks.lock("b"), locks.lock("c")) as several:
                lose(locks, several["a"])
                lose(locks, several["c"])
                await asyncio.sleep(30)
        assert nothing_pends()
        await until(lambda: not held(clean))


@rule(8)
async def test_a_loss_during_the_release_of_an_inner_section_releases_both(server, clean, proxy):
    """The cancellation interrupts the release of the inner section, which goes on in the background."""
    async with interlock.aio.Interlock(proxy.url) as locks:
        with pytest.raises(LeaseLost, match="'a'"):
            async with locks.lock("a") as a, locks.lock("b"):
                proxy.hold = True
                asyncio.get_running_loop().call_later(0.05, lose, locks, a)
        assert nothing_pends()
        proxy.hold = False
        await until(lambda: not held(clean))


@rule(8)
async def test_a_multi_lock_of_rlocks_is_left_as_often_as_it_was_entered(server, clean):
    async with interlock.aio.Interlock(server.url) as locks:
        multi = locks.multi(locks.rlock("a"), locks.rlock("b"))
        async with multi:
            async with await multi.acquire():
                pass
            assert len(held(clean)) == 2
        assert not held(clean)


# Every end of a body, with every other cancellation, before, at and after the loss


class Own(Exception):
    """The body's own error."""


async def plain(_lose):
    await asyncio.sleep(30)


async def swallows(_lose):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(30)


async def converts(_lose):
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        raise Own from None


async def cleans_up(_lose):
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.005)


async def fails_in_its_cleanup(_lose):
    try:
        await asyncio.sleep(30)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.005)
        raise Own


async def group(_lose):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(30))
        await asyncio.sleep(30)


async def group_that_waits(_lose):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(30))


async def group_whose_child_fails(_lose):
    async def child():
        try:
            await asyncio.sleep(30)
        finally:
            raise Own

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child())
        await asyncio.sleep(30)


async def timeout(_lose):
    async with asyncio.timeout(60):
        await asyncio.sleep(30)


async def waits_for(_lose):
    await asyncio.wait_for(asyncio.sleep(30), 60)


async def gathers(_lose):
    await asyncio.gather(asyncio.sleep(30), asyncio.sleep(30))


async def scope(_lose):
    with anyio.CancelScope():
        await asyncio.sleep(30)


async def anyio_group(_lose):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asyncio.sleep, 30)
        await asyncio.sleep(30)


async def ends_in_the_moment(lose):
    lose()


async def fails_in_the_moment(lose):
    lose()
    raise Own


async def ends(_lose):
    await asyncio.sleep(0)


async def fails(_lose):
    await asyncio.sleep(0)
    raise Own


BODIES = [
    plain, swallows, converts, cleans_up, fails_in_its_cleanup, group, group_that_waits, group_whose_child_fails,
    timeout, waits_for, gathers, scope, anyio_group, ends_in_the_moment, fails_in_the_moment, ends, fails,
]  # fmt: skip
LOCKS = {
    "lock": lambda locks, name: [locks.lock(name)],
    "rlock": lambda locks, name: [locks.rlock(name)],
    "rlock twice": lambda locks, name: [locks.rlock(name)] * 2,
    "multi": lambda locks, name: [locks.multi(locks.lock(name), locks.lock(f"{name}-"))],
    "semaphore": lambda locks, name: [locks.semaphore(name, 2)],
    "writer": lambda locks, name: [locks.rwlock(name).write()],
    "two locks": lambda locks, name: [locks.lock(name), locks.lock(f"{name}-")],
}
SUITE = {"rlock twice", "two locks"}  # the others with --full only: one section each
# When somebody else cancels: turns of the loop after the loss; before it if negative; None: never.
WHENS = [None, -2, -1, 0, 1, 2, 3, 8]
WAYS = ["cancel", "wait_for", "timeout", "group", "anyio"]


class Case:
    """One body in one section, inside one cancel scope of the caller."""

    def __init__(self, locks, name, kind, body, when, way, lost) -> None:
        self.what = (kind, body.__name__, when, way, "lost" if lost else "held")
        self.locks, self.lockables, self.body, self.when, self.way, self.lost = (
            locks, LOCKS[kind](locks, name), body, when, way, lost,
        )  # fmt: skip
        self.entered = asyncio.Event()
        self.over = False
        self.told = False  # the loss came while it was inside
        self.cancelled = False  # somebody else cancelled it while it was inside
        self.raised: BaseException | None = None  # by the body
        self.came: BaseException | None = None  # out of the section
        self.wrong: list[str] = []

    async def section(self) -> None:
        task = asyncio.current_task()
        before = task.cancelling()
        try:
            await self.inside(*self.lockables)
        except BaseException as error:
            self.came = error
            raise
        finally:
            self.over = True
            if not self.cancelled:
                if task.cancelling() != before:
                    self.wrong.append(f"cancelling() was {before} and is {task.cancelling()}")
                if task._must_cancel:
                    self.wrong.append("a cancellation is left over")

    async def inside(self, first, *rest) -> None:
        async with first as lease:
            if rest:
                await self.inside(*rest)
                return
            self.lease = lease
            self.entered.set()
            try:
                await self.body(self.lose)
            except BaseException as error:
                self.raised = error
                raise

    def lose(self) -> None:
        leases = self.lease._leases.values() if hasattr(self.lease, "_leases") else [self.lease]
        for lease in leases:
            if self.lost and not self.over and lease._grant.end_reason is None:
                self.told = True
                lose(self.locks, lease)

    def cancel(self, how) -> None:
        if not self.over:
            self.cancelled = True
            how()

    async def around(self) -> None:
        """The section, inside a cancel scope of the caller."""
        loop = asyncio.get_running_loop()
        if self.way == "cancel":
            self.how = asyncio.current_task().cancel
            await self.section()
        elif self.way == "wait_for":
            inner = asyncio.ensure_future(self.section())
            self.how = inner.cancel
            await asyncio.wait_for(inner, 60)
        elif self.way == "timeout":
            async with asyncio.timeout(None) as scope:
                self.how = lambda: scope.reschedule(loop.time())
                await self.section()
        elif self.way == "group":
            failing = loop.create_future()
            self.how = lambda: failing.set_exception(ZeroDivisionError())

            async def child() -> None:
                await failing

            async with asyncio.TaskGroup() as tasks:
                other = tasks.create_task(child())
                try:
                    await self.section()
                finally:
                    other.cancel()
        else:
            with anyio.CancelScope() as scope:
                self.how = scope.cancel
                await self.section()

    async def play(self) -> None:
        async def balanced() -> None:
            try:
                await self.around()
            finally:
                # A TaskGroup whose child fails while it waits for the last one counts one too many before 3.13.
                if self.way in {"timeout", "anyio"} and asyncio.current_task().cancelling():
                    self.wrong.append(f"{self.way} is over, and cancelling() is {asyncio.current_task().cancelling()}")

        task = asyncio.ensure_future(balanced())
        await self.entered.wait()
        first = [self.lose] if self.when is None else [lambda: self.cancel(self.how), self.lose]
        if self.when is not None and self.when >= 0:
            first.reverse()
        first[0]()
        for _ in range(abs(self.when or 0)):
            await asyncio.sleep(0)
        for act in first[1:]:
            act()
        done, _ = await asyncio.wait([task], timeout=20)
        if not done:
            self.wrong.append("it hangs")
            task.cancel()
        elif not task.cancelled():
            task.exception()
        self.judge()

    def judge(self) -> None:
        raised, came = self.raised, self.came
        cancelled, gone = isinstance(raised, asyncio.CancelledError), isinstance(came, asyncio.CancelledError)
        if raised is not None and not cancelled and came is not raised:
            replaced = came is not None
            while came is not None and came is not raised:
                came = came.__context__
            if not (self.cancelled and gone and came is raised):  # as in any cleanup that is cancelled while it waits
                self.wrong.append(f"{raised!r} of the body was replaced by {self.came!r}" if replaced else "swallowed")
        if cancelled and self.told and not self.cancelled and not isinstance(came, LeaseLost):
            self.wrong.append(f"the loss came out as {came!r}")
        if gone and not self.cancelled:
            self.wrong.append("a CancelledError that nobody wanted")
        later = self.when is not None and self.when >= (0 if self.way in {"timeout", "group", "anyio"} else 1)
        if cancelled and self.cancelled and not gone and not (self.told and later):
            self.wrong.append(f"the cancellation of somebody else came out as {came!r}")
        if raised is None and self.told and not self.cancelled and not isinstance(came, LeaseLost):
            self.wrong.append(f"the loss was not told: {came!r}")


@rule(6, 8)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind not in SUITE)) for kind in LOCKS])
async def test_with_any_other_cancellation_the_lease_is_released_and_no_error_is_swallowed(server, clean, kind):
    async with interlock.aio.Interlock(server.url) as locks:
        ways = itertools.product(BODIES, WHENS, WAYS, (True, False))
        cases = [
            Case(locks, f"{number}", kind, body, when, way, lost)
            for number, (body, when, way, lost) in enumerate(ways)
            if lost or when is not None or body in {ends, fails}
        ]
        for first in range(0, len(cases), 100):
            await asyncio.gather(*(case.play() for case in cases[first : first + 100]))
        wrong = [f"{case.what}: {each}" for case in cases for each in case.wrong]
        assert not wrong, "\n".join(wrong)
        await until(lambda: not held(clean))


# election.run()


async def leads(lease):
    await asyncio.sleep(30)


async def leads_on(lease):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(30)
    return "on"


async def leads_to_an_error(lease):
    try:
        await asyncio.sleep(30)
    finally:
        raise Own


async def leads_and_cleans_up(lease):
    try:
        await asyncio.sleep(30)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.005)


@rule(6, 8)
@pytest.mark.parametrize("first", ["stop", "resign", "lose"])
async def test_run_ends_with_any_two_reasons_at_once(server, clean, first):
    """Two of: stop is set, the work resigns, the lease is lost, the task is cancelled, a timeout ends."""
    wrong = []

    async def play(locks, number: int, work, second: str, turns: int) -> None:
        election, stop, leading, ran = locks.election(f"{number}"), asyncio.Event(), [], asyncio.Event()

        async def lead(lease):
            leading.append(lease)
            ran.set()
            return await work(lease)

        async def run():
            async with asyncio.timeout(None) as scope:
                acts["time"] = lambda: scope.reschedule(0)
                return await election.run(lead, stop=stop)

        acts = {
            "stop": stop.set,
            "resign": lambda: resigning.append(asyncio.ensure_future(leading[0].resign())),
            "lose": lambda: lose(locks, leading[0]),
        }
        resigning: list = []
        task = asyncio.ensure_future(run())
        acts["cancel"] = task.cancel
        await ran.wait()
        acts[first]()
        for _ in range(turns):
            await asyncio.sleep(0)
        done = task.done()
        with contextlib.suppress(RuntimeError):  # its time can't be over any more
            acts[second]()
        if first == "lose":  # a term that was lost is not resigned any more, and what the work swallowed is gone
            await until(lambda: len(leading) == 2 or task.done())
            stop.set()
        await asyncio.wait([task, *resigning], timeout=20)
        what = (first, second, turns, work.__name__)
        if not task.done():
            wrong.append((*what, "it goes on"))
            task.cancel()
            return
        came = asyncio.CancelledError if task.cancelled() else task.exception() or task.result()
        fine = {leads: (None,), leads_on: (None, "on"), leads_and_cleans_up: (None,)}.get(work, ())
        asked = {"cancel": (asyncio.CancelledError,), "time": ()}.get(second, ())
        is_fine = came in (*fine, *asked) or (second == "time" and isinstance(came, TimeoutError))
        is_fine = is_fine or (work is leads_to_an_error and isinstance(came, Own))
        if second == "cancel" and work is leads and turns == 0 and not done:
            is_fine = came is asyncio.CancelledError
        if not is_fine:
            wrong.append((*what, repr(came)))

    async with interlock.aio.Interlock(server.url) as locks:
        works = [leads, leads_on, leads_to_an_error, leads_and_cleans_up]
        ways = itertools.product(works, ["stop", "resign", "cancel", "time"], [0, 1, 2, 3, 8])
        await asyncio.gather(*(play(locks, number, *way) for number, way in enumerate(ways)))
        assert not wrong, "\n".join(map(str, wrong))
        await until(lambda: not held(clean))


async def fails():
    raise ValueError


async def handles_a_failure_of_its_task_group():
    """Before Python 3.13 the task counts a cancellation after that for ever, since its TaskGroup takes none back."""
    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())
            tasks.create_task(asyncio.sleep(0.05))


@pytest.mark.asyncio_only
async def test_a_handled_failure_of_a_task_group_hides_no_loss_and_no_stop(mode):
    locks = mode.interlock()
    with pytest.raises(LeaseLost):
        async with locks.lock("a", ttl=0.5, renew=False):
            await handles_a_failure_of_its_task_group()
            await asyncio.sleep(30)
    stop, terms = asyncio.Event(), []

    async def lead(lease):
        await handles_a_failure_of_its_task_group()
        terms.append(lease.term)
        if len(terms) == 1:
            assert await mode.interlock().election("b").revoke("for the test", force=True)
        else:
            stop.set()
        await asyncio.sleep(30)

    assert await locks.election("b", ttl=2).run(lead, stop=stop) is None
    assert len(terms) == 2, "the loss did not let it campaign again"


@pytest.mark.asyncio_only
@pytest.mark.parametrize("cleans_up", [True, False], ids=["during its cleanup", "at the same moment"])
async def test_a_cancellation_by_others_stays_one_after_a_handled_failure(mode, cleans_up):
    locks, stop, is_leading = mode.interlock(), asyncio.Event(), asyncio.Event()

    async def lead(_):
        await handles_a_failure_of_its_task_group()
        is_leading.set()
        try:
            await asyncio.sleep(30)
        finally:
            if cleans_up:
                stop.set()
                await asyncio.sleep(30)

    running = asyncio.create_task(locks.election("b").run(lead, stop=stop))
    await is_leading.wait()
    running.cancel()
    if not cleans_up:
        stop.set()
    with pytest.raises(asyncio.CancelledError):
        await running
