"""Jobs that run once: on one machine, or once for each key."""

from __future__ import annotations

import asyncio
import signal
import time
from datetime import UTC, datetime

import pytest

from harness.modes import outcome, real, until
from harness.processes import processes
from interlock import ConfigError, LeaseLost, LeaseState, Ran, Skipped

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server", full="every combination", quorum=True)


def job(mode, body=lambda _lease: 42):
    """A job for this mode: a function, or a coroutine function."""
    if mode.name == "threads":
        return body

    async def work(lease):
        return body(lease)

    return work


@rule(1)
async def test_one_client_runs_the_job_and_the_result_says_who_and_when(mode):
    once = mode.interlock().once("a", at_most=60)
    before = datetime.now(UTC)
    result = await once.run(job(mode, lambda _: time.sleep(0.05) or 42))
    assert isinstance(result, Ran)
    assert result
    assert result.value == 42
    assert (before - result.started).total_seconds() < 60
    again = await mode.interlock().once("a", at_most=60).run(job(mode))
    assert isinstance(again, Ran)  # nothing keeps it from that
    assert (again.started - result.started).total_seconds() >= 0.05  # in a quorum, too, where fences are counted


@rule(1)
async def test_other_clients_skip_the_job_while_it_runs(mode):
    mine, others = mode.interlock().once("a", at_most=60), mode.interlock().once("a", at_most=60)
    results = []
    if mode.name == "threads":

        def work(lease):
            results.append(others._real.run(lambda _: "never"))
            return lease.token

    else:

        async def work(lease):
            async def never(_):
                return "never"

            results.append(await others.run(never))
            return lease.token

    result = await mine.run(work)
    (skipped,) = results
    assert isinstance(skipped, Skipped)
    assert not skipped
    assert skipped.by == result.value == result.by
    assert skipped.started == result.started
    assert skipped.ended is None


@rule(5)
async def test_at_least_keeps_a_fast_job_from_running_twice(mode, clean):
    """The clock of the second machine may start the job as late as that."""
    first = await mode.interlock().once("a", at_most=60, at_least=30).run(job(mode))
    other = mode.interlock().once("a", at_most=60, at_least=30)
    skipped = await other.run(job(mode))
    assert isinstance(skipped, Skipped)
    assert (skipped.by, skipped.started) == (first.by, first.started)
    assert skipped.ended >= skipped.started
    state = await other.inspect()
    assert state.last.by == first.by
    assert 0 < state.free_in <= 30
    assert 0 < clean.pttl("{lock:a}{done}") <= 30_000
    assert await other.forget()
    assert isinstance(await other.run(job(mode)), Ran)


async def test_at_least_counts_from_the_start_of_the_run(mode, clean):
    once = mode.interlock().once("a", at_most=60, at_least=0.2)
    assert isinstance(await once.run(job(mode, lambda _: time.sleep(0.3))), Ran)
    assert not clean.exists("{lock:a}{done}")


@rule(1)
async def test_a_job_with_a_key_runs_once_for_good(mode, clean):
    locks = mode.interlock()
    first = await locks.once("a", at_most=60, key="2026-11-21").run(job(mode))
    skipped = await mode.interlock().once("a", at_most=60, key="2026-11-21").run(job(mode))
    assert isinstance(skipped, Skipped)
    assert skipped.by == first.by
    assert isinstance(await locks.once("a", at_most=60, key="2026-11-22").run(job(mode)), Ran)
    assert isinstance(await locks.once("a", at_most=60, key="2026-11-22").run(job(mode)), Skipped)
    assert isinstance(await locks.once("a", at_most=60, key="x", keep=5).run(job(mode)), Ran)
    assert 0 < clean.pttl("{lock:a:key=x}{done}") <= 5000
    assert 29 * 86400 < clean.ttl("{lock:a:key=2026-11-21}{done}") <= 30 * 86400
    # no name with a key is another one with another key
    assert isinstance(await locks.once("a:key=b", at_most=60, key="c").run(job(mode)), Ran)
    assert isinstance(await locks.once("a", at_most=60, key="b:key=c").run(job(mode)), Ran)


