"""What stands in a user's traceback: the user's own code, one error, and nothing that only interlock knows."""

from __future__ import annotations

import asyncio
import gc
import traceback
import warnings

import pytest
import redis

import interlock
import interlock.aio
from harness.modes import outcome
from interlock import AcquireTimeout, LockError, Unavailable

pytestmark = pytest.mark.runs_on("valkey-9.1")
WAY_OUT = 'Interlock("embedded://") or `interlock server start` starts one'


def shown(error: LockError) -> list[str]:
    """The types of the errors in the traceback of this error, as a program that dies of the error prints them."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line.partition(":")[0] for line in lines if line[:1] not in {" ", ""} and line[0] not in "TD"]


async def failed(mode, target, **options):
    error = await outcome(mode.interlock(target).lock("a", **options).acquire())
    assert isinstance(error, LockError)
    return error


@pytest.fixture(autouse=True)
def no_debug(monkeypatch):
    monkeypatch.delenv("INTERLOCK_DEBUG", raising=False)


REFUSING = {
    "one server": "redis://localhost:1",
    "sentinels": "redis+sentinel://127.0.0.1:1/0?service=m",
    "a cluster": "redis+cluster://127.0.0.1:1",
    "a quorum": [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)],
}


@pytest.mark.parametrize("target", REFUSING.values(), ids=REFUSING)
async def test_a_refused_connection_shows_one_error(mode, target):
    error = await failed(mode, target, timeout=0.3)
    assert shown(error) == ["interlock.errors.Unavailable"]
    assert error.__cause__ is None


async def test_interlock_debug_shows_what_interlock_raised_inside(mode, monkeypatch):
    monkeypatch.setenv("INTERLOCK_DEBUG", "1")
    error = await failed(mode, "redis://localhost:1", timeout=0.3)
    assert shown(error)[0] == "interlock._protocol.server.Disconnected"
    assert shown(error)[-1] == "interlock.errors.Unavailable"


async def test_a_database_that_there_is_not_shows_one_error(mode, server):
    error = await failed(mode, f"{server.tcp_url.rpartition('/')[0]}/99")
    assert shown(error) == ["interlock.errors.ConfigError"]


class Provider(redis.CredentialProvider):
    """A user's, with a bug."""

    def get_credentials(self):
        return {}["password"]


async def test_an_error_of_the_users_own_code_stays_the_cause(mode, server):
    library = redis if mode.name == "threads" else redis.asyncio
    client = library.Redis(port=server.port, credential_provider=Provider())
    error = await failed(mode, client, timeout=0.3)
    assert shown(error)[0] == "KeyError"
    assert "get_credentials" in "".join(traceback.format_exception(error))


async def test_a_timeout_shows_no_silence_behind_it(mode, clean, proxy):
    """The server said that the lock is held, and was silent for the rest of the time."""
    locks = mode.interlock(proxy.url)
    await mode.keep(mode.interlock().lock("a").acquire())
    waiting = asyncio.ensure_future(outcome(locks.lock("a", timeout=0.6, fair=True).acquire()))
    core = mode.session(locks).core
    while not any(each.last_queued for each in core.waiters.registered.values()):
        await asyncio.sleep(0.002)
    proxy.drop_replies = True
    for attempt in core.waiters.registered.values():
        attempt.event.set()  # it asks again, and gets no answer
    error = await waiting
    proxy.drop_replies = False
    assert isinstance(error, AcquireTimeout)
    assert isinstance(error.__context__, Unavailable)
    assert shown(error) == ["interlock.errors.AcquireTimeout"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
async def test_a_refused_connection_to_this_machine_names_the_ways_out(mode, host):
    assert WAY_OUT in str(await failed(mode, f"redis://{host}:1", timeout=0.3))


@pytest.mark.parametrize(
    "target", ["rediss://localhost:1", "redis://no-such-host.invalid", "redis+cluster://127.0.0.1:1"]
)
async def test_other_servers_have_no_embedded_one_in_their_stead(mode, target):
    assert "embedded" not in str(await failed(mode, target, timeout=0.3))


def test_a_lease_that_is_used_after_its_loop_leaves_no_coroutine_behind(server):
    """Python warned: "coroutine 'Worker.run' was never awaited"."""
    locks, leases = interlock.aio.Interlock(server.url), []

    async def acquire():
        leases.append(await locks.lock("a").acquire())

    async def release():
        await leases[0].release()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(acquire())
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            asyncio.run(release())
        gc.collect()
    assert not [each for each in caught if "never awaited" in str(each.message)]
