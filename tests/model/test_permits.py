"""permits.lua by itself: a random walk of messages, doubled, late and by the dead, judged from outside after each one.

Theory. The messages are those of the header of permits.lua; the server is the simulator's, under a clock that the walk
moves. `World` reads off the keys what a message did: a new holder was granted something, a holder that is gone was
dropped. It holds each of these changes against the rules, whatever the message was, and remembers only what keys
forget: fences, tombstones, revocations, leases beside others. Below it: what hostile minds suspected.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("lupa")

from interlock._protocol.server import ServerError
from interlock.primitives.codes import (
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
from interlock.primitives.permits import ALL_PERMITS
from interlock.primitives.scripts import load
from model import script_model as walk
from model.script_model import ROUNDED, SOME
from simulator import commands

rule = pytest.mark.rule
NAMES = HOLDERS, RECORD, QUEUE, WAITERS, GONES, SHARES = b"k", b"record", b"queue", b"waiters", b"gone", b"shares"
RENEWED = (HOLDERS, RECORD, SHARES)


able = pytest.fixture(autouse=True)(walk.able)


@dataclass(frozen=True)
class Share:
    permits: int
    fence: int
    ends: float
    why: bytes


@dataclass(frozen=True)
class Waiter:
    wants: int
    live: bool
    mute: bool


DEAD = Waiter(0, False, False)


class World(walk.World):
    """A server with one name in it, and what was seen there."""

    def __init__(self, kind="semaphore", limit=2):
        super().__init__("permits", NAMES)
        self.kind, self.limit = kind, limit
        self.top = 0  # the newest fence
        self.fences = {}  # token -> fence of its lease
        self.beside = {}  # token -> the lease beside which it reads
        self.tombs = {}  # token -> until, ms
        self.given_back = set()  # tokens whose release found a lease that was theirs
        self.taken = {}  # token -> why its lease was taken by force
        self.granted = 0

    # Messages

    def acquire(self, token, permits=1, *, ttl=10_000, life=3000, heard=0, channel="c", wait="inf", limit=None,
                under="", kind=None):  # fmt: skip
        limit = self.limit if limit is None else limit
        return self.say("acquire", token, ttl, life, heard, channel, wait, kind or self.kind, permits, limit, under)

    def release(self, token, gone=0):
        return self.say("release", token, gone)

    def heartbeat(self, *tokens, heard=0, channel="c", life=3000):
        return self.say("heartbeat", channel, heard, *(arg for token in tokens for arg in (token, life)))

    def renew(self, token, ttl=10_000):
        return self.say("renew", token, ttl, keys=RENEWED)[0]

    def revoke(self, token, *, force=False, why="why not"):
        return self.say("revoke", token, int(force), why)

    def set_limit(self, limit, operation="op", kind=None):
        return self.say("limit", operation, kind or self.kind, limit)

    # What can be seen

    def see(self):
        return self.holders(), self.queue()

    def holders(self):
        """All that the keys say, the expired too."""
        shares = self.look(SHARES) or {}
        found = {}
        for token, ends in (self.look(HOLDERS) or {}).items():
            permits, fence, _, *why = shares.get(token, b"0 0 -").split(b" ", 3)
            found[token] = Share(int(permits), int(fence), ends, b" ".join(why))
        return found

    def live(self):
        now = self.now
        return {token: share for token, share in self.holders().items() if share.ends > now}

    def queue(self):
        """The waiters, in order."""
        self.server.read_clock()
        waiters, now, found = self.look(WAITERS) or {}, self.now, {}
        for token in self.server.ordered(QUEUE):
            if token not in waiters:
                found[token] = DEAD
                continue
            alive, _, heard, channel, *wants = waiters[token].split(b" ")
            found[token] = Waiter(int(wants[0]), float(alive) > now, heard == b"1" and channel in self.dumb)
        return found

    def known_limit(self):
        record = self.look(RECORD)
        return int(record.split(b" ")[6]) if record else None

    # The rules

    def judge(self, verb, args, reply, seen):
        before, queue = seen
        now, after, left = self.now, self.holders(), self.queue()
        token = args[0] if args else b""
        failed = isinstance(reply, ServerError)
        self.sum_is_right()
        self.nobody_lost_theirs(verb, args, before, after, now)
        self.grants(verb, args, before, after, queue, left, now)
        self.queue_keeps_its_order(verb, token, queue, left)
        for each in after.keys() | left.keys():
            assert self.tombs.get(each, 0) <= now, f"{each} is dead, and got something"
        if verb == "acquire" and not failed:
            self.bound_is_kept(token, args[5], reply, queue, left)
        if not failed:
            getattr(self, "after_" + verb, lambda *_: None)(token, args, reply, before, after, now)
        # Else the next message makes the progress: a waiter that no push wakes had its turn because it asked.
        heard = not queue.get(token, DEAD).mute and not left.get(token, DEAD).mute
        if not failed and not self.server.full and heard and self.settled(verb, reply):
            newcomer = token if verb == "acquire" and reply[0] == QUEUED and not queue.get(token, DEAD).live else None
            self.progress(queue, left, after, newcomer)

    def sum_is_right(self):
        shares, holders = dict(self.look(SHARES) or {}), self.look(HOLDERS) or {}
        total = int(shares.pop(b"sum", b"0"))
        assert shares.keys() == holders.keys(), "holders and shares differ"
        assert total == sum(int(share.split(b" ")[0]) for share in shares.values()), f"the sum is wrong: {total}"

    def nobody_lost_theirs(self, verb, args, before, after, now):
        """A holder is gone only if it released, was revoked by force, or has expired; no other share changes."""
        for token, was in before.items():
            if was.ends <= now + ROUNDED or (
                token == args[:1][0] and (verb == "release" or (verb == "revoke" and args[1] == b"1"))
            ):
                continue
            assert token in after, f"{token} lost its share"
            is_now = after[token]
            assert (is_now.permits, is_now.fence) == (was.permits, was.fence), f"the share of {token} changed"
            assert is_now.ends >= was.ends, f"the lease of {token} was shortened"
            assert not was.why or is_now.ends == was.ends, f"{token} is revoked, and was lengthened"

    def grants(self, verb, args, before, after, queue, left, now):
        new = sorted(
            (token for token, share in after.items() if token not in before or before[token].fence != share.fence),
            key=lambda token: after[token].fence,
        )
        places = list(queue)
        for place in {token: places.index(token) if token in queue else len(places) for token in new}.items():
            token, at = place
            assert after[token].fence > self.top, f"the fence of {token} does not grow"
            self.top = after[token].fence
            self.fences[token] = self.top
            self.beside.pop(token, None)
            self.granted += 1
            under = args[9] if verb == "acquire" and args[0] == token else b""
            if under in before and before[under].ends > now:
                self.beside[token] = self.beside.get(under, under)
                continue
            for earlier in places[:at]:
                waits = queue[earlier].live and earlier in left and earlier not in after
                asks = verb == "acquire" and earlier == args[0]  # the reply reaches it, if no push does
                waits = waits and (asks or not (queue[earlier].mute or left[earlier].mute))
                assert not waits, f"{token} overtook {earlier}"
        inside = {token: share for token, share in after.items() if share.ends > now}
        used = sum(share.permits for share in inside.values())
        if set(new) - self.beside.keys():
            assert used <= self.known_limit(), f"{used} permits are out"
        writers = [token for token, share in inside.items() if share.permits == ALL_PERMITS]
        assert len(writers) <= 1
        for writer in writers:
            others = {token for token in inside if token != writer and self.beside.get(token) != writer}
            assert not others, f"others beside the writer {writer}: {others}"

    def queue_keeps_its_order(self, verb, token, queue, left):
        again = {token} if verb == "acquire" and not queue.get(token, DEAD).live else set()  # the dead lose their place
        staying = [each for each in queue if each in left and each not in again]
        assert [each for each in left if each not in again] == staying, "the queue was shuffled"
        assert not again & left.keys() or token in queue or list(left)[-1] == token

    @staticmethod
    def bound_is_kept(token, most, reply, queue, left):
        """A waiter stays. A newcomer waits if fewer live waiters are there than its bound says, and else is refused."""
        was_there = queue.get(token, DEAD).live
        if reply[0] == QUEUED and token not in queue:
            assert len(left) <= float(most), "one more than may wait"
        if reply[0] == CROWDED:
            assert reply[1] == len(left) >= float(most), f"refused, though {len(left)} wait"
            assert not was_there, "refused, though it waits already"
            assert token not in left
            assert len(queue) > SOME or all(waiter.live for waiter in left.values()), "the dead keep it out"

    @staticmethod
    def settled(verb, reply):
        if verb == "acquire":
            return reply[0] in {GRANTED, QUEUED, BUSY, LIMIT_MISMATCH, CROWDED}
        if verb == "release":
            return reply[1] == 0
        return verb == "heartbeat" and reply[0] != -3

    def progress(self, queue, left, after, newcomer):
        """The oldest has been granted what fits. A newcomer may stand behind a waiter that no push can wake."""
        now, limit = self.now, self.known_limit()
        live = {token: waiter for token, waiter in left.items() if waiter.live}
        if len(after.keys() & left.keys()) >= 32:
            return  # as many as one step lets in: each goes on with it when it confirms
        if any(not waiter.mute for waiter in [*live.values(), *queue.values()]):
            live = {token: waiter for token, waiter in live.items() if not waiter.mute}
        waiting = [token for token in live if token not in after or after[token].ends <= now]
        if waiting and limit is not None and (waiting[0] != newcomer or len(left) == 1):
            free = limit - sum(share.permits for share in after.values() if share.ends > now)
            assert live[waiting[0]].wants > free, f"{waiting[0]} fits and was not granted"

    def after_acquire(self, token, args, reply, before, after, now):
        mine = after.get(token)
        was = before.get(token)
        held = was is not None and was.ends > now + ROUNDED
        if reply[0] == GRANTED:
            assert mine, "granted, and nothing there"
            assert reply[1] == mine.fence == self.fences[token]
            assert mine.permits == int(args[7])
            assert mine.ends >= now + int(args[1]) - 1
            assert not held or was.fence == reply[1], "sent twice, granted twice"
            assert token not in self.queue()
        elif reply[0] == QUEUED:
            assert token in self.queue()
            assert not held
        elif reply[0] == REVOKED:
            assert held
            assert was.why
        elif reply[0] == NOT_FOUND:
            assert token in (self.look(GONES) or {})
            assert not held
        elif reply[0] == RETRY:
            self.spins()
        else:
            assert reply[0] in {BUSY, LIMIT_MISMATCH, WRONG_KIND, CROWDED}
            assert not held or reply[0] == WRONG_KIND

    def spins(self):
        """A client answers RETRY by asking again at once: so RETRY must mean that this step got something done."""
        assert self.before_again != self.image(), "RETRY, but nothing was done: the client spins"

    def after_release(self, token, args, reply, before, after, now):
        was = before.get(token)
        ours = was is not None and was.ends > now and not was.why
        assert token not in after
        assert token not in self.queue()
        if reply[0]:
            assert ours or token in self.given_back, f"the release of {token}, that had nothing, found something"
        else:
            assert not ours, "it was ours"
        if ours:
            self.given_back.add(token)
        if args[1] != b"0":
            self.tombs[token] = max(self.tombs.get(token, 0), now + int(args[1]))

    def after_renew(self, token, args, reply, before, after, now):
        was = before.get(token)
        want = NOT_FOUND if was is None or was.ends <= now else [REVOKED, was.why[1:]] if was.why else GRANTED
        told = (
            want == NOT_FOUND and token in self.taken and reply == [[REVOKED, self.taken[token]]]
        )  # while it is known
        assert told or reply == [want]
        if want == GRANTED:
            assert after[token].ends >= now + int(args[1]) - 1

    def after_heartbeat(self, token, args, reply, before, after, now):
        queue = self.queue()
        for each, state in zip(args[2::2], reply[2:], strict=True):
            held = each in after and after[each].ends > now
            if held:
                assert state == GRANTED
            else:
                assert state in ({QUEUED} if each in queue else {NOT_FOUND, QUEUED})

    def after_revoke(self, token, args, reply, before, after, now):
        was = before.get(token)
        live = was is not None and was.ends > now
        assert reply[0] == int(live)
        if live and args[1] == b"1":
            self.taken[token] = args[2]
            assert token not in after or after[token].fence == was.fence, f"{token} got back what was taken from it"
            assert token not in after, f"{token} has it still"
        elif live:
            assert after[token].why == b"!" + args[2]

    def after_limit(self, token, args, reply, before, after, now):
        assert reply[0] == WRONG_KIND or reply == [GRANTED, self.known_limit()]

    before_again: object = None


class Walk(walk.Walk):
    """People who come, go, repeat themselves, come late, and die."""

    def __init__(self, seed, kind, limit):
        super().__init__(World(kind, limit), seed, kind, limit)
        self.people = []  # (token, permits, ttl, life, heard, channel, limit)

    def person(self):
        rnd, world = self.random, self.world
        if (len(self.people) < 8 and rnd.random() < 0.5) or not self.people:
            self.number += 1
            most = world.known_limit() or world.limit
            permits = rnd.randint(1, most) if world.kind == "semaphore" else rnd.choice((1, 1, 1, ALL_PERMITS))
            ttl = rnd.choice((500, 3000, 10_000))
            who = (
                b"t%d" % self.number,
                permits,
                ttl,
                min(3000, ttl),
                rnd.randint(0, 1),
                b"c%d" % rnd.randint(0, 3),
                most,
            )
            self.people.append(who)
        return rnd.choice(self.people)

    def say(self, verb, *args, keys=NAMES):
        self.sent.append((verb, args, keys))
        self.world.before_again = self.world.image()
        reply = self.world.say(verb, *args, keys=keys)
        if self.random.random() < 0.1:
            self.world.before_again = self.world.image()
            self.world.say(verb, *args, keys=keys)
        return reply

    def step(self):
        rnd, world = self.random, self.world
        world.clock += rnd.choice(
            (0, 0, 0, 0, 0, 0.001, 0.0004, 0.001, 0.3, 0.3, 0.3, 2, 10) if rnd.random() < 0.9 else (0,)
        )
        if rnd.random() < 0.02:
            world.server.full = not world.server.full and rnd.random() < 0.5
        if rnd.random() < 0.05:
            world.dumb ^= {b"c%d" % rnd.randint(0, 3)}
        token, permits, ttl, life, heard, channel, most = who = self.person()
        kind = world.kind
        match rnd.choices(
            ("acquire", "release", "heartbeat", "renew", "revoke", "limit", "late", "die", "inspect", "wrong"),
            (45, 20, 10, 8, 2, 1, 6, 6, 1, 1),
        )[0]:
            case "acquire":
                under = b""
                if kind == "rwlock" and permits == 1 and world.live() and rnd.random() < 0.3:
                    under = rnd.choice(sorted(world.live()))
                wait = rnd.choice(("0", "1", "3", "inf", "inf", "inf"))
                if rnd.random() < 0.9 and (limit := world.known_limit()) and permits <= limit:
                    most = limit  # it has heard
                self.say("acquire", token, ttl, life, heard, channel, wait, kind, permits, most, under)
            case "release":
                self.say("release", token, rnd.choice((0, 0, 60_000)))
                if rnd.random() < 0.8:
                    self.people.remove(who)
            case "heartbeat":
                some = [each for each in self.people if each[5] == channel]
                self.say("heartbeat", channel, heard, *(arg for each in some for arg in (each[0], each[3])))
            case "renew":
                self.say("renew", token, rnd.choice((ttl, 1, 20_000)), keys=RENEWED)
            case "revoke":
                self.say("revoke", token, rnd.randint(0, 1), "for no reason")
            case "limit":
                if kind == "semaphore":
                    self.say("limit", f"op{self.number}", kind, rnd.randint(1, 4))
            case "late":
                verb, args, keys = rnd.choice(self.sent[-300:] or [("inspect", (1,), NAMES)])
                self.say(verb, *args, keys=keys)
            case "die":
                self.people.remove(who)
            case "inspect":
                self.say("inspect", 100)
            case "wrong":
                wrong = "rwlock" if kind == "semaphore" else "semaphore"
                if world.known_limit():
                    reply = self.say("acquire", token, ttl, life, heard, channel, "inf", wrong, permits, most, "")
                    assert reply[0] == WRONG_KIND
                    assert self.say("limit", "x", wrong, 3)[0] == WRONG_KIND


@rule(1, 3, 4, 7, 8, 9)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "limit"), [*(("semaphore", n) for n in range(1, 5)), ("rwlock", ALL_PERMITS)])
def test_no_rule_of_permits_is_broken(kind, limit, seed):
    assert Walk(seed, kind, limit).run(2500).granted > 250


# What hostile minds suspected.


def test_the_dead_take_nobodys_place_in_a_bounded_queue():
    world = World(limit=1)
    world.acquire("holds", ttl=60_000)
    world.acquire("lives")
    for number in range(100):
        world.acquire(f"dies{number:02}")
    world.clock += 2
    world.heartbeat("lives")
    world.clock += 2
    code, waiting = world.acquire("comes", wait="1")
    assert (code, waiting in {101 - SOME, 102 - SOME}) == (CROWDED, True)  # one step looks at some of them only
    assert world.acquire("again", wait="100")[0] == QUEUED
    for _ in range(10):
        world.clock = round(world.clock + 0.0137, 6)
        code, waiting = world.acquire("third", wait="2")
        assert code == CROWDED
    assert waiting == 2, "dead ones remain"


def test_who_waits_is_not_refused_whatever_it_says_then():
    world = World(limit=1)
    world.acquire("holds")
    world.acquire("a", wait="2")
    world.acquire("b", wait="2")
    assert world.acquire("c", wait="2") == [CROWDED, 2]
    assert [world.acquire("b", wait=most)[0] for most in ("1", "2", "inf")] == [QUEUED] * 3
    world.release("a")
    assert world.acquire("c", wait="2")[0] == QUEUED


def test_more_leases_than_one_step_takes_run_out_at_once():
    """Nobody's share is counted twice, nobody's is lost, and all is free in the end."""
    world = World(limit=100)
    for number in range(70):
        assert world.acquire(f"dead{number:02}", ttl=1000)[0] == GRANTED
    world.clock += 2
    asked = 0
    while (reply := world.acquire("x", 100))[0] == RETRY:
        asked += 1
    assert reply[0] == GRANTED
    assert asked <= 3
    assert set(world.live()) == {b"x"}


@rule(1)
def test_a_waiter_whose_grant_lapsed_is_not_counted_twice():
    """Its old share is still there, behind more than one step takes, when it is granted anew."""
    world = World(limit=100)
    world.acquire("big", 60)
    for number in range(34):
        world.acquire(f"dead{number:02}", ttl=2990)
    assert world.acquire("w", 10)[0] == QUEUED
    world.release("big")
    assert b"w" in world.live()
    world.clock += 2.5
    world.heartbeat("w")  # it lives, and its confirmation is on its way
    world.clock += 0.7
    world.heartbeat("w")
    world.heartbeat("w")
    assert world.acquire("w", 10)[0] == GRANTED
    world.release("w")
    assert world.acquire("x", 100)[0] == GRANTED


def test_many_who_were_let_in_and_not_heard_of_do_not_make_the_others_spin():
    world = World(limit=64)
    assert world.acquire("all", 64)[0] == GRANTED
    for number in range(40):
        assert world.acquire(f"w{number:02}")[0] == QUEUED
    replies = [world.release("all")]
    while replies[-1][1] and len(replies) < 5:
        replies.append(world.release("all"))
    assert replies[-1][1] == 0, "the one who releases is kept for ever"
    world.before_again = world.image()
    assert world.acquire("newcomer", wait=0)[0] in {GRANTED, BUSY}


def test_a_crowd_of_readers_enters_with_a_few_commands_for_each():
    """Once, each confirmation looked one by one at the 31 readers that were granted and had not confirmed yet."""
    world, crowd = World("rwlock", ALL_PERMITS).blind(), [f"r{i}" for i in range(200)]
    world.acquire("w", ALL_PERMITS)
    for reader in crowd:
        assert world.acquire(reader)[0] == QUEUED
    counted, run = [], world.server.command
    world.server.command = lambda name, *args: counted.append(name) or run(name, *args)
    assert world.release("w") == [1, 0]
    for reader in crowd:
        assert world.acquire(reader)[0] == GRANTED
    assert len(counted) / len(crowd) < 50


def test_one_who_was_let_in_and_not_heard_of_does_not_make_the_others_spin():
    world = World(limit=2)
    world.acquire("a", 2)
    world.acquire("b")
    assert world.release("a") == [1, 0]
    world.before_again = world.image()
    assert world.acquire("c")[0] == GRANTED
    world.before_again = world.image()
    assert world.acquire("d")[0] == QUEUED
    assert world.heartbeat("d")[0] > 0


def test_a_limit_is_set_before_anybody_came():
    world = World(limit=2)
    assert world.set_limit(3) == [GRANTED, 3]
    world.clock += 299
    assert world.acquire("a", limit=2) == [LIMIT_MISMATCH, 3]


def test_a_limit_that_is_set_is_remembered_for_minutes():
    world = World(limit=2)
    world.acquire("a", ttl=1000)
    world.release("a")
    world.clock += 290
    world.set_limit(3)
    world.clock += 200
    assert world.acquire("b", limit=2) == [LIMIT_MISMATCH, 3]


@rule(8)
def test_a_late_copy_of_a_limit_undoes_nothing():
    world = World(limit=2)
    world.acquire("a")
    world.set_limit(3, "one")
    world.set_limit(4, "two")
    world.release("x", 1000)  # a short tombstone leaves the longer ones standing
    world.clock += 70
    assert world.set_limit(3, "one") == [GRANTED, 4]


@rule(8)
def test_a_short_tombstone_does_not_shorten_another():
    world = World(limit=2)
    world.release("a", 60_000)
    world.release("b", 1000)
    world.clock += 2
    assert world.acquire("a") == [NOT_FOUND]


def test_a_lowered_limit_lets_the_small_in_behind_the_large():
    world = World(limit=4)
    world.acquire("a", 3)
    world.acquire("large", 4)
    world.acquire("small", 1, limit=4)
    world.set_limit(4, "one")
    world.release("a")
    world.release("large")
    world.release("small")
    world.acquire("b", 2)
    world.acquire("large2", 4)
    world.acquire("small2", 1)
    world.set_limit(3, "two")
    world.heartbeat("small2")
    world.heartbeat("small2")
    assert b"small2" in world.live()
    assert (b"c", b"granted large2") in world.pushes


def test_who_leaves_for_another_limit_lets_the_next_in():
    world = World(limit=3)
    world.acquire("a", 2)
    world.acquire("large", 3)
    world.acquire("small", 1)
    world.set_limit(3)
    assert world.acquire("large", 3, limit=4) == [LIMIT_MISMATCH, 3]
    assert b"small" in world.live()


@rule(8)
def test_a_revoked_lease_is_given_back_as_nobody_s_twice():
    world = World(limit=2)
    world.acquire("a")
    world.revoke("a")
    assert world.renew("a") == [REVOKED, b"why not"]
    assert world.acquire("a") == [REVOKED, b"why not"]
    assert world.release("a") == [0, 0]
    assert world.release("a") == [0, 0]


def test_force_takes_it_from_one_who_has_not_confirmed_yet():
    world = World(limit=1)
    world.acquire("a")
    world.acquire("b")
    world.acquire("c")
    world.release("a")
    assert world.revoke("b", force=True)[0] == 1
    assert set(world.live()) == {b"c"}


def test_beside_is_for_readers():
    world = World(limit=1)
    world.acquire("a")
    assert world.acquire("b", under="a", wait=0)[0] == BUSY


def test_beside_nobody_is_as_alone():
    world = World("rwlock", ALL_PERMITS)
    assert world.acquire("w", ALL_PERMITS)[0] == GRANTED
    for under in ("nobody", "r", "sum"):
        assert world.acquire("r", under=under, wait=0)[0] == BUSY
    assert world.acquire("w2", ALL_PERMITS, under="w", wait=0)[0] == BUSY
    assert world.acquire("r", under="w")[0] == GRANTED
    world.acquire("w2", ALL_PERMITS)
    assert world.release("w") == [1, 0]
    assert world.acquire("r2", wait=0)[0] == BUSY  # w2 stands before it
    assert world.release("r") == [1, 0]
    assert set(world.live()) == {b"w2"}


@rule(7)
def test_the_clock_goes_back():
    world = World(limit=2)
    first = world.acquire("a", ttl=3000)[1]
    world.acquire("b")
    world.acquire("c", 2)
    world.server.skew = -5.0
    world.release("b")
    world.renew("a", 3000)
    assert world.acquire("d", wait=0)[0] == BUSY
    world.clock += 1
    world.release("a")
    assert world.acquire("c", 2)[1] > first
    world.clock += 3
    world.release("c")
    world.clock += 320
    assert world.acquire("e")[1] > first


def used_up(world):
    """How many permits are gone that nobody has."""
    return int((world.look(SHARES) or {}).get(b"sum", b"0")) - sum(share.permits for share in world.live().values())


def test_holders_that_are_deleted_do_not_keep_their_permits_for_ever():
    world = World(limit=3)
    world.acquire("a", 2)
    world.blind().server.remove(HOLDERS)
    assert world.acquire("b")[0] == GRANTED
    for _ in range(20):
        world.clock += 3
        assert world.renew("b") == GRANTED
    assert used_up(world) == 0
    assert world.acquire("c", 2)[0] == GRANTED


def test_shares_that_were_evicted_end_their_leases():
    world = World(limit=2)
    world.acquire("a", 2)
    world.blind().server.remove(SHARES)
    assert world.renew("a") == NOT_FOUND
    assert world.say("execute", "a", "GET", "x") == [NOT_FOUND]
    assert not isinstance(world.revoke("a"), ServerError)
    assert world.acquire("a", 2)[0] in {NOT_FOUND, RETRY} or world.acquire("a", 2)[1:] != []
    assert not isinstance(world.release("a"), ServerError)
    assert world.acquire("b", 2)[0] == GRANTED
    assert used_up(world) == 0


@pytest.mark.parametrize("key", [QUEUE, WAITERS])
def test_waiters_that_were_evicted_ask_again(key):
    """A heartbeat that finds no entry of its waiter must not leave an entry that no script can read."""
    world = World(limit=2)
    world.acquire("a", 2)
    world.acquire("b")
    world.blind().server.remove(key)
    assert not isinstance(world.heartbeat("b"), ServerError)
    assert world.release("a") == [1, 0]
    assert world.acquire("b")[0] == GRANTED


def test_a_record_that_was_evicted_is_written_anew():
    world = World(limit=1)
    fence = world.acquire("a")[1]
    world.blind().server.remove(RECORD)
    assert world.acquire("b")[0] == QUEUED
    assert world.known_limit() == 1
    world.clock += 0.5
    assert world.release("a") == [1, 0]
    assert world.acquire("b")[1] > fence


@pytest.mark.parametrize("noted", [False, True], ids=["gone", "noted as unknown"])
def test_who_confirms_after_the_record_was_evicted_leaves_no_limit_of_nothing(noted):
    """A record with the limit 0 would refuse every caller, and without a TTL for ever."""
    world = World("rwlock", limit=ALL_PERMITS)
    world.acquire("a", ALL_PERMITS, ttl=9_000)
    world.acquire("b", ALL_PERMITS)
    assert world.release("a") == [1, 0]  # hands over to b
    world.blind().server.remove(RECORD)
    if noted:  # by a client that was in a quarantine
        world.server.data[RECORD] = b"1 unknown 0 old>new>0+0 0 - 0"
        world.server.expires[RECORD] = world.server.now_ms + 600_000
    assert world.acquire("b", ALL_PERMITS)[0] == GRANTED
    assert world.look(RECORD) is None or (world.known_limit() == ALL_PERMITS and RECORD in world.server.expires)
    assert world.acquire("c")[0] == QUEUED
    assert world.release("b") == [1, 0]
    assert world.acquire("c")[0] == GRANTED


@rule(3, 7)
@pytest.mark.parametrize("dead", [False, True], ids=["all live", "the head is dead"])
def test_a_waiter_whose_record_was_evicted_waits_for_a_free_permit_no_longer(dead):
    """Only a waiter knows the limit: the head must say it again."""
    world = World(limit=1)
    world.acquire("a")
    if dead:
        world.acquire("dead")
        world.clock += 2
    world.acquire("b")
    world.blind().server.remove(RECORD)
    world.clock += 2
    assert world.release("a") == [1, 0]
    assert world.heartbeat("b")[2] == RETRY
    assert world.acquire("b")[0] == GRANTED
    assert world.known_limit() == 1


@rule(10)
@pytest.mark.parametrize("confirms", [True, False], ids=["confirms a handover", "asks when it is free"])
@pytest.mark.parametrize("ttl", [9_000, 3_600_000])
def test_the_record_knows_the_ttl_of_a_waiter_and_outlives_its_lease(confirms, ttl):
    world = World(limit=1)
    world.acquire("a", ttl=1000)
    world.acquire("b", ttl=ttl)
    if confirms:
        world.release("a")
    else:
        world.clock += 1.5
    assert world.acquire("b", ttl=ttl)[0] == GRANTED
    assert int(world.look(RECORD).split()[4]) == ttl
    assert world.server.expires[RECORD] > world.live()[b"b"].ends + 150_000


def test_one_key_of_a_wrong_type_does_not_stop_the_other_renewals():
    world = World()
    world.acquire("a")
    world.server.data[b"other"] = commands.ZSet({b"x": 9e15})
    world.server.data[b"other shares"] = b"a string"
    reply = world.server.eval(
        world.source, (b"other", b"r", b"other shares", *RENEWED), [b"renew", b"x", b"1", b"a", b"1", walk.EPOCH]
    )
    assert reply[1] == GRANTED


@pytest.mark.runs_on("each server and way", full="every combination")
def test_out_of_memory_nothing_is_half_done(clean):
    """On a real server: what it refuses has left nothing, and giving back always works."""
    source, count = load("permits").source, len(NAMES)

    def say(*args):
        try:
            return clean.eval(source, count, *NAMES, *args, walk.EPOCH)
        except Exception as error:
            return str(error)

    def acquire(token, permits):
        return say("acquire", token, 10_000, 3000, 0, "c", "inf", "semaphore", permits, 2, "")

    assert acquire("a", 2)[0] == GRANTED
    assert acquire("b", 1)[0] == QUEUED
    try:
        clean.config_set("maxmemory", 1)
        reply = acquire("new", 1)
        assert "OOM" in reply if isinstance(reply, str) else reply[0] == QUEUED
        assert say("release", "a", 0) == [1, 0]
        assert say("release", "a", 0) == [1, 0]
        say("heartbeat", "c", 0, "b", 3000)
    finally:
        clean.config_set("maxmemory", 0)
    assert acquire("b", 1)[0] == GRANTED
    total, *shares = (clean.hget(SHARES, "sum"), *(v for k, v in clean.hgetall(SHARES).items() if k != b"sum"))
    assert int(total) == sum(int(share.split()[0]) for share in shares)
    assert clean.zcard(HOLDERS) == len(shares)