@rule(8)
async def test_a_job_with_a_key_that_failed_runs_again(mode):
    once = mode.interlock().once("a", at_most=60, key="v3")

    def fails(_lease):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await once.run(job(mode, fails))
    assert isinstance(await once.run(job(mode)), Ran)
    assert isinstance(await once.run(job(mode)), Skipped)


@rule(3)
async def test_a_job_whose_process_was_killed_runs_again(mode):
    once = mode.interlock().once("a", at_most=1.5, key="v3")
    async with processes(mode, 1) as (dying,):
        token = await dying.do("runs", "a", {"at_most": 1.5, "key": "v3"})
        skipped = await once.run(job(mode))
        assert skipped.by == token
        dying.signal(signal.SIGKILL)
        results = []

        async def ran() -> bool:
            results.append(await once.run(job(mode)))
            return isinstance(results[-1], Ran)

        await until(ran)


@rule(6)
async def test_a_run_that_takes_longer_than_at_most_has_lost_its_lease(mode):
    once = mode.interlock().once("a", at_most=0.3, key="v3")
    result = await outcome(once.run(job(mode, lambda lease: (lease.lost, time.sleep(0.6)))))
    assert isinstance(result, LeaseLost)
    assert isinstance(await once.run(job(mode)), Ran)  # it has not succeeded


@rule(6)
async def test_a_run_that_lost_its_lease_has_not_succeeded(mode):
    """The server may hold the lease a moment longer: after LeaseLost the job must run again all the same."""
    once = mode.interlock().once("a", at_most=60, key="v3")
    result = await outcome(once.run(job(mode, lambda lease: setattr(lease._grant.hold, "deadline", 0.0))))
    assert isinstance(result, LeaseLost)
    results = []

    async def ran() -> bool:
        results.append(await once.run(job(mode)))
        return isinstance(results[-1], Ran)

    await until(ran)


@rule(5)
async def test_at_least_counts_for_a_revoked_run_too(mode, clean):
    once, others = mode.interlock().once("a", at_most=60, at_least=30), mode.interlock().once("a", at_most=60)
    primitive = once._primitive

    def work(lease):
        message = ("revoke", lease.token, "0", "it eats the disk", "")
        assert clean.eval(primitive.script.source, len(primitive.keys), *primitive.keys, *message)[0] == 1

    result = await outcome(once.run(job(mode, work)))
    assert isinstance(result, LeaseLost)
    await until(lambda: not clean.exists("lock:a"))
    assert isinstance(await others.run(job(mode)), Skipped)
    assert await others.forget()
    assert not await others.forget()
    assert isinstance(await others.run(job(mode)), Ran)


@rule(5)
async def test_no_run_is_noted_to_end_before_it_began(mode, clean):
    """A failover meanwhile led to a server whose clock is an hour behind."""
    once, others = mode.interlock().once("a", at_most=60, at_least=30), mode.interlock().once("a", at_most=60)
    record = "{lock:a}{record}"

    def work(_lease):
        words = clean.get(record).split(b" ")
        words[2] = b"%d" % (int(words[2]) + 3_600_000_000)
        clean.set(record, b" ".join(words), keepttl=True)

    assert isinstance(await once.run(job(mode, work)), Ran)
    skipped = await others.run(job(mode))
    assert isinstance(skipped, Skipped)
    assert skipped.ended == skipped.started
    assert 29 < (await others.inspect()).free_in <= 30


@rule(6)
async def test_a_run_whose_interlock_was_closed_has_not_succeeded(mode):
    """Another client may hold the lease from then on, so the run must not be noted: the job runs again there."""
    locks, others = mode.interlock(), mode.interlock().once("a", at_most=60, key="1")
    states: list = []

    def work(lease):
        states.append(None)
        assert lease.ended.wait(20)
        states.append(lease.state)
        return 42

    async def awork(lease):
        states.append(None)
        try:
            await asyncio.sleep(30)
        finally:
            states.append(lease.state)

    running = asyncio.ensure_future(locks.once("a", at_most=60, key="1").run(work if mode.name == "threads" else awork))
    await until(lambda: states)
    await locks.close()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(running, 20)
    assert states[1] is LeaseState.RELEASED
    assert (await others.run(job(mode))).value == 42


