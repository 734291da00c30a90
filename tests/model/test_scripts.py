"""Latch, barrier, election, once and multi, each by itself: a random walk of messages, doubled, late and by the dead.

Each has a model of its rules beside it, which says what the reply to a message and the keys after it must be. Below
each walk: what hostile minds suspected. $WALK multiplies the length of the walks, and $WALK_SEED makes other walks.
"""

# ruff: noqa: PLR0911 (each `expect_...` of a model returns where a rule decides)

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

pytest.importorskip("lupa")

from interlock._protocol.server import ServerError
from interlock.primitives.codes import (
    BROKEN,
    BUSY,
    CROWDED,
    GRANTED,
    LIMIT_MISMATCH,
    NOT_FOUND,
    QUEUED,
    RETRY,
    REVOKED,
    WRONG_KIND,
)
from model import script_model as walk
from model.script_model import SOME

rule = pytest.mark.rule
able = pytest.fixture(autouse=True)(walk.able)
FIVE = KEY, RECORD, QUEUE, WAITERS, GONES = b"k", b"record", b"queue", b"waiters", b"gone"
PRESENT = b"present"
ALIVE_MS = 3000


class Queued(walk.World):
    """A world with a queue."""

    def hash(self, key):
        return dict(self.look(key) or {})

    def lasting(self):
        """All but the tombstones."""
        return {key: value for key, value in self.image().items() if key != GONES}

    def waiting(self):
        """The tokens in the queue, in order."""
        self.server.read_clock()
        return self.server.ordered(QUEUE)

    def pttl(self, key):
        self.look(key)
        return self.server.expires[key] - self.server.now_ms if key in self.server.expires else -2

    def pushed(self, since=0):
        """The tokens to which pushes went, in order."""
        return [payload.removeprefix(b"granted ") for _, payload in self.pushes[since:]]


# The latch


@dataclass
class Count:
    """What a latch is."""

    generation: bytes
    left: int
    keep: int
    until: float
    count: int
    why: bytes = b""


class LatchWorld(Queued):
    """One latch, and what it ought to be."""

    grants_leases = False

    def __init__(self):
        super().__init__("latch", FIVE)
        self.model = None
        self.done = {}  # operation -> until, ms
        self.dead = {}  # token -> until, ms
        self.newest = 0
        self.opened = 0

    def acquire(self, token, phase="", *, wait="inf", heard=0, channel="c", count=2, keep=20_000):
        return self.say("acquire", token, 3000, 3000, heard, channel, wait, count, keep, phase)

    def count(self, operation, by=1, count=2, keep=20_000):
        return self.say("count", operation, by, count, keep)

    def heartbeat(self, *tokens, channel="c", heard=0):
        return self.say("heartbeat", channel, heard, *(arg for token in tokens for arg in (token, 3000)))

    # The model

    @property
    def over(self):
        return self.model is None or self.model.left == 0 or bool(self.model.why)

    def see(self):
        if self.model and self.model.until < self.now:
            self.model = None
        return self.waiting(), len(self.pushes), self.lasting() if self.server.full else None

    def make(self, count, keep):
        if self.model is None:
            generation = (self.look(RECORD) or b"").removeprefix(b"1 latch ")
            assert int(generation or 0) > self.newest, "a new one, and no newer generation"
            self.newest = int(generation)
            self.model = Count(generation, int(count), int(keep), 0, int(count))

    def alive(self):
        """The waiters that live, in order."""
        waiters = self.look(FIVE[3]) or {}
        return [each for each in self.waiting() if float(waiters.get(each, b"0").split(b" ")[0]) > self.now]

    def touch(self):
        if self.model:
            self.model.until = self.now + self.model.keep

    def has_another(self, count):
        return self.model is not None and not self.model.why and self.model.count != int(count)

    def judge(self, verb, args, reply, before):
        waited, told, image = before
        if isinstance(reply, ServerError):
            assert verb in {"acquire", "count", "revoke"}, "who waits needs no memory"
            assert self.lasting() == image, "refused, and done"
            return
        fresh = self.model is None
        again = verb in {"count", "revoke"} and self.done.get(args[0], 0) >= self.now
        assert reply == getattr(self, "expect_" + verb)(*args), f"not as the model says: {self.model}"
        self.keys_are_right()
        left = self.waiting()
        staying = [each for each in waited if each in left]
        newcomer = [each for each in left if each not in waited]
        assert left == staying + newcomer, "the queue was shuffled"
        assert not newcomer or (verb == "acquire" and newcomer == [args[0]])
        if again or reply[0] == LIMIT_MISMATCH:
            assert waited == left
        elif (
            self.over
            and verb in {"acquire", "count", "heartbeat", "revoke"}
            and not (verb == "revoke" and reply == [0])
        ):
            gone = [each for each in waited if each not in left and each != args[0]]
            assert len(gone) >= min(SOME, len(waited)) - 1, "who waits for nothing is not woken"
            assert set(gone) <= set(self.pushed(told)), "dropped, and not told"
        elif verb != "release" and not fresh:
            assert set(waited) <= set(left), "dropped for nothing"

    def keys_are_right(self):
        fields, model = self.hash(KEY), self.model
        if model is None:
            assert not fields
            return
        assert (int(fields[b"left"]), fields.get(b"why", b"")) == (model.left, model.why)
        assert self.look(RECORD) == b"1 latch " + model.generation
        assert self.pttl(KEY) == self.pttl(RECORD) == model.until - self.now

    def expect_acquire(self, token, ttl, life, heard, channel, wait, count, keep, phase):
        if self.dead.get(token, 0) >= self.now:
            return [NOT_FOUND]
        if phase and (self.model is None or phase != self.model.generation):
            return [BROKEN, b"it is gone from the server: its ttl has passed, or the server has lost it"]
        if self.has_another(count):
            return [LIMIT_MISMATCH, self.model.count]
        self.make(count, keep)
        self.touch()
        model = self.model
        if self.over:
            return [BROKEN, model.why] if model.why else [GRANTED]
        assert (token in self.waiting()) == (wait == b"inf" or token in self.waiting())
        return [QUEUED if wait == b"inf" else BUSY, model.left, 1000, 0, model.generation]

    def expect_release(self, token, gone):
        assert token not in self.waiting()
        if gone != b"0":
            self.dead[token] = self.now + int(gone)
        return [0, 0]

    def expect_heartbeat(self, channel, heard, *crowd):
        self.touch()
        queue = self.waiting()
        states = [GRANTED if self.over else QUEUED if each in queue else NOT_FOUND for each in crowd[::2]]
        return [1000, queue[0] if queue else b"", *states]

    def expect_count(self, operation, by, count, keep):
        if self.done.get(operation, 0) < self.now:
            if self.has_another(count):
                return [LIMIT_MISMATCH, self.model.count]
            self.make(count, keep)
            self.touch()
            if self.model.why:
                return [BROKEN, self.model.why]
            self.opened += bool(self.model.left)
            self.model.left = max(0, self.model.left - int(by))
            self.opened -= bool(self.model.left)
            self.done[operation] = self.now + 60_000
        return [GRANTED, self.model.left if self.model else 0]

    def expect_revoke(self, operation, why):
        if self.done.get(operation, 0) >= self.now:
            return [1]
        if self.over:
            return [0]
        self.model.why = why
        self.done[operation] = self.now + 60_000
        return [1]

    def expect_inspect(self, most):
        queue, model = self.alive(), self.model
        if model is None:
            return [b"", 0, 0, -2, b"", len(queue), *queue[: int(most)]]
        return [
            model.generation, model.count, model.left, round(model.until - self.now), model.why,
            len(queue), *queue[: int(most)],
        ]  # fmt: skip


