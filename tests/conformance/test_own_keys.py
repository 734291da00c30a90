"""`lease.execute` of a command that would write the lock's own keys: refused before anything is sent."""

from __future__ import annotations

import pytest

from harness.modes import outcome, subscribe
from interlock import ConfigError

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")

KINDS = {
    "lock": lambda locks: locks.lock("a").acquire(),
    "rlock": lambda locks: locks.rlock("a").acquire(),
    "semaphore": lambda locks: locks.semaphore("a", 2).acquire(),
    "rwlock": lambda locks: locks.rwlock("a").write().acquire(),
    "election": lambda locks: locks.election("a").campaign(),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_command_that_writes_a_key_of_the_lock_is_refused_and_nothing_is_sent(mode, clean, kind):
    locks = mode.interlock()
    await subscribe(locks._session, "a")
    lease = await mode.keep(KINDS[kind](locks))
    own = [*lease._grant.resource.keys]
    before = {key: clean.dump(key) for key in own}
    calls = {name: stats["calls"] for name, stats in clean.info("commandstats").items() if "eval" in name}
    for key in own:
        for command, *words in (
            ("DEL", key), ("unlink", "x", key), (b"DEL", key.encode()), ("SET", bytearray(key.encode()), 1),
            ("EXPIRE", memoryview(key.encode()), 5), ("RENAME", "x", key), ("PERSIST", key),
        ):  # fmt: skip
            for keys in (None, [word for word in words if isinstance(word, str | bytes)]):
                error = await outcome(lease.execute(command, *words, keys=keys))
                assert isinstance(error, ConfigError), (command, words)
                assert "is a key of the lock itself" in str(error)
                assert "lease.release()" in str(error)
                assert error.name == "a"
    error = await outcome(lease.execute("DEL", own[0], keys=[]))  # though that says that it has no keys
    assert isinstance(error, ConfigError)
    assert {key: clean.dump(key) for key in own} == before
    after = {name: stats["calls"] for name, stats in clean.info("commandstats").items() if "eval" in name}
    if kind not in {"semaphore", "election", "rwlock"}:  # these also tell the server that they are alive
        assert after == calls
    lease.ensure()


async def test_reading_is_fine_and_so_is_the_name_as_a_value(mode, clean):
    lease = await mode.keep(mode.interlock().lock("a").acquire())
    assert await lease.execute("GET", "lock:a") == lease.token.encode()
    assert await lease.execute("pttl", b"lock:a", keys=[b"lock:a"]) > 0
    assert await lease.execute("SET", "x", "lock:a", "EX", 60, keys=["x"]) == b"OK"
    error = await outcome(lease.execute("SET", "x", "lock:a", "EX", 60))
    assert "If that is a value, say which arguments are keys: keys=[...]" in str(error)


async def test_data_under_the_name_of_a_lock_without_a_prefix_is_refused(mode, clean):
    lease = await mode.keep(mode.interlock(prefix="").lock("stock:42").acquire())
    error = await outcome(lease.execute("SET", "stock:42", 7, keys=["stock:42"]))
    assert isinstance(error, ConfigError)
    assert "Data needs another key" in str(error)