@rule(8)
async def test_a_late_copy_of_forget_does_not_forget_a_later_run(mode, clean):
    once = mode.interlock().once("a", at_most=60, at_least=30)
    primitive = once._primitive
    await once.run(job(mode))
    message = (len(primitive.keys), *primitive.keys, "forget", clean.get("{lock:a}{done}"), "")
    assert await once.forget()
    await once.run(job(mode))
    clean.eval(primitive.script.source, *message)
    assert isinstance(await once.run(job(mode)), Skipped)


@rule(8)
async def test_a_run_is_noted_even_if_the_reply_to_its_end_is_lost(mode, clean, proxy):
    once = mode.interlock(f"{proxy.url}?socket_timeout=0.3").once("a", at_most=60, key="v3")
    await once.inspect()

    def work(_lease):
        proxy.drop_replies = True

    task = asyncio.ensure_future(once.run(job(mode, work)))
    await until(lambda: clean.exists("{lock:a:key=v3}{done}"))
    proxy.cut()
    proxy.drop_replies = False
    assert isinstance(await task, Ran)
    assert isinstance(await mode.interlock().once("a", at_most=60, key="v3").run(job(mode)), Skipped)


@rule(8)
@pytest.mark.asyncio_only
async def test_an_acquire_that_was_cancelled_in_doubt_leaves_no_note_of_a_run(mode, clean, proxy):
    """The reply was lost and the caller cancelled: the job did not run, so no other client may skip the job."""
    once = mode.interlock(f"{proxy.url}?socket_timeout=0.3").once("a", at_most=60, at_least=30)
    await once.inspect()
    proxy.drop_replies = True
    task = asyncio.ensure_future(once.run(job(mode)))
    await until(lambda: clean.exists("lock:a"))
    task.cancel()
    await asyncio.wait([task])
    proxy.cut()
    proxy.drop_replies = False
    other = mode.interlock().once("a", at_most=60, at_least=30)
    results = []

    async def ran() -> bool:
        results.append(await other.run(job(mode)))
        return isinstance(results[-1], Ran)

    await until(ran)


async def test_a_decorated_function_runs_once(mode):
    locks = mode.interlock()
    if mode.name == "threads":

        @locks._real.once("a", at_most=60, at_least=30)
        def nightly(number: int) -> int:
            return number + 1

        first, second = await mode.in_thread(nightly, 1), await mode.in_thread(nightly, 1)
        with pytest.raises(ConfigError, match="async def"):
            locks._real.once("b", at_most=60)(test_bad_arguments_are_refused)
    else:

        @locks.once("a", at_most=60, at_least=30)
        async def nightly(number: int) -> int:
            return number + 1

        first, second = await nightly(1), await nightly(number=1)
        with pytest.raises(ConfigError, match="async def"):
            locks.once("b", at_most=60)(print)
    assert (first.value, bool(second)) == (2, False)


def runs(mode, decorate):
    """A function of two arguments, decorated, which returns them."""
    if mode.name == "threads":
        return lambda *args, **kwargs: mode.in_thread(
            decorate(lambda region="eu", day=1: (region, day)), *args, **kwargs
        )

    async def work(region="eu", day=1):
        return region, day

    return decorate(work)


async def test_each_call_makes_its_own_name_and_key(mode, clean):
    locks = mode.interlock()
    once = real(locks).once
    nightly = runs(mode, once("nightly:{region}", at_most=60, key="{day}"))
    for args in (("eu", 1), ("eu", 2), ("us", 1)):
        assert (await nightly(*args)).value == args
        skipped = await nightly(*args)
        assert isinstance(skipped, Skipped)
        assert skipped.name == f"nightly:{args[0]}:key={args[1]}"
        assert await locks.once(f"nightly:{args[0]}", at_most=60, key=str(args[1])).forget()
    assert isinstance(await nightly(day=2), Ran)
    typed = runs(mode, once("typed:{region}", at_most=60, key="{day}"))
    for day in ("", "\ud800", "a{b\n", "x" * 1000, "x" * 1001):
        for region in ("", "}{", "y" * 1000):
            assert isinstance(await typed(region, day), Ran)
            assert isinstance(await typed(region, day), Skipped)
    assert isinstance(await outcome(nightly(day=object())), ConfigError)
    tag = runs(mode, once("tag:{{region}}:{day}", at_most=60))
    assert (await tag()).name == "tag:{region}:1"
    assert (await runs(mode, once("tag:{42}", at_most=60))()).name == "tag:{42}"