class Person:
    """A waiter that behaves as our client does."""

    def __init__(self, token, channel, rnd):
        self.token = token
        self.channel = channel
        self.phase = b""
        self.entered = False
        self.in_doubt = rnd.random() < 0.2
        self.heard_at = 0.0


class LatchWalk(walk.Walk):
    """People who count and wait, come late, repeat themselves, and die."""

    def __init__(self, seed):
        super().__init__(LatchWorld(), "latch", seed)
        self.people = []
        self.through = self.told = 0

    def ask(self, person, wait="inf"):
        reply = self.say(
            "acquire", person.token, 3000, 3000, int(self.random.random() < 0.5), person.channel, wait,
            self.count, self.random.choice((10_000, 20_000)), person.phase, again=0.2 * person.in_doubt,
        )  # fmt: skip
        if isinstance(reply, ServerError):
            assert not person.entered, "one that waits needs no memory"
            reply = [0]
        match reply[0]:
            case 2:
                person.entered = True
                person.phase = reply[4]
            case _:
                self.people.remove(person)
                self.through += reply[0] == GRANTED
                self.told += reply[0] == BROKEN
                if reply[0] != GRANTED and person.in_doubt:
                    self.say("release", person.token, 60_000)

    @property
    def count(self):
        model = self.world.model
        return self.random.choice((1, 2, 3, 40)) if model is None or self.random.random() < 0.1 else model.count

    def heartbeat(self, people):
        for channel in sorted({person.channel for person in people}):
            crowd = [person for person in people if person.channel == channel]
            reply = self.say("heartbeat", channel, 1, *(arg for person in crowd for arg in (person.token, 3000)))
            for person, state in zip(crowd, reply[2:], strict=True):
                if state != QUEUED:
                    self.ask(person)

    def step(self):
        rnd, world = self.random, self.world
        self.pass_time(*(0, 0, 0, 0, 0, 0.001, 0.3, 0.3, 0.3, 2), *((11, 40) if rnd.random() < 0.1 else ()))
        if rnd.random() < 0.02:
            world.server.full = not world.server.full and rnd.random() < 0.5
        if rnd.random() < 0.05:
            world.dumb ^= {b"c%d" % rnd.randint(0, 3)}
        person = rnd.choice(self.people) if self.people else None
        match rnd.choices(
            ("come", "ask", "heartbeat", "count", "leave", "die", "late", "revoke", "inspect", "hear"),
            (30, 10, 10, 8, 4, 4, 8, 1, 1, 10),
        )[0]:
            case "come":
                self.number += 1
                self.people.append(Person(b"t%d" % self.number, b"c%d" % rnd.randint(0, 3), rnd))
                self.ask(self.people[-1], "inf" if rnd.random() < 0.9 else "0")
            case "ask" if person:
                self.ask(person)
            case "heartbeat":
                self.heartbeat(list(self.people))
            case "count":
                self.number += 1
                self.say("count", f"op{self.number}", rnd.choice((1, 1, 2, 50)), self.count, 20_000)
            case "leave" if person:
                self.people.remove(person)
                self.say("release", person.token, 60_000 if person.in_doubt else 0)
            case "die" if person:
                self.people.remove(person)
            case "late":
                self.late()
            case "revoke":
                self.number += 1
                self.say("revoke", f"op{self.number}", "it was revoked: for no reason (by me)")
            case "inspect":
                self.say("inspect", 100)
            case "hear":
                for channel, payload in world.pushes[-SOME:]:
                    for person in [each for each in self.people if payload == b"granted " + each.token]:
                        if channel not in world.dumb and person in self.people:
                            self.ask(person)

    def settle(self):
        """Open the latch: whatever was lost, the heartbeat of each second lets through all that live."""
        self.world.server.full = False
        if self.people:
            self.number += 1
            self.world.see()
            count = self.world.model.count if self.world.model else 1
            self.say("count", f"op{self.number}", 1_000_000_000, count, 20_000)
            self.heartbeat(list(self.people))
            assert not self.people, "kept"
        self.world.clock += 21


@rule(1, 3, 4, 8, 9)
@pytest.mark.parametrize("seed", range(4))
def test_no_rule_of_the_latch_is_broken(seed):
    walked = LatchWalk(seed)
    for _ in range(25):
        walked.run(300)
        walked.settle()
    assert walked.world.opened > 20
    assert walked.through > 100
    assert walked.told > 10


def test_an_open_latch_lets_all_through_by_pushes_alone():
    """Each waiter that a push wakes makes the script wake more: none needs a poll, and no push is in vain."""
    world = LatchWorld()
    for number in range(200):
        assert world.acquire(f"w{number:03}", count=1)[0] == QUEUED
    world.count("op", count=1)
    heard = 0
    while heard < len(world.pushes):
        assert world.acquire(world.pushed()[heard], count=1) == [GRANTED]
        heard += 1
    assert heard == 200


def test_more_dead_waiters_than_one_step_wakes_keep_nobody():
    world = LatchWorld()
    for number in range(100):
        world.acquire(f"dead{number:03}", count=1)
    world.acquire("w", count=1)
    world.clock += 3
    world.count("op", count=1)
    assert world.heartbeat("w")[2] == GRANTED
    assert world.acquire("w", count=1) == [GRANTED]


def test_an_open_latch_is_kept_as_long_as_anybody_comes():
    """A caller that polls the latch, or comes when it is open, must not find another one that is shut."""
    world = LatchWorld()
    world.count("op", count=2, keep=10_000)
    for _ in range(5):
        world.clock += 6
        assert world.acquire("polls", wait=0)[:2] == [BUSY, 1]
    world.count("op2")
    for _ in range(5):
        world.clock += 6
        assert world.acquire("comes") == [GRANTED]


@rule(8)
def test_a_late_copy_of_a_revocation_does_not_end_another_latch():
    world = LatchWorld()
    world.acquire("w", keep=10_000)
    assert world.say("revoke", "revoke/1", "it was revoked") == [1]
    assert world.say("revoke", "revoke/1", "it was revoked") == [1]
    world.clock += 15
    assert world.acquire("w2")[0] == QUEUED
    assert world.say("revoke", "revoke/1", "it was revoked") == [1]
    assert world.acquire("w2")[0] == QUEUED


def test_a_waiter_whose_latch_is_gone_leaves_a_lock_of_that_name_alone():
    world = LatchWorld()
    phase = world.acquire("w", keep=10_000)[4]
    world.clock += 15
    world.blind()
    world.server.data[RECORD] = b"1 lock 1700000000000000 - 3000 - h c"
    world.server.data[KEY] = b"h"
    world.server.data[QUEUE] = walk.commands.ZSet({b"next": 1.0})
    world.server.data[WAITERS] = walk.commands.Hash({b"next": b"1800000000000 3000 0 c lock"})
    world.server.expires |= dict.fromkeys(FIVE[:4], world.server.now_ms + 60_000)
    before = world.image()
    assert world.heartbeat("w")[2] != QUEUED
    assert world.acquire("w", phase)[0] == WRONG_KIND
    assert world.count("op")[0] == WRONG_KIND
    assert world.image() == before
    assert not world.pushes


