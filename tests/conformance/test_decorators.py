"""What a decorator holds until its work is done, and what it refuses since the work would run after the release."""

from __future__ import annotations

import contextlib
import functools
import logging

import pytest

from harness.modes import outcome, real
from interlock import ConfigError, Ran

pytestmark = pytest.mark.runs_on("valkey-9.1")


def generator(*_):
    yield


async def async_generator(*_):
    yield


@contextlib.contextmanager
def context(*_):
    yield


@contextlib.asynccontextmanager
async def async_context(*_):
    yield


async def coroutine(*_):
    return 42


def plain(*_):
    return 42


class Work:
    """A class, and objects that are called."""

    def __call__(self, *_):
        yield


def decorators(locks) -> list:
    """One of each kind."""
    return [
        locks.lock("a"), locks.rlock("a"), locks.semaphore("s", 2), locks.rwlock("r").read(), locks.election("e"),
        locks.multi(locks.lock("a"), locks.lock("b")), locks.once("o", at_most=60), locks.synchronized("a"),
    ]  # fmt: skip


def in_mode(mode, body):
    """A function of this mode that returns what `body()` returns."""
    if mode.name == "threads":
        return lambda *_: body()

    async def function(*_):
        return body()

    return function


async def call(mode, function):
    return await (mode.in_thread(function) if mode.name == "threads" else function())


def test_what_runs_after_the_release_is_refused_at_decoration(mode):
    wrong = [
        (generator, "generator"), (async_generator, "async generator"), (context, "context manager"),
        (async_context, "context manager"), (functools.partial(generator, 1), "generator"), (Work, "class"),
        (Work.__call__, "generator"), (Work().__call__, "generator"), (Work(), "generator"),
        (classmethod(plain), "under @classmethod"), (7, "not 7"),
        (coroutine, "interlock.aio") if mode.name == "threads" else (plain, "not an `async def`"),
    ]  # fmt: skip
    for decorate in decorators(real(mode.interlock())):
        for function, words in wrong:
            with pytest.raises(ConfigError, match=words):
                decorate(function)


async def test_a_function_that_returns_a_generator_in_disguise_is_refused_at_the_call(mode):
    @functools.wraps(context)
    def disguised(*args):
        return context(*args)

    async def adisguised(*args):
        return context(*args)

    adisguised.__wrapped__ = context
    for decorate in decorators(real(mode.interlock())):
        result = await outcome(call(mode, decorate(disguised if mode.name == "threads" else adisguised)))
        assert isinstance(result, ConfigError)
        assert "after the release" in str(result)


async def test_a_function_that_returns_a_coroutine_is_refused_and_has_not_run(mode):
    def makes_coroutine(*args):
        return coroutine(*args)

    locks = mode.interlock()
    if mode.name == "asyncio":  # seen before the call
        for decorate in decorators(locks):
            with pytest.raises(ConfigError, match="wrap what it returns into an `async def`"):
                decorate(makes_coroutine)
        return
    for decorate in decorators(real(locks)):
        result = await outcome(mode.in_thread(decorate(makes_coroutine)))
        assert isinstance(result, ConfigError)
        assert "makes_coroutine() returned a coroutine" in str(result)
    once = locks.once("k", at_most=60, key="1")
    for work in (coroutine, makes_coroutine, generator):
        assert isinstance(await outcome(once.run(work)), ConfigError)
    assert isinstance(await once.run(plain), Ran)  # what was refused is not noted as done


async def test_a_lazy_result_is_warned_about_once(mode, caplog):
    """It may be right: what has to be done under the lock may have been done before."""
    function = real(mode.interlock()).lock(f"lazy-{mode.name}")(in_mode(mode, lambda: (each for each in "abc")))
    with caplog.at_level(logging.WARNING, "interlock"):
        for _ in range(2):
            assert list(await call(mode, function)) == ["a", "b", "c"]
    (record,) = [each for each in caplog.records if "generator" in each.message]
    assert f"lock 'lazy-{mode.name}'" in record.message
    assert "after the release" in record.message
