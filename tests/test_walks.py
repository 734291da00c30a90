"""Latch, barrier, election, once and multi, each by itself: a random walk of messages, doubled, late and by the dead.

Each has a model of its rules beside it, which says what a message must be answered and what must be in the keys then.
Below each walk: what hostile minds suspected. $WALK makes the walks as many times longer.
"""

# ruff: noqa: ARG002 (every judge of a message is told the same)

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

pytest.importorskip("lupa")

import walk
from interlock._core import (
    AGAIN,
    BROKEN,
    BUSY,
    FOREIGN,
    GONE,
    GRANTED,
    LIMIT,
    MISUSED,
    QUEUED,
    REVOKED,
    ServerError,
)
from walk import SOME

rule = pytest.mark.rule
able = pytest.fixture(autouse=True)(walk.able)
FIVE = KEY, RECORD, QUEUE, WAITERS, GONES = b"k", b"record", b"queue", b"waiters", b"gone"
ALIVE_MS = 3000
DEAD_AFTER = 3.0  # seconds


class Queued(walk.World):
    """A world with a queue."""

    def hash(self, key):
        return dict(self.look(key) or {})

    def waiting(self):
        """Who stands in the queue, in order."""
        self.server.look()
        return self.server.ordered(QUEUE)

    def pttl(self, key):
        self.look(key)
        return self.server.expires[key] - self.server.now_ms if key in self.server.expires else -2

    def pushed(self, since=0):
        """Who was told, by token."""
        return [payload.removeprefix(b"granted ") for _, payload in self.pushes[since:]]


# The latch


@dataclass
class Count:
    """What a latch is."""

    generation: bytes
    left: int
    keep: int
    until: float
    why: bytes = b""


class LatchWorld(Queued):
    """One latch, and what it ought to be."""

    def __init__(self):
        super().__init__("latch", FIVE)
        self.model = None
        self.done = {}  # operation -> until, ms
        self.dead = {}  # token -> until, ms
        self.newest = 0
        self.opened = 0

    def acquire(self, token, phase="", *, wait=1, heard=0, channel="c", count=2, keep=20_000):
        return self.say("acquire", token, 3000, 3000, heard, channel, wait, count, keep, phase)

    def count(self, operation, by=1, count=2, keep=20_000):
        return self.say("count", operation, by, count, keep)

    def vouch(self, *tokens, channel="c", heard=0):
        return self.say("vouch", channel, heard, *(arg for token in tokens for arg in (token, 3000)))

    # The model

    @property
    def over(self):
        return self.model is None or self.model.left == 0 or bool(self.model.why)

    def see(self):
        if self.model and self.model.until < self.now:
            self.model = None
        return self.waiting(), len(self.pushes), self.image() if self.server.full else None

    def make(self, count, keep):
        if self.model is None:
            generation = (self.look(RECORD) or b"").removeprefix(b"1 latch ")
            assert int(generation or 0) > self.newest, "a new one, and no newer generation"
            self.newest = int(generation)
            self.model = Count(generation, int(count), int(keep), 0)

    def touch(self):
        if self.model:
            self.model.until = self.now + self.model.keep

    def judge(self, verb, args, reply, before):
        waited, told, image = before
        if isinstance(reply, ServerError):
            assert verb in {"acquire", "count", "vouch", "revoke"}
            assert {k: v for k, v in self.image().items() if k != GONES} == {k: v for k, v in image.items() if k != GONES}
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
        if again:
            assert waited == left
        elif self.over and verb in {"acquire", "count", "vouch", "revoke"} and not (verb == "revoke" and reply == [0]):
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
            return [GONE]
        if phase and (self.model is None or phase != self.model.generation):
            return [BROKEN, b"it is gone from the server: its ttl has passed, or the server has lost it"]
        self.make(count, keep)
        self.touch()
        model = self.model
        if self.over:
            return [BROKEN, model.why] if model.why else [GRANTED]
        assert (token in self.waiting()) == (wait == b"1" or token in self.waiting())
        return [QUEUED if wait == b"1" else BUSY, model.left, 1000, 0, model.generation]

    def expect_release(self, token, gone):
        assert token not in self.waiting()
        if gone != b"0":
            self.dead[token] = self.now + int(gone)
        return [0, 0]

    def expect_vouch(self, channel, heard, *crowd):
        self.touch()
        queue = self.waiting()
        states = [GRANTED if self.over else QUEUED if each in queue else GONE for each in crowd[::2]]
        return [1000, queue[0] if queue else b"", *states]

    def expect_count(self, operation, by, count, keep):
        if self.done.get(operation, 0) < self.now:
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
        queue, model = self.waiting(), self.model
        if model is None:
            return [b"", 0, 0, -2, b"", len(queue), *queue[: int(most)]]
        count = int(self.hash(KEY)[b"count"])
        return [
            model.generation, count, model.left, round(model.until - self.now), model.why, len(queue), *queue[: int(most)],
        ]  # fmt: skip