async def test_a_key_is_made_when_the_work_runs_and_not_at_import(mode):
    days = ["2026-11-21"]
    once = mode.interlock().once("a", at_most=60, key=lambda: days[-1])
    nightly = runs(mode, real(once))
    assert isinstance(await nightly(), Ran)
    assert isinstance(await nightly(), Skipped)
    days.append("2026-11-22")
    assert (await once.inspect()).last is None
    assert isinstance(await once.run(job(mode)), Ran)
    assert isinstance(await nightly(), Skipped)
    assert (await once.inspect()).last.ended
    assert not await once.revoke("nobody runs it")
    assert await once.forget()
    assert isinstance(await nightly(), Ran)
    name = mode.interlock().once(lambda: f"b:{days[-1]}", at_most=60, key=datetime.now)
    assert (await name.run(job(mode))).name.startswith("b:2026-11-22:key=20")


async def test_a_format_needs_the_arguments_of_a_call(mode):
    locks = real(mode.interlock())
    once = mode.interlock().once("report:{region}:{day}", at_most=60)
    for call in (once.run(job(mode)), once.inspect(), once.forget(), once.revoke("x")):
        result = await outcome(call)
        assert isinstance(result, ConfigError)
        assert "Decorate a function" in str(result)
    for wrong in ("a{", "{}:{}", "{0}:{1}", "a}{b}{c", "{a}{", "\n{a}{b}"):
        with pytest.raises(ConfigError):
            locks.once(wrong, at_most=60)
    for name, key in (
        ("{month}", None),
        ("a:{month}:{day}", None),
        ("a", "{month}"),
        ("a", "{"),
        ("a", lambda month: month),
    ):
        with pytest.raises(ConfigError):
            await runs(mode, locks.once(name, at_most=60, key=key))()
    assert isinstance(await mode.interlock().once("{month}", at_most=60).run(job(mode)), Ran)  # a hash tag
    assert isinstance(await mode.interlock().once("a", at_most=60, key="{month}").run(job(mode)), Ran)  # a text


async def test_inspect_shows_the_run_and_revoke_ends_it(mode):
    once = mode.interlock(max_ttl=3).once("a", at_most=60)  # so that it is renewed soon, and told then
    assert (await once.inspect()).running is None
    assert not await once.revoke("nobody runs it")
    states = []

    def work(lease):
        while lease.state is LeaseState.HELD:
            time.sleep(0.01)
            states.append(lease.state)
            if len(states) > 1000:
                return

    async def awork(lease):
        await asyncio.sleep(30)

    task = asyncio.ensure_future(outcome(once.run(work if mode.name == "threads" else awork)))
    other = mode.interlock().once("a", at_most=60)

    async def runs() -> bool:
        return (await other.inspect()).running is not None

    await until(runs)
    assert (await other.inspect()).started is not None
    assert await other.revoke("it eats the disk")
    told = await asyncio.wait_for(task, 20)
    assert isinstance(told, LeaseLost)
    assert "revoked" in str(told)


@rule(9)
async def test_bad_arguments_are_refused(mode, clean):
    locks = mode.interlock()
    for wrong in (
        {"at_most": 0}, {"at_most": -1}, {"at_most": "x"}, {"at_most": None}, {"at_most": float("inf")},
        {"at_most": 1, "at_least": 2}, {"at_most": 1, "at_least": -1}, {"at_most": 1, "key": ""},
        {"at_most": 1, "key": 7}, {"at_most": 1, "key": "x", "keep": 0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            locks.once("a", **wrong)
    with pytest.raises(ConfigError):
        locks.once("", at_most=1, key="x")
    await locks.once("a", at_most=60, at_least=10).run(job(mode))
    for key in clean.keys("*"):
        assert clean.pttl(key) != -1
    assert isinstance(await outcome(locks.lock("a").acquire(timeout=0)), ConfigError)
