"""Names that all callers share by mistake: `lock("cart:{user}")` without the `f`, and None in a format."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

import interlock
import interlock.aio
from harness.modes import real
from interlock._api import misuse_warnings

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
NOWHERE = "redis://localhost:1/0"
MAKERS = {"threads": interlock.Interlock, "asyncio": interlock.aio.Interlock}
customer = "ann"  # of this module


@pytest.fixture(autouse=True)
def no_line_has_had_a_warning(monkeypatch):
    monkeypatch.setattr(misuse_warnings, "_warned_lines", set())


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "interlock"]


@pytest.mark.parametrize("kind", ["lock", "rlock", "rwlock", "semaphore", "latch", "barrier", "election"])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_name_with_a_variable_in_braces_is_warned_about_once_a_line(maker, kind, caplog):
    locks, more = maker(NOWHERE), (3,) * (kind in {"semaphore", "latch", "barrier"})
    user = SimpleNamespace(id=7)
    for _ in range(3):
        getattr(locks, kind)("cart:{user.id}", *more)
    (text,) = said(caplog)
    line = test_a_name_with_a_variable_in_braces_is_warned_about_once_a_line.__code__.co_firstlineno
    assert f"'cart:{{user.id}}': {{user.id}} stands in the text as it is, at {__file__}:" in text
    assert line < int(text.partition(f"{__file__}:")[2].partition(",")[0]) < line + 9
    assert 'Write f"cart:{user.id}"' in text
    assert "'user' is a variable" in text
    assert "hash tag" in text
    getattr(locks, kind)("cart:{user}", *more)  # another line
    getattr(locks, kind)("cart:{customer}", *more)  # a variable of the module
    assert len(said(caplog)) == 3
    assert user


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_hash_tag_of_a_cluster_is_none(maker, caplog):
    locks, shop, user = maker(NOWHERE), 42, "ann"
    locks.lock("{account}:1")  # no variable of this name
    locks.lock("{42}:1")
    locks.lock(f"{{{shop}}}:1")  # {42}:1
    locks.lock(f"{{user}}:{user}")  # {user}:ann: what the variable says is there, too
    locks.lock("{logging}:1")  # a module, a function, a class
    locks.lock("{said}:1")
    locks.lock("{SimpleNamespace}:1")
    locks.lock("{print}:1")
    locks.synchronized("cart:{user}")
    locks.once("cart:{user}", key="{shop}", at_most=60)
    assert not said(caplog)


async def test_a_once_that_decorates_nothing_is_warned_about(mode, caplog):
    region, locks = "eu", mode.interlock()

    async def coroutine(_):
        return region

    work = coroutine if mode.name == "asyncio" else lambda _: region
    if mode.name == "asyncio":
        for _ in range(2):
            await locks.once("report:{region}", at_most=60).run(work)
    else:

        def twice():
            region = "us"
            for _ in range(2):
                real(locks).once("report:{region}", at_most=60).run(work)
            return region

        await mode.in_thread(twice)
    (text,) = said(caplog)
    assert "once 'report:{region}': {region} stands in the text as it is" in text


async def test_none_in_a_format_is_warned_about_once_a_line(mode, caplog):
    locks = real(mode.interlock())

    async def coroutine(user, shop=None):
        return user

    def plain(user, shop=None):
        return user

    function = coroutine if mode.name == "asyncio" else plain
    for decorate in (locks.synchronized("cart:{user}"), locks.once("cart {user}", key="{user}", at_most=60)):
        caplog.clear()
        misuse_warnings._warned_lines.clear()
        called = decorate(function)
        for user in (None, None, "None", 7):
            if mode.name == "asyncio":
                await called(user)
            else:
                await mode.in_thread(called, user)
        text = said(caplog)[0]
        assert "'user' is None in a call of " in text
        assert __file__ in text or "modes.py" in text
        assert "cart:None" in text or "cart None" in text
        assert "all such calls" in text or "they share one" in text
        assert len(said(caplog)) <= 2
    caplog.clear()
    other = locks.synchronized("cart:{user}")(function)  # `shop` is None, and not in the name
    await (other(1) if mode.name == "asyncio" else mode.in_thread(other, 1))
    assert not said(caplog)


def test_the_warning_of_none_has_the_attributes_of_a_record(caplog):
    misuse_warnings.warn_of_none("synchronized('a:{x}')", "the name", "x", "a:None", "f()")
    (record,) = caplog.records
    assert (record.lock, record.kind, record.fence, record.token) == ("a:None", "lock", None, None)
    assert record.levelno == logging.WARNING