class Person:
    """One who waits, as our client does."""

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

    def ask(self, person, wait=1):
        reply = self.say(
            "acquire", person.token, 3000, 3000, int(self.random.random() < 0.5), person.channel, wait,
            self.count, self.random.choice((10_000, 20_000)), person.phase, again=0.2 * person.in_doubt,
        )  # fmt: skip
        if isinstance(reply, ServerError):
            return
        match reply[0]:
            case 2:
                person.phase = reply[4]
            case _:
                self.people.remove(person)
                self.through += reply[0] == GRANTED
                self.told += reply[0] == BROKEN
                if reply[0] != GRANTED and person.in_doubt:
                    self.say("release", person.token, 60_000)

    @property
    def count(self):
        return self.random.choice((1, 2, 3, 40))

    def vouch(self, people):
        for channel in sorted({person.channel for person in people}):
            crowd = [person for person in people if person.channel == channel]
            reply = self.say("vouch", channel, 1, *(arg for person in crowd for arg in (person.token, 3000)))
            if not isinstance(reply, ServerError):
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
            ("come", "ask", "vouch", "count", "leave", "die", "late", "revoke", "inspect", "hear"),
            (30, 10, 10, 8, 4, 4, 8, 1, 1, 10),
        )[0]:
            case "come":
                self.number += 1
                self.people.append(Person(b"t%d" % self.number, b"c%d" % rnd.randint(0, 3), rnd))
                self.ask(self.people[-1], int(rnd.random() < 0.9))
            case "ask" if person:
                self.ask(person)
            case "vouch":
                self.vouch(list(self.people))
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
        """Once it is open, all who live are let through by what they say each second, whatever was lost."""
        self.world.server.full = False
        if self.people:
            self.number += 1
            self.say("count", f"op{self.number}", 1_000_000_000, 1, 20_000)
            self.vouch(list(self.people))
            assert not self.people, "kept"
        self.world.clock += 21


@rule(1, 3, 4, 8, 9)
@pytest.mark.parametrize("seed", range(4))
def test_no_rule_of_the_latch_is_broken(seed):
    walked = LatchWalk(seed)
    for _ in range(25):
        walked.run(80)
        walked.settle()
    assert walked.world.opened > 20
    assert walked.through > 100
    assert walked.told > 10


def test_an_open_latch_lets_all_through_by_pushes_alone():
    """Each that is woken wakes more: nobody has to find out by himself, and nobody is told for nothing."""
    world = LatchWorld()
    for number in range(200):
        assert world.acquire(f"w{number:03}", count=1)[0] == QUEUED
    world.count("op", count=1)
    heard = 0
    while heard < len(world.pushes):
        assert world.acquire(world.pushed()[heard]) == [GRANTED]
        heard += 1
    assert heard == 200


def test_more_dead_waiters_than_one_step_wakes_keep_nobody():
    world = LatchWorld()
    for number in range(100):
        world.acquire(f"dead{number:03}", count=1)
    world.acquire("w", count=1)
    world.clock += 3
    world.count("op", count=1)
    assert world.vouch("w")[2] == GRANTED
    assert world.acquire("w") == [GRANTED]


def test_an_open_latch_is_kept_as_long_as_anybody_comes():
    """Who polls it, or comes to it when it is open, must not find another one that is shut."""
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
    world.server.data[RECORD] = b"1 lock 1700000000000000 - h c"
    world.server.data[KEY] = b"h"
    world.server.data[QUEUE] = walk.commands.ZSet({b"next": 1.0})
    world.server.data[WAITERS] = walk.commands.Hash({b"next": b"1800000000000 3000 0 c lock"})
    world.server.expires |= dict.fromkeys(FIVE[:4], world.server.now_ms + 60_000)
    before = world.image()
    assert world.vouch("w")[2] != QUEUED
    assert world.acquire("w", phase)[0] == MISUSED
    assert world.count("op")[0] == MISUSED
    assert world.image() == before
    assert not world.pushes


def test_a_latch_whose_record_was_evicted_is_not_revoked_for_ever():
    world = LatchWorld()
    world.acquire("w")
    world.say("revoke", "op", "it was revoked")
    world.blind().server.remove(RECORD)
    assert world.acquire("w2")[0] == QUEUED
    assert world.acquire("w2")[0] == QUEUED
