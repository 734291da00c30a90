"""Real servers, both modes, and what must hold after every test."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import redis

from headers import Header
from interlock.embedded import Server
from interlock.ports import _wire
from kit import Kit, Residue
from proxy import Proxy


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """An `async def` test is one run of a loop, with the mode's kit closed and searched for leaks at its end."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def whole() -> None:
        residue = Residue()
        kits = [value for value in pyfuncitem.funcargs.values() if isinstance(value, Kit)]
        try:
            async with asyncio.timeout(60):
                await pyfuncitem.obj(**arguments)
        finally:
            for kit in kits:
                await kit.close()
        await residue.none()

    asyncio.run(whole())
    return True


@pytest.fixture(scope="session", autouse=True)
def every_message_is_as_the_lua_header_says():
    """Holds the header of each script against what Python really sends, in every test."""
    headers: dict[str, Header] = {}
    real = _wire.by_sha

    def checked(script, keys, args):
        header = headers.setdefault(script.name, Header(script.source))
        header.check(keys, args)
        return real(script, keys, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wire, "by_sha", checked)
        yield


@pytest.fixture(scope="session")
def server():
    """A private embedded server."""
    with Server() as started:
        yield started


@pytest.fixture
def redis_client(server):
    """A plain client, for looking behind the curtain."""
    client = redis.Redis.from_url(server.url)
    yield client
    client.close()


@pytest.fixture
def clean(redis_client):
    """An empty server before, and nothing without a TTL after."""
    redis_client.flushall()
    yield redis_client
    eternal = [key for key in redis_client.scan_iter() if redis_client.ttl(key) == -1 and not key.startswith(b"users:")]
    assert not eternal, f"keys without a TTL: {eternal}"


@pytest.fixture(params=["threads", "asyncio"])
def kit(request, server, clean):
    """The mode to test, over the server."""
    return Kit(request.param, server.url)


@pytest.fixture
def proxy(server):
    """A bad network in front of the server."""
    with Proxy(server.socket) as made:
        yield made
