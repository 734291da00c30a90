"""What the scripts store of each name: for how long, and that versions which know more or less of it get along.

Theory. Any text that a script stores may have got words of a later version, between those that this one knows and the
free text at the end. So a walk over a script sends each message twice to the same keys: once as they are, and once with
a word more in every text. The answers and the keys must be the same, and the words still there.
"""

from __future__ import annotations

import asyncio
import re

import pytest

pytest.importorskip("lupa")

import test_permits
import test_scripts

from harness.modes import outcome, until, waiting
from interlock._protocol.server import ServerError
from interlock.errors import ConfigError
from interlock.primitives.codes import BUSY, WRONG_KIND
from interlock.primitives.permits import ALL_PERMITS
from model import script_model as walk
from simulator import later
from simulator.commands import Hash, ZSet

rule = pytest.mark.rule
NAMES = {"lock": "lock:a", "record": "{lock:a}{record}", "waiters": "{lock:a}{waiters}", "shares": "{lock:a}{shares}"}
able = pytest.fixture(autouse=True)(walk.able)

WALKS = {
    "latch": lambda: test_scripts.LatchWalk(7),
    "barrier": lambda: test_scripts.BarrierWalk(7, 3),
    "election": lambda: test_scripts.ElectionWalk(7),
    "once": lambda: test_scripts.OnceWalk(7),
    "multi": lambda: test_scripts.MultiWalk(7),
    "semaphore": lambda: test_permits.Walk(7, "semaphore", 3),
    "rwlock": lambda: test_permits.Walk(7, "rwlock", ALL_PERMITS),
}
every_walk = pytest.mark.parametrize("script", WALKS)
ASKS = {b"acquire", b"watch", b"limit", b"count", b"reset"}  # what a name in use as something else refuses
GRANTED = 1


def copy(server):
    data, expires = server.image()
    return data, expires


class Double:
    """Tells a server each message twice, from the same keys: first to keys that `changed` was applied to."""

    def __init__(self, server, changed, judge):
        self.server, self.changed, self.judge, self.told = server, changed, judge, 0
        self.eval, server.eval = server.eval, self.both

    def both(self, source, keys, args):
        server = self.server
        server.purge_all()
        data, expires = copy(server)
        publish, server.publish = server.publish, lambda _channel, _payload: 1
        self.changed(server.data)
        before = copy(server)[0]
        grown = args[0] == b"forget" and self.changed is later.add  # it names the note by its whole text
        other = self.eval(source, keys, [args[0], args[1] + b" " + later.WORD, *args[2:]] if grown else args)
        after = copy(server)
        server.data, server.expires, server.publish = data, expires, publish
        reply = self.eval(source, keys, args)
        if not isinstance(reply, ServerError):  # out of memory one may come a step further
            self.told += 1
            self.judge(args, reply, other, before, after, copy(server))
        return reply


def texts(data):
    """Each text that may have got a word, by where it stands."""
    for key, value in data.items():
        if isinstance(value, Hash):
            yield from (((key, name), text) for name, text in value.items())
        elif isinstance(value, bytes):
            yield key, value


def without_inspected(reply):
    """What a person is shown may have the words."""
    if isinstance(reply, list):
        return [without_inspected(each) for each in reply]
    return reply.replace(b" " + later.WORD, b"") if isinstance(reply, bytes) else reply


@every_walk
def test_a_word_more_in_every_text_changes_no_answer_and_is_kept(script):
    kept = lost = 0

    def judge(args, reply, other, before, after, plain):
        nonlocal kept, lost
        assert without_inspected(other) == reply
        data, expires = after
        now = dict(texts(data))
        for where, text in texts(before):
            if later.WORD not in text or where not in now:
                continue
            survived = later.WORD in now[where]
            kept += survived
            # A grant, a place in the queue and a generation begin anew; so does a text of one's own.
            anew = now[where].split(b" ")[:3] != text.split(b" ")[:3] or b"waiters" in str(where).encode()
            lost += not survived
            assert survived or anew, f"{args}: {text} became {now[where]}"
        later.strip(data)
        assert (data, expires) == plain

    walked = WALKS[script]()
    double = Double(walked.world.server, later.add, judge)
    walked.run(600)
    assert double.told > 300
    assert kept > 300
    assert kept > lost


def another(data):
    """Records of the next version."""
    for key, value in data.items():
        if key.endswith(b"record"):
            data[key] = b"2" + value[1:]


@rule(1, 9)
@every_walk
def test_a_record_of_another_version_is_refused_and_left_as_it_is(script):
    refused = 0

    def had(data, keys):
        """The holders in each of these keys."""
        kinds = {key: type(data[key]) for key in keys if key in data}
        return {key: {*data[key]} if kind is ZSet else {data[key]} for key, kind in kinds.items() if kind is not Hash}

    def judge(args, reply, other, before, after, plain):
        nonlocal refused
        data, _ = after
        records = {key: text for key, text in before.items() if key.endswith(b"record")}
        assert {key: data.get(key) for key in records} == records, f"{args} changed it"
        if args[0] in ASKS and records and not isinstance(other, ServerError):
            assert other[0] in {WRONG_KIND, BUSY}
            refused += other[0] == WRONG_KIND
        mains = [key.removesuffix(b"record") or b"k" for key in records]
        was, now = had(before, mains), had(data, mains)
        for key, holders in now.items():
            new = {each for each in holders if not each.startswith(b"!")} - was.get(key, set())
            assert not new, f"{args} granted {new}"

    walked = WALKS[script]()
    double = Double(walked.world.server, another, judge)
    walked.run(600)
    assert double.told > 300
    assert refused > 50