def test_a_latch_whose_record_was_evicted_is_not_revoked_for_ever():
    world = LatchWorld()
    world.acquire("w")
    world.say("revoke", "op", "it was revoked")
    world.blind().server.remove(RECORD)
    assert world.acquire("w2")[0] == QUEUED
    assert world.acquire("w2")[0] == QUEUED


# The barrier


@dataclass
class Meeting:
    """What a barrier is: the parties that wait now, and those who passed."""

    generation: bytes
    parties: int
    waiting: dict[bytes, int] = field(default_factory=dict)  # token -> index
    passed: dict[bytes, int] = field(default_factory=dict)
    why: bytes = b""
    came: int = 0  # since the last time that all went on, or it was reset
    until: float = 0.0  # ms: then nobody knows it any more


class BarrierWorld(Queued):
    """One barrier, and what it ought to be."""

    grants_leases = False

    def __init__(self):
        super().__init__("barrier", (*FIVE, PRESENT))
        self.model = None
        self.heard = {}  # token -> when it was heard of last, ms
        self.done = {}
        self.dead = {}
        self.newest = 0
        self.final = {}  # token -> its final reply
        self.trips = self.breaks = 0

    def acquire(self, token, generation="", *, parties=3, wait="inf", channel="c"):
        return self.say("acquire", token, 3000, 3000, 0, channel, wait, parties, generation)

    def heartbeat(self, *tokens, channel="c", heard=0):
        return self.say("heartbeat", channel, heard, *(arg for token in tokens for arg in (token, 3000)))

    # The model

    def see(self):
        if self.model and self.model.until < self.now:
            self.model = None
        return self.lasting() if self.server.full else None

    def keep(self):
        self.model.until = self.now + 300_000

    def break_it(self, why):
        self.model.why = why
        self.breaks += 1

    def check(self):
        """A party without heartbeats breaks the barrier."""
        model = self.model
        if model and not model.why and any(self.heard[token] + ALIVE_MS <= self.now for token in model.waiting):
            self.break_it(b"?")

    def refresh(self, token):
        self.heard[token] = self.now

    def known(self, token):
        return self.heard.get(token, -1e18) + 60_000 >= self.now

    def judge(self, verb, args, reply, before):
        if isinstance(reply, ServerError):
            assert verb in {"acquire", "revoke", "inspect"}, "who waits needs no memory"
            assert self.lasting() == before, "refused, and done"
            return
        expected = getattr(self, "expect_" + verb)(*args)
        if expected and expected[0] == BROKEN and reply[0] == BROKEN:
            if expected[1] == b"?":
                assert reply[1]
                self.model.why = reply[1]
            expected = [BROKEN, reply[1]]
        if self.model and self.model.why == b"?":
            self.model.why = self.hash(KEY).get(b"why", b"")
            assert self.model.why
        assert reply == expected, f"not as the model says: {expected}, {self.model}"
        if verb == "acquire" and reply[0] in {GRANTED, BROKEN}:
            was = self.final.setdefault(args[0], reply[0])
            assert was == reply[0], "told that it passed, and that it is broken"
        self.keys_are_right()

    def keys_are_right(self):
        fields, model = self.hash(KEY), self.model
        if model is None:
            assert not fields
            return
        assert self.look(RECORD) == b"1 barrier " + model.generation
        assert self.pttl(KEY) == self.pttl(RECORD) == model.until - self.now
        arrivals, passed = int(fields[b"arrivals"]), int(fields[b"passed"])
        assert (int(fields[b"parties"]), arrivals - passed) == (model.parties, model.came)
        assert fields.get(b"why", b"") == model.why
        numbers = dict(self.look(QUEUE) or {})
        if all(self.known(token) for token in model.waiting):
            assert {token for token, number in numbers.items() if number > passed} == set(model.waiting)
        assert {token for token in model.passed if self.known(token)} <= {
            token for token, number in numbers.items() if number <= passed
        }, "one that passed is not known any more"
        if not model.why and all(self.known(token) for token in model.waiting):
            assert set(self.look(PRESENT) or {}) == set(model.waiting)

    def expect_acquire(self, token, ttl, life, heard, channel, wait, parties, generation):
        model = self.model
        if model and token in model.passed:
            self.keep()
            return [GRANTED, model.passed[token]]
        if self.dead.get(token, 0) >= self.now:
            return [BROKEN, b"it was reset, or this party has left"]
        if model and token in model.waiting:
            if not model.why:
                self.refresh(token)
            self.check()
            self.keep()
            if not model.why and wait == b"0":
                self.break_it(b"the timeout of a party was over: " + token)
            if model.why:
                return [BROKEN, model.why]
            return [QUEUED, model.came, 1000, 0, model.generation]
        if generation and (model is None or generation != model.generation):
            return [BROKEN, b"it was reset, or the server has lost it"]
        if model is None:
            made = (self.look(RECORD) or b"").removeprefix(b"1 barrier ")
            assert int(made or 0) > self.newest, "a new one, and no newer generation"
            self.newest = int(made)
            model = self.model = Meeting(made, int(parties))
            self.keep()
        self.check()
        if model.why:
            return [BROKEN, model.why]
        assert not generation, "a party that nobody knows"
        if int(parties) != model.parties and model.came:
            return [LIMIT_MISMATCH, model.parties]
        model.parties = int(parties)
        self.keep()
        self.refresh(token)
        index = model.came
        model.waiting[token] = index
        model.came += 1
        if model.came == model.parties:
            self.trips += 1
            assert sorted(model.waiting.values()) == list(range(model.parties))
            model.passed |= model.waiting
            model.waiting, model.came = {}, 0
            return [GRANTED, index]
        if wait == b"0":
            self.break_it(b"a party arrived that may not wait: " + token)
            return [BROKEN, model.why]
        return [QUEUED, model.came, 1000, 0, model.generation]

    def expect_release(self, token, gone):
        model = self.model
        if gone != b"0":
            self.dead[token] = max(self.dead.get(token, 0), self.now + int(gone))
        if model and token in model.waiting:
            if not model.why:
                self.break_it(b"a party left, or its timeout was over: " + token)
            del model.waiting[token]
        return [0, 0]

    def expect_heartbeat(self, channel, heard, *crowd):
        model = self.model
        queue = self.waiting()
        if model is None:
            return [1000, queue[0] if queue else b"", *([GRANTED] * (len(crowd) // 2))]
        for token in crowd[::2]:
            if (token in model.waiting and not model.why) or (token in model.passed and self.known(token)):
                self.refresh(token)
        self.check()
        self.keep()
        states = [QUEUED if token in model.waiting and not model.why else GRANTED for token in crowd[::2]]
        return [1000, queue[0] if queue else b"", *states]

    def expect_reset(self, operation):
        model = self.model
        if model is None or self.done.get(operation, 0) >= self.now:
            return [0]
        for token in model.waiting:
            self.dead[token] = self.now + 60_000
        generation = (self.look(RECORD) or b"").removeprefix(b"1 barrier ")
        assert int(generation) > int(model.generation)
        self.newest = int(generation)
        model.generation, model.waiting, model.came, model.why = generation, {}, 0, b""
        self.keep()
        self.done[operation] = self.now + 60_000
        return [1]

    def expect_revoke(self, operation, why):
        if self.done.get(operation, 0) >= self.now:
            return [1]
        if self.model is None or self.model.why:
            return [0]
        self.break_it(why)
        self.done[operation] = self.now + 60_000
        return [1]

    def expect_inspect(self, most):
        model = self.model
        if model is None:
            return [b"", 0, 0, b""]
        self.check()
        if model.why == b"?":
            model.why = self.hash(KEY).get(b"why", b"")
        passed = int(self.hash(KEY)[b"passed"])
        queue = [token for token in self.waiting() if (self.look(QUEUE) or {})[token] > passed]
        return [model.generation, model.parties, model.came, model.why, *queue]


class BarrierWalk(walk.Walk):
    """Parties that arrive, repeat themselves, leave, die, and come late."""

    def __init__(self, seed, parties):
        super().__init__(BarrierWorld(), "barrier", seed, parties)
        self.parties = parties
        self.people = []
        self.doubted = set()
        self.passed = self.broken = 0

    def ask(self, person, wait="inf", parties=None):
        if person.in_doubt:
            self.doubted.add(person.token)
        reply = self.say(
            "acquire", person.token, 3000, 3000, int(self.random.random() < 0.5), person.channel, wait,
            parties or self.parties, person.phase, again=0.3 * person.in_doubt,
        )  # fmt: skip
        if isinstance(reply, ServerError):
            assert not person.entered, "one that waits needs no memory"
            reply = [0]
        if reply[0] == QUEUED:
            person.entered = True
            if self.random.random() < 0.8 or not person.in_doubt:  # else this reply was lost
                person.phase = reply[4]
            return
        self.people.remove(person)
        self.passed += reply[0] == GRANTED
        self.broken += reply[0] == BROKEN
        if reply[0] != GRANTED:
            self.say("release", person.token, 60_000 if person.in_doubt else 0)

    def heartbeat(self, people):
        for channel in sorted({person.channel for person in people}):
            crowd = [person for person in people if person.channel == channel]
            reply = self.say("heartbeat", channel, 1, *(arg for person in crowd for arg in (person.token, 3000)))
            for person, state in zip(crowd, reply[2:], strict=True):
                if state != QUEUED and person in self.people:
                    self.ask(person)

    def possible(self, verb, args):
        return verb != "acquire" or (args[0] in self.doubted and args[7] == self.parties)

    def step(self):
        rnd, world = self.random, self.world
        self.pass_time(*(0, 0, 0, 0, 0, 0, 0.001, 0.1, 0.3, 0.9), *((3, 11, 61, 301) if rnd.random() < 0.05 else ()))
        if rnd.random() < 0.02:
            world.server.full = not world.server.full and rnd.random() < 0.5
        if rnd.random() < 0.05:
            world.dumb ^= {b"c%d" % rnd.randint(0, 3)}
        self.people = [each for each in self.people if world.known(each.token)]  # others were stopped for too long
        person = rnd.choice(self.people) if self.people else None
        match rnd.choices(
            ("come", "ask", "heartbeat", "leave", "die", "late", "reset", "revoke", "inspect", "hear", "wrong"),
            (30, 12, 20, 1, 1, 12, 4, 0.5, 1, 10, 1),
        )[0]:
            case "come":
                self.number += 1
                self.people.append(Person(b"t%d" % self.number, b"c%d" % rnd.randint(0, 3), rnd))
                self.ask(self.people[-1], "inf" if rnd.random() < 0.98 else "0")
            case "ask" if person:
                self.ask(person, "inf" if rnd.random() < 0.98 else "0")
            case "heartbeat":
                self.heartbeat(list(self.people))
            case "leave" if person:
                self.people.remove(person)
                self.say("release", person.token, 60_000 if person.in_doubt else 0)
            case "die" if person:
                self.people.remove(person)
            case "late":
                self.late()
            case "reset":
                self.number += 1
                self.say("reset", f"op{self.number}")
            case "revoke":
                self.number += 1
                self.say("revoke", f"op{self.number}", "it was revoked: for no reason (by me)")
            case "inspect":
                self.say("inspect", 100)
            case "hear":
                for channel, payload in world.pushes[-SOME:]:
                    for person in [each for each in self.people if payload == b"granted " + each.token]:
                        if channel not in world.dumb and person in self.people:
                            self.ask(person)
            case "wrong" if world.look(KEY) and world.model.came:
                self.number += 1
                self.people.append(Person(b"t%d" % self.number, b"c%d" % rnd.randint(0, 3), rnd))
                self.ask(self.people[-1], parties=self.parties + 1)

    def settle(self):
        """Whatever was lost, its heartbeat of each second tells each party what became of it."""
        self.world.server.full = False
        self.heartbeat(list(self.people))
        left = list(self.people)
        for person in left:
            assert person.token in self.world.model.waiting, "kept, and not waited for"
        for _ in range(self.parties - self.world.model.came if left else 0):  # the last ones come
            self.number += 1
            self.people.append(Person(b"t%d" % self.number, b"c0", self.random))
            self.ask(self.people[-1])
        self.heartbeat(list(self.people))
        assert not self.people, "kept"


@rule(1, 3, 4, 8, 9)
@pytest.mark.parametrize("parties", [1, 2, 3, 7, 50])
def test_no_rule_of_the_barrier_is_broken(parties):
    walked = BarrierWalk(0, parties)
    for _ in range(20):
        walked.run(200)
        walked.settle()
        walked.number += 1
        walked.say("reset", f"op{walked.number}")
    assert walked.world.trips > 3
    assert walked.passed > 50
    assert walked.broken > 10


def together(world, number, name="p", parties=None):
    """So many arrive, and no more: their generation."""
    for i in range(number):
        reply = world.acquire(f"{name}{i:03}", parties=parties or number + 1)
    return reply[4]


@pytest.mark.parametrize("rounds", [1, 3])
def test_all_who_passed_hear_of_it_by_pushes_alone(rounds):
    """Also if the next round is over before those of this one have come back."""
    world = BarrierWorld()
    for number in range(rounds):
        together(world, 99, f"r{number}p", 100)
        assert world.acquire(f"r{number}last", parties=100) == [GRANTED, 99]
    heard = 0
    while heard < len(world.pushes):
        assert world.acquire(world.pushed()[heard], parties=100)[0] == GRANTED
        heard += 1
    assert set(world.pushed()) >= {b"r%dp%03d" % (n, i) for n in range(rounds) for i in range(99)}
    assert heard == rounds * 100


def test_all_who_wait_hear_by_pushes_alone_that_it_is_broken():
    world = BarrierWorld()
    generation = together(world, 100)
    world.say("release", "p050", 0)
    heard = 0
    while heard < len(world.pushes):
        assert world.acquire(world.pushed()[heard], generation, parties=101)[0] == BROKEN
        heard += 1
    assert len(set(world.pushed())) >= 99


def test_more_dead_parties_than_one_step_wakes_keep_nobody():
    world = BarrierWorld()
    generation = together(world, 100)
    world.clock += 2.9
    world.heartbeat("p099")
    world.clock += 0.1
    assert world.heartbeat("p099")[2] == GRANTED
    assert world.acquire("p099", generation, parties=101)[0] == BROKEN


@rule(8)
def test_one_that_passed_is_told_so_though_the_next_round_is_broken():
    """Its answer was lost, and it was stopped for a while: the others went on with it."""
    world = BarrierWorld()
    generation = world.acquire("a", parties=2)[4]
    assert world.acquire("b", parties=2) == [GRANTED, 1]
    assert world.acquire("c", parties=2, wait=0)[0] == BROKEN
    world.clock += 30
    assert world.acquire("a", generation, parties=2) == [GRANTED, 0]
    world.say("reset", "op")
    assert world.acquire("b", parties=2) == [GRANTED, 1]  # a late copy: it is no arrival
    assert world.acquire("d", parties=2)[:2] == [QUEUED, 1]


@rule(8)
def test_one_that_a_reset_sent_away_is_no_arrival_of_the_next_generation():
    """A copy of its request comes late, or its answer was lost and it asks again."""
    world = BarrierWorld()
    for number in range(3):
        world.acquire(f"a{number}", parties=4)
    world.say("reset", "op")
    for number in range(3):
        assert world.acquire(f"a{number}", parties=4)[0] == BROKEN
    assert world.acquire("b", parties=4)[:2] == [QUEUED, 1]


@rule(8)
def test_a_late_copy_of_a_revocation_does_not_break_the_next_generation():
    world = BarrierWorld()
    world.acquire("a")
    assert world.say("revoke", "revoke/1", "it was revoked") == [1]
    assert world.say("revoke", "revoke/1", "it was revoked") == [1]
    world.say("reset", "reset/1")
    world.acquire("b")
    assert world.say("revoke", "revoke/1", "it was revoked") == [1]
    assert world.acquire("b")[0] == QUEUED


def test_out_of_memory_those_who_wait_go_on():
    """A party that can't ask again would give up, and break the barrier for all."""
    world = BarrierWorld()
    generation = together(world, 49, parties=50)
    world.server.full = True
    for _ in range(5):
        world.clock += 1
        assert world.heartbeat("p000")[2] == QUEUED
        for number in range(49):
            assert world.acquire(f"p{number:03}", generation, parties=50)[0] == QUEUED
    assert isinstance(world.acquire("last", parties=50), ServerError)
    world.server.full = False
    assert world.acquire("last", parties=50) == [GRANTED, 49]
    world.server.full = True
    for number in range(49):
        assert world.acquire(f"p{number:03}", generation, parties=50) == [GRANTED, number]


# The election

WATCHERS = b"watchers"


class ElectionWorld(Queued):
    """One election: who leads, and who watches."""

    def __init__(self):
        super().__init__("election", (*FIVE, WATCHERS))
        self.term = 0
        self.leader = b""  # the last one
        self.reigns = self.crowded = 0

    def acquire(self, token, *, wait="inf", ttl=3000, channel="c"):
        return self.say("acquire", token, ttl, 3000, 0, channel, wait, "", "election")

    def watch(self, token, channel="c"):
        return self.say("watch", token, channel)

    def see(self):
        return dict(self.look(WATCHERS) or {}), len(self.pushes), self.waiting(), self.live()

    def live(self):
        """The tokens in the queue whose waiters live."""
        entries = self.look(WAITERS) or {}
        return {each for each in self.waiting() if float(entries.get(each, b"0").split(b" ")[0]) > self.now}

    def known(self):
        """The term, the value of the key, and the version of both that watchers know."""
        term = int((self.look(RECORD) or b"1 election 0").split(b" ")[2])
        return term, self.look(KEY), 2 * term + (not self.look(KEY))

    def judge(self, verb, args, reply, before):
        was, told, queue, live = before
        failed = isinstance(reply, ServerError)
        term, value, known = self.known()
        leader = (value or b"").removeprefix(b"!")
        if leader and leader != self.leader:
            assert term > self.term, "another leader, and no later term"
            self.reigns += 1
        if verb == "acquire" and not failed and reply[0] in {QUEUED, CROWDED}:
            after, most = self.waiting(), float(args[5])
            assert (args[0] in after) == (reply[0] == QUEUED)
            if reply[0] == CROWDED:
                assert args[0] not in live, "it waits already, and was refused"
                assert len(after) >= most, "refused, and there is room"
            else:
                assert args[0] in queue or len(after) <= most, "one more than may wait"
            self.crowded += reply[0] == CROWDED
        if leader:
            assert leader == self.leader or term > self.term
            self.leader = leader
        assert term >= self.term or not self.look(RECORD)
        self.term = max(self.term, term)
        watchers = dict(self.look(WATCHERS) or {})
        if verb == "renew" or (verb == "watch" and failed):
            assert watchers == was
            return
        if verb == "watch":
            assert reply == [GRANTED, value or b"", self.pttl(KEY), term]
            assert watchers[args[1] + b" " + args[0]] == known
            was.pop(args[1] + b" " + args[0], None)
        gone = was.keys() - watchers.keys()
        assert all(was[each] < known for each in gone), "told for nothing"
        pushed = [channel + payload.removeprefix(b"granted") for channel, payload in self.pushes[told:]]
        assert gone <= set(pushed), "dropped, and not told"
        assert all(watchers[each] == was[each] for each in was.keys() & watchers.keys())
        if watchers and not failed:
            assert len(gone) == SOME or min(watchers.values()) >= known, "somebody knows less, and is not told"
            assert max(watchers.values()) <= known


class ElectionWalk(walk.Walk):
    """Candidates that lead, resign, are revoked and die; and those who watch."""

    def __init__(self, seed):
        super().__init__(ElectionWorld(), "election", seed)
        self.people = []  # (token, channel)
        self.watchers = {}  # token -> [channel, what it heard last, until when it looks by itself]
        self.heard = 0

    def look(self, token):
        channel = self.watchers[token][0]
        reply = self.say("watch", token, channel, again=0.02)
        if not isinstance(reply, ServerError):
            self.heard += self.watchers[token][1] != (reply[1], reply[3])
            self.watchers[token] = [channel, (reply[1], reply[3]), self.world.clock + 1]

    def step(self):
        rnd, world = self.random, self.world
        self.pass_time(*(0, 0, 0, 0, 0.001, 0.001, 0.1, 0.3, 0.3), *((3, 11, 400) if rnd.random() < 0.03 else ()))
        if rnd.random() < 0.01:
            world.server.full = not world.server.full and rnd.random() < 0.3
        if rnd.random() < 0.05:
            world.dumb ^= {b"c%d" % rnd.randint(0, 3)}
        if len(self.people) < 5 and rnd.random() < 0.3:
            self.number += 1
            self.people.append((b"t%d" % self.number, b"c%d" % rnd.randint(0, 3)))
        token, channel = rnd.choice(self.people or [(b"t", b"c")])
        match rnd.choices(
            ("acquire", "release", "heartbeat", "renew", "revoke", "die", "late", "watch", "look", "hear", "close"),
            (20, 8, 8, 8, 1, 2, 5, 10, 10, 20, 4),
        )[0]:
            case "acquire":
                ttl = rnd.choice((500, 3000, 10_000))
                wait = rnd.choice(("0", "1", "2", "inf", "inf"))
                args = (token, ttl, min(3000, ttl), rnd.randint(0, 1), channel, wait, "", "election")
                self.say("acquire", *args)
            case "release":
                self.say("release", token, rnd.choice((0, 60_000)))
                self.people = [each for each in self.people if each[0] != token]
            case "heartbeat":
                crowd = [each for each, at in self.people if at == channel]
                self.say("heartbeat", channel, 1, *(arg for each in crowd for arg in (each, 3000)))
            case "renew":
                self.say("renew", token, 3000, keys=(KEY, RECORD))
            case "revoke":
                holder = (world.look(KEY) or b"").removeprefix(b"!")
                self.say("revoke", holder, rnd.randint(0, 1), "for no reason")
            case "die":
                self.people = [each for each in self.people if each[0] != token]
            case "late":
                self.late()
            case "watch" if len(self.watchers) < 80:
                self.number += 1
                self.watchers[b"w%d" % self.number] = [b"c%d" % rnd.randint(0, 3), None, 0]
                self.look(b"w%d" % self.number)
            case "look":
                for each in [each for each, (_, _, until) in self.watchers.items() if until <= world.clock][:5]:
                    self.look(each)
            case "hear":
                for at, payload in world.pushes[-SOME:]:
                    each = payload.removeprefix(b"granted ")
                    if each in self.watchers and at not in world.dumb:
                        self.look(each)
            case "close" if self.watchers:
                del self.watchers[rnd.choice(list(self.watchers))]


@rule(1, 3, 7)
@pytest.mark.parametrize("seed", range(3))
def test_no_rule_of_the_election_is_broken(seed):
    walked = ElectionWalk(seed)
    world = walked.run(2500)
    assert world.reigns > 50
    assert world.crowded > 20
    assert walked.heard > 500


@pytest.mark.parametrize("dies", [True, False])
def test_all_who_watch_hear_by_pushes_alone_of_the_next_leader(dies):
    world = ElectionWorld()
    first = world.acquire("first", ttl=3000)[1]
    for number in range(200):
        world.watch(f"w{number:03}")
    if dies:
        world.clock += 4
    else:
        world.say("release", "first", 0)
    world.acquire("second")
    heard, seen = 0, {}
    while heard < len(world.pushes):
        each = world.pushed()[heard]
        seen[each] = world.watch(each)
        heard += 1
    assert set(seen) == {b"w%03d" % number for number in range(200)}
    assert all(reply[1] == b"second" and reply[3] > first for reply in seen.values())
    assert heard < 500


def test_watchers_that_never_come_again_do_not_pile_up():
    """Many observers look once, each with a name of its own, under a leader that stays for months."""
    world = ElectionWorld()
    world.acquire("leads", ttl=10_000)
    world.watch("w")
    known = world.known()[2]
    world.look(WATCHERS).update({b"c x%d" % number: float(known) for number in range(9_990)})
    for number in range(50):
        world.blind().watch(f"y{number}")
    assert len(world.look(WATCHERS)) <= 10_000


def test_to_watch_what_another_version_made_is_refused():
    world = ElectionWorld().blind()
    world.server.read_clock()
    world.server.data[RECORD] = b"2 of the future"
    world.server.expires[RECORD] = world.server.now_ms + 60_000
    assert world.watch("w") == [WRONG_KIND, b"2 of the future"]


# Once

DONE = b"done"


@dataclass
class Run:
    """One run, as far as the server knows it."""

    token: bytes
    started: int  # µs
    ends: float  # ms
    why: bytes = b""  # it was revoked


class OnceWorld(Queued):
    """Work that runs once: its run, and the note of the last run."""

    def __init__(self):
        super().__init__("once", (*FIVE, DONE))
        self.run = None
        self.note = None  # (token, started, ended, until)
        self.not_before = 0.0  # ms: the promise of the last run
        self.taken = set()  # tokens whose run was taken by force
        self.dead = {}
        self.top = 0
        self.began = 0

    def acquire(self, token, ttl=3000):
        return self.say("acquire", token, ttl, 3000, 0, "c", 0, "", "once")

    def release(self, token, at_least=0, keep=0, gone=0):
        return self.say("release", token, gone, at_least, keep)

    def see(self):
        if self.run and self.run.ends < self.now:
            self.run = None
        if self.note and self.note[3] < self.now:
            self.note = None

    def judge(self, verb, args, reply, before):
        if isinstance(reply, ServerError):
            return
        expected = getattr(self, "expect_" + verb)(*args)
        assert expected is None or reply == expected, f"not as the model says: {expected}"
        value, run = self.look(KEY), self.run
        assert value == (run and b"!" * bool(run.why) + run.token)
        assert not run or self.pttl(KEY) == run.ends - self.now
        note = self.note
        assert self.look(DONE) == (note and b"%s %d %d" % note[:3])
        assert not note or self.pttl(DONE) == note[3] - self.now

    def expect_acquire(self, token, ttl, life, heard, channel, wait, owner, kind):
        run, now = self.run, self.now
        if self.note:
            who, started, ended, until = self.note
            return [BUSY, who, int(until - now), 0, b"%d" % started, b"%d" % ended]
        if run and run.token == token and not run.why:
            run.ends = max(run.ends, now + int(ttl))
            return [GRANTED, run.started]
        if self.dead.get(token, 0) >= now:
            return [NOT_FOUND]
        if run and run.token == token:
            return [REVOKED, run.why]
        if run:
            shown = b"!" * bool(run.why) + run.token
            return [BUSY, shown, int(run.ends - now), 0, b"%d" % run.started, b"0"]
        assert now >= self.not_before, "begun before it may"
        started = max(self.top + 1, int(now * 1000))
        self.top, self.run = started, Run(token, started, now + int(ttl))
        self.began += 1
        return [GRANTED, started]

    def expect_release(self, token, gone, at_least, keep):
        run, now = self.run, self.now
        if run and run.token == token:
            least = int(at_least) - max(0, now - run.started / 1000)
            span = max(least, 0 if run.why else int(keep))
            if span > 0:
                span = int(-(-span // 1))
                self.note = (token, run.started, int(now * 1000), now + span)
                self.not_before = now + span
            self.run = None
        if gone != b"0":
            self.dead[token] = max(self.dead.get(token, 0), now + int(gone))

    def expect_renew(self, token, ttl):
        run = self.run
        if run and run.token == token and not run.why:
            run.ends = max(run.ends, self.now + int(ttl))
            return [GRANTED]
        if run and run.token == token:
            return [[REVOKED, run.why]]
        # The record may know why its run was taken by force, until that run would have ended, if nobody came since.
        return None if token in self.taken else [NOT_FOUND]

    def expect_revoke(self, token, force, why):
        run = self.run
        if run and run.token == token and force == b"1":
            self.taken.add(token)
        if not run or run.token != token or run.why:
            return [0, self.pttl(KEY)] if run else None
        if force == b"1":
            self.run = None
        else:
            run.why, run.ends = why, max(run.ends, self.now + 1)
        return None

    def expect_forget(self, note):
        if self.note and b"%s %d %d" % self.note[:3] == note:
            self.note = None
            self.not_before = 0
            return [1]
        return [0]

    def expect_inspect(self, most):
        return None


class OnceWalk(walk.Walk):
    """Runners that run it, skip it, fail, are revoked, die, and come late."""

    def __init__(self, seed):
        super().__init__(OnceWorld(), "once", seed)
        self.people = []  # the tokens that run it, or believe so
        self.doubted = set()
        self.skipped = 0

    def possible(self, verb, args):
        return verb != "acquire" or args[0] in self.doubted

    def step(self):
        rnd, world = self.random, self.world
        self.pass_time(*(0, 0, 0, 0.001, 0.1, 0.3, 0.3, 1), *((5, 30, 70, 400) if rnd.random() < 0.1 else ()))
        if rnd.random() < 0.02:
            world.server.full = not world.server.full and rnd.random() < 0.5
        person = rnd.choice(self.people) if self.people else None
        if world.run and world.run.token in self.people and rnd.random() < 0.7:
            person = world.run.token
        match rnd.choices(
            ("begin", "end", "never", "die", "late", "renew", "revoke", "forget", "inspect"),
            (30, 20, 2, 2, 15, 8, 4, 2, 1),
        )[0]:
            case "begin":
                self.number += 1
                token = b"t%d" % self.number
                if rnd.random() < 0.2:
                    self.doubted.add(token)
                args = (token, rnd.choice((500, 3000, 30_000)), 3000, 0, "c", 0, "", "once")
                reply = self.say("acquire", *args, again=0.5 * (token in self.doubted))
                if not isinstance(reply, ServerError):
                    self.skipped += reply[0] == BUSY
                    if reply[0] == GRANTED:
                        self.people.append(token)
                        return
                if token in self.doubted:
                    self.say("release", token, 60_000, 0, 0)
            case "end" if person:
                gone = 60_000 if person in self.doubted else 0
                at_least, keep = (
                    rnd.choice((0, 0, 1000, 20_000)),
                    rnd.choice((0, 0, 5000, 86_400_000 * (rnd.random() < 0.02))),
                )
                if not isinstance(self.say("release", person, gone, at_least, keep), ServerError):
                    self.people.remove(person)
            case "never" if person:  # its answer came too late, or the caller was gone
                self.say("release", person, 60_000 if person in self.doubted else 0, 0, 0)
                self.people.remove(person)
            case "die" if person:
                self.people.remove(person)
            case "late":
                self.late()
            case "renew" if person:
                self.say("renew", person, rnd.choice((1, 3000, 10_000)), keys=(KEY, RECORD))
            case "revoke" if person:
                self.say("revoke", person, int(rnd.random() < 0.3), "for no reason")
            case "forget":
                note = (world.look(DONE) or b"") if rnd.random() < 0.9 else b"t1 1 1"
                self.say("forget", note)
            case "inspect":
                self.say("inspect", 1)


@rule(1, 5, 8, 9)
@pytest.mark.parametrize("seed", range(3))
def test_no_rule_of_once_is_broken(seed):
    walked = OnceWalk(seed)
    world = walked.run(10_000)
    assert world.began > 100
    assert walked.skipped > 100


# Multi

KINDS = {b"a": "lock", b"b": "lock", b"r": "rwlock", b"s": "semaphore", b"w": "lock"}  # all in this order; w is no lock
ALL = 1_000_000_000  # permits of a writer
LIMITS = {"semaphore": 2, "rwlock": ALL}


class MultiWorld(Queued):
    """Some locks, semaphores and read-write locks, which are wanted one by one, and together."""

    def __init__(self):
        super().__init__("multi", ())
        self.top = dict.fromkeys(KINDS, 0)
        self.fences = {}  # token -> its fence
        self.dead = {}
        self.had = self.refused = 0

    @staticmethod
    def names(name, lock=None):
        """The keys of one of them."""
        lock = KINDS[name] == "lock" if lock is None else lock
        return tuple(
            name + part for part in (b"", b"record", b"queue", b"waiters", b"gone", *(() if lock else (b"shares",)))
        )

    @staticmethod
    def words(name, token, permits=1, ttl=3000, wait=0, channel="c", kind=None):
        """What an acquire says: its script, and its words."""
        kind = kind or KINDS[name]
        terms = ("", "lock") if kind == "lock" else (kind, permits, LIMITS[kind], "")
        words = ("acquire", token.decode(), ttl, min(ttl, 3000), 0, channel, wait, *terms)
        return "lock" if kind == "lock" else "permits", tuple(map(str, words))

    def together(self, *requests):
        """All of these (name, token, permits, ...) or none."""
        keys, said = [], []
        for name, *rest in requests:
            script, words = self.words(name, *rest)
            names = self.names(name, script == "lock")
            keys += names
            said.append(json.dumps([script, len(names), *words]))
        return self.say("acquire", *said, keys=tuple(keys))

    def one(self, name, token, permits=1, ttl=3000, wait="inf", channel="c"):
        script, words = self.words(name, token, permits, ttl, wait, channel)
        return self.say(*words, keys=self.names(name), script=script)

    def release(self, name, token, gone=0):
        script = "lock" if KINDS[name] == "lock" else "permits"
        return self.say("release", token, gone, keys=self.names(name), script=script)

    def heartbeat(self, name, *tokens, channel="c"):
        script = "lock" if KINDS[name] == "lock" else "permits"
        crowd = [arg for token in tokens for arg in (token, 3000)]
        return self.say("heartbeat", channel, 0, *crowd, keys=self.names(name), script=script)

    # What can be seen

    def holders(self, name):
        """Token -> permits of each holder now."""
        value = self.look(name)
        if isinstance(value, bytes):
            return {value: 1}
        shares = self.look(name + b"shares") or {}
        if KINDS[name] == "lock" or not value:
            return {}
        return {token: int(shares[token].split(b" ")[0]) for token, ends in value.items() if ends > self.now}

    def fence(self, name, token):
        if KINDS[name] == "lock":
            return int(self.look(name + b"record").split(b" ")[2])
        return int(self.look(name + b"shares")[token].split(b" ")[1])

    def queue(self, name):
        """Waiter -> whether it lives, in order."""
        waiters = self.look(name + b"waiters") or {}
        self.look(name + b"queue")
        return {
            each: float(waiters.get(each, b"0").split(b" ")[0]) > self.now
            for each in self.server.ordered(name + b"queue")
        }

    def free(self, name, permits):
        """Whether nobody keeps a newcomer from so many."""
        limit = 1 if KINDS[name] == "lock" else LIMITS[KINDS[name]]
        return not any(self.queue(name).values()) and permits <= limit - sum(self.holders(name).values())

    def see(self):
        return {
            name: (self.holders(name), self.queue(name), {each: self.fence(name, each) for each in self.holders(name)})
            for name in KINDS
        }

    # The rules

    def excused(self, error):
        return super().excused(error) or str(error).startswith("WRONGTYPE")

    def judge(self, verb, args, reply, before):
        after, now = self.see(), self.now
        for name, (held, queue, fences) in after.items():
            _, waited, had = before[name]
            assert sum(held.values()) <= LIMITS.get(KINDS[name], 1), f"too many hold {name}"
            for token in held:
                assert self.dead.get(token, 0) <= now, f"{token} is given up, and holds {name}"
                if had.get(token) != fences[token]:
                    assert fences[token] > self.top[name], f"the fence of {name} does not grow"
                    self.top[name] = fences[token]
                    places = list(waited)
                    for each in places[: places.index(token)] if token in waited else places:
                        overtaken = waited[each] and each in queue and each not in held
                        assert not overtaken, f"{token} overtook {each} on {name}"
            staying = [each for each in waited if each in queue and (waited[each] or each != args[0])]
            assert [each for each in queue if each in staying] == staying, f"the queue of {name} was shuffled"
        if args and args[0].startswith(b"["):
            self.judge_together([json.loads(arg) for arg in args], reply, before, after)
        elif verb == "release" and args[1] != b"0":
            self.dead[args[0]] = now + int(args[1])

    def judge_together(self, requests, reply, before, after):
        wanted = [(words[3][-1].encode(), words[3].encode()) for words in requests]  # a token ends with its name
        others = {
            (name, token) for name, (held, _, _) in before.items() for token in held if (name, token) not in wanted
        }
        lost = {(name, token) for name, token in others if token not in after[name][0]}
        assert not lost, f"{lost} lost theirs"
        if isinstance(reply, ServerError) or reply[0] != GRANTED:
            self.refused += 1
            first = len(wanted) if isinstance(reply, ServerError) else reply[1]
            for i, (name, token) in enumerate(wanted):
                held = token in after[name][0]
                assert not held or (i > first and token in before[name][0]), f"{token} was refused, and holds {name}"
            return
        self.had += 1
        for (name, token), answer in zip(wanted, reply[1:], strict=True):
            assert token in after[name][0], f"granted, and {name} is not held"
            assert answer == [GRANTED, after[name][2][token]]
            assert before[name][2].get(token, answer[1]) == answer[1], "granted twice"


class MultiWalk(walk.Walk):
    """Callers that want one, and callers that want some together; both repeat themselves, come late, and die."""

    def __init__(self, seed):
        super().__init__(MultiWorld(), "multi", seed)
        self.ones = []  # (name, token, permits, ttl, channel)
        self.groups = []  # those that are held, each with whether a request was in doubt
        self.doubted = set()

    def possible(self, verb, args):
        return verb != "acquire" or str(args[0]) in self.doubted

    def together(self, requests, doubted):
        world = self.world
        keys, said = [], []
        for name, *rest in requests:
            script, words = world.words(name, *rest)
            names = world.names(name, script == "lock")
            keys += names
            said.append(json.dumps([script, len(names), *words]))
        if doubted:
            self.doubted.add(said[0])
        free = all(world.free(name, permits) for name, _, permits, *_ in requests) and not world.server.full
        sane = all(name != b"w" and not rest[2:] for name, *rest in requests)
        reply = self.say("acquire", *said, keys=tuple(keys), again=0.5 * doubted)
        for _ in range(10):
            if isinstance(reply, list) and reply[0] == RETRY:
                reply = self.say("acquire", *said, keys=tuple(keys), again=0)
        good = isinstance(reply, list) and reply[0] == GRANTED
        assert good or not (free and sane), f"all of {requests} are free, and were not granted: {reply}"
        return good

    def drop(self, requests, gone):
        for name, token, *_ in requests:
            self.world.release(name, token, gone) if name != b"w" else None

    def step(self):
        rnd, world = self.random, self.world
        self.pass_time(*(0, 0, 0, 0, 0.001, 0.1, 0.3, 0.3), *((1, 4, 11, 70) if rnd.random() < 0.1 else ()))
        if rnd.random() < 0.02:
            world.server.full = not world.server.full and rnd.random() < 0.5
        world.server.read_clock()
        world.server.data[b"w"] = walk.commands.Hash({b"x": b"y"})
        world.server.expires[b"w"] = world.server.now_ms + 1_000_000
        one = rnd.choice(self.ones) if self.ones else None
        match rnd.choices(
            ("one", "ask", "leave", "heartbeat", "die", "together", "part", "late"), (10, 10, 12, 10, 2, 25, 20, 8)
        )[0]:
            case "one" if len(self.ones) < 6:
                self.number += 1
                name = rnd.choice((b"a", b"b", b"r", b"s"))
                permits = rnd.choice((1, ALL)) if name == b"r" else rnd.randint(1, 2) if name == b"s" else 1
                self.ones.append(
                    (name, b"t%d" % self.number, permits, rnd.choice((500, 3000)), b"c%d" % rnd.randint(0, 3))
                )
                self.ask(self.ones[-1])
            case "ask" if one:
                self.ask(one)
            case "leave" if one:
                self.ones.remove(one)
                world.release(one[0], one[1])
            case "heartbeat" if one:
                world.heartbeat(one[0], *(each[1] for each in self.ones if each[0] == one[0]), channel=one[4])
            case "die" if one:
                self.ones.remove(one)
            case "together":
                self.number += 1
                names = sorted(rnd.sample(sorted(KINDS), rnd.randint(2, 4)))
                if rnd.random() < 0.8 and b"w" in names:
                    names.remove(b"w")
                requests = [
                    [name, b"m%d%s" % (self.number, name), rnd.choice((1, ALL)) if name == b"r" else 1]
                    for name in names
                ]
                if rnd.random() < 0.05 and b"s" in names:
                    requests[names.index(b"s")] += [3000, 0, "c", "lock"]  # as something that it is not
                doubted = rnd.random() < 0.2
                if self.together(requests, doubted):
                    if rnd.random() < 0.9:
                        self.groups.append((requests, doubted))
                elif doubted:
                    self.drop(requests, 60_000)
            case "part" if self.groups:
                requests, doubted = self.groups.pop(rnd.randrange(len(self.groups)))
                self.drop(requests, 60_000 if doubted else 0)
            case "late":
                self.late()

    def ask(self, one):
        name, token, permits, ttl, channel = one
        self.world.one(name, token, permits, ttl, "inf", channel.decode())


@rule(1, 7, 8, 9)
@pytest.mark.parametrize("seed", range(3))
def test_no_rule_of_multi_is_broken(seed):
    world = MultiWalk(seed).run(3000)
    assert world.had > 100
    assert world.refused > 100


# The queue of locks and permits

OWN_ARGS = {"lock": ("", "lock"), "permits": ("semaphore", 1, 1, "")}


@rule(1, 4)
@pytest.mark.parametrize("script", OWN_ARGS)
@pytest.mark.parametrize("subscribed", [0, 1])
def test_the_head_that_asks_itself_is_not_passed_over_as_unreachable(script, subscribed):
    """No push reaches it, but the reply does."""
    world = Queued(script, (*FIVE, b"shares"))

    def acquire(token, subscribed):
        channel = b"c-" + token
        return world.say("acquire", token, 1000, 1000, subscribed, channel, "inf", *OWN_ARGS[script])

    assert acquire(b"holder", 0)[0] == GRANTED
    assert acquire(b"first", 1)[0] == QUEUED
    assert acquire(b"second", 0)[0] == QUEUED
    world.dumb.add(b"c-first")
    world.clock += 1.5  # the holder's lease is over
    assert acquire(b"first", subscribed)[0] == GRANTED


# On real servers


@pytest.mark.runs_on("each server", full="every combination")
def test_out_of_memory_who_waits_at_a_latch_or_a_barrier_goes_on(clean):
    """The server refuses what it has no memory for, and keeps nothing of it. A waiter that is there needs no memory."""

    def say(script, count, *args):
        keys = [KEY, RECORD, QUEUE, WAITERS, GONES, PRESENT][:count]
        try:
            return clean.eval(walk.load(script).source, count, *keys, *args, walk.EPOCH)
        except Exception as error:
            return [str(error)]

    def arrive(token, generation=""):
        return say("barrier", 6, "acquire", token, 3000, 3000, 0, "c", "inf", 3, generation)

    def wait(token, generation=""):
        return say("latch", 5, "acquire", token, 3000, 3000, 0, "c", "inf", 2, 20_000, generation)

    generation = arrive("a")[4]
    arrive("b")
    try:
        clean.config_set("maxmemory", 1)
        assert "maxmemory" in str(arrive("new")[0])
        for _ in range(2):
            assert arrive("a", generation)[0] == QUEUED
            assert say("barrier", 6, "heartbeat", "c", 0, "a", 3000, "b", 3000)[2:] == [QUEUED, QUEUED]
        clean.config_set("maxmemory", 0)
        assert arrive("c") == [GRANTED, 2]
        clean.config_set("maxmemory", 1)
        assert arrive("a", generation) == [GRANTED, 0]
        clean.config_set("maxmemory", 0)
        clean.flushall()
        generation = wait("a")[4]
        clean.config_set("maxmemory", 1)
        assert wait("a", generation)[0] == QUEUED
        assert say("latch", 5, "heartbeat", "c", 0, "a", 3000)[2:] == [QUEUED]
        assert say("latch", 5, "count", "op", 2, 2, 20_000) == [GRANTED, 0]
        assert wait("a", generation) == [GRANTED]
    finally:
        clean.config_set("maxmemory", 0)
