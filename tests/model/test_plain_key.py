"""compat/plain_key.lua by itself: a walk of messages, doubled, late and by the dead, beside clients of another library.

After each message the walk compares the keys with the rules: who may take the key, who may delete it, and who is woken.
A second server gets the same messages and runs the script without its plain cases: both must do the same.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("lupa")

from interlock._protocol.server import ServerError
from interlock.primitives.codes import BUSY, GRANTED, NOT_FOUND, QUEUED, RETRY, WRONG_KIND
from interlock.primitives.scripts import load
from model import script_model as walk
from simulator import server

rule = pytest.mark.rule
able = pytest.fixture(autouse=True)(walk.able)
KEYS = LOCK, RECORD, QUEUE, WAITERS, GONE = b"k", b"record", b"queue", b"waiters", b"gone"
SOURCE = load("plain_key", "interlock.compat").source
FIRST, LAST = "-- The plain cases", "-- The queue of waiters."
THEIRS = b"theirs"  # the value of a client of the other library
LEASE = re.compile(rb"!|.*/\d+/[^/ ]+/[0-9a-f]{32}$")  # the value of a lease of interlock
ALIVE_MS, LONG_RUN_MS, GAP_MS = 3000, 10_000, 100


class Twins(walk.World):
    """Two servers with one lock under one clock: one runs the script, the other the script without its plain cases."""

    grants_leases = False

    def __init__(self):
        super().__init__("latch", KEYS)
        self.source = SOURCE
        self.slow_source = SOURCE[: SOURCE.index(FIRST)] + SOURCE[SOURCE.index(LAST) :]
        self.slow = server.Server(lambda: self.clock)
        self.slow.subscribers = self.server.subscribers
        self.slow_pushes = []
        self.slow.publish = lambda channel, payload: self.slow_pushes.append((channel, payload)) or 1
        self.taken_by = {}  # value -> the attempt that took the key with it last
        self.tombstones = {}  # token -> until, ms
        self.channels = {}  # token -> its channel and whether it was subscribed
        self.alive = {}  # token -> until, ms

    # What the walk says

    def acquire(self, token, value=None, *, ttl=5000, waits="inf", heard=1, channel=b"c", poll=100):
        return self.say("acquire", token, ttl, 3000, heard, channel, waits, value or b"v" + token, poll)

    def release(self, token, value=None, whose="attempt", tombstone=0):
        return self.say("release", token, tombstone, value or b"v" + token, whose)

    def heartbeat(self, *tokens, channel=b"c", heard=1):
        return self.say("heartbeat", channel, heard, *(word for token in tokens for word in (token, 3000)))

    def say(self, verb, *args, **where):
        reply = super().say(verb, *args, **where)
        words = [verb.encode(), *(arg if isinstance(arg, bytes) else str(arg).encode() for arg in args), walk.EPOCH]
        self.slow.read_clock()
        slowly = self.slow.eval(self.slow_source, list(KEYS), words)
        assert str(slowly) == str(reply), f"{self.log[-5:]}: {reply} with the plain cases, {slowly} without"
        for each in (self.server, self.slow):
            each.purge_all()
        assert self.server.data == self.slow.data
        assert self.server.expires == self.slow.expires
        assert self.pushes == self.slow_pushes
        return reply

    def foreign(self, value, ttl_ms=None):
        """A client of the other library: SET NX, or DEL for None. Returns whether it had an effect."""
        if (self.look(LOCK) is None) is (value is None):
            return False
        for each in (self.server, self.slow):
            each.read_clock()
            each.data.pop(LOCK, None)
            each.expires.pop(LOCK, None)
            if value is not None:
                each.data[LOCK] = value
                if ttl_ms:
                    each.expires[LOCK] = each.now_ms + ttl_ms
        return True

    # What must hold

    def nothing_eternal(self):
        for key in self.server.data:
            assert key == LOCK or key in self.server.expires, f"{key} has no TTL"

    def see(self):
        return self.look(LOCK), self.order(), len(self.pushes), (self.look(RECORD) or b"").split(b" ")

    def order(self):
        self.server.read_clock()
        return self.server.ordered(QUEUE)

    def turn(self, queue, asks=b""):
        """The oldest waiter that is alive and reachable, else the oldest that is alive. The reply reaches `asks`."""
        alive = [each for each in queue if self.alive.get(each, 0) > self.now]
        heard = [
            each
            for each in alive
            if each == asks or not self.channels[each][1] or self.channels[each][0] not in self.dumb
        ]
        return (heard or alive or [None])[0]

    def judge(self, verb, args, reply, before):
        stored, queue, pushed, record = before
        self.noted = b" ".join(record).partition(b" !")[2]  # the value of the attempt that took the key last
        now = self.look(LOCK)
        if isinstance(reply, ServerError):
            assert now == stored, "an error, and the key has changed"
            return
        asks = args[0] if verb == "acquire" else b""
        head = self.turn([each for each in queue if each != args[0] or verb != "release"], asks)
        in_gap = len(record) > 5 and float(record[5]) > self.now
        getattr(self, "judge_" + verb)(args, reply, stored, now, head, in_gap, pushed)

    def judge_acquire(self, args, reply, stored, now, head, in_gap, _pushed):
        token, ttl, _, heard, channel, _, value, _ = args
        if reply[0] == GRANTED and stored is None:
            assert head in {None, token}, "it overtook the head"
            assert not (in_gap and head), "it took the key in a gap"
            assert now == value
            assert (LOCK in self.server.expires) is (ttl != b"0")
            self.taken_by[value] = token
        elif reply[0] == GRANTED:
            assert stored == now == value and self.taken_by[value] == token, "two hold it"
        else:
            assert now == stored
        dead = self.tombstones.get(token, 0) > self.now
        assert (reply[0] == NOT_FOUND) <= dead and not (dead and stored is None and reply[0] == GRANTED)
        if reply[0] == QUEUED:
            self.alive[token], self.channels[token] = self.now + ALIVE_MS, (channel, heard == b"1")
            assert reply[1:2] == [stored or b""] and reply[3] == int(self.order()[0] == token)
            assert reply[2] > 0
            if stored is not None and self.taken_by.get(stored) is None and reply[3]:
                assert reply[2] <= 100, "nobody looks at a key whose DEL wakes nobody"
        assert (reply[0] == QUEUED) <= (token in self.order()) and (reply[0] == GRANTED) <= (token not in self.order())

    def judge_release(self, args, reply, stored, now, head, _in_gap, pushed):
        token, tombstone, value, whose = args
        has_value, took_it = stored == value, self.taken_by.get(value) == token
        may = stored is not None and {
            b"attempt": has_value and took_it, b"holder": has_value and (took_it or self.noted != value),
            b"value": has_value, b"any": True, b"not-lease": not LEASE.match(stored or b""),
        }.get(whose, False)  # fmt: skip
        assert reply[0] == may
        assert now == (None if may else stored), "the key of another"
        assert token not in self.order()
        if now is None and head and not reply[1]:
            assert self.pushes[pushed:] == [(self.channels[head][0], b"granted " + head)], "the head sleeps on"
        if tombstone != b"0":
            self.tombstones[token] = max(self.tombstones.get(token, 0), self.now + int(tombstone))

    def judge_heartbeat(self, args, reply, stored, now, _head, in_gap, pushed):
        assert now == stored
        channel, heard, *waiters = args
        for token, state in zip(waiters[::2], reply[2:], strict=True):
            if state != NOT_FOUND:
                self.alive[token], self.channels[token] = self.now + ALIVE_MS, (channel, heard == b"1")
        head = self.turn(self.order())
        if stored is None and head and not in_gap:
            assert self.pushes[pushed:] == [(self.channels[head][0], b"granted " + head)], "nobody takes the free key"
        for token, state in zip(waiters[::2], reply[2:], strict=True):
            assert (state == RETRY) <= (token == reply[1])


class Caller:
    def __init__(self, token, rnd):
        self.token, self.channel, self.value = token, b"c%d" % rnd.randint(0, 3), b"v" + token
        self.ttl = rnd.choice((0, 300, 5000))
        self.holds = False
        self.in_doubt = rnd.random() < 0.2


class Walk(walk.Walk):
    """Callers who wait, hold, repeat themselves and die, beside clients of the other library."""

    def __init__(self, seed):
        super().__init__(Twins(), "plain key", seed)
        self.callers = []
        self.granted = self.foreign = 0

    def ask(self, caller, waits="inf"):
        if caller.holds:
            return
        reply = self.say(
            "acquire", caller.token, caller.ttl, 3000, int(self.random.random() < 0.8), caller.channel, waits,
            caller.value, 100, again=0.2 * caller.in_doubt,
        )  # fmt: skip
        code = 0 if isinstance(reply, ServerError) else reply[0]
        if code == GRANTED:
            caller.holds = True
            self.granted += 1
            if caller.in_doubt:
                self.say("release", caller.token, 60_000, b"", "none")
        elif code in {BUSY, NOT_FOUND}:
            self.callers.remove(caller)

    def step(self):
        rnd, world = self.random, self.world
        self.pass_time(*(0, 0, 0, 0, 0.001, 0.01, 0.1, 0.3, 1), *((3, 11) if rnd.random() < 0.1 else ()))
        if rnd.random() < 0.05:
            world.dumb ^= {b"c%d" % rnd.randint(0, 3)}
        caller = rnd.choice(self.callers) if self.callers else None
        holders = [each for each in self.callers if each.holds]
        if holders and rnd.random() < 0.5:
            caller = holders[0]
        match rnd.choices(
            ("come", "ask", "heartbeat", "leave", "die", "late", "foreign", "hear"), (20, 10, 10, 15, 3, 8, 6, 15)
        )[0]:
            case "come":
                self.number += 1
                self.callers.append(Caller(b"t%d" % self.number, rnd))
                self.ask(self.callers[-1], "inf" if rnd.random() < 0.8 else "0")
            case "ask" if caller:
                self.ask(caller)
            case "heartbeat":
                self.heartbeat()
            case "leave" if caller:
                self.callers.remove(caller)
                if caller.holds:
                    self.say("release", b"release/%d" % len(world.log), 0, caller.value, "value")
                else:
                    self.say("release", caller.token, 60_000 if caller.in_doubt else 0, caller.value, "attempt")
            case "die" if caller:
                self.callers.remove(caller)
                world.foreign(None)  # somebody repairs it: a holder may have had no ttl
            case "late":
                self.late()
            case "foreign":
                self.foreign += world.foreign(rnd.choice((THEIRS, None)), rnd.choice((None, 400)))
            case "hear":
                for channel, payload in world.pushes[-walk.SOME :]:
                    for each in [each for each in self.callers if payload == b"granted " + each.token]:
                        if channel not in world.dumb:
                            self.ask(each)

    def heartbeat(self):
        for channel in sorted({each.channel for each in self.callers}):
            crowd = [each for each in self.callers if each.channel == channel and not each.holds]
            reply = self.say("heartbeat", channel, 1, *(word for each in crowd for word in (each.token, 3000)))
            for each, state in zip(crowd, reply[2:], strict=True):
                if state != QUEUED:
                    self.ask(each)

    def possible(self, verb, args):
        """No acquire comes late: only a sender in doubt has late copies, and then it leaves a tombstone."""
        return verb == "heartbeat" or (verb == "release" and args[3] != "any")


@rule(1, 3, 8, 9)
@pytest.mark.parametrize("seed", range(4))
def test_no_rule_of_the_plain_key_is_broken(seed):
    walked = Walk(seed)
    walked.run(2500)
    assert walked.granted > 60 and walked.foreign > 20


@rule(8)
def test_a_late_copy_of_an_acquire_in_doubt_takes_nothing_once_its_caller_has_gone_on():
    world = Twins()
    assert world.acquire(b"a") == [GRANTED]
    world.release(b"a", b"", "none", 60_000)
    world.release(b"release/1", b"va", "value")
    assert world.acquire(b"a") == [NOT_FOUND]
    assert world.look(LOCK) is None


@rule(1)
def test_a_newcomer_does_not_overtake_the_head_that_was_woken():
    world = Twins()
    world.acquire(b"a")
    assert world.acquire(b"b")[0] == world.acquire(b"c")[0] == QUEUED
    world.release(b"release/1", b"va", "value")
    assert world.acquire(b"d", waits="0")[0] == BUSY
    assert world.acquire(b"c")[0] == QUEUED
    assert world.acquire(b"b") == [GRANTED]


@rule(4)
def test_a_head_that_dies_after_its_wake_up_is_passed_over():
    world = Twins()
    world.acquire(b"a")
    world.acquire(b"b")
    world.acquire(b"c", channel=b"c2")
    world.release(b"release/1", b"va", "value")
    world.clock += 2
    world.heartbeat(b"c", channel=b"c2")
    world.clock += 2
    assert world.heartbeat(b"c", channel=b"c2")[2:] == [RETRY]
    assert world.acquire(b"c", channel=b"c2") == [GRANTED]


@rule(1)
def test_a_head_that_gives_up_passes_its_wake_up_on():
    world = Twins()
    world.acquire(b"a")
    world.acquire(b"b")
    world.acquire(b"c")
    world.release(b"release/1", b"va", "value")
    world.release(b"b")
    assert [payload for _, payload in world.pushes] == [b"granted b", b"granted c"]


@rule(1)
def test_the_release_at_the_end_of_a_run_leaves_a_gap_for_clients_of_the_other_library():
    world = Twins()
    world.acquire(b"t0")
    for number in range(1, 13):  # the 1 s sections of clients that wait one after another
        world.acquire(b"t%d" % number)
        world.clock += 1
        world.heartbeat(b"t%d" % number)
        world.release(b"release/%d" % number, b"vt%d" % (number - 1), "value")
        code, *rest = world.acquire(b"t%d" % number)
        if code != GRANTED:
            break
    assert number == 1 + LONG_RUN_MS // 1000, "not a whole run"
    assert rest == [b"", GAP_MS, 1]
    assert world.acquire(b"new", waits="0")[0] == BUSY
    assert world.foreign(THEIRS)
    world.foreign(None)
    world.clock += GAP_MS / 1000 + 0.001
    assert world.acquire(b"t%d" % number) == [GRANTED]


@rule(1)
def test_a_run_is_short_while_foreign_holders_are_about():
    world = Twins()
    world.foreign(THEIRS)
    assert world.acquire(b"t0")[:2] == [QUEUED, THEIRS]
    world.foreign(None)
    assert world.acquire(b"t0") == [GRANTED]
    world.acquire(b"t1")
    world.clock += 1.1
    world.heartbeat(b"t1")
    world.release(b"release/1", b"vt0", "value")
    assert world.acquire(b"t1")[:3] == [QUEUED, b"", GAP_MS]


@rule(9)
def test_a_record_of_a_later_version_is_refused_and_kept():
    world = Twins()
    for each in (world.server, world.slow):
        each.data[RECORD], each.expires[RECORD] = b"2 plain x", 1e15
    assert world.acquire(b"a") == [WRONG_KIND, b"2 plain x"]
    world.foreign(b"va")
    assert world.release(b"release/1", b"va", "value") == [1, 0]
    assert world.look(RECORD) == b"2 plain x"


@rule(9)
def test_words_of_a_later_version_are_passed_over():
    world = Twins()
    for each in (world.server, world.slow):
        each.data[RECORD], each.expires[RECORD] = b"1 plain a 0 0 0 new words !va", 1e15
    assert world.acquire(b"b") == [GRANTED]
    assert world.acquire(b"b") == [GRANTED]


@rule(8)
def test_two_attempts_with_one_value_are_not_taken_for_one():
    world = Twins()
    assert world.acquire(b"a", b"same") == [GRANTED]
    assert world.acquire(b"b", b"same", waits="0")[0] == BUSY
    assert world.acquire(b"c", b"same")[0] == QUEUED
    assert world.release(b"c", b"same") == [0, 0]
    assert world.look(LOCK) == b"same"


@rule(1)
def test_a_heartbeat_notes_a_foreign_holder_too():
    world = Twins()
    world.acquire(b"t0")
    world.acquire(b"t1")
    world.foreign(None)
    world.foreign(THEIRS)
    assert world.heartbeat(b"t1")[2:] == [RETRY]
    assert world.acquire(b"t1") == [QUEUED, THEIRS, GAP_MS, 1]
    world.foreign(None)
    world.acquire(b"t1")
    world.acquire(b"t2")
    world.clock += 1.1
    world.heartbeat(b"t2")
    world.release(b"release/1", b"vt1", "value")
    assert world.acquire(b"t2")[:3] == [QUEUED, b"", GAP_MS]


@rule(1)
def test_after_a_run_of_foreign_holders_the_head_polls_as_often_as_all_waiters_would():
    world = Twins()
    world.foreign(THEIRS)
    for number in range(10):
        world.acquire(b"t%d" % number)
    assert world.acquire(b"t0") == [QUEUED, THEIRS, 100, 1]
    world.foreign(None)
    world.foreign(b"another of theirs")
    world.clock += 1.1
    assert world.acquire(b"t0") == [QUEUED, b"another of theirs", 10, 1]
    assert world.acquire(b"t0", poll=20)[2] == 5, "too often"
    assert world.acquire(b"t0", poll=2)[2] == 2, "less often than its caller wants"
    world.foreign(None)
    assert world.acquire(b"t0") == [GRANTED]
    world.foreign(None)
    world.foreign(THEIRS)
    assert world.acquire(b"t1") == [QUEUED, THEIRS, 100, 1], "a new run"


@rule(8)
def test_a_late_copy_of_a_release_does_not_end_a_later_section_under_the_same_value():
    world = Twins()
    world.acquire(b"a", b"same")
    assert world.release(b"a", b"same", "holder") == [1, 0]
    world.acquire(b"b", b"same")
    assert world.release(b"a", b"same", "holder") == [0, 0]
    assert world.look(LOCK) == b"same"
    for each in (world.server, world.slow):  # the record has expired: the value alone says whose the key is
        del each.data[RECORD], each.expires[RECORD]
    assert world.release(b"b", b"same", "holder") == [1, 0]


@rule(9)
def test_the_release_of_whoever_holds_spares_a_lease_of_interlock():
    world = Twins()
    for value, spared in ((b"h/1/MainThread/" + b"0" * 32, True), (b"!quarantine:x", True), (b"their id", False)):
        world.foreign(value)
        assert world.release(b"release/1", b"", "not-lease") == [int(not spared), 0]
        world.foreign(None)