# On real servers


@rule(7, 10)
@pytest.mark.not_on_a_cluster
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
async def test_the_record_outlives_a_lease_that_was_extended_far(mode, clean, kind):
    """It has the fence, and the identity of the server, which is the evidence after a restart."""
    locks = mode.interlock(max_ttl=3600)
    lease = await (locks.lock("a") if kind == "lock" else locks.semaphore("a", 1)).acquire()
    await lease.extend(3600)
    assert clean.pttl(NAMES["record"]) > clean.pttl("lock:a") + 60_000
    assert await lease.release()


def grown(client) -> None:
    """Put a word more into every text on the server."""
    kept = {key: client.type(key) for key in client.scan_iter()}
    data = {key: client.get(key) for key, kind in kept.items() if kind == b"string"}
    data |= {key: Hash(client.hgetall(key)) for key, kind in kept.items() if kind == b"hash"}
    later.add(data)
    for key, value in data.items():
        if isinstance(value, Hash):
            client.hset(key, mapping=value)
        else:
            client.set(key, value, keepttl=True)


LEASED = {
    "lock": lambda locks: locks.lock("a"),
    "rlock": lambda locks: locks.rlock("a"),
    "write": lambda locks: locks.rwlock("a").write(),
    "semaphore": lambda locks: locks.semaphore("a", 1),
    "election": lambda locks: locks.election("a"),
}


def lasting(state):
    """What inspect() says, but for the times."""
    text = re.sub(r"(remaining|quarantine)=[0-9.]+", "", str(state))
    assert "later" not in text
    return text


@pytest.mark.not_on_a_cluster
@pytest.mark.parametrize("kind", LEASED)
async def test_leases_are_had_seen_and_revoked_whatever_a_later_version_stored(mode, clean, kind):
    one, other = LEASED[kind](mode.interlock(max_ttl=40)), LEASED[kind](mode.interlock())
    lease = await one.acquire()
    waiter = asyncio.ensure_future(other.acquire(timeout=30))
    await until(lambda: waiting(one, 1))
    before = lasting(await one.inspect())
    grown(clean)
    assert lasting(await one.inspect()) == before
    await lease.extend(40)
    lease.ensure()
    assert await one.revoke("for maintenance", force=True)
    following = await waiter
    assert following.fence > lease.fence
    assert not await lease.release()
    grown(clean)
    if kind == "election":
        assert (await one.leader()).token == following.token
    assert await following.release()


@pytest.mark.not_on_a_cluster
async def test_a_reason_is_read_beside_words_of_a_later_version(mode, clean):
    for kind in ("lock", "semaphore"):
        locks, one = mode.interlock(), LEASED[kind](mode.interlock())
        lease = await LEASED[kind](locks).acquire()
        mode.session(locks).ends.lose = lambda *_: None  # it does not hear of it, and gives nothing back
        grown(clean)
        assert await one.revoke("!for ! maintenance")
        grown(clean)
        state = await one.inspect()
        why = state.revoked if kind == "lock" else state.holders[0].revoked
        assert why.startswith("!for ! maintenance (by ")
        assert not await lease.release()
        clean.flushall()


@pytest.mark.not_on_a_cluster
async def test_latches_barriers_and_runs_go_on_whatever_a_later_version_stored(mode, clean):
    locks = mode.interlock()
    through = asyncio.ensure_future(locks.latch("l", 2).wait(30))
    early = asyncio.ensure_future(locks.barrier("b", 2).wait(30))
    await until(lambda: waiting(locks.latch("l", 2), 1))
    await until(lambda: waiting(locks.barrier("b", 2), 1))
    ran = await locks.once("o", at_most=10, at_least=10).run(
        lambda _lease: nothing() if mode.name == "asyncio" else None
    )
    seen = [locks.latch("l", 2), locks.barrier("b", 2), locks.once("o", at_most=10)]
    before = [lasting(await each.inspect()) for each in seen]
    grown(clean)
    assert [re.sub("free_in.*", "", lasting(await each.inspect())) for each in seen] == [
        re.sub("free_in.*", "", each) for each in before
    ]
    assert [await locks.latch("l", 2).count_down() for _ in range(2)] == [1, 0]
    await through
    assert await locks.barrier("b", 2).wait(30) == 1
    assert await early == 0
    skipped = await locks.once("o", at_most=10).run(lambda _lease: nothing() if mode.name == "asyncio" else None)
    assert (skipped.by, skipped.started) == (ran.by, ran.started)
    assert await locks.once("o", at_most=10).forget()


async def nothing() -> None:
    """Work that runs once."""


@rule(1)
@pytest.mark.not_on_a_cluster
@pytest.mark.parametrize("kind", LEASED)
async def test_a_record_of_another_version_is_told_and_no_waiter_is_handed_what_it_guards(mode, clean, kind):
    one, other = LEASED[kind](mode.interlock()), LEASED[kind](mode.interlock())
    lease = await one.acquire()
    waiter = asyncio.ensure_future(outcome(other.acquire(timeout=30)))
    await until(lambda: waiting(one, 1))
    record = b"2" + clean.get(NAMES["record"])[1:]
    clean.set(NAMES["record"], record, keepttl=True)
    assert await lease.release()
    error = await waiter
    assert isinstance(error, ConfigError)
    assert "by another version ('2 " in str(error)
    assert clean.get(NAMES["record"]) == record
    assert not clean.exists("lock:a")
