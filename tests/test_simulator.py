"""The real core and the real Lua under every kind of fault, on a virtual clock. See interlock.testing.simulator."""

from collections import Counter

import pytest

pytest.importorskip("lupa")

from interlock import _core, _undo, _waiters
from interlock.primitives.lock import lock
from interlock.testing.simulator import PROFILES, RELAXED, simulate
from interlock.testing.simulator.server import Server

SEEDS = 300
SHARE = 25


@pytest.fixture(scope="module")
def seen():
    return {"counts": Counter(), "interleavings": set(), "runs": 0}


@pytest.mark.rule(1, 3, 4, 6, 7, 8, 9)
@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_no_rule_is_broken(first, seen):
    for seed in range(first, first + SHARE):
        report = simulate(seed)
        assert not report.violations, f"scripts/simulate --seed {seed} --trace: {report.violations[:3]}"
        seen["counts"] += report.counts
        seen["interleavings"].add(report.interleaving)
        seen["runs"] += 1


@pytest.mark.rule(7)
@pytest.mark.parametrize("profile", RELAXED)
def test_what_holds_without_the_server_s_promise(profile):
    for seed in range(10):
        report = simulate(seed, profile)
        assert not report.violations, (seed, report.violations[:3])
        assert report.counts["flush all"] + report.counts["clock step"] > 0


def test_the_faults_have_really_happened(seen):
    if seen["runs"] < SEEDS:
        pytest.skip("only a part of the seeds was run")
    wanted = {fault for profile in PROFILES.values() for fault in profile.rates} | {
        "request lost", "reply lost", "request doubled", "message slow", "message late", "connection refused",
        "connection reset", "replica met", "push lost", "push doubled", "script unknown", "acquire timed out",
        "executed after its caller had given up", "lease dropped", "write refused by its fence", "ensure raised",
    }  # fmt: skip
    assert {fault for fault in wanted if not seen["counts"][fault]} == set()
    assert len(seen["interleavings"]) == seen["runs"]


def test_a_seed_is_one_run():
    for seed in (5, 6):
        first, again = simulate(seed), simulate(seed)
        assert first == again
    assert simulate(5).fingerprint != simulate(12).fingerprint


# Planted bugs: each must be caught, by the rule that it breaks.


def caught(rule, *, profiles, lua=str, seeds=40):
    for seed in range(seeds):
        for profile in profiles:
            if any(f"rule {rule}:" in violation for violation in simulate(seed, profile, lua=lua).violations):
                return True
    return False


def replaced(old, new):
    def planted(source):
        assert source.count(old) == 1, f"lock.lua has changed: {old!r}"
        return source.replace(old, new)

    return planted


def test_a_deadline_counted_after_the_request_is_caught(monkeypatch):
    ask = _core.Core.ask

    async def late(self, *args):
        reply, _ = await ask(self, *args)
        return reply, self.port.now()

    monkeypatch.setattr(_core.Core, "ask", late)
    assert caught(1, profiles=["loss", "pause", "lossy cancel"])


def test_an_acquire_that_is_not_undone_when_cancelled_is_caught(monkeypatch):
    def forgetful(self, attempt):
        done = self.port.signal()
        done.set()
        return done

    monkeypatch.setattr(_undo.Undo, "add", forgetful)
    assert caught(5, profiles=["cancel"])


def test_a_section_that_starts_on_a_push_alone_is_caught(monkeypatch):
    woken = set()
    granted, ask = _waiters.Waiters.granted, _core.Core.ask

    def wake(self, token):
        woken.add(token)
        granted(self, token)

    async def credulous(self, attempt, args, until):
        if attempt.token in woken and args[0] == "acquire":
            return [_core.GRANTED, 1], self.port.now()
        return await ask(self, attempt, args, until)

    monkeypatch.setattr(_waiters.Waiters, "granted", wake)
    monkeypatch.setattr(_core.Core, "ask", credulous)
    assert caught(1, profiles=["loss", "pause", "chaos"])


PLANTED = {
    "renewal makes the key anew": (
        replaced(
            "states[#states + 1] = holder == '!' .. mine and REVOKED or GONE",
            "if not holder then call('SET', KEYS[i], mine, 'PX', ttl) end "
            "states[#states + 1] = holder and GONE or GRANTED",
        ),
        5, ["loss", "chaos"],
    ),
    "release deletes the key": (
        replaced("  local ours, again =", "  call('DEL', LOCK)\n  local ours, again ="), 1, ["loss", "cancel"],
    ),
    "no tombstone": (replaced("if call('ZSCORE', GONES, token) then return {GONE} end", ""), 5, ["lossy cancel"]),
    "the newest first": (replaced("QUEUE, 0, 0)[1]\n    if", "QUEUE, -1, -1)[1]\n    if"), 6, ["calm"]),
    "nobody is woken": (replaced("redis.pcall('PUBLISH', channel, 'granted ' .. first)", ""), 4, ["calm"]),
    "a fence in whole seconds": (replaced("math.max(fence + 1, now)", "now - now % 1e6"), 2, ["calm"]),
    "a record for ever": (
        replaced(", 'PX', RECORD_MS + ttl + math.ceil((fence - now) / 1000))", ")"), 3, ["calm"],
    ),
    "a confirmation that does not lengthen": (
        replaced("if pttl < tonumber(ttl) then call('PEXPIRE', LOCK, ttl) end", ""), 1, ["pause", "loss"],
    ),
    "a renewal that shortens": (replaced("if call('PTTL', KEYS[i]) < ttl then", "if true then"), 1, ["pause", "chaos"]),
    "the dead are not skipped": (replaced("tonumber(alive) > now", "true"), 4, ["crash"]),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_in_the_lua_is_caught(bug):
    planted, rule, profiles = PLANTED[bug]
    assert caught(rule, profiles=profiles, lua=planted)


def test_the_simulated_server_answers_as_fakeredis_does(monkeypatch):
    fakeredis = pytest.importorskip("fakeredis")
    import random

    clock = [0.0]
    monkeypatch.setattr("time.time", lambda: 1_700_000_000 + clock[0])
    theirs, ours = fakeredis.FakeRedis(), Server(lambda: clock[0])
    primitive, dice = lock("a", "lock:"), random.Random(7)
    keys = [key.encode() for key in primitive.keys]
    for step in range(1500):
        clock[0] += dice.choice((0.0, 0.001, 0.25, 1.5))
        token = f"t{dice.randrange(6)}"
        args = dice.choice((
            ("acquire", token, 2000, 2000, "ch", 1), ("acquire", token, 500, 500, "ch", 0), ("release", token, 0),
            ("release", token, 60000), ("vouch", "ch", token, 2000, "t1", 2000), ("revoke", token, 0, "why"),
            ("inspect", 10),
        ))  # fmt: skip
        if token == "t0" and args[0] == "release" and args[2]:
            clock[0] += 61
        expected = theirs.eval(primitive.script.source, len(keys), *keys, *args)
        answer = ours.eval(primitive.script.source, keys, [str(arg).encode() for arg in args])
        assert answer == expected, (step, args)
